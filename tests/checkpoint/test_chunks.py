"""A pipeline's chunks of layers are stored as the layers of any other run, and restored from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from meshwright.config import load_config, num_stacked_layers
from meshwright.trainer.checkpoint import Checkpoints, check_match, newest_checkpoint, restore
from meshwright.trainer.step import build_step

pytestmark = pytest.mark.quick

TINY = ("data.source=synthetic", "model.num_layers=8", "model.embed_dim=16", "model.num_kv_heads=4")
TINY += ("model.mlp_dim=32", "model.vocab_size=64", "batch.sequence_length=16", "model.loss_chunk=16")
TINY += ("batch.sequences=8", "batch.microbatch_sequences=2")
EXPERTS = ("model.num_experts=2", "model.experts_per_token=1")
ADAFACTOR = ("optimizer.kind=adafactor", "optimizer.least_factored=4")
SEVEN = ("model.num_layers=7",)
WIDE_IN_8_BITS = ("model.embed_dim=64", "model.mlp_dim=64", "model.vocab_size=128", "state.moments=8bit")
WIDE_IN_8_BITS += ("precision=bf16", "state.parameters=bf16", "state.master=fp32")
LAYOUTS: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {"stage": 2, "fsdp": 2}), (1, {"stage": 4})]


def kept(state: Any, like: Any) -> Any:
    """A state with the layers of all chunks in one dim, less the padding."""

    def one(x: Any, like: Any) -> Any:
        found = np.asarray(x)
        return found if found.shape == like.shape else found.reshape(-1, *like.shape[1:])[: len(like)]

    return jax.tree.map(one, state, like)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(SEVEN, id="adamw, padded"),
        pytest.param(WIDE_IN_8_BITS, id="adamw in 8 bits, with a master copy"),
        pytest.param((*ADAFACTOR, *EXPERTS), id="adafactor, experts", marks=pytest.mark.wide),
        pytest.param((*SEVEN, *ADAFACTOR), id="adafactor, padded", marks=pytest.mark.wide),
    ],
)
def test_a_run_goes_on_with_other_chunks(
    more: tuple[str, ...],
    mesh: Callable[..., Mesh],
    tmp_path: Path,
    same_bits: Callable[[Any, Any], bool],
):
    built = [
        build_step(load_config("bytes-nano", (*TINY, *more, f"pipeline_chunks={chunks}")), mesh(**axes))
        for chunks, axes in LAYOUTS
    ]
    states = [each.init(np.uint32(3)) for each in built]
    assert states[1]["parameters"]["layers"]["attention"]["query"].shape[:2] == (2, 4)
    # The same numbers in the same order, and zeros in the padding.
    assert all(same_bits(kept(state, states[0]), states[0]) for state in states)
    layers = num_stacked_layers(load_config("bytes-nano", (*TINY, *more)))
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_layers=layers)
    for number, state in enumerate(states):
        checkpoints.save(number + 1, state, {})
        checkpoints.wait()
        found = newest_checkpoint(tmp_path / "checkpoints")
        assert found is not None
        assert found.step == number + 1
        shapes = {array.path: array.shape for array in found.manifest.arrays}
        query = states[0]["parameters"]["layers"]["attention"]["query"]
        assert shapes["parameters/layers/attention/query"] == query.shape == (layers, *query.shape[1:])
        for other, its in zip(built, states, strict=True):
            check_match(found, other.state, layers)
            assert same_bits(restore(found, other.state, num_layers=layers), its)
    checkpoints.close()
