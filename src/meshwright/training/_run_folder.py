"""Own a run's folder: lock it, check what it holds, and write to it so that a full disk does not end the run.

Writes to a run's folder that the disk may refuse without ending the run: told once, tried again later.

A run's folder: which process may write it, which run it holds, and what may be done with that.

No jax is loaded here: what is refused is refused within a second, before anything is compiled or written.
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

TOLD_AGAIN_SECONDS = 3600.0  # a disk that is full now and then is not told of at every step


class Writes:
    """The files of a run's folder that are not on the disk yet, and why.

    `refused`: by name of a file the reason for which it could not be written the last time.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.refused: dict[str, str] = {}
        self._folder, self._now = folder, now
        self._documents: dict[str, str] = {}  # that wait
        self._told: dict[str, float] = {}  # when each name was told

    def document(self, name: str, text: str) -> None:
        """Write a file of that text, now or when `retry` finds room."""
        self._documents[name] = text
        self._write(name)

    def documents(self, texts: Mapping[str, str]) -> None:
        """Write a file for each name."""
        for name, text in texts.items():
            self.document(name, text)

    def retry(self) -> None:
        """Try again what waits."""
        for name in list(self._documents):
            self._write(name)

    def attempt(self, name: str, write: Callable[[], object]) -> bool:
        """Call `write`, which makes the file `name`, and keep the reason where the system refuses it."""
        try:
            write()
        except OSError as refused:
            self.refused[name] = refused.strerror or str(refused)
            return False
        self.refused.pop(name, None)
        return True

    def untold(self) -> dict[str, list[str]]:
        """Return the reasons not told within the last hour, each with the names of its files."""
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
    """Write a text file in one stroke: whoever reads it finds the old text or the new one.

    Raises:
        OSError: it cannot be written; the old one is as it was.
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
    """A file that grows; what the disk does not take waits in memory, and goes first the next time."""

    def __init__(self, path: Path, writes: Writes) -> None:
        self.path = path
        self._writes = writes
        self._waiting = bytearray()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def add(self, data: bytes) -> None:
        """Append `data`, after what waits."""
        self._waiting += data
        self._writes.attempt(self.path.name, self._flush)

    def close(self) -> None:
        """Try what waits for the last time; the rest is lost, and stays among `Writes.refused`."""
        if self._writes.attempt(self.path.name, self._flush):
            self._writes.attempt(self.path.name, lambda: os.close(self._file))
            return
        self._writes.refused[self.path.name] += f" ({len(self._waiting):,} bytes are lost)"
        os.close(self._file)

    def _flush(self) -> None:
        while self._waiting:
            del self._waiting[: os.write(self._file, self._waiting)]


CONFIG, METRICS = "config.json", "metrics.jsonl"
SHARED = ".shared"  # there for a moment: by it the processes of a run see whether they see one folder
TAIL_BYTES = 1 << 16  # of metrics.jsonl, in which its last whole line stands
ALONE = Alone()


class RunFolder:
    """A run's folder, which only this process writes from `look` or `make` until `close`.

    Of several processes the first alone locks and writes it, and all call the same methods in the same order.

    Args:
        resume: go on with the run that the folder holds, or begin one where it holds none.
        discard_steps: with `resume`, go on even where steps are lost that no checkpoint was to hold.
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
        """Lock a folder that is there, and refuse what cannot be done with it. Makes no folder.

        Raises:
            InputError: another process writes it, it holds a run that is not to be resumed, the run is not
                that of `config`, or resuming would discard steps.
        """
        self._peers.from_first("folder/look", lambda: self._look(config))

    def make(self) -> None:
        """Make the folder, lock it, and try whether files can be written there.

        Raises:
            InputError: they cannot, another process writes it, or another host sees another folder.
        """
        self._peers.from_first("folder/make", self._make)
        check_shared(self.path, self._peers)

    def close(self) -> None:
        """Let other processes write the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _look(self, config: RunConfig) -> None:
        if self.path.is_dir():  # else `make` makes it, or says why it cannot
            self._take_lock(config)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None:  # it was not there a moment ago
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
        """Refuse to lose steps that a crash alone would not lose: of a run that saves nothing, or whose
        checkpoints have gone. Two intervals may pass until the first checkpoint is on the disk."""
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

    It stands in config.json. Where that is missing, unreadable, or not of the run that saved the checkpoints
    (as where config.json was overwritten by hand), it is that of the newest checkpoint.

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
    """Return the step of the last whole line of metrics.jsonl; 0 where there is none."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0  # not there, or a device
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            continue  # cut short, as a process that is killed leaves it
    return 0


def check_shared(folder: Path, peers: Alone) -> None:
    """Check that each process sees the folder of the first.

    Raises:
        InputError: one does not.
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
    """`checkpoint.every_steps` of the run in the folder; that of `config` where config.json is unreadable."""
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
