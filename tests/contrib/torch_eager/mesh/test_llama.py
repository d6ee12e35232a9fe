"""Llama 3 8B on 64 ranks: its parameters, messages and products by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
GIB = 2**30


@pytest.mark.wide
def test_llama_8b_on_64_ranks_is_as_by_hand_in_a_minute_of_one_processor():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    command = [sys.executable, "-m", "meshwright", "weigh", "examples.torch_modules:llama_8b"]
    command += ["--on", "64xH100", "--layout", "fsdp=64", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    parameters = 32 * (layer + 2 * 4096) + 4096 + 2 * 4096 * 128_256
    assert found["num_parameters"] == parameters
    rank = found["pytorch"]["ranks"][0]
    assert rank["parameters_bytes"] == parameters * 4 // 64
    assert rank["parameters_bytes"] / GIB == pytest.approx(0.4674, abs=5e-5)
    assert rank["optimizer_state_bytes"] / GIB == pytest.approx(0.9348, abs=5e-5)
    arrays = {(m["kind"], m["phase"]): m["array_bytes"] for m in found["pytorch"]["messages"]}
    assert arrays == {
        ("all-gather", "forward"): 2 * parameters,
        ("all-gather", "backward"): 2 * parameters,
        ("reduce-scatter", "backward"): 4 * parameters,
    }
    assert 2 * parameters / GIB == pytest.approx(14.96, abs=5e-3)
    products = 2 * 8192 * (32 * layer + 4096 * 128_256)
    attention = 32 * 4 * 4096 * (8192 * 8193 // 2)
    assert rank["flops_by_phase"]["forward"] == products + attention
    assert (products + attention) / 1e12 == pytest.approx(140.55, abs=5e-3)
    # The blocks run again up to their last product, where PyTorch's checkpoints stop. In the backward pass
    # flash attention computes the scores once more, half of what its forward pass computes.
    again = 2 * 8192 * 32 * (layer - 4096 * 14_336)
    assert rank["flops_by_phase"]["recomputed"] == again + attention + attention // 2
    assert found["pytorch"]["seconds"] < 60  # of processor time, some 15 on a quiet machine
