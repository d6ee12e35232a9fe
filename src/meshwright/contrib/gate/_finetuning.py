"""Read the YAML of axolotl and of LLaMA-Factory, and the arguments of Hugging Face's `Trainer`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

from ._hugging import adapter_targets, deepspeed, optimizer_settings, precision, state_settings
from ._recipe import REST, Recipe
from ._tables import flattened, seen_keys, switch, table, whole

_FULL_LENGTH = "all sequences are weighed at the full length of {}: shorter ones take less"


def is_axolotl(tree: Mapping[str, Any]) -> bool:
    """Return whether a file has axolotl's keys."""
    return "base_model" in tree and (
        "micro_batch_size" in tree or "sequence_len" in tree or "datasets" in tree
    )


def is_llama_factory(tree: Mapping[str, Any]) -> bool:
    """Return whether a file has LLaMA-Factory's keys."""
    return "model_name_or_path" in tree and (
        "finetuning_type" in tree or "stage" in tree or "cutoff_len" in tree
    )


def is_training_arguments(tree: Mapping[str, Any]) -> bool:
    """Return whether a file has the keys of `TrainingArguments`."""
    return bool(
        {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs"} & tree.keys()
    )


class _Reader:
    """Reads the values of the understood keys of one file."""

    def __init__(self, kind: str, file: Path, tree: Mapping[str, Any], ignore: Collection[str]) -> None:
        nested = tree.get("deepspeed")
        values = dict(flattened({**tree, "deepspeed": "a table"} if isinstance(nested, dict) else tree))
        self.file, self.folder = str(file), file.parent
        self.seen = seen_keys(table(kind), self.file, values, ignore)
        self.values = {key: value for key, value in values.items() if key in self.seen.understood}
        self.deepspeed = nested if self.values.get("deepspeed") else None

    def number(self, key: str, default: int, least: int = 1) -> int:
        value = self.values.get(key)
        return default if value is None else whole(self.file, key, value, least)

    def is_on(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else switch(self.file, key, value)

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return "" if value is None else str(value)

    def one_of(self, key: str, known: Mapping[str, Any], default: str) -> Any:
        name = self.text(key) or default
        if name not in known:
            what = f"{self.file}: {key} = {name[:40]!r} cannot be weighed"
            raise InputError(what, hint=f"use {', '.join(map(repr, known))}, or --ignore {key}")
        return known[name]

    def steps(self, key: str) -> int | None:
        """Return the number of steps, which -1 and 0 leave open."""
        number = self.number(key, 0, least=-1)
        return number if number > 0 else None


def axolotl(file: Path, tree: Mapping[str, Any], ignore: Collection[str] = (), model: str = "") -> Recipe:
    """Return the recipe of an axolotl file.

    Args:
        ignore: keys that the caller wants ignored.
        model: what the caller says the model is.

    Raises:
        InputError: a key or a value is not understood.
    """
    read = _Reader("axolotl", file, tree, ignore)
    has_fsdp = bool(tree.get("fsdp") or tree.get("fsdp_config")) or "dp_shard_size" in read.values
    adapter = read.one_of("adapter", {"": None, "lora": "compute", "qlora": "nf4"}, "")
    axes, settings = _axolotl_axes(read, has_fsdp)
    chosen = optimizer_settings(read.file, "optimizer", read.text("optimizer") or "adamw_torch_fused")
    kind = precision(read.file, read.values)
    by_deepspeed = read.deepspeed is not None
    settings |= chosen | {"offload": settings.get("offload", chosen.get("offload", "none"))}
    settings |= {"precision": kind, "batch.sequence_length": read.number("sequence_len", 512)}
    settings |= _remat(read, "gradient_checkpointing")
    fsdp_remat = next((read.is_on(key) for key in _FSDP_REMAT if key in read.values), False)
    settings |= {"remat": "full"} if fsdp_remat else {}
    if read.is_on("activation_offloading") or read.text("gradient_checkpointing").startswith("offload"):
        settings["offload"] = "both" if settings["offload"] == "optimizer" else "activations"
    if adapter is not None:
        settings |= _adapters(read, "lora_r", "lora_target_modules", adapter)
        if read.is_on("lora_target_linear"):
            settings["lora.targets"] = ("all-linear",)
    else:
        # Accelerate's FSDP makes parameters fp32 where products are not; without it they stay as loaded.
        is_half = kind == "bf16" and not has_fsdp
        settings |= state_settings(
            is_half=is_half, by_deepspeed=by_deepspeed, moments=chosen.get("state.moments")
        )
    packed = read.is_on("sample_packing") or read.is_on("pad_to_sequence_len")
    return Recipe(
        kind="an axolotl recipe",
        file=read.file,
        seen=read.seen,
        model=model or read.text("base_model"),
        axes=axes,
        settings=settings,
        per_device=read.number("micro_batch_size", 1),
        accumulated=read.number("gradient_accumulation_steps", 1),
        steps=read.steps("max_steps"),
        notes=() if packed else (_FULL_LENGTH.format("sequence_len"),),
    )


_FSDP_REMAT = ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")


def _axolotl_axes(read: _Reader, has_fsdp: bool) -> tuple[dict[str, int], dict[str, Any]]:
    axes: dict[str, int] = {}
    settings: dict[str, Any] = {}
    if read.deepspeed is not None:
        axes, settings = deepspeed(read.file, read.deepspeed, read.folder)
    elif has_fsdp:
        axes = {"data": read.number("dp_replicate_size", 1), "fsdp": read.number("dp_shard_size", REST)}
        offloads = ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
        settings |= {"offload": "state"} if any(read.is_on(key) for key in offloads) else {}
    else:
        axes = {"data": REST}
    for axis, key in (("tensor", "tensor_parallel_size"), ("context", "context_parallel_size")):
        axes[axis] = read.number(key, 1)
    axes["expert"] = read.number("expert_parallel_size", 1)
    return axes, settings


def _remat(read: _Reader, key: str) -> dict[str, str]:
    is_on = read.text(key).startswith("offload") or read.is_on(key)
    return {"remat": "full" if is_on else "none"}


def _adapters(read: _Reader, rank: str, targets: str, base: str) -> dict[str, Any]:
    made: dict[str, Any] = {"lora.rank": read.number(rank, 8), "lora.base": base}
    if read.values.get(targets):
        made["lora.targets"] = adapter_targets(read.file, targets, read.values[targets])
    return made


def llama_factory(
    file: Path, tree: Mapping[str, Any], ignore: Collection[str] = (), model: str = ""
) -> Recipe:
    """Return the recipe of a LLaMA-Factory file.

    Args:
        ignore: keys that the caller wants ignored.
        model: what the caller says the model is.

    Raises:
        InputError: a key or a value is not understood.
    """
    read = _Reader("llama_factory", file, tree, ignore)
    read.one_of("stage", {"sft": "", "pt": ""}, "sft")
    tuning = read.one_of("finetuning_type", {"full": None, "lora": "compute"}, "lora")
    axes, settings, by_deepspeed = _trainer_axes(read)
    chosen = optimizer_settings(read.file, "optim", read.text("optim") or "adamw_torch")
    if read.is_on("use_muon"):
        chosen = optimizer_settings(read.file, "use_muon", "muon")
    is_pure = read.is_on("pure_bf16")
    kind = "bf16" if is_pure else precision(read.file, read.values)
    settings |= chosen | {"offload": settings.get("offload", chosen.get("offload", "none"))}
    settings |= {"precision": kind, "batch.sequence_length": read.number("cutoff_len", 2048)}
    settings["remat"] = "none" if read.is_on("disable_gradient_checkpointing") else "full"
    if tuning is not None:
        bits = read.number("quantization_bit", 16)
        if bits not in (4, 16):
            what = f"{read.file}: quantization_bit = {bits} cannot be weighed"
            raise InputError(what, hint="use 4 bits or none, or --ignore quantization_bit")
        settings |= _adapters(read, "lora_rank", "lora_target", "nf4" if bits == 4 else "compute")
        settings.setdefault("lora.targets", ("all-linear",))
    else:
        settings |= state_settings(
            is_half=is_pure and not by_deepspeed,
            by_deepspeed=by_deepspeed,
            moments=chosen.get("state.moments"),
        )
    packed = read.is_on("packing", default=read.text("stage") == "pt")
    return Recipe(
        kind="a LLaMA-Factory recipe",
        file=read.file,
        seen=read.seen,
        model=model or read.text("model_name_or_path"),
        axes=axes,
        settings=settings,
        per_device=read.number("per_device_train_batch_size", 8),
        accumulated=read.number("gradient_accumulation_steps", 1),
        steps=read.steps("max_steps"),
        notes=() if packed else (_FULL_LENGTH.format("cutoff_len"),),
    )


def _trainer_axes(read: _Reader) -> tuple[dict[str, int], dict[str, Any], bool]:
    """Return the axes and settings of `deepspeed` and `fsdp`, and whether DeepSpeed keeps the state."""
    if read.deepspeed is not None:
        axes, settings = deepspeed(read.file, read.deepspeed, read.folder)
        return axes, settings, True
    words = read.values.get("fsdp")
    listed = words.split() if isinstance(words, str) else words if isinstance(words, list) else []
    names = [str(each) for each in listed]
    if words is True:
        names = ["full_shard"]
    known = {"full_shard", "hybrid_shard", "shard_grad_op", "auto_wrap", "offload", "no_shard"}
    if unknown := [name for name in names if name not in known - {"hybrid_shard", "shard_grad_op"}]:
        what = f"{read.file}: fsdp has {unknown[0][:40]!r}, which cannot be weighed"
        raise InputError(what, hint="use full_shard auto_wrap, or --ignore fsdp")
    is_split = "full_shard" in names
    return (
        ({"fsdp" if is_split else "data": REST}),
        ({"offload": "state"} if "offload" in names else {}),
        False,
    )


def training_arguments(
    file: Path, tree: Mapping[str, Any], ignore: Collection[str] = (), model: str = ""
) -> Recipe:
    """Return the recipe of a JSON file of `TrainingArguments`, alone or with a script's own model and length.

    Args:
        ignore: keys that the caller wants ignored.
        model: what the caller says the model is.

    Raises:
        InputError: a key or a value is not understood, or no length of a sequence is given.
    """
    read = _Reader("training_arguments", file, tree, ignore)
    axes, settings, by_deepspeed = _trainer_axes(read)
    chosen = optimizer_settings(read.file, "optim", read.text("optim") or "adamw_torch_fused")
    kind = precision(read.file, read.values)
    settings |= chosen | {
        "offload": settings.get("offload", chosen.get("offload", "none")),
        "precision": kind,
    }
    settings |= _remat(read, "gradient_checkpointing")
    lengths = ("max_length", "max_seq_length", "block_size", "model_max_length")
    length = next((key for key in lengths if read.values.get(key) is not None), "")
    notes = [_FULL_LENGTH.format(length)] if length and not read.is_on("packing") else []
    if length:
        settings["batch.sequence_length"] = read.number(length, 0)
    else:
        notes.append(
            "no length of a sequence is named: it is the model's own unless --set batch.sequence_length=N"
        )
    dtype = next((read.text(key) for key in ("dtype", "torch_dtype") if key in read.values), "")
    is_half = dtype.removeprefix("torch.") in ("bfloat16", "bf16") and "fsdp" not in axes
    if by_deepspeed or is_half:
        settings |= state_settings(
            is_half=is_half, by_deepspeed=by_deepspeed, moments=chosen.get("state.moments")
        )
    elif not dtype:
        notes.append("the model is taken to be loaded in fp32: in bf16 it is --set state.parameters=bf16")
    if read.is_on("use_peft"):
        settings |= _adapters(
            read, "lora_r", "lora_target_modules", "nf4" if read.is_on("load_in_4bit") else "compute"
        )
    return Recipe(
        kind="TrainingArguments",
        file=read.file,
        seen=read.seen,
        model=model or read.text("model_name_or_path"),
        axes=axes,
        settings=settings,
        per_device=read.number("per_device_train_batch_size", 8),
        accumulated=read.number("gradient_accumulation_steps", 1),
        steps=read.steps("max_steps"),
        notes=tuple(notes),
    )
