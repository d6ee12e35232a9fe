"""Read what a run's folder holds and follow it while the run goes on; nothing in it is trusted.

Small files are read again when they change, metrics.jsonl and log.txt from where they were read last. Every
text that leaves this module has its control and direction characters escaped.

Imports: `_values`, `contrib.runs`, `files`, `measure`, `report`.
Used by: `_shelf`, `_screen`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.contrib.runs import Metrics, RunRecord, moment, run_record
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import MOST_JSON_BYTES, open_file, parsed_json, read_text, reason

from ._values import LARGEST, clean, number_at, text_at

LOG_BYTES = 1 << 16  # of a log at once
MOST_NOTICES, MOST_CHECKPOINTS, MOST_SETTINGS = 200, 200, 400
NOTICES_BYTES = 1 << 18  # of the end of notices.jsonl
WATCHED = ("run.json", "metrics.jsonl", "log.txt", "notices.jsonl", "checkpoints", "tags.json", ".lock")
Fields = dict[str, Any]


_EMPTY: Fields = {
    "step": 0,
    "predicted": {},
    "finish": "",
    "tags": [],
    **dict.fromkeys(("of", "on", "layout"), ""),
    "unit": "tokens",
    **dict.fromkeys(("steps", "loss", "held_out_loss", "step_seconds", "seconds_left", "mfu", "memory")),
    "tokens_per_step": None,
}


def predicted_of(record: RunRecord) -> Fields:
    """Return the predicted quantities that are drawn beside measured ones: expected, least and most."""
    made, predicted = Fields(), record.predicted
    expected, low, high = predicted.expected, predicted.low, predicted.high
    if expected is not None and low is not None and high is not None and 0 < low <= expected <= high:
        made["seconds"] = [expected, low, high]
        if tokens := record.tokens_per_step:
            made["tokens_per_second"] = [tokens / expected, tokens / high, tokens / low]
        if (share := predicted.mfu) is not None:
            made["mfu"] = [share, share * expected / high, share * expected / low]
    if (needed := predicted.needed_bytes) is not None:
        made["memory_in_use_bytes"] = [needed, needed, needed]
    return made


class Kept:
    """Hold what was made of a file, until the file changes. `wrong` says why it cannot be read."""

    def __init__(self, path: Path, parse: Callable[[str], Any], most: int = MOST_JSON_BYTES) -> None:
        self.path, self.value, self.wrong = path, None, ""
        self._parse, self._most = parse, most
        self._stamp: tuple[int, int, int] | None = None

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether it had."""
        stamp = stamp_of(self.path)
        if stamp == self._stamp:
            return False
        self._stamp, self.value, self.wrong = stamp, None, ""
        if stamp is None:
            return True
        try:
            self.value = self._parse(read_text(self.path, self._most))
        except MeshwrightError as error:
            self.wrong = f"{self.path.name} cannot be read: {clean(error.message)}"
        except (OSError, ValueError) as error:
            self.wrong = f"{self.path.name} cannot be read: {clean(reason(error))}"
        except (KeyError, TypeError, AttributeError) as error:
            self.wrong = f"{self.path.name} cannot be read: {clean(repr(error))}"
        return True


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does; None if it is not there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class LiveRun:
    """One run's folder. `version` grows with each `refresh` that finds something new."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, clean(name)
        self.id = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:16]
        self.version = 0
        self.metrics = Metrics(folder / "metrics.jsonl")
        self.record: RunRecord | None = None
        self._config = Kept(folder / "config.json", parsed_json)
        self._measured = Kept(folder / "measurement.json", _measured)
        self._compared = Kept(folder / "reconciliation.json", _compared)
        self._phases = Kept(folder / "phases.json", _phases)
        self._parts = Kept(folder / "weighing.json", _step_parts)
        self._stamps: list[tuple[int, int, int] | None] = []

    @property
    def _files(self) -> tuple[Kept, ...]:
        return self._config, self._measured, self._compared, self._phases

    @property
    def state(self) -> str:
        """The state of the run's record; "waiting" before it has one."""
        return "waiting" if self.record is None else self.record.state

    def refresh(self) -> bool:
        """Look for changes of the folder; return whether there are any."""
        changed = any([each.refresh() for each in self._files])
        stamps = [stamp_of(self.folder / name) for name in WATCHED]
        if stamps != self._stamps or self.state == "running":  # which may die without a word
            changed |= stamps != self._stamps or self.version == 0
            self._stamps, before = stamps, self.record
            try:
                self.record = run_record(self.folder)
            except InputError:
                self.record = None
            changed |= before != self.record
        self.version += changed
        return changed

    def row(self) -> Fields:
        """Return what a list of runs shows."""
        record = self.record
        if record is None:
            return {**_EMPTY, **self._named(), "state": self.state, "words": "no run has begun here yet"}
        steps, step, seconds = record.steps, record.step or 0, record.step_seconds
        left = None
        if record.state == "running" and steps is not None and seconds is not None:
            left = max(0, steps - step) * seconds
        held_out = record.held_out_loss
        return {
            **_EMPTY,
            **self._named(),
            "state": record.state,
            "words": clean(record.words),
            "step": step,
            "steps": steps,
            "loss": record.loss,
            "held_out_loss": self._newest("held_out_loss") if held_out is None else held_out,
            "step_seconds": seconds,
            "seconds_left": left,
            "mfu": record.mfu,
            "finish": clean(record.finish),
            "memory": self._newest("memory_in_use_bytes"),
            "begun": moment(record.began) or self._begun(),
            "of": clean(record.name),
            "on": clean(record.fleet),
            "layout": clean(record.layout),
            "unit": clean(record.batch_unit),
            "tags": [clean(tag) for tag in record.tags],
            "tokens_per_step": record.tokens_per_step,
            "predicted": predicted_of(record),
        }

    def _named(self) -> Fields:
        names = {"id": self.id, "version": self.version, "name": self.name}
        return {**names, "folder": clean(self.folder), "begun": self._begun()}

    def _begun(self) -> float | None:
        """Return when the run's first file was written, in seconds since 1970."""
        stamp = stamp_of(self.folder / "config.json")
        return None if stamp is None else stamp[0] / 1e9

    def _newest(self, key: str) -> float | None:
        """Return the last value of a quantity as far as the metrics are read; None if there is none."""
        value = self.metrics.newest.get(key)
        return None if value is None or math.isnan(value) else value

    def details(self) -> Fields:
        """Return what the page shows of one run besides its curves and its log."""
        self._parts.refresh()  # large, and only shown here
        measured, config = self._measured.value or {}, self._config.value
        notes = [] if self.record is None else [clean(note) for note in self.record.notes]
        notes += [each.wrong for each in (*self._files, self._parts) if each.wrong]
        notes += [self.metrics.why_not] if self.metrics.why_not else []
        if self.metrics.broken:
            notes.append(f"metrics.jsonl: {self.metrics.broken:,} lines hold no step and are left out.")
        settings = [] if not isinstance(config, dict) else list(_flat(config))
        return {
            "id": self.id,
            "version": self.version,
            "notes": notes,
            "notices": self.notices(),
            "checkpoints": self._checkpoints(),
            "samples": measured.get("samples", []),
            "phases": self.phases(),
            "parts": self._parts.value or [],
            "compared": self._compared.value or [],
            "settings": settings[:MOST_SETTINGS],
        }

    def phases(self) -> list[tuple[str, float]]:
        """Return the seconds of each phase of the last session, the longest first; so far, until it ends."""
        measured = (self._measured.value or {}).get("phases")
        so_far = self._phases.value
        found = measured if self.state in ("finished", "stopped") or not so_far else so_far
        return sorted(found or [], key=lambda each: -each[1])

    def notices(self) -> list[Fields]:
        """Return the newest notices, the newest last."""
        text, _ = _end_of(self.folder / "notices.jsonl", NOTICES_BYTES)
        found: list[Fields] = []
        for line in text.splitlines()[-MOST_NOTICES:]:
            try:
                entry = parsed_json(line, strict=False)
            except ValueError:
                continue
            if isinstance(entry, dict) and type(entry.get("step")) is int:
                words = {name: text_at(entry, name) for name in ("kind", "message", "hint")}
                found.append({"step": entry["step"] if abs(entry["step"]) <= LARGEST else 0, **words})
        return found

    def log(self, offset: int | None) -> Fields:
        """Return the lines of the log from an offset on, or its end; `offset` is where to go on from."""
        text, end = _end_of(self.folder / "log.txt", LOG_BYTES, offset)
        return {"offset": end, "lines": [clean(line) for line in text.split("\n")[:-1]]}

    def _checkpoints(self) -> list[int]:
        """Return the steps that have a checkpoint; the newest last."""
        try:
            names = [entry.name for entry in os.scandir(self.folder / "checkpoints")]
        except OSError:
            return []
        steps = sorted(int(name) for name in names if re.fullmatch(r"[0-9]{1,15}", name))
        return steps[-MOST_CHECKPOINTS:]


def _end_of(path: Path, most: int, offset: int | None = None) -> tuple[str, int]:
    """Return whole lines of a file from an offset on, or its last ones, and where to go on from.

    They have at most `most` bytes. A line that is not complete waits, unless it is longer than that.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            is_end = offset is None or not 0 <= offset <= size
            begin = max(0, size - most) if is_end else offset or 0
            file.seek(begin)
            data = file.read(most)
    except OSError:
        return "", 0
    if is_end and begin:
        cut = data.find(b"\n") + 1  # the line before it began earlier
        data, begin = data[cut:], begin + cut
    end = data.rfind(b"\n") + 1
    if not end and len(data) == most:
        return f"{data.decode('utf-8', 'replace')}\n", begin + most
    return data[:end].decode("utf-8", "replace").replace("\r\n", "\n"), begin + end


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield clean(f"{prefix}{name}"), clean(value if isinstance(value, str) else json.dumps(value))


def _measured(text: str) -> Fields:
    """Return what the page shows of a finished run's measurement."""
    from meshwright.measure import Measurement

    made = Measurement.from_json(text)
    sample = {"prompt": clean(made.sample_prompt), "text": clean(made.sample)}
    return {
        "samples": [sample] if made.sample else [],
        "phases": list(_numbers(made.seconds_by_phase)),
    }


def _phases(text: str) -> list[tuple[str, float]]:
    """Return the seconds of each phase of a session that is under way."""
    return list(_numbers(parsed_json(text, strict=False)))


def _numbers(found: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for name in found:
        if (seconds := number_at(found, name)) is not None and seconds >= 0:
            yield clean(name), seconds


def _step_parts(text: str) -> list[tuple[str, float]]:
    """Return what the predicted time of a step is made of: each part that nothing hides, with its seconds."""
    predicted = parsed_json(text, strict=False).get("prediction")
    slices = [] if predicted is None else predicted["slices"]
    pairs = ((f"{text_at(each, 'kind')}: {text_at(each, 'name')}", each) for each in slices)
    found = ((name, number_at(each, "exposed_seconds")) for name, each in pairs)
    return sorted(((name, seconds) for name, seconds in found if seconds), key=lambda each: -each[1])


def _compared(text: str) -> list[list[str]]:
    """Return predicted beside measured quantities as rows of words."""
    from meshwright.measure import Reconciliation
    from meshwright.report import row_cells

    return [[clean(cell) for cell in row_cells(row)] for row in Reconciliation.from_json(text).rows]
