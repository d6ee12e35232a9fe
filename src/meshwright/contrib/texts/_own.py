"""Find out what somebody's data are, and say it as the section `data` of a run.

A path may name texts (a document each, lines of JSON, Parquet), conversations, token files with or without a
description beside them, files of a mixture or images; or a folder of one of these. What is found becomes
overrides, so that the run's own configuration says what was trained on. Nothing is tokenized here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, TokenFormat
from meshwright.errors import InputError, nearest_name
from meshwright.trainer.data import BYTES, NUM_BYTES

from ._instructions import end_token
from ._metadata import metadata_path, read_metadata
from ._parquet import PARQUET, text_columns
from ._texts import LINES, Tokenizer, open_tokenizer, tokenizer_path
from ._token_formats import other_format, token_paths
from ._widths import is_binary, shown_dtype

MADE_HERE = ("synthetic", "python-stdlib")
"""Sources that need no file, which may be named in place of a path."""
_TEXTS = (*LINES, PARQUET, ".txt")
_MOST_LOOKED_AT = 1 << 20  # bytes of the first line of JSON
_FEW = 0.1  # a tokenizer that uses a smaller share of the vocabulary than this is mentioned


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """Hold the overrides with which a run reads its data, and notes on how the data were understood."""

    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()


def own_data(named: str, config: RunConfig, given: Mapping[str, Any]) -> OwnData:
    """Return what makes a run read the data at a path.

    Args:
        named: a file or a folder; or one of `MADE_HERE`.
        config: the run as it is without them.
        given: overrides of the user's own, by key; what they say of `data` is not decided here.

    Raises:
        InputError: nothing is there, or its kind cannot be told.

    >>> from meshwright.config import load_config
    >>> own_data("synthetic", load_config("bytes-nano"), {}).overrides
    {'data.source': 'synthetic'}
    """
    if named in MADE_HERE and not Path(named).exists():
        return OwnData(overrides={"data.source": named})
    path = Path(named)
    if not path.exists() and not any(each in path.name for each in "*?["):
        raise _nothing_at(path)
    if config.model.takes == "images":
        return OwnData(overrides={"data.source": "idx", "data.folder": str(path.resolve())})
    if config.model.takes != "sequences":
        raise InputError(
            f"{named}: a {config.model.kind} model takes {config.model.takes}, which come from the seed",
            hint="leave --data out, or name the configuration of a transformer",
        )
    if path.suffix == ".toml":
        return OwnData(overrides={"data.source": "mixture", "data.path": str(path.resolve())})
    form = _token_format(path)
    if form is not None:
        return _tokens(path, form, config, given)
    if path.suffix in LINES and _is_conversation(path):
        return _conversations(path, config, given)
    return _texts(path, config, given)


def _nothing_at(path: Path) -> InputError:
    folder = next(each for each in path.absolute().parents if each.is_dir())
    names = [each.name for each in folder.iterdir()] if folder == path.absolute().parent else []
    hint = nearest_name(path.name, names) if names else f"{folder} exists"
    return InputError(
        f"--data {path}: no such file or folder", hint=f"in {folder}: {hint}" if names else hint
    )


def _token_format(path: Path) -> TokenFormat | None:
    """Return the format of the token files at a path; None if it holds texts.

    Raises:
        InputError: a folder holds texts and token files.
    """
    folder = path if path.is_dir() else path.parent
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    if any(each in path.name for each in "*?["):
        files = sorted(folder.glob(path.name))
    if any(each.suffix == ".idx" for each in files):
        return "megatron"
    if any(each.suffix == ".ds" for each in files):
        return "datatrove"
    tokens = [each for each in files if each.suffix == ".bin" or metadata_path(each).is_file()]
    if files == [path] and path.suffix not in _TEXTS and is_binary(path):
        tokens = files  # whatever its name ends in
    texts = [each for each in files if each.suffix in _TEXTS]
    if tokens and texts:
        raise InputError(
            f"{path} holds token files ({tokens[0].name}) and texts ({texts[0].name})",
            hint=f"name which: --data {tokens[0]} or --data {texts[0]}, or a pattern such as '{path}/*.bin'",
        )
    if not tokens:
        return None
    found = other_format(tokens[0])
    return "raw" if found is None else found[1]


def _tokens(path: Path, form: TokenFormat, config: RunConfig, given: Mapping[str, Any]) -> OwnData:
    """Return token files as a source, with the type and the vocabulary that their descriptions say."""
    made: dict[str, Any] = {"data.source": "tokens", "data.path": str(path.absolute()), "data.format": form}
    if form != "raw" or "data.dtype" in given:
        return OwnData(overrides=made)
    first = token_paths(str(path), form)[0]
    metadata = read_metadata(first)
    if metadata is not None:
        size, notes = _vocabulary(metadata.vocab_size, config, given, f"{metadata_path(first).name} says so")
        return OwnData(overrides={**made, "data.dtype": metadata.dtype, **size}, notes=notes)
    dtype = shown_dtype(first, int(given.get("model.vocab_size", config.model.sizes.num_token_ids)))
    note = f"{first.name} has no {metadata_path(first).name}: by its bytes it is read as {dtype}"
    return OwnData(overrides={**made, "data.dtype": dtype}, notes=(note,))


def _conversations(path: Path, config: RunConfig, given: Mapping[str, Any]) -> OwnData:
    tokenizer = str(given.get("data.tokenizer", BYTES))
    made = {"data.source": "instructions", "data.path": str(path.resolve()), "data.tokenizer": tokenizer}
    needed = NUM_BYTES + 1 if tokenizer == BYTES else open_tokenizer(tokenizer_path(tokenizer)).num_ids
    size, notes = _vocabulary(needed, config, given, f"the ids of {Path(tokenizer).name}")
    return OwnData(overrides={**made, **size}, notes=notes)


def _texts(path: Path, config: RunConfig, given: Mapping[str, Any]) -> OwnData:
    """Return texts as a source: the key of the text, and an end of each document where there are several."""
    made: dict[str, Any] = {"data.source": "text", "data.path": str(path.resolve())}
    tokenizer = str(given.get("data.tokenizer", BYTES))
    opened = open_tokenizer(tokenizer_path(tokenizer))
    if tokenizer != BYTES:
        made["data.tokenizer"] = tokenizer
    if "data.text_key" not in given and (key := _text_key(path)) is not None:
        made["data.text_key"] = key
    needed, why = opened.num_ids, f"the ids of {opened.name}"
    several = path.is_dir() or path.suffix in (*LINES, PARQUET)
    end = end_token(tokenizer) if several and "data.end_of_document" not in given else None
    if end is not None:
        made["data.end_of_document"] = end
        needed, why = max(needed, opened.end_of_document(end) + 1), f"{why} and the end of a document"
    size, notes = _vocabulary(needed, config, given, why)
    return OwnData(overrides={**made, **size}, notes=(*notes, *_unused(opened, needed, config, size)))


def _unused(opened: Tokenizer, needed: int, config: RunConfig, size: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if the tokenizer uses a small part of the model's vocabulary."""
    known = config.model.sizes.num_token_ids
    if not size and needed < _FEW * known:
        yield (
            f"{opened.name} uses {needed} of the model's {known:,} token ids; the model's own tokenizer: "
            "--set data.tokenizer=FOLDER"
        )


def _vocabulary(
    needed: int, config: RunConfig, given: Mapping[str, Any], why: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the override that makes a vocabulary large enough, and a note of it; nothing if it is."""
    known = config.model.sizes.num_token_ids
    if needed <= known or "model.vocab_size" in given:
        return {}, ()
    return {"model.vocab_size": needed}, (f"model.vocab_size is {needed}, not {known}: {why}",)


def _text_key(path: Path) -> str | None:
    """Return the key or column of the text, if it is not "text" and only one may be meant."""
    if path.is_dir():
        path = next((each for each in sorted(path.rglob("*")) if each.suffix in (*LINES, PARQUET)), path)
    if path.suffix == PARQUET:
        names = text_columns(path)
    elif path.suffix in LINES:
        names = [key for key, value in _first_line(path).items() if isinstance(value, str)]
    else:
        return None
    return names[0] if len(names) == 1 and names != ["text"] else None


def _is_conversation(path: Path) -> bool:
    keys = _first_line(path).keys()
    forms = ({"messages"}, {"prompt", "completion"}, {"instruction", "output"})
    return "text" not in keys and any(form <= keys for form in forms)


def _first_line(path: Path) -> Mapping[str, Any]:
    """Return the first object of a file of JSON lines; empty if it cannot be read, which is said later."""
    try:
        with path.open("rb") as file:
            line = next(
                (line for line in iter(lambda: file.readline(_MOST_LOOKED_AT), b"") if line.strip()), b""
            )
        record = json.loads(line)
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
