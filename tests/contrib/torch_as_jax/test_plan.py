"""Layouts and checkpoints of a PyTorch module as a JAX program are planned by compiling them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from meshwright.hardware import Fleet  # noqa: E402
from tests import commands  # noqa: E402

WIDTH, ROWS, LAYERS = 64, 32, 3
LOOP = {"layout": "fsdp=8", "layers": "loop"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.again = again

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()


def inputs():
    return (torch.ones(ROWS, WIDTH),)


def program(module=None, **how):
    return mw.torch_step(Net() if module is None else module, *inputs(), **how).as_jax()


@pytest.fixture(scope="module")
def made(forked_workers):
    run = mw.RunLength(tokens_per_step=8 * ROWS)
    search = ["fsdp=8", "layers=loop"]
    return mw.plan(program(), on="8xH100", search=search, run=run, budget_seconds=60)


def test_both_ways_to_checkpoint_are_compiled_and_ranked(made):
    chosen = {(each.overrides["layout"], each.overrides["checkpoint"]) for each in made.candidates}
    assert chosen == {("fsdp=8", "module"), ("fsdp=8", "blocks")}
    seconds = [each.step_seconds.expected for each in made.fitting]
    assert seconds == sorted(seconds)
    assert made.winner.prediction.tokens_per_second_per_device == pytest.approx(ROWS / seconds[0])
    assert made.name == "Net as a JAX program"


def test_a_candidate_is_what_weigh_finds(made):
    weighed = mw.weigh(program(), on="8xH100", layout="fsdp=8")
    same = next(c for c in made.candidates if c.overrides == LOOP | {"checkpoint": "module"})
    assert weighed.cached
    assert same.step_seconds.expected == weighed.step_seconds
    assert same.reserved_bytes == weighed.ledger.memory.reserved_bytes


def test_checkpointed_blocks_are_those_of_a_module_that_checkpoints_them(made):
    again = Net(again=True)
    assert mw.module_as_jax(again, *inputs()).program.checkpoints == ("module", "none")
    weighed = mw.weigh(program(again), on="8xH100", layout="fsdp=8")
    same = next(c for c in made.candidates if c.overrides == LOOP | {"checkpoint": "blocks"})
    assert weighed.cached
    assert same.reserved_bytes == weighed.ledger.memory.reserved_bytes
    # The first product of each block runs again, and the second one's result is not needed.
    assert weighed.ledger.flops.recomputed == LAYERS * 2 * 8 * ROWS * WIDTH * 4 * WIDTH


def test_layouts_whose_state_does_not_fit_are_not_compiled(forked_workers):
    fleet = Fleet.parse("8xH100")
    width = 8192
    module = nn.Linear(width, 8 * width, bias=False, device="meta")
    state = 3 * 4 * 8 * width**2  # parameters and two moments
    room = 3 * 2**30  # less than the state, more than an eighth of it and the allowance of a layout
    assert state / 8 < room - 2**30
    assert room < state
    chip = dataclasses.replace(fleet.chip, memory_bytes=room)
    made = mw.plan(
        mw.torch_step(module, torch.ones(1, width, device="meta")).as_jax(),
        on=dataclasses.replace(fleet, chip=chip),
        search={"fsdp": [8, 1]},
        budget_seconds=1,
    )
    assert made.removed == {"parameters and optimizer state alone do not fit": 1}
    assert [each.layout for each in made.candidates] == ["fsdp=8"]


@pytest.mark.wide
def test_each_layout_is_a_candidate(forked_workers):
    made = mw.plan(program(), on="4xH100", search={"checkpoint": "module", "layers": "loop"})
    assert {each.layout for each in made.candidates} == {"fsdp=4", "data=2,fsdp=2", "data=4"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"search": ["tensor=2"]}, "a module as a JAX program has no knob tensor"),
        ({"search": ["fsdp=3"]}, "no mesh of data, fsdp has the 8 devices"),
        ({"search": ["checkpoint=all"]}, "checkpoint = 'all' is none of its values"),
        ({"smallest_fleet": True}, "on each number its step is another one"),
    ],
    ids=["an axis", "a size", "a value", "the smallest fleet"],
)
def test_a_plan_of_a_module_is_refused_in_words(given, told):
    with pytest.raises(InputError) as refused:
        mw.plan(program(), on="8xH100", **given)
    assert told in refused.value.message
    assert refused.value.hint


def test_a_step_of_pytorch_and_an_optimizer_without_a_counterpart_are_not_planned():
    step = mw.torch_step(Net(), *inputs())
    with pytest.raises(InputError, match="Net is a PyTorch module, and layouts are searched for") as refused:
        mw.plan(step, on="8xH100")
    assert "as_jax()" in refused.value.hint
    with pytest.raises(InputError, match="the optimizer Rprop has no counterpart"):
        mw.plan(program(optimizer=torch.optim.Rprop), on="8xH100")


def test_fleets_of_one_size_are_compared():
    with pytest.raises(InputError, match="on each number its step is another one"):
        mw.plan_fleets(program(), on=["8xH100", "4xH100"])


BUILD = """
import torch
from torch import nn


def build(width: int = 8):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    return {"module": nn.Sequential(*blocks), "inputs": (torch.zeros(4, width),)}
"""


def test_the_command_line_plans_a_functions_module(tmp_path: Path):
    (tmp_path / "net.py").write_text(BUILD)

    words = "plan net.py:build --on 8xH100 --set width=16 --as jax --fix fsdp=8 --fix layers=loop --json"
    done = commands.run(*words.split(), folder=tmp_path)
    assert done.status == 0, done.talk
    fields = done.json
    assert fields["config"] == "net.py:build as a JAX program"
    assert fields["best"]["layout"] == "fsdp=8"
    assert {each["overrides"]["layers"] for each in fields["candidates"]} == {"loop"}
