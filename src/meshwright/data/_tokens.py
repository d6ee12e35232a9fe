"""Read token files and Python's own sources, and cut them into windows; draw random tokens.

`open_data` makes `TokenWindows` for text and token files, read in one of two orders, and `RandomTokens` for
synthetic data. A token file's metadata is in a JSON file next to it; `open_data` checks the configuration
against it. A token file is read with `pread`, so that one cut short raises an error. A memory map is not
used: if the file is truncated meanwhile, it ends the process with SIGBUS. The sources of the Python standard
library are read as bytes: real text that exists on almost every machine. `data_identity` distinguishes a
run's data from other data.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import sysconfig
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import TypeAdapter, ValidationError

from meshwright.config import IdxData, InstructionData, Order, RunConfig, StdlibData, TokenFileData
from meshwright.errors import InputError, MeshwrightError

from ._images import idx_files
from ._order import ALL, Rows, Split, generator, windows_at
from ._texts import ByteTokenizer

_TOKENS_COUNTED_AT_ONCE = 1 << 24  # bounds the memory of the count at 0.3 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTokens:
    """Tokens drawn uniformly from the vocabulary, for weighing and timing; they hold nothing to learn."""

    seed: int
    sequences: int
    sequence_length: int
    vocab_size: int

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return `tokens` int32 [rows, sequence_length + 1]."""
        shape = (self.sequences, self.sequence_length + 1)
        random = generator(self.seed, step, split)
        return {"tokens": random.integers(self.vocab_size, size=shape, dtype=np.int32)[rows]}

    def unigram_entropy_nats(self, split: Split) -> float:
        """Return ln(vocabulary), a loss that no model can beat."""
        return math.log(self.vocab_size)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the ids as text, since they have no meaning."""
        return _ids_as_text(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWindows:
    """Windows of a long array of tokens.

    `name`: the source, for errors. `parts`: one 1-D array of integers per split, in memory or in a file.
    `is_bytes`: true if the tokens are the bytes of UTF-8 text. `order`: windows of `random` start anywhere
    and may overlap. In `epochs`, window i begins at token i x `sequence_length`, so that every token but the
    first of the split is predicted once per epoch; a rest shorter than a window is never predicted. Epochs
    follow each other without a gap, also within a batch. `end_of_document`: the id that ends a document; if
    given, a batch also holds the document number of each token.

    Raises:
        InputError: a split is shorter than one window, or `end_of_document` is outside the vocabulary.
    """

    name: str
    parts: Mapping[Split, np.ndarray | TokenFile]
    is_bytes: bool
    seed: int
    sequences: int
    sequence_length: int
    vocab_size: int
    order: Order = "random"
    end_of_document: int | None = None

    def __post_init__(self) -> None:
        for split, part in self.parts.items():
            if len(part) <= self.sequence_length:
                raise InputError(
                    f"{self.name}: the {split} part has {len(part)} tokens, and a window needs "
                    f"{self.sequence_length + 1} (sequence_length + 1)",
                    hint=self._enough_tokens(),
                )
        if self.end_of_document is not None and self.end_of_document >= self.vocab_size:
            raise InputError(
                f"data.end_of_document = {self.end_of_document} is outside model.vocab_size = "
                f"{self.vocab_size}",
                hint=f"use at least model.vocab_size = {self.end_of_document + 1}",
            )

    def num_windows(self, split: Split) -> int:
        """Return the number of windows in one epoch of a split."""
        return (len(self.parts[split]) - 1) // self.sequence_length

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return `tokens` int32 [rows, sequence_length + 1], and perhaps `segments` of that type and shape.

        `segments` exist if `end_of_document` is given. Reads only the windows of these rows.

        Raises:
            InputError: a token is outside the model's vocabulary, or a file has been cut short.
            MeshwrightError: the disk fails to return a file's tokens.
        """
        part, window = self.parts[split], self.sequence_length + 1
        starts = self._starts(step, split)[rows]
        if isinstance(part, TokenFile):
            tokens = part.windows(starts, window)
        else:
            tokens = sliding_window_view(part, window)[starts]
        self._check_vocabulary(tokens)
        batch = {"tokens": tokens.astype(np.int32)}
        if self.end_of_document is not None:
            batch["segments"] = segments_of(batch["tokens"], self.end_of_document)
        return batch

    def _starts(self, step: int, split: Split) -> np.ndarray:
        """Return the first token of each window of a step."""
        if self.order == "random":
            places = len(self.parts[split]) - self.sequence_length
            return generator(self.seed, step, split).integers(places, size=self.sequences)
        first, size = step * self.sequences, self.num_windows(split)
        windows = windows_at(first, self.sequences, size=size, seed=self.seed, split=split)
        return windows * self.sequence_length

    def unigram_entropy_nats(self, split: Split) -> float:
        """Return the entropy of single tokens in nats per token: the loss of predicting by frequency alone.

        Reads the whole split.

        Raises:
            InputError: a token is outside the model's vocabulary.
        """
        part, counts = self.parts[split], np.zeros(self.vocab_size, np.int64)
        for start in range(0, len(part), _TOKENS_COUNTED_AT_ONCE):
            tokens = part[start : start + _TOKENS_COUNTED_AT_ONCE]
            self._check_vocabulary(tokens)
            counts += np.bincount(tokens, minlength=self.vocab_size)
        shares = counts[counts > 0] / len(part)
        return float(-(shares * np.log(shares)).sum())

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of byte tokens, with replacement characters for invalid UTF-8, or else the ids."""
        if not self.is_bytes:
            return _ids_as_text(tokens)
        return ByteTokenizer().decode(np.asarray(tokens))

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        largest, smallest = int(tokens.max()), int(tokens.min())
        if largest >= self.vocab_size:
            raise InputError(
                f"{self.name} holds token {largest}, outside model.vocab_size = {self.vocab_size}",
                hint=f"use at least model.vocab_size = {largest + 1}, or check data.dtype",
            )
        if smallest < 0:
            raise InputError(
                f"{self.name} holds token {smallest}; token ids are not negative",
                hint=f"check data.dtype; as uint32 these bytes are {smallest % 2**32}",
            )

    def _enough_tokens(self) -> str:
        """Return the hint for a split that is shorter than one window."""
        lengths, window = [len(part) for part in self.parts.values()], self.sequence_length + 1
        enough = f"use longer data, at least {2 * window} tokens"
        if sum(lengths) >= 2 * window:
            thousandths = min(math.ceil(1000 * window / sum(lengths)), 500)
            enough = f"use data.held_out_fraction = {thousandths / 1000}"
        return enough + (f", or batch.sequence_length = {min(lengths) - 1}" if min(lengths) > 1 else "")


def _ids_as_text(tokens: np.ndarray) -> str:
    return " ".join(str(token) for token in tokens)


def segments_of(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """Number each token's document within its window, from 0; return int32, shaped as `tokens`.

    Args:
        tokens: [windows, positions]. An id `end_of_document` is the last token of its document. A window may
            begin and end inside a document.
    """
    segments = np.zeros(tokens.shape, np.int32)
    np.cumsum(tokens[:, :-1] == end_of_document, axis=1, dtype=np.int32, out=segments[:, 1:])
    return segments


class TokenFile:
    """The tokens of a raw file, or of a range of it, read on demand.

    The object keeps reading the file that it opened, even if another file is renamed to its path.

    Args:
        path: the file.
        dtype: the type of its tokens, with byte order.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._dtype = path, dtype
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as refused:
            raise InputError(
                f"cannot read {path}: {refused.strerror}", hint="name a file that you may read"
            ) from refused
        weakref.finalize(self, os.close, self._descriptor)
        self._whole: TokenFile = self
        self._start, self._stop = 0, os.fstat(self._descriptor).st_size // dtype.itemsize

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
        return np.frombuffer(self._bytes(start, max(stop - start, 0)), self._dtype)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read `length` tokens from each of `starts`; return [starts, length].

        Raises:
            InputError: the file has been cut short since it was opened.
            MeshwrightError: the disk fails to return the tokens.
        """
        rows = [self._bytes(start, length) for start in starts.tolist()]
        return np.frombuffer(b"".join(rows), self._dtype).reshape(len(rows), length)

    def _bytes(self, start: int, count: int) -> bytes:
        size = self._dtype.itemsize
        offset, wanted = (self._start + start) * size, count * size
        content = b""
        try:
            while len(content) < wanted:  # one call returns 2 GiB at most
                more = os.pread(self._descriptor, wanted - len(content), offset + len(content))
                if not more:
                    now, before = os.fstat(self._descriptor).st_size, self._whole._stop * size
                    raise InputError(
                        f"{self.path} was cut short while it was read: it has {now} bytes, and had {before} "
                        "when it was opened",
                        hint="put the whole file back; then go on with --resume",
                    )
                content = content + more if content else more
        except OSError as refused:
            raise MeshwrightError(
                f"cannot read {self.path}: {refused.strerror}",
                hint="look at the disk that holds it; then go on with --resume",
            ) from refused
        return content


def token_file_parts(data: TokenFileData) -> dict[Split, TokenFile]:
    """Return the beginning of a token file for training and its tail as held-out data."""
    path, dtype = Path(data.path), np.dtype(data.dtype).newbyteorder("<")
    if not path.is_file():
        nearest = next(folder for folder in path.absolute().parents if folder.is_dir())
        raise InputError(f"data.path: no token file {path}", hint=f"{nearest} exists")
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise InputError(f"{path} is empty", hint=f"write tokens to it as {data.dtype}")
    if num_bytes % dtype.itemsize:
        fits = [name for name in ("uint16", "int32", "uint32") if num_bytes % np.dtype(name).itemsize == 0]
        raise InputError(
            f"{path}: {num_bytes} bytes are no whole number of {data.dtype} tokens ({dtype.itemsize} bytes)",
            hint=f"data.dtype may be {' or '.join(fits)}" if fits else "the file is cut short; copy it again",
        )
    tokens = TokenFile(path, dtype)
    cut = len(tokens) - math.ceil(len(tokens) * data.held_out_fraction)
    return {"train": tokens.part(0, cut), "held-out": tokens.part(cut, len(tokens))}


# Third-party packages, and tests: these are long and repetitive, and not installed everywhere.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@functools.cache
def stdlib_parts(held_out_fraction: float) -> dict[Split, np.ndarray]:
    """Return the standard library's sources without tests as uint8, in order of paths, split by whole files.

    Every n-th file is held out, n = round(1 / `held_out_fraction`). The text is that of the running
    interpreter, so it differs between Python releases.
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
    whole: dict[Split, list[bytes]] = {"train": files, "held-out": held_out}
    # Arrays of bytes are read-only, as cached arrays must be.
    return {split: np.frombuffer(b"".join(texts), np.uint8) for split, texts in whole.items()}


BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64  # identifies a file of any size in about 0.1 s


def data_identity(config: RunConfig) -> dict[str, Any] | None:
    """Return a fingerprint of a run's data as JSON: `name`, `num_bytes`, `hashed` and `sha256`.

    A file of at most 64 MiB is hashed whole. From a longer one, 64 blocks of 1 MiB are hashed, spread evenly
    from the first byte to the last. This detects a file that was replaced, cut or made again, but not a
    change between the blocks. `hashed` says which of the two was done. Python's sources are hashed whole. The
    result is None if the data comes from the seed.

    Raises:
        InputError: a file cannot be read.
    """
    data = config.data
    if isinstance(data, TokenFileData):
        return _identity(data.path, [Path(data.path)])
    if isinstance(data, InstructionData):
        return _identity(data.path, [Path(data.path)])
    if isinstance(data, IdxData):
        return _identity(data.folder, idx_files(Path(data.folder)))
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


def _identity(name: str, paths: list[Path]) -> dict[str, Any]:
    digest, total, is_whole = hashlib.sha256(), 0, True
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                total += size
                starts = range(0, size, BLOCK_BYTES)
                if len(starts) > NUM_BLOCKS:
                    is_whole, last = False, size - BLOCK_BYTES
                    starts = [last * number // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS)]
                for start in starts:
                    digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
        except OSError as refused:
            raise InputError(
                f"cannot read {path}: {refused.strerror}", hint="name a file that is there and may be read"
            ) from refused
    hashed = "whole" if is_whole else f"{NUM_BLOCKS} blocks of {BLOCK_BYTES} bytes"
    return {"name": name, "num_bytes": total, "hashed": hashed, "sha256": digest.hexdigest()}


def identity_difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe how one identity of data differs from another; empty if it does not."""
    if was["num_bytes"] != now["num_bytes"]:
        return f"it has {now['num_bytes']} bytes, and had {was['num_bytes']}"
    # Hashes of different extents cannot be compared.
    same = was["hashed"] != now["hashed"] or was["sha256"] == now["sha256"]
    return "" if same else f"its {now['num_bytes']} bytes are as many as before, and not the same"


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMetadata:
    """The metadata of one tokenized text, with `path` as the caller wrote it."""

    path: str
    num_bytes: int
    sha256: str
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileMetadata:
    """The content and origin of a token file.

    `tokenizer`: "bytes", or a file's name. `tokenizer_sha256`: the hash of that file. `vocab_size`: the
    number of possible ids, including the id that ends a document. `inputs`: in the order of their tokens in
    the file.
    """

    schema: int
    tokenizer: str
    tokenizer_sha256: str | None
    dtype: str
    vocab_size: int
    end_of_document: int | None
    num_tokens: int
    num_documents: int
    inputs: tuple[InputMetadata, ...]

    def as_json(self) -> str:
        """Return the content of the file that `read_metadata` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


def metadata_path(tokens: Path) -> Path:
    """Return the path of a token file's metadata: its name with `.json` appended."""
    return tokens.with_name(tokens.name + ".json")


def read_metadata(tokens: Path) -> TokenFileMetadata | None:
    """Read the metadata of a token file; return None if it has none.

    Raises:
        InputError: the metadata cannot be read, or follow the schema of another release.
    """
    path = metadata_path(tokens)
    if not path.is_file():
        return None
    hint = f"make the tokens again, or remove {path.name} and set the data section by hand"
    try:
        metadata = TypeAdapter(TokenFileMetadata).validate_json(path.read_bytes())
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise InputError(
            f"{path} does not describe a token file: {where}: {first['msg']}", hint=hint
        ) from wrong
    except OSError as refused:
        raise InputError(f"cannot read {path}: {refused.strerror}", hint=hint) from refused
    if metadata.schema != SCHEMA:
        raise InputError(f"{path} has schema {metadata.schema}, and this release reads {SCHEMA}", hint=hint)
    return metadata


def check_metadata(data: TokenFileData, metadata: TokenFileMetadata, vocab_size: int) -> None:
    """Check a configuration against the metadata of its token file."""
    path, beside = Path(data.path), metadata_path(Path(data.path)).name
    dtype, num_tokens, end = metadata.dtype, metadata.num_tokens, metadata.end_of_document
    num_bytes, wanted = path.stat().st_size, num_tokens * np.dtype(dtype).itemsize
    if data.dtype != dtype:
        raise InputError(
            f"data.dtype = {data.dtype!r}, but {path} holds {dtype} by {beside}",
            hint=f"use data.dtype = {dtype!r}",
        )
    if num_bytes != wanted:
        raise InputError(
            f"{path} has {num_bytes} bytes, and {beside} says {num_tokens} tokens of {dtype}, {wanted} bytes",
            hint="copy both again, or make the tokens again",
        )
    if metadata.vocab_size > vocab_size:
        raise InputError(
            f"{path} may hold ids below {metadata.vocab_size} by {beside}, "
            f"and model.vocab_size = {vocab_size}",
            hint=f"use at least model.vocab_size = {metadata.vocab_size}",
        )
    if data.end_of_document not in (None, end):
        known, hint = f"it is {end}", f"use data.end_of_document = {end}"
        if end is None:
            known = "no document has an end"
            hint = 'use data.documents = "joined", or make the tokens with --end-of-document'
        raise InputError(
            f"data.end_of_document = {data.end_of_document}, but in {path} {known} by {beside}", hint=hint
        )
