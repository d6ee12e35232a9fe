"""The policies fp32, bf16, fp16 and fp8: losses, gradients, and the loss scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.data import open_data
from meshwright.step import build_step
from meshwright.step._gradients import FIRST_SCALE, GOOD_STEPS, LEAST_SCALE, MOST_SCALE, next_scale

NUM_STEPS = 60
FARTHEST = {"bf16": 0.03, "fp16": 0.03, "fp8": 0.06}  # nats of held-out loss from fp32, as in the document


@pytest.fixture(scope="module")
def built_on():
    @functools.cache
    def build(mesh, precision, *overrides):
        config = load_config("bytes-nano", (f"precision={precision}", *overrides))
        return build_step(config, mesh), open_data(config)

    return build


def place(batch, built):
    return jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding), batch, built.batch
    )


@pytest.fixture(scope="module")
def held_out_loss(built_on):
    @functools.cache
    def train(mesh, precision):
        built, data = built_on(mesh, precision)
        state = built.init(np.uint32(0))
        for index in range(NUM_STEPS):
            state, metrics = built.step(state, place(data.batch(index, "train"), built))
            assert int(metrics["applied"]) == 1
        judged = [
            built.evaluate(state["parameters"], state["model_state"], place(data.batch(i, "held-out"), built))
            for i in range(8)
        ]
        return float(np.mean([float(each["loss"]) for each in judged]))

    return train


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_each_precision_learns_what_fp32_learns(mesh, held_out_loss, precision):
    plain = held_out_loss(mesh(), "fp32")
    assert plain < 4.0  # from 5.5 nats of equal chances
    assert abs(held_out_loss(mesh(), precision) - plain) < FARTHEST[precision]


def gradients_norm(built, data):
    state = built.init(np.uint32(0))
    return float(built.step(state, place(data.batch(0, "train"), built))[1]["gradient_norm"])


@pytest.mark.parametrize(
    ("precision", "tolerance", "overrides"),
    [("fp16", 2e-3, ("batch.microbatch_sequences=2",)), ("fp8", 5e-2, ())],
)
def test_gradients_are_those_of_fp32_whatever_the_scale(mesh, built_on, precision, tolerance, overrides):
    norms = [
        gradients_norm(*built)
        for built in (built_on(mesh(), "fp32"), built_on(mesh(), precision, *overrides))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=tolerance)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_eight_devices_compute_what_one_computes(mesh, built_on, precision):
    losses = []
    for axes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        built, data = built_on(mesh(**axes), precision)
        _, metrics = built.step(built.init(np.uint32(0)), place(data.batch(0, "train"), built))
        losses.append([float(metrics["loss"]), float(metrics["gradient_norm"])])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_only_fp16_keeps_a_loss_scale(mesh, built_on):
    for precision in ("fp32", "bf16", "fp8"):
        assert "loss_scale" not in built_on(mesh(), precision)[0].state
    state = built_on(mesh(), "fp16")[0].init(np.uint32(0))
    assert float(state["loss_scale"]["scale"]) == 2**15 == FIRST_SCALE
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state["parameters"]))


def test_an_overflow_changes_nothing_but_the_scale_and_the_run_recovers(mesh, built_on):
    built, data = built_on(mesh(), "fp16")
    state = built.init(np.uint32(0))
    state["loss_scale"]["scale"] = jnp.float32(MOST_SCALE * 2**6)  # gradients above 65504
    before, scales, applied = jax.tree.map(np.asarray, state["parameters"]), [], []
    for index in range(16):
        state, metrics = built.step(state, place(data.batch(index, "train"), built))
        scales.append(float(metrics["loss_scale"]))
        applied.append(int(metrics["applied"]))
        if not any(applied):
            assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(state["parameters"])))
    assert applied[0] == 0
    assert applied[-1] == 1
    num_skipped = applied.index(1)
    assert all(applied[num_skipped:])
    assert scales[: num_skipped + 1] == [MOST_SCALE * 2.0 ** (6 - i) for i in range(num_skipped + 1)]
    assert int(state["loss_scale"]["good_steps"]) == 16 - num_skipped


@pytest.mark.parametrize(
    ("scale", "good", "applied", "after"),
    [
        (1024, 7, True, (1024, 8)),
        (1024, GOOD_STEPS - 1, True, (2048, 0)),
        (1024, GOOD_STEPS - 1, False, (512, 0)),
        (MOST_SCALE, GOOD_STEPS - 1, True, (MOST_SCALE, 0)),
        (LEAST_SCALE, 3, False, (LEAST_SCALE, 0)),
    ],
)
def test_the_scale_doubles_after_good_steps_and_halves_after_a_bad_one(scale, good, applied, after):
    state = {"loss_scale": {"scale": jnp.float32(scale), "good_steps": jnp.int32(good)}}
    found = next_scale(state, jnp.asarray(applied))["loss_scale"]
    assert (float(found["scale"]), int(found["good_steps"])) == after
