"""What a run compiles, how often, and what becomes of a program that does not compile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from meshwright.config import RunConfig, load_config

pytestmark = pytest.mark.quick

PROGRAMS = ("step", "init", "evaluate", "sample")
SMALL = ["model.num_layers=1", "batch.sequence_length=32", "evaluation.batches=1"]
COMPILED: list[str] = []  # names of what this process has compiled, or loaded


def _note(event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(kwargs["fun_name"].removeprefix("jit(").removesuffix(")"))


jax.monitoring.register_event_duration_secs_listener(_note)


def small(**overrides: object) -> RunConfig:
    return load_config(
        "bytes-nano", [*SMALL, *(f"optimizer.{name}={value}" for name, value in overrides.items())]
    )


def test_a_run_compiles_each_program_once_and_nothing_else(train: Callable[..., Any], tmp_path: Path):
    COMPILED.clear()
    measurement, _ = train(small(learning_rate=0.0021), tmp_path / "run", steps=3)
    assert measurement.sample
    assert Counter(COMPILED) == Counter(PROGRAMS)


@pytest.mark.wide
def test_a_resumed_run_compiles_no_initial_state(train: Callable[..., Any], tmp_path: Path):
    config, folder = small(learning_rate=0.0022), tmp_path / "run"
    train(config, folder, steps=2)
    COMPILED.clear()
    train(config, folder, steps=4, resume=True)
    assert set(COMPILED) == {"step", "evaluate", "sample"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_does_not_compile_ends_the_run_before_it_writes(
    name: str, train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled = jax.stages.Lowered.compile

    def compile_others(self: jax.stages.Lowered, *arguments: Any, **options: Any) -> Any:
        if f"@jit_{name} " in self.as_text():
            raise RuntimeError(f"no memory for {name}")
        return compiled(self, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_others)
    with pytest.raises(RuntimeError, match=f"no memory for {name}"):
        train(small(learning_rate=0.0023), tmp_path / "run", steps=2)
    assert not (tmp_path / "run/metrics.jsonl").exists()


RUN = """
import json, sys
from pathlib import Path
from meshwright.compiler import keep_executables
keep_executables()
import jax
names, hits = [], []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **facts: names.append(facts["fun_name"]) if "backend_compile" in event else None
)
jax.monitoring.register_event_listener(
    lambda event, **facts: hits.append(event) if event.endswith("/cache_hits") else None
)
import meshwright as mw
mw.train("bytes-nano", on="1xCPU", steps=2, folder=Path(sys.argv[1]), overrides=json.loads(sys.argv[2]))
print(json.dumps([names, len(hits)]))
"""


@pytest.mark.wide
def test_a_run_loads_the_step_that_was_weighed_and_the_next_run_loads_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In processes of their own: jax reads the cache's settings once."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    overrides = json.dumps([*SMALL, "optimizer.learning_rate=0.0024"])
    loaded = []
    for folder in ("first", "second"):
        command = [sys.executable, "-c", RUN, str(tmp_path / folder), overrides]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names, num_hits = json.loads(done.stdout.splitlines()[-1])
        assert Counter(names) == Counter(f"jit({name})" for name in PROGRAMS)
        loaded.append(num_hits)
    assert loaded == [1, len(PROGRAMS)]
    first, second = (
        json.loads((tmp_path / name / "measurement.json").read_text()) for name in ("first", "second")
    )
    for same in ("losses", "held_out_losses", "sample", "fingerprint"):
        assert first[same] == second[same]
