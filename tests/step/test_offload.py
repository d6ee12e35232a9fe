"""Moments in the hosts' memory: where they lie, on simulated devices, and what is left on H100s."""

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.config import load_config
from meshwright.step import build_step

SMALL = ["data.source=synthetic", "precision=bf16", "model.num_layers=4", "model.embed_dim=256"]
SMALL += ["model.num_heads=8", "model.num_kv_heads=8", "model.mlp_dim=512", "model.vocab_size=1024"]
SMALL += ["batch.sequences=32", "batch.sequence_length=128", "remat=full"]
PARAMETERS = 4 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 2 * 1024 * 256 + 256
BLOCK_INPUTS = 4 * (32 // 8) * 128 * 256 * 2  # layers, a replica's rows, positions, width; bf16


def test_moments_are_made_and_stay_in_host_memory_and_counts_do_not(mesh):
    built = build_step(load_config("bytes-nano", ["offload=optimizer"]), mesh(data=2, fsdp=2))
    made = built.init(np.uint32(0))
    for state in (built.state, made):
        kinds = jax.tree.map(lambda x: x.sharding.memory_kind, state)
        adam = kinds["optimizer"][1][0]
        assert set(jax.tree.leaves((adam.mu, adam.nu))) == {"pinned_host"}
        assert adam.count != "pinned_host"
        assert "pinned_host" not in jax.tree.leaves(kinds["parameters"])


def weighed(offload: str) -> mw.Weighing:
    return mw.weigh("bytes-nano", on="8xH100", layout="data=8", overrides=[*SMALL, f"offload={offload}"])


@pytest.fixture(scope="module")
def kept() -> mw.Weighing:
    return weighed("none")


@pytest.mark.parametrize(
    ("offload", "moments", "activations"),
    [("optimizer", 1, 0), ("activations", 0, 1), ("both", 1, 1)],
)
def test_a_devices_memory_falls_by_what_the_hosts_memory_then_holds(kept, offload, moments, activations):
    """By hand: two moments of 4 bytes for each parameter; the input of every block."""
    before, after = kept.ledger.memory, weighed(offload).ledger
    on_host = moments * 8 * PARAMETERS + activations * BLOCK_INPUTS
    assert before.host_bytes == 0
    assert after.memory.host_bytes == on_host
    assert before.argument_bytes - after.memory.argument_bytes == moments * 8 * PARAMETERS
    fallen = before.reserved_bytes - after.memory.reserved_bytes
    assert fallen >= 0.99 * moments * 8 * PARAMETERS  # no copy of a moment is on the device at the peak
    if moments:
        assert after.memory.by_category["optimizer_state"] == 4  # Adam's count of steps
    assert "offload that did not happen" not in {finding.kind for finding in after.findings}


def test_arguments_that_were_meant_for_the_host_are_named_as_such():
    compiled = weighed("optimizer").compiled
    meant = {a.moment: a.host for a in compiled.arguments if a.role == "optimizer_state"}
    assert meant == {"count": False, "mu": True, "nu": True}
