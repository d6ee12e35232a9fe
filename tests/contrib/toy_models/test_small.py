"""The linear models, LeNet and the classification loss, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import CruncherModel, LeNetModel, LinearModel
from meshwright.contrib.toy_models import Cruncher, LeNet, Linear, classification_loss
from meshwright.trainer.models import Parameter, initial_parameters

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_least_squares(bias, context):
    random = np.random.default_rng(0)
    shapes = ((6, 4), (6,), (4, 1))
    inputs, targets, weight = (random.standard_normal(shape, dtype="float32") for shape in shapes)
    model = Linear(LinearModel(kind="linear", input_dim=4, bias=bias))
    parameters = {"weight": weight}
    if bias:
        parameters["bias"] = np.float32([0.5])
    run, batch = context(), {"inputs": jnp.array(inputs), "targets": jnp.array(targets)}
    value, gradients = jax.jit(jax.value_and_grad(lambda p: model.loss(p, {}, batch, run)[0]))(parameters)
    error = inputs @ weight[:, 0] + (0.5 if bias else 0.0) - targets
    np.testing.assert_allclose(value, np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(gradients["weight"][:, 0], 2 / 6 * inputs.T @ error, rtol=1e-5)
    if bias:
        np.testing.assert_allclose(gradients["bias"], [2 / 6 * error.sum()], rtol=1e-5)


def test_it_declares_a_bias_only_where_asked_for():
    assert set(Linear(LinearModel(kind="linear", input_dim=4)).parameters()) == {"weight"}
    assert set(Linear(LinearModel(kind="linear", input_dim=4, bias=True)).parameters()) == {"weight", "bias"}


def test_loss_and_gradients_are_those_of_a_chain_of_matrices(context):
    random = np.random.default_rng(0)
    shapes = ((5, 3), (5,), (3, 3), (3, 3), (3, 1))
    inputs, targets, first, second, head = (random.standard_normal(s, dtype="float32") for s in shapes)
    model = Cruncher(CruncherModel(kind="cruncher", width=3, num_layers=2))
    run, batch = context(), {"inputs": jnp.array(inputs), "targets": jnp.array(targets)}
    parameters = {"layers": [first, second], "head": head}
    value, gradients = jax.jit(jax.value_and_grad(lambda p: model.loss(p, {}, batch, run)[0]))(parameters)
    error = inputs @ first @ second @ head - targets[:, None]
    slope = 2 / 5 * error
    np.testing.assert_allclose(value, np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(gradients["head"], (inputs @ first @ second).T @ slope, rtol=1e-4)
    np.testing.assert_allclose(gradients["layers"][1], (inputs @ first).T @ (slope @ head.T), rtol=1e-4)
    np.testing.assert_allclose(gradients["layers"][0], inputs.T @ (slope @ head.T @ second.T), rtol=1e-4)


LOGITS = np.array([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 5.0]], "float32")
LABELS = np.array([0, 0, 0, 2], "int32")  # right, wrong, right (the first of equals), right


def by_hand(rows):
    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    return -np.log([shares[row, LABELS[row]] for row in rows]).mean()


def test_loss_and_accuracy_are_means_over_the_rows():
    loss, metrics = classification_loss(jnp.asarray(LOGITS), {"labels": jnp.asarray(LABELS)})
    assert float(loss) == pytest.approx(by_hand(range(4)), rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == {"accuracy": 0.75}


def test_rows_of_weight_zero_do_not_count():
    batch = {"labels": jnp.asarray(LABELS), "weights": jnp.array([2.0, 2.0, 0.0, 0.0])}
    loss, metrics = classification_loss(jnp.asarray(LOGITS), batch)
    assert float(loss) == pytest.approx(by_hand(range(2)), rel=1e-6)
    assert float(metrics["accuracy"]) == 0.5


MODEL = LeNet(LeNetModel(kind="lenet"))
ARGUMENTS = {
    "convolution1": ((20, 1, 3, 3), (20,)),
    "convolution2": ((50, 20, 5, 5), (50,)),
    "hidden": ((800, 128), (128,)),
    "head": ((128, 10), (10,)),
}


def given(seed=0, rows=3):
    """Parameters with biases that are not zero, and a batch."""
    random = np.random.default_rng(seed)
    parameters = {
        name: {
            "weight": random.standard_normal(weight, dtype="float32") / np.float32(np.sqrt(weight[-1] * 9)),
            "bias": random.standard_normal(bias, dtype="float32"),
        }
        for name, (weight, bias) in ARGUMENTS.items()
    }
    images = random.standard_normal((rows, 1, 28, 28), dtype="float32")
    return parameters, {"images": images, "labels": random.integers(10, size=rows, dtype=np.int32)}


def loss_by_hand(parameters, batch):
    """In float64 numpy, with every window written out."""

    def convolved(x, kernel, bias):
        windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axis=(2, 3))
        y = np.einsum("nchwij,ocij->nohw", windows, kernel) + bias[None, :, None, None]
        y = np.maximum(y, 0)
        h, w = y.shape[2] // 2, y.shape[3] // 2
        return sum(y[:, :, i : 2 * h : 2, j : 2 * w : 2] for i in (0, 1) for j in (0, 1)) / 4

    p = jax.tree.map(lambda a: a.astype(np.float64), parameters)
    x = batch["images"].astype(np.float64)
    for name in ("convolution1", "convolution2"):
        x = convolved(x, p[name]["weight"], p[name]["bias"])
    assert x.shape[1:] == (50, 4, 4)
    x = np.maximum(x.reshape(len(x), 800) @ p["hidden"]["weight"] + p["hidden"]["bias"], 0)
    logits = x @ p["head"]["weight"] + p["head"]["bias"]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return -np.log(shares[np.arange(len(x)), batch["labels"]]).mean()


def test_it_declares_the_notes_arrays_with_biases_that_start_at_zero():
    declared = MODEL.parameters()
    shapes = {name: tuple(p.shape for p in layer.values()) for name, layer in declared.items()}
    assert shapes == ARGUMENTS
    leaves = jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, Parameter))
    assert sum(int(np.prod(p.shape)) for p in leaves) == LeNetModel(kind="lenet").num_parameters
    values = jax.jit(lambda: initial_parameters(declared, jax.random.key(0)))()
    for name, sums in {"convolution1": 9, "convolution2": 500, "hidden": 800, "head": 128}.items():
        assert not np.any(values[name]["bias"])
        # Cut at three sigma a normal is 0.9866 as wide; 180 numbers tell a width to 5 %.
        assert np.std(values[name]["weight"]) == pytest.approx(0.987 / np.sqrt(sums), rel=0.16)


def test_the_loss_is_the_one_written_out_in_numpy(context):
    parameters, batch = given()
    run = context()
    value, _ = jax.jit(lambda p, b: MODEL.loss(p, {}, b, run))(parameters, batch)
    assert float(value) == pytest.approx(loss_by_hand(parameters, batch), rel=1e-5)


def test_a_gradient_is_the_slope_of_the_loss(context):
    parameters, batch = given()
    arrays, run = jax.tree.map(jnp.array, batch), context()
    gradient = jax.jit(jax.grad(lambda p: MODEL.loss(p, {}, arrays, run)[0]))(parameters)
    random = np.random.default_rng(1)
    way = jax.tree.map(lambda a: random.standard_normal(a.shape), parameters)
    slope = sum(np.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (gradient, way)), strict=True))
    # Small enough that no ReLU turns: the loss is then smooth along the way, and float64 resolves it.
    there = jax.tree.map(lambda p, w: p + 1e-7 * w, parameters, way)
    back = jax.tree.map(lambda p, w: p - 1e-7 * w, parameters, way)
    by_hand = (loss_by_hand(there, batch) - loss_by_hand(back, batch)) / 2e-7
    assert slope == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        *(pytest.param({axis: 8}, marks=pytest.mark.wide) for axis in ("data", "fsdp")),
    ],
    ids=str,
)
def test_loss_and_gradients_are_the_same_on_every_layout(layout, context):
    parameters, batch = given(rows=8)
    arrays = jax.tree.map(jnp.array, batch)

    def both(run):
        return jax.jit(jax.value_and_grad(lambda p: MODEL.loss(p, {}, arrays, run)[0]))(parameters)

    alone, spread = both(context()), both(context(**layout))
    for a, b in zip(*map(jax.tree.leaves, (alone, spread)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(a).max()))


def test_in_bf16_products_are_bf16_and_loss_and_gradients_float32(context):
    parameters, batch = given()
    arrays, run = jax.tree.map(jnp.array, batch), context(dtype=jnp.bfloat16)
    loss = jax.value_and_grad(lambda p: MODEL.loss(p, {}, arrays, run)[0])
    value, gradient = jax.jit(loss)(parameters)
    assert value.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradient))
    assert float(value) == pytest.approx(loss_by_hand(parameters, batch), rel=0.05)
    text = jax.jit(loss).lower(parameters).as_text()
    kinds = ("stablehlo.convolution", "stablehlo.dot_general")
    products = [line for line in text.splitlines() if any(kind in line for kind in kinds)]
    assert len(products) == 2 + 3 + 2 * 3  # forward; backward but for the images' gradient; both matrices
    assert all("bf16>" in line.split("->")[-1] for line in products)
