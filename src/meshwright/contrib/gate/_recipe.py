"""Hold what a training recipe says, and make a run of it for a number of devices.

Every recipe counts sequences for each device that has rows of its own, and gives its axes sizes. Here a run
has the sequences of the whole fleet and one layout: this module is where the one becomes the other.

The run that is made is Meshwright's own step with the recipe's sizes and settings. Kernels, allocator and
buffers of the program that the recipe is for are not in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config import Overrides, RunConfig, load_config, overridden
from meshwright.errors import InputError
from meshwright.units import parse_count

from ._tables import Seen

REST = -1  # the size of the axis that takes the devices that are left
_ENDING = re.compile(r"(?:-(?:instruct|thinking|chat|it|base|hf))?(?:-\d{4})?$", re.IGNORECASE | re.ASCII)
_BASE = "bytes-nano"  # the preset whose other sections a described model takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a file or a list of arguments describes.

    `model`: an id, a folder or a preset; "" with `model_keys`, which describe it. `axes`: sizes of ours;
    `REST` at most once; experts are spread over a part of fsdp or data. `per_device`: sequences in one pass
    of each device with rows of its own; `accumulated`: passes of a step; `sequences`: of the whole fleet, if
    the recipe states them. `sequences_in_run`: the length of the run, if it is stated in sequences.
    """

    kind: str
    file: str
    seen: Seen
    model: str = ""
    model_keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    per_device: int = 1
    accumulated: int | None = None
    sequences: int | None = None
    steps: int | None = None
    sequences_in_run: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A run and its layout, and what was assumed to make it."""

    config: RunConfig
    layout: str
    notes: tuple[str, ...] = ()


def described(recipe: Recipe, num_devices: int, overrides: Overrides, tokens: str | None) -> Described:
    """Return the run of a recipe on a number of devices.

    Args:
        overrides: your own settings, which count more than the recipe's.
        tokens: of the whole run, where the recipe has no number of steps.

    Raises:
        InputError: the devices cannot be shared out as it says, or the run is not one that can be weighed.
    """
    axes = _sizes(recipe, num_devices)
    rows = math.prod(axes.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    notes = list(recipe.notes)
    settings = dict(recipe.settings)
    if axes.get("context", 1) > 1 and "zero1" not in settings and "fsdp" in recipe.axes:
        settings["zero1"] = True
        notes.append("parameters are split over context too, as there: zero1 does that here")
        if settings.get("gradient_sum") == "all-fp32":
            settings["gradient_sum"] = "fp32"
    if "lora.rank" in settings and settings.pop("zero1", False):
        notes.append("the moments of adapters are taken to be whole on each device: they are few")
    sequences = recipe.sequences or recipe.per_device * (recipe.accumulated or 1) * rows
    settings |= {"batch.sequences": sequences, "batch.microbatch_sequences": recipe.per_device}
    settings |= {"batch.sequences_per_replica": None} if recipe.model else {}
    layout = ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "data=1"
    steps = recipe.steps
    if steps is None and recipe.sequences_in_run is not None:
        steps = math.ceil(recipe.sequences_in_run / sequences)
    name, notes_of_model = (_BASE, ()) if recipe.model_keys else model_id(recipe.model, recipe.file)
    try:
        fixed = {"layout": layout, "steps": steps, "schedule.kind": "constant"}
        config = load_config(name, {**recipe.model_keys, **settings, **fixed})
        config = overridden(config, overrides)
        if recipe.model_keys:
            config = config.model_copy(update={"name": f"the model of {Path(recipe.file).name}"})
    except InputError as wrong:
        what = f"{recipe.file}, read as {recipe.kind} on {num_devices} devices: {wrong.message}"
        raise InputError(what, hint=wrong.hint) from wrong
    if tokens is not None:
        steps = max(1, math.ceil(parse_count(tokens) / config.batch.tokens_per_step))
        config = overridden(config, [f"steps={steps}"])
    return Described(config=config, layout=config.layout, notes=(*notes_of_model, *notes))


def _sizes(recipe: Recipe, num_devices: int) -> dict[str, int]:
    """Return the size of each axis, with the experts' part taken out of fsdp, or else of data.

    Raises:
        InputError: the devices cannot be shared out so.
    """
    order = ("stage", "data", "fsdp", "context", "expert", "tensor")
    axes = {axis: recipe.axes[axis] for axis in order if axis in recipe.axes}
    experts = axes.pop("expert", 1)
    fixed = math.prod(size for size in axes.values() if size != REST)
    if num_devices % fixed:
        said = ", ".join(f"{axis} = {size}" for axis, size in axes.items() if size not in (1, REST))
        what = f"{recipe.file} asks for {said}, which do not divide {num_devices} devices"
        raise InputError(what, hint="launch it on a multiple of them, or change the sizes")
    rest = num_devices // fixed
    if REST not in axes.values() and rest > 1:
        what = f"{recipe.file} uses {fixed} of {num_devices} devices: the sizes of its axes multiply to that"
        raise InputError(what, hint="ask for as many devices as it uses, or let one size be the rest")
    axes = {axis: rest if size == REST else size for axis, size in axes.items()}
    if experts > 1:
        whole = "fsdp" if axes.get("fsdp", 1) > 1 else "data"
        inside, left = divmod(axes.get(whole, 1), experts)
        if left or not inside:
            has = axes.get(whole, 1)
            what = f"{recipe.file} spreads experts over {experts} devices, and its {whole} axis has {has}"
            raise InputError(
                what, hint="groups of experts that reach over tensor or context cannot be weighed yet"
            )
        axes |= {whole: inside, "expert": experts}
    return {axis: axes[axis] for axis in order if axis in axes}


def model_id(text: str, file: str) -> tuple[str, tuple[str, ...]]:
    """Return what `load_config` takes for a model's id, and how it was read if it was read as another's.

    An id that is not known is that of a published model with the same last part, or with that last part but
    for an ending such as "-Instruct": a fine-tuned model has the sizes of the one it was made of.

    >>> model_id("NousResearch/Llama-3.2-1B", "axolotl.yaml")[0]
    'Llama-3.2-1B'

    Raises:
        InputError: no model has that id.
    """
    if not text:
        raise InputError(f"{file} names no model", hint="name it: --model meta-llama/Llama-3.1-8B")
    last = text.rstrip("/").rpartition("/")[2]
    short = _ENDING.sub("", last, count=1)
    failed: InputError | None = None
    for name in dict.fromkeys((text, last, short, f"{short}-Instruct", f"{short}-hf", f"{short}-it")):
        try:
            load_config(name)
        except InputError as wrong:
            failed = failed or wrong
            continue
        note = () if name == text else (f"the model {text} is taken to have the sizes of {name}",)
        return name, note
    assert failed is not None, "at least one name was tried"
    what = f"{file} trains {text[:100]}, whose sizes are not known: {failed.message}"
    raise InputError(
        what, hint="name a folder with its config.json, or a model of the same sizes: --model ID"
    )


def first_words(notes: Sequence[str]) -> tuple[str, ...]:
    """Return notes without repetitions, in order."""
    return tuple(dict.fromkeys(notes))
