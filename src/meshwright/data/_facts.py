"""What is known of a token file: a JSON file beside it, which the loader holds the configuration to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from meshwright.config import TokenFileData
from meshwright.errors import InputError

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """One text that was tokenized; `path` as it was given."""

    path: str
    num_bytes: int
    sha256: str
    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileFacts:
    """What a token file holds and what made it.

    `tokenizer`: "bytes", or a file's name; `tokenizer_sha256`: of that file. `vocab_size`: ids there may be,
    that of the end of a document included. `inputs`: in the order of the file.
    """

    schema: int
    tokenizer: str
    tokenizer_sha256: str | None
    dtype: str
    vocab_size: int
    end_of_document: int | None
    num_tokens: int
    num_documents: int
    inputs: tuple[InputFacts, ...]

    def as_json(self) -> str:
        """The content of the file that `read_facts` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


def facts_path(tokens: Path) -> Path:
    """Where the facts of a token file are: its name with `.json` behind it."""
    return tokens.with_name(tokens.name + ".json")


def read_facts(tokens: Path) -> TokenFileFacts | None:
    """The facts of a token file; None where there are none.

    Raises:
        InputError: they cannot be read, or are of another release's schema.
    """
    path = facts_path(tokens)
    if not path.is_file():
        return None
    hint = f"make the tokens again, or remove {path.name} and set the data section by hand"
    try:
        facts = TypeAdapter(TokenFileFacts).validate_json(path.read_bytes())
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise InputError(
            f"{path} does not describe a token file: {where}: {first['msg']}", hint=hint
        ) from wrong
    except OSError as refused:
        raise InputError(f"cannot read {path}: {refused.strerror}", hint=hint) from refused
    if facts.schema != SCHEMA:
        raise InputError(f"{path} has schema {facts.schema}, and this release reads {SCHEMA}", hint=hint)
    return facts


def check_facts(data: TokenFileData, facts: TokenFileFacts, vocab_size: int) -> None:
    """Hold a configuration to what is known of its token file.

    Raises:
        InputError: another type, length, vocabulary or end of document than the file's.
    """
    path, beside = Path(data.path), facts_path(Path(data.path)).name
    if data.dtype != facts.dtype:
        raise InputError(
            f"data.dtype = {data.dtype!r}, but {path} holds {facts.dtype} by {beside}",
            hint=f"use data.dtype = {facts.dtype!r}",
        )
    num_bytes, wanted = path.stat().st_size, facts.num_tokens * np.dtype(facts.dtype).itemsize
    if num_bytes != wanted:
        raise InputError(
            f"{path} has {num_bytes} bytes, and {beside} says {facts.num_tokens} tokens of {facts.dtype}, "
            f"{wanted} bytes",
            hint="copy both again, or make the tokens again",
        )
    if facts.vocab_size > vocab_size:
        raise InputError(
            f"{path} may hold ids below {facts.vocab_size} by {beside}, and model.vocab_size = {vocab_size}",
            hint=f"use at least model.vocab_size = {facts.vocab_size}",
        )
    if data.end_of_document not in (None, facts.end_of_document):
        known = facts.end_of_document
        raise InputError(
            f"data.end_of_document = {data.end_of_document}, but in {path} "
            + ("no document has an end" if known is None else f"it is {known}")
            + f" by {beside}",
            hint='use data.documents = "joined", or make the tokens with --end-of-document'
            if known is None
            else f"use data.end_of_document = {known}",
        )
