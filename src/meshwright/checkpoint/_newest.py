"""Which checkpoint to go on from. Reads only: another process may be writing the folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ..errors import InputError, MeshwrightError
from ._folder import steps_in
from ._manifest import MANIFEST, Damaged, manifest_of, verified
from ._records import Found, Rejected


def newest_checkpoint(folder: Path) -> Found | None:
    """The newest checkpoint whose every file is what was written; None where there is none at all.

    Raises:
        MeshwrightError: there are checkpoints, and all are damaged.
    """
    rejected: list[Rejected] = []
    for step in reversed(steps_in(folder) if folder.is_dir() else []):
        found = _examined(folder, step, tuple(rejected))
        if isinstance(found, Found):
            return found
        rejected.append(found)
    if rejected:
        which = "; ".join(f"step {each.step}: {each.why}" for each in rejected)
        raise MeshwrightError(
            f"none of the {len(rejected)} checkpoints in {folder} is whole. {which}",
            hint=f"bring back a copy of one of them, or remove {folder} to begin anew",
        )
    return None


def found_at(folder: Path, step: int) -> Found:
    """A checkpoint that another process of the run has just examined.

    Raises:
        MeshwrightError: it is not here: the processes do not see one folder.
    """
    path = folder / str(step)
    try:
        manifest = manifest_of((path / MANIFEST).read_bytes())
    except OSError as refused:
        raise MeshwrightError(
            f"the first process goes on from {path}, which is not there for process {os.getpid()} on "
            f"{socket.gethostname()}: {refused.strerror}",
            hint="put the run's folder where every host sees it",
        ) from refused
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
