"""Folders of runs for the tests of the page, as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CONFIG = {"name": "linear", "steps": 100, "optimizer": {"kind": "sgd", "learning_rate": 0.1}}
RUN = {
    "schema": 1,
    "id": "r0123456789ab",
    "began": "2026-11-28T14:03:08+00:00",
    "name": "linear",
    "fleet": "1xCPU",
    "layout": "data=1",
    "steps": 100,
    "tokens_per_step": 64,
    "batch_unit": "rows",
    "sessions": [],
    "weighing": {
        "step_seconds": {"low": 0.008, "expected": 0.01, "high": 0.02},
        "mfu": 0.4,
        "needed_bytes": 4096,
        "num_devices": 1,
    },
}


def line(step: int, **values: float | None) -> str:
    """Return one line of metrics."""
    usual = {"applied": 1.0, "gradient_norm": 1.0, "learning_rate": 0.1, "loss": 2.0, "seconds": 0.01}
    return json.dumps({"step": step, **usual, "input_wait_seconds": 0.0, **values})


def make_run(folder: Path, lines: Iterable[str] = (), **texts: Any) -> Path:
    """Write a run's folder; `texts` replace its files, log_txt that of log.txt; None leaves one out."""
    folder.mkdir(parents=True)
    files = {
        "config.json": json.dumps(CONFIG),
        "run.json": json.dumps(RUN),
        "metrics.jsonl": "".join(f"{each}\n" for each in lines),
        "notices.jsonl": "",
        "log.txt": "10:00:00 weighing: starting\n",
    }
    for name, text in files.items():
        text = texts.get(name.replace(".", "_"), text)
        if text is not None:
            (folder / name).write_text(text)
    return folder
