"""Every way in which two processes may differ is one of the facts that they compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.errors import InputError
from meshwright.trainer.launch import agreed
from meshwright.trainer.loop import _common_facts as _facts
from meshwright.trainer.loop import facts_of_run
from tests.contrib.clusters.test_peers import each


def facts(config: str, *overrides: str, weights: Path | None = None, **call: Any) -> dict[str, Any]:
    return dict(facts_of_run(load_config(config, list(overrides)), call, weights))


def differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """What both processes are told; empty if they agree."""
    errors = each(2, lambda peers: agreed(peers, "run", lambda: peers.index, lambda n: (one, other)[n]), "ab")
    if not all(isinstance(error, InputError) for error in errors):
        return ""
    assert errors[0].message == errors[1].message
    return errors[0].message


def test_processes_of_one_command_agree():
    assert differences(facts("linear"), facts("linear")) == ""


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "optimizer.learning_rate=0.5",
            "optimizer.learning_rate is 0.1 in process 0 on a, and 0.5 in process 1 on b",
        ),
        ("seed=7", "seed is 0 in process 0 on a, and 7 in process 1 on b"),
        ("layout=fsdp=2", "layout is data=-1 in process 0 on a, and fsdp=2 in process 1 on b"),
        ("steps=90", "steps is 100 in process 0 on a, and 90 in process 1 on b"),
        ("checkpoint.every_steps=3", "and 3 in process 1 on b"),
        ("evaluation.every_steps=7", "and 7 in process 1 on b"),
        ("precision=bf16", "and bf16 in process 1 on b"),
        ("batch.sequences=16", "batch.sequences is 8 in process 0 on a, and 16"),
        ("faults.bad_step=rollback", "and rollback in process 1 on b"),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(override: str, words: str):
    config = "bytes-nano" if override.startswith("precision") else "linear"
    before = ["batch.sequences=8"] if config == "linear" else []
    before += ["steps=100"]
    assert words in differences(facts(config, *before), facts(config, *before, override))


def test_another_preset_is_named():
    assert "name is linear in process 0 on a, and line in process 1 on b" in differences(
        facts("linear"), facts("line")
    )


@pytest.mark.parametrize(
    "call", [{"resume": True}, {"on": "4xCPU"}, {"folder": "runs/a"}, {"steps to train": 5}], ids=str
)
def test_another_argument_of_the_call_is_named(call: dict[str, Any]):
    ((name, value),) = call.items()
    given = {"resume": False, "on": "2xCPU", "folder": "runs/b", "steps to train": 9}
    words = differences(facts("linear", **given), facts("linear", **{**given, **call}))
    assert f"differ: {name} is " in words
    assert f"{str(value).lower() if value is True else value} in process 1 on b" in words


def test_other_tokens_under_the_same_path_are_named(tmp_path: Path):
    tokens = tmp_path / "tokens.bin"
    data = ["data.source=tokens", f"data.path={tokens}", "data.dtype=uint16"]
    np.arange(5000, dtype=np.uint16).tofile(tokens)
    one = facts("bytes-nano", *data)
    np.arange(1, 5001, dtype=np.uint16).tofile(tokens)
    other = facts("bytes-nano", *data)
    assert "differ: the content of data.path is 10,000 bytes with SHA-256 " in differences(one, other)


def test_the_same_tokens_in_another_place_are_the_same(tmp_path: Path):
    for name in "ab":
        np.arange(5000, dtype=np.uint16).tofile(tmp_path / name)
    one, other = (
        facts("bytes-nano", "data.source=tokens", f"data.path={tmp_path / name}", "data.dtype=uint16")
        for name in "ab"
    )
    assert differences(one, other) == ""


def test_other_weights_under_the_same_path_are_named(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"a" * 9)
    one = facts("bytes-nano", weights=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"b" * 9)
    assert "the content of begin_from is 9 bytes" in differences(one, facts("bytes-nano", weights=tmp_path))


def test_another_tokenizer_under_the_same_path_is_named(tmp_path: Path):
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = ["data.source=instructions", f"data.path={tmp_path}/chat.jsonl", f"data.tokenizer={tmp_path}"]
    (tmp_path / "tokenizer.json").write_text("{}")
    one = facts("bytes-nano", *data)
    (tmp_path / "tokenizer.json").write_text("[]")
    assert "differ: the content of data.tokenizer is 2 bytes" in differences(one, facts("bytes-nano", *data))


def versions(name: str, value: str) -> Callable[[pytest.MonkeyPatch], None]:
    known = _facts.installed_versions()
    return lambda patch: patch.setattr(_facts, "installed_versions", lambda: {**known, name: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (versions("jax", "9.9"), "the version of jax is "),
        (versions("optax", "9.9"), "the version of optax is "),
        (versions("python", "3.99.1"), "the version of python is "),
        (
            lambda patch: patch.setattr(_facts, "digest_of_sources", lambda names: "0" * 64),
            "the digest of Meshwright's sources is ",
        ),
        (
            lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_dump_to=/x"),
            "XLA_FLAGS --xla_cpu_enable_fast_math is absent in process 0 on a, and true in process 1 on b",
        ),
    ],
)
def test_other_software_is_named(change: Callable, words: str, monkeypatch: pytest.MonkeyPatch):
    one = facts("linear")
    change(monkeypatch)
    found = differences(one, facts("linear"))
    assert f"differ: {words}" in found
    assert "/x" not in found


def test_a_setting_of_jax_is_named():
    one = facts("linear")
    with jax.default_matmul_precision("highest"):
        other = facts("linear")
    assert "jax_default_matmul_precision is None in process 0 on a, and highest" in differences(one, other)


def test_a_file_that_only_one_process_sees_is_an_error_of_that_process(tmp_path: Path):
    data = ["data.source=tokens", f"data.path={tmp_path}/absent.bin", "data.dtype=uint16"]
    with pytest.raises(InputError, match=r"absent\.bin"):
        facts("bytes-nano", *data)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"traced": "b" * 64},
            "the digest of the traced step is aaaaaaaaaaaaaaaa in process 0 on a, and bbbb",
        ),
        ({"layout": "fsdp=2"}, "layout is data=2 in process 0 on a, and fsdp=2 in process 1 on b"),
        ({"step": 4}, "the checkpoint to resume from is 8 in process 0 on a, and 4 in process 1 on b"),
        (
            {"step": None},
            "the checkpoint to resume from is 8 in process 0 on a, and absent in process 1 on b",
        ),
    ],
)
@pytest.mark.once  # plain stand-ins, which are no Programs
def test_programs_are_compared_before_the_first_step(other: dict[str, Any], words: str):
    def of(traced: str = "a" * 64, layout: str = "data=2", step: int | None = 8) -> dict[str, Any]:
        programs: Any = SimpleNamespace(traced=traced)
        resumed: Any = None if step is None else SimpleNamespace(step=step)
        return dict(_facts.facts_of_programs(programs, layout, resumed, is_same=True))

    assert differences(of(), of()) == ""
    assert words in differences(of(), of(**other))
