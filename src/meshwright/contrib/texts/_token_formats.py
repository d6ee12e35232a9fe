"""Open the token files of each format, and check them: raw, Megatron-LM's, llm.c's and datatrove's.

All numbers are little-endian.

* `raw`: ids and nothing else.
* `megatron`: `X.bin` holds the ids; `X.idx` begins with 34 bytes: "MMIDIDX" and two zeros, the version (8
  bytes, 1), a code for the type of an id (1 byte), and the counts of sequences and of document indices (8
  bytes each). The lengths of the sequences follow (4 bytes each), the bytes of `X.bin` at which they begin (8
  bytes each), and for each document the first of its sequences, with their count behind the last (8 bytes
  each). Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
* `llm.c`: 256 integers of 4 bytes, of which the first three are a magic number, a version and the count of
  ids; then the ids, of a type that the magic number says. Source: karpathy/llm.c, dev/data/data_common.py.
* `datatrove`: `X.ds` is raw. `X.ds.index` holds the number of ids up to the end of each document, 8 bytes
  each. `X.ds.metadata` begins with the tokenizer's name, perhaps followed by "|" and the bytes of an id.
  Source: huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.config import TYPED_FORMATS, TokenFormat
from meshwright.errors import InputError
from meshwright.files import read_text, reason
from meshwright.trainer.data import DocumentEnds, JoinedEnds, TokenFile, TokenFiles

from ._metadata import metadata_path, read_metadata
from ._widths import shown_dtype

ENDINGS: dict[TokenFormat, str] = {"raw": ".bin", "megatron": ".idx", "llm.c": ".bin", "datatrove": ".ds"}
_AT_ONCE = 1 << 20  # entries of an index that are checked at a time
_AGAIN = "copy it again, or make it again"
MOST_METADATA_BYTES = 2**20
_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_FLOATS = {6: "float64", 7: "float32"}
_LLM_C_HEADER_BYTES = 1024
_LLM_C = {20240520: (1, "<u2", "gpt-2"), 20240801: (7, "<u4", "llama-3")}
"""Magic number: version, type of an id, tokenizer."""
_LLM_C_EVALUATION = 20240522


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFile:
    """The tokens of one file; `ends` and `tokenizer` if the format says them, else None and ""."""

    tokens: TokenFile
    ends: DocumentEnds | None = None
    tokenizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedFiles:
    """The tokens of several files; `ends` is None unless each file says where its documents end."""

    tokens: TokenFiles
    ends: JoinedEnds | None
    tokenizers: frozenset[str]


def token_paths(text: str, form: TokenFormat) -> list[Path]:
    """Return the files that a path names: a file, those of a folder, or those that match a pattern.

    For Megatron the result holds the `.idx` files; `text` may also be a `.bin` file or their common prefix.

    Raises:
        InputError: there are none.
    """
    path, ending = Path(text), ENDINGS[form]
    try:
        return _paths_of(path, ending, form)
    except (OSError, ValueError, RecursionError) as wrong:  # a name too long for the system, or no pattern
        what = f"data.path = {text[:100]!r} names no files: {reason(wrong)}"
        raise InputError(what, hint="name a file, a folder, or a pattern as in data/*.bin") from wrong


def _paths_of(path: Path, ending: str, form: TokenFormat) -> list[Path]:
    if path.is_dir():
        found = sorted(each for each in path.glob(f"*{ending}") if each.is_file())
        if not found:
            raise InputError(
                f"{path} has no file that ends in {ending}, as those of format {form!r} do",
                hint="name another folder or format, or the file itself",
            )
        return found
    if form == "megatron":
        path = path.with_name(f"{path.name.removesuffix('.bin').removesuffix('.idx')}.idx")
    if path.is_file():
        return [path]
    if any(each in path.name for each in "*?[") and path.parent.is_dir():
        if found := sorted(each for each in path.parent.glob(path.name) if each.is_file()):
            return found
        raise InputError(f"no file matches {path}", hint=f"{path.parent} exists; look at the names there")
    nearest = next(folder for folder in path.absolute().parents if folder.is_dir())
    raise InputError(f"data.path: no token file {path}", hint=f"{nearest} exists")


def read_paths(paths: Sequence[Path], form: TokenFormat) -> list[Path]:
    """Return the files that are read if `paths` are: also the indices, or the ids for Megatron's indices."""
    if form == "megatron":
        return [each for path in paths for each in (path, path.with_suffix(".bin"))]
    if form == "datatrove":
        indices = [_beside(path, ".index") for path in paths]
        return [each for pair in zip(paths, indices, strict=True) for each in pair if each.is_file()]
    return list(paths)


def declared_dtype(path: Path, form: TokenFormat, vocab_size: int) -> str | None:
    """Return the type of an id that the metadata beside a file say; None for formats that say it themselves.

    Raises:
        InputError: nothing says it; the hint is the type that the bytes show.
    """
    if form in TYPED_FORMATS:
        return None
    if form == "raw" and (metadata := read_metadata(path)) is not None:
        return metadata.dtype
    if form == "datatrove" and (size := _datatrove_id(path)[1]):
        return "uint16" if size == 2 else "uint32"
    beside = _beside(path, ".metadata") if form == "datatrove" else metadata_path(path)
    raise InputError(
        f"data.dtype is missing, and no {beside.name} beside {path} says the type of its ids",
        hint=f'set data.dtype = "{shown_dtype(path, vocab_size)}", as its bytes show',
    )


def open_files(paths: Sequence[Path], form: TokenFormat, dtype: str | None) -> OpenedFiles:
    """Open the files of one source and check them against their format.

    Args:
        dtype: the type of an id, for formats that do not say it.

    Raises:
        InputError: a file is empty, cut short, of another format, or does not match its index; or the files
            differ in the type of an id.
    """
    if form == "megatron":
        opened = [_open_megatron(path) for path in paths]
    elif form == "llm.c":
        opened = [_open_llm_c(path) for path in paths]
    else:
        assert dtype is not None, "the configuration names the type"
        make = _open_datatrove if form == "datatrove" else _open_raw
        opened = [make(path, np.dtype(dtype).newbyteorder("<")) for path in paths]
    first = opened[0].tokens
    for other in opened:
        if other.tokens.dtype != first.dtype:
            raise InputError(
                f"{first.path} holds {first.dtype.name}, and {other.tokens.path} {other.tokens.dtype.name}",
                hint="put files of different types into sources of their own, in a mixture",
            )
    ends = [each.ends for each in opened if each.ends is not None]
    return OpenedFiles(
        tokens=TokenFiles([each.tokens for each in opened]),
        ends=JoinedEnds(ends) if len(ends) == len(opened) else None,
        tokenizers=frozenset(each.tokenizer for each in opened if each.tokenizer),
    )


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _open_raw(path: Path, dtype: np.dtype) -> OpenedFile:
    _refuse_empty(path, f"write tokens to it as {dtype.name}")
    if (found := other_format(path)) is not None:
        what, form = found
        raise InputError(f"{path} is no raw file of tokens: {what}", hint=f'use data.format = "{form}"')
    return OpenedFile(tokens=_whole(path, dtype))


def other_format(path: Path) -> tuple[str, TokenFormat] | None:
    """Return what shows that a file is of another format than raw, and that format."""
    head = _head(path, 12)
    if len(head) == 12:
        magic, version, count = struct.unpack("<3i", head)
        known = _LLM_C.get(magic)
        if known is not None and version == known[0] and count > 0:
            return f"it begins with llm.c's header (magic {magic})", "llm.c"
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file() and _head(index, len(_MEGATRON)) == _MEGATRON:
        return f"{index.name} beside it is Megatron's index", "megatron"
    return None


def _head(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, or all if there are fewer."""
    return TokenFile(path, np.dtype("u1"))[:count].tobytes()


def _whole(path: Path, dtype: np.dtype) -> TokenFile:
    """Open a file of ids and nothing else."""
    num_bytes = path.stat().st_size
    if num_bytes % dtype.itemsize:
        fits = [name for name in ("uint16", "int32", "uint32") if num_bytes % np.dtype(name).itemsize == 0]
        raise InputError(
            f"{path}: {num_bytes} bytes are no whole number of {dtype.name} tokens ({dtype.itemsize} bytes)",
            hint=f"data.dtype may be {' or '.join(fits)}" if fits else "the file is cut short; copy it again",
        )
    return TokenFile(path, dtype)


def _refuse_empty(path: Path, hint: str) -> None:
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty", hint=hint)


def _open_llm_c(path: Path) -> OpenedFile:
    _refuse_empty(path, _AGAIN)
    num_bytes = path.stat().st_size
    if num_bytes < _LLM_C_HEADER_BYTES:
        raise InputError(
            f"{path} is cut short: {num_bytes} bytes, and llm.c's header has {_LLM_C_HEADER_BYTES}",
            hint=_AGAIN,
        )
    magic, version, count = TokenFile(path, np.dtype("<i4"))[:3].tolist()
    if magic == _LLM_C_EVALUATION:
        raise InputError(
            f"{path} is llm.c's file of an evaluation with choices (magic {magic}), not of text",
            hint="name a file of text, as in fineweb_train_*.bin",
        )
    if magic not in _LLM_C:
        raise InputError(
            f"{path} begins with {magic}, and llm.c's files with {' or '.join(map(str, _LLM_C))}",
            hint='it is of another format; for ids and nothing else use data.format = "raw"',
        )
    known_version, dtype, tokenizer = _LLM_C[magic]
    if version != known_version:
        raise InputError(
            f"{path} has version {version}; with magic {magic} version {known_version} is read", hint=_AGAIN
        )
    wanted = _LLM_C_HEADER_BYTES + count * np.dtype(dtype).itemsize
    if count < 1 or num_bytes != wanted:
        raise InputError(
            f"{path} has {num_bytes} bytes, and its header says {count} tokens of {np.dtype(dtype).name}, "
            f"{wanted} bytes with the header",
            hint=_AGAIN,
        )
    tokens = TokenFile(path, np.dtype(dtype), _LLM_C_HEADER_BYTES)
    return OpenedFile(tokens=tokens, tokenizer=f"llm.c's {tokenizer}")


def _open_datatrove(path: Path, dtype: np.dtype) -> OpenedFile:
    _refuse_empty(path, _AGAIN)
    if (losses := _beside(path, ".loss")).is_file():
        raise InputError(
            f"{losses} masks the loss of some tokens, and such masks are not applied",
            hint="make the tokens without save_loss_metadata, or remove the file to train on all tokens",
        )
    tokens, tokenizer, ends = _whole(path, dtype), _datatrove_tokenizer(path, dtype), None
    if (index := _beside(path, ".index")).is_file():
        _refuse_empty(index, _AGAIN)
        if index.stat().st_size % 8:
            raise InputError(
                f"{index}: {index.stat().st_size} bytes are no whole number of ends of 8 bytes", hint=_AGAIN
            )
        places = TokenFile(index, np.dtype("<u8"))
        _check_ascending(places, index, "ends of documents")
        last = places.item(len(places) - 1)
        if last != len(tokens):
            beyond = "beyond" if last > len(tokens) else "before"
            fits = [
                name for name in ("uint16", "uint32") if last * np.dtype(name).itemsize == path.stat().st_size
            ]
            raise InputError(
                f"{index}: the last document ends at token {last}, {beyond} the {len(tokens)} tokens "
                f"({dtype.name}) of {path.name}",
                hint=f'use data.dtype = "{fits[0]}"' if fits else "copy both again, or make them again",
            )
        ends = DocumentEnds(places, len(tokens))
    return OpenedFile(tokens=tokens, ends=ends, tokenizer=tokenizer)


def _datatrove_tokenizer(path: Path, dtype: np.dtype) -> str:
    """Return the tokenizer that the metadata beside a file name, or ""; check the size of an id."""
    name, size = _datatrove_id(path)
    if size and size != dtype.itemsize:
        beside = _beside(path, ".metadata")
        raise InputError(
            f"{beside} says {size} bytes an id, and data.dtype = {dtype.name!r} has {dtype.itemsize}",
            hint=f'use data.dtype = "{"uint16" if size == 2 else "uint32"}"',
        )
    return name


def _datatrove_id(path: Path) -> tuple[str, int]:
    """Return the tokenizer and the bytes of an id by the metadata beside a file; "" and 0 if not said."""
    beside = _beside(path, ".metadata")
    if not beside.is_file():
        return "", 0
    try:
        first = read_text(beside, MOST_METADATA_BYTES).partition("\n")[0]
    except (OSError, ValueError) as broken:
        raise InputError(f"cannot read {beside}: {reason(broken)}", hint=_AGAIN) from broken
    name, *rest = first.split("|")
    size = int(rest[-1]) if rest and re.fullmatch(r"[0-9]{1,3}", rest[-1]) else 0
    return "" if name == "Unknown Tokenizer" else name, size


def _open_megatron(path: Path) -> OpenedFile:
    ids = path.with_suffix(".bin")
    if not ids.is_file():
        raise InputError(f"{path} is an index, and {ids.name} is not beside it", hint="copy both files")
    dtype, num_sequences, num_documents = _megatron_header(path)
    _refuse_empty(ids, _AGAIN)
    first = _MEGATRON_HEADER.size
    lengths = TokenFile(path, np.dtype("<i4"), first, num_sequences)
    begins = TokenFile(path, np.dtype("<i8"), first + 4 * num_sequences, num_sequences)
    documents = TokenFile(path, np.dtype("<i8"), first + 12 * num_sequences, num_documents)
    num_bytes = _checked_begins(path, lengths, begins, dtype.itemsize)
    if num_bytes != ids.stat().st_size:
        beyond = "beyond" if num_bytes > ids.stat().st_size else "before"
        raise InputError(
            f"{path}: the last sequence ends at byte {num_bytes}, {beyond} the {ids.stat().st_size} bytes of "
            f"{ids.name}",
            hint="copy both again, or make them again",
        )
    _check_ascending(documents, path, "documents")
    if (documents.item(0), documents.item(num_documents - 1)) != (0, num_sequences):
        raise InputError(
            f"{path}: its documents are sequences {documents.item(0)} to "
            f"{documents.item(num_documents - 1)} of 0 to {num_sequences}",
            hint=_AGAIN,
        )
    tokens = _whole(ids, dtype)
    ends = DocumentEnds(begins, len(tokens), documents=documents, itemsize=dtype.itemsize)
    return OpenedFile(tokens=tokens, ends=ends)


def _megatron_header(path: Path) -> tuple[np.dtype, int, int]:
    """Return the type of an id, and the numbers of sequences and of document indices; check the size."""
    num_bytes, header = path.stat().st_size, _MEGATRON_HEADER
    _refuse_empty(path, _AGAIN)
    raw = _head(path, header.size)
    if not raw.startswith(_MEGATRON):
        raise InputError(
            f"{path} begins with {raw[: len(_MEGATRON)]!r}, and Megatron's index with {_MEGATRON!r}",
            hint="it is another file, or an index of Megatron before its core, which is not read",
        )
    if len(raw) < header.size:
        raise InputError(
            f"{path} is cut short: {num_bytes} bytes, and its header has {header.size}", hint=_AGAIN
        )
    _, version, code, num_sequences, num_documents = header.unpack(raw)
    if version != 1:
        raise InputError(f"{path} has version {version}, and version 1 is read", hint=_AGAIN)
    if code not in _MEGATRON_TYPES:
        what = _MEGATRON_FLOATS.get(code, "unknown")
        raise InputError(
            f"{path}: its type of an id has code {code} ({what}), which is no type of token ids",
            hint="make the tokens again, as Megatron's preprocess_data.py does",
        )
    if num_sequences == 0 or num_documents < 2:
        raise InputError(f"{path} holds no document", hint=_AGAIN)
    wanted = header.size + 12 * num_sequences + 8 * num_documents
    if num_bytes == wanted + num_sequences:
        raise InputError(
            f"{path} has a mode for each sequence, as multimodal data have; they are not read",
            hint="make the tokens from text alone",
        )
    if num_bytes != wanted:
        state = "is cut short" if num_bytes < wanted else "is too long"
        raise InputError(
            f"{path} {state}: {num_bytes} bytes, and {num_sequences} sequences with {num_documents} document "
            f"indices need {wanted}",
            hint=_AGAIN,
        )
    return np.dtype(_MEGATRON_TYPES[code]), num_sequences, num_documents


def _checked_begins(path: Path, lengths: TokenFile, begins: TokenFile, itemsize: int) -> int:
    """Return the byte at which the last sequence ends, after a check that each begins where one ended."""
    end = 0
    for start in range(0, len(lengths), _AT_ONCE):
        sizes = lengths[start : start + _AT_ONCE].astype(np.int64) * itemsize
        wanted = end + np.concatenate([[0], np.cumsum(sizes)])
        wrong = np.flatnonzero((begins[start : start + _AT_ONCE] != wanted[:-1]) | (sizes < 0))
        if wrong.size:
            place = int(wrong[0])
            raise InputError(
                f"{path}: sequence {start + place} begins at byte {begins.item(start + place)} with "
                f"{lengths.item(start + place)} tokens, and the one before ends at {int(wanted[place])}",
                hint=_AGAIN,
            )
        end = int(wanted[-1])
    return end


def _check_ascending(numbers: TokenFile, path: Path, what: str) -> None:
    before = 0
    for start in range(0, len(numbers), _AT_ONCE):
        some = np.concatenate([[before], numbers[start : start + _AT_ONCE].astype(np.int64)])
        if (wrong := np.flatnonzero(some[1:] < some[:-1])).size:
            place = int(wrong[0])
            raise InputError(
                f"{path}: its {what} do not ascend: {some[place + 1]} follows {some[place]}", hint=_AGAIN
            )
        before = int(some[-1])
