"""Own a run's folder: lock it, check which run it holds and how it may continue, and write documents to it.

A checkpoint of another run is refused. For the same run, changed settings are listed. A write that the disk
refuses does not end the run. It is reported at most once an hour, and tried again later.

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

from meshwright.config import Layout, LoraConfig, RunConfig
from meshwright.errors import InputError
from meshwright.files import MOST_JSON_BYTES, open_file, parsed_json, read_bytes, reason
from meshwright.trainer.checkpoint import (
    Found,
    lock_folder,
    open_own,
    path_for_arrays,
    steps_in,
    unread_newest,
    write_probe,
)
from meshwright.trainer.data import data_identity, identity_difference
from meshwright.trainer.launch import SINGLE_PROCESS, SingleProcess

CONFIG, METRICS = "config.json", "metrics.jsonl"
SHARED = ".shared"  # exists briefly: with it the processes check that they see the same folder
TAIL_BYTES = 1 << 16  # at the end of metrics.jsonl; they contain its last complete line
REPORT_AGAIN_SECONDS = 3600.0  # a disk that is full at times is not reported at every step
# These define the state and the position in the data. If one differs, the checkpoint belongs to another run.
FIXED = ("model", "lora", "data", "optimizer.kind", "batch.sequences", "batch.sequence_length", "seed")
PLACES = ("data.path", "data.folder")  # data may be moved if a checkpoint says what they hold
# Not listed as changes: they do not affect what is trained.
UNLISTED = ("name", "layout", "steps", "evaluation", "checkpoint", "faults")
SHAPING = ("optimizer", "precision", "state")  # may change arrays of the state: momentum, loss scale, formats
IDENTITY = {"name": str, "num_bytes": int, "hashed": str, "sha256": str}  # as `data_identity` returns it


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


class PendingWrites:
    """The files of a run's folder that are not on disk yet, and the reasons.

    `refused`: by file name, the reason why the last write failed.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self.refused: dict[str, str] = {}
        self._folder, self._now = folder, now
        self._waiting: dict[str, str] = {}  # texts to write, by file name
        self._reported: dict[str, float] = {}  # when each file was last reported

    def documents(self, texts: Mapping[str, str]) -> None:
        """Write a text file for each name, now or when `retry` finds room."""
        self._waiting |= texts
        self.retry()

    def retry(self) -> None:
        """Try again to write the waiting documents."""
        for name, text in list(self._waiting.items()):
            if self.attempt(name, lambda name=name, text=text: write_whole(self._folder / name, text)):
                del self._waiting[name]

    def attempt(self, name: str, write: Callable[[], object]) -> bool:
        """Call `write`, which writes the file `name`; return whether the system accepts it."""
        try:
            write()
        except OSError as refused:
            self.refused[name] = refused.strerror or str(refused)
            return False
        self.refused.pop(name, None)
        return True

    def unreported(self) -> dict[str, list[str]]:
        """Return the reasons not reported within the last hour, each with the names of its files."""
        names_by_reason: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            if self._now() - self._reported.get(name, -REPORT_AGAIN_SECONDS) >= REPORT_AGAIN_SECONDS:
                self._reported[name] = self._now()
                names_by_reason.setdefault(why, []).append(name)
        return names_by_reason


class RunFolder:
    """A run's folder, which only this process writes from `look` or `make` until `close`.

    With several processes, only the first locks and writes it. All call the same methods in the same order.

    Args:
        resume: continue the run that the folder holds, or begin one if it holds none.
        discard_steps: with `resume`, continue even if this loses steps that no checkpoint was to hold.
        peers: the processes of the run.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: bool = False,
        discard_steps: bool = False,
        peers: SingleProcess = SINGLE_PROCESS,
    ) -> None:
        self.path, self.resume, self.peers = path, resume, peers
        self.writes = PendingWrites(path)
        self._discard_steps = discard_steps
        self._config: RunConfig | None = None  # the config given to `look`
        self._lock: IO[str] | None = None

    def validate_resume(self, config: RunConfig) -> None:
        """Lock the folder if it exists, and check that this run may use it; create no folder.

        Raises:
            InputError: its name cannot hold checkpoints, another process writes it, it holds a run that is
                not to be resumed, the run is not that of `config`, or resuming would discard steps.
        """
        self._config = config
        self.peers.broadcast("folder/validate", self._validate_resume)

    def create(self) -> None:
        """Create the folder, lock it, and check that files can be written there.

        Raises:
            InputError: files cannot be written, another process writes it, or another host sees another
                folder.
        """
        self.peers.broadcast("folder/create", self._create)
        check_shared(self.path, self.peers)

    def close(self) -> None:
        """Unlock the folder, so that other processes can write it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _validate_resume(self) -> None:
        path_for_arrays(self.path)
        if self.path.is_dir():
            self._take_lock()

    def _create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None:  # it did not exist when `look` was called
                self._take_lock()
            write_probe(self.path)
        except OSError as refused:
            self.close()
            raise _unwritable(self.path, refused) from refused

    def _take_lock(self) -> None:
        try:
            self._lock = lock_folder(self.path, f"{self.path} is")
        except OSError as refused:
            raise _unwritable(self.path, refused) from refused
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        checkpoints, metrics = self.path / "checkpoints", self.path / METRICS
        saved = steps_in(checkpoints) if checkpoints.is_dir() else []
        if not saved and not (metrics.exists() and metrics.stat().st_size > 0):
            return  # it holds no run
        if not self.resume:
            raise InputError(
                f"{self.path} already holds a run",
                hint="resume it with --resume, or choose a folder that does not exist yet",
            )
        newest = unread_newest(checkpoints, about_complaint)
        if newest is not None and self._config is not None:
            check_same_run(newest, self._config)
        if not self._discard_steps:
            self._check_discards(saved)

    def _check_discards(self, saved: list[int]) -> None:
        """Raise if resuming would lose steps that a crash alone would not lose.

        This is so if the run saves no checkpoints, or if its checkpoints are gone. Two checkpoint intervals
        may pass before the first checkpoint is on disk.
        """
        recorded, newest = last_recorded_step(self.path), saved[-1] if saved else 0
        every = self._checkpoint_interval()
        if recorded <= newest or (every is not None and (saved or recorded <= 2 * every)):
            return
        kept = f"its newest checkpoint is of step {newest}" if saved else "it has no checkpoint"
        lost = f"steps {newest + 1} to {recorded}"
        raise InputError(
            f"{self.path} holds a run of {recorded} steps, and {kept}: resuming would discard {lost}",
            hint=f"train {lost} again with --resume --discard-steps, or choose another folder with --folder"
            + ("" if saved or every is None else "; or restore its checkpoints"),
        )

    def _checkpoint_interval(self) -> int | None:
        """Return the run's `checkpoint.every_steps`; the requested config's if config.json is unreadable."""
        try:
            every = parsed_json((self.path / CONFIG).read_bytes())["checkpoint"]["every_steps"]
        except (OSError, ValueError, TypeError, KeyError):
            every = None if self._config is None else self._config.checkpoint.every_steps
        return every if isinstance(every, int) else None


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
        config = RunConfig.model_validate_json(read_bytes(path, MOST_JSON_BYTES))
        if newest is None or not _fixed_differences(newest.about, config):
            return config
    except OSError as refused:
        if saved is None:
            raise InputError(
                f"{run} is not a run: {path.name} cannot be read: {reason(refused)}",
                hint="name the folder that `meshwright train` wrote",
            ) from refused
    except ValidationError as wrong:
        if saved is None:
            raise _of_another_release(path, wrong) from wrong
    try:
        return RunConfig.model_validate_json(json.dumps(saved))
    except ValidationError as wrong:
        raise _of_another_release(run / "checkpoints", wrong) from wrong


def last_recorded_step(folder: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl; 0 if none exists."""
    try:
        with open_file(folder / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0  # missing, or a device
    for line in reversed(lines):
        try:
            return int(parsed_json(line)["step"])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue  # cut short by a process that was killed
    return 0


def check_shared(folder: Path, peers: SingleProcess) -> None:
    """Raise if a process does not see the first process's folder; the message names the process."""
    if peers.count == 1:
        return
    mark = folder / SHARED
    token = peers.broadcast("mark", lambda: _mark(mark))
    is_shared = mark.is_file() and mark.read_text() == token
    names = peers.gathered("seen", "" if is_shared else peers.name)
    if peers.is_first:
        mark.unlink()
    if absent := [name for name in names if name]:
        raise InputError(
            f"{folder} of the first process is not that of {', '.join(absent[:3])}"
            + (f" and {len(absent) - 3} more" if len(absent) > 3 else ""),
            hint="name a folder on a disk that all hosts share: --folder DIR",
        )


def _mark(mark: Path) -> str:
    """Write a random text to the file `mark`, and return it."""
    token = os.urandom(8).hex()
    try:
        with os.fdopen(open_own(mark, os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(token)
    except OSError as refused:
        raise _unwritable(mark.parent, refused) from refused
    return token


def _of_another_release(where: Path, wrong: ValidationError) -> InputError:
    first: Mapping[str, Any] = wrong.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return InputError(
        f"{where} is not a config of this release: {place}: {first['msg']}",
        hint="read the run with the release that wrote it",
    )


def _unwritable(folder: Path, refused: OSError) -> InputError:
    existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
    return InputError(
        f"cannot write a run to {folder}: {refused.strerror}",
        hint=f"choose a folder that can be written, below {existing} or elsewhere",
    )


def about_of(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """Return what a checkpoint records about its run, as `changes_since` reads it."""
    about = {"config": config.model_dump(mode="json"), "layout": str(layout)}
    return {**about, "data": data_identity(config)}


def about_complaint(about: Mapping[str, Any]) -> str:
    """Describe the first invalid entry of a checkpoint's `about`; return "" if all are valid.

    The entries are those of `about_of`, and `data_offset`, the number of batches that rollbacks left out.
    """
    data, offset = about.get("data"), about.get("data_offset")
    valid = {
        "config": isinstance(about.get("config"), dict),
        "layout": isinstance(about.get("layout"), str),
        "data_offset": isinstance(offset, int) and offset >= 0,
        "data": data is None
        or (isinstance(data, dict) and all(isinstance(data.get(n), kind) for n, kind in IDENTITY.items())),
    }
    wrong = [name for name, is_valid in valid.items() if not is_valid]
    return f"manifest.json is not as a run writes it: about.{wrong[0]}" if wrong else ""


def check_same_run(found: Found, config: RunConfig) -> None:
    """Raise if a checkpoint belongs to another run; the message names the first setting that differs."""
    for key, (was, now) in _fixed_differences(found.about, config).items():
        raise InputError(
            f"{key} is {now!r}, and the checkpoint of step {found.step} in {found.folder.parent} "
            f"is of a run with {was!r}",
            hint=f"leave out CONFIG and --set {key}: the run's own settings are in its folder; or choose "
            "another folder with --folder",
        )


def changes_since(found: Found, config: RunConfig, layout: Layout) -> list[str]:
    """Return the differences from the run that saved the checkpoint, each as in "layout: data=8 -> fsdp=8".

    Raises:
        InputError: the config belongs to another run, or the data files have changed.
    """
    check_same_run(found, config)
    _check_data(found, config)
    differ = _differences(found.about["config"], config).items()
    changes = [f"{key}: {was} -> {now}" for key, (was, now) in differ if not _within(key, UNLISTED)]
    if found.about["layout"] != str(layout):
        changes.append(f"layout: {found.about['layout']} -> {layout}")
    return changes


def may_change_state(about: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether a setting has changed on which the arrays of the state may depend."""
    return any(_within(key, SHAPING) for key in _differences(about.get("config", {}), config))


def _check_data(found: Found, config: RunConfig) -> None:
    """Raise if the data files are not those of the run: a position in them would mean something else."""
    was, now = found.about.get("data"), data_identity(config)
    if was is None or now is None:  # data from the seed, or a checkpoint of a release that kept no identity
        return
    if difference := identity_difference(was, now):
        raise InputError(
            f"{now['name']} is not what the checkpoint of step {found.step} in {found.folder.parent} was "
            f"trained on: {difference}",
            hint="restore it as it was, or begin a new run with it in another folder",
        )


def _fixed_differences(about: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings whose difference from those of a checkpoint makes it another run.

    A batch size that follows from the layout is compared once it is known, what data hold once it is read.
    """
    saved = about.get("config", {})
    later = ("batch.sequences",) if config.batch.sequences_per_replica is not None else ()
    later += PLACES if about.get("data") else ()
    differ = _differences(saved, config).items() if saved else ()
    return {key: values for key, values in differ if _within(key, FIXED) and key not in later}


def _differences(saved: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by "section.key": the saved value and that of `config`."""
    without = {"lora": LoraConfig().model_dump(mode="json")}  # a run of a release that had no adapters
    was, now = flat({**without, **saved}), flat(config.model_dump(mode="json"))
    pairs = {key: (was.get(key), now.get(key)) for key in sorted(was.keys() | now.keys())}
    return {key: values for key, values in pairs.items() if values[0] != values[1]}


def _within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested sections by "section.key"."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found
