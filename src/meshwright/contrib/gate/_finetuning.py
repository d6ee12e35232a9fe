"""Read the YAML of axolotl and of LLaMA-Factory, and the arguments of Hugging Face's `Trainer`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

from ._hugging import WHOLE, adapter_targets, deepspeed, optimizer_settings, precision, state_settings
from ._recipe import REST, Recipe
from ._shell import is_known, shown
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
        for key, value in self.values.items():
            if not is_known(str(value)):
                what = f"{file}: {key} is {shown(str(value))[:60]}, which only a run of the script would know"
                raise InputError(
                    what, hint=f"write the value, or --ignore {key} and --set what it means here"
                )
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

    def optimized(self, settings: dict[str, Any], key: str, name: str, *, remat: bool) -> None:
        """Add the settings of the optimizer, of products and of rematerialisation."""
        chosen = optimizer_settings(self.file, key, name)
        offload = settings.get("offload", chosen.get("offload", "none"))
        settings |= chosen | {"offload": offload, "remat": "full" if remat else "none"}
        settings["precision"] = precision(self.file, self.values)

    def held(self, settings: dict[str, Any], *, is_half: bool) -> None:
        """Add the formats between steps, of a recipe without adapters."""
        moments = settings.get("state.moments")
        settings |= state_settings(
            precision=settings["precision"],
            is_half=is_half,
            by_deepspeed=self.deepspeed is not None,
            moments=moments,
        )

    def adapted(self, settings: dict[str, Any], rank: str, targets: str, base: str) -> None:
        """Add the settings of adapters."""
        settings |= {"lora.rank": self.number(rank, 8), "lora.base": base}
        if self.values.get(targets):
            settings["lora.targets"] = adapter_targets(self.file, targets, self.values[targets])

    def recipe(
        self,
        kind: str,
        model: str,
        axes: Mapping[str, int],
        settings: Mapping[str, Any],
        notes: Sequence[str],
        *,
        batch: str = "per_device_train_batch_size",
        sequences: int = 8,
    ) -> Recipe:
        """Return the recipe; `batch` is the key of a device's sequences, `sequences` their default number."""
        is_split = self.deepspeed is not None or "fsdp" in axes
        whole_state = () if is_split or "lora.rank" in settings else (WHOLE,)
        return Recipe(
            kind=kind,
            file=self.file,
            seen=self.seen,
            model=model,
            axes=axes,
            settings=settings,
            per_device=self.number(batch, sequences),
            accumulated=self.number("gradient_accumulation_steps", 1),
            steps=self.steps("max_steps"),
            notes=(*whole_state, *notes),
        )

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
    offloads = read.text("gradient_checkpointing").startswith("offload")
    by_fsdp = next((read.is_on(key) for key in _FSDP_REMAT if key in read.values), False)
    remat = by_fsdp or offloads or read.is_on("gradient_checkpointing")
    read.optimized(settings, "optimizer", read.text("optimizer") or "adamw_torch_fused", remat=remat)
    settings["batch.sequence_length"] = read.number("sequence_len", 512)
    if offloads or read.is_on("activation_offloading"):
        settings["offload"] = "both" if settings["offload"] == "optimizer" else "activations"
    if adapter is not None:
        read.adapted(settings, "lora_r", "lora_target_modules", adapter)
        if read.is_on("lora_target_linear"):
            settings["lora.targets"] = ("all-linear",)
    else:
        # Accelerate's FSDP makes parameters fp32 where products are not; without it they stay as loaded.
        read.held(settings, is_half=settings["precision"] == "bf16" and not has_fsdp)
    packed = read.is_on("sample_packing") or read.is_on("pad_to_sequence_len")
    notes = () if packed else (_FULL_LENGTH.format("sequence_len"),)
    model = model or read.text("base_model")
    return read.recipe(
        "an axolotl recipe", model, axes, settings, notes, batch="micro_batch_size", sequences=1
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


def llama_factory(
    file: Path, tree: Mapping[str, Any], ignore: Collection[str] = (), model: str = ""
) -> Recipe:
    """Return the recipe of a LLaMA-Factory file.

    Args:
        ignore: keys that the caller wants ignored.
        model: what the caller says the model is.

    Raises:
        InputError: a key or a value is not understood, or it does not train.
    """
    read = _Reader("llama_factory", file, tree, ignore)
    if any(tree.get(key) is True for key in ("do_predict", "do_eval")) and tree.get("do_train") is not True:
        what = f"{read.file} predicts or evaluates, and does not train: it has no do_train"
        raise InputError(what, hint="gate what trains, or add do_train: true")
    read.one_of("stage", {"sft": "", "pt": ""}, "sft")
    tuning = read.one_of("finetuning_type", {"full": None, "lora": "compute"}, "lora")
    axes, settings = _trainer_axes(read)
    remat = not read.is_on("disable_gradient_checkpointing")
    optimizer = "muon" if read.is_on("use_muon") else read.text("optim") or "adamw_torch"
    read.optimized(settings, "optim", optimizer, remat=remat)
    settings["batch.sequence_length"] = read.number("cutoff_len", 2048)
    is_pure = read.is_on("pure_bf16")
    settings |= {"precision": "bf16"} if is_pure else {}
    if tuning is None:
        read.held(settings, is_half=is_pure and read.deepspeed is None)
    else:
        bits = read.number("quantization_bit", 16)
        if bits not in (4, 16):
            what = f"{read.file}: quantization_bit = {bits} cannot be weighed"
            raise InputError(what, hint="use 4 bits or none, or --ignore quantization_bit")
        read.adapted(settings, "lora_rank", "lora_target", "nf4" if bits == 4 else "compute")
        settings.setdefault("lora.targets", ("all-linear",))
    packed = read.is_on("packing", default=read.text("stage") == "pt")
    notes = () if packed else (_FULL_LENGTH.format("cutoff_len"),)
    model = model or read.text("model_name_or_path")
    return read.recipe("a LLaMA-Factory recipe", model, axes, settings, notes)


def _trainer_axes(read: _Reader) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the axes and settings of `deepspeed` and `fsdp`."""
    if read.deepspeed is not None:
        return deepspeed(read.file, read.deepspeed, read.folder)
    words = read.values.get("fsdp")
    listed = words.split() if isinstance(words, str) else words if isinstance(words, list) else []
    names = ["full_shard"] if words is True else [str(each) for each in listed]
    known = {"full_shard", "auto_wrap", "offload", "no_shard"}
    if unknown := [name for name in names if name not in known]:
        what = f"{read.file}: fsdp has {unknown[0][:40]!r}, which cannot be weighed"
        raise InputError(what, hint="use full_shard auto_wrap, or --ignore fsdp")
    is_split = "full_shard" in names
    return {"fsdp" if is_split else "data": REST}, ({"offload": "state"} if "offload" in names else {})


def training_arguments(
    file: Path, tree: Mapping[str, Any], ignore: Collection[str] = (), model: str = ""
) -> Recipe:
    """Return the recipe of `TrainingArguments`, alone or with a script's own model and length.

    Args:
        ignore: keys that the caller wants ignored.
        model: what the caller says the model is.

    Raises:
        InputError: a key or a value is not understood.
    """
    read = _Reader("training_arguments", file, tree, ignore)
    axes, settings = _trainer_axes(read)
    optimizer = read.text("optim") or "adamw_torch_fused"
    read.optimized(settings, "optim", optimizer, remat=read.is_on("gradient_checkpointing"))
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
    if read.is_on("use_peft"):
        rank = "lora_rank" if "lora_rank" in read.values else "lora_r"
        base = "nf4" if read.is_on("load_in_4bit") else "compute"
        read.adapted(settings, rank, "lora_target_modules", base)
        if base == "compute":
            notes.append("the frozen model is taken to be held in the format of its products")
    elif read.deepspeed is not None or is_half:
        read.held(settings, is_half=is_half)
    elif not dtype:
        notes.append("the model is taken to be loaded in fp32: in bf16 it is --set state.parameters=bf16")
    model = model or read.text("model_name_or_path")
    return read.recipe("TrainingArguments", model, axes, settings, notes)
