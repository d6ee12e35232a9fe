"""Read the Python standard library's sources, and distinguish a run's data from other data.

The sources are read as bytes: real text that exists on almost every machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import (
    IdxData,
    InstructionData,
    MixtureData,
    RunConfig,
    StdlibData,
    TextData,
    TokenFileData,
)
from meshwright.errors import InputError
from meshwright.files import open_file, reason

from ._order import Split
from ._text_room import image_room, text_room

# Third-party packages, and tests: these are long and repetitive, and not installed everywhere.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@functools.cache
def stdlib_parts(held_out_fraction: float) -> dict[Split, np.ndarray]:
    """Return the standard library's sources without tests as uint8, in order of paths, split by whole files.

    Every n-th file is held out, n = round(1 / `held_out_fraction`). The text is that of the running
    interpreter, so it differs between Python releases.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = set(folders) - _LEFT_OUT  # not walked: they hold ten times as many files
        paths += (Path(parent, name).relative_to(folder).as_posix() for name in names if name.endswith(".py"))
    paths.sort()
    every = round(1 / held_out_fraction)
    if len(paths) < every:
        raise InputError(
            f"{folder} has {len(paths)} Python sources, and data.held_out_fraction = {held_out_fraction} "
            f"needs at least {every}",
            hint='use a Python with its sources on disk, or data.source = "tokens" with a file of your own',
        )
    files = [(folder / path).read_bytes() for path in paths]
    held_out = files[every - 1 :: every]
    del files[every - 1 :: every]
    whole: dict[Split, list[bytes]] = {"train": files, "held-out": held_out}
    # Arrays of bytes are read-only, as cached arrays must be.
    return {split: np.frombuffer(b"".join(texts), np.uint8) for split, texts in whole.items()}


FILES = (TextData, TokenFileData, InstructionData, MixtureData)
"""Data that are read from files of texts or tokens."""
BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64  # identifies a file of any size in about 0.1 s
_LEAST_BLOCKS = 2  # of each file, if there are many: the first and the last


def data_identity(config: RunConfig) -> dict[str, Any] | None:
    """Return a fingerprint of a run's data as JSON: `name`, `num_bytes`, `hashed` and `sha256`.

    Data of at most 64 MiB is hashed whole. From a longer file, 64 blocks of 1 MiB are hashed, spread evenly
    from the first byte to the last; several files share these blocks, but each has two. This detects a file
    that was replaced, cut or made again, but not a change between the blocks. `hashed` says which of the two
    was done. A mixture is identified by its own file too, and so by its weights. Python's sources are hashed
    whole. The result is None if the data comes from the seed.

    Raises:
        InputError: a file cannot be read.
    """
    data = config.data
    if isinstance(data, FILES):
        return files_identity(data.path, text_room().files_of(data))
    if isinstance(data, IdxData):
        return files_identity(data.folder, image_room().files_of(data))
    if isinstance(data, StdlibData):
        parts = stdlib_parts(data.held_out_fraction).values()
        digest = hashlib.sha256(b"".join(hashlib.sha256(part.data).digest() for part in parts))
        return {
            "name": "Python's standard library",
            "num_bytes": sum(part.nbytes for part in parts),
            "hashed": "whole",
            "sha256": digest.hexdigest(),
        }
    return None


def files_identity(name: str, paths: Sequence[Path]) -> dict[str, Any]:
    """Return a fingerprint of files, as `data_identity` does.

    Raises:
        InputError: a file cannot be read.
    """
    digest, total, is_whole = hashlib.sha256(), 0, True
    most = max(NUM_BLOCKS // max(len(paths), 1), _LEAST_BLOCKS)
    try:
        sizes = [path.stat().st_size for path in paths]
        if sum(sizes) <= BLOCK_BYTES * NUM_BLOCKS:
            most = NUM_BLOCKS
        for path in paths:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                total += size
                starts = range(0, size, BLOCK_BYTES)
                if len(starts) > most:
                    is_whole, last = False, size - BLOCK_BYTES
                    starts = [last * number // (most - 1) for number in range(most)]
                for start in starts:
                    digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    except OSError as refused:
        raise InputError(
            f"cannot read {refused.filename}: {reason(refused)}",
            hint="name a file that is there and may be read",
        ) from refused
    hashed = "whole" if is_whole else f"{most} blocks of {BLOCK_BYTES} bytes"
    return {"name": name, "num_bytes": total, "hashed": hashed, "sha256": digest.hexdigest()}


def identity_difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe how one identity of data differs from another; empty if it does not."""
    if was["num_bytes"] != now["num_bytes"]:
        return f"it has {now['num_bytes']} bytes, and had {was['num_bytes']}"
    # Hashes of different extents cannot be compared.
    same = was["hashed"] != now["hashed"] or was["sha256"] == now["sha256"]
    return "" if same else f"its {now['num_bytes']} bytes are as many as before, and not the same"
