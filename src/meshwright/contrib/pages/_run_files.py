"""Read the folder of a run for its report: its weighing, metrics, notices, measurement and reconciliation.

Used by: `_run_page`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import InputError
from meshwright.files import MOST_RECORD_BYTES, parsed_json, read_json, read_text, reason
from meshwright.json_records import read_record
from meshwright.measure import Measurement, Reconciliation
from meshwright.report import WeighingFacts
from meshwright.results import WEIGHING_SCHEMA

T = TypeVar("T")


def facts_from_json(text: str) -> WeighingFacts:
    """Return what reports show of a weighing from the text of `weigh --json`.

    Raises:
        InputError: these are not the fields of a weighing, or it is of another version of Meshwright.
    """
    fields = parsed_json(text)
    if isinstance(fields, dict) and fields.get("schema") != WEIGHING_SCHEMA:
        raise InputError("it is of another version of Meshwright", hint="weigh again")
    return read_record(WeighingFacts, text, name="a weighing", hint="give the output of `weigh --json`")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of a run's folder. A missing file is None or empty, and `notes` says why."""

    name: str
    weighing: WeighingFacts | None = None
    metrics: tuple[dict[str, Any], ...] = ()
    notices: tuple[dict[str, Any], ...] = ()
    measurement: Measurement | None = None
    reconciliation: Reconciliation | None = None
    notes: tuple[str, ...] = ()
    finish: str = ""  # when it will be, as estimated last

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric in order of the steps; a repeated step has its last value."""
        values = {line["step"]: float(line[key]) for line in self.metrics if is_drawn(line.get(key))}
        steps = sorted(values)
        return steps, [values[step] for step in steps]


LARGEST_DRAWN = 1e100  # axes are computed with differences and squares


def is_drawn(value: object) -> bool:
    """Return whether a value of a file is a number that a curve can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_DRAWN


def read_run(folder: Path) -> RunFiles:
    """Return all readable contents of a run's folder: a missing or truncated file is noted, not fatal."""
    notes: list[str] = []

    def read(name: str, parse: Callable[[str], T]) -> T | None:
        try:
            return parse(read_text(folder / name, MOST_RECORD_BYTES))
        except FileNotFoundError:
            notes.append(f"{name} is not there: what it would show is left out.")
        except InputError as error:
            notes.append(f"{name} cannot be read: {error.message}")
        except (OSError, ValueError) as error:
            notes.append(f"{name} cannot be read: {reason(error)}")
        except (KeyError, TypeError, AttributeError) as error:
            notes.append(f"{name} cannot be read: {error!r}")
        return None

    def lines(name: str) -> tuple[dict[str, Any], ...]:
        return read(name, lambda text: _entries(name, text, notes)) or ()

    read("config.json", parsed_json)
    return RunFiles(
        name=folder.name,
        weighing=read("weighing.json", facts_from_json),
        metrics=lines("metrics.jsonl"),
        notices=lines("notices.jsonl") if (folder / "notices.jsonl").exists() else (),
        measurement=read("measurement.json", Measurement.from_json),
        reconciliation=read("reconciliation.json", Reconciliation.from_json),
        notes=tuple(notes),
        finish=_finish_of(folder / "run.json"),
    )


def _finish_of(path: Path) -> str:
    """Return when a run will be finished, as its record says; "" if it does not."""
    try:
        found = read_json(path, MOST_RECORD_BYTES, strict=False)
    except (OSError, ValueError):
        return ""
    finish = found.get("finish") if isinstance(found, dict) else None
    return str(finish["text"]) if isinstance(finish, dict) and "text" in finish else ""


def _entries(name: str, text: str, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """Return one object for each line, and note broken lines: a killed run leaves its last line cut off."""
    entries: list[dict[str, Any]] = []
    broken: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = parsed_json(line)
            if type(entry["step"]) is not int or not is_drawn(entry["step"]):
                raise ValueError("its step is not the number of one")
            entries.append(entry)
        except (ValueError, KeyError, TypeError, OverflowError):
            broken.append(number)
    if broken:
        where = ", ".join(str(number) for number in broken[:5]) + (", ..." if len(broken) > 5 else "")
        notes.append(f"{name}: no whole entry on line {where}; the rest is shown.")
    return tuple(entries)
