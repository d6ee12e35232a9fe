"""Keep and check the metadata of token files: a JSON file next to each that `tokenize` has written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from meshwright.errors import InputError
from meshwright.files import read_json, reason

TOKEN_SCHEMA = 1
DTYPES = ("uint16", "int32", "uint32")
MOST_BYTES = 100 * 2**20  # it has a line for each text
MOST_TOKENS = 2**63


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
    if not path.exists():
        return None
    hint = f"make the tokens again, or remove {path.name} and set the data section by hand"
    try:
        metadata = TypeAdapter(TokenFileMetadata).validate_python(read_json(path, MOST_BYTES))
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise InputError(
            f"{path} does not describe a token file: {where}: {first['msg']}", hint=hint
        ) from wrong
    except OSError as refused:
        raise InputError(f"cannot read {path}: {reason(refused)}", hint=hint) from refused
    except ValueError as wrong:
        raise InputError(f"{path} does not describe a token file: not JSON: {wrong}", hint=hint) from wrong
    if metadata.dtype not in DTYPES:
        what = f"{path}: dtype = {metadata.dtype[:40]!r} is no type of token ids"
        raise InputError(what, hint=f"it is one of {', '.join(DTYPES)}; {hint}")
    numbers = {name: getattr(metadata, name) for name in ("vocab_size", "num_tokens", "num_documents")}
    numbers["end_of_document"] = metadata.end_of_document or 0
    for name, number in numbers.items():
        if not 0 <= number < MOST_TOKENS:
            raise InputError(f"{path}: {name} = {str(number)[:40]} cannot be", hint=hint)
    if metadata.schema != TOKEN_SCHEMA:
        raise InputError(
            f"{path} has schema {metadata.schema}, and this release reads {TOKEN_SCHEMA}", hint=hint
        )
    return metadata


def check_metadata(
    path: Path, metadata: TokenFileMetadata, dtype: str | None, end_of_document: int | None, vocab_size: int
) -> None:
    """Check the settings of a token file against its metadata."""
    beside, num_tokens, end = metadata_path(path).name, metadata.num_tokens, metadata.end_of_document
    num_bytes, wanted = path.stat().st_size, num_tokens * np.dtype(metadata.dtype).itemsize
    if dtype != metadata.dtype:
        raise InputError(
            f"data.dtype = {dtype!r}, but {path} holds {metadata.dtype} by {beside}",
            hint=f"use data.dtype = {metadata.dtype!r}",
        )
    if num_bytes != wanted:
        raise InputError(
            f"{path} has {num_bytes} bytes, and {beside} says {num_tokens} tokens of {metadata.dtype}, "
            f"{wanted} bytes",
            hint="copy both again, or make the tokens again",
        )
    if metadata.vocab_size > vocab_size:
        raise InputError(
            f"{path} may hold ids below {metadata.vocab_size} by {beside}, "
            f"and model.vocab_size = {vocab_size}",
            hint=f"use at least model.vocab_size = {metadata.vocab_size}",
        )
    if end_of_document not in (None, end):
        known, hint = f"it is {end}", f"use data.end_of_document = {end}"
        if end is None:
            known = "no document has an end"
            hint = 'use data.documents = "joined", or make the tokens with --end-of-document'
        raise InputError(
            f"data.end_of_document = {end_of_document}, but in {path} {known} by {beside}", hint=hint
        )
