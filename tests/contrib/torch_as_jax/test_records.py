"""A module that another process exports comes as JSON: all of it, and nothing that was not exported."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.contrib.torch_as_jax import ExportedFunction, JaxModule  # noqa: E402
from meshwright.contrib.torch_eager import text_in  # noqa: E402
from meshwright.errors import InputError  # noqa: E402

WEIGHTS = [0.1, 0.2, 0.3, 0.4]


class Net(nn.Module):
    """It has constants, numbers that are not finite, results of several arrays, dropout and running means."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x):
        y = self.drop(self.norm(self.layer(x))) * torch.tensor(WEIGHTS)
        largest, _ = y.masked_fill(x > 1, -math.inf).max(dim=1)
        return (largest.clamp(min=-9.0) + y.chunk(2, 1)[1].sum(1)).mean()


def exported(module: nn.Module | None = None, **options) -> ExportedFunction:
    program = mw.module_as_jax(module or Net(), torch.ones(3, 4)).program
    return ExportedFunction(program=program, optimizer=("SGD", options), has_plan=False)


@pytest.fixture(scope="module")
def text() -> str:
    return exported(lr=0.1, betas=(0.9, math.inf)).to_json()


def test_a_program_is_the_same_after_its_way_through_json(text):
    module = Net()
    given, found = exported(module), ExportedFunction.from_json(exported(module).to_json())
    pairs = zip(given.program.operations, found.program.operations, strict=True)
    assert all(ours == theirs for ours, theirs in pairs)
    for field in dataclasses.fields(given.program):
        if field.name != "constants":
            assert getattr(found.program, field.name) == getattr(given.program, field.name), field.name
    arrays = [value for value in found.program.constants.values() if isinstance(value, np.ndarray)]
    assert any(np.array_equal(value, np.float32(WEIGHTS)) for value in arrays)
    modules = JaxModule(program=given.program), JaxModule(program=found.program)
    values, x = modules[0].arrays_of(module), {"args[0]": jnp.ones((3, 4))}
    losses = [each.loss(*values, x, jax.random.key(0))[0] for each in modules]
    assert losses[0] == losses[1]


def test_options_of_optimizers_keep_their_numbers(text):
    assert ExportedFunction.from_json(text).optimizer == ("SGD", {"lr": 0.1, "betas": [0.9, math.inf]})
    of_another = exported(rule=lambda x: x, lr=1).to_json()  # refused by its name, when it is looked up
    assert ExportedFunction.from_json(of_another).optimizer == ("SGD", {"lr": 1})


def changed(text: str, change) -> str:
    fields = json.loads(text)
    change(fields["program"], fields)
    return json.dumps(fields)


def first(program, name):
    return next(each for each in program["operations"] if each["name"].endswith(name))


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("unpickled"),))


def array(**how):
    return {"array": "AAAAAA==", "dtype": "float32", "shape": [1], **how}


CHANGES = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a pickle": lambda text: pickle.dumps(Bomb(), protocol=0).decode(),
    "another object": lambda text: "{}",
    "a list": lambda text: "[]",
    "twice": lambda text: text[:-1] + ', "has_plan": true}',
    "deep": lambda text: "[" * 5000 + "]" * 5000,
}
INNER = {
    "an operation without a rule": lambda p, _: p["operations"][0].update(name="os::system"),
    "what nothing makes": lambda p, _: first(p, "::mean")["args"].__setitem__(0, {"value": "nobody"}),
    "what comes later": lambda p, _: p["operations"][0]["args"].__setitem__(0, {"value": p["result"]}),
    "the result": lambda p, _: p.update(result="nobody"),
    "a parameter": lambda p, _: p["sources"].update(more=["parameters", "nobody"]),
    "a kind": lambda p, _: p["sources"].update(more=["__class__", "layer.weight"]),
    "a stored format": lambda p, _: p["stored"].update({"layer.weight": "object"}),
    "a stored parameter": lambda p, _: p["stored"].update(nobody="float32"),
    "a frozen parameter": lambda p, _: p.update(frozen=["nobody"]),
    "a buffer": lambda p, _: p["updates"].update(nobody=p["result"]),
    "a format": lambda p, _: p["parameters"]["layer.weight"].update(dtype="object"),
    "a size": lambda p, _: p["parameters"]["layer.weight"].update(shape=[-1, 4]),
    "no size": lambda p, _: p["parameters"]["layer.weight"].update(shape=["x", 4]),
    "a result's size": lambda p, _: first(p, "::mean")["arrays"][0].update(shape=[-4]),
    "results": lambda p, _: first(p, "::mean").update(arrays=[]),
    "an item": lambda p, _: first(p, "getitem")["args"].__setitem__(1, "__class__"),
    "an object": lambda p, _: first(p, "::mean")["args"].append({"object": "os.system"}),
    "more of an object": lambda p, _: first(p, "::mean")["args"].append({"value": "x", "more": 1}),
    "no float": lambda p, _: first(p, "::mean")["args"].append({"float": "1e5"}),
    "no number": lambda p, _: p["constants"].update(c={"complex": ["1", "2"]}),
    "objects": lambda p, _: p["constants"].update(c=array(dtype="object")),
    "too few bytes": lambda p, _: p["constants"].update(c=array(shape=[2])),
    "a huge array": lambda p, _: p["constants"].update(c=array(shape=[2**40, 2**40])),
    "a negative array": lambda p, _: p["constants"].update(c=array(shape=[-1])),
    "no base64": lambda p, _: p["constants"].update(c=array(array="*")),
    "no optimizer": lambda _, f: f.update(optimizer=["SGD"]),
    "an option": lambda _, f: f.update(optimizer=["SGD", {"lr": {"object": 1}}]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_damaged_answer_is_refused_in_words(change, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="this is not an exported module: ") as refused:
        ExportedFunction.from_json(change(text))
    assert refused.value.hint.startswith("let the function, and what it calls, write and delete only files")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", INNER.values(), ids=INNER)
def test_a_hostile_answer_is_refused_in_words(change, text):
    with pytest.raises(InputError, match="this is not an exported module: "):
        ExportedFunction.from_json(changed(text, change))


HOSTILE = """
import atexit, json, os, sys
import torch
from torch import nn

FOLDER = sys.argv[2]


def build():
    with open(os.path.join(FOLDER, "answer.json"), "w") as file:
        json.dump(ANSWER, file)
    os._exit(0)
"""


def test_a_function_that_writes_the_answer_itself_is_told_so(tmp_path, monkeypatch):
    answer = {"exported": base64.b64encode(pickle.dumps(Bomb())).decode()}
    (tmp_path / "hostile_net.py").write_text(HOSTILE.replace("ANSWER", repr(answer)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="this is not an exported module: "):
        mw.weigh(mw.torch_step("hostile_net.py:build").as_jax(), on="8xCPU")
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("answer", [{"exported": [1]}, {"exported": None}, {}])
def test_an_answer_without_the_program_is_said(answer):
    with pytest.raises(InputError, match="the answer of the function's process has no exported"):
        text_in(answer, "exported")
