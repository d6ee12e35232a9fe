"""Published rows as runs of ours: which can be expressed, how, and why the others cannot.

A row's columns are those of the survey of published runs: empty cells were not stated. Frameworks differ
from our step; what is taken for what is said where it is decided, and nothing is decided by a row's id.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from meshwright.config import Layout, RunConfig, TransformerModel, check_layout
from meshwright.errors import InputError
from meshwright.hardware import Chip, Fleet, Link, find_chip

Row = Mapping[str, str]
Record = TypeVar("Record", RunConfig, TransformerModel)
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
    "notes",
]
ASSUMED = tomllib.loads((Path(__file__).parent / "published_assumptions.toml").read_text())
LONGEST_STANDARD, SMALLEST_STANDARD = 16384, 0.7e9
STATE_BYTES = 16  # per parameter: float32 parameter, gradient and two moments, the least our step holds
FAR_FROM_STATED = 0.15  # a stated number of parameters further off means other dimensions
VOCAB_MULTIPLE = 64  # frameworks pad vocabularies so that they divide


class InexpressibleError(Exception):
    """Why a row is no run of ours: `args[0]`, in words that many rows share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """A row as a run of ours. `standard`: stock chip, stated remat, length and size as in the record."""

    id: str
    source: str
    config: RunConfig
    fleet: Fleet  # with the row's network
    attention_kernel: str  # as `predict` names it
    remat_stated: bool
    measured_seconds: float
    standard: bool
    notes: tuple[str, ...]


def source_of(row: Row) -> str:
    """The id without its number."""
    return row["id"].rpartition("-")[0] or row["id"]


def express(row: Row) -> Expressed:
    """The run of ours that a row comes nearest to.

    Raises:
        InexpressibleError: there is none, or the row does not say enough.
    """
    row = {column: (row.get(column) or "").strip() for column in COLUMNS}
    _refuse_other_programs(row)
    notes: list[str] = []
    fleet = _fleet(row)
    model = _model(row, notes)
    layout = _layout(
        row, fleet, _float(row["params_b"] or "0", "params_b") * 1e9 or _parameters(model), notes
    )
    batch = _batch(row, layout)
    measured = _measured(row, batch["sequences"] * batch["sequence_length"])
    remat, stated = _remat(row, notes)
    config = RunConfig.model_validate(
        {
            "name": row["id"],
            "model": model,
            "data": {"source": "synthetic"},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-4, "clip_norm": 1.0},
            "schedule": {"kind": "constant"},
            "precision": "bf16",
            "layout": str(layout),
            "remat": remat,
            "batch": batch,
            "steps": 1,
        }
    )
    try:
        check_layout(config, layout)
    except InputError as error:
        raise InexpressibleError("does not divide over its layout") from error
    standard = (
        stated
        and not any(word in row["accelerator"] for word in ASSUMED["not_stock"]["words"])
        and batch["sequence_length"] <= LONGEST_STANDARD
        and _parameters(model) >= SMALLEST_STANDARD
    )
    return Expressed(
        id=row["id"],
        source=source_of(row),
        config=config,
        fleet=fleet,
        attention_kernel="cudnn" if _CUDNN.search(row["attention_impl"].lower()) else "flash-2",
        remat_stated=stated,
        measured_seconds=measured,
        standard=standard,
        notes=tuple(notes),
    )


# Whose attention is cuDNN's; PyTorch's and the others' "flash" is FlashAttention-2 or a kernel like it.
_CUDNN = re.compile(r"cudnn|\bte\b|transformer engine")
# What our step does not do, whatever the layout: the column, what is found in it, and the reason.
_OTHER_PROGRAMS = (
    ("moe", r".", "mixture of experts"),
    ("model optimizer", r"lora|adapter", "most parameters are frozen (LoRA)"),
    ("optimizer notes", r"none in timed region|forward\+backward", "not a whole step: no optimizer in it"),
    ("model", r"\b(t5|bert|vit|mamba|diffusion)", "no decoder-only Transformer"),
    ("model notes", r"sliding|gemma", "attention with a window"),
    ("precision", r"fp8|float8|fp4|int8", "8- or 4-bit arithmetic, scaled in other or untold ways"),
    ("precision", r"^(?!.*bf16)", "precision is not bf16, or not stated"),
    (
        "precision",
        r"\(pure\)|bf16-true|stochastic rounding|bf16 weights",
        "weights and moments in bf16: our step holds them in fp32",
    ),
    ("attention_impl", r"no flash|unfused", "attention without a fused kernel"),
    ("model notes", r"unpacked|not packed", "padded sequences: real tokens were counted"),
    ("act_ckpt sharding", r"offload", "offload to the host"),
)
_OTHER_AXES = {
    "pp": "pipeline stages",
    "vp": "pipeline stages",
    "cp": "context parallelism",
    "ep": "expert parallelism",
}


def _validated(record: type[Record], fields: Mapping[str, object]) -> Record:
    try:
        return record.model_validate(fields)
    except ValidationError as error:
        raise InexpressibleError(f"our configuration refuses it: {error.errors()[0]['type']}") from error


def _refuse_other_programs(row: Row) -> None:
    for axis, reason in _OTHER_AXES.items():
        if _count(row, axis) > 1:
            raise InexpressibleError(reason)
    for columns, pattern, reason in _OTHER_PROGRAMS:
        if re.search(pattern, " ".join(row[c] for c in columns.split()).lower()):
            raise InexpressibleError(reason)


def _count(row: Row, column: str) -> int:
    """A count, 1 where it is not stated."""
    return int(_float(row[column] or "1", column))


def _float(text: str, column: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InexpressibleError(f"{column} is no number") from error


def _number(row: Row, column: str, what: str) -> int:
    if not row[column]:
        raise InexpressibleError(f"{what} not stated")
    number = _float(row[column], column)
    if number != int(number):
        raise InexpressibleError(f"{what} is not whole")
    return int(number)


def chip_of(words: str) -> Chip:
    """The catalog's chip for a row's word, what stands in parentheses left out."""
    plain = re.sub(r"\s*\(.*?\)", "", words).strip()
    if plain.startswith("TPU"):
        raise InexpressibleError("a TPU: no rates were fitted for them")
    try:
        return find_chip(ASSUMED["chips"].get(plain, plain))
    except InputError as unknown:
        raise InexpressibleError(f"the catalog has no chip {plain!r}") from unknown


def _fleet(row: Row) -> Fleet:
    chip = chip_of(row["accelerator"])
    if chip.platform != "cuda":
        raise InexpressibleError("no compiler for this chip without it, or not installed (TPU, AMD, others)")
    if "bf16" not in chip.peak_flops_per_second:
        raise InexpressibleError("the chip has no bf16")
    for network in ASSUMED["networks"]:
        if network.get("source") == source_of(row) or network.get("accelerator", "?") in row["accelerator"]:
            rate = network["bytes_per_second"]
            chip = dataclasses.replace(chip, between=Link(name="network", bytes_per_second=rate))
    devices = _number(row, "n_devices", "number of devices")
    usual = _count(row, "devices_per_node") if row["devices_per_node"] else chip.chips_per_host
    per_host = min(usual, devices)
    if devices % per_host:
        raise InexpressibleError("devices do not fill whole nodes")
    fleet = Fleet.parse(f"{devices // per_host}x{per_host}x{chip.name}")
    return dataclasses.replace(fleet, chip=chip)


def _model(row: Row, notes: list[str]) -> dict[str, object]:
    """The architecture by its dimensions: what has a gated MLP is a Llama, what has not a GPT.

    A GPT has learned positions (for ALiBi too, which costs nothing to speak of); vocabularies are padded
    to a multiple of 64; embeddings are tied where that is nearer to an exact number of
    parameters; where none is stated, a GPT's are.
    """
    sizes = {c: _number(row, c, "dimensions") for c in ("n_layers", "d_model", "n_heads", "d_ff", "vocab")}
    length = _number(row, "seq_len", "sequence length")
    gated = row["gated_mlp"] == "yes"
    if row["gated_mlp"] not in ("yes", "no"):
        raise InexpressibleError("dimensions not stated")
    model: dict[str, object] = {
        "kind": "transformer",
        "num_layers": sizes["n_layers"],
        "embed_dim": sizes["d_model"],
        "num_heads": sizes["n_heads"],
        "num_kv_heads": _count(row, "n_kv_heads") if row["n_kv_heads"] else sizes["n_heads"],
        "mlp_dim": sizes["d_ff"],
        "vocab_size": math.ceil(sizes["vocab"] / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "loss_chunk": max(n for n in range(1, 513) if length % n == 0),
    }
    if gated:
        model |= {"position": "rotary", "rope_theta": 500000.0}
    else:
        model |= {"norm": "layer", "mlp": "plain", "activation": "gelu"}
        model |= {"position": "learned", "max_positions": length}
    model["tied_embeddings"] = not gated
    told = _float(row["params_b"] or "0", "params_b") * 1e9
    if len(row["params_b"].partition(".")[2]) >= 2:  # exact enough to tell
        model["tied_embeddings"] = min(
            (True, False), key=lambda tied: abs(_parameters({**model, "tied_embeddings": tied}) - told)
        )
    notes.append("tied embeddings" if model["tied_embeddings"] else "untied embeddings")
    if told and abs(_parameters(model) / told - 1) > FAR_FROM_STATED:
        raise InexpressibleError("dimensions do not give the stated number of parameters")
    head = sizes["d_model"] / sizes["n_heads"]
    if head > 128 or head % 8:
        raise InexpressibleError("attention heads beyond our fused kernel")
    return model


def _parameters(model: dict[str, object]) -> int:
    return _validated(TransformerModel, model).num_parameters


def _layout(row: Row, fleet: Fleet, parameters: float, notes: list[str]) -> Layout:
    """Axes by the words for the sharding, and the counts where they are stated.

    ZeRO-1 and ZeRO-2 (distributed optimizer, SHARD_GRAD_OP) gather and reduce once where FSDP gathers
    twice: fsdp inside a node, over fast links, with data across nodes sends as much between nodes as they.
    """
    words = row["sharding"].lower()
    devices, tensor = fleet.num_devices, _count(row, "tp")
    if devices % tensor:
        raise InexpressibleError("its axes do not multiply to its devices")
    replicas = devices // tensor
    memory = fleet.chip.memory_bytes or math.inf
    state = STATE_BYTES * parameters / tensor
    if "nnscaler" in words or "autodist" in words or (not words and replicas > 1):
        raise InexpressibleError("layout not stated")
    if re.search(r"zero-?1|zero-?2|distributed.optimizer|shard_grad_op", words):
        fsdp = math.gcd(max(fleet.chips_per_host // tensor, 1), replicas)
        while state / fsdp > 0.8 * memory and fsdp < replicas:
            fsdp *= 2
        if replicas % fsdp:
            raise InexpressibleError("its axes do not multiply to its devices")
        if replicas > 1:
            notes.append(f"{row['sharding']} taken as fsdp={fsdp} and data={replicas // fsdp}")
    elif re.search(r"fsdp|zero-?3|full_shard|hsdp", words):
        fsdp = _count(row, "fsdp") if row["fsdp"] else replicas
    else:
        fsdp = 1
    if replicas % fsdp:
        raise InexpressibleError("its axes do not multiply to its devices")
    if state / fsdp > memory:
        raise InexpressibleError("our fp32 state does not fit its devices: the run held other formats")
    axes = (("data", replicas // fsdp), ("fsdp", fsdp), ("tensor", tensor))
    return Layout(axes=tuple(axis for axis in axes if axis[1] > 1) or (("data", 1),))


def _batch(row: Row, layout: Layout) -> dict[str, int]:
    replicas = layout.size("data") * layout.size("fsdp")
    sequences = _number(row, "global_batch_seqs", "global batch")
    if sequences % replicas:
        raise InexpressibleError("its batch does not divide over its replicas")
    each = sequences // replicas
    micro = each if each == 1 else _number(row, "micro_batch_per_device", "micro batch")
    if each % micro:
        raise InexpressibleError("its batch does not divide by its micro batch")
    if micro < each and layout.size("data") > 1:
        raise InexpressibleError("one reduction for several micro batches: ours is exposed, after the last")
    length = _number(row, "seq_len", "sequence length")
    return {"sequences": sequences, "sequence_length": length, "microbatch_sequences": micro}


def _measured(row: Row, tokens_per_step: int) -> float:
    if row["step_time_s"]:
        return _float(row["step_time_s"], "step_time_s")
    if row["tokens_per_s_per_device"]:
        devices = _number(row, "n_devices", "number of devices")
        return tokens_per_step / _float(row["tokens_per_s_per_device"], "tokens_per_s_per_device") / devices
    raise InexpressibleError("neither step time nor tokens per second printed")


def _remat(row: Row, notes: list[str]) -> tuple[str, bool]:
    """Our policy for what a block keeps, and whether the row states its own.

    Eager frameworks' "none" keeps each operation's result; ours that keeps matmuls and attention repeats
    elementwise work only, which is nearer than keeping what XLA would otherwise fuse away. "Selective" alone
    is option "op" in torchtitan's own rows (tt), and elsewhere Megatron-LM's: attention's core.
    """
    words = row["act_ckpt"].lower()
    if not words:
        notes.append("rematerialisation not stated: dots-attention if that fits, else full")
        return "dots-attention", False
    if "custom" in words or "qkv" in words:
        raise InexpressibleError("rematerialisation of its own kind")
    if words.startswith("full"):
        return "full", True
    if every := re.search(r"every (\d+)", words):
        return f"full-every-{every[1]}", True
    if "per-op" in words or (words == "selective" and source_of(row) == "tt"):
        return "alternate-dots", True
    if "save_dot" in words or "dots_saveable" in words or words in ("selective", "minimal"):
        return "dots", True
    if words.startswith("none") or words == "minimal_with_context":
        return "dots-attention", True
    raise InexpressibleError("rematerialisation of its own kind")
