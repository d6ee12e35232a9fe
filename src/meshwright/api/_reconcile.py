"""Set predicted beside measured for the run of any folder, and keep a history of the errors.

The history is a file in the cache, one JSON object a line. `train` adds to it at its end, and `reconcile`
whatever it reads; a quantity of a run after a number of steps is kept once.
Used by: `_train`, `cli`, and users as `mw.reconcile`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from meshwright.compiler import cache_lock, cache_root, writing_cache
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import MOST_RECORD_BYTES, parsed_json, read_bytes, read_text, reason
from meshwright.json_records import read_record
from meshwright.measure import STEP_SECONDS, History, Measurement, PastRow, Reconciliation, past_rows
from meshwright.measure import reconcile as compared
from meshwright.results import Phase, Run, ignore

from ._weigh import weigh_unkept

HISTORY = "history.jsonl"
T = TypeVar("T")


def reconcile(run: Run | str | Path, *, on_event: Callable[[Phase], None] = ignore) -> Reconciliation:
    """Return the predicted quantities of a run next to the measured ones, each with its error.

    What a folder says is added to the history of errors. Where it has a measured step and no prediction, the
    step is weighed now, so that measured steps kept by `calibrate` take part.

    Args:
        run: the result of `train`, or the folder of a run.

    Raises:
        InputError: the folder holds neither a readable reconciliation nor a readable measurement with the
            config and the fleet of its run.
    """
    if isinstance(run, Run):
        return run.reconciliation
    return reconciled(Path(run), on_event)[0]


def reconciled(
    folder: Path, on_event: Callable[[Phase], None] = ignore
) -> tuple[Reconciliation, tuple[PastRow, ...]]:
    """Return the reconciliation of a folder, and the lines that it adds to the history of errors.

    Raises:
        InputError: as `reconcile`.
    """
    hint = "name the folder of a run that has finished or was stopped by a signal"
    path = folder / "reconciliation.json"
    measurement = _read(folder / "measurement.json", Measurement.from_json)
    found = _read(path, Reconciliation.from_json)
    if measurement is None:
        if found is None:
            raise InputError(f"{path} cannot be read: No such file or directory", hint=hint)
        return found, ()
    about = _read(folder / "weighing.json", parsed_json) or {}
    try:
        config, fleet = str(about["config"]), str(about["fleet"]["name"])
    except (KeyError, TypeError) as missing:
        raise InputError(
            f"{folder / 'weighing.json'} does not say what was run and where", hint=hint
        ) from missing
    is_timed = measurement.step_seconds is not None
    if found is None or (is_timed and all(row.quantity != STEP_SECONDS for row in found.rows)):
        weighing = weigh_unkept(str(folder), on=fleet, layout=about.get("layout"), on_event=on_event)
        found = compared(weighing.compiled.fingerprint, weighing.ledger, weighing.prediction, measurement)
    return found, add_to_history(folder, found, measurement, config, fleet)


def _read(path: Path, parse: Callable[[str], T]) -> T | None:
    """Return what a file holds; None if there is none."""
    try:
        return parse(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as refused:
        hint = "name the folder that `meshwright train` wrote"
        raise InputError(f"{path} cannot be read: {reason(refused)}", hint=hint) from refused


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
            if own in last and (row := _row_in(last)) is not None:
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


def history() -> History:
    """Return the history of errors, oldest first; a line that a crash cut off is left out.

    Raises:
        InputError: the file cannot be read.
    """
    path = history_path()
    try:
        lines = read_bytes(path, MOST_RECORD_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as refused:
        hint = "give yourself permission to read it, or remove it"
        raise InputError(f"{path} cannot be read: {reason(refused)}", hint=hint) from refused
    rows = [row for line in lines if (row := _row_in(line)) is not None]
    return History(file=str(path), rows=tuple({row.key: row for row in rows}.values()))


def _row_in(line: str) -> PastRow | None:
    """Return what a line of the history says; None if it is not whole, or a number is out of range."""
    try:
        return read_record(PastRow, line, name="a line of the history", hint="")
    except InputError:
        return None


def history_path() -> Path:
    """Return the file of the history of errors."""
    return cache_root() / HISTORY
