"""Published rows as runs of ours: which can be expressed, how, and why the others cannot.

A row's columns are those of the survey of published runs: empty cells were not stated. Frameworks differ
from our step; what is taken for what is said where it is decided, and nothing is decided by a row's id.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from _published_experts import class_of, has_experts, model_of_experts
from _published_stacks import Stack, stack_of, stack_of_experts
from _published_table import COLUMNS, INPUTS, Row, source_of
from _published_words import InexpressibleError, is_lora, lora_of, results_kept, window_of
from pydantic import ValidationError

from meshwright.config import Layout, RunConfig, TransformerModel, check_layout, in_order
from meshwright.errors import InputError
from meshwright.hardware import Chip, Fleet, Link, find_chip

Record = TypeVar("Record", RunConfig, TransformerModel)
ASSUMED = tomllib.loads((Path(__file__).parent / "published_assumptions.toml").read_text())
LONGEST_STANDARD, SMALLEST_STANDARD = 16384, 0.7e9
CELLS = ("date", *(column for column in COLUMNS if column in INPUTS))
FROZEN_BYTES = 2  # per parameter beside adapters
STATE_BYTES = 16  # per parameter: float32 parameter, gradient and two moments, the least our step holds
FAR_FROM_STATED = 0.15  # a stated number of parameters further off means other dimensions
VOCAB_MULTIPLE = 64  # frameworks pad vocabularies so that they divide


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """A row as a run of ours. `standard`: stock chip, stated remat, length and size as in the record.

    `stack`: what the row's framework does otherwise. `unfused`: its attention writes the scores to memory.
    `measured`: seconds of its step; None where no measured column was read.
    """

    id: str
    source: str
    config: RunConfig
    fleet: Fleet  # with the row's network
    stack: Stack
    unfused: bool
    owners: int | None  # ranks that share an optimizer under ZeRO-1; None if all replicas do
    heads: int  # the row's own: the program may have others where attention is priced apart
    attention_kernel: str  # as `predict` names it
    exchanges_heads: bool  # over `context`, where ours sends keys and values
    remat_stated: bool
    standard: bool
    notes: tuple[str, ...]
    experts: str = ""  # the class of a run of experts (`_published_experts`)
    measured: float | None = None
    measured_peak_bytes: float | None = None  # of one device, allocated or reserved as its source has it

    @property
    def measured_seconds(self) -> float:
        """The measured seconds of a step, of a row whose measured columns were read."""
        if self.measured is None:
            raise ValueError(f"{self.id}: no measured column was read; `express_measured` reads them")
        return self.measured


def express(row: Row) -> Expressed:
    """The run of ours that a row comes nearest to; no measured column has a part in it.

    Raises:
        InexpressibleError: there is none, or the row does not say enough.
    """
    row = _with_scripts({column: (row.get(column) or "").strip() for column in CELLS})
    _refuse_other_programs(row)
    notes: list[str] = []
    stack = _stack(row)
    unfused, precision = _is_unfused(row, stack), _precision(row, notes)
    fleet, model = _fleet(row, precision), _model(row, unfused, notes)
    lora = lora_of(row, _told(row))
    layout, zero1 = _layout(row, fleet, _state_parameters(row, model), notes)
    if lora and layout.size("stage") > 1:
        raise InexpressibleError("LoRA in a pipeline")
    batch = _batch(row, layout)
    remat, stated = _remat(row, notes)
    config = RunConfig.model_validate(
        {
            "name": source_of(row),  # so that releases of one configuration share a compiled program
            "model": model,
            "data": {"source": "synthetic"},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-4, "clip_norm": 1.0},
            "schedule": {"kind": "constant"},
            "precision": precision,
            "gradient_sum": _gradient_sum(row, precision),
            "state": _state(row),
            "layout": str(layout),
            "fold_experts": "tensor" if _folds_experts(row) else "none",
            "zero1": zero1,
            "lora": lora,
            "pipeline_chunks": _count(row, "vp") if layout.size("stage") > 1 else 1,
            "remat": remat,
            "offload": "activations" if "offload" in row["act_ckpt"] else "none",
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
        stack=stack,
        unfused=unfused,
        owners=_owners(row),
        heads=_count(row, "n_heads") if row["n_heads"] else model["num_heads"],
        experts=class_of(config, fleet),
        attention_kernel=_attention_kernel(row, stack),
        exchanges_heads=bool(re.search(r"\ba2a\b|ulysses", row["attention_impl"].lower())),
        remat_stated=stated,
        standard=standard,
        notes=tuple(notes),
    )


def _stack(row: Row) -> Stack:
    source = source_of(row)
    return stack_of_experts(row, source) if has_experts(row) else stack_of(source, row["model"])


def express_measured(row: Row) -> Expressed:
    """The run of ours that a row comes nearest to, with the seconds that were measured.

    Raises:
        InexpressibleError: as `express`, or the row prints nothing that tells its seconds.
    """
    return with_measured(express(row), row)


def with_measured(run: Expressed, row: Row) -> Expressed:
    """Return the run of a row with what was measured: its seconds, and its memory where that is stated."""
    told = {column: (row.get(column) or "").strip() for column in COLUMNS}
    return dataclasses.replace(
        run, measured=_measured(told, run.config), measured_peak_bytes=_peak_bytes(told)
    )


def _scripts_of(row: Row) -> Iterator[dict[str, Any]]:
    """Yield what the scripts beside a row's source say of it, the particular after the general."""
    for script in ASSUMED["scripts"]:
        is_of = script.get("model", row["model"]) == row["model"]
        is_on = row["accelerator"].startswith(script.get("accelerator", ""))
        if source_of(row) == script["source"] and is_of and is_on:
            yield script


def _told(row: Row) -> dict[str, Any]:
    """Return all that scripts say of a row, beside its cells."""
    return {key: value for script in _scripts_of(row) for key, value in script.items()}


def _with_scripts(row: dict[str, str]) -> dict[str, str]:
    """Return a row with the cells that scripts of its source tell, and the batch that follows from them."""
    for script in _scripts_of(row):
        row = {**row, **script.get("cells", {})}
    if row["accelerator"].startswith("TPU") and row["micro_batch_per_device"] and _count(row, "tp") > 1:
        each = _float(row["micro_batch_per_device"], "micro batch")
        row["global_batch_seqs"] = row["global_batch_seqs"] or f"{each * _count(row, 'n_devices'):.0f}"
        row["micro_batch_per_device"] = f"{each * _count(row, 'tp'):.0f}"
    return row


# Whose attention is cuDNN's; PyTorch's and the others' "flash" is FlashAttention-2 or a kernel like it.
_CUDNN = re.compile(r"cudnn|\bte\b|transformer engine")
OFFLOAD = "offload to the host"
# Parameters and moments in bf16: PyTorch's and Optax's optimizers keep moments in their parameters' format.
_NARROW_STATE = re.compile(r"\(pure\)|bf16-true|stochastic rounding|bf16 weights")
# What our step does not do, whatever the layout: the column, what is found in it, and the reason.
_OTHER_PROGRAMS = (
    ("optimizer notes", r"none in timed region|forward\+backward", "not a whole step: no optimizer in it"),
    ("model", r"optimizer in backward", "the optimizer runs in the backward pass: ours runs after it"),
    ("model", r"\b(t5|bert|vit|mamba|diffusion)", "no decoder-only Transformer"),
    ("accelerator", r"power limited", "a power limit that is not stated"),
    ("precision", r"fp4|int8", "4-bit or integer arithmetic"),
    ("precision", r"filter|layers \d", "8-bit arithmetic in a part of the layers"),
    ("precision", r"details not in", "8-bit arithmetic of which its source does not say more"),
    ("precision", r"fp16/bf16|^(?!.*(bf16|fp16|fp8|float8))", "precision not stated, or none of ours"),
    ("model notes", r"unpacked|not packed", "padded sequences: real tokens were counted"),
    ("act_ckpt sharding", r"offload", OFFLOAD),
)
_UNFUSED = re.compile(r"unfused|no flash|fused soft")
_FUSED = re.compile(r"flash|cudnn|\bte\b|transformer engine|fused attention|sdpa")


def _validated(record: type[Record], fields: Mapping[str, object]) -> Record:
    try:
        return record.model_validate(fields)
    except ValidationError as error:
        raise InexpressibleError(f"our configuration refuses it: {error.errors()[0]['type']}") from error


def _refuse_other_programs(row: Row) -> None:
    for columns, pattern, reason in _OTHER_PROGRAMS:
        if re.search(pattern, " ".join(row[c] for c in columns.split()).lower()):
            if reason == OFFLOAD and _keeps_inputs_on_host(row):
                continue
            raise InexpressibleError(reason)
    for changed in ASSUMED["changed_machines"]:
        if source_of(row) == changed["source"] and re.search(changed["notes"], row["notes"]):
            raise InexpressibleError("its machine was changed afterwards, as its source says")


def _keeps_inputs_on_host(row: Row) -> bool:
    """Return whether a row keeps blocks' inputs, or queries, keys and values, in the host's memory.

    Our step keeps the inputs there, and repeats the rest.
    """
    words = row["act_ckpt"].lower()
    return row["accelerator"].startswith("TPU") and bool(
        re.search(r"layer input|qkv_proj|decoder_layer_input", words)
    )


def _is_unfused(row: Row, stack: Stack) -> bool:
    """Return whether the row's attention writes its scores, by its words, or without words by its stack."""
    words = row["attention_impl"].lower()
    unfused = bool(_UNFUSED.search(words)) or (stack.unfused_attention and not _FUSED.search(words))
    if unfused and not stack.unfused_attention:
        raise InexpressibleError("attention without a fused kernel, in a stack of which no model is known")
    return unfused


def _attention_kernel(row: Row, stack: Stack) -> str:
    words = row["attention_impl"].lower()
    if not words:
        return stack.attention_kernel
    return "cudnn" if _CUDNN.search(words) else "flash-2"


def _precision(row: Row, notes: list[str]) -> str:
    """Return our precision for the row's: 8-bit formats are priced as ours, whatever their scaling."""
    words = row["precision"].lower()
    if re.search(r"fp8|float8", words):
        notes.append(f"{row['precision']} taken as our fp8")
        return "fp8"
    return "fp16" if "fp16" in words else "bf16"


def _state(row: Row) -> dict[str, str]:
    """Return the formats of a row's parameters and moments; with adapters, the usual ones."""
    words = row["precision"].lower()
    if is_lora(row) or not _NARROW_STATE.search(words):
        return {}
    rounding = "stochastic" if "stochastic" in words else "nearest"
    return {"parameters": "bf16", "moments": "bf16", "rounding": rounding}


def _peak_bytes(row: Row) -> float | None:
    """Return the stated memory of a device, if it is a plain number."""
    words = row["peak_mem_gib_per_device"]
    return float(words) * 2**30 if re.fullmatch(r"\d+(\.\d+)?", words) else None


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
    try:
        return find_chip(ASSUMED["chips"].get(plain, plain))
    except InputError as unknown:
        raise InexpressibleError(f"the catalog has no chip {plain!r}") from unknown


def _fleet(row: Row, precision: str) -> Fleet:
    chip = chip_of(row["accelerator"])
    if chip.platform == "tpu":
        return _slices(row, chip)
    if chip.platform != "cuda":
        raise InexpressibleError("no compiler for this chip without it, or not installed (TPU, AMD, others)")
    peaks = chip.peak_flops_per_second
    if not any(name.startswith(precision) for name in peaks):
        raise InexpressibleError(f"the chip has no {precision}")
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


_SLICES = re.compile(r"\b(\d+) slice|\b(\d+)x v\d\w?-")


def _slices(row: Row, chip: Chip) -> Fleet:
    """Return the TPU slices of a row.

    A source of TPUs counts chips, and says how many slices they are; where it says nothing, each replica of
    data parallelism, which is what joins slices, is one.
    """
    told = _SLICES.search(row["notes"])
    count = int(next(filter(None, told.groups()))) if told else 1
    if not told and "DP" in row["sharding"]:
        count = _count(row, "dp")
    assert chip.slices is not None, "every TPU has slices"
    number = _number(row, "n_devices", "number of devices") * chip.slices.cores_per_chip_in_name
    if number % count:
        raise InexpressibleError("its chips are no whole slices")
    try:
        return Fleet.parse(f"{count}x{chip.name}-{number // count}")
    except InputError as unknown:
        raise InexpressibleError("no TPU slice of that size") from unknown


def _model(row: Row, unfused: bool, notes: list[str]) -> dict[str, object]:
    """The architecture of a row: of experts by its name, else by its dimensions."""
    return _with_experts(row, notes) if has_experts(row) else _dense_model(row, unfused, notes)


def _dense_model(row: Row, unfused: bool, notes: list[str]) -> dict[str, object]:
    """The architecture by its dimensions: what has a gated MLP is a Llama, what has not a GPT.

    A GPT has learned positions (for ALiBi too, which costs nothing to speak of); vocabularies are padded
    to a multiple of 64; embeddings are tied where that is nearer to an exact number of
    parameters; where none is stated, a GPT's are. Attention that is not fused is priced apart
    (`_published_stacks`), so the program has heads of at most 128 in place of wider ones; so it has where no
    fused kernel of the chip takes them.
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
    told = _told(row)
    model |= {"head_dim": told["head_dim"]} if "head_dim" in told else {}
    model |= window_of(row, told)
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
    head = float(str(model.get("head_dim", sizes["d_model"] / sizes["n_heads"])))
    if head % 8:
        raise InexpressibleError("heads of no multiple of 8: no rate of such products is known")
    if unfused and head > 128:
        tensor = _count(row, "tp")
        fitting = [n for n in range(128, 31, -8) if sizes["d_model"] % (n * tensor) == 0]
        if not fitting:
            raise InexpressibleError("no heads of at most 128 divide its width over its layout")
        model["num_heads"] = model["num_kv_heads"] = sizes["d_model"] // fitting[0]
        notes.append(f"compiled with heads of {fitting[0]}, attention priced with the row's")
    elif head > 128 and not row["accelerator"].startswith("TPU"):
        model |= _divided_heads(row, model, int(head), notes)
    return model


def _with_experts(row: Row, notes: list[str]) -> dict[str, object]:
    """Return the architecture of a row of experts, its vocabulary padded and its loss in chunks."""
    length = _number(row, "seq_len", "sequence length")
    model = model_of_experts(row, notes)
    if _count(row, "vp") > 1 and model.pop("num_dense_layers", 0):
        model.pop("dense_mlp_dim")
        notes.append("its dense first layers taken as layers of experts, which multiply as much")
    stages, chunks = _count(row, "pp"), _count(row, "vp")
    if -(-model["num_layers"] // stages) % chunks:
        model["num_layers"] = -(-model["num_layers"] // (stages * chunks)) * stages * chunks
        notes.append(
            f"taken as {model['num_layers']} layers: as many as if all stages had what the fullest has"
        )
    model["vocab_size"] = math.ceil(model["vocab_size"] / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    model["loss_chunk"] = max(n for n in range(1, 513) if length % n == 0)
    return model


def _state_parameters(row: Row, model: dict[str, object]) -> float:
    """Return the parameters of a replica; of one with experts, what each of its experts' devices holds."""
    told = _float(row["params_b"] or "0", "params_b") * 1e9
    if not has_experts(row):
        return told or _parameters(model)
    found = _validated(TransformerModel, model)
    experts = found.num_expert_layers * (found.num_experts or 0) * found.num_mlp_parameters
    return found.num_parameters - experts * (1 - 1 / _count(row, "ep"))


def _divided_heads(row: Row, model: Mapping[str, Any], head: int, notes: list[str]) -> dict[str, int]:
    """Return what changes where a chip has no kernel of cuDNN for heads above 128: each becomes several.

    FLOPs, parameters and bytes are those of the row. Hopper has kernels for heads of up to 256
    (`models.attention.uses_cudnn`); whose kernel runs elsewhere, no row says.
    """
    target = chip_of(row["accelerator"]).target
    if head <= 256 and target is not None and target.compute_capability[0] == 9:
        return {}
    parts = next((n for n in (2, 3, 4) if head % (8 * n) == 0 and head <= 128 * n), None)
    if parts is None:
        raise InexpressibleError("attention heads beyond our fused kernel")
    notes.append(f"compiled with {parts} heads of {head // parts} for each of {head}")
    return {
        "head_dim": head // parts,
        **{name: parts * model[name] for name in ("num_heads", "num_kv_heads")},
    }


def _parameters(model: dict[str, object]) -> int:
    return _validated(TransformerModel, model).num_parameters


_COUNTED = {"stage": "pp", "context": "cp", "tensor": "tp"}


def _layout(row: Row, fleet: Fleet, parameters: float, notes: list[str]) -> tuple[Layout, bool]:
    """Return the axes by the words for the sharding and the counts where they are stated, and `zero1`.

    ZeRO-1 and ZeRO-2 (distributed optimizer, SHARD_GRAD_OP) gather and reduce once where FSDP gathers twice.
    With one microbatch: fsdp inside a node, over fast links, with data across nodes sends as much between
    nodes as they. With several, in a pipeline, or over context alone: devices whose optimizer is sharded
    over both, as it is (Megatron-LM, parallel_state.py: the optimizer's group is data parallel with context).
    """
    words = row["sharding"].lower()
    counts = {axis: _count(row, column) for axis, column in _COUNTED.items()}
    parts, devices = math.prod(counts.values()), fleet.num_devices
    memory = fleet.chip.memory_bytes or math.inf
    if devices % parts:
        raise InexpressibleError("its axes do not multiply to its devices")
    replicas = devices // parts
    held = (FROZEN_BYTES if is_lora(row) else STATE_BYTES) * parameters / (counts["tensor"] * counts["stage"])
    if "nnscaler" in words or "autodist" in words or (not words and replicas > 1):
        raise InexpressibleError("layout not stated")
    fsdp, zero1, sharing = 1, False, replicas * counts["context"]
    if re.search(r"zero-?1|zero-?2|distributed.optimizer|shard_grad_op|fsdp column not given", words):
        each = _sequences(row, replicas)
        if is_lora(row):
            notes.append(f"{row['sharding']} of a few adapters: none")
        elif counts["stage"] > 1 or replicas == 1 or _microbatch(row, each) < each:
            zero1 = sharing > 1
        else:
            fsdp = _inside_nodes(fleet, counts["tensor"] * counts["context"], replicas, held / (0.8 * memory))
        if sharing > 1 and not is_lora(row):
            shared = f"data={replicas},context={counts['context']}".removesuffix(",context=1")
            taken = f"{shared} with zero1" if zero1 else f"fsdp={fsdp} and data={replicas // fsdp}"
            notes.append(f"{row['sharding']} taken as {taken}")
    elif re.search(r"fsdp|zero-?3|full_shard|hsdp", words):
        over_slices = fleet.num_domains if "dp over dcn" in words else 1
        fsdp = _count(row, "fsdp") if row["fsdp"] else replicas // over_slices
    if replicas % fsdp:
        raise InexpressibleError("its axes do not multiply to its devices")
    # Under ZeRO-1 the gradients alone are whole: 4 of the 16 bytes.
    if held / fsdp * ((4 + 12 / sharing) / 16 if zero1 else 1) > memory:
        raise InexpressibleError("our fp32 state does not fit its devices: the run held other formats")
    sizes = {"stage": counts["stage"], **_with_expert(row, replicas, fsdp, notes), **counts}
    axes = tuple((axis, size) for axis, size in sizes.items() if size > 1)
    return Layout(axes=axes or (("data", 1),)), zero1


def _with_expert(row: Row, replicas: int, fsdp: int, notes: list[str]) -> dict[str, int]:
    """Return the sizes of `data`, `fsdp` and `expert`: experts' devices are replicas of all else.

    What FSDP shards over devices of experts too has `expert` for these. Where whole experts lie over devices
    of tensor parallelism too, `expert` has the others.
    """
    expert = _count(row, "ep")
    if _folds_experts(row):
        if expert % _count(row, "tp"):
            raise InexpressibleError("experts over devices of tensor parallelism")
        expert //= _count(row, "tp")
        notes.append("whole experts over the devices of tensor parallelism too")
    inside = math.gcd(expert, fsdp)
    if replicas % (fsdp // inside * expert):
        raise InexpressibleError("experts over devices of tensor parallelism")
    return {
        "data": replicas // (fsdp // inside * expert),
        "fsdp": fsdp // inside,
        **({"expert": expert} if expert > 1 else {}),
    }


def _folds_experts(row: Row) -> bool:
    """Return whether devices of tensor parallelism have whole experts of their own."""
    counts = _count(row, "ep"), _count(row, "tp")
    return min(counts) > 1 and source_of(row) in ASSUMED["whole_experts"]["sources"]


def _owners(row: Row) -> int | None:
    """Return the ranks that share an optimizer, of "ZeRO-1 within 8 GPUs"; None if all replicas do."""
    found = re.search(r"zero-?1 within (\d+)", row["sharding"].lower())
    return int(found[1]) if found else None


def _inside_nodes(fleet: Fleet, parts: int, replicas: int, least: float) -> int:
    """Return the replicas of one node, doubled until they are at least `least`."""
    fsdp = math.gcd(max(fleet.chips_per_host // parts, 1), replicas)
    while fsdp < least and fsdp < replicas:
        fsdp *= 2
    return fsdp


def _sequences(row: Row, replicas: int) -> int:
    """Return the sequences of one replica."""
    sequences = _number(row, "global_batch_seqs", "global batch")
    if sequences % replicas:
        raise InexpressibleError("its batch does not divide over its replicas")
    return sequences // replicas


def _microbatch(row: Row, each: int) -> int:
    if _count(row, "pp") > 1 and source_of(row) in ASSUMED["whole_batches"]["sources"]:
        raise InexpressibleError("micro batch not stated")
    micro = each if each == 1 else _number(row, "micro_batch_per_device", "micro batch")
    if each % micro:
        raise InexpressibleError("its batch does not divide by its micro batch")
    return micro


def _batch(row: Row, layout: Layout) -> dict[str, int]:
    replicas = layout.num_replicas
    each = _sequences(row, replicas)
    length = _number(row, "seq_len", "sequence length")
    return {
        "sequences": each * replicas,
        "sequence_length": length,
        "microbatch_sequences": _microbatch(row, each),
    }


def _gradient_sum(row: Row, precision: str) -> str:
    """Return the format in which the row's stack sums gradients: by its own words, or by its source."""
    if precision not in ("bf16", "fp8"):
        return "fp32"
    if "grad_reduce_in_fp32=false" in row["notes"].lower():
        return "bf16"
    known: str = ASSUMED["gradient_sums"].get(source_of(row), "fp32")
    return known


def _measured(row: Row, config: RunConfig) -> float:
    """Return the row's seconds of a step: printed, or by its tokens or FLOPs a second."""
    batch, model = config.batch, config.model
    tokens = batch.sequences * batch.sequence_length
    if row["step_time_s"]:
        return _float(row["step_time_s"], "step_time_s")
    devices = _number(row, "n_devices", "number of devices")
    if row["tokens_per_s_per_device"]:
        return tokens / _float(row["tokens_per_s_per_device"], "tokens_per_s_per_device") / devices
    convention = ASSUMED["flops"].get(source_of(row))
    if not row["tflops_per_device"] or convention is None:
        raise InexpressibleError("neither step time nor tokens per second printed")
    assert isinstance(model, TransformerModel), "every row is a Transformer"
    if convention == "maxtext":
        counted = _maxtext_flops(model, batch.sequence_length)
    else:
        counted = _counted_flops(model, batch.sequence_length, config.remat)
    flops = tokens * counted
    return flops / (1e12 * _float(row["tflops_per_device"], "tflops_per_device") * devices)


def _counted_flops(model: TransformerModel, length: int, remat: str) -> float:
    """Return the FLOPs of a token as Megatron-LM counted them in 2021, with what is computed again.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 5.1: 24 l h^2 forward, as much
    again where the forward pass is repeated and twice as much backward, attention whole, head without repeat.
    """
    layers, width = model.num_layers, model.embed_dim
    passes = 4 if remat == "full" else 3
    blocks = passes * layers * (24 * width**2 + 4 * length * width)
    return blocks + 6 * width * model.vocab_size


def _maxtext_flops(model: TransformerModel, length: int) -> float:
    """Return the FLOPs of a token as MaxText counted them: products three times, attention whole.

    Source: github.com/AI-Hypercomputer/maxtext, calculate_tflops_training_per_device before its request 1988.
    """
    attention = 4 * length * model.num_heads * model.head_dim * model.num_layers
    return 3 * (2 * model.num_matmul_parameters + attention)


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
    if _keeps_inputs_on_host(row) and "offload" in words:
        notes.append(f"{row['act_ckpt']} taken as full, with the blocks' inputs on the host")
        return "full", True
    if (results := results_kept(words)) is not None:
        kept = in_order(results) if results else "full"
        notes.append(f"{row['act_ckpt']} taken as {kept}")
        return kept, True
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
