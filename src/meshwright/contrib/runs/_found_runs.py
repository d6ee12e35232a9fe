"""Find all runs: those of the store, those next to them, and those of folders that are named.

The store is an index that can be made again: a run is read from its folder, and a record that is damaged is
set aside and written anew from there. A run is listed once, by its id, wherever its folder or copies of it
are. A run whose folder is not here is listed as the store knows it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MeshwrightError, printable
from meshwright.files import read_json, reason
from meshwright.kept_records import (
    MOST_RECORD,
    PLACES,
    RECORD_SCHEMA,
    RUN_FILE,
    RUNS,
    keep_place,
    store_folder,
    write_entry,
)

from ._run_record import METRICS, RunRecord, is_id, is_locked, record_of, run_file

DEEPEST = 4  # levels of folders below a named one
MOST_FOLDERS = 20_000  # looked into below one place
OLD_SECONDS = 86_400.0  # of a half-written file that a killed process left
SET_ASIDE = "damaged"
NEWER, UNREADABLE, DAMAGED = "are of a newer release", "cannot be read", "are damaged"
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRuns:
    """The runs that were found, the newest first, and what should be known of the search."""

    runs: tuple[RunRecord, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record of the store that could be read."""

    id: str
    fields: Figures


def found_runs(*places: Path | str) -> FoundRuns:
    """Return all runs that are known here, the newest first, each once.

    Looked into are the folders that the store knows, the folders next to them, `runs/` of the working
    directory, and below `places`. What is found there is kept in the store, as far as it can be written.

    Raises:
        InputError: a named place is no folder.
    """
    notes: list[str] = []
    entries = {entry.id: entry for entry in read_entries(RUNS, "r", notes)}
    known = [Path(str(entry.fields.get("path", ""))) for entry in entries.values()]
    near = [Path(str(entry.fields.get("path", ""))) for entry in read_entries(PLACES, "", notes)]
    near += [Path("runs").absolute()]
    folders = [*known, *(folder for place in near for folder in _below(place, 1, notes))]
    for given in places:
        if not isinstance(given, str | Path) or not (place := Path(given)).is_dir():
            raise InputError(f"{str(given)[:200]} is no folder", hint="name a folder that holds runs")
        folders += [place.absolute(), *_below(place.absolute(), DEEPEST, notes)]
    runs = _distinct(folders, entries, notes)
    found = {run.id for run in runs}
    runs += [made for entry in entries.values() if entry.id not in found and (made := _absent(entry))]
    _keep(runs, entries, notes)
    runs.sort(key=lambda run: (run.began, run.id), reverse=True)
    return FoundRuns(runs=tuple(runs), notes=tuple(dict.fromkeys(map(printable, notes))))


def read_entries(kind: str, letter: str, notes: list[str]) -> Iterator[Entry]:
    """Yield the records of a kind in the store; one that is damaged is set aside, with a note.

    Args:
        letter: with which the ids of this kind begin; "" for those of places.
    """
    folder = store_folder() / kind
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as refused:
        notes.append(f"the store cannot be read: {folder}: {reason(refused)}")
        return
    wrong: dict[str, list[str]] = {}
    for name in names:
        number = name.removesuffix(".json")
        if name.startswith("."):
            _tidy(folder / name)
        elif name.endswith(".json") and (not letter or is_id(number, letter)):
            why, fields = _read_entry(folder / name, number)
            wrong.setdefault(why, []).append(name)
            if fields is not None:
                yield Entry(id=number, fields=fields)
    for why in (NEWER, UNREADABLE):
        if why in wrong:
            notes.append(f"{len(wrong[why])} records of {kind} {why}, and left as they are: {folder}")
    if DAMAGED in wrong:
        notes.append(_set_aside(folder, wrong[DAMAGED]))


def _read_entry(path: Path, number: str) -> tuple[str, Figures | None]:
    """Return the fields of a record, or why there are none; "" if it is gone."""
    try:
        found = read_json(path, MOST_RECORD, strict=False)
    except FileNotFoundError:
        return "", None
    except OSError:
        return UNREADABLE, None
    except ValueError:
        return DAMAGED, None
    if not isinstance(found, dict):
        return DAMAGED, None
    if found.get("schema") == RECORD_SCHEMA and found.get("id") == number:
        return "", found
    schema = found.get("schema")
    return (NEWER if isinstance(schema, int) and schema > RECORD_SCHEMA else DAMAGED), None


def _set_aside(folder: Path, names: list[str]) -> str:
    """Move damaged records out of the way, by their names, and return a note that says so."""
    aside = folder.parent / SET_ASIDE
    words = f"{len(names)} damaged record{'s' if len(names) > 1 else ''} of {folder.name}"
    with contextlib.suppress(OSError):
        aside.mkdir(exist_ok=True)
        for name in names:
            os.replace(folder / name, aside / f"{folder.name}-{name}")
        return f"{words} set aside in {aside}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    return f"{words} in {folder}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _tidy(path: Path) -> None:
    """Remove a file that a killed process left half written, once it is a day old."""
    with contextlib.suppress(OSError):
        if path.suffix != ".lock" and time.time() - path.lstat().st_mtime > OLD_SECONDS:
            path.unlink()


def _below(place: Path, depth: int, notes: list[str]) -> Iterator[Path]:
    """Yield the folders below one, without following links; the nearest first."""
    level, seen = [place], 0
    for _ in range(depth):
        further: list[Path] = []
        for folder in level:
            try:
                with os.scandir(folder) as inside:
                    here = sorted(each.name for each in inside if each.is_dir(follow_symlinks=False))
            except OSError:
                continue
            seen += len(here)
            if seen > MOST_FOLDERS:
                notes.append(f"{place} has more than {MOST_FOLDERS:,} folders: the rest is not looked into")
                return
            paths = [folder / name for name in here if not name.startswith(".") and name != "checkpoints"]
            yield from paths
            further += paths
        level = further


def _distinct(folders: Iterable[Path], entries: dict[str, Entry], notes: list[str]) -> list[RunRecord]:
    """Return the runs that folders hold, each once; copies of one run are named with it."""
    by_path = {str(entry.fields.get("path")): entry for entry in entries.values()}
    seen = set[str]()
    found: dict[str, list[tuple[Path, Figures]]] = {}
    others: list[RunRecord] = []
    for folder in folders:
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        run, note = run_file(folder)
        entry = by_path.get(str(folder))
        if run is None and note:  # damaged or newer: the store's copy, if it has one
            copy = None if entry is None or "of schema" in note else entry.fields.get("run")
            others.append(
                _with_id(record_of(folder, copy if isinstance(copy, dict) else None, (note,)), entry)
            )
        elif run is not None:
            found.setdefault(str(run["id"]), []).append((folder, run))
        elif (entry is None or entry.fields.get("run") is not None) and (folder / METRICS).is_file():
            missing = f"{RUN_FILE} is not there: resume the run to give it one"
            copy = None if entry is None else entry.fields.get("run")
            others.append(_with_id(record_of(folder, copy, (missing,)), entry))
    runs = [each for number, places in found.items() for each in _one_run(number, places, entries)]
    ids = {run.id for run in runs}
    return [*runs, *(run if run.id not in ids else replace(run, id="") for run in others)]


def _with_id(record: RunRecord, entry: Entry | None) -> RunRecord:
    return record if entry is None else replace(record, id=entry.id)


def _one_run(number: str, places: list[tuple[Path, Figures]], entries: dict[str, Entry]) -> list[RunRecord]:
    """Return the run of an id; several only if copies of it were trained further, each its own way.

    The folder that is written now, or else the one that went furthest, is the run; of equal ones it is the
    one that the store names.
    """
    named = "" if number not in entries else str(entries[number].fields.get("path"))
    ranked = sorted(
        places,
        key=lambda each: (bool(is_locked(each[0])), *_progress(each[1]), str(each[0]) == named),
        reverse=True,
    )
    made: list[tuple[list[str], RunRecord]] = []
    for folder, run in ranked:
        sessions = _sessions(run)
        for place, (longer, record) in enumerate(made):
            if longer[: len(sessions)] == sessions:
                made[place] = longer, replace(record, copies=(*record.copies, folder))
                break
        else:
            record = record_of(folder, run)
            if made:
                record = replace(record, id=f"{number}-{len(made) + 1}")
            made.append((sessions, record))
    return [record for _, record in made]


def _sessions(run: Figures) -> list[str]:
    found = run.get("sessions")
    return (
        [str(each.get("began")) for each in found if isinstance(each, dict)]
        if isinstance(found, list)
        else []
    )


def _progress(run: Figures) -> tuple[int, bool]:
    found = run.get("sessions")
    sessions = found if isinstance(found, list) else []
    last = sessions[-1] if sessions and isinstance(sessions[-1], dict) else {}
    return len(sessions), "ended" in last


def _absent(entry: Entry) -> RunRecord | None:
    """Return the run of a record whose folder is not here; None if the run never began."""
    folder, run = Path(str(entry.fields.get("path", ""))), entry.fields.get("run")
    if not isinstance(run, dict):
        is_other = run_file(folder) != (None, "")  # it was to be a copy with an id of its own
        if not is_other and (is_locked(folder) or (folder / METRICS).is_file()):
            return _with_id(record_of(folder, None, (f"{RUN_FILE} could not be written yet",)), entry)
        return None
    made = record_of(folder, run)
    was = "" if made.state == "dead" else f"{made.state}; "
    host = f" (it ran on {made.host})" if made.host else ""
    words = f"{was}its folder {folder} is not here{host}: it was moved, removed, or is of another machine"
    return _with_id(replace(made, state="gone", words=printable(words)), entry)


def _keep(runs: Iterable[RunRecord], entries: dict[str, Entry], notes: list[str]) -> None:
    """Write into the store what it lacks: runs that were found, and folders that have moved."""
    try:
        for run in runs:
            if not is_id(run.id, "r") or run.state == "gone":
                continue
            path = os.path.abspath(run.folder)
            entry = entries.get(run.id)
            if entry is None or entry.fields.get("path") != path:
                written, _ = run_file(run.folder)
                if written is not None:
                    keep_place(Path(path).parent)
                    write_entry(RUNS, run.id, {"path": path, "run": written})
    except MeshwrightError as refused:
        notes.append(f"what was found is not kept: {refused.message}")
