"""Generate or read the batches of a run.

A batch is a dict of numpy arrays: the whole fleet's batch, or some of its rows. For given data it is a pure
function of seed, step and split.
What reads texts, files of tokens and images are rooms outside the core (`text_room`, `image_room`).
Imports: `config`, `registry`, `files`, `errors`, numpy, pydantic. No jax. Used by: `loop`, `api`, and
those rooms.
"""

from __future__ import annotations

from typing import Any

from meshwright import config as _config

from ._data_files import DocumentEnds as DocumentEnds
from ._data_files import JoinedEnds as JoinedEnds
from ._data_files import TokenFile as TokenFile
from ._data_files import TokenFiles as TokenFiles
from ._identity import FILES as FILES
from ._identity import data_identity as data_identity
from ._identity import files_identity as files_identity
from ._identity import identity_difference as identity_difference
from ._identity import stdlib_parts as stdlib_parts
from ._order import ALL as ALL
from ._order import Dataset as Dataset
from ._order import LineRows as LineRows
from ._order import RegressionRows as RegressionRows
from ._order import Rows as Rows
from ._order import Split as Split
from ._order import fixed_generator as fixed_generator
from ._order import generator as generator
from ._order import windows_at as windows_at
from ._text_room import BYTES as BYTES
from ._text_room import NUM_BYTES as NUM_BYTES
from ._text_room import ByteTokenizer as ByteTokenizer
from ._text_room import OnProgress as OnProgress
from ._text_room import image_room as image_room
from ._text_room import text_room as text_room
from ._tokens import RandomTokens as RandomTokens
from ._tokens import SourceEpochs as SourceEpochs
from ._tokens import TokenReader as TokenReader
from ._tokens import TokenWindows as TokenWindows
from ._tokens import entropy_nats as entropy_nats


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
        return image_room().open_images(config)
    if model.takes == "rows":
        (dim,) = model.sizes.input_shape
        return RegressionRows(seed=seed, rows=rows, dim=dim, has_answer=model.has_answer)
    sizes: dict[str, Any] = {"seed": seed, "sequences": rows, "vocab_size": model.sizes.num_token_ids}
    sizes["sequence_length"] = config.batch.sequence_length
    if isinstance(data, _config.StdlibData):
        parts = stdlib_parts(data.held_out_fraction)
        return TokenWindows(name=data.source, parts=parts, is_bytes=True, order=data.order, **sizes)
    if isinstance(data, FILES):
        return text_room().open_tokens(config, on_progress)
    return RandomTokens(**sizes)
