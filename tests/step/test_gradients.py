"""Microbatches against the whole batch at once, and replicas that sum up their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.config import load_config
from meshwright.models import Outcome
from meshwright.step import build_step
from meshwright.step._gradients import gradients_by_replica, gradients_of

P = PartitionSpec


def loss(parameters, state, batch, key):
    """A mean square; the state counts the microbatches, and a metric shows the mean input."""
    error = batch["x"] * parameters["w"] - 1
    return jnp.mean(error**2), Outcome({"seen": state["seen"] + 1}, {"mean": jnp.mean(batch["x"])})


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_however_a_batch_is_cut_loss_gradient_and_metrics_are_those_of_the_whole(mesh, num_microbatches):
    x = np.linspace(-1, 2, 16, dtype=np.float32)
    parameters, whole = {"w": jnp.float32(0.5)}, {"w": NamedSharding(mesh(), PartitionSpec())}
    value, outcome, gradient = jax.jit(
        lambda batch: gradients_of(loss, whole, parameters, {"seen": 0}, batch, jax.random.key(0))
    )({"x": x.reshape(num_microbatches, -1)})
    by_hand = 0.5 * x - 1
    assert float(value) == pytest.approx(np.mean(by_hand**2), rel=1e-6)
    assert float(gradient["w"]) == pytest.approx(np.mean(2 * by_hand * x), rel=1e-6)
    assert float(outcome.metrics["mean"]) == pytest.approx(np.mean(x), rel=1e-6)
    assert int(outcome.state["seen"]) == num_microbatches


@pytest.mark.parametrize("spec", [P(), P("data"), P("fsdp"), P(("fsdp", "data"))], ids=str)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_replicas_that_sum_up_their_own_rows_give_the_whole_batchs_mean(mesh, num_microbatches, spec):
    axes = mesh(data=2, fsdp=2)
    x = np.linspace(-1, 2, 16, dtype=np.float32)
    parameters = {"w": jnp.linspace(0.5, 1.5, 8)}
    shardings = {"w": NamedSharding(axes, spec)}

    def loss(parameters, state, batch, key):
        mean = jnp.mean(batch["x"])
        return jnp.mean(parameters["w"]) * mean, Outcome({}, {"mean": mean})

    rows = NamedSharding(axes, P(None, ("data", "fsdp")))
    batch = {"x": jax.device_put(np.stack([x] * num_microbatches), rows)}
    value, outcome, gradient = jax.jit(
        lambda batch: gradients_by_replica(loss, shardings, parameters, {}, batch, jax.random.key(0))
    )(batch)
    assert float(value) == pytest.approx(np.mean(x), rel=1e-6)
    assert float(outcome.metrics["mean"]) == pytest.approx(np.mean(x), rel=1e-6)
    np.testing.assert_allclose(gradient["w"], np.mean(x) / 8, rtol=1e-6)
    if num_microbatches > 1:
        assert gradient["w"].sharding.is_equivalent_to(shardings["w"], 1)


PACKED = ("data.source=tokens", "data.path=absent.bin", "data.dtype=uint16")
PACKED += ("data.documents=packed", "data.end_of_document=0", "model.dropout=0.1", "precision=fp32")
PACKED += (
    "optimizer.kind=sgd",
    "optimizer.learning_rate=1.0",
    "model.num_layers=2",
    "batch.sequences=8",
    "batch.sequence_length=32",
)


def test_gaps_and_dropout_do_not_depend_on_which_replica_sees_a_row(mesh):
    """Rows of different numbers of documents, so that replicas count different numbers of tokens."""
    random = np.random.default_rng(0)
    segments = np.sort(random.integers(0, np.arange(1, 17, 2)[:, None], (8, 33)), axis=1)
    batch = {"tokens": random.integers(256, size=(8, 33)), "segments": segments}
    found = []
    for axes, rows in (({}, 4), ({"data": 2, "fsdp": 2}, 1)):
        config = load_config("bytes-nano", (*PACKED, f"batch.microbatch_sequences={rows}"))
        built = build_step(config, mesh(**axes))
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x.reshape(like.shape).astype(np.int32), like.sharding),
            batch,
            built.batch,
        )
        state, metrics = built.step(built.init(np.uint32(0)), placed)
        found.append((metrics["loss"], metrics["gradient_norm"], state["parameters"]["layers"]["mlp"]["up"]))
    for alone, split in zip(*found, strict=True):
        np.testing.assert_allclose(split, alone, rtol=1e-4, atol=1e-6)
