"""Parts of a run in the hosts' memory: where they lie, on simulated devices, and what is left on H100s."""

import functools

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.config import load_config
from meshwright.trainer.checkpoint import Checkpoints, restore
from meshwright.trainer.data import open_data
from meshwright.trainer.step import build_step

pytestmark = pytest.mark.quick

NANO = ("data.source=synthetic", "batch.sequences=16", "batch.sequence_length=32", "model.num_kv_heads=4")
NANO += ("model.embed_dim=32", "model.mlp_dim=64", "model.vocab_size=64")
SMALL = ["data.source=synthetic", "precision=bf16", "model.num_layers=4", "model.embed_dim=256"]
SMALL += ["model.num_heads=8", "model.num_kv_heads=8", "model.mlp_dim=512", "model.vocab_size=1024"]
SMALL += ["batch.sequences=32", "batch.sequence_length=128", "remat=full"]
PARAMETERS = 4 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 2 * 1024 * 256 + 256
BLOCK_INPUTS = 4 * (32 // 8) * 128 * 256 * 2  # layers, a replica's rows, positions, width; bf16


def built_on(mesh, *overrides):
    config = load_config("bytes-nano", overrides)
    return config, build_step(config, mesh)


def batches_of(config, built):
    """The first two batches of a run, as [microbatches, rows, ...]."""
    place = lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding)  # noqa: E731
    return [jax.tree.map(place, open_data(config).batch(index, "train"), built.batch) for index in range(2)]


def put(state, built):
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, built.state)


def equal(mine, theirs):
    """Return whether two trees are bitwise equal, leaf by leaf."""
    return [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)]


def test_moments_are_made_and_stay_in_host_memory_and_counts_do_not(mesh):
    built = build_step(load_config("bytes-nano", ["offload=optimizer"]), mesh(data=2, fsdp=2))
    made = built.init(np.uint32(0))
    for state in (built.state, made):
        kinds = jax.tree.map(lambda x: x.sharding.memory_kind, state)
        adam = kinds["optimizer"][1][0]
        assert set(jax.tree.leaves((adam.mu, adam.nu))) == {"pinned_host"}
        assert adam.count != "pinned_host"
        assert "pinned_host" not in jax.tree.leaves(kinds["parameters"])


@pytest.mark.parametrize(
    ("axes", "more"),
    [
        pytest.param({}, ("batch.microbatch_sequences=4", "remat=none"), id="sums in the loop"),
        pytest.param(
            {"fsdp": 2},
            ("model.num_layers=5", "remat=full-every-2"),
            id="groups and a rest",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            {"data": 2, "expert": 2},
            ("batch.microbatch_sequences=2", "model.num_experts=4", "model.experts_per_token=2"),
            id="experts, each replica's own",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            {"fsdp": 2},
            ("state.moments=8bit", "optimizer.clip_norm=0.1", "model.embed_dim=64"),
            id="moments in eight bits, clipped",
        ),
        pytest.param({"data": 2}, ("optimizer.kind=muon",), id="all at once", marks=pytest.mark.wide),
    ],
)
def test_parameters_in_host_memory_train_bitwise_as_on_the_devices(mesh, tmp_path, axes, more):
    (_, on_devices), (config, held) = (
        built_on(mesh(**axes), *NANO, *more, *offload) for offload in ((), ("offload=state",))
    )
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, held.state["parameters"])
    assert set(jax.tree.leaves(kinds["layers"])) == {"pinned_host"}
    assert "pinned_host" not in {kinds["embedding"], kinds["head"]}
    first, second = batches_of(config, held)
    state, metrics = held.step(held.init(np.uint32(0)), first)
    other, wanted = on_devices.step(on_devices.init(np.uint32(0)), first)
    assert all(equal(metrics, wanted))
    checkpoints = Checkpoints(tmp_path)  # each goes on from the other's
    checkpoints.save(1, state, {})
    other, state = restore(checkpoints.newest(), on_devices.state), put(other, held)
    checkpoints.close()
    state, other = held.step(state, second)[0], on_devices.step(other, second)[0]
    assert all(equal(state, other))
    evaluated = [
        built.evaluate(tree["parameters"], tree["model_state"], second)
        for built, tree in ((held, state), (on_devices, other))
    ]
    assert all(equal(*evaluated))
    assert not any(jax.tree.leaves(held.inspect(state, second)))


@functools.cache
def weighed(offload: str) -> mw.Weighing:
    return mw.weigh("bytes-nano", on="8xH100", layout="data=8", overrides=[*SMALL, f"offload={offload}"])


@pytest.fixture(scope="module")
def kept() -> mw.Weighing:
    return weighed("none")


@pytest.mark.parametrize(
    ("offload", "moments", "activations"),
    [
        pytest.param("optimizer", 1, 0, marks=pytest.mark.wide),
        pytest.param("activations", 0, 1, marks=pytest.mark.wide),
        ("both", 1, 1),
    ],
)
def test_a_devices_memory_falls_by_what_the_hosts_memory_then_holds(kept, offload, moments, activations):
    """By hand: two moments of 4 bytes for each parameter; the input of every block."""
    weighing = weighed(offload)
    before, after = kept.ledger.memory, weighing.ledger
    on_host = moments * 8 * PARAMETERS + activations * BLOCK_INPUTS
    assert before.host_bytes == 0
    assert after.memory.host_bytes == on_host
    assert before.argument_bytes - after.memory.argument_bytes == moments * 8 * PARAMETERS
    fallen = before.reserved_bytes - after.memory.reserved_bytes
    assert fallen >= 0.99 * moments * 8 * PARAMETERS  # no copy of a moment is on the device at the peak
    if moments:
        assert after.memory.by_category["optimizer_state"] == 4  # Adam's count of steps
    assert "offload that did not happen" not in {finding.kind for finding in after.findings}
    parts = {part.name: part.seconds for part in weighing.prediction.slices}
    link = weighing.fleet.chip.host.bytes_per_second
    assert parts["host-transfer"] == pytest.approx(2 * on_host / link, rel=0.01)  # to the host and back


@pytest.mark.once
def test_a_devices_memory_falls_by_the_layers_that_the_hosts_memory_then_holds():
    """By hand: 4 bytes for each parameter of the blocks. The update fetches one layer after another."""
    moments, state = weighed("optimizer"), weighed("state")
    before, after, layers = (
        moments.ledger.memory,
        state.ledger.memory,
        4 * (PARAMETERS - 2 * 1024 * 256 - 256),
    )
    assert before.argument_bytes - after.argument_bytes == layers
    assert after.host_bytes - before.host_bytes == layers
    assert after.by_category["parameters"] == 4 * (2 * 1024 * 256 + 256)
    assert "offload that did not happen" not in {finding.kind for finding in state.ledger.findings}
    transfers = [
        sum(part.seconds for part in each.prediction.slices if part.name == "host-transfer")
        for each in (moments, state)
    ]
    link = moments.fleet.chip.host.bytes_per_second
    assert transfers[0] == pytest.approx(2 * 8 * PARAMETERS / link, rel=0.01)  # both moments, both ways
    assert transfers[1] > transfers[0] + 3 * layers / 64e9  # fetched in both passes and for the update
    meant = {a.path for a in state.compiled.arguments if a.host and a.role == "parameters"}
    assert len(meant) == 9
    assert all("['layers']" in path for path in meant)


def test_arguments_that_were_meant_for_the_host_are_named_as_such():
    compiled = weighed("optimizer").compiled
    meant = {a.moment: a.host for a in compiled.arguments if a.role == "optimizer_state"}
    assert meant == {"count": False, "mu": True, "nu": True}
