"""A module's training step as a JAX program: it trains as PyTorch does, and is weighed as any program is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.contrib.torch_as_jax import ModuleStep, name_and_options, optimizer_named  # noqa: E402
from tests import commands  # noqa: E402
from tests.rounding import FLOAT32  # noqa: E402

WIDTH, WORDS, LENGTH, LAYERS, DEVICES = 32, 64, 16, 3, 8


class Net(nn.Module):
    """Blocks of attention and an MLP between a table and itself."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.again = again

    def forward(self, words):
        x = self.table(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.roll(-1, 1).flatten())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = [
            each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.mixed(self.norm(x)).chunk(3, -1)
        ]
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


def words(rows: int):
    return torch.randint(WORDS, (rows, LENGTH))


# With Adam's usual epsilon of 1e-8 a gradient that is nothing but rounding moves its parameter by the whole
# rate. With this one its error moves it by at most ten times the error.
SMOOTH = {"lr": 1e-2, "eps": 1e-3}


@pytest.mark.parametrize(
    ("axes", "name", "options"),
    [
        ((("data", 2), ("fsdp", 4)), "AdamW", {**SMOOTH, "lr": torch.tensor(1e-2), "weight_decay": 0.1}),
        pytest.param(
            (("fsdp", 8),),
            "SGD",
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            marks=pytest.mark.wide,
        ),
        pytest.param((("data", 8),), "Adam", SMOOTH, marks=pytest.mark.wide),
    ],
    ids=["hybrid", "fsdp", "data"],
)
def test_three_steps_on_eight_devices_are_those_of_pytorch_on_the_whole_batch(axes, name, options):
    torch.manual_seed(0)
    module, rows = Net(), words(DEVICES)
    found = mw.module_as_jax(module, rows[:1])
    update = optimizer_named(*name_and_options(partial(getattr(torch.optim, name), **options)))
    step = ModuleStep(program=found.program, mesh_axes=axes, optimizer=update)
    told, batch_told, key = step.arguments()
    assert key is None
    sizes = tuple(size for _, size in axes)
    mesh = jax.make_mesh(sizes, tuple(n for n, _ in axes), axis_types=(AxisType.Auto,) * len(axes))

    def placed(value, shape):
        return jax.device_put(value, NamedSharding(mesh, shape.sharding.spec))

    parameters, buffers = found.arrays_of(module)
    parameters = step.stacked(parameters)
    state = {"parameters": parameters, "optimizer": step.optimizer.init(parameters), "buffers": buffers}
    state = jax.tree.map(placed, state, told)
    batch = {"args[0]": placed(jnp.asarray(rows.numpy()), batch_told["args[0]"])}
    function = step.function()
    theirs = getattr(torch.optim, name)(module.parameters(), **options)
    for _ in range(3):
        state, value = function(state, batch, None)
        theirs.zero_grad()
        loss = module(rows)
        loss.backward()
        theirs.step()
        # Steps of 0.01 take the loss from 33 to 20 and 12. So an error of 1e-6 of all parameters alike takes
        # it 1e-3 off: ten times what float32 allows for one step.
        assert float(value) == pytest.approx(loss.item(), rel=10 * FLOAT32)
    theirs_now = step.stacked({n: jnp.asarray(p.detach().numpy()) for n, p in module.named_parameters()})
    assert theirs_now.keys() == state["parameters"].keys()
    assert sum(each.size for each in theirs_now.values()) == numbers()
    for path, parameter in theirs_now.items():
        ours = np.asarray(state["parameters"][path])
        np.testing.assert_allclose(ours, parameter, atol=2e-5, err_msg=path)


PRODUCTS = WIDTH * 3 * WIDTH + 2 * WIDTH * 4 * WIDTH  # of a block, for a token
ATTENTION = 2 * WIDTH * LENGTH  # of a block, for a token: queries by keys, scores by values


def numbers() -> int:
    return sum(parameter.numel() for parameter in Net().parameters())


@pytest.fixture(scope="module")
def weighing():
    with torch.device("meta"):
        module, rows = Net(), words(2)
    run = mw.RunLength(tokens_per_step=256)
    return mw.weigh(mw.torch_step(module, rows).as_jax(), on="8xH100", layout="fsdp=8", run=run)


def test_flops_are_those_by_hand(weighing):
    tokens = DEVICES * 2 * LENGTH
    # Causal attention needs half; the gradient of the table's lookup is no product.
    forward = 2 * tokens * (LAYERS * (PRODUCTS + ATTENTION / 2) + WIDTH * WORDS)
    assert weighing.ledger.flops.model == 3 * forward


def test_memory_and_messages_are_those_of_fsdp(weighing):
    memory = weighing.ledger.memory.by_category
    assert memory["parameters"] == 4 * numbers() // DEVICES
    assert memory["optimizer_state"] == 2 * 4 * numbers() // DEVICES + 4  # and the count of steps
    sent = {row.kind: 0 for row in weighing.ledger.traffic}
    for row in weighing.ledger.traffic:
        sent[row.kind] += row.payload_bytes
    # The backward pass gathers again what it reads of a block: all but the last bias.
    assert sent["all-gather"] == 4 * (numbers() + LAYERS * (PRODUCTS + 2 * WIDTH + 4 * WIDTH))


def test_a_weighing_says_what_it_is_of(weighing):
    assert weighing.name == "Net as a JAX program"
    first, second, *_ = weighing.ledger.assumptions
    assert "no figure is of PyTorch's own run" in first
    assert "inputs are those of one device; 8 devices have as many each" in second
    assert weighing.prediction is not None


@pytest.mark.wide
def test_a_checkpoint_of_the_module_recomputes():
    def flops(again: bool):
        with torch.device("meta"):
            module, rows = Net(again), words(2)
        return mw.weigh(mw.torch_step(module, rows).as_jax(), on="1xCPU").ledger.flops

    plain, again = flops(False), flops(True)
    assert again.model == plain.model
    assert plain.recomputed == 0
    assert again.recomputed > 0


def test_a_module_with_dropout_is_weighed_with_a_key():
    step = mw.torch_step(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)),
        torch.ones(4, 8),
        loss=lambda y: y.square().mean(),
        optimizer=torch.optim.SGD,
    )
    made = mw.weigh(step.as_jax(), on="8xCPU", layout="data=8")
    assert any(each.role == "keys" for each in made.compiled.arguments)


def test_frozen_parameters_have_no_state_and_no_gradient():
    def state_bytes(frozen: bool):
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))
        module[0].requires_grad_(not frozen)
        made = mw.weigh(mw.torch_step(module, torch.ones(4, 8)).as_jax(), on="1xCPU")
        return made.ledger.memory.by_category["optimizer_state"], made.ledger.flops.model

    trained, frozen = state_bytes(False), state_bytes(True)
    assert trained[0] - frozen[0] == 2 * 4 * (8 * 8 + 8)
    # Neither the matrix's gradient nor that of the inner input.
    assert trained[1] - frozen[1] == 2 * 4 * (8 * 8 + 8 * 4)


def test_a_module_is_weighed_for_tpus_too():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is not installed")
    made = mw.weigh(mw.torch_step(Net(), words(2), autocast=torch.bfloat16).as_jax(), on="v5e-8")
    assert made.fits


BUILD = """
import torch
from torch import nn

print("building")


def build(width: int = 8):
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return {
        "module": module,
        "inputs": (torch.zeros(4, width),),
        "optimizer": torch.optim.AdamW,
        "loss": lambda y: y.square().mean(),
        "parallelize": lambda module, mesh: module,
    }
"""


def run(folder: Path, *words: str) -> commands.Done:
    (folder / "net.py").write_text(BUILD)
    return commands.run("weigh", *words, folder=folder)


def test_the_command_line_weighs_a_functions_module_as_jax(tmp_path: Path):
    done = run(tmp_path, "net.py:build", "--as", "jax", "--on", "8xCPU", "--set", "width=16", "--json")
    assert done.status == 0, done.talk
    fields = done.json
    assert fields["config"] == "net.py:build as a JAX program"
    assert fields["layout"] == {"fsdp": 8} or "fsdp" in str(fields["layout"])
    # Forward 2, backward 2 for the matrices and 1 for the inner input; 32 rows in all.
    assert fields["ledger"]["flops"]["model"] == 2 * 32 * (2 * 16 * 16 + 3 * 16)
    assert any("`parallelize`" in line for line in fields["ledger"]["assumptions"])


def test_a_function_that_ends_its_process_leaves_the_command_its_words(tmp_path: Path):
    text = BUILD.replace("    return {", "    import os\n\n    os._exit(7)\n    return {")
    (tmp_path / "ends.py").write_text(text)
    done = run(tmp_path, "ends.py:build", "--as", "jax", "--on", "8xCPU")
    assert done.status == 2
    told = " ".join(done.talk.split())
    assert "ends.py:build, or what it calls, ended its process, which ended with status 7" in told
    assert "building" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("net.py:build", "--as", "flax", "--on", "8xCPU"), "cannot be weighed as 'flax'"),
        (("gpt2-124m", "--as", "jax", "--on", "8xCPU"), "a configuration takes no --as"),
        (("net.py", "--as", "jax", "--on", "8xCPU"), "a script takes no --as"),
    ],
    ids=["another kind", "a configuration", "a script"],
)
def test_the_command_line_refuses_as_where_it_has_no_meaning(words, told, tmp_path: Path):
    done = run(tmp_path, *words)
    assert done.status != 0
    assert told in done.talk


def test_help_shows_an_example_of_as():
    done = commands.run("weigh", "--help")
    assert "--as jax" in " ".join(done.output.split())
