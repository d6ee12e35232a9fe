"""What is told of checkpoints: saved, not saved, found, rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is on the disk, whole.

    `blocked_seconds`: how long `save` kept the caller, from the moment the state was ready: the wait for an
    earlier save, and the copy off the devices. `write_seconds`: of the writing, hashing and syncing, in the
    background. `not_removed`: why an older checkpoint could not be deleted; empty where nothing went wrong.
    """

    step: int
    num_bytes: int
    blocked_seconds: float
    write_seconds: float
    not_removed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint that could not be written; the ones before it are as they were."""

    step: int
    reason: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A checkpoint that is not what was written, and which file says so."""

    step: int
    folder: Path
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint of which every file was read and has the right hash.

    `about` is what `save` was given beside the state. `rejected` are newer ones that are damaged.
    """

    step: int
    folder: Path
    about: Mapping[str, Any]
    rejected: tuple[Rejected, ...]
    manifest: Manifest
