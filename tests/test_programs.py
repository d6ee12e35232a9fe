"""The programs in `examples/programs` weigh by the command in their docstrings, as counted by hand."""

import functools
import re
import shlex
from pathlib import Path

import pytest

import meshwright as mw

PROGRAMS = Path(__file__).parents[1] / "examples" / "programs"
COMMAND = re.compile(r"^Weigh it as it is: `meshwright weigh (.*)`\.$", re.M)


@functools.cache
def weighed_as_said(name):
    """Weigh a program as the command in its docstring says."""
    (command,) = COMMAND.findall((PROGRAMS / f"{name}.py").read_text())
    words = shlex.split(command)
    options = {word[2:]: words[place + 1] for place, word in enumerate(words) if word in ("--on", "--layout")}
    assert f"examples/programs/{name}.py" in command
    if "--" in words:
        return mw.weigh(mw.script(*words[words.index("--") + 1 :]), **options)
    return mw.weigh(words[0], **options)


def dense(rows, inputs, outputs, times=3):
    """FLOPs of a product: forward and two gradients; `times` is 2 where its input needs none."""
    return times * 2 * rows * inputs * outputs


def linen_images():
    pixels = 256 * 32 * 32
    return dense(pixels, 9 * 3, 64, 2) + dense(pixels, 9 * 64, 128) + dense(256, 128, 10)


def nnx_language_model():
    rows, length, width, hidden, vocabulary = 32, 128, 256, 1024, 512
    tokens = rows * length
    scores = 2 * dense(rows * length, width, length)  # all of them: the mask is an array
    block = 4 * dense(tokens, width, width) + scores + 2 * dense(tokens, width, hidden)
    return 2 * block + dense(tokens, width, vocabulary)


def equinox_images():
    outputs = 128 * 8 * 8
    return dense(outputs, 16 * 3, 64, 2) + dense(outputs, 9 * 64, 64) + dense(128, 64, 10)


def haiku_residual():
    return dense(512, 64, 256, 2) + 6 * dense(512, 256, 256) + dense(512, 256, 16)


def keras_stateless():
    outputs = 256 * 14 * 14
    return dense(outputs, 9, 32, 2) + dense(outputs, 9 * 32, 64) + dense(256, 64, 10)


def numpyro_network():
    return dense(1024, 32, 256, 2) + dense(1024, 256, 256) + dense(1024, 256, 1)


def diffusion():
    rows, narrow, wide = 64, 64, 128
    large, small = rows * 32 * 32, rows * 16 * 16

    def residual(pixels, inputs, outputs):
        convolutions = dense(pixels, 9 * inputs, outputs) + dense(pixels, 9 * outputs, outputs)
        beside = 0 if inputs == outputs else dense(pixels, inputs, outputs)
        return convolutions + dense(rows, wide, outputs) + beside

    attention = 4 * dense(small, wide, wide) + 2 * dense(small, wide, 16 * 16)
    return sum((
        dense(rows, narrow, wide, 2),
        dense(large, 9 * 3, narrow, 2),
        residual(large, narrow, narrow),
        dense(small, 9 * narrow, wide),
        residual(small, wide, wide),
        attention,
        dense(small, wide, 4 * narrow),  # transposed: the window at every input
        residual(large, 2 * narrow, narrow),
        dense(large, 9 * narrow, 3),
    ))  # fmt: skip


def reinforcement():
    environments, steps, epochs, hidden = 2048, 32, 4, 256
    forward = 2 * (3 * hidden + hidden**2 + hidden)
    rollout = environments * steps * 3 * forward + environments * forward  # the policy twice, and the value
    update = 2 * (dense(1, 3, hidden, 2) + dense(1, hidden, hidden) + dense(1, hidden, 1))
    return rollout + epochs * environments * steps * update


COUNTS = {
    count.__name__: count
    for count in (
        linen_images,
        nnx_language_model,
        equinox_images,
        haiku_residual,
        keras_stateless,
        numpyro_network,
        diffusion,
        reinforcement,
    )
}
ON_EIGHT_DEVICES = {
    "linen_images": (("fsdp", 8),),
    "nnx_language_model": (("data", 4), ("model", 2)),
    "haiku_residual": (("data", 8),),
    "diffusion": (("data", 8),),
}


def test_every_program_is_counted_and_documented():
    names = {path.stem for path in PROGRAMS.glob("*.py")}
    assert names == COUNTS.keys()
    page = (PROGRAMS.parents[1] / "docs/how-to/programs.md").read_text()
    for name in names:
        (command,) = COMMAND.findall((PROGRAMS / f"{name}.py").read_text())
        assert f"`meshwright weigh {command}`" in page


@pytest.mark.wide
@pytest.mark.parametrize("name", COUNTS)
def test_a_program_weighs_by_its_command_as_counted_by_hand(name, monkeypatch, forked_workers):
    monkeypatch.chdir(PROGRAMS.parents[1])
    weighed = weighed_as_said(name)
    flops, memory = weighed.ledger.flops, weighed.ledger.memory
    assert flops.model == COUNTS[name]()
    assert flops.executed == pytest.approx(flops.model, rel=0.16)  # convolutions execute no taps on padding
    assert weighed.fits is True
    assert all("sort" in line for line in weighed.ledger.unpriced)  # the order of the minibatches
    if name in ON_EIGHT_DEVICES:
        assert weighed.layout.axes == ON_EIGHT_DEVICES[name]
        assert any(not each.replicated for each in weighed.compiled.arguments)

    arguments = {each.path for each in weighed.compiled.arguments}
    made = [each for each in memory.buffers if each.operation not in arguments]
    assert flops.by_module.get("", 0) <= 0.1 * flops.executed
    assert sum(b.num_bytes for b in made if not b.module) <= 0.1 * sum(b.num_bytes for b in made)
    assert "arguments" not in memory.by_category


@pytest.mark.wide
def test_what_the_page_prints_is_what_the_command_prints(monkeypatch, forked_workers):
    monkeypatch.chdir(PROGRAMS.parents[1])
    page = Path("docs/how-to/programs.md").read_text()
    (shown,) = re.findall(r"^```console\n(examples/.*?)^```$", page, re.M | re.S)
    assert str(weighed_as_said("nnx_language_model")).startswith(shown)


# What a step of AdamW or Adam keeps for each parameter: two numbers. The scalars beside them are its counts.
@pytest.mark.wide
@pytest.mark.parametrize("name", COUNTS)
def test_the_state_has_its_roles(name, monkeypatch, forked_workers):
    monkeypatch.chdir(PROGRAMS.parents[1])
    by_role = dict.fromkeys(("parameters", "optimizer_state", "model_state", "keys"), 0)
    for each in weighed_as_said(name).compiled.arguments:
        if each.shape and each.role in by_role:
            by_role[each.role] += each.device_bytes
    if name == "numpyro_network":  # it keeps the parameters among the moments
        assert by_role["parameters"] == by_role["optimizer_state"] == 0
        return
    assert by_role["parameters"] > 0
    assert by_role["optimizer_state"] == 2 * by_role["parameters"]
    has_statistics = name in ("linen_images", "equinox_images", "haiku_residual", "keras_stateless")
    assert (by_role["model_state"] > 0) == has_statistics
