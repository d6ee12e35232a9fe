"""The documents' small models from end to end: what they learn, and what their steps cost by hand."""

import json
import math

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.config import load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.step import build_step

pytestmark = [pytest.mark.quick, pytest.mark.once]


def test_a_line_is_found_to_the_noise_about_it():
    """The pmap notes' problem, y = 2 x - 1 with noise half as wide as x: no fit errs less than 0.25."""
    config = load_config("line")
    built = build_step(config, mesh_of((("data", 2),), jax.devices()[:2]))
    data, state = open_data(config), built.init(np.uint32(config.seed))

    def placed(step, split):
        return jax.tree.map(
            lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding),
            data.batch(step, split),
            built.batch,
        )

    for step in range(100):
        state, _ = built.step(state, placed(step, "train"))
    held_out = [
        float(built.evaluate(state["parameters"], {}, placed(n, "held-out"))["loss"]) for n in range(8)
    ]
    # From about a thousand rows a mean of squares is known to 0.25 sqrt(2 / 1024) = 0.011.
    assert np.mean(held_out) == pytest.approx(0.25, abs=0.04)
    assert float(state["parameters"]["weight"][0, 0]) == pytest.approx(2, abs=0.1)
    assert float(state["parameters"]["bias"][0]) == pytest.approx(-1, abs=0.1)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The lecture notes' tuning: ten steps of four rows at two learning rates."""
    runs = {}
    for rate in (0.01, 0.1):
        runs[rate] = mw.train(
            "linear",
            on="1xCPU",
            overrides=[f"optimizer.learning_rate={rate}", "batch.sequences=4"],
            steps=10,
            folder=tmp_path_factory.mktemp("runs") / str(rate),
        )
    return runs


def test_a_learning_rate_of_a_tenth_learns_more_in_ten_steps_than_a_hundredth(tuned):
    held_out = {rate: run.measurement.held_out_losses for rate, run in tuned.items()}
    assert held_out[0.01][0] == held_out[0.1][0]  # the same start, and the same rows
    assert held_out[0.1][10] < held_out[0.01][10] < held_out[0.01][0]
    first, second = (list(run.measurement.losses.values()) for run in tuned.values())
    assert first[0] == second[0]
    assert first[1:] != second[1:]


def test_each_run_keeps_the_learning_rate_it_had(tuned):
    for rate, run in tuned.items():
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        rates = [found["learning_rate"] for line in lines if "learning_rate" in (found := json.loads(line))]
        assert rates == pytest.approx([rate] * 10)


def test_experts_learn_and_tell_of_their_balance(tmp_path):
    """In 8 steps, from log 256 = 5.5 nats and a little; each of 4 experts has room for 1.25 fair shares."""
    run = mw.train("bytes-moe", on="1xCPU", steps=8, folder=tmp_path, overrides=["evaluation.every_steps=8"])
    first, last = (run.measurement.held_out_losses[step] for step in (0, 8))
    assert last < first - 0.5
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 8
    for told in steps:
        assert 1.9 < told["balancing_loss"] < 8
        assert 1 <= told["expert_load"] <= 4
        assert 0 <= told["dropped"] < 1


def test_lenet_learns_its_patterns():
    config = load_config("lenet", ["batch.sequences=32"])
    built = build_step(config, mesh_of((("data", 1),), jax.devices()[:1]))
    data, state = open_data(config), built.init(np.uint32(config.seed))
    losses = []
    for step in range(60):
        state, metrics = built.step(state, jax.tree.map(lambda x: x[None], data.batch(step, "train")))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(math.log(10), abs=0.1)  # of ten classes nothing is known yet
    assert np.mean(losses[-5:]) < 0.5


@pytest.mark.wide
@pytest.mark.program
def test_lenet_is_given_the_bytes_that_were_weighed(tmp_path):
    """Its peak lies where the images are not in use any more; they were given to the step all the same."""
    run = mw.train("lenet", on="1xCPU", steps=1, folder=tmp_path / "run")
    rows = {row.quantity: row for row in run.reconciliation.rows}
    row = rows["argument bytes per device"]
    assert row.predicted == row.measured > 4 * 129_068


@pytest.mark.parametrize(
    ("on", "arguments"),
    [
        ("1xH100", {}),
        ("8xCPU", {"layout": "fsdp=8"}),
        pytest.param("8xH100", {"overrides": ["precision=bf16"]}, marks=pytest.mark.wide),
    ],
)
def test_lenets_flops_are_those_counted_by_hand(on, arguments):
    weighed = mw.weigh("lenet", on=on, **arguments)
    first = 2 * 64 * 20 * 26 * 26 * (1 * 3 * 3)
    second = 2 * 64 * 50 * 9 * 9 * (20 * 5 * 5)
    matrices = 2 * 64 * (800 * 128 + 128 * 10)
    by_hand = 3 * (first + second + matrices) - first  # the gradient of the images is not asked for
    assert weighed.ledger.flops.model == by_hand
    # The compiler for GPUs may pad a convolution's channels: the product is then larger than it need be.
    assert weighed.ledger.flops.executed == pytest.approx(by_hand, rel=0.003)
    assert weighed.ledger.unpriced == ()
    assert weighed.compiled.num_parameters == 129_068


@pytest.mark.parametrize("preset", ["lenet", "cruncher"])
def test_on_a_cpu_each_module_executes_what_the_model_has_there(preset):
    """XLA's CPU backend leaves gradients of convolutions and products of one column without a name."""
    flops = mw.weigh(preset, on="8xCPU").ledger.flops
    assert flops.by_module == flops.model_by_module
    assert flops.waste_by_module == {}
