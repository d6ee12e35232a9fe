"""Own a run's folder: lock it, check which run it holds, and write to it.

A write that the disk refuses does not end the run. It is reported at most once an hour, and tried again
later.

No jax is loaded here: a folder is refused within a second, before anything is compiled or written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from ..checkpoint import lock_folder, open_own, steps_in, unread_newest, write_probe
from ..config import RunConfig
from ..errors import InputError
from ..launch import Alone
from ._resume import about_complaint, check_same_run, is_same_run

TOLD_AGAIN_SECONDS = 3600.0  # between reports: a disk that is full at times is not reported at every step


class Writes:
    """The files of a run's folder that are not on disk yet, and the reasons.

    `refused`: by file name, the reason why the last write failed.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.refused: dict[str, str] = {}
        self._folder, self._now = folder, now
        self._documents: dict[str, str] = {}  # waiting to be written, by name
        self._told: dict[str, float] = {}  # when each name was last reported

    def document(self, name: str, text: str) -> None:
        """Write a text file, now or when `retry` finds room."""
        self._documents[name] = text
        self._write(name)

    def documents(self, texts: Mapping[str, str]) -> None:
        """Write a text file for each name."""
        for name, text in texts.items():
            self.document(name, text)

    def retry(self) -> None:
        """Try again to write the waiting documents."""
        for name in list(self._documents):
            self._write(name)

    def attempt(self, name: str, write: Callable[[], object]) -> bool:
        """Call `write`, which writes the file `name`; return whether it succeeded.

        If the system refuses, the reason is kept in `refused`.
        """
        try:
            write()
        except OSError as refused:
            self.refused[name] = refused.strerror or str(refused)
            return False
        self.refused.pop(name, None)
        return True

    def untold(self) -> dict[str, list[str]]:
        """Return the reasons not reported within the last hour, each with the names of its files."""
        found: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            if self._now() - self._told.get(name, -TOLD_AGAIN_SECONDS) >= TOLD_AGAIN_SECONDS:
                self._told[name] = self._now()
                found.setdefault(why, []).append(name)
        return found

    def _write(self, name: str) -> None:
        text = self._documents[name]
        if self.attempt(name, lambda: write_whole(self._folder / name, text)):
            del self._documents[name]


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: a reader finds either the old text or the new one.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(open_own(new, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


class Appended:
    """A file that is open for appending.

    Data that the disk refuses waits in memory, and is written first the next time.
    """

    def __init__(self, path: Path, writes: Writes) -> None:
        self.path = path
        self._writes = writes
        self._waiting = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def add(self, data: bytes) -> None:
        """Append `data`, after the waiting data."""
        self._waiting += data
        self._writes.attempt(self.path.name, self._flush)

    def close(self) -> None:
        """Try for the last time to write the waiting data, and close the file.

        Data that cannot be written is lost, and the file remains listed in `Writes.refused`.
        """
        if self._writes.attempt(self.path.name, self._flush):
            self._writes.attempt(self.path.name, lambda: os.close(self._file))
            return
        self._writes.refused[self.path.name] += f" ({len(self._waiting):,} bytes are lost)"
        os.close(self._file)

    def _flush(self) -> None:
        while self._waiting:
            del self._waiting[: os.write(self._file, self._waiting)]


CONFIG, METRICS = "config.json", "metrics.jsonl"
SHARED = ".shared"  # exists briefly: with it the processes check that they see the same folder
TAIL_BYTES = 1 << 16  # at the end of metrics.jsonl; they contain its last complete line
ALONE = Alone()


class RunFolder:
    """A run's folder, which only this process writes from `look` or `make` until `close`.

    With several processes, only the first locks and writes it. All call the same methods in the same order.

    Args:
        resume: continue the run that the folder holds, or begin one if it holds none.
        discard_steps: with `resume`, continue even if this loses steps that no checkpoint was to hold.
        peers: the processes of the run.
    """

    def __init__(
        self, path: Path, *, resume: bool = False, discard_steps: bool = False, peers: Alone = ALONE
    ) -> None:
        self.path, self.resume = path, resume
        self.writes = Writes(path)
        self._discard_steps, self._peers = discard_steps, peers
        self._lock: IO[str] | None = None

    def look(self, config: RunConfig) -> None:
        """Lock the folder if it exists, and check that this run may use it; create no folder.

        Raises:
            InputError: another process writes it, it holds a run that is not to be resumed, the run is not
                that of `config`, or resuming would discard steps.
        """
        self._peers.from_first("folder/look", lambda: self._look(config))

    def make(self) -> None:
        """Create the folder, lock it, and check that files can be written there.

        Raises:
            InputError: files cannot be written, another process writes it, or another host sees another
                folder.
        """
        self._peers.from_first("folder/make", self._make)
        check_shared(self.path, self._peers)

    def close(self) -> None:
        """Unlock the folder, so that other processes can write it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _look(self, config: RunConfig) -> None:
        if self.path.is_dir():  # otherwise `make` creates it, or reports why it cannot
            self._take_lock(config)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None:  # it did not exist when `look` was called
                self._take_lock(None)
            write_probe(self.path)
        except OSError as refused:
            self.close()
            raise _unwritable(self.path, refused) from refused

    def _take_lock(self, config: RunConfig | None) -> None:
        try:
            self._lock = lock_folder(self.path, f"{self.path} is")
        except OSError as refused:
            raise _unwritable(self.path, refused) from refused
        try:
            self._check(config)
        except BaseException:
            self.close()
            raise

    def _check(self, config: RunConfig | None) -> None:
        checkpoints = self.path / "checkpoints"
        saved = steps_in(checkpoints) if checkpoints.is_dir() else []
        metrics = self.path / METRICS
        holds_run = bool(saved) or (metrics.exists() and metrics.stat().st_size > 0)
        if not holds_run:
            return
        if not self.resume:
            raise InputError(
                f"{self.path} holds a run already",
                hint="go on with it: --resume; or choose a folder that is not there yet",
            )
        newest = unread_newest(checkpoints, about_complaint)
        if newest is not None and config is not None:
            check_same_run(newest, config)
        if not self._discard_steps:
            self._check_discards(saved, config)

    def _check_discards(self, saved: list[int], config: RunConfig | None) -> None:
        """Raise if resuming would lose steps that a crash alone would not lose.

        This is so if the run saves no checkpoints, or if its checkpoints are gone. Two checkpoint intervals
        may pass before the first checkpoint is on disk.
        """
        recorded, newest = last_recorded_step(self.path), saved[-1] if saved else 0
        every = _checkpoint_interval(self.path, config)
        if recorded <= newest or (every is not None and (saved or recorded <= 2 * every)):
            return
        kept = f"its newest checkpoint is of step {newest}" if saved else "it has no checkpoint"
        lost = f"steps {newest + 1} to {recorded}"
        raise InputError(
            f"{self.path} holds a run of {recorded} steps, and {kept}: going on would discard {lost}",
            hint=f"train {lost} again with --resume --discard-steps, or choose another folder with --folder"
            + ("" if saved or every is None else "; or bring back its checkpoints"),
        )


def config_of(run: Path) -> RunConfig:
    """Return the config of the run that a folder holds.

    It is read from config.json. If that file is missing, unreadable, or not the config of the run that saved
    the checkpoints (a user may have overwritten it), the config is read from the newest checkpoint.

    Raises:
        InputError: the folder holds no config, or one of another release.
    """
    path = run / CONFIG
    newest = unread_newest(run / "checkpoints", about_complaint)
    saved = None if newest is None else newest.about.get("config")
    try:
        config = RunConfig.model_validate_json(path.read_bytes())
        if saved is None or is_same_run(saved, config):
            return config
    except OSError as refused:
        if saved is None:
            raise InputError(
                f"{run} is no run: {path.name} cannot be read: {refused.strerror}",
                hint="name the folder that `meshwright train` wrote",
            ) from refused
    except ValidationError as wrong:
        if saved is None:
            raise _of_another_release(path, wrong) from wrong
    try:
        return RunConfig.model_validate(saved)
    except ValidationError as wrong:
        raise _of_another_release(run / "checkpoints", wrong) from wrong


def last_recorded_step(folder: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl; 0 if none exists."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0  # missing, or a device
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a process that was killed
    return 0


def check_shared(folder: Path, peers: Alone) -> None:
    """Raise if a process does not see the first process's folder.

    Raises:
        InputError: a process sees another folder; the message names the process.
    """
    if peers.count == 1:
        return
    mark = folder / SHARED
    token = peers.from_first("mark", lambda: _marked(mark))
    seen = mark.is_file() and mark.read_text() == token
    names = peers.gathered("seen", "" if seen else peers.name)
    if peers.is_first:
        mark.unlink()
    if absent := [name for name in names if name]:
        raise InputError(
            f"{folder} of the first process is not that of {', '.join(absent[:3])}"
            + (f" and {len(absent) - 3} more" if len(absent) > 3 else ""),
            hint="name a folder on a disk that all hosts share: --folder DIR",
        )


def _marked(mark: Path) -> str:
    token = os.urandom(8).hex()
    try:
        with os.fdopen(open_own(mark, os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(token)
    except OSError as refused:
        raise _unwritable(mark.parent, refused) from refused
    return token


def _checkpoint_interval(folder: Path, config: RunConfig | None) -> int | None:
    """Return `checkpoint.every_steps` of the run in the folder, or None if it saves no checkpoints.

    If config.json is unreadable, the value of `config` is returned.
    """
    try:
        was: Any = json.loads((folder / CONFIG).read_bytes())
        every = was["checkpoint"]["every_steps"]
    except (OSError, ValueError, TypeError, KeyError):
        every = None if config is None else config.checkpoint.every_steps
    return every if isinstance(every, int) else None


def _of_another_release(where: Path, wrong: ValidationError) -> InputError:
    first: Mapping[str, Any] = wrong.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return InputError(
        f"{where} is no config of this release: {place}: {first['msg']}",
        hint="read the run with the release that wrote it",
    )


def _unwritable(folder: Path, refused: OSError) -> InputError:
    return InputError(
        f"cannot write a run to {folder}: {refused.strerror}",
        hint=f"choose a folder that can be written, below {_existing(folder)} or elsewhere",
    )


def _existing(folder: Path) -> Path:
    return next(parent for parent in folder.absolute().parents if parent.is_dir())
