"""The optimizers against their papers' formulas, written out in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.models import Parameter, model_of
from meshwright.step import optimizer_of
from meshwright.step._optimizer import schedule_of

DECLARED = {
    "matrix": Parameter(shape=(2, 3), dims=("embed", "mlp")),
    "bias": Parameter(shape=(2, 3), dims=("heads", "head_dim"), initial="zeros"),
    "scale": Parameter(shape=(3,), dims=("embed",), initial="ones"),
}


def updated(config, num_steps=3):
    """Parameters after steps whose gradients are given, and what was given."""
    random = np.random.default_rng(0)
    first = {name: random.standard_normal(p.shape).astype("float32") for name, p in DECLARED.items()}
    gradients = [
        {name: random.standard_normal(p.shape).astype("float32") for name, p in DECLARED.items()}
        for _ in range(num_steps)
    ]
    optimizer = optimizer_of(config, DECLARED)
    rate = config.optimizer.learning_rate  # by which the step scales

    @jax.jit
    def run(parameters, gradients):
        state = optimizer.init(parameters)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, parameters)
            parameters = jax.tree.map(lambda p, u: p + rate * u, parameters, updates)
        return parameters

    return first, gradients, run(first, gradients)


def clipped(gradient, most):
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values()))
    return {name: g * min(1.0, most / norm) for name, g in gradient.items()}


@pytest.mark.parametrize("clip", ["none", "0.5", "1e9"])
def test_adamw_decays_matrices_alone_and_clips_the_norm_of_all(clip):
    overrides = ("optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.epsilon=1e-3")
    overrides += ("optimizer.learning_rate=0.1", "optimizer.weight_decay=0.2", f"optimizer.clip_norm={clip}")
    first, gradients, found = updated(load_config("bytes-nano", overrides))
    if clip != "none":
        gradients = [clipped(g, float(clip)) for g in gradients]
    for name in DECLARED:
        w, mean, square = first[name].astype(np.float64), 0.0, 0.0
        for t, gradient in enumerate(gradients, start=1):  # Loshchilov & Hutter 2019, algorithm 2
            mean = 0.8 * mean + 0.2 * gradient[name]
            square = 0.9 * square + 0.1 * gradient[name] ** 2
            step = (mean / (1 - 0.8**t)) / (np.sqrt(square / (1 - 0.9**t)) + 1e-3)
            w = w - 0.1 * (step + (0.2 * w if name == "matrix" else 0))
        np.testing.assert_allclose(found[name], w, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_keeps_a_trace_only_with_momentum(momentum):
    overrides = ("optimizer.kind=sgd", "optimizer.learning_rate=0.1", f"optimizer.momentum={momentum}")
    config = load_config("linear", overrides)
    first, gradients, found = updated(config)
    for name in DECLARED:
        w, trace = first[name], 0.0
        for gradient in gradients:
            trace = momentum * trace + gradient[name]
            w = w - 0.1 * trace
        np.testing.assert_allclose(found[name], w, rtol=1e-4, atol=1e-6)
    state = jax.tree.leaves(jax.eval_shape(optimizer_of(config, DECLARED).init, first))
    num_numbers = sum(math.prod(leaf.shape) for leaf in state if leaf.dtype == jnp.float32)
    assert num_numbers == (15 if momentum else 0)


def test_adagrad_divides_by_the_root_of_all_squares_so_far_with_epsilon_under_it():
    config = load_config("linear", ("optimizer.kind=adagrad", "optimizer.epsilon=0.1"))
    first, gradients, found = updated(config)
    for name in DECLARED:
        w, squares = first[name].astype(np.float64), 0.0
        for gradient in gradients:  # Duchi, Hazan & Singer 2011, the diagonal form
            squares = squares + gradient[name].astype(np.float64) ** 2
            w = w - 0.1 * gradient[name] / np.sqrt(squares + 0.1)
        np.testing.assert_allclose(found[name], w, rtol=1e-5, atol=1e-6, err_msg=name)
    state = jax.tree.leaves(jax.eval_shape(optimizer_of(config, DECLARED).init, first))
    assert sum(math.prod(leaf.shape) for leaf in state if leaf.dtype == jnp.float32) == 15


def is_parameter(leaf):
    return isinstance(leaf, Parameter)


def test_of_a_transformer_decay_falls_on_its_matrices():
    """Not on norms and biases, whatever their shape: some are of heads by width, and all are stacked."""
    config = load_config("gpt2-124m", ("schedule.kind=constant",))
    declared = model_of(config.model).parameters()
    parameters = jax.tree.map(lambda p: jnp.ones((1,) * len(p.shape)), declared, is_leaf=is_parameter)
    optimizer = optimizer_of(config, declared)

    @jax.jit
    def update(parameters):
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return optimizer.update(zeros, optimizer.init(parameters), parameters)[0]

    changes = jax.tree_util.tree_leaves_with_path(update(parameters))
    decayed = {jax.tree_util.keystr(path) for path, change in changes if np.any(np.asarray(change) != 0)}
    matrices = {f"['layers']['attention']['{n}']" for n in ("query", "key", "value", "output")}
    matrices |= {f"['layers']['mlp']['{n}']" for n in ("up", "down")}
    assert decayed == matrices | {"['embedding']", "['positions']"}


def test_a_constant_schedule_is_constant():
    rate = schedule_of(load_config("linear"))
    assert [float(rate(step)) for step in (0, 99, 10**6)] == pytest.approx([0.1] * 3)


def test_a_cosine_schedule_warms_up_and_falls_to_its_fraction():
    overrides = (
        "schedule.kind=cosine",
        "schedule.warmup_steps=10",
        "schedule.final_fraction=0.2",
        "steps=110",
    )
    rate = schedule_of(load_config("linear", overrides))
    assert float(rate(0)) == 0
    assert float(rate(5)) == pytest.approx(0.05)
    assert float(rate(10)) == pytest.approx(0.1)
    assert float(rate(60)) == pytest.approx(0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2))
    assert float(rate(110)) == pytest.approx(0.02)
    assert float(rate(500)) == pytest.approx(0.02)


def test_a_cosine_schedule_may_do_without_warming_up():
    overrides = ("schedule.kind=cosine", "schedule.warmup_steps=0", "steps=10")
    assert float(schedule_of(load_config("linear", overrides))(0)) == pytest.approx(0.1)


def rates(*overrides):
    schedule = schedule_of(load_config("linear", ("steps=110", *(f"schedule.{o}" for o in overrides))))
    return lambda *steps: [float(schedule(step)) / 0.1 for step in steps]


def test_a_constant_schedule_may_warm_up():
    found = rates("kind=constant", "warmup_steps=10")
    assert found(0, 5, 10, 500) == pytest.approx([0, 0.5, 1, 1])


@pytest.mark.parametrize(
    "kind",
    [
        ("constant", "warmup_steps=10"),
        ("cosine", "warmup_steps=10"),
        ("linear", "warmup_steps=10"),
        ("stable-then-decay", "warmup_steps=10", "decay_steps=20"),
        ("inverse-square-root", "warmup_steps=10"),
    ],
    ids=lambda kind: kind[0],
)
@pytest.mark.parametrize(
    ("scale", "sequences", "times"),
    [("linear", 256, 8), ("sqrt", 256, math.sqrt(8)), ("linear", 16, 0.5), ("sqrt", 8, 0.5), ("sqrt", 32, 1)],
)
def test_every_schedule_is_scaled_by_the_batch_or_its_root(kind, scale, sequences, times):
    chosen = [f"schedule.{each}" for each in (f"kind={kind[0]}", *kind[1:])]
    steps = (0, 5, 10, 60, 110)
    plain = schedule_of(load_config("linear", ["steps=110", *chosen]))
    scaled = [f"schedule.scale={scale}", "batch.base_sequences=32", f"batch.sequences={sequences}"]
    found = schedule_of(load_config("linear", ["steps=110", *chosen, *scaled]))
    wanted = [times * float(plain(step)) for step in steps]
    assert [float(found(step)) for step in steps] == pytest.approx(wanted, rel=1e-6)


def test_a_linear_schedule_warms_up_and_falls_in_a_line():
    found = rates("kind=linear", "warmup_steps=10", "final_fraction=0.2")
    assert found(0, 5, 10, 60, 110, 500) == pytest.approx([0, 0.5, 1, 0.6, 0.2, 0.2])


def test_a_stable_schedule_decays_over_its_last_steps_alone():
    found = rates("kind=stable-then-decay", "warmup_steps=10", "decay_steps=20")
    assert found(0, 5, 10, 60, 90, 100, 110, 500) == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0, 0])
    at_once = rates("kind=stable-then-decay", "warmup_steps=0", "decay_steps=110", "final_fraction=0.5")
    assert at_once(0, 55, 110) == pytest.approx([1, 0.75, 0.5])


def test_an_inverse_square_root_schedule_halves_at_four_times_its_warmup():
    found = rates("kind=inverse-square-root", "warmup_steps=10")
    assert found(0, 5, 10, 40, 90, 1000) == pytest.approx([0, 0.5, 1, 0.5, 1 / 3, 0.1])
