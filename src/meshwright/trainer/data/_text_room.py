"""Reach what reads files of texts, tokens and images: rooms outside the core, which entry points name.

Bytes as token ids need none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meshwright.config import RunConfig
from meshwright.errors import InputError
from meshwright.registry import room

from ._order import Dataset

BYTES = "bytes"
NUM_BYTES = 256
OnProgress = Callable[[int, int], None]
"""Called with bytes of text done, and of all texts."""


class ImageRoom(Protocol):
    """Reads or generates images, as the core needs it."""

    def open_images(self, config: RunConfig) -> Dataset:
        """Return the data set of a run whose model takes images."""
        ...

    def files_of(self, data: Any) -> list[Path]:
        """Return the files that data are read from, in order."""
        ...


class FoundData(Protocol):
    """Hold the overrides that make a run read somebody's data, and notes on how the data were understood."""

    overrides: dict[str, Any]
    notes: tuple[str, ...]


class TextRoom(Protocol):
    """Reads files of texts and of tokens, as the core needs it."""

    def open_tokens(self, config: RunConfig, on_progress: OnProgress) -> Dataset:
        """Return the data set of a run that reads texts or tokens from files."""
        ...

    def files_of(self, data: Any) -> list[Path]:
        """Return the files that data are read from, in order."""
        ...

    def own_data(self, named: str, config: RunConfig, given: Mapping[str, Any]) -> FoundData:
        """Return what makes a run read the data at a path; `given`: overrides of the user's own."""
        ...


def text_room() -> TextRoom:
    """Return the room that reads files of texts and of tokens, as a module.

    Raises:
        InputError: the installed package names none.
    """
    return room("texts")


def image_room() -> ImageRoom:
    """Return the room that reads and generates images, as a module.

    Raises:
        InputError: the installed package names none.
    """
    return room("images")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8; id 256 may end a document."""

    name: str = BYTES
    sha256: None = None
    num_ids: int = NUM_BYTES

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text, with replacement characters for invalid UTF-8 and without ids above 255."""
        return ids[ids < NUM_BYTES].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def end_of_document(self, name: str) -> int:
        """Return the id that ends a document.

        Raises:
            InputError: `name` is not 256.
        """
        if name != str(NUM_BYTES):
            raise InputError(
                f"--end-of-document {name!r}: with bytes only {NUM_BYTES} is free to end a document",
                hint=f"use --end-of-document {NUM_BYTES}",
            )
        return NUM_BYTES
