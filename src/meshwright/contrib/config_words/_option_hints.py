"""Say what an unknown option of a command may mean: an option, or a key of the configuration with its value.

It is the option or the key that the word means elsewhere, with the value that was given; else the nearest.

Used by: `cli`, by the entry point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperOption

from meshwright.config import AXES, AXIS_ALIASES, load_config
from meshwright.errors import InputError, near_names

from ._elsewhere import keys_named, value_meant

# Options by the words that other programs have for them.
ELSEWHERE = {
    "--on": "accelerator accelerators chip chips cluster device devices fleet gpu gpus gpu-type hardware "
    "instance machine machines n-gpus ngpus nnodes node nodes nproc-per-node num-devices num-gpus num-nodes "
    "tpu tpus world-size",
    "--layout": "mesh parallelism sharding strategy",
    "--steps": "iterations iters max-iters max-steps max-train-steps num-iterations num-steps "
    "num-train-steps total-steps train-iters train-steps",
    "--tokens": "max-tokens num-tokens total-tokens train-tokens training-tokens",
    "--price": "cost cost-per-hour gpu-cost gpu-price hourly-price price-per-hour",
    "--html": "page report web",
    "--folder": "dir log-dir logdir out out-dir output output-dir run-dir save save-dir",
    "--verbose": "all-tables details full long",
    "--json": "as-json output-json",
    "--budget": "max-seconds max-time seconds time-limit timeout",
    "--prompt": "input text",
    "--tokens-per-step": "batch-tokens tokens-per-batch",
}
_PARALLEL_SIZE = re.compile(r"(?<=.)(-model)?(-parallel(ism)?)?(-(size|degree|ways))?$")


def option_hint(name: str, given: Sequence[str], params: Iterable[Any]) -> str:
    """Return the hint for an unknown option of a command.

    Args:
        given: all words after the command.
        params: the command's options and arguments.
    """
    options = {text: option for option in params if isinstance(option, TyperOption) for text in option.opts}
    plain, value = name.lstrip("-").lower().replace("_", "-"), _value_of(name, given)
    script = next((word for word in given if word.endswith(".py")), None)
    if script is not None and "--" not in given and given.index(script) < _place_of(name, given):
        return f"write -- before the command of your script: -- python {script} {name}"
    for text, words in ELSEWHERE.items():
        if text in options and plain in words.split():
            return f"{text} means that here: {text} {_example(text, value, options[text])}".rstrip()
    near = near_names(name, [text for text in options if text.startswith("--")])
    of = "the axes of the mesh are one option"
    takes_axes = next((text for text in ("--layout", "--fix") if text in options), None)
    if takes_axes is not None and (axis := _axis(plain)):
        return f"{of}: {takes_axes} {axis}={value or 'N'}"
    if "--set" in options and (keys := keys_named(plain)):
        if keys[0] == "layout":
            return f"{of}: --layout fsdp=8,tensor=2"
        written = " or ".join(f"--set {key}={_in_our_words(key, plain, value)}" for key in keys[:3])
        return f"it is a key of the configuration: {written}"
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(sorted(text for text in options if text.startswith('--')))}"


def _axis(plain: str) -> str:
    """Return the axis of the mesh that an option names: "tp", "tensor-model-parallel-size"; "" if none."""
    word = _PARALLEL_SIZE.sub("", plain).replace("-", "_")
    return word if word in AXES else AXIS_ALIASES.get(word, "")


def _in_our_words(key: str, plain: str, value: str | None) -> str:
    """Return the value in the configuration's words; a flag such as --bf16 is itself the value."""
    if value:
        return value_meant(key, value) or value
    meant = value_meant(key, plain) or plain
    try:
        load_config("bytes-nano", [f"{key}={meant}"])
    except InputError:
        return "VALUE"
    return meant


def _example(text: str, value: str | None, option: TyperOption) -> str:
    """Return a value for an option: the one that was given, as the option takes it."""
    if text == "--on":
        value = value or "8"
        return f"{value}xH100" if value.isdecimal() else value if value[0].isdecimal() else f"8x{value}"
    return "" if option.is_flag else value or str(option.metavar)


def _place_of(name: str, given: Sequence[str]) -> int:
    return next((place for place, word in enumerate(given) if word.partition("=")[0] == name), len(given))


def _value_of(name: str, given: Sequence[str]) -> str | None:
    """Return the value that was given with an option; None without one."""
    place = _place_of(name, given)
    if place == len(given):
        return None
    _, has_value, value = given[place].partition("=")
    if has_value:
        return value
    after = given[place + 1] if place + 1 < len(given) else "-"
    return None if after.startswith("-") else after
