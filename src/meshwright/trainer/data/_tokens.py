"""Cut tokens into windows, in one of two orders; draw random tokens.

`open_data` makes `TokenWindows` for text and token files, a mixture of several of them,
and `RandomTokens` for synthetic data. `_data_files` reads the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from meshwright.config import Order
from meshwright.errors import InputError

from ._data_files import JoinedEnds, TokenFiles
from ._order import ALL, Rows, Split, generator, windows_at
from ._text_room import ByteTokenizer

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
class SourceEpochs:
    """Describes what a run reads of one source.

    `share`: of its sequences. `epochs`: how often each window comes on average.
    `num_tokens`: those to train on. `num_sequences`: those that the run reads.
    """

    name: str
    share: float
    num_tokens: int
    num_sequences: int
    epochs: float


@runtime_checkable
class TokenReader(Protocol):
    """A data set that reads windows of tokens: `TokenWindows`, or a mixture of them."""

    @property
    def is_bytes(self) -> bool:
        """True if the tokens are the bytes of UTF-8 text."""
        ...

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return some rows of a step's batch."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of byte tokens, or else the ids."""
        ...

    def unigram_entropy_nats(self, split: Split) -> float:
        """Return the entropy of single tokens in nats per token."""
        ...

    def epochs(self, steps: int) -> tuple[SourceEpochs, ...]:
        """Return what a run of `steps` reads of each source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWindows:
    """Windows of a long array of tokens.

    `name`: the source, for errors. `parts`: one 1-D array of integers per split, in memory or in a file.
    `is_bytes`: true if the tokens are the bytes of UTF-8 text. `order`: windows of `random` start anywhere
    and may overlap. In `epochs`, window i begins at token i x `sequence_length`, so that every token but the
    first of the split is predicted once per epoch; a rest shorter than a window is never predicted. Epochs
    follow each other without a gap, also within a batch. `end_of_document`: the id that ends a document.
    `ends`: where documents end by the files' index, if that is what separates them. With either of the two, a
    batch also holds the document number of each token. `tokenizers`: those that made the files, each with the
    format that names it.

    Raises:
        InputError: a split is shorter than one window, or `end_of_document` is outside the vocabulary.
    """

    name: str
    parts: Mapping[Split, np.ndarray | TokenFiles]
    is_bytes: bool
    seed: int
    sequences: int
    sequence_length: int
    vocab_size: int
    order: Order = "random"
    end_of_document: int | None = None
    ends: JoinedEnds | None = None
    tokenizers: frozenset[tuple[str, str]] = frozenset()

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

        `segments` exist if something says where documents end. Reads only the windows of these rows.

        Raises:
            InputError: a token is outside the model's vocabulary, or a file has been cut short.
            MeshwrightError: the disk fails to return a file's tokens.
        """
        every = np.arange(self.sequences)
        return self.windows(split, self.starts(step, split, every, step * self.sequences)[rows])

    def starts(self, step: int, split: Split, rows: np.ndarray, first: int) -> np.ndarray:
        """Return the first token of the windows that are at `rows` of a step's batch, int64 [rows].

        Args:
            rows: in ascending order; at least one.
            first: how many windows of this source come before them in the whole run; for `epochs`.
        """
        if self.order == "random":
            places = len(self.parts[split]) - self.sequence_length
            return generator(self.seed, step, split).integers(places, size=self.sequences)[rows]
        size = self.num_windows(split)
        return windows_at(first, len(rows), size=size, seed=self.seed, split=split) * self.sequence_length

    def windows(self, split: Split, starts: np.ndarray) -> dict[str, np.ndarray]:
        """Return a batch of the windows that begin at `starts`; raises as `batch` does."""
        part, window = self.parts[split], self.sequence_length + 1
        if isinstance(part, TokenFiles):
            tokens = part.windows(starts, window)
        else:
            tokens = sliding_window_view(part, window)[starts]
        self._check_vocabulary(tokens)
        batch = {"tokens": tokens.astype(np.int32)}
        if self.end_of_document is not None:
            batch["segments"] = segments_of(batch["tokens"], self.end_of_document)
        elif self.ends is not None:
            assert isinstance(part, TokenFiles), "an index is of files"
            batch["segments"] = self.ends.segments(part.start + starts, window)
        return batch

    def epochs(self, steps: int) -> tuple[SourceEpochs, ...]:
        """Return what a run of `steps` reads of this one source."""
        return (self.epochs_of(steps * self.sequences, 1.0),)

    def epochs_of(self, num_sequences: int, share: float) -> SourceEpochs:
        """Return what `num_sequences` windows are of this source; `share` is for the record."""
        return SourceEpochs(
            name=self.name,
            share=share,
            num_tokens=len(self.parts["train"]),
            num_sequences=num_sequences,
            epochs=num_sequences / self.num_windows("train"),
        )

    def unigram_entropy_nats(self, split: Split) -> float:
        """Return the entropy of single tokens in nats per token: the loss of predicting by frequency alone.

        Reads the whole split.

        Raises:
            InputError: a token is outside the model's vocabulary.
        """
        return entropy_nats(self.unigram_shares(split))

    def unigram_shares(self, split: Split) -> np.ndarray:
        """Return the share of each id in a split, float64 [vocab_size]; reads the whole split."""
        part, counts = self.parts[split], np.zeros(self.vocab_size, np.int64)
        for start in range(0, len(part), _TOKENS_COUNTED_AT_ONCE):
            tokens = part[start : start + _TOKENS_COUNTED_AT_ONCE]
            self._check_vocabulary(tokens)
            counts += np.bincount(tokens, minlength=self.vocab_size)
        return counts / len(part)

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


def entropy_nats(shares: np.ndarray) -> float:
    """Return the entropy of a distribution in nats."""
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


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
