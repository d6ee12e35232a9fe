"""From text to ids: bytes, or a `tokenizer.json` by Hugging Face's package, imported only for one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError, nearest_name

BYTES = "bytes"
NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteTokenizer:
    """The ids are the bytes of UTF-8; 256 may end a document."""

    name: str = BYTES
    sha256: None = None
    num_ids: int = NUM_BYTES

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """The text; what is no UTF-8 shows as the replacement sign, and what is no byte is left out."""
        return ids[ids < NUM_BYTES].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def end_of_document(self, asked: str) -> int:
        """The id that ends a document.

        Raises:
            InputError: another than 256.
        """
        if asked != str(NUM_BYTES):
            raise InputError(
                f"--end-of-document {asked!r}: with bytes only {NUM_BYTES} is free to end a document",
                hint=f"use --end-of-document {NUM_BYTES}",
            )
        return NUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTokenizer:
    """A `tokenizer.json`; adds nothing around a text, cuts nothing off it."""

    name: str
    sha256: str
    num_ids: int
    inner: Any

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        encoded = self.inner.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: np.ndarray) -> str:
        """The text; ids without a token are left out, special tokens are not."""
        text: str = self.inner.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def end_of_document(self, asked: str) -> int:
        """The id of a token by its text, or a number that is one.

        Raises:
            InputError: no such token.
        """
        found: int | None = self.inner.token_to_id(asked)
        if found is None and asked.isdecimal() and len(asked) < 20 and int(asked) < self.num_ids:
            found = int(asked)
        if found is None:
            special = [token.content for token in self.inner.get_added_tokens_decoder().values()]
            raise InputError(
                f"--end-of-document {asked!r}: {self.name} has no such token and {self.num_ids} ids",
                hint=nearest_name(asked, special),
            )
        return found


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", or that of a local `tokenizer.json`.

    Raises:
        InputError: no such file, one that is no tokenizer, or the package `tokenizers` is missing.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name)
    if not os.path.isfile(name):
        raise InputError(f"no tokenizer {name!r}", hint="use bytes, or the path of a local tokenizer.json")
    try:
        import tokenizers
    except ImportError as missing:
        raise InputError(
            f"{name}: reading a tokenizer.json needs the package tokenizers, which is not installed",
            hint="pip install 'meshwright[tokenizers]', or use the tokenizer bytes",
        ) from missing
    try:
        inner: Any = tokenizers.Tokenizer.from_file(name)
    except Exception as wrong:  # the package raises bare Exception
        raise InputError(f"{name} is no tokenizer: {wrong}", hint="name a file tokenizer.json") from wrong
    inner.no_truncation()  # both may be written in the file, for use in a model
    inner.no_padding()
    num_ids = max(inner.get_vocab(with_added_tokens=True).values()) + 1  # there may be holes
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return FileTokenizer(name=path.name, sha256=sha256, num_ids=num_ids, inner=inner)
