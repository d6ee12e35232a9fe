"""Describe a run by its folder: what it is, whether it lives, and what it has reached.

A run lives while a process holds the lock of its folder. One that has no end in run.json, and whose lock is
free, has died. A folder that was copied or moved is the same run: its id is in run.json.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from meshwright.errors import InputError, printable
from meshwright.files import MOST_RECORD_BYTES, last_lines, open_file, parsed_json, read_json, reason
from meshwright.kept_records import MOST_RECORD, RECORD_SCHEMA, RUN_FILE
from meshwright.reportable import OneLine
from meshwright.trainer.checkpoint import steps_in

if TYPE_CHECKING:
    from ._metrics import Metrics

LOCK, TAGS, LOG, NOTICES, MEASUREMENT = ".lock", "tags.json", "log.txt", "notices.jsonl", "measurement.json"
METRICS, PHASES = "metrics.jsonl", "phases.json"
TAIL_BYTES = 2**16  # at the end of metrics.jsonl
MOST_NOTICES = 1000
LEAST, MOST = 1e-100, 1e100  # of a figure: products and quotients of three stay finite
SILENT_SECONDS = 600.0
"""After so long without a line, a run of another host whose lock is free here counts as dead."""

TAG = re.compile(r"[\w.:/+-]{1,40}")

State = Literal["running", "finished", "stopped", "failed", "dead", "unknown", "gone"]
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Hold the prediction of a run's step; a field is None where nothing was predicted."""

    low: float | None = None
    expected: float | None = None
    high: float | None = None
    needed_bytes: int | None = None
    mfu: float | None = None
    price_per_device_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint of a run: its step, its folder, and when it was written (seconds since 1970)."""

    step: int
    folder: Path
    written: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunRecord(OneLine):
    """One run: what is listed of it. Its methods read more from its folder, and never write.

    `id`: "" if the folder has none, as one that an earlier release made. `state`: running (a process holds
    the folder's lock), finished, stopped (by a signal), failed (by an error, such as a loss that is not
    finite), dead (its process is gone without an end), unknown (it runs elsewhere, or is of a newer release),
    gone (its folder is not here); `words` says why. `began`, `ended`: UTC, ISO 8601. `steps`: of the whole
    run; `step`: the last one that was recorded. `loss`, `held_out_loss`: the last, in nats. `step_seconds`:
    the median that was measured, of the last steps while it runs. `seconds`: of all its sessions, by the
    clock; of one that has died, until it last wrote. `finish`: when a running one will be done, as it last
    estimated; "" before it has.
    `device_hours`: of all its sessions, each with the devices that it had.
    `copies`: other folders that hold the same run. `sweep`: the folder of its sweep. `notes`: what could not
    be read.
    """

    id: str
    name: str
    folder: Path
    state: State
    words: str = ""
    began: str = ""
    ended: str = ""
    host: str = ""
    fleet: str = ""
    layout: str = ""
    steps: int | None = None
    step: int | None = None
    loss: float | None = None
    held_out_loss: float | None = None
    step_seconds: float | None = None
    tokens_per_step: int | None = None
    batch_unit: str = "tokens"
    num_parameters: int | None = None
    num_devices: int | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    device_hours: float | None = None
    finish: str = ""
    predicted: Predicted = field(default_factory=Predicted)
    tags: tuple[str, ...] = ()
    copies: tuple[Path, ...] = ()
    sweep: Path | None = None
    notes: tuple[str, ...] = ()
    sessions: tuple[Mapping[str, Any], ...] = ()

    @property
    def line(self) -> str:
        """Name, state and progress."""
        progress = "" if self.step is None else f", step {self.step:,}"
        return f"{self.id or self.folder} {self.name}: {self.state}{progress}"

    @property
    def tokens(self) -> int | None:
        """How many tokens, images or rows were trained on; None if unknown."""
        known = self.step is not None and self.tokens_per_step is not None
        return cast("int", self.step) * cast("int", self.tokens_per_step) if known else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens, images or rows per second of all devices at the median step; None if unknown."""
        if not self.step_seconds or self.tokens_per_step is None:
            return None
        return self.tokens_per_step / self.step_seconds

    @property
    def step_error(self) -> float | None:
        """The measured median step over the predicted one, less 1; None if either is unknown."""
        expected = self.predicted.expected
        return self.step_seconds / expected - 1 if self.step_seconds and expected else None

    @property
    def mfu(self) -> float | None:
        """MFU at the measured median step; None if it or the predicted one is unknown."""
        mfu, expected = self.predicted.mfu, self.predicted.expected
        return mfu * expected / self.step_seconds if mfu and expected and self.step_seconds else None

    def curves(self) -> Metrics:
        """Return the run's metrics, read to the end of the file; their `read_whole` reads what is new."""
        from ._metrics import Metrics

        made = Metrics(self.folder / METRICS)
        made.read_whole()
        return made

    def notices(self) -> tuple[Figures, ...]:
        """Return the run's last notices, oldest first: step, kind, message, hint."""
        lines = last_lines(self.folder / NOTICES, MOST_NOTICES)
        return tuple(entry for line in lines if (entry := _entry_of(line)) is not None)

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase of the last session, so far if it has not ended."""
        found = _read_table(self.folder / PHASES)
        if self.state in ("finished", "stopped") or not found:
            found = self._measurement().get("seconds_by_phase")
        return {str(name): float(value) for name, value in _table(found).items() if _is_number(value)}

    def samples(self) -> tuple[tuple[str, str], ...]:
        """Return the prompts and texts that the trained model wrote; empty until it has ended."""
        found = self._measurement()
        prompt, text = found.get("sample_prompt"), found.get("sample")
        return ((str(prompt), str(text)),) if text else ()

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return the complete checkpoints, oldest first."""
        folder = self.folder / "checkpoints"
        made: list[Checkpoint] = []
        try:
            for step in steps_in(folder):
                path = folder / str(step)
                made.append(Checkpoint(step=step, folder=path, written=path.stat().st_mtime))
        except OSError:
            return tuple(made)
        return tuple(made)

    def log(self, count: int = 200) -> tuple[str, ...]:
        """Return the last lines of the run's log."""
        return tuple(last_lines(self.folder / LOG, count))

    def config(self) -> Figures:
        """Return the run's configuration in JSON's types; empty if it cannot be read."""
        return _read_table(self.folder / "config.json")

    def to_dict(self) -> dict[str, Any]:
        """Return the run in JSON's types."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        predicted = {name: getattr(self.predicted, name) for name in Predicted.__slots__}
        return {
            **fields,
            "folder": str(self.folder),
            "copies": [str(path) for path in self.copies],
            "sweep": None if self.sweep is None else str(self.sweep),
            "predicted": predicted,
            "sessions": [dict(session) for session in self.sessions],
            "tokens": self.tokens,
            "step_error": self.step_error,
            "mfu": self.mfu,
        }

    def _measurement(self) -> Figures:
        return _read_table(self.folder / MEASUREMENT)


def run_record(folder: Path | str) -> RunRecord:
    """Return the run that a folder holds, whole or not: `notes` says what could not be read.

    Raises:
        InputError: the folder holds no run, or what is given is no folder's name.
    """
    hint = "name the folder that `meshwright train` wrote; `meshwright runs` lists them"
    if not isinstance(folder, str | Path):
        raise InputError(f"{repr(folder)[:80]} is not the name of a folder", hint=hint)
    folder = Path(folder)
    run, note = run_file(folder)
    if run is None and not os.path.isdir(folder):  # also one whose name no file can have
        raise InputError(f"{str(folder)[:200]!r} is no folder: {note or 'nothing is there'}", hint=hint)
    if run is None and not note and not (folder / METRICS).exists():
        raise InputError(f"{folder} holds no run: it has neither {RUN_FILE} nor {METRICS}", hint=hint)
    return record_of(folder, run, (note,) if note else ())


def run_file(folder: Path) -> tuple[Figures | None, str]:
    """Return what run.json of a folder says, or None, and why it cannot be read; "" if there is none."""
    try:
        found = read_json(folder / RUN_FILE, MOST_RECORD, strict=False)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError) as refused:
        return None, f"{RUN_FILE} cannot be read: {reason(refused)}"
    schema = _table(found).get("schema")
    if schema != RECORD_SCHEMA and isinstance(schema, int):
        return None, f"{RUN_FILE} is of schema {schema}, and this release reads {RECORD_SCHEMA}"
    if schema != RECORD_SCHEMA or not is_id(_table(found).get("id"), "r"):
        return None, f"{RUN_FILE} is not that of a run"
    return cast("Figures", found), ""


def is_id(text: object, letter: str) -> bool:
    """Return whether a value is the id of a record: a letter and hexadecimal digits."""
    digits = "0123456789abcdef"
    return isinstance(text, str) and text[:1] == letter and len(text) == 13 and not text[1:].strip(digits)


def record_of(folder: Path, run: Figures | None, notes: Sequence[str] = ()) -> RunRecord:
    """Return the record of a folder from its run.json, or without it from its other files."""
    given = run or {}
    sessions = [cast("Figures", each) for each in _list(given.get("sessions")) if isinstance(each, dict)]
    last = sessions[-1] if sessions else {}
    state, words = _state(folder, last)
    if run is None and any("of schema" in note for note in notes):
        state, words = "unknown", notes[0]
    weighed = _table(given.get("weighing"))
    step_seconds = _table(weighed.get("step_seconds"))
    reached = {name: last.get(name) for name in ("step", "loss", "held_out_loss", "step_seconds")}
    if state not in ("finished", "stopped") or reached["step"] is None:
        reached = {**reached, **_tail(folder)}
    num_devices = _whole(weighed.get("num_devices")) or _whole(last.get("num_devices"))
    seconds = _seconds_of(sessions, time.time() if state == "running" else _last_written(folder))
    name = (
        _text(given.get("name"))
        or _text(_read_table(folder / "config.json").get("name"))
        or printable(folder.name)
    )
    parent = folder.absolute().parent
    return RunRecord(
        id=_text(given.get("id")),
        name=name,
        folder=folder,
        state=state,
        words=printable(words),
        began=_text(given.get("began")),
        ended=_text(last.get("ended")),
        host=_text(last.get("host")),
        fleet=_text(given.get("fleet")),
        layout=_text(given.get("layout")),
        steps=_whole(given.get("steps")),
        step=_whole(reached["step"]),
        loss=_number(reached["loss"]),
        held_out_loss=_number(reached["held_out_loss"]),
        step_seconds=_number(reached["step_seconds"]),
        tokens_per_step=_whole(given.get("tokens_per_step")),
        batch_unit=_text(given.get("batch_unit")) or "tokens",
        num_parameters=_whole(given.get("num_parameters")),
        num_devices=num_devices,
        peak_bytes=_whole(last.get("peak_bytes")),
        finish=printable(_text(_table(given.get("finish")).get("text"))) if state == "running" else "",
        seconds=None if seconds is None else sum(seconds),
        device_hours=_device_hours(sessions, seconds, num_devices),
        predicted=Predicted(
            low=_number(step_seconds.get("low")),
            expected=_number(step_seconds.get("expected")),
            high=_number(step_seconds.get("high")),
            needed_bytes=_whole(weighed.get("needed_bytes")),
            mfu=_number(weighed.get("mfu")),
            price_per_device_hour=_number(weighed.get("price_per_device_hour")),
        ),
        tags=tags_of(folder / TAGS),
        sweep=parent if (parent / "sweep.json").is_file() else None,
        notes=tuple(map(printable, notes)),
        sessions=tuple(sessions),
    )


def tags_of(file: Path) -> tuple[str, ...]:
    """Return the tags that a file lists; none if it is not there or damaged."""
    found = (tag for tag in _list(_read_table(file).get("tags")) if isinstance(tag, str))
    return tuple(sorted({tag for tag in found if TAG.fullmatch(tag)}))


def is_locked(folder: Path) -> bool | None:
    """Return whether a process writes a run's folder; None if the file system does not say.

    The lock is the kernel's, so it ends with its process. A shared one is asked for, for an instant: a run
    that begins in it asks again.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = os.open(folder / LOCK, flags)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(lock)
    return False


def _state(folder: Path, last: Mapping[str, Any]) -> tuple[State, str]:
    """Return the state of a run by the lock of its folder and its last session."""
    locked, ended, host = is_locked(folder), _text(last.get("state")), _text(last.get("host"))
    if locked:
        return "running", f"process {last.get('pid', '?')} on {host or 'an unknown host'}"
    if ended in ("finished", "stopped", "failed"):
        return cast("State", ended), _text(last.get("words"))
    process = f"process {last.get('pid')} on {host}" if host else "its process"
    if locked is None:
        return "unknown", f"whether {process} lives is not known: the lock of {folder} cannot be asked for"
    silent = time.time() - _last_written(folder)
    if host not in ("", os.uname().nodename) and silent < SILENT_SECONDS:
        words = f"the lock is free here, and {process} wrote {silent:.0f} s ago: that host may keep its own"
        return "unknown", f"{words} locks"
    return "dead", f"{process} ended without a word: the lock of the folder is free"


def _last_written(folder: Path) -> float:
    times = [0.0]
    for name in (METRICS, LOG, RUN_FILE):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _tail(folder: Path) -> Figures:
    """Return the last step, losses and the median step of the last lines of metrics.jsonl."""
    try:
        with open_file(folder / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return {}
    found: Figures = {}
    seconds: list[float] = []
    for line in lines:
        entry = _entry_of(line)
        if entry is None:
            continue
        found["step"] = entry["step"]
        found |= {name: entry[name] for name in ("loss", "held_out_loss") if _is_number(entry.get(name))}
        if _is_number(entry.get("seconds")) and entry["step"] > 2:  # the first two still fill caches
            seconds.append(float(entry["seconds"]))
    return {**found, **({"step_seconds": statistics.median(seconds)} if seconds else {})}


def _entry_of(line: str | bytes) -> Figures | None:
    """Return a line of metrics or notices; None if it is not whole."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(entry, dict) and _whole(cast("Figures", entry).get("step")) is not None
    return cast("Figures", entry) if whole else None


def _read_table(path: Path) -> Figures:
    try:
        return _table(parsed_json(_read(path), strict=False))
    except (OSError, ValueError):
        return {}


def _read(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(MOST_RECORD_BYTES)


def _table(value: object) -> Figures:
    return cast("Figures", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _text(value: object) -> str:
    return printable(value[:1000]) if isinstance(value, str) else ""


def _is_number(value: object) -> bool:
    """Return whether a value is a figure of a run, or nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or LEAST < abs(value) < MOST


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**63 else None


def _seconds_of(sessions: Sequence[Figures], until: float) -> list[float] | None:
    """Return how long each session took by the clock; of one without an end, until it last wrote or now."""
    found: list[float] = []
    for place, session in enumerate(sessions, start=1):
        began, ended = moment(_text(session.get("began"))), moment(_text(session.get("ended")))
        end = until if ended is None and place == len(sessions) else ended
        if began is None or end is None:
            return None
        found.append(max(0.0, end - began))
    return found or None


def _device_hours(
    sessions: Sequence[Figures], seconds: Sequence[float] | None, num_devices: int | None
) -> float | None:
    """Return the hours of all devices; a session that does not say how many it had has those of the run."""
    if seconds is None:
        return None
    total = 0.0
    for session, took in zip(sessions, seconds, strict=True):
        devices = _whole(session.get("num_devices")) or num_devices
        if devices is None:
            return None
        total += took / 3600 * devices
    return total


def moment(text: str) -> float | None:
    """Return a time of ISO 8601 as seconds since 1970; None if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
