"""Read what a run's folder holds and follow it while the run goes on; nothing in it is trusted.

Small files are read again when they change, metrics.jsonl and log.txt from where they were read last. Every
text that leaves this module has its control and direction characters escaped.

Imports: `_metrics`, `_states`, `files`, `measure`, `report`. Used by: `_shelf`, `_server`, `_static_page`,
`_screen`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.files import MOST_JSON_BYTES, open_file, parsed_json, read_text, reason

from ._metrics import Metrics, Row, kind_of, tail
from ._states import State, state_of
from ._values import LARGEST, clean, number_at, text_at

LOG_BYTES = 1 << 16  # of a log at once
MOST_NOTICES, MOST_CHECKPOINTS, MOST_SETTINGS = 200, 200, 400
NOTICES_BYTES = 1 << 18  # of the end of notices.jsonl
Fields = dict[str, Any]


class Kept:
    """What was made of a file, until the file changes. `wrong` says why it cannot be read."""

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
        self.state = State(name="waiting", words="")
        self._config = Kept(folder / "config.json", parsed_json)
        self._weighing = Kept(folder / "weighing.json", parsed_json)
        self._measured = Kept(folder / "measurement.json", _measured)
        self._compared = Kept(folder / "reconciliation.json", _compared)
        self._stamps: list[tuple[int, int, int] | None] = []
        self._recent: list[Row] = []

    def refresh(self) -> bool:
        """Look for changes of the folder, and read the end of its metrics; return whether there are any."""
        kept = (self._config, self._weighing, self._measured, self._compared)
        changed = any([each.refresh() for each in kept])
        names = ("metrics.jsonl", "log.txt", "notices.jsonl", "checkpoints")
        stamps = [stamp_of(self.folder / name) for name in names]
        if stamps != self._stamps:
            if stamps[:1] != self._stamps[:1]:
                self._recent = tail(self.metrics.path)
            self._stamps, changed = stamps, True
        measured = self._measured.value or {}
        newest = max((stamp[0] for stamp in stamps if stamp is not None), default=0) / 1e9
        state = state_of(self.folder, measured.get("steps"), measured.get("signal", ""), self.step, newest)
        if state != self.state:
            self.state, changed = state, True
        self.version += changed
        return changed

    @property
    def step(self) -> int:
        """The newest step that is recorded."""
        return self._recent[-1]["step"] if self._recent else 0

    def row(self) -> Fields:
        """Return what a list of runs shows."""
        weighing, config = self._weighing.value, self._config.value
        steps = number_at(config, "steps")
        seconds = self.usual_seconds()
        is_running = self.state.name == "running"
        left = max(0.0, steps - self.step) * seconds if is_running and steps and seconds else None
        return {
            "id": self.id,
            "version": self.version,
            "name": self.name,
            "folder": clean(self.folder),
            "state": self.state.name,
            "words": self.state.words,
            "step": self.step,
            "steps": None if steps is None else int(steps),
            "loss": self.newest("loss"),
            "held_out_loss": self.newest("held_out_loss"),
            "step_seconds": seconds,
            "seconds_left": left,
            "mfu": self.newest("mfu"),
            "memory": self.newest("memory_in_use_bytes"),
            "finish": [],
            "begun": self._begun(),
            "of": text_at(weighing, "config") or text_at(config, "name"),
            "on": text_at(weighing.get("fleet") if isinstance(weighing, dict) else None, "name"),
            "layout": text_at(weighing, "layout"),
            "unit": text_at(weighing, "batch_unit") or "tokens",
            "tokens_per_step": number_at(weighing, "tokens_per_step"),
            "predicted": self._predicted(),
        }

    def _begun(self) -> float | None:
        """Return when the run's first file was written, in seconds since 1970."""
        stamp = stamp_of(self.folder / "config.json") or stamp_of(self.folder / "weighing.json")
        return None if stamp is None else stamp[0] / 1e9

    def newest(self, key: str) -> float | None:
        """Return the newest finite value of a quantity."""
        for line in reversed(self._recent):
            if (value := number_at(line, key)) is not None:
                return value
        value = self.metrics.newest.get(key, (self._measured.value or {}).get("last", {}).get(key))
        return None if value is None or math.isnan(value) else value

    def usual_seconds(self) -> float | None:
        """Return the median of the recent steps with their waits for a batch; None before the first."""
        lines = [line for line in self._recent if kind_of(line) == "train"]
        known = [
            seconds + (number_at(line, "input_wait_seconds") or 0.0)
            for line in lines
            if (seconds := number_at(line, "seconds")) is not None
        ]
        return statistics.median(known) if known else None

    def _predicted(self) -> Fields:
        """Return the predicted quantities that are drawn beside measured ones: expected, least and most."""
        weighing = self._weighing.value
        made: Fields = {}
        step = [number_at(weighing, "prediction", "step_seconds", end) for end in ("expected", "low", "high")]
        expected, low, high = step
        if expected is None or low is None or high is None or not 0 < low <= expected <= high:
            return made
        made["seconds"] = step
        if tokens := number_at(weighing, "tokens_per_step"):
            made["tokens_per_second"] = [tokens / expected, tokens / high, tokens / low]
        for key in ("mfu", "hfu"):
            if (share := number_at(weighing, "prediction", key)) is not None:
                made[key] = [share, share * expected / high, share * expected / low]
        if (reserved := number_at(weighing, "ledger", "memory", "reserved_bytes")) is not None:
            made["memory_in_use_bytes"] = [reserved, reserved, reserved]
        return made

    def details(self) -> Fields:
        """Return what the page shows of one run besides its curves and its log."""
        measured, config = self._measured.value or {}, self._config.value
        kept = (self._config, self._weighing, self._measured, self._compared)
        notes = [each.wrong for each in kept if each.wrong]
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
            "phases": measured.get("phases", []),
            "compared": self._compared.value or [],
            "settings": settings[:MOST_SETTINGS],
        }

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
    last = {"loss": made.losses, "held_out_loss": made.held_out_losses}
    sample = {"prompt": clean(made.sample_prompt), "text": clean(made.sample)}
    return {
        "steps": made.steps,
        "signal": clean(made.signal),
        "samples": [sample] if made.sample else [],
        "phases": [[clean(name), seconds] for name, seconds in made.seconds_by_phase.items()],
        "last": {key: values[max(values)] for key, values in last.items() if values},
    }


def _compared(text: str) -> list[list[str]]:
    """Return predicted beside measured quantities as rows of words."""
    from meshwright.measure import Reconciliation
    from meshwright.report import row_cells

    return [[clean(cell) for cell in row_cells(row)] for row in Reconciliation.from_json(text).rows]
