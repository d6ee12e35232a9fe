"""Let a run read somebody's own data, and open the data of a run before anything is compiled.

Imports: `trainer.data`, `programs`. Used by: `_train`, `_planned_run`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config import Overrides, RunConfig, TextData, override_pairs
from meshwright.programs import run_named
from meshwright.results import Phase
from meshwright.trainer.data import Dataset, TokenReader, open_data, text_room
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.trainer.launch import SingleProcess

TOKENIZER = "data.tokenizer"
LARGE_BYTES = 2**26  # of texts, from which the progress of tokenizing is reported


def config_with_data(
    verb: str,
    config: str | RunConfig,
    data: str | Path | None,
    overrides: Overrides,
    begin_from: str | Path | None = None,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run that reads the data at a path, and what was decided about them, in words.

    Args:
        data: as for `train`; None leaves those of the configuration.
        overrides: of the user's own; what they say of the data goes before what is found.
        begin_from: the folder of a model, whose tokenizer is used if it has one.

    Raises:
        InputError: as for `run_named` and `own_data`.
    """
    if data is None:
        return run_named(verb, config, overrides), ()
    given: dict[str, Any] = dict(override_pairs(overrides))
    if begin_from is not None and TOKENIZER not in given and Path(begin_from, "tokenizer.json").is_file():
        given[TOKENIZER] = str(begin_from)
    others = {key: value for key, value in given.items() if not key.startswith("data.")}
    found = text_room().own_data(str(data), run_named(verb, config, others), given)
    has_tokenizer = found.overrides["data.source"] in ("text", "instructions")
    if not has_tokenizer:
        given.pop(TOKENIZER, None)
    return run_named(verb, config, {**found.overrides, **given}), found.notes


def opened_data(peers: SingleProcess, run: RunConfig, on_event: Callable[[Phase], None]) -> Dataset:
    """Open the data of a run in each of its processes, one after the other; tokenize texts first.

    Raises:
        InputError: as `open_data`; also if a token of the first batch is outside the vocabulary.
    """
    said = -1

    def on_progress(done: int, total: int) -> None:
        nonlocal said
        tenth = 10 * done // max(total, 1) if total >= LARGE_BYTES else 0
        if isinstance(run.data, TextData) and tenth > said:
            said = tenth
            how_far = f", {format_bytes(done)} of {format_bytes(total)}" if total >= LARGE_BYTES else ""
            on_event(Phase(name=f"tokenizing {Path(run.data.path).name}{how_far}", of="reading data"))

    dataset: Dataset = peers.run_sequentially(lambda: open_data(run, on_progress))
    if isinstance(dataset, TokenReader):
        dataset.batch(0, "train")
    return dataset
