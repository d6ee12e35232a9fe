"""Cut long token arrays into windows, number the documents in each window, or draw random tokens.

`open_data` makes `TokenWindows` for text and token files, read in one of two orders, and `RandomTokens` for
synthetic data.
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
    """Number each token's document within its window, from 0; return int32, shaped as `tokens`.

    Args:
        tokens: [windows, positions]. An id `end_of_document` is the last token of its document. A window may
            begin and end inside a document.
    """
    segments = np.zeros(tokens.shape, np.int32)
    np.cumsum(tokens[:, :-1] == end_of_document, axis=1, dtype=np.int32, out=segments[:, 1:])
    return segments


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
                    hint=self._what_is_enough(),
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
    """Return the beginning of a token file for training and its tail as held-out data.

    Raises:
        InputError: the file is missing or empty, or its size is not a whole number of tokens.
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
