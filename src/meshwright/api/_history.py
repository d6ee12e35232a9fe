"""Keep a history of the errors of predictions.

It is a file in the cache, one JSON object a line. `train` adds to it at its end, and `reconcile` whatever it
reads; a quantity of a run after a number of steps is kept once.
Used by: `_train`, `contrib.causes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import IO, Any

from meshwright.compiler import cache_lock, cache_root, writing_cache
from meshwright.errors import InputError, MeshwrightError
from meshwright.json_records import read_record
from meshwright.measure import Measurement, PastRow, Reconciliation, past_rows

HISTORY = "history.jsonl"


def add_to_history(
    folder: Path, reconciliation: Reconciliation, measurement: Measurement, config: str, fleet: str
) -> tuple[PastRow, ...]:
    """Add a run to the history of errors, and return its lines; one that cannot be written stays as it is."""
    rows = past_rows(reconciliation, measurement, run=str(folder.resolve()), config=config, fleet=fleet)
    path = history_path()
    own = json.dumps(str(folder.resolve()))  # as it stands in each line of this run: no other line is parsed
    with contextlib.suppress(MeshwrightError), cache_lock(path), writing_cache(), _opened(path) as file:
        known, last = set[Any](), "\n"
        for last in file:
            if own in last and (row := row_in(last)) is not None:
                known.add(row.key)
        lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in rows if row.key not in known]
        before = "" if last.endswith("\n") else "\n"  # a crash may have cut the last line off
        file.write(before + "".join(lines))
    return rows


def _opened(path: Path) -> IO[str]:
    """Open a file to read it from its beginning and to append to it."""
    file = path.open("a+", encoding="utf-8", errors="replace")
    file.seek(0)
    return file


def row_in(line: str) -> PastRow | None:
    """Return what a line of the history says; None if it is not whole, or a number is out of range."""
    try:
        return read_record(PastRow, line, name="a line of the history", hint="")
    except InputError:
        return None


def history_path() -> Path:
    """Return the file of the history of errors."""
    return cache_root() / HISTORY
