"""One step on one device, and the same step on eight simulated ones; shards, ZeRO-1."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.config import load_config
from meshwright.trainer.checkpoint import Checkpoints, restore
from meshwright.trainer.data import open_data
from meshwright.trainer.models import Parameter, initial_parameters
from meshwright.trainer.step import abstract_batch, build_step, whole_over_replicas

pytestmark = pytest.mark.quick

# One step on one device, and the same step on eight simulated ones.


NANO = ("data.source=synthetic", "batch.sequences=16", "batch.sequence_length=32", "model.num_kv_heads=4")
NANO += ("model.embed_dim=32", "model.mlp_dim=64", "model.vocab_size=64")
GPT = (*NANO, "model.norm=layer", "model.bias=true", "model.mlp=plain", "model.activation=gelu")
GPT += (
    "model.position=learned",
    "model.rope_theta=none",
    "model.max_positions=32",
    "model.tied_embeddings=true",
)
NUM_STEPS = 3
ALL_THREE = {"data": 2, "fsdp": 2, "tensor": 2}


@dataclass
class Trained:
    """A state at the seed, and what three steps from it told."""

    initial: dict
    losses: list[float]
    norms: list[float]
    rates: list[float]


def batches_of(config, built):
    """The run's batches, as [microbatches, rows, ...]."""
    data = open_data(config)

    def place(x, like):
        return jax.device_put(x.reshape(like.shape), like.sharding)

    for index in range(NUM_STEPS):
        yield jax.tree.map(place, data.batch(index, "train"), built.batch)


@pytest.fixture(scope="module")
def built_on():
    """A preset with overrides, built on a layout; each compiled once."""

    @functools.cache
    def build(mesh, preset, *overrides):
        config = load_config(preset, overrides)
        return config, build_step(config, mesh)

    return build


def put(state, built):
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, built.state)


@pytest.fixture(scope="module")
def trained(built_on):
    """Three steps of a preset with overrides on a layout; each run once."""
    starts = {}

    @functools.cache
    def train(mesh, preset, *overrides):
        config, built = built_on(mesh, preset, *overrides)
        key = (mesh, config.model)  # however the batch is cut
        if key not in starts:
            starts[key] = jax.tree.map(np.asarray, built.init(np.uint32(config.seed)))
        state, metrics = put(starts[key], built), []
        for batch in batches_of(config, built):
            state, metric = built.step(state, batch)
            metrics.append(jax.tree.map(float, metric))
        names = ("loss", "gradient_norm", "learning_rate")
        return Trained(starts[key], *([metric[name] for metric in metrics] for name in names))

    return train


def equal(mine, theirs):
    """Return whether two trees are bitwise equal, leaf by leaf."""
    return [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)]


IN_TWO = ("batch.microbatch_sequences=2",)  # of the rows of each of four replicas
# The model of both, and what changes none of its numbers. `make test` has tensor alone in
# tests/test_layouts.py.
CASES = [
    pytest.param({"fsdp": 8}, NANO, (), id="fsdp=8", marks=pytest.mark.wide),
    pytest.param(ALL_THREE, GPT, IN_TWO, id="all three in two, as GPT-2"),
    pytest.param(ALL_THREE, NANO, ("zero1=true", *IN_TWO), id="ZeRO-1 in two"),
    pytest.param(
        *(ALL_THREE, NANO, ("offload=both", "remat=full", *IN_TWO)),
        id="offloaded, in two",
        marks=pytest.mark.wide,
    ),
    pytest.param(ALL_THREE, NANO, ("offload=all", "remat=full", *IN_TWO), id="state offloaded, in two"),
    *(
        pytest.param(axes, NANO, more, id=name, marks=pytest.mark.wide)
        for name, axes, more in (
            ("data=8 in two", {"data": 8}, ("batch.microbatch_sequences=1",)),
            ("tensor=4 in two", {"tensor": 4}, ("batch.microbatch_sequences=8",)),
            ("all three", ALL_THREE, ()),
            ("all three in two", ALL_THREE, IN_TWO),
            ("ZeRO-1", {"data": 4, "fsdp": 2}, ("zero1=true",)),
            ("ZeRO-1 over context", {"data": 2, "context": 4}, ("zero1=true",)),
            (
                "ZeRO-1 over context outside of data in two",
                {"context": 4, "data": 2},
                ("zero1=true", *IN_TWO),
            ),
            ("ZeRO-1 over context, tensor", {"context": 4, "tensor": 2}, ("zero1=true", *IN_TWO)),
            ("ZeRO-1 over context, stages", {"stage": 2, "context": 4}, ("zero1=true", *IN_TWO)),
        )
    ),
    *(
        pytest.param(axes, NANO, more, id=name, marks=pytest.mark.long)
        for name, axes, more in (
            ("data=8", {"data": 8}, ()),
            ("fsdp=8 in two", {"fsdp": 8}, ("batch.microbatch_sequences=1",)),
            ("tensor=4", {"tensor": 4}, ()),
        )
    ),
]


@pytest.mark.parametrize(("axes", "model", "more"), CASES)
def test_layouts_and_microbatches_give_the_losses_of_one_device_and_one_batch(
    axes, model, more, mesh, trained
):
    alone = trained(mesh(), "bytes-nano", *model)
    found = trained(mesh(**axes), "bytes-nano", *model, *more)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms, alone.norms, rtol=1e-4)
    assert all(equal(found.initial, alone.initial))


@pytest.mark.parametrize(("preset", "axes"), [("linear", {"data": 2, "fsdp": 4}), ("cruncher", ALL_THREE)])
def test_layouts_of_rows_give_the_losses_of_one_device(preset, axes, mesh, trained):
    alone, found = trained(mesh(), preset), trained(mesh(**axes), preset)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-5)
    assert all(equal(found.initial, alone.initial))


def test_the_losses_fall_and_the_learning_rate_is_told(mesh, trained):
    run = trained(mesh(), "linear")
    assert run.losses[2] < run.losses[1] < run.losses[0]
    assert run.rates == pytest.approx([0.1] * 3)


def test_two_runs_of_one_seed_are_bitwise_equal_and_of_two_seeds_are_not(mesh, built_on):
    config, built = built_on(mesh(**ALL_THREE), "bytes-nano", *NANO, *IN_TWO)
    ends = []
    for seed in (0, 0, 1):
        state = built.init(np.uint32(seed))
        for batch in batches_of(config, built):
            state, _ = built.step(state, batch)
        ends.append(state["parameters"])
    assert all(equal(ends[0], ends[1]))
    assert not any(equal(ends[0], ends[2]))


def replicated_over(tree, axis):
    """Paths of the arrays of which every device along `axis` holds the same."""

    def is_split(leaf):
        return any(axis in (part if isinstance(part, tuple) else (part,)) for part in leaf.sharding.spec)

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) for path, leaf in leaves if not is_split(leaf)}


COUNTS = {"['optimizer'][1][0].count"}  # Adam's, after clipping
BARE = {"['key']", "['step']"}


def test_only_the_step_the_key_and_the_counts_are_replicated_over_fsdp(mesh):
    state = build_step(load_config("bytes-nano"), mesh(**ALL_THREE)).state
    assert replicated_over(state, "fsdp") == BARE | COUNTS


def test_only_those_and_the_norms_are_replicated_over_tensor(mesh):
    state = build_step(load_config("bytes-nano"), mesh(**ALL_THREE)).state
    norms = {"['final_norm']['scale']"}
    norms |= {f"['layers']['{name}_norm']['scale']" for name in ("attention", "mlp")}
    of_state = {f"{place}{norm}" for place in MOMENTS for norm in norms}
    assert replicated_over(state, "tensor") == BARE | COUNTS | of_state


MOMENTS = ("['parameters']", "['optimizer'][1][0].mu", "['optimizer'][1][0].nu")


def test_biases_of_what_tensor_splits_are_replicated_over_fsdp_too(mesh):
    """They have no `embed` dimension: a vector of a matrix's outputs, which tensor alone splits."""
    state = build_step(load_config("bytes-nano", GPT), mesh(**ALL_THREE)).state
    attention = {f"['layers']['attention']['{name}_bias']" for name in ("query", "key", "value")}
    biases = attention | {"['layers']['mlp']['up_bias']"}
    of_state = {f"{place}{bias}" for place in MOMENTS for bias in biases}
    assert replicated_over(state, "fsdp") == BARE | COUNTS | of_state


def test_of_rows_only_the_step_and_the_key_are_replicated_over_fsdp(mesh):
    for preset in ("linear", "cruncher"):
        config = load_config(preset, ("optimizer.momentum=0.9",))
        state = build_step(config, mesh(**ALL_THREE)).state
        assert replicated_over(state, "fsdp") == BARE
    assert replicated_over(state["parameters"], "tensor") == {"['head']"}  # [width, 1]


def test_moments_lie_where_their_parameters_lie(mesh):
    state = build_step(load_config("bytes-nano"), mesh(**ALL_THREE)).state
    wanted = jax.tree.map(lambda leaf: leaf.sharding, state["parameters"])
    adam = state["optimizer"][1][0]
    for moment in (adam.mu, adam.nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, moment) == wanted


def test_the_state_comes_out_as_it_went_in_and_is_donated(mesh):
    config = load_config("linear", ("optimizer.momentum=0.9",))
    built = build_step(config, mesh(data=2, fsdp=4))
    state = built.init(np.uint32(0))
    before = jax.tree.leaves(state)
    after, metrics = built.step(state, next(batches_of(config, built)))
    for leaf, like in zip(jax.tree.leaves(after), jax.tree.leaves(built.state), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    assert after["step"] == 1
    assert set(metrics) == {"loss", "gradient_norm", "learning_rate", "applied"}
    assert all(leaf.is_deleted() for leaf in before if leaf.ndim)


def test_evaluation_is_the_loss_before_the_step_over_all_microbatches(mesh):
    config = load_config("linear", ("batch.microbatch_sequences=16",))
    built = build_step(config, mesh())
    state, batch = built.init(np.uint32(0)), next(batches_of(config, built))
    assert jax.tree.leaves(batch)[0].shape[0] == 4
    held_out = float(built.evaluate(state["parameters"], {}, batch)["loss"])
    _, metrics = built.step(state, batch)
    assert held_out == pytest.approx(float(metrics["loss"]), rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step(mesh, bad):
    config = load_config("linear", ("optimizer.momentum=0.9",))
    built = build_step(config, mesh())
    state, batch = built.init(np.uint32(0)), next(batches_of(config, built))
    before = jax.tree.map(np.asarray, state)
    spoilt = {**batch, "targets": batch["targets"].at[0, 3].set(bad)}
    found = jax.tree.map(int, built.inspect(state, spoilt))
    state, metrics = built.step(state, spoilt)
    assert int(metrics["applied"]) == 0
    assert state["step"] == 1
    assert all(equal({**state, "step": 0}, {**before, "step": 0}))
    assert found["batch"] == {"inputs": 0, "targets": 1}
    assert found["parameters"] == {"weight": 0}
    assert found["loss"] == 1
    state, metrics = built.step(state, batch)
    assert int(metrics["applied"]) == 1
    assert not any(equal(state["parameters"], before["parameters"]))


def test_evaluation_drops_nothing(mesh):
    overrides = (*NANO, "model.dropout=0.5", "model.num_layers=1")
    configs = (load_config("bytes-nano", over) for over in (overrides, (*NANO, "model.num_layers=1")))
    built = (build_step(config, mesh()) for config in configs)
    dropping, plain = (b.evaluate.lower(b.state["parameters"], {}, b.batch).as_text() for b in built)
    assert dropping == plain


@pytest.mark.once
def test_dropout_differs_by_step_and_by_microbatch(mesh):
    """Learning changes nothing here, and all tokens are alike: only what is dropped can differ."""
    overrides = (*NANO, "model.dropout=0.5", "optimizer.learning_rate=1e-30", "optimizer.weight_decay=0.0")
    overrides += ("batch.microbatch_sequences=8",)
    losses, start = {}, None
    for sequences in (8, 16):
        config = load_config("bytes-nano", (*overrides, f"batch.sequences={sequences}"))
        built = build_step(config, mesh())
        start = start or jax.tree.map(np.asarray, built.init(np.uint32(0)))
        tokens = np.broadcast_to(np.arange(33, dtype=np.int32), built.batch["tokens"].shape)
        state, losses[sequences] = put(start, built), []
        for _ in range(2):
            state, metrics = built.step(state, {"tokens": jax.numpy.array(tokens)})
            losses[sequences].append(float(metrics["loss"]))
    assert losses[8][0] != losses[8][1]
    assert losses[16][0] != losses[16][1]
    assert losses[16][0] != losses[8][0]  # the first of its two microbatches is the same: the second is not


def test_a_batch_is_split_over_replicas_alone(mesh):
    built = build_step(load_config("bytes-nano", (*NANO, "batch.microbatch_sequences=2")), mesh(**ALL_THREE))
    tokens = built.batch["tokens"]
    assert tokens.shape == (2, 8, 33)  # two microbatches of two sequences for each of four replicas
    assert tokens.sharding.spec == PartitionSpec(None, ("data", "fsdp"))


TOKENS = ["data.source=tokens", "data.path=absent.bin", "data.dtype=uint16"]
TALKS = ["data.source=instructions", "data.path=absent.jsonl", "data.tokenizer=bytes"]


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (TOKENS, ["tokens"]),
        ([*TOKENS, "data.documents=packed", "data.end_of_document=0"], ["segments", "tokens"]),
        (TALKS, ["answers", "segments", "tokens"]),
    ],
)
def test_packed_documents_have_a_segment_for_each_token(data: list[str], wanted: list[str], mesh):
    batch = abstract_batch(load_config("bytes-nano", [*data, "batch.microbatch_sequences=2"]), mesh(data=2))
    assert sorted(batch) == wanted
    for array in batch.values():
        assert array.shape == (2, 4, 65)  # 8 sequences: 2 microbatches of 2 for each of 2 replicas
        assert array.dtype == jnp.int32
        assert tuple(array.sharding.spec) == (None, "data")


@pytest.mark.parametrize(("preset", "side"), [("lenet-fashion", 28), ("resnet18-fashion", 96)])
def test_images_of_files_have_weights_and_images_made_from_the_seed_have_none(preset, side, mesh):
    batch = abstract_batch(load_config(preset), mesh(data=2))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "images": ((1, 256, 1, side, side), jnp.float32),
        "labels": ((1, 256), jnp.int32),
        "weights": ((1, 256), jnp.float32),
    }
    assert "weights" not in abstract_batch(load_config(preset, ["data.source=synthetic"]), mesh(data=2))


# Where ZeRO-1's state lies, and what a step makes of it (test_build.py: it trains as one device does).


P = PartitionSpec
DECLARED = {
    "matrix": Parameter(shape=(8, 4), dims=("embed", "mlp"), fan_in=8),
    "router": Parameter(shape=(8, 4), dims=("embed", "mlp"), fan_in=8, wide=True),
    "scale": Parameter(shape=(8,), dims=("embed",), initial="ones"),
}


def test_parameters_and_moments_are_split_over_fsdp_and_data(mesh):
    state = build_step(load_config("bytes-nano", ["zero1=true"]), mesh(data=2, fsdp=2, tensor=2)).state
    adam = state["optimizer"][1][0]
    for tree in (state["parameters"], adam.mu, adam.nu):
        assert tree["layers"]["mlp"]["up"].sharding.spec == P(None, ("fsdp", "data"), "tensor")
        assert tree["final_norm"]["scale"].sharding.spec == P(("fsdp", "data"))


@pytest.mark.parametrize(
    ("axes", "of_norms", "of_last"),
    [
        ({"data": 2, "context": 4}, 8, 8),
        ({"context": 4, "tensor": 2}, 4, 4),
        ({"fsdp": 2, "context": 2, "tensor": 2}, 4, 4),
        ({"stage": 2, "context": 2, "tensor": 2}, 4, 2),
    ],
    ids=str,
)
def test_zero1_leaves_one_part_of_the_moments_to_each_device_that_uses_the_parameters(
    axes, of_norms, of_last, mesh
):
    """Two fp32 moments. Of matrices each of eight devices has an eighth: two layers with four products of
    attention and three of the MLP, and two tables. `tensor` divides no norm, and stages not the last."""
    matrices, norms, last = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 2 * 64 * 32, 2 * 2 * 32, 32
    adam = build_step(load_config("bytes-nano", [*NANO, "zero1=true"]), mesh(**axes)).state["optimizer"][1][0]
    held = [4 * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves((adam.mu, adam.nu))]
    assert sum(held) == 2 * 4 * (matrices / 8 + norms / of_norms + last / of_last)


@pytest.mark.parametrize("zero1", ["true", "false"])
def test_each_device_keeps_its_experts_and_its_part_of_everything_else(zero1, mesh):
    """Of 8 experts over expert=4 each device has two, split over fsdp=2; of all others an eighth."""
    changes = ["model.num_experts=8", "model.experts_per_token=2", f"zero1={zero1}"]
    run = load_config("bytes-nano", [*NANO, *changes])
    state = build_step(run, mesh(fsdp=2, expert=4)).state
    experts = 2 * 8 * 3 * 32 * 64
    others = 2 * (4 * 32 * 32 + 32 * 8) + 2 * 64 * 32 + 5 * 32  # attention, routers, tables, norms
    adam = state["optimizer"][1][0]
    for tree in (state["parameters"], adam.mu, adam.nu):
        held = [np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]
        assert sum(held) == (experts + others) / 8


def test_the_copy_of_a_step_is_whole_over_data_and_matrices_are_in_the_computations_format(mesh):
    axes = mesh(data=2, fsdp=2)
    parameters = initial_parameters(DECLARED, jax.random.key(0))
    shardings = jax.tree.map(lambda _: NamedSharding(axes, P(("fsdp", "data"))), parameters)
    laid = jax.device_put(parameters, shardings)
    copy = jax.jit(lambda p: whole_over_replicas(p, DECLARED, shardings, jnp.bfloat16))(laid)
    for name, dtype in (("matrix", jnp.bfloat16), ("router", jnp.float32), ("scale", jnp.float32)):
        assert copy[name].dtype == dtype
        assert copy[name].sharding.is_equivalent_to(NamedSharding(axes, P("fsdp")), copy[name].ndim)
        np.testing.assert_array_equal(copy[name], parameters[name].astype(dtype))


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_checkpoint_with_zero1_is_restored_without_and_the_reverse(mesh, tmp_path, before, after):
    builds = [
        build_step(
            load_config("linear", ["optimizer.momentum=0.9", f"zero1={str(zero1).lower()}"]), mesh(data=8)
        )
        for zero1 in (before, after)
    ]
    state = builds[0].init(np.uint32(3))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    restored = restore(checkpoints.newest(), builds[1].state)
    checkpoints.close()
    for mine, theirs, wanted in zip(*map(jax.tree.leaves, (restored, state, builds[1].state)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.sharding == wanted.sharding
