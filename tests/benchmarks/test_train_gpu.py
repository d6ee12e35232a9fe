import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.hardware import Fleet

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import train_gpu  # noqa: E402
from train_gpu import FIRST_LOSS_WITHIN, SHAPES, STEPS, WARM_UP  # noqa: E402

SMALL = [
    "model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4",
    "model.head_dim=16", "model.mlp_dim=128", "model.vocab_size=97", "batch.sequences=4",
    "batch.sequence_length=16",
]  # fmt: skip


def run(*arguments):
    command = [sys.executable, str(BENCHMARKS / "train_gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_without_a_gpu_it_says_so_and_ends_well():
    done = run("--model", "gpt2-124m", "--record")  # the tests' environment shows jax the CPU only
    assert done.returncode == 0
    assert done.stdout == "No NVIDIA GPU is here, so nothing was measured.\n"


def test_no_rounds_are_refused():
    done = run("--rounds", "0")
    assert done.returncode == 2
    assert "--rounds 0: use at least 1" in done.stderr


@pytest.mark.parametrize("model", SHAPES)
def test_every_case_is_a_config(model):
    config = load_config(model, [*SHAPES[model], *train_gpu.COMMON, "precision=fp8"])
    assert config.schedule.kind == "constant"
    assert config.batch.microbatch_sequences is None


def test_sides_take_turns_and_the_warm_up_is_left_out():
    calls = []
    sides = [lambda n, name=name: calls.append((name, n)) for name in ("ours", "torch")]
    rounds = train_gpu.interleaved(*sides, 3, lambda: calls.append("warm"))
    first, second = ("ours", STEPS), ("torch", STEPS)
    turns = [first, second, second, first]
    assert calls[: 2 * WARM_UP] == turns[: 2 * WARM_UP]
    assert calls[2 * WARM_UP :] == ["warm", *turns, first, second]
    assert [set(each) for each in rounds] == [{"ours", "torch"}] * 3


def test_ratio_and_mfu_by_hand():
    timed = [{"ours": 1.0, "torch": 2.0}, {"ours": 2.0, "torch": 2.0}, {"ours": 4.0, "torch": 2.0}]
    found = train_gpu.speeds(timed, 1000, 300, {"ours": 600.0, "torch": 300.0})
    assert found["ratio"] == {"median": 1.0, "low": 0.5, "high": 2.0}
    assert found["tokens_per_second"]["ours"] == {"median": 500.0, "low": 250.0, "high": 1000.0}
    assert found["mfu"] == {"ours": 0.25, "torch": 0.5}


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param("gpt2-124m", "bf16", marks=pytest.mark.long),
        pytest.param("llama-1b", "fp8", marks=pytest.mark.wide),
    ],
)
def test_both_sides_learn_alike_on_a_cpu(model, precision, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)  # takes a CPU minutes
    config = load_config(
        model, [*train_gpu.COMMON, *SMALL, f"precision={precision}", "batch.microbatch_sequences=2"]
    )
    tokens = np.random.default_rng(0).integers(0, 97, (2, 2, 17))
    ours = train_gpu.Ours(config, Fleet.parse("1xCPU"), tokens)
    theirs, multiplies_in = train_gpu.torch_steps(config, ours.parameters, tokens, "cpu")
    assert multiplies_in == precision
    first = ours.run(1)
    assert theirs(1) == pytest.approx(first, abs=FIRST_LOSS_WITHIN[precision])
    assert theirs(5) == pytest.approx(last := ours.run(5), abs=FIRST_LOSS_WITHIN[precision])
    assert last < first
