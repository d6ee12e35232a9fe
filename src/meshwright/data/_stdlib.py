"""The sources of the Python standard library as bytes: real text that is on every machine."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np

from meshwright.errors import InputError

from ._split import Split

# Packages of others, and tests, which are long, repeat themselves and are not installed everywhere.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@functools.cache
def stdlib_parts(held_out_fraction: float) -> dict[Split, np.ndarray]:
    """All sources but tests, in the order of their paths, as uint8; every n-th whole file is held out.

    The text is that of the running interpreter, so it differs between Python releases.

    Raises:
        InputError: this interpreter has too few sources on disk to hold one file out.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    paths = sorted(path.as_posix() for path in relative if _LEFT_OUT.isdisjoint(path.parts))
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
    return {"train": _joined(files), "held-out": _joined(held_out)}


def _joined(files: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(files), np.uint8)  # read-only, as a cached array must be
