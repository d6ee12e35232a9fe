"""With equal weights our models and optimizers give the answers of the documents' PyTorch code (the lecture
notes', and the notes' on several GPUs), alone and on eight simulated devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from meshwright.config import load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.models import Context, initial_parameters, model_of
from meshwright.trainer.step import build_step, optimizer_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed: its answers cannot be compared with")
F = torch.nn.functional

pytestmark = pytest.mark.quick

ONE, EIGHT = (("data", 1),), (("data", 8),)


def context(axes) -> Context:
    return Context(mesh=mesh(axes), dtype=jnp.float32, platform="cpu", remat="none")


def mesh(axes) -> Mesh:
    return mesh_of(axes, jax.devices()[: axes[0][1]])


def close(ours, theirs, tolerance):
    """Within `tolerance` of the largest number."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


def tensors(tree, *, grad=True):
    return jax.tree.map(lambda x: torch.tensor(np.array(x), requires_grad=grad), tree)


def cruncher_of_the_notes(parameters, x):
    """Each layer x @ weight, then the head's single column."""
    for weight in parameters["layers"]:
        x = x @ weight
    return (x @ parameters["head"]).squeeze(-1)


def lenet_of_the_notes(parameters, x):
    w1, b1 = parameters["convolution1"]["weight"], parameters["convolution1"]["bias"]
    w2, b2 = parameters["convolution2"]["weight"], parameters["convolution2"]["bias"]
    h1 = F.avg_pool2d(F.relu(F.conv2d(x, w1, b1)), kernel_size=(2, 2), stride=(2, 2))
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, w2, b2)), kernel_size=(2, 2), stride=(2, 2))
    h2 = h2.reshape(h2.shape[0], -1)
    h3 = F.relu(torch.mm(h2, parameters["hidden"]["weight"]) + parameters["hidden"]["bias"])
    return torch.mm(h3, parameters["head"]["weight"]) + parameters["head"]["bias"]


class SGDOfTheNotes:
    """p -= lr x gradient."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr

    def step(self):
        for p in self.parameters:
            p.data -= self.lr * p.grad.data


class AdaGradOfTheNotes:
    """The squares of the gradients are summed from zero, and 1e-5 is added under the root."""

    SAME = ("optimizer.epsilon=1e-5", "optimizer.epsilon_under_root=true")

    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.squares = parameters, lr, {}

    def step(self):
        for place, p in enumerate(self.parameters):
            grad = p.grad.data
            squares = self.squares.get(place, torch.zeros_like(grad)) + torch.square(grad)
            self.squares[place] = squares
            p.data -= self.lr * grad / torch.sqrt(squares + 1e-5)


def start(preset, *overrides):
    """A config, its initial parameters as numpy, and a batch of 16 rows."""
    config = load_config(preset, ["batch.sequences=16", *overrides])
    declared = model_of(config.model).parameters()
    parameters = jax.tree.map(np.asarray, initial_parameters(declared, jax.random.key(1)))
    return config, parameters, open_data(config).batch(0, "train")


def theirs_of(preset, parameters, batch):
    """Loss and gradients of the notes' code, the mean over the batch."""
    weights = tensors(parameters)
    if preset == "cruncher":
        predicted = cruncher_of_the_notes(weights, torch.tensor(batch["inputs"]))
        loss = F.mse_loss(predicted, torch.tensor(batch["targets"]))
    else:
        logits = lenet_of_the_notes(weights, torch.tensor(batch["images"]))
        loss = torch.nn.CrossEntropyLoss()(logits, torch.tensor(batch["labels"]).long())
    loss.backward()
    return float(loss.detach()), jax.tree.map(lambda w: w.grad.numpy(), weights)


def ours_of(config, parameters, batch, axes):
    model, run = model_of(config.model), context(axes)
    rows = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec())
    step = jax.jit(jax.value_and_grad(lambda p, b: model.loss(p, {}, b, run)[0]), in_shardings=(whole, rows))
    return step(parameters, batch)


@pytest.mark.parametrize("axes", [ONE, EIGHT], ids=["one device", "eight devices"])
@pytest.mark.parametrize("preset", ["cruncher", "lenet"])
def test_loss_and_gradients_are_the_notes_with_equal_weights(preset, axes):
    config, parameters, batch = start(preset)
    loss, gradients = ours_of(config, parameters, batch, axes)
    their_loss, their_gradients = theirs_of(preset, parameters, batch)
    assert float(loss) == pytest.approx(their_loss, rel=1e-5)
    jax.tree.map(lambda a, b: close(a, b, 1e-5), gradients, their_gradients)


def test_an_all_reduce_by_hand_is_what_the_compiler_makes_of_a_batch_over_eight_devices():
    """The notes: each device its part of the batch, the gradients of the sums added up, then the mean."""
    config, parameters, batch = start("lenet")
    total = jax.tree.map(np.zeros_like, parameters)
    for part in range(8):
        shard = {name: array[2 * part : 2 * part + 2] for name, array in batch.items()}
        _, gradients = theirs_of("lenet", parameters, shard)
        total = jax.tree.map(lambda sum_, g: sum_ + 2 * g, total, gradients)  # a sum over the two rows
    _, gradients = ours_of(config, parameters, batch, EIGHT)
    jax.tree.map(lambda a, b: close(a, b / 16, 1e-5), gradients, total)


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        ("sgd", SGDOfTheNotes),
        ("sgd", torch.optim.SGD),
        ("adagrad", AdaGradOfTheNotes),
        ("adagrad", torch.optim.Adagrad),
    ],
    ids=["SGD", "torch.optim.SGD", "AdaGrad", "torch.optim.Adagrad"],
)
def test_ten_steps_of_an_optimizer_end_where_the_notes_end(kind, theirs):
    overrides = (f"optimizer.kind={kind}", "optimizer.learning_rate=0.01", *getattr(theirs, "SAME", ()))
    config, parameters, batch = start("cruncher", *overrides)
    weights = tensors(parameters)
    optimizer = theirs(jax.tree.leaves(weights), lr=0.01)
    inputs, targets = torch.tensor(batch["inputs"]), torch.tensor(batch["targets"])
    for _ in range(10):
        for weight in jax.tree.leaves(weights):
            weight.grad = None
        F.mse_loss(cruncher_of_the_notes(weights, inputs), targets).backward()
        optimizer.step()

    model, run = model_of(config.model), context(ONE)
    update = optimizer_of(config, model.parameters())

    @jax.jit
    def step(p, state):
        gradients = jax.grad(lambda p: model.loss(p, {}, jax.tree.map(jnp.asarray, batch), run)[0])(p)
        changes, state = update.update(gradients, state, p)
        return jax.tree.map(lambda p, u: p + 0.01 * u, p, changes), state

    ours, state = parameters, update.init(parameters)
    for _ in range(10):
        ours, state = step(ours, state)
    jax.tree.map(lambda a, b: close(a, b.detach().numpy(), 1e-6), ours, weights)


def test_the_train_step_itself_takes_the_notes_first_step_with_adagrad():
    overrides = ("optimizer.kind=adagrad", "optimizer.learning_rate=0.01", *AdaGradOfTheNotes.SAME)
    config, _, batch = start("cruncher", *overrides)
    built = build_step(config, mesh(ONE))
    state = built.init(np.uint32(0))
    before = jax.tree.map(np.asarray, state["parameters"])
    placed = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding), batch, built.batch
    )
    state, _ = built.step(state, placed)
    weights = tensors(before)
    F.mse_loss(
        cruncher_of_the_notes(weights, torch.tensor(batch["inputs"])), torch.tensor(batch["targets"])
    ).backward()
    AdaGradOfTheNotes(jax.tree.leaves(weights), lr=0.01).step()
    jax.tree.map(lambda a, b: close(a, b.detach().numpy(), 1e-6), state["parameters"], weights)
