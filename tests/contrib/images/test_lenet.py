"""LeNet on image files learns what the same model in PyTorch learns."""

import jax
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.contrib.images import write_sample_images
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.step import build_step

pytestmark = [pytest.mark.optimised, pytest.mark.once]

# At the notes' learning rate of 0.2 the loss jumps after the twelfth step, and rounding is magnified a
# thousandfold: PyTorch with one thread and with two differ as much as PyTorch and we do. By step 64 both have
# settled again.
STEPS = 64  # four epochs of the small set
ALIKE_STEPS = 12
BATCHES = 4  # of 256: all of its held-out images


def with_microbatch(batch):
    return jax.tree.map(lambda x: x[None], batch)


def trained_by_torch(torch, data, parameters, rate):
    """Return the losses and the held-out accuracy of the notes' LeNet and SGD, from the same start."""
    nn = torch.nn
    model = nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    with torch.no_grad():
        for place, name in ((0, "convolution1"), (3, "convolution2"), (7, "hidden"), (9, "head")):
            weight = torch.tensor(np.array(parameters[name]["weight"]))
            model[place].weight.copy_(weight.T if weight.ndim == 2 else weight)
            model[place].bias.copy_(torch.tensor(np.array(parameters[name]["bias"])))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for step in range(STEPS):
        batch = {name: torch.tensor(array) for name, array in data.batch(step, "train").items()}
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["images"]), batch["labels"].long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = []
        for place in range(BATCHES):
            batch = data.batch(place, "held-out")
            right += list(model(torch.tensor(batch["images"])).argmax(1).numpy() == batch["labels"])
    return losses, np.mean(right)


@pytest.mark.long
def test_lenet_learns_as_in_pytorch_with_the_notes_batch_and_learning_rate(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    write_sample_images(tmp_path)
    config = load_config("lenet-fashion", [f"data.folder={tmp_path}", f"evaluation.batches={BATCHES}"])
    assert (config.batch.sequences, config.optimizer.learning_rate) == (256, 0.2)
    built, data = build_step(config, mesh_of((("data", 1),), jax.devices()[:1])), open_data(config)
    state = built.init(np.uint32(config.seed))
    their_losses, their_accuracy = trained_by_torch(torch, data, state["parameters"], 0.2)
    losses = []
    for step in range(STEPS):
        state, metrics = built.step(state, with_microbatch(data.batch(step, "train")))
        losses.append(float(metrics["loss"]))
    assert losses[:ALIKE_STEPS] == pytest.approx(their_losses[:ALIKE_STEPS], rel=1e-3)
    assert 0 <= float(metrics["accuracy"]) <= 1
    held_out = [
        built.evaluate(state["parameters"], {}, with_microbatch(data.batch(place, "held-out")))["accuracy"]
        for place in range(BATCHES)
    ]
    assert their_accuracy > 0.95
    assert np.mean(held_out) == pytest.approx(their_accuracy, abs=0.02)
