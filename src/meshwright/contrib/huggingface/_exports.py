"""Register the formats of `meshwright export` that other libraries load."""

from __future__ import annotations

from pathlib import Path

from meshwright.trainer.checkpoint import Found, StoredArray
from meshwright.trainer.loop import config_of

from ._export_model import export_huggingface
from ._first_weights import base_of
from ._peft import export_peft


def model_folder(found: Found, run: Path, to: Path) -> dict[str, StoredArray]:
    """Write a checkpoint of a run as the folder of a Hugging Face model; return its arrays by name."""
    return export_huggingface(found, config_of(run), to)


def adapter_folder(found: Found, run: Path, to: Path) -> dict[str, StoredArray]:
    """Write the adapters of a checkpoint as PEFT loads them; return its arrays by name."""
    base = base_of(run)
    began = {} if base is None else {"base": base.folder, "family": base.model_type}
    return export_peft(found, config_of(run), to, **began)
