from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.contrib.torch_eager import answer_apart, parts_of_function
from meshwright.errors import InputError
from tests.contrib.torch_eager.steps import Counted, counted

ROOT = Path(__file__).parents[3]
MAKERS = """
import torch
from torch import nn

CREATED = []

def pair():
    return nn.Linear(4, 4), torch.randn(2, 4)

def named():
    return {"module": nn.Linear(4, 4), "inputs": {"input": torch.randn(2, 4)}, "optimizer": torch.optim.AdamW,
            "loss": lambda output: output.mean(), "autocast": torch.bfloat16}

def single():
    return {"module": nn.Linear(4, 4), "inputs": torch.randn(2, 4)}

def huge():
    return nn.Linear(1_000_000, 1_000_000), torch.randn(2, 1_000_000)

def narrowed():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16(), torch.randn(2, 4).to(torch.bfloat16)

def nothing():
    return None

def bare():
    return nn.Linear(4, 4)

MODULE = nn.Linear(4, 4)

def moved():
    return nn.Linear(4, 4).to("cpu"), torch.randn(2, 4)

def without():
    return {"inputs": ()}

def misspelt():
    return {"module": nn.Linear(4, 4), "optimiser": torch.optim.SGD}

class Scaled(nn.Linear):
    def forward(self, x, loss):
        return super().forward(x) * loss

def clash():
    return {"module": Scaled(4, 4), "inputs": {"x": torch.randn(2, 4), "loss": torch.randn(())}}

def fails():
    return torch.zeros(3).item() + [][1]

def lacks():
    import surely_not_installed

def on_cuda():
    return nn.Linear(4, 4, device="cuda"), torch.randn(2, 4, device="cuda")
"""


def of_function(name: str, folder: Path) -> Counted:
    """Call a function here as its own process would, and weigh what it returns."""
    parts = parts_of_function(name, (str(folder),))
    module, inputs, by_name = (parts.pop(part) for part in ("module", "inputs", "keyword_inputs"))
    return counted(module, *inputs, **parts, **by_name)


@pytest.fixture
def made(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "makers_of_modules.py").write_text(MAKERS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda name: of_function(f"makers_of_modules:{name}", tmp_path)
    sys.modules.pop("makers_of_modules", None)


@pytest.mark.parametrize("name", ["pair", "named", "single"])
def test_a_function_returns_a_module_and_its_inputs_in_one_of_three_ways(made, name):
    account = made(name)
    assert account.forward == 2 * 2 * 4 * 4
    assert bool(account.rank.optimizer_state_bytes) == (name == "named")
    assert account.by_format.keys() == {"bf16" if name == "named" else "fp32"}


def test_the_function_makes_shapes_alone(made):
    assert made("narrowed").rank.bytes_by_format["parameters"].keys() == {"bf16"}
    assert made("huge").rank.parameters_bytes > 4e12


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (
            "nothing",
            "makers_of_modules:nothing returned a NoneType, with no module",
            "return (module, *inputs), or",
        ),
        ("bare", "makers_of_modules:bare gives a module, Linear, and none", "let a function make it, and"),
        ("MODULE", "makers_of_modules:MODULE is a Linear, a module, and no fun", "name a function: return"),
        ("moved", "makers_of_modules:moved() failed at ", "it is called on the meta device"),
        (
            "without",
            "makers_of_modules:without returned a mapping of inputs, with no module",
            "return (module, *inp",
        ),
        (
            "misspelt",
            "makers_of_modules:misspelt returned a part named 'optimiser'",
            "did you mean 'optimizer'?",
        ),
        (
            "lacks",
            "makers_of_modules:lacks needs 'surely_not_installed', which is not installed",
            "install surely_not",
        ),
        ("pairs", "makers_of_modules has no function 'pairs'", "did you mean 'pair'?"),
    ],
)
def test_what_is_wrong_with_the_function_is_said(made, name, message, hint):
    with pytest.raises(InputError) as raised:
        made(name)
    assert raised.value.message.startswith(message)
    assert raised.value.hint.startswith(hint)


def test_a_function_that_fails_is_told_with_its_line(made):
    with pytest.raises(InputError) as raised:
        made("fails")
    line = MAKERS.splitlines().index("    return torch.zeros(3).item() + [][1]") + 1
    assert f"makers_of_modules.py:{line}: " in raised.value.message
    assert raised.value.hint.startswith("it is called without arguments, and its tensors")


def test_a_name_without_a_function_is_told_how_to_write_one():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(InputError) as raised:
        parts_of_function("examples.torch_modules", ())
    assert raised.value.message == "'examples.torch_modules' does not name a function"
    assert "examples.torch_modules:make" in raised.value.hint


def test_without_pytorch_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match="PyTorch is not installed"):
        parts_of_function("examples.torch_modules:lenet", ())


@pytest.mark.parametrize(
    ("name", "parameters", "forward"),
    [
        ("cruncher", 2 * 64 * 64 + 64, 2 * 8 * (2 * 64 * 64 + 64)),
        # 26 x 26 and 9 x 9 places of the two convolutions, then two layers.
        ("lenet", 129_068, 2 * 256 * (20 * 9 * 26**2 + 50 * 20 * 25 * 9**2 + 800 * 128 + 128 * 10)),
        # 12 x width^2 of matrices per token, and causal attention over 1024 positions: 4 rows, 12 heads.
        ("gpt_block", 7_087_872, 2 * 4096 * 12 * 768**2 + 4 * 4 * 12 * 64 * (1024 * 1025 // 2)),
    ],
)
def test_the_examples_count_as_by_hand(name, parameters, forward, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(sys, "path", list(sys.path))
    account = of_function(f"examples.torch_modules:{name}", ROOT)
    assert account.num_parameters == parameters
    assert account.forward == forward
    assert not account.unknown


def test_a_function_is_called_by_its_name_in_a_process_of_its_own(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "makers_of_modules.py").write_text(MAKERS)
    monkeypatch.chdir(tmp_path)
    found = Counted(mw.weigh(mw.torch_step("makers_of_modules:clash"), on="1xCPU"))
    assert (found.forward, found.num_parameters, found.rank.inputs_bytes) == (
        2 * 2 * 4 * 4,
        20,
        2 * 4 * 4 + 4,
    )
    assert "makers_of_modules" not in sys.modules


def test_a_device_that_is_not_there_is_told_in_words(made):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InputError, match=r"makers_of_modules:on_cuda\(\) failed at .*CUDA") as raised:
        made("on_cuda")
    assert raised.value.hint == "there is no CUDA device here: leave the device out"


def test_a_function_that_never_ends_is_ended_in_words(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(10**6)\ndef build(): pass\n")
    request = {"function": "waits:build", "knobs": {}, "search_path": [str(tmp_path)]}
    with pytest.raises(
        InputError, match=r"waits:build was not done after 2 s \((starting|importing|making the module)"
    ):
        answer_apart(
            "meshwright.contrib.torch_as_jax._export_process",
            json.dumps(request).encode(),
            "waits:build",
            lambda phase: None,
            time_limit_seconds=2.0,
        )
