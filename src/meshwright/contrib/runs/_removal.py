"""Remove a run, a weighing or a plan: what a run wrote and no other file, and nothing behind a link.

A run's folder may be one that holds other things, such as a project. So only files are removed that a run
writes, by their names; the folder itself goes if nothing else is in it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.files import reason
from meshwright.kept_records import RUN_FILE, RUNS, record_path
from meshwright.trainer.checkpoint import lock_folder

from ._kept_figures import LETTERS, KeptFigures
from ._run_record import LOCK, LOG, MEASUREMENT, NOTICES, PHASES, TAGS, RunRecord

WRITTEN = {
    "config.json", "metrics.jsonl", "reconciliation.json", "report.html", "weighing.json", LOG, MEASUREMENT,
    NOTICES, PHASES, TAGS, f".{TAGS}.lock", f"{RUN_FILE}.damaged", ".shared", ".probe",
}  # fmt: skip
PATTERNS = re.compile(r"events\.out\.tfevents\.\d+\.[^/]*|\.[\w.]+\.new")
LAST = (RUN_FILE, LOCK)  # removed at the end: a removal that was killed can be repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """List what is to be removed of a run: paths in its folder, their bytes, and what stays."""

    record: RunRecord | KeptFigures
    paths: tuple[Path, ...] = ()
    num_files: int = 0
    num_bytes: int = 0
    kept: tuple[str, ...] = ()


def removal_of(record: RunRecord | KeptFigures) -> Removal:
    """Return what a removal would remove, and remove nothing.

    Raises:
        InputError: the run is under way, its folder is a link, or it cannot be read.
    """
    if isinstance(record, KeptFigures) or record.state == "gone":
        return Removal(record=record)
    if record.state == "running":
        hint = "stop it first: Ctrl-C, or SIGTERM to its process"
        raise InputError(f"{record.folder} is under way: {record.words}", hint=hint)
    if record.folder.is_symlink():
        hint = f"name the folder itself: --in {os.path.realpath(record.folder)}"
        raise InputError(f"{record.folder} is a link, and links are not followed", hint=hint)
    try:
        names = sorted(os.listdir(record.folder))
        ours = [name for name in names if _is_ours(record.folder, name)]
        sizes = [size for name in ours for size in _sizes(record.folder / name)]
    except OSError as refused:
        hint = "give yourself permission to read it"
        raise InputError(f"{record.folder} cannot be read: {reason(refused)}", hint=hint) from refused
    return Removal(
        record=record,
        paths=tuple(record.folder / name for name in ours),
        num_files=len(sizes),
        num_bytes=sum(sizes),
        kept=tuple(name for name in names if name not in ours),
    )


def _is_ours(folder: Path, name: str) -> bool:
    """Return whether a run wrote a file or folder of this name; of folders, that of its checkpoints."""
    if name == "checkpoints":
        return True
    is_named = name in WRITTEN or name in LAST or PATTERNS.fullmatch(name) is not None
    return is_named and not ((folder / name).is_dir() and not (folder / name).is_symlink())


def _sizes(path: Path) -> Iterator[int]:
    """Yield the bytes of each file below a path, without following links."""
    status = path.lstat()
    if not path.is_dir() or path.is_symlink():
        yield status.st_size
        return
    for root, _, names in os.walk(path):  # which follows no links
        for name in names:
            yield os.lstat(os.path.join(root, name)).st_size


def remove(removal: Removal) -> None:
    """Remove what a removal names, and the record of the store.

    Raises:
        InputError: a process writes the folder, or the system refuses.
    """
    record = removal.record
    try:
        if removal.paths:
            _remove_files(removal, record.folder if isinstance(record, RunRecord) else Path())
        if isinstance(record, RunRecord):
            _forget(RUNS, record.id)
        else:
            kind = next(kind for kind, letter in LETTERS.items() if letter == record.id[0])
            _forget(kind, record.id)
            _forget("tags", record.id)
    except OSError as refused:
        what = refused.filename or record.id
        hint = "give permission there, then repeat it: what is left is still listed"
        raise InputError(f"{what} cannot be removed: {reason(refused)}", hint=hint) from refused


def _forget(kind: str, number: str) -> None:
    if number and "-" not in number:  # an id with a number is a copy, whose original keeps the record
        record_path(kind, number).unlink(missing_ok=True)


def _remove_files(removal: Removal, folder: Path) -> None:
    """Remove the files under the folder's lock: a run that is resumed meanwhile is refused."""
    lock = lock_folder(folder, f"{folder} is")
    try:
        for path in sorted(removal.paths, key=lambda path: path.name in LAST):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
        if not removal.kept:
            folder.rmdir()
    finally:
        lock.close()
