"""Recognise a file by its content, and let the reader of its kind explain it."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import BinaryIO

from meshwright.errors import InputError
from meshwright.files import open_file, read_bytes, reason
from meshwright.hardware import Fleet

from . import _dump_folder
from ._device_profile import device_profile
from ._dump_folder import dump_folder
from ._explanation import Explanation
from ._log_window import window_in
from ._torch_errors import torch_error
from ._torch_snapshot import MOST_FILE_BYTES, torch_snapshot
from ._xla_errors import xla_error

MOST_LOG_BYTES = 2**34
MOST_UNPACKED, MOST_TIMES = 2**29, 200  # bytes of a file of gzip, and how many times as many as it has
KNOWN = (
    "give a log with the error of XLA or PyTorch in it, a folder of --xla_dump_to, a snapshot of "
    "torch.cuda.memory._dump_snapshot, or a profile of jax.profiler.save_device_memory_profile"
)
_GZIP, _ZIP, _PICKLE = b"\x1f\x8b", b"PK\x03\x04", b"\x80"
_DUMPED = (b"BufferAssignment:", b"HloModule ", b"HloLiveRange", b"Memory Space:", b"Total bytes used:")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def explain_file(path: Path | str, *, on: str | None = None) -> Explanation:
    """Return what a file says of memory that was too small: which buffers, of which line, and what would fit.

    Nothing of the file is executed, and a pickle is not unpickled.

    Args:
        path: a log with an out-of-memory error of XLA or PyTorch; a memory snapshot of PyTorch; a folder of
            `--xla_dump_to`; a memory profile of JAX.
        on: the fleet whose memory a dump or a profile is compared with: "8xH100".

    Raises:
        InputError: the file cannot be read, or is none of these.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".log") as log:
    ...     _ = log.write("Ran out of memory in memory space hbm. Used 20.50G of 15.50G hbm.")
    ...     log.flush()
    ...     explain_file(log.name).missing_bytes == 5 * 2**30
    True
    """
    fleet = None if on is None else Fleet.parse(on)
    path = Path(path)
    try:
        if path.is_dir():
            return dump_folder(path, fleet)
        with open_file(path) as file:
            return _explained(path, file, os.fstat(file.fileno()).st_size, fleet)
    except (OSError, ValueError) as refused:
        if isinstance(refused, InputError):
            raise
        raise InputError(f"{path} cannot be read: {reason(refused)}", hint=KNOWN) from None


def _explained(path: Path, file: BinaryIO, size: int, fleet: Fleet | None) -> Explanation:
    head = file.read(4096)
    file.seek(0)
    if head.startswith(_GZIP):
        content = _unpacked(path, file, size)
        if _is_protobuf(content):
            return device_profile(path, content, fleet)
        _refuse_fleet(path, fleet)
        return _from_log(path, io.BytesIO(content), len(content))
    if head.startswith(_PICKLE):
        _refuse_fleet(path, fleet)
        return torch_snapshot(path, read_bytes(path, MOST_FILE_BYTES))
    if head.startswith(_ZIP):
        raise InputError(f"{path} is a zip file, as torch.save writes checkpoints", hint=KNOWN)
    if head.startswith(_UTF16):
        hint = f"write it as UTF-8: iconv -f UTF-16 -t UTF-8 {path.name} > log.txt"
        raise InputError(f"{path} is a text in UTF-16", hint=hint)
    if _is_protobuf(head):
        return device_profile(path, read_bytes(path, MOST_UNPACKED), fleet)
    if head.lstrip().startswith(_DUMPED):
        return dump_folder(path.parent, fleet, _stem(path))
    _refuse_fleet(path, fleet)
    return _from_log(path, file, size)


def _refuse_fleet(path: Path, fleet: Fleet | None) -> None:
    if fleet is not None:
        what = f"{path} says itself what its device had, so that it is not compared with {fleet.name}"
        raise InputError(what, hint="leave out --on: it is for dumps of XLA and profiles of JAX")


def _is_protobuf(head: bytes) -> bool:
    """Return whether a content begins as a profile does: with small numbers, which no text has."""
    return head[:1] == b"\x0a" and any(byte < 9 for byte in head[:16])


def _stem(path: Path) -> str:
    before, found, _ = path.name.rpartition(_dump_folder.STEM)
    if not found:
        what = (
            f"{path} is a part of a dump of XLA under another name, and the program's other parts are "
            "not known"
        )
        raise InputError(what, hint="name the folder of --xla_dump_to")
    return before


def _unpacked(path: Path, file: BinaryIO, size: int) -> bytes:
    most = min(MOST_UNPACKED, max(MOST_TIMES * size, 2**26))
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            content = packed.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as broken:
        raise InputError(f"{path} is no whole gzip file: {broken}", hint=KNOWN) from None
    if len(content) > most:
        what = f"{path} has more than {most:,} bytes when it is unpacked"
        raise InputError(what, hint="unpack it, and name the part of it that has the error")
    return content


def _from_log(path: Path, log: BinaryIO, size: int) -> Explanation:
    if size > MOST_LOG_BYTES:
        what = f"{path} has {size:,} bytes, and {MOST_LOG_BYTES:,} are searched"
        raise InputError(what, hint=f"name a part of it: tail -c 1G {path.name} > end.log")
    window = window_in(log)
    if window is None:
        raise InputError(f"{path} has no out-of-memory error of XLA or PyTorch", hint=KNOWN)
    for reader in (torch_error, xla_error):
        if (made := reader(str(path), window)) is not None:
            return made
    line = window.text[window.text.rfind("\n", 0, window.at) + 1 :].partition("\n")[0].strip()
    what = f"{path}, line {window.line:,}, says that memory ran out, and no figure of it: {line[:300]}"
    if any(words in line for words in ("Killed process", "oom-kill", "OOMKilled", "DefaultCPUAllocator")):
        hint = "it is the host's memory, not the device's: fewer data workers, smaller caches, a larger host"
        raise InputError(what, hint=hint)
    raise InputError(what, hint=KNOWN)
