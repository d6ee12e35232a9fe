"""Define the records of checkpoints: saved, not saved, found and rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint on disk.

    `blocked_seconds`: how long `save` blocked the caller after the state was ready: the wait for an earlier
    save, and the copy off the devices. `write_seconds`: of writing, hashing and syncing in the background.
    `not_removed`: why an older checkpoint could not be deleted; empty if nothing went wrong.
    """

    step: int
    num_bytes: int
    blocked_seconds: float
    write_seconds: float
    not_removed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A checkpoint that could not be written; earlier checkpoints are unchanged."""

    step: int
    reason: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A damaged checkpoint; `why` names the file or entry that is wrong."""

    step: int
    folder: Path
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that was found in a folder.

    `newest_checkpoint` and `checkpoint_of` return it after reading every file and checking its hash;
    `unread_newest` and `found_at` do not read the arrays. `about`: the data that was passed to `save` with
    the state. `rejected`: newer checkpoints that are damaged.
    """

    step: int
    folder: Path
    about: Mapping[str, Any]
    rejected: tuple[Rejected, ...]
    manifest: Manifest
