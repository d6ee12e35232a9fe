"""Generate or read the batches of a run, and write token files and image files.

A batch is a dict of numpy arrays: the whole fleet's batch, or some of its rows. For given data it is a pure
function of seed, step and split.
Imports: `config`, `children`, `errors`, numpy, pydantic; `tokenizers` and `jinja2` only for a model's
tokenizer. No jax. Imported by: `training`, `cli`.
"""

from __future__ import annotations

from pathlib import Path

from .. import config as _config
from ._images import ImageFiles as ImageFiles
from ._images import LabelledImages as LabelledImages
from ._images import idx_parts as _idx_parts
from ._images import write_images as write_images
from ._images import write_sample_images as write_sample_images
from ._instructions import PackedConversations as PackedConversations
from ._instructions import open_instructions as _open_instructions
from ._order import ALL as ALL
from ._order import LineRows as LineRows
from ._order import RegressionRows as RegressionRows
from ._order import Rows as Rows
from ._order import Split as Split
from ._texts import BYTES as _BYTES
from ._texts import Tokenizer as Tokenizer
from ._texts import open_tokenizer as open_tokenizer
from ._tokenize import tokenize as tokenize
from ._tokens import InputMetadata as InputMetadata
from ._tokens import RandomTokens as RandomTokens
from ._tokens import TokenFileMetadata as TokenFileMetadata
from ._tokens import TokenWindows as TokenWindows
from ._tokens import check_metadata as _check_metadata
from ._tokens import data_identity as data_identity
from ._tokens import identity_difference as identity_difference
from ._tokens import read_metadata as read_metadata
from ._tokens import stdlib_parts as _stdlib_parts
from ._tokens import token_file_parts as _token_file_parts

Dataset = (
    RegressionRows
    | LineRows
    | LabelledImages
    | ImageFiles
    | RandomTokens
    | TokenWindows
    | PackedConversations
)
"""Each has `batch`, whole or some of its rows; `RandomTokens` and `TokenWindows` also `unigram_entropy_nats`
and `decode`."""


def open_data(config: _config.RunConfig) -> Dataset:
    """Return the data set of `config`.

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
        parts, batches = _idx_parts(Path(data.folder)), config.evaluation.batches
        return ImageFiles(parts=parts, seed=seed, rows=rows, side=side, evaluation_batches=batches)
    if model.takes == "rows":
        (dim,) = model.sizes.input_shape
        return RegressionRows(seed=seed, rows=rows, dim=dim, has_answer=model.has_answer)
    return _open_tokens(config)


def _open_tokens(config: _config.RunConfig) -> RandomTokens | TokenWindows | PackedConversations:
    data, batch, vocab_size = config.data, config.batch, config.model.sizes.num_token_ids
    sizes = {"seed": config.seed, "sequences": batch.sequences, "sequence_length": batch.sequence_length}
    sizes["vocab_size"] = vocab_size
    if isinstance(data, _config.InstructionData):
        return _open_instructions(data, **sizes)
    if isinstance(data, _config.StdlibData):
        parts = _stdlib_parts(data.held_out_fraction)
        return TokenWindows(name=data.source, parts=parts, is_bytes=True, order=data.order, **sizes)
    if not isinstance(data, _config.TokenFileData):
        return RandomTokens(**sizes)
    parts, metadata = _token_file_parts(data), read_metadata(Path(data.path))
    if metadata is not None:
        _check_metadata(data, metadata, vocab_size)
    return TokenWindows(
        name=data.path,
        parts=parts,
        is_bytes=metadata is not None and metadata.tokenizer == _BYTES,
        order=data.order,
        end_of_document=data.end_of_document,
        **sizes,
    )
