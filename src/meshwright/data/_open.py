"""Open the data that a run's configuration describes."""

from __future__ import annotations

from pathlib import Path

from meshwright.config import (
    IdxData,
    LineData,
    RunConfig,
    StdlibData,
    TokenFileData,
)

from ._images import ImageFiles, LabelledImages, idx_parts
from ._order import LineRows, RegressionRows
from ._texts import BYTES
from ._token_files import check_facts, read_facts, stdlib_parts
from ._tokens import RandomTokens, TokenWindows, token_file_parts

Dataset = RegressionRows | LineRows | LabelledImages | ImageFiles | RandomTokens | TokenWindows
"""Each has `batch`, whole or some of its rows; the two of tokens also `unigram_entropy_nats` and `decode`."""


def open_data(config: RunConfig) -> Dataset:
    """Return the data set of `config`.

    Raises:
        InputError: a file is missing, short or of another type, or the interpreter has no sources on disk.
    """
    model, data, batch = config.model, config.data, config.batch
    if isinstance(data, LineData):
        return LineRows(
            seed=config.seed,
            rows=batch.sequences,
            slope=data.slope,
            intercept=data.intercept,
            noise=data.noise,
        )
    if model.takes == "images":
        return _images(config, side=model.sizes.input_shape[-1])
    if model.takes == "rows":
        (dim,) = model.sizes.input_shape
        return RegressionRows(seed=config.seed, rows=batch.sequences, dim=dim, has_answer=model.has_answer)
    is_bytes = isinstance(data, StdlibData)
    if isinstance(data, StdlibData):
        name, parts = data.source, stdlib_parts(data.held_out_fraction)
    elif isinstance(data, TokenFileData):
        name, parts = data.path, token_file_parts(data)
        facts = read_facts(Path(data.path))
        if facts is not None:
            check_facts(data, facts, model.sizes.num_token_ids)
            is_bytes = facts.tokenizer == BYTES
    else:
        return RandomTokens(
            seed=config.seed,
            sequences=batch.sequences,
            sequence_length=batch.sequence_length,
            vocab_size=model.sizes.num_token_ids,
        )
    return TokenWindows(
        name=name,
        parts=parts,
        is_bytes=is_bytes,
        seed=config.seed,
        sequences=batch.sequences,
        sequence_length=batch.sequence_length,
        vocab_size=model.sizes.num_token_ids,
        order=data.order,
        end_of_document=data.end_of_document if isinstance(data, TokenFileData) else None,
    )


def _images(config: RunConfig, side: int) -> LabelledImages | ImageFiles:
    data, rows = config.data, config.batch.sequences
    if not isinstance(data, IdxData):
        return LabelledImages(seed=config.seed, rows=rows, side=side)
    return ImageFiles(
        parts=idx_parts(Path(data.folder)),
        seed=config.seed,
        rows=rows,
        side=side,
        evaluation_batches=config.evaluation.batches,
    )
