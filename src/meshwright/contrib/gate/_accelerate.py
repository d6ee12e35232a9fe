"""Read `accelerate launch`: its configuration and options, which say how a recipe of `Trainer` is split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

from ._documents import documents_of, tables_of, text_of
from ._hugging import WHOLE, deepspeed, state_settings
from ._recipe import REST, Recipe
from ._shell import is_known, shown
from ._tables import flattened, seen_keys, switch, table, whole

_FLAGS = frozenset({
    "use_fsdp", "use_deepspeed", "multi_gpu", "use_cpu", "quiet", "module", "no_python", "debug",
    "same_network", "enable_cpu_affinity", "use_megatron_lm", "use_tp", "use_parallelism_config", "m",
})  # fmt: skip
_SECTIONS = ("fsdp_config.", "deepspeed_config.")
_HELD = ("state.parameters", "state.moments", "gradient_sum")
_KINDS = ("no", "multi_gpu", "fsdp", "deepspeed", "")


def options_of(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the options of `accelerate launch` before a script; None if the words have no such command.

    >>> options_of(["srun", "accelerate", "launch", "--use_fsdp", "--config_file", "a.yaml"])
    {'use_fsdp': True, 'config_file': 'a.yaml'}
    """
    names = [Path(shown(word)).name for word in words]
    for place, name in enumerate(names):
        if name == "accelerate.commands.launch" or (name == "launch" and "accelerate" in names[:place]):
            rest = list(words[place + 1 :])
            break
    else:
        return None
    found: dict[str, Any] = {}
    while rest:
        option, sign, value = rest.pop(0).lstrip("-").partition("=")
        option = option.replace("-", "_")
        if option in _FLAGS and not sign:
            found[option] = True
        else:
            found[option] = value if sign else (rest.pop(0) if rest else "")
    found.pop("m", None)
    return found


def launched(
    recipe: Recipe,
    options: Mapping[str, Any],
    find: Callable[[str], Path | None],
    ignore: Collection[str] = (),
) -> Recipe:
    """Return a recipe as `accelerate launch` runs it; what the recipe itself says of its split stays.

    Args:
        options: of the command.
        find: returns the file of a name that the command has.
        ignore: keys that the caller wants ignored.

    Raises:
        InputError: the configuration is not here, or a key or a value is not understood.
    """
    values = dict(options)
    name = str(values.pop("config_file", ""))
    file = recipe.file
    if name:
        if (path := find(name)) is None:
            what = f"{file} is launched by accelerate with {shown(name)[:100]}, which is no file here"
            raise InputError(what, hint="run from the folder that its path begins in")
        text, file = text_of(path), str(path)
        tree = tables_of(path, text) if path.suffix == ".json" else documents_of(path, text)[0]
        values = {_short(key): value for key, value in flattened(tree)} | values
    seen = seen_keys(table("accelerate"), file, values, ignore)
    read = {key: str(value) for key, value in values.items() if key in seen.understood}
    if unknown := [key for key, value in read.items() if not is_known(value)]:
        what = f"{file}: {unknown[0]} is {shown(read[unknown[0]])[:60]}, which only a run would know"
        raise InputError(what, hint=f"write the value, or --ignore {unknown[0]}")
    axes, settings = _split(file, read, find)
    own = dict(recipe.settings)
    if own.get("zero1") or "fsdp" in recipe.axes:
        axes, settings = {}, {}
    kind = read.get("mixed_precision", "no")
    if kind != "no" and own.get("precision") == "fp32":
        settings["precision"] = kind
    if axes and _by_deepspeed(file, read) and "lora.rank" not in own:
        own = {key: value for key, value in own.items() if key not in _HELD}
        used = str(settings.get("precision", own.get("precision")))
        settings |= state_settings(precision=used, is_half=False, by_deepspeed=True, moments=None)
    axes = {axis: size for axis, size in recipe.axes.items() if size != REST or not axes} | axes
    seen = dataclasses.replace(
        recipe.seen,
        understood={**recipe.seen.understood, **seen.understood},
        ignored={**recipe.seen.ignored, **seen.ignored},
    )
    is_split = "fsdp" in axes or _by_deepspeed(file, read)
    notes = tuple(note for note in recipe.notes if not (note == WHOLE and is_split))
    return dataclasses.replace(recipe, notes=notes, axes=axes, settings=own | settings, seen=seen)


def _short(key: str) -> str:
    for section in _SECTIONS:
        key = key.removeprefix(section)
    return key


def _by_deepspeed(file: str, read: Mapping[str, str]) -> bool:
    named = read.get("distributed_type", "").lower() == "deepspeed"
    return named or switch(file, "use_deepspeed", read.get("use_deepspeed", "no"))


def _split(
    file: str, read: Mapping[str, str], find: Callable[[str], Path | None]
) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the axes and settings of FSDP or DeepSpeed; none for data parallelism alone.

    Raises:
        InputError: it is split in another way.
    """
    kind = read.get("distributed_type", "").lower()
    if kind not in _KINDS:
        what = f"{file}: distributed_type = {kind[:40]!r} cannot be weighed"
        raise InputError(what, hint="use FSDP, DEEPSPEED, MULTI_GPU or NO")
    if _by_deepspeed(file, read):
        given: Any = read.get("deepspeed_config_file")
        if given is None:
            parts = {part: {"device": read.get(f"offload_{part}_device")} for part in ("optimizer", "param")}
            zero = {f"offload_{part}": device for part, device in parts.items()}
            given = {
                "zero_optimization": {
                    "stage": whole(file, "zero_stage", read.get("zero_stage", 2), 0),
                    **zero,
                }
            }
        elif (path := find(given)) is not None:
            given = str(path)
        return deepspeed(file, given, Path())
    if kind != "fsdp" and not switch(file, "use_fsdp", read.get("use_fsdp", "no")):
        return {}, {}
    strategy = read.get(
        "fsdp_reshard_after_forward", read.get("fsdp_sharding_strategy", "full_shard")
    ).lower()
    if strategy not in ("full_shard", "1", "true", "no_shard", "3"):
        what = f"{file}: parameters that stay whole after the forward pass, or are split within a host alone "
        what += f"({strategy[:30]}), cannot be weighed"
        hint = "use FULL_SHARD, or --ignore fsdp_sharding_strategy --ignore fsdp_reshard_after_forward"
        raise InputError(what, hint=hint)
    settings: dict[str, Any] = {}
    if switch(file, "fsdp_offload_params", read.get("fsdp_offload_params", "no")):
        settings["offload"] = "state"
    if switch(file, "fsdp_activation_checkpointing", read.get("fsdp_activation_checkpointing", "no")):
        settings["remat"] = "full"
    return {"data" if strategy in ("no_shard", "3") else "fsdp": REST}, settings
