"""Tables whose rows `tensor` does not divide, and key-value heads fewer than it, keep their own shapes."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshwright as mw
from meshwright.config import load_config
from meshwright.contrib.trained import sample_run
from meshwright.hardware import Fleet
from meshwright.trainer.checkpoint import Checkpoints, checkpoint_of, export_parameters, restore
from meshwright.trainer.step import build_step

pytestmark = pytest.mark.quick

P = PartitionSpec
RUN = ("model.num_kv_heads=2", "model.vocab_size=259", "model.num_layers=1", "batch.sequence_length=16")
SMALL = ("batch.sequences=8", "evaluation.every_steps=2", "evaluation.batches=1")


@pytest.mark.parametrize(
    ("axes", "zero1", "columns"),
    [
        ({"tensor": 4}, "false", "tensor"),
        ({"fsdp": 2, "tensor": 2}, "false", ("fsdp", "tensor")),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "true", ("fsdp", "data", "tensor")),
    ],
)
def test_between_steps_tensor_splits_the_columns_of_a_table_and_no_row_is_padding(axes, zero1, columns, mesh):
    state = build_step(load_config("bytes-nano", (*RUN, f"zero1={zero1}")), mesh(**axes)).state
    for tree in (state["parameters"], state["optimizer"][1][0].mu):
        for name in ("embedding", "head"):
            assert tree[name].shape == (259, 64)
            assert tree[name].sharding.spec == P(None, columns)


@pytest.mark.once
@pytest.mark.parametrize(
    ("more", "num_rows"),
    [
        pytest.param((), 259, id="padded"),
        pytest.param(("model.vocab_size=260",), 260, id="in parts", marks=pytest.mark.wide),
        pytest.param(("model.tied_embeddings=true",), 259, id="tied"),
    ],
)
def test_a_checkpoint_with_stages_has_whole_tables_and_is_restored_on_other_layouts(
    more, num_rows, mesh, tmp_path
):
    config = load_config("bytes-nano", (*RUN, "model.num_layers=3", "batch.microbatch_sequences=1", *more))
    layouts = ({"stage": 2, "tensor": 2}, {}, {"stage": 4}, {"fsdp": 4, "tensor": 2})
    built = [build_step(config, mesh(**axes)) for axes in layouts]
    with_stages, alone = (each.init(np.uint32(3)) for each in built[:2])
    for path, leaf in jax.tree_util.tree_leaves_with_path(with_stages):
        is_table = jax.tree_util.keystr(path).endswith(("['embedding']", "['head']"))
        assert not is_table or leaf.shape == (num_rows, 64)
    checkpoints = Checkpoints(tmp_path, num_layers=3)
    checkpoints.save(1, with_stages, {})
    for other in built:
        restored = restore(checkpoints.newest(), other.state, num_layers=3)
        for name in ("embedding", "final_norm"):
            assert are_equal(restored["parameters"][name], alone["parameters"][name])
    checkpoints.close()


@pytest.mark.parametrize("num_rows", [259, pytest.param(260, marks=pytest.mark.wide)])
def test_stages_gather_a_head_once_a_step_unless_each_has_all_of_it_padded(num_rows):
    """For the loss, gradients of 8 microbatches of 16 positions are gathered too, 64 numbers each."""
    more = ("model.tied_embeddings=true", f"model.vocab_size={num_rows}", "model.num_layers=2", *SMALL)
    more += ("batch.microbatch_sequences=1", "precision=fp32", "data.source=synthetic")
    weighed = mw.weigh("bytes-nano", on="2xCPU", layout="stage=2", overrides=(*RUN, *more))
    gathered = sum(item.payload_bytes for item in weighed.ledger.traffic if item.kind == "all-gather")
    head = 0 if num_rows % 2 else num_rows * 64 * 4
    assert gathered == 8 * 16 * 64 * 4 + head


def test_key_value_heads_are_whole_where_tensor_has_more_devices(mesh):
    config = load_config("bytes-nano", (*RUN, "model.qkv_bias=true"))
    attention = build_step(config, mesh(tensor=4)).state["parameters"]["layers"]["attention"]
    assert attention["key"].sharding.spec == P(None, None, None, None)
    assert attention["value_bias"].sharding.spec == P(None, None, None)
    assert attention["query"].sharding.spec == P(None, None, "tensor", None)


def are_equal(one, other):
    same = jax.tree.map(lambda a, b: bool((np.array(a) == np.array(b)).all()), one, other)
    return all(jax.tree.leaves(same))


def test_a_checkpoint_is_restored_on_other_layouts(mesh, tmp_path):
    config = load_config("bytes-nano", RUN)
    built = [build_step(config, mesh(**axes)) for axes in ({"tensor": 4}, {}, {"fsdp": 4, "tensor": 2})]
    state = built[0].init(np.uint32(3))
    assert are_equal(state, built[1].init(np.uint32(3)))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    for other in built:
        assert are_equal(restore(checkpoints.newest(), other.state), state)
    checkpoints.close()


@pytest.mark.wide
def test_the_models_flops_are_those_of_one_device():
    more = (*RUN, *SMALL, "data.source=synthetic")
    one, many = (
        mw.weigh("bytes-nano", on="8xCPU", layout=layout, overrides=more)
        for layout in ("data=8", "data=2,tensor=4")
    )
    assert many.ledger.flops.model == one.ledger.flops.model
    tokens = 8 * 16
    padding = 6 * tokens * (384 - 259) * 64  # of the head; of keys and values, one copy more of each head
    assert many.ledger.flops.executed - one.ledger.flops.executed == padding + 6 * tokens * 2 * 64 * 32
    assert "other" not in many.ledger.memory.by_category or many.ledger.memory.by_category["other"] < 4096


@pytest.mark.wide
def test_a_run_goes_on_with_another_layout_and_is_exported_and_sampled(tmp_path):
    folder, data = tmp_path / "run", ("data.source=python-stdlib", "checkpoint.every_steps=2")
    first = mw.train(
        "bytes-nano",
        on="4xCPU",
        overrides=[*(*RUN, *SMALL, *data), "layout=tensor=4"],
        steps=2,
        folder=folder,
    )
    again = mw.train(
        folder=folder, on="1xCPU", overrides={"layout": "data=1"}, steps=4, session=mw.Session(resume=True)
    )
    assert again.measurement.resumed_from == 2
    alone = mw.train(
        "bytes-nano", on="1xCPU", steps=4, folder=tmp_path / "alone", overrides=(*RUN, *SMALL, *data)
    )
    found, wanted = again.measurement.losses, alone.measurement.losses
    assert [found[step] for step in wanted] == pytest.approx(list(wanted.values()), rel=1e-5)
    assert first.measurement.losses[2] == pytest.approx(wanted[2], rel=1e-5)
    to = tmp_path / "model.safetensors"
    export_parameters(checkpoint_of(folder, 2), to)
    arrays = pytest.importorskip("safetensors.numpy").load_file(to)
    assert arrays["head"].shape == arrays["embedding"].shape == (259, 64)
    assert arrays["layers.attention.key"].shape[-2:] == (2, 16)
    told = {"num_tokens": 8, "temperature": 1.0, "step": 2, "fleet": Fleet.parse("1xCPU")}
    assert len(sample_run(folder, prompt="import", **told).tokens) == 8
