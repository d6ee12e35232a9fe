"""Reach what reads files of texts and tokens: a room outside the core, which an entry point names.

Bytes as token ids need none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from meshwright.errors import InputError
from meshwright.registry import load_registered

GROUP, NAME = "meshwright.data", "texts"
BYTES = "bytes"
NUM_BYTES = 256
OnProgress = Callable[[int, int], None]
"""Called with bytes of text done, and of all texts."""


def text_room() -> Any:
    """Return the room that reads files of texts and of tokens, as a module.

    It has `open_tokens` and `files_of` for the data of a run, `own_data`, which finds out what somebody's
    data are, and `open_tokenizer` and `tokenizer_path` for the tokenizers of models.

    Raises:
        InputError: the installed package names none.
    """
    return load_registered(GROUP, NAME)


@runtime_checkable
class Tokenizer(Protocol):
    """Turns texts into token ids and back, as the core needs it."""

    @property
    def name(self) -> str:
        """Its file's name, or "bytes"."""
        ...

    @property
    def sha256(self) -> str | None:
        """The hash of its file; None for bytes."""
        ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids."""
        ...


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
