"""Runs that take no training: their folders are written as `train` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.compiler import cache_root
from meshwright.kept_records import KeptRun
from meshwright.trainer.loop import RunFolder

CONFIG: Any = SimpleNamespace(
    name="plain",
    batch=SimpleNamespace(tokens_per_step=64),
    batch_unit="tokens",
    model=SimpleNamespace(num_parameters=16),
)


def begun(folder: Path, loss: float = 0.2) -> tuple[RunFolder, KeptRun]:
    """Begin a run, and write its files up to step 5."""
    held = RunFolder(folder, resume=True, discard_steps=True)
    held.create()
    kept = KeptRun(held, CONFIG, "1xCPU", 5)
    (folder / "config.json").write_text(json.dumps({"name": "plain", "optimizer": {"learning_rate": 0.5}}))
    lines = [{"step": step, "loss": 5 * loss / step, "seconds": 0.5} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return held, kept


def ended(kept: KeptRun, *, loss: float = 0.2, signal: str = "") -> None:
    """End a run with a measurement."""
    measured: Any = SimpleNamespace(
        losses={5: loss},
        held_out_losses={5: loss},
        step_seconds=SimpleNamespace(median=0.5),
        interrupted=bool(signal),
        signal=signal,
        steps=5,
        fingerprint="f",
        tokens_per_second=128.0,
        peak_bytes=None,
        argument_bytes_per_device=None,
        device_kind="cpu",
        num_devices=1,
        seconds_by_phase={"step": 2.5},
    )
    kept.ended(measured)


def run_in(folder: Path, *, loss: float = 0.2, signal: str = "") -> str:
    """Train a run to its end, and return its id."""
    held, kept = begun(folder, loss)
    ended(kept, loss=loss, signal=signal)
    held.close()
    return json.loads((folder / "run.json").read_text())["id"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is the working directory, with a store of its own.

    What else the session's cache holds is there too: nothing is measured or compiled again.
    """
    (tmp_path / "cache").mkdir(mode=0o700)
    for there in cache_root().iterdir():
        if there.name != "store" and not there.name.startswith("."):
            (tmp_path / "cache" / there.name).symlink_to(there)
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
