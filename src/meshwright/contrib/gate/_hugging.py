"""Read what trainers on Hugging Face's `Trainer` share: optimizers, DeepSpeed, formats, adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.contrib.lora import TARGETS
from meshwright.errors import InputError, nearest_name

from ._documents import tables_of, text_of
from ._recipe import REST
from ._tables import flattened, seen_keys, switch, table

# By the name of `optim`: our kind, the format of its moments ("" for the parameters' own), our `offload`.
_OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision", "adamw"),
        ("adamw", "", ""),
    ),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), ("adamw", "8bit", "")),
    "paged_adamw": ("adamw", "", "optimizer"),
    "paged_adamw_32bit": ("adamw", "", "optimizer"),
    "paged_adamw_8bit": ("adamw", "8bit", "optimizer"),
    **dict.fromkeys(("lion", "lion_32bit"), ("lion", "", "")),
    "lion_8bit": ("lion", "8bit", ""),
    "paged_lion_32bit": ("lion", "", "optimizer"),
    "paged_lion_8bit": ("lion", "8bit", "optimizer"),
    **{name: (name, "", "") for name in ("sgd", "adafactor", "adagrad", "rmsprop", "muon")},
}
WHOLE = "each device is taken to hold all of the model and its state: neither DeepSpeed nor FSDP is named"


def optimizer_settings(file: str, key: str, name: Any) -> dict[str, Any]:
    """Return our settings for an optimizer of `TrainingArguments.optim`.

    Raises:
        InputError: it has no counterpart here.
    """
    text = str(name).lower().removeprefix("optimizernames.")
    if text not in _OPTIMIZERS:
        what = f"{file}: {key} = {str(name)[:40]!r} has no counterpart here"
        raise InputError(what, hint=f"{nearest_name(text, _OPTIMIZERS)}; or weigh another: --ignore {key}")
    kind, moments, offload = _OPTIMIZERS[text]
    made: dict[str, Any] = {"optimizer.kind": kind, "optimizer.learning_rate": 1e-4}
    made |= {"state.moments": moments} if moments else {}
    return made | ({"offload": offload} if offload else {})


def deepspeed(file: str, given: Any, folder: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the axes and settings of a DeepSpeed configuration: a table, or the name of a JSON file.

    Raises:
        InputError: the file is not there, or a key of it is not understood.
    """
    if isinstance(given, str):
        path = next((each for each in (folder / given, Path(given)) if os.path.isfile(each)), None)
        if path is None:
            what = f"{file} names the DeepSpeed configuration {given[:100]!r}, which is no file here"
            raise InputError(what, hint="run from the folder that its path begins in")
        name, tree = str(path), tables_of(path, text_of(path))
    elif isinstance(given, dict):
        name, tree = f"{file}: deepspeed", given
    else:
        raise InputError(f"{file}: deepspeed is neither a file nor a table", hint="name its JSON file")
    values = dict(flattened(tree))
    seen = seen_keys(table("deepspeed"), name, values)
    values = {key: value for key, value in values.items() if key in seen.understood}
    stage = values.get("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"{name}: zero_optimization.stage = {stage!r}", hint="DeepSpeed has stages 0 to 3")
    settings: dict[str, Any] = {"zero1": True} if stage in (1, 2) else {}
    moved = [values.get(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")]
    for device in moved:
        if device not in (None, "none", "cpu"):
            raise InputError(f"{name}: offload to {device!r} cannot be weighed", hint='use "cpu" or "none"')
    if moved[1] == "cpu":
        settings["offload"] = "state"
    elif moved[0] == "cpu":
        settings["offload"] = "optimizer"
    return ({"fsdp": REST} if stage == 3 else {"data": REST}), settings


def precision(file: str, values: Mapping[str, Any], default: str = "fp32") -> str:
    """Return the format of arithmetic that `bf16`, `fp16` and `fp8` choose."""
    for key, name in (
        ("fp8", "fp8"),
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("fp16", "fp16"),
        ("float16", "fp16"),
    ):
        if key in values and switch(file, key, values[key]):
            return name
    return default


def state_settings(
    *, precision: str, is_half: bool, by_deepspeed: bool, moments: str | None
) -> dict[str, Any]:
    """Return the formats between steps.

    Args:
        precision: of products.
        is_half: trained parameters are loaded, and stay, in bf16.
        by_deepspeed: DeepSpeed keeps a copy in fp32, with its moments, of parameters that are not.
        moments: the format that the optimizer chooses; None for that of the parameters it is given.
    """
    if by_deepspeed and precision in ("bf16", "fp8"):
        return {"state.parameters": "bf16", "state.master": "fp32"}
    if by_deepspeed or not is_half:
        return {}
    made = {"state.parameters": "bf16", "gradient_sum": "bf16"}
    return made | ({} if moments else {"state.moments": "bf16"})


def adapter_targets(file: str, key: str, given: Any) -> tuple[str, ...]:
    """Return the products that have adapters, by PEFT's names.

    Raises:
        InputError: one of them is no product of our blocks.
    """
    listed = given.split(",") if isinstance(given, str) else given
    if not isinstance(listed, list):
        raise InputError(f"{file}: {key} is no list of names", hint="write it as [q_proj, v_proj]")
    names = [str(each).strip() for each in listed]
    if names in (["all"], ["all-linear"]):
        return ("all-linear",)
    for name in names:
        if name not in TARGETS:
            what = f"{file}: {key} names {name[:60]!r}, which is no product of our blocks"
            raise InputError(what, hint=f"use names of {', '.join(TARGETS)}, or --ignore {key}")
    return tuple(names)
