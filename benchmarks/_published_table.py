"""Tables of published runs, read into the columns of the survey; on demand without what was measured."""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from _plan_rows import MEGATRON_COLUMNS, MEGATRON_VOCABULARY
from _sweep_program import MEGATRON

Row = Mapping[str, str]
COLUMNS = [
    "id",
    "model",
    "params_b",
    "n_layers",
    "d_model",
    "n_heads",
    "n_kv_heads",
    "d_ff",
    "gated_mlp",
    "vocab",
    "seq_len",
    "moe",
    "accelerator",
    "n_devices",
    "devices_per_node",
    "precision",
    "optimizer",
    "sharding",
    "dp",
    "fsdp",
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "micro_batch_per_device",
    "global_batch_seqs",
    "act_ckpt",
    "attention_impl",
    "step_time_s",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "peak_mem_gib_per_device",
    "notes",
]
# What was measured: no part of a prediction, and not to be read where a row is sealed.
MEASURED = (
    "step_time_s",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "hfu",
    "peak_mem_gib_per_device",
)
INPUTS = ("source", "date", *(column for column in COLUMNS if column not in MEASURED))

# vTrain's columns, and the survey's. Its runs are Megatron-DeepSpeed's with full recomputation, on A100s
# (github.com/VIA-Research/vTrain); the vocabulary is GPT-2's, padded.
_VTRAIN = {
    "gpus": "n_devices",
    "batch": "global_batch_seqs",
    "mbs": "micro_batch_per_device",
    "width": "d_model",
    "heads": "n_heads",
    "layers": "n_layers",
    "sequence": "seq_len",
    "tp": "tp",
    "dp": "dp",
    "pp": "pp",
}
_VTRAIN_SHARED = {
    "source": "VIA-Research/vTrain",
    "gated_mlp": "no",
    "vocab": str(MEGATRON_VOCABULARY),
    "accelerator": f"{MEGATRON.chip}-SXM",
    "devices_per_node": "8",
    "precision": "fp16",
    "sharding": "DDP",
    "act_ckpt": "full",
}


def rows_of(path: Path, *, blind: bool = False) -> list[dict[str, str]]:
    """Return the rows of a CSV, or the `[[run]]` of a TOML file, in the survey's columns.

    A TOML file's table `[every]` holds cells of all its rows. vTrain's are translated, and numbered as they
    stand. `blind`: nothing is kept of a row but what goes into its prediction (`INPUTS`).
    """
    kept = {*INPUTS, *(MEGATRON_COLUMNS[name] for name in _VTRAIN)} if blind else None
    if path.suffix == ".toml":
        told = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = [{**told.get("every", {}), **entry} for entry in told["run"]]
        return [{key: str(v) for key, v in row.items() if kept is None or key in kept} for row in entries]
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            {key: value or "" for key, value in row.items() if key and (kept is None or key in kept)}
            for row in csv.DictReader(file)
        ]
    return [
        _from_vtrain(path, number, row) if MEGATRON_COLUMNS["gpus"] in row else row
        for number, row in enumerate(rows, 1)
    ]


def _from_vtrain(path: Path, number: int, row: Mapping[str, str]) -> dict[str, str]:
    found = {ours: row[MEGATRON_COLUMNS[name]] for name, ours in _VTRAIN.items()}
    milliseconds = row.get(MEGATRON_COLUMNS["milliseconds"])
    measured = {"step_time_s": str(float(milliseconds) / 1e3)} if milliseconds else {}
    return {
        **_VTRAIN_SHARED,
        **found,
        "id": f"{path.stem.replace('_', '')}-{number:03}",
        "d_ff": str(4 * int(found["d_model"])),
        **measured,
    }


def configuration_of(row: Row) -> tuple[str, ...]:
    """Return what makes two rows of one source one configuration: all but date, figures and notes."""
    told = [column for column in COLUMNS if column not in ("id", "notes", *MEASURED)]
    return (row.get("source", ""), *((row.get(column) or "") for column in told))


def release_of(row: Row) -> str:
    """Return the release of its source's software that a row's notes name; its date where they name none.

    >>> release_of({"notes": "NeMo container 26.04.01; Pre-Training", "date": "2026-04"})
    '26.04.01'
    """
    found = re.search(r"\bcontainer (\d+(?:\.\d+)+)", row.get("notes") or "")
    return found[1] if found else row.get("date") or ""


def source_of(row: Row) -> str:
    """The id without its number."""
    return row["id"].rpartition("-")[0] or row["id"]
