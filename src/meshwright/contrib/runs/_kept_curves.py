"""Keep the curves of a large file of metrics in the cache, so that the next command need not read it again.

What is kept is of the beginning of a file that grows: it holds while the file has the same inode, is not
shorter, and its first and last bytes so far are the same. Otherwise, and where the kept file is damaged, the
metrics are read again. A cache that cannot be written keeps nothing.

Imports: `_buckets`, `compiler` (the cache), `files`. Used by: `_metrics`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from meshwright.compiler import cache_root, write_cached
from meshwright.errors import MeshwrightError
from meshwright.files import read_bytes

from ._buckets import Buckets

KEPT_SCHEMA = 1
LEAST_BYTES = 4 << 20  # of metrics that are worth it: they take 40 ms to read
END_BYTES = 4096  # of the beginning and of the end that are compared
MOST_KEPT_BYTES = 64 << 20  # of one kept file
MOST_KEPT = 1000  # files; the least recently written go


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCurves:
    """Curves of a file up to `offset`, where a line begins; the other fields are those of `Metrics`."""

    offset: int
    broken: int
    newest: dict[str, float]
    tracks: dict[str, Buckets]


def curves_of(metrics: Path, file: IO[bytes]) -> KeptCurves | None:
    """Return the curves that were kept of an open file of metrics; None if there are none of this file."""
    if os.fstat(file.fileno()).st_size < LEAST_BYTES:
        return None
    try:
        digest, _, content = read_bytes(_place(metrics), MOST_KEPT_BYTES).partition(b"\n")
    except (OSError, MeshwrightError):
        return None
    if hashlib.sha256(content).hexdigest().encode() != digest:
        return None
    head, _, numbers = content.partition(b"\n")
    fields: dict[str, Any] = json.loads(head)
    if fields["schema"] != KEPT_SCHEMA or not _is_of(file, fields):
        return None
    tracks: dict[str, Buckets] = {}
    for kind, about in fields["tracks"].items():
        tracks[kind], numbers = Buckets.from_bytes(about, numbers)
    return KeptCurves(
        offset=fields["offset"], broken=fields["broken"], newest=fields["newest"], tracks=tracks
    )


def keep_curves(metrics: Path, file: IO[bytes], kept: KeptCurves) -> None:
    """Keep the curves of an open file of metrics, as far as the cache can be written."""
    status = os.fstat(file.fileno())
    made = {kind: track.to_bytes() for kind, track in kept.tracks.items()}
    fields = {
        "schema": KEPT_SCHEMA,
        "inode": status.st_ino,
        "size": status.st_size,
        "changed": status.st_mtime_ns,
        "ends": _ends(file, kept.offset),
        "offset": kept.offset,
        "broken": kept.broken,
        "newest": kept.newest,
        "tracks": {kind: about for kind, (about, _) in made.items()},
    }
    content = json.dumps(fields).encode() + b"\n" + b"".join(numbers for _, numbers in made.values())
    with contextlib.suppress(OSError, MeshwrightError):
        path = _place(metrics)
        write_cached(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        others = [(each.stat().st_mtime, each) for each in path.parent.iterdir()]
        for _, each in sorted(others)[:-MOST_KEPT]:
            each.unlink(missing_ok=True)


def _place(metrics: Path) -> Path:
    """Return the file of the cache that holds the curves of a file of metrics."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(metrics))).hexdigest()
    return cache_root() / "curves" / digest[:32]


def _is_of(file: IO[bytes], fields: Mapping[str, Any]) -> bool:
    """Return whether what was kept is of the beginning of this file, or of all of it."""
    status = os.fstat(file.fileno())
    if status.st_ino != fields["inode"] or status.st_size < fields["size"]:
        return False
    if status.st_size == fields["size"] and status.st_mtime_ns != fields["changed"]:
        return False
    return _ends(file, fields["offset"]) == fields["ends"]


def _ends(file: IO[bytes], offset: int) -> str:
    """Return a digest of the first bytes of a file, and of the last ones before a place."""
    digest = hashlib.sha256()
    for place in (0, max(0, offset - END_BYTES)):
        file.seek(place)
        digest.update(file.read(min(END_BYTES, offset)))
    return digest.hexdigest()
