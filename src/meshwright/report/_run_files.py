"""Read a run's folder as far as possible: a missing or truncated file is noted, not fatal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import InputError
from meshwright.reconciliation import Measurement, Reconciliation

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of a run's folder.

    A missing file is None or empty, and `notes` says why.
    """

    name: str
    config: dict[str, Any] | None
    weighing: dict[str, Any] | None
    metrics: tuple[dict[str, Any], ...]
    notices: tuple[dict[str, Any], ...]
    measurement: Measurement | None
    reconciliation: Reconciliation | None
    notes: tuple[str, ...]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric in order of the steps; a repeated step has its last value."""
        found = {line["step"]: float(line[key]) for line in self.metrics if line.get(key) is not None}
        steps = sorted(found)
        return steps, [found[step] for step in steps]


def read_run(folder: Path) -> RunFiles:
    """Return all readable contents of a run's folder."""
    notes: list[str] = []
    return RunFiles(
        name=folder.name,
        config=_read(folder / "config.json", json.loads, notes),
        weighing=_read(folder / "weighing.json", json.loads, notes),
        metrics=_read(folder / "metrics.jsonl", lambda text: _lines("metrics.jsonl", text, notes), notes)
        or (),
        notices=_notices(folder, notes),
        measurement=_read(folder / "measurement.json", Measurement.from_json, notes),
        reconciliation=_read(folder / "reconciliation.json", Reconciliation.from_json, notes),
        notes=tuple(notes),
    )


def _read(path: Path, parse: Callable[[str], T], notes: list[str]) -> T | None:
    """Return the parsed file, or None after adding a note."""
    try:
        return parse(path.read_text("utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is not there: what it would show is left out.")
    except InputError as error:
        notes.append(f"{path.name} cannot be read: {error.message}")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
    return None


def _notices(folder: Path, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """Return the notices; a run without events has no such file."""
    path = folder / "notices.jsonl"
    if not path.exists():
        return ()
    return _read(path, lambda text: _lines(path.name, text, notes), notes) or ()


def _lines(name: str, text: str, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """Return one object for each line, and note broken lines: a killed run leaves its last line cut off."""
    found: list[dict[str, Any]] = []
    broken: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
            entry["step"] = int(entry["step"])
            found.append(entry)
        except (ValueError, KeyError, TypeError, RecursionError):
            broken.append(number)
    if broken:
        where = ", ".join(str(number) for number in broken[:5]) + (", ..." if len(broken) > 5 else "")
        notes.append(f"{name}: no whole entry on line {where}; the rest is shown.")
    return tuple(found)
