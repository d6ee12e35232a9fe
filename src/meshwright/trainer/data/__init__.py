"""Generate or read the batches of a run, and write image files.

A batch is a dict of numpy arrays: the whole fleet's batch, or some of its rows. For given data it is a pure
function of seed, step and split.
What reads texts is a room outside the core (`text_room`).
Imports: `config`, `registry`, `files`, `errors`, numpy, pydantic. No jax. Imported by: `loop`, `api`, `cli`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from meshwright import config as _config
from meshwright.errors import InputError

from ._identity import data_identity as data_identity
from ._identity import files_identity as files_identity
from ._identity import identity_difference as identity_difference
from ._identity import stdlib_parts as stdlib_parts
from ._images import ImageFiles as ImageFiles
from ._images import LabelledImages as LabelledImages
from ._images import idx_parts as idx_parts
from ._images import write_images as write_images
from ._images import write_sample_images as write_sample_images
from ._metadata import DTYPES as DTYPES
from ._metadata import TOKEN_SCHEMA as TOKEN_SCHEMA
from ._metadata import InputMetadata as InputMetadata
from ._metadata import TokenFileMetadata as TokenFileMetadata
from ._metadata import check_metadata as _check_metadata
from ._metadata import metadata_path as metadata_path
from ._metadata import read_metadata as read_metadata
from ._mixture import MixedWindows as MixedWindows
from ._mixture import check_tokenizers as _check_tokenizers
from ._mixture import cycle_counts as _cycle_counts
from ._mixture import read_mixture as _read_mixture
from ._mixture import seed_of as _seed_of
from ._order import ALL as ALL
from ._order import Dataset as Dataset
from ._order import LineRows as LineRows
from ._order import RegressionRows as RegressionRows
from ._order import Rows as Rows
from ._order import Split as Split
from ._order import generator as generator
from ._order import windows_at as windows_at
from ._text_room import BYTES as BYTES
from ._text_room import NUM_BYTES as NUM_BYTES
from ._text_room import ByteTokenizer as ByteTokenizer
from ._text_room import OnProgress as OnProgress
from ._text_room import Tokenizer as Tokenizer
from ._text_room import text_room as text_room
from ._token_formats import declared_dtype as _declared_dtype
from ._token_formats import open_files as _open_files
from ._token_formats import other_format as other_format
from ._token_formats import token_paths as token_paths
from ._tokens import RandomTokens as RandomTokens
from ._tokens import SourceEpochs as SourceEpochs
from ._tokens import TokenWindows as TokenWindows
from ._widths import check_width as _check_width
from ._widths import is_binary as is_binary
from ._widths import shown_dtype as shown_dtype


def _ignore_progress(done: int, total: int) -> None:
    pass


def open_data(config: _config.RunConfig, on_progress: OnProgress = _ignore_progress) -> Dataset:
    """Return the data set of `config`.

    Args:
        on_progress: called with bytes done and all bytes while texts are tokenized, which is done once.

    Raises:
        InputError: a file is missing, short or of another type, or the interpreter has no sources on disk.

    >>> from meshwright.config import load_config
    >>> batch = open_data(load_config("linear", ("batch.sequences=4",))).batch(0, "train")
    >>> {name: array.shape for name, array in batch.items()}
    {'inputs': (4, 16), 'targets': (4,)}
    """
    model, data, seed, rows = config.model, config.data, config.seed, config.batch.sequences
    if isinstance(data, _config.LineData):
        line = {"slope": data.slope, "intercept": data.intercept, "noise": data.noise}
        return LineRows(seed=seed, rows=rows, **line)
    if model.takes == "images":
        side = model.sizes.input_shape[-1]
        if not isinstance(data, _config.IdxData):
            return LabelledImages(seed=seed, rows=rows, side=side)
        parts, batches = idx_parts(Path(data.folder)), config.evaluation.batches
        return ImageFiles(parts=parts, seed=seed, rows=rows, side=side, evaluation_batches=batches)
    if model.takes == "rows":
        (dim,) = model.sizes.input_shape
        return RegressionRows(seed=seed, rows=rows, dim=dim, has_answer=model.has_answer)
    return _open_tokens(config, on_progress)


def _open_tokens(config: _config.RunConfig, on_progress: OnProgress) -> Dataset:
    data, batch, vocab_size = config.data, config.batch, config.model.sizes.num_token_ids
    sizes: dict[str, Any] = {"seed": config.seed, "sequences": batch.sequences}
    sizes["sequence_length"] = batch.sequence_length
    sizes["vocab_size"] = vocab_size
    if isinstance(data, _config.InstructionData):
        return text_room().open_instructions(data, **sizes)
    if isinstance(data, _config.StdlibData):
        parts = stdlib_parts(data.held_out_fraction)
        return TokenWindows(name=data.source, parts=parts, is_bytes=True, order=data.order, **sizes)
    if isinstance(data, _config.TextData):
        return _open_source(text_room().tokens_of_texts(data, on_progress), sizes, data.path)
    if isinstance(data, _config.TokenFileData):
        source = _open_source(data, sizes)
        _check_tokenizers([source])
        return source
    if not isinstance(data, _config.MixtureData):
        return RandomTokens(**sizes)
    listed = _read_mixture(data)
    opened = tuple(
        _open_source(each.data, {**sizes, "seed": _seed_of(config.seed, number)})
        for number, each in enumerate(listed)
    )
    _check_tokenizers(opened)
    counts = _cycle_counts(data.path, [each.weight for each in listed])
    return MixedWindows(sources=opened, counts=counts, seed=config.seed, sequences=batch.sequences)


def _open_source(data: _config.TokenFileData, sizes: dict[str, Any], name: str = "") -> TokenWindows:
    """Open token files; `name` is what messages call them, their path by default."""
    paths = token_paths(data.path, data.format)
    dtype = data.dtype or _declared_dtype(paths[0], data.format, sizes["vocab_size"])
    opened, tokens_by = _open_files(paths, data.format, dtype), set[tuple[str, str]]()
    for path in paths if data.format == "raw" else ():
        if (metadata := read_metadata(path)) is not None:
            _check_metadata(path, metadata, dtype, data.end_of_document, sizes["vocab_size"])
            sha256 = metadata.tokenizer_sha256
            made_by = f"{metadata.tokenizer} ({sha256[:12]})" if sha256 else metadata.tokenizer
            tokens_by.add((data.format, made_by))
        else:
            assert dtype is not None, "raw files need a type"
            _check_width(path, dtype, sizes["vocab_size"])
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
