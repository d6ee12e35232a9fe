"""Equal blocks of a module run as one loop over their stacked parameters, and compute the same as before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.contrib.torch_as_jax import ModuleStep, optimizer_named  # noqa: E402
from tests.rounding import FLOAT32  # noqa: E402

WIDTH, ROWS = 8, 4


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, drop: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(drop)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x, scale=1.0):
        return x + scale * self.norm(self.drop(self.down(self.up(x).tanh())))


class Stack(nn.Module):
    """Calls its blocks in one of several ways."""

    def __init__(self, way: str, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.start = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        seen, x = [], self.start(x)
        for place, block in enumerate(self.blocks):
            match self.way:
                case "again":
                    x = checkpoint(block, x, use_reentrant=False)
                case "scaled":
                    x = block(x, self.scale)  # a parameter that all of them read
                case "skips":
                    x = block(x) + (seen[-2] if place > 1 else 0)  # reads the block before the last
                case "constants":
                    x = block(x, torch.tensor([0.5, 2.0]).sum())  # one constant for each call
                case _:
                    x = block(x)
            seen.append(x)
        if self.way == "seen":  # what each of them gives is read later
            return torch.stack([(n + 1) * each.square().mean() for n, each in enumerate(seen)]).sum()
        return x.square().mean()


def shared():
    block = Block()
    return [block] * 3


def tied():
    """Return blocks of which two have one matrix."""
    blocks = [Block() for _ in range(4)]
    blocks[3].up.weight = blocks[0].up.weight
    return blocks


def frozen():
    blocks = [Block() for _ in range(4)]
    for block in blocks:
        block.up.requires_grad_(False)
    return blocks


CASES = {  # blocks by way, and how many of them are in loops
    "plain": (lambda: [Block() for _ in range(4)], 4),
    "again": (lambda: [Block() for _ in range(3)], 3),
    "scaled": (lambda: [Block() for _ in range(3)], 3),
    "seen": (lambda: [Block() for _ in range(3)], 3),
    "constants": (lambda: [Block() for _ in range(3)], 2),  # after the last comes the loss, not a constant
    "dropout": (lambda: [Block(drop=0.5) for _ in range(3)], 3),
    "statistics": (lambda: [Block(norm=True) for _ in range(3)], 3),
    "frozen": (frozen, 4),
    "tied": (tied, 2),
    "skips": (lambda: [Block() for _ in range(6)], 2),  # the first two read no other
    "shared": (shared, 0),
}


def after_a_step(program, loops: bool):
    """Return the step, and what it makes of the state that is given by the module's names."""
    # With a rate of 1 and no momentum the parameters have changed by their gradients.
    update = optimizer_named("SGD", {"lr": 1.0})
    return ModuleStep(program=program, mesh_axes=(("fsdp", 1),), optimizer=update, loops=loops)


def state_of(step, parameters, buffers):
    held = {name: jnp.copy(x) for name, x in step.stacked(parameters).items()}  # a step donates its state
    trained = {name: x for name, x in held.items() if name in step.trained}
    return {
        "parameters": held,
        "optimizer": step.optimizer.init(trained),
        "buffers": jax.tree.map(jnp.copy, buffers),
    }


@pytest.mark.parametrize("way", CASES)
def test_a_loop_computes_what_its_blocks_compute_one_by_one(way):
    torch.manual_seed(0)
    blocks, looped = CASES[way]
    module = Stack(way, blocks())
    found = mw.module_as_jax(module, torch.zeros(ROWS, WIDTH))
    parameters, buffers = found.arrays_of(module)
    batch = {"args[0]": jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WIDTH)), "float32")}
    key = jax.random.key(1) if found.is_random else None
    made = {}
    for loops in (False, True):
        step = after_a_step(found.program, loops)
        state, loss = step.function()(state_of(step, parameters, buffers), batch, key)
        made[loops] = step, state, loss
    one_by_one, in_loops = made[False][1], made[True][1]
    step = made[True][0]
    assert step.num_looped == looped
    assert len(in_loops["parameters"]) <= len(one_by_one["parameters"])
    assert float(made[True][2]) == pytest.approx(float(made[False][2]), rel=1e-6)
    largest = max(float(np.abs(x).max()) for x in one_by_one["parameters"].values())
    for name, expected in step.stacked(one_by_one["parameters"]).items():
        atol = FLOAT32 * largest
        np.testing.assert_allclose(in_loops["parameters"][name], expected, atol=atol, err_msg=name)
    for name, expected in one_by_one["buffers"].items():
        np.testing.assert_allclose(in_loops["buffers"][name], expected, rtol=1e-6, err_msg=name)
    assert any(np.abs(x - parameters[n]).max() > 1e-3 for n, x in one_by_one["parameters"].items())


class Alternating(nn.Module):
    """Blocks of two kinds in turn: the loop's unit is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            Block() if n % 2 == 0 else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for n in range(6)
        )

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_blocks_that_alternate_are_one_loop_over_pairs():
    found = mw.module_as_jax(Alternating(), torch.zeros(ROWS, WIDTH))
    step = after_a_step(found.program, loops=True)
    held = step.arguments()[0]["parameters"]
    assert {name: x.shape for name, x in held.items() if name.startswith("layers")} == {
        "layers.0-4.up.weight": (3, 2 * WIDTH, WIDTH),
        "layers.0-4.up.bias": (3, 2 * WIDTH),
        "layers.0-4.down.weight": (3, WIDTH, 2 * WIDTH),
        "layers.0-4.down.bias": (3, WIDTH),
        "layers.1-5.0.weight": (3, WIDTH, WIDTH),
        "layers.1-5.0.bias": (3, WIDTH),
    }


def test_a_weighing_says_that_blocks_are_in_a_loop():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    program = mw.torch_step(nn.Sequential(*layers), torch.ones(ROWS, WIDTH)).as_jax()
    made = mw.weigh(program, on="8xH100", layout="fsdp=8")
    # The input of the first needs no gradient, so that the first stays outside.
    assert any(line.startswith("3 equal blocks") for line in made.ledger.assumptions)
    unrolled = mw.weigh(program, on="8xH100", layout="data=8")
    assert not any("equal blocks" in line for line in unrolled.ledger.assumptions)
    assert made.ledger.flops.model == unrolled.ledger.flops.model
