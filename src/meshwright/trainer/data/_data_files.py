"""Read token ids and the ends of documents from files, on demand.

A file is read with `pread`, so that one cut short raises an error. A memory map is not used: if the file is
truncated meanwhile, it ends the process with SIGBUS. `_token_formats` opens these for each format.
"""

from __future__ import annotations

import copy
import errno
import os
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError, MeshwrightError


class TokenFile:
    """The integers of a file, or of a range of it, read on demand.

    The object keeps reading the file that it opened, even if another file is renamed to its path.

    Args:
        path: the file.
        dtype: the type of its tokens, with byte order.
        first_byte: the place of the first token, behind any header.
        count: the number of tokens; by default all that follow.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], first_byte: int = 0, count: int | None = None):
        self.path, self.dtype, self._first_byte = path, dtype, first_byte
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as refused:
            hint = "name a file that you may read"
            if refused.errno == errno.EMFILE:
                hint = "let the process open more, as ulimit -n 65536 does, or join the files"
            raise InputError(f"cannot read {path}: {refused.strerror}", hint=hint) from refused
        weakref.finalize(self, os.close, self._descriptor)
        self._whole: TokenFile = self
        self._num_bytes = os.fstat(self._descriptor).st_size
        rest = (self._num_bytes - first_byte) // dtype.itemsize
        self._start, self._stop = 0, rest if count is None else min(count, rest)

    def part(self, start: int, stop: int) -> TokenFile:
        """Return the tokens from `start` up to `stop`, without reading them."""
        part = copy.copy(self)  # its `_whole` keeps the file open while the part exists
        part._start, part._stop = self._start + start, min(self._start + stop, self._stop)
        return part

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, place: slice) -> np.ndarray:
        """Read the tokens of a slice with step 1."""
        start, stop, step = place.indices(len(self))
        assert step == 1, "tokens are read in a row"
        return np.frombuffer(self.bytes_of(start, max(stop - start, 0)), self.dtype)

    def item(self, index: int) -> int:
        """Read one number; `index` is not negative."""
        return int(self[index : index + 1][0])

    def bytes_of(self, start: int, count: int) -> bytes:
        """Read the bytes of `count` tokens from `start`.

        Raises:
            InputError: the file has been cut short since it was opened.
            MeshwrightError: the disk fails to return the tokens.
        """
        size = self.dtype.itemsize
        offset, wanted = self._first_byte + (self._start + start) * size, count * size
        content = b""
        try:
            while len(content) < wanted:  # one call returns 2 GiB at most
                more = os.pread(self._descriptor, wanted - len(content), offset + len(content))
                if not more:
                    now = os.fstat(self._descriptor).st_size
                    raise InputError(
                        f"{self.path} was cut short while it was read: it has {now} bytes, and had "
                        f"{self._num_bytes} when it was opened",
                        hint="put the whole file back; then go on with --resume",
                    )
                content = content + more if content else more
        except OSError as refused:
            raise MeshwrightError(
                f"cannot read {self.path}: {refused.strerror}",
                hint="look at the disk that holds it; then go on with --resume",
            ) from refused
        return content


class TokenFiles:
    """The tokens of several files of one type, one after another."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        assert len({file.dtype for file in files}) == 1, "files of one type are read together"
        self._files, self.dtype = tuple(files), files[0].dtype
        self._ends = list(accumulate(len(file) for file in files))
        self.start, self._stop = 0, self._ends[-1]

    def part(self, start: int, stop: int) -> TokenFiles:
        """Return the tokens from `start` up to `stop`; its `start` is their place in the whole."""
        part = copy.copy(self)
        part.start, part._stop = self.start + start, min(self.start + stop, self._stop)
        return part

    def __len__(self) -> int:
        return self._stop - self.start

    def __getitem__(self, place: slice) -> np.ndarray:
        """Read the tokens of a slice with step 1."""
        start, stop, step = place.indices(len(self))
        assert step == 1, "tokens are read in a row"
        return np.frombuffer(self._bytes(start, max(stop - start, 0)), self.dtype)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read `length` tokens from each of `starts`; return [starts, length].

        Raises:
            InputError: a file has been cut short since it was opened.
            MeshwrightError: the disk fails to return the tokens.
        """
        rows = [self._bytes(start, length) for start in starts.tolist()]
        return np.frombuffer(b"".join(rows), self.dtype).reshape(len(rows), length)

    def _bytes(self, start: int, count: int) -> bytes:
        begin = self.start + start
        number, pieces = bisect_right(self._ends, begin), list[bytes]()
        while count:
            before = self._ends[number] - len(self._files[number])
            here = min(count, self._ends[number] - begin)
            pieces.append(self._files[number].bytes_of(begin - before, here))
            begin, count, number = begin + here, count - here, number + 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class DocumentEnds:
    """The places at which the documents of one file end, in ascending order, read on demand.

    Args:
        ends: the number of tokens up to the end of each document; or, with `documents`, the byte at which
            each sequence of the file begins.
        documents: the number of sequences up to the end of each document.
        itemsize: bytes of a token, by which the places of sequences are divided.
        num_tokens: of the file; its end ends the last document.
    """

    def __init__(
        self, ends: TokenFile, num_tokens: int, *, documents: TokenFile | None = None, itemsize: int = 1
    ) -> None:
        self._ends, self._documents, self._itemsize = ends, documents, itemsize
        self.num_tokens = num_tokens

    def __len__(self) -> int:
        return len(self._ends if self._documents is None else self._documents)

    def _end(self, index: int) -> int:
        if self._documents is not None:
            index = self._documents.item(index)
            if index == len(self._ends):  # behind the last sequence
                return self.num_tokens
        return self._ends.item(index) // self._itemsize

    def within(self, start: int, stop: int) -> list[int]:
        """Return the ends after token `start` and before `stop`, each once."""
        found = list[int]()
        index = bisect_right(range(len(self)), start, key=self._end)
        while index < len(self) and (end := self._end(index)) < stop:
            if found[-1:] != [end]:  # a document may be empty
                found.append(end)
            index += 1
        return found


class JoinedEnds:
    """The ends of the documents of several files; the end of a file is one too."""

    def __init__(self, files: Sequence[DocumentEnds]) -> None:
        self._files = tuple(files)
        self._stops = list(accumulate(file.num_tokens for file in files))

    def segments(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Number the document of each token within its window, from 0; return int32 [starts, length].

        Args:
            starts: the windows' first tokens, counted from the first file's beginning.
            length: of a window. Windows end within the last file.
        """
        segments = np.zeros((len(starts), length), np.int32)
        for row, start in zip(segments, starts.tolist(), strict=True):
            for end in self._within(start, start + length):
                row[end - start :] += 1
        return segments

    def _within(self, start: int, stop: int) -> list[int]:
        found = list[int]()
        number = bisect_right(self._stops, start)
        while number < len(self._files):
            file = self._files[number]
            before = self._stops[number] - file.num_tokens
            if before >= stop:
                break
            if before > start:
                found.append(before)
            found += [before + end for end in file.within(max(start - before, 0), stop - before)]
            number += 1
        return sorted(set(found))
