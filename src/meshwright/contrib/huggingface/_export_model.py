"""Write the parameters of a checkpoint as the folder of a Hugging Face model.

Used by: `_exports`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from meshwright.config import RunConfig, TransformerModel
from meshwright.contrib.hub import huggingface_of_model
from meshwright.errors import InputError
from meshwright.trainer.checkpoint import Found, StoredArray

from ._checkpoint_parameters import Parameters
from ._peft import Merged
from ._weight_files import write_files
from ._weight_names import to_huggingface, weights_of


def export_huggingface(found: Found, config: RunConfig, folder: Path) -> dict[str, StoredArray]:
    """Write a checkpoint's parameters and their `config.json`; return the arrays written.

    The adapters of a run with `lora` are merged into its parameters.

    Host memory: the three largest arrays, and one file of 5 GB.

    Raises:
        InputError: the model is of no known family, or the folder cannot be written.
    """
    if not isinstance(config.model, TransformerModel):
        raise InputError(
            f"{config.name} is a {config.model.kind} model: no Hugging Face family has it",
            hint="leave --format out",
        )
    tree = huggingface_of_model(config.model, config.batch.sequence_length)
    weights = weights_of(config.model.model_copy(update={"mtp_layers": 0}), tree["model_type"])
    parameters = Parameters(found, "parameters", unrolled=config.model.unroll)
    if config.lora.rank is not None:
        parameters = Merged(found, config)
    written: dict[str, StoredArray] = {}

    def noted() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in to_huggingface(weights, parameters):
            written[name] = StoredArray(path=name, shape=array.shape, dtype=str(array.dtype))
            yield name, array

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, noted())
        (folder / "config.json").write_text(json.dumps({**tree, "dtype": "float32"}, indent=1), "utf-8")
    except OSError as refused:
        raise InputError(
            f"cannot write {folder}: {refused.strerror}", hint="name a folder that can be made and has room"
        ) from refused
    return written
