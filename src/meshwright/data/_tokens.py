"""Which document each token of a window belongs to.

Windows of tokens: from an array that exists, in one of two orders, or random throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from meshwright.config import Order, TokenFileData
from meshwright.errors import InputError

from ._order import ALL, Rows, Split, generator, windows_at
from ._texts import ByteTokenizer
from ._token_files import TokenFile


def segments_of(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """The number of each token's document within its window, from 0; int32, shaped as `tokens`.

    Args:
        tokens: [windows, positions]. An id `end_of_document` is its document's last token; a window
            may begin and end inside a document.
    """
    segments = np.zeros(tokens.shape, np.int32)
    np.cumsum(tokens[:, :-1] == end_of_document, axis=1, dtype=np.int32, out=segments[:, 1:])
    return segments


_TOKENS_COUNTED_AT_ONCE = 1 << 24  # keeps counting a file larger than memory within 0.3 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTokens:
    """Tokens drawn evenly from the vocabulary: for weighing and timing, there is nothing to learn."""

    seed: int
    sequences: int
    sequence_length: int
    vocab_size: int

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """`tokens` int32 [rows, sequence_length + 1]."""
        shape = (self.sequences, self.sequence_length + 1)
        random = generator(self.seed, step, split)
        return {"tokens": random.integers(self.vocab_size, size=shape, dtype=np.int32)[rows]}

    def unigram_entropy_nats(self, split: Split) -> float:
        """ln(vocabulary): what no model can beat."""
        return math.log(self.vocab_size)

    def decode(self, tokens: np.ndarray) -> str:
        """The ids, since they stand for nothing."""
        return _ids_as_text(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWindows:
    """Windows of a long array of tokens.

    `name`: of the source, for errors. `parts`: one 1-D array of integers per split, in memory or in a file.
    `is_bytes`: whether the tokens are the bytes of UTF-8 text. `order`: `random` windows start
    anywhere and may overlap. For `epochs` window i begins at token i x `sequence_length`, so that every
    token but the part's first is predicted once per epoch (what is left at the end, less than a window,
    never is); epochs follow each other without a gap, also within a batch. `end_of_document`: the id that
    ends a document, where a batch says which document each token belongs to.

    Raises:
        InputError: a part is shorter than one window, or `end_of_document` is outside the vocabulary.
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
                    hint=self._what_is_enough(),
                )
        if self.end_of_document is not None and self.end_of_document >= self.vocab_size:
            raise InputError(
                f"data.end_of_document = {self.end_of_document} is outside model.vocab_size = "
                f"{self.vocab_size}",
                hint=f"use at least model.vocab_size = {self.end_of_document + 1}",
            )

    def num_windows(self, split: Split) -> int:
        """Windows of one epoch of a part."""
        return (len(self.parts[split]) - 1) // self.sequence_length

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """`tokens` int32 [rows, sequence_length + 1]; for documents `segments` too, int32, same shape.

        Reads the windows of these rows alone.

        Raises:
            InputError: a token is outside the model's vocabulary, or a file has been cut short.
            MeshwrightError: the disk does not give a file's tokens.
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
        """Where the windows of a step begin."""
        if self.order == "random":
            places = len(self.parts[split]) - self.sequence_length
            return generator(self.seed, step, split).integers(places, size=self.sequences)
        first, size = step * self.sequences, self.num_windows(split)
        windows = windows_at(first, self.sequences, size=size, seed=self.seed, split=split)
        return windows * self.sequence_length

    def unigram_entropy_nats(self, split: Split) -> float:
        """Entropy of the single tokens of a part, in nats per token: what counting alone predicts.

        Reads the whole part.

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
        """The text of byte tokens (what is no UTF-8 shows as the replacement sign); else the ids."""
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

    def _what_is_enough(self) -> str:
        lengths, window = [len(part) for part in self.parts.values()], self.sequence_length + 1
        if sum(lengths) >= 2 * window:
            thousandths = min(math.ceil(1000 * window / sum(lengths)), 500)
            enough = f"data.held_out_fraction = {thousandths / 1000}"
        else:
            enough = f"longer data, at least {2 * window} tokens"
        return f"use {enough}" + (
            f", or batch.sequence_length = {min(lengths) - 1}" if min(lengths) > 1 else ""
        )


def _ids_as_text(tokens: np.ndarray) -> str:
    return " ".join(str(token) for token in tokens)


def token_file_parts(data: TokenFileData) -> dict[Split, TokenFile]:
    """Return a token file's beginning, to train, and its tail, held out.

    Raises:
        InputError: no such file, or its size is no whole number of tokens.
    """
    path, dtype = Path(data.path), np.dtype(data.dtype).newbyteorder("<")
    if not path.is_file():
        raise InputError(f"data.path: no token file {path}", hint=f"{_nearest_existing(path)} exists")
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


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in path.absolute().parents if folder.is_dir())
