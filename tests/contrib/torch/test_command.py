"""`meshwright weigh` of a function that returns a PyTorch module."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.extras import how_to_install
from tests import commands

ROOT = Path(__file__).parents[3]


@pytest.fixture
def meshwright():
    return commands.run


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_one_device_is_a_fleet_too(meshwright):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    done = meshwright("weigh", "examples.torch_modules:cruncher", "--on", "1xRTX-4090", "--verbose")
    assert (done.status, done.talk) == (0, "")
    for words in ("8.26K parameters", "FITS: ", "Modules of one rank, with all inside them", "layers/*"):
        assert words in done.output, words
    fields = meshwright("weigh", "examples.torch_modules:cruncher", "--on", "1xRTX-4090", "--json").json
    assert fields["ledger"]["flops"]["by_phase"]["forward"] == 2 * 8 * (2 * 64 * 64 + 64)


def test_a_fleet_makes_it_a_weighing(meshwright, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    command = ("weigh", "examples.torch_modules:gpt_block", "--on", "8xH100", "--tokens-per-step", "32768")
    done = meshwright(*command, "--html", str(tmp_path / "page.html"))
    assert (done.status, done.talk) == (0, "")
    assert done.output.startswith("examples.torch_modules:gpt_block on 8xH100, layout fsdp=8, 7.09M param")
    assert "FITS: " in done.output
    assert "by PyTorch" in done.output
    assert "Collectives of one rank by phase" in (tmp_path / "page.html").read_text()


@pytest.mark.wide
def test_a_weighing_that_compiles_nothing_has_nothing_to_explain(meshwright):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    command = ("weigh", "examples.torch_modules:gpt_block", "--on", "8xH100", "--tokens-per-step", "32768")
    refused = meshwright(*command, "--explain")
    assert refused.status == 2
    assert "--explain needs a compiled step" in refused.talk


def test_a_functions_arguments_are_set_by_name(meshwright, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "stacks.py").write_text(STACKS)
    monkeypatch.chdir(tmp_path)
    command = ("weigh", "stacks:stack", "--on", "2xH100", "--json")
    done = meshwright(*command, "--set", "width=128", "--set", "bias=true")
    assert done.json["num_parameters"] == 2 * (128 * 128 + 128)
    fields = done.json["pytorch"]
    text = next((ROOT / "docs").rglob("pytorch.md")).read_text()
    named = set(re.findall(r"`pytorch\.(\w+(?:\[\]\.\w+)?)`", text))
    lists = ("messages", "ranks", "modules")
    inner = {f"{name}[].{field}" for name in lists for field in fields[name][0]}
    assert named == {*fields, *inner} - {*lists}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("wdth=3", "stacks:stack has no argument 'wdth'"),
        pytest.param("width=x", "stacks:stack: width='x' is no int", marks=pytest.mark.wide),
        pytest.param("bias=3", "stacks:stack: bias='3' is neither true nor false", marks=pytest.mark.wide),
    ],
)
def test_a_functions_arguments_are_checked(meshwright, tmp_path, monkeypatch, setting, words):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "stacks.py").write_text(STACKS)
    monkeypatch.chdir(tmp_path)
    refused = meshwright("weigh", "stacks:stack", "--on", "2xH100", "--set", setting)
    assert refused.status == 2
    assert refused.talk.startswith(f"error: {words}"), refused.talk


@pytest.mark.wide
def test_arguments_that_are_not_set_have_their_defaults(meshwright, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "stacks.py").write_text(STACKS)
    monkeypatch.chdir(tmp_path)
    done = meshwright("weigh", "stacks:stack", "--on", "2xH100", "--json")
    assert done.json["num_parameters"] == 2 * 64 * 64


def test_a_function_that_ends_its_process_is_told_with_its_last_words(meshwright, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "stacks.py").write_text(STACKS)
    monkeypatch.chdir(tmp_path)
    done = meshwright("weigh", "stacks:ends", "--on", "2xH100")
    assert done.status == 2
    assert "stacks:ends, or what it calls, ended its process, which ended with status 7" in done.talk
    assert "farewell" in done.talk


STACKS = """
import os
import torch
from torch import nn


def stack(width: int = 64, bias: bool = False):
    return nn.Sequential(nn.Linear(width, width, bias), nn.Linear(width, width, bias)), torch.zeros(8, width)


def ends():
    print("farewell", flush=True)
    os._exit(7)
"""


def test_a_wrong_name_is_the_users_input(meshwright):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    done = meshwright("weigh", "examples.torch_modules:lenot", "--on", "1xCPU")
    assert (done.status, done.output) == (2, "")
    assert done.talk == (
        "error: examples.torch_modules has no function 'lenot'\nhint: did you mean 'lenet'?\n"
    )


def test_without_pytorch_it_says_so(meshwright, monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = meshwright("weigh", "examples.torch_modules:lenet", "--on", "1xCPU")
    assert (done.status, done.output) == (2, "")
    assert done.talk == f"error: PyTorch is not installed\nhint: {how_to_install('torch')}\n"


MEASURED = """
import resource, sys
from meshwright.cli import main
sys.argv = ["meshwright", "weigh", "examples.torch_modules:llama_70b", "--on", "1xCPU", "--json"]
try:
    main()
finally:
    # Of the largest child: the account is made in a process of its own.
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, file=sys.stderr)
"""


@pytest.mark.long
def test_a_model_of_70_billion_parameters_takes_under_a_gigabyte():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True)
    fields = json.loads(done.stdout)
    (rank,) = fields["pytorch"]["ranks"]
    assert fields["num_parameters"] == 70_553_706_496
    # A layer's matrices: queries and output, keys and values, three of the MLP; then the vocabulary's.
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672
    products = 2 * 8192 * (80 * layer + 8192 * 128_256)
    attention = 80 * 4 * 64 * 128 * (8192 * 8193 // 2)
    assert rank["flops_by_phase"]["forward"] == products + attention
    assert rank["bytes_by_format"]["parameters"].keys() == {"bf16"}
    assert int(done.stderr.splitlines()[-1]) < 1e9


LARGE = """
import torch
from torch.utils.checkpoint import checkpoint


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4096, 4096)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def build():
    module = Large()
    module.compile()
    return module, torch.zeros(2**21, 4096)
"""


def test_an_upper_bound_that_is_too_much_may_not_fit_and_does_not_fail_a_check(
    meshwright, tmp_path, monkeypatch
):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "large.py").write_text(LARGE)
    monkeypatch.chdir(tmp_path)
    done = meshwright("weigh", "large.py:build", "--on", "1xA10G", "--check", "--html", "page.html")
    assert done.status == 0
    assert "Upper bound: weighed without torch.compile\nMAY NOT FIT: at most " in done.output
    page = (tmp_path / "page.html").read_text()
    assert "MAY NOT FIT" in page
    assert "DOES NOT FIT" not in page
