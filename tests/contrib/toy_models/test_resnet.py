import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import ResNetModel
from meshwright.contrib.toy_models import BLOCKS, STAGES, ResNet
from meshwright.trainer.models import initial_parameters

pytestmark = pytest.mark.quick

ROWS, SIDE = 8, 32
MODEL = ResNet(ResNetModel(kind="resnet18", image_size=SIDE))


def given(seed=0, rows=ROWS):
    random = np.random.default_rng(seed)
    parameters = jax.jit(lambda: initial_parameters(MODEL.parameters(), jax.random.key(seed)))()
    # Norms that are not where they start, so that each scale and bias is seen.
    parameters = jax.tree.map(
        lambda p: p + 0.1 * random.standard_normal(p.shape, dtype="float32") if p.ndim == 1 else p, parameters
    )
    images = random.random((rows, 1, SIDE, SIDE), dtype="float32")
    batch = {"images": images, "labels": random.integers(10, size=rows, dtype=np.int32)}
    return parameters, initial_parameters(MODEL.state(), jax.random.key(0)), batch


@functools.cache
def passed(run, model=MODEL):
    """Jitted: parameters, state and batch to ((loss, outcome), gradients)."""
    return jax.jit(jax.value_and_grad(lambda p, s, b: model.loss(p, s, b, run), has_aux=True))


@functools.cache
def alone(run):
    """What one device makes of the first parameters and batch."""
    return passed(run)(*given())


def network(torch):
    """The model of the notes in PyTorch, without the convolutions' biases, in float64."""
    nn = torch.nn

    class Residual(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            stride = 1 if inputs == outputs else 2
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
            self.conv3 = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride == 2 else None
            self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

        def forward(self, x):
            y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(y + (x if self.conv3 is None else self.conv3(x)))

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(1, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
            self.pool = nn.MaxPool2d(3, 2, 1)
            inputs = [64, *(width for width in STAGES for _ in range(BLOCKS))]
            self.blocks = nn.ModuleList(Residual(*pair) for pair in itertools.pairwise(inputs))
            self.head = nn.Linear(512, 10)

        def forward(self, x):
            x = self.pool(torch.relu(self.norm(self.stem(x))))
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((2, 3)))

    return Network().double()


def by_our_names(model, of_norm, of_weight):
    found = {"stem": {"norm": of_norm(model.norm)}}
    names = [f"stage{stage}_block{block}" for stage in (1, 2, 3, 4) for block in (1, 2)]
    for name, block in zip(names, model.blocks, strict=True):
        found[name] = {"norm1": of_norm(block.bn1), "norm2": of_norm(block.bn2)}
        if of_weight:
            found[name] |= {"kernel1": of_weight(block.conv1), "kernel2": of_weight(block.conv2)}
            if block.conv3 is not None:
                found[name]["shortcut"] = of_weight(block.conv3)
    if of_weight:
        found["stem"]["kernel"] = of_weight(model.stem)
        found["head"] = {"weight": of_weight(model.head).T, "bias": model.head.bias}
    return found


@pytest.fixture(scope="module")
def theirs():
    """Parameters by our names and a batch to loss, gradients, running statistics, and loss in evaluation."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    nn = torch.nn

    def run(parameters, batch):
        model = network(torch)
        own = by_our_names(
            model, lambda norm: {"scale": norm.weight, "bias": norm.bias}, lambda layer: layer.weight
        )
        with torch.no_grad():
            jax.tree.map(lambda a, b: a.copy_(torch.tensor(np.asarray(b))), own, parameters)
        labels = torch.tensor(batch["labels"], dtype=torch.int64)
        images = torch.tensor(batch["images"]).double()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        gradients = by_our_names(
            model,
            lambda norm: {"scale": norm.weight.grad, "bias": norm.bias.grad},
            lambda layer: layer.weight.grad,
        )
        gradients["head"]["bias"] = model.head.bias.grad
        state = by_our_names(
            model, lambda norm: {"mean": norm.running_mean, "variance": norm.running_var}, None
        )
        logits = model.eval()(images)
        numbers = jax.tree.map(lambda a: a.detach().numpy(), (gradients, state))
        return loss.item(), *numbers, nn.functional.cross_entropy(logits, labels).item()

    return run


def near(found, wanted, tolerance=1e-4):
    """Within `tolerance` of the largest number of each array."""

    def one(a, b):
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=tolerance * float(np.abs(b).max()))

    jax.tree.map(one, found, wanted)


def test_it_counts_as_its_arrays():
    leaves = jax.tree.leaves(
        jax.eval_shape(lambda: initial_parameters(MODEL.parameters(), jax.random.key(0)))
    )
    assert sum(leaf.size for leaf in leaves) == MODEL.config.num_parameters == 11_173_578
    assert sum(leaf.size for leaf in leaves if leaf.ndim > 1) == MODEL.config.num_matmul_parameters


def test_loss_gradients_and_running_statistics_are_pytorchs(theirs, context):
    parameters, _, batch = given()
    run = context()
    loss, gradients, running, evaluated = theirs(parameters, batch)
    (value, outcome), found = alone(run)
    assert float(value) == pytest.approx(loss, rel=1e-4)
    near(found, gradients)
    near(outcome.state, running)
    judge = dataclasses.replace(run, training=False)
    held_out, after = jax.jit(lambda *a: MODEL.loss(*a, judge))(parameters, outcome.state, batch)
    assert float(held_out) == pytest.approx(evaluated, rel=1e-4)
    jax.tree.map(np.testing.assert_array_equal, after.state, outcome.state)


@pytest.mark.once
def test_eight_devices_give_what_one_gives(context):
    parameters, state, batch = given()
    (value, outcome), gradients = alone(context())
    spread = passed(context(data=4, fsdp=2))(parameters, state, batch)
    near(spread[0][1].state, jax.tree.map(np.asarray, outcome.state))
    near(spread[1], jax.tree.map(np.asarray, gradients), 2e-4)
    assert float(spread[0][0]) == pytest.approx(float(value), rel=1e-5)


@pytest.mark.wide
def test_rows_of_weight_zero_change_nothing(context):
    parameters, state, batch = given()
    few = {name: array[:5] for name, array in batch.items()}
    padded = {**batch, "weights": jnp.array([8 / 5] * 5 + [0.0] * 3)}
    run = context()
    (wanted, short), gradients = passed(run)(parameters, state, few)
    (found, long), others = passed(run)(parameters, state, padded)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)
    assert float(long.metrics["accuracy"]) == pytest.approx(float(short.metrics["accuracy"]))
    # Other numbers of rows are summed in another order, which 18 layers of batch norm amplify.
    near(others, jax.tree.map(np.asarray, gradients), tolerance=1e-3)
    near(long.state, jax.tree.map(np.asarray, short.state))
