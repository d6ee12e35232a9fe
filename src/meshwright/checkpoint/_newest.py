"""Which checkpoint to go on from. Reads only: another process may be writing the folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, MeshwrightError
from ._folder import steps_in
from ._manifest import Damaged, examined, verified
from ._records import Found, Rejected

Complaint = Callable[[Mapping[str, Any]], str]
"""Says in words what is wrong with what a checkpoint carries beside the state; nothing where all is well."""


def newest_checkpoint(folder: Path, complaint: Complaint = lambda about: "") -> Found | None:
    """The newest checkpoint whose every file is what was written; None where there is none at all.

    Args:
        complaint: of the reader of `about`; a checkpoint of which it says anything is damaged.

    Raises:
        MeshwrightError: there are checkpoints, and all are damaged.
    """
    rejected: list[Rejected] = []
    for step in reversed(steps_in(folder) if folder.is_dir() else []):
        found = _examined(folder, step, tuple(rejected))
        if isinstance(found, Found) and (why := complaint(found.about)):
            found = Rejected(step=step, folder=found.folder, why=why)
        if isinstance(found, Found):
            return found
        rejected.append(found)
    if rejected:
        which = "; ".join(f"step {each.step}: {each.why}" for each in rejected)
        raise MeshwrightError(
            f"none of the {len(rejected)} checkpoints in {folder} is whole. {which}",
            hint=f"bring back a copy of one of them; or remove {folder} and begin again at step 0 with "
            "--resume --discard-steps",
        )
    return None


def unread_newest(folder: Path, complaint: Complaint = lambda about: "") -> Found | None:
    """Return the newest checkpoint whose manifest is whole; None where there is none.

    Its arrays are not read: they may be damaged all the same, and `newest_checkpoint` then passes it over.

    Args:
        complaint: as `newest_checkpoint` takes it.
    """
    for step in reversed(steps_in(folder) if folder.is_dir() else []):
        path = folder / str(step)
        try:
            manifest = examined(path, step)
        except Damaged:
            continue
        if complaint(manifest.about):
            continue
        return Found(step=step, folder=path, about=manifest.about, rejected=(), manifest=manifest)
    return None


def found_at(folder: Path, step: int) -> Found:
    """A checkpoint that another process of the run has just examined.

    Raises:
        MeshwrightError: it is not here, or not whole: the processes do not see one folder.
    """
    path = folder / str(step)
    try:
        manifest = examined(path, step)
    except Damaged as damaged:
        raise MeshwrightError(
            f"the first process goes on from {path}, which is not whole for process {os.getpid()} on "
            f"{socket.gethostname()}: {damaged}",
            hint="put the run's folder where every host sees it",
        ) from damaged
    return Found(step=step, folder=path, about=manifest.about, rejected=(), manifest=manifest)


def checkpoint_of(run: Path, step: int | None = None) -> Found:
    """The checkpoint of a run's folder at `step`, or the newest good one.

    Raises:
        InputError: there is no run, or no such checkpoint.
        MeshwrightError: the one asked for is damaged, or all are.
    """
    folder = run / "checkpoints"
    steps = steps_in(folder) if folder.is_dir() else []
    if not steps:
        raise InputError(
            f"{run} has no checkpoints",
            hint="name the folder of a run that was trained with checkpoint.every_steps set",
        )
    if step is None:
        found = newest_checkpoint(folder)
        assert found is not None, f"checkpoints {steps} went away while they were read"
        return found
    if step not in steps:
        nearest = min(steps, key=lambda there: abs(there - step))
        raise InputError(f"{run} has no checkpoint of step {step}", hint=f"the nearest is of step {nearest}")
    found = _examined(folder, step, ())
    if isinstance(found, Rejected):
        raise MeshwrightError(
            f"the checkpoint of step {step} is damaged: {found.why}",
            hint="leave --step out to take the newest that is whole",
        )
    return found


def _examined(folder: Path, step: int, rejected: tuple[Rejected, ...]) -> Found | Rejected:
    path = folder / str(step)
    try:
        manifest = verified(path, step)
    except Damaged as damaged:
        return Rejected(step=step, folder=path, why=str(damaged))
    return Found(step=step, folder=path, about=manifest.about, rejected=rejected, manifest=manifest)
