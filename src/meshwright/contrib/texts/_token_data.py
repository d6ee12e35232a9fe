"""Open the tokens of a run: files of tokens, mixtures of them, texts and conversations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from meshwright.config import InstructionData, MixtureData, RunConfig, TextData, TokenFileData
from meshwright.errors import InputError
from meshwright.trainer.data import BYTES, Dataset, OnProgress, TokenWindows

from ._instructions import open_instructions
from ._metadata import check_metadata, read_metadata
from ._mixture import MixedWindows, cycle_counts
from ._mixture_file import check_tokenizers, read_mixture, seed_of
from ._text_source import text_paths, tokens_of_texts
from ._token_formats import declared_dtype, open_files, read_paths, token_paths
from ._widths import check_width

FileData = TextData | TokenFileData | InstructionData | MixtureData


def open_tokens(config: RunConfig, on_progress: OnProgress) -> Dataset:
    """Return the data set of a run that reads texts or tokens from files.

    Args:
        on_progress: called with bytes done and all bytes while texts are tokenized, which is done once.

    Raises:
        InputError: a file is missing, short or of another type.
    """
    data, batch = config.data, config.batch
    sizes: dict[str, Any] = {"seed": config.seed, "sequences": batch.sequences}
    sizes["sequence_length"] = batch.sequence_length
    sizes["vocab_size"] = config.model.sizes.num_token_ids
    if isinstance(data, InstructionData):
        return open_instructions(data, **sizes)
    if isinstance(data, TextData):
        return _open_source(tokens_of_texts(data, on_progress), sizes, data.path)
    if isinstance(data, TokenFileData):
        source = _open_source(data, sizes)
        check_tokenizers([source])
        return source
    assert isinstance(data, MixtureData), data
    listed = read_mixture(data)
    opened = tuple(
        _open_source(each.data, {**sizes, "seed": seed_of(config.seed, number)})
        for number, each in enumerate(listed)
    )
    check_tokenizers(opened)
    counts = cycle_counts(data.path, [each.weight for each in listed])
    return MixedWindows(sources=opened, counts=counts, seed=config.seed, sequences=batch.sequences)


def files_of(data: FileData) -> list[Path]:
    """Return the files that data are read from, in order; of a mixture its own file first.

    Raises:
        InputError: there are none, or the file of a mixture cannot be read.
    """
    if isinstance(data, TextData):
        return list(text_paths(data))
    if isinstance(data, TokenFileData):
        return read_paths(token_paths(data.path, data.format), data.format)
    if isinstance(data, InstructionData):
        return [Path(data.path)]
    return [Path(data.path), *(path for source in read_mixture(data) for path in files_of(source.data))]


def _open_source(data: TokenFileData, sizes: dict[str, Any], name: str = "") -> TokenWindows:
    """Open token files; `name` is what messages call them, their path by default."""
    paths = token_paths(data.path, data.format)
    dtype = data.dtype or declared_dtype(paths[0], data.format, sizes["vocab_size"])
    opened, tokens_by = open_files(paths, data.format, dtype), set[tuple[str, str]]()
    for path in paths if data.format == "raw" else ():
        if (metadata := read_metadata(path)) is not None:
            check_metadata(path, metadata, dtype, data.end_of_document, sizes["vocab_size"])
            sha256 = metadata.tokenizer_sha256
            made_by = f"{metadata.tokenizer} ({sha256[:12]})" if sha256 else metadata.tokenizer
            tokens_by.add((data.format, made_by))
        else:
            assert dtype is not None, "raw files need a type"
            check_width(path, dtype, sizes["vocab_size"])
            tokens_by.add((data.format, ""))
    whole, by_index = opened.tokens, data.documents == "packed" and data.end_of_document is None
    if by_index and opened.ends is None:
        raise InputError(
            f"{data.path}: data.documents = 'packed', and no index says where documents end",
            hint="set data.end_of_document, or put the .ds.index files beside the .ds files",
        )
    cut = len(whole) - math.ceil(len(whole) * data.held_out_fraction)
    return TokenWindows(
        name=name or data.path,
        parts={"train": whole.part(0, cut), "held-out": whole.part(cut, len(whole))},
        is_bytes=tokens_by == {("raw", BYTES)},
        order=data.order,
        end_of_document=data.end_of_document,
        ends=opened.ends if by_index else None,
        tokenizers=frozenset(tokens_by | {(data.format, name) for name in opened.tokenizers}) - {("raw", "")},
        **sizes,
    )
