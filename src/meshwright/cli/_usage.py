"""Read a command's words, answer wrong ones as unknown keys are answered, and show types as words.

An unknown option is an `InputError`, whose hint is the option or the key of the configuration that the word
means elsewhere, with the value that was given; else the nearest option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from meshwright.errors import InputError, near_names, nearest_name

HELP_NAMES = ["--help", "-h"]
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


def _in_words(parameters: list[Any]) -> list[Any]:
    """Have parameters show what they take as a word: TEXT, NUMBER, PATH, nothing for a flag."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type = lambda ctx: ""  # its name and its help say what it is
        elif isinstance(parameter, TyperOption) and parameter.metavar is None:
            parameter.metavar = _type_of(parameter)
    return parameters


class Command(TyperCommand):
    """A command that refuses unknown and repeated options, and empty file names, in words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return _in_words(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            InputError: there is no such option, one with one value is given twice, or a file has no name.
        """
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except Exception as wrong:
            if type(wrong).__name__ != "NoSuchOption":  # click's, whose own module is typer's affair
                raise
            name: str = wrong.option_name  # pyright: ignore[reportAttributeAccessIssue]
            raise InputError(
                f"`{ctx.command_path}` has no option {name}", hint=_meant(name, given, self.params)
            ) from None
        values, _, order = self.make_parser(ctx).parse_args(given)
        for option in {option.name: option for option in order}.values():
            times = sum(given_option.name == option.name for given_option in order)
            if isinstance(option, TyperOption) and times > 1 and not (option.multiple or option.is_flag):
                raise InputError(
                    f"{option.opts[0]} is given {times} times, and takes one value",
                    hint=f"keep one of them; {option.opts[0]} {values[option.name]} was the last",
                )
            if values.get(option.name) == "" and isinstance(ctx.params.get(option.name), Path):
                is_option = isinstance(option, TyperOption)
                name = option.opts[0] if is_option else option.metavar or option.opts[0]
                raise InputError(f"{name} is empty", hint="name a file or a folder")
        return rest


class Verbs(TyperGroup):
    """Commands by name; an unknown one is refused in words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return _in_words(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before the command.

        Raises:
            InputError: there is no such option.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as wrong:
            if type(wrong).__name__ != "NoSuchOption":
                raise
            name: str = wrong.option_name  # pyright: ignore[reportAttributeAccessIssue]
            verb = next((word for word in given if word in self.commands), None)
            hint = f"options follow the command: {ctx.command_path} {verb} ... {name}"
            if verb is None:
                hint = f"name a command first: {', '.join(sorted(self.commands))}"
            raise InputError(f"`{ctx.command_path}` has no option {name}", hint=hint) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names.

        Raises:
            InputError: it names none.
        """
        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        hint = nearest_name(name, self.commands)
        if not near_names(name, self.commands) and "weigh" in self.commands:
            hint = f"write a command first, as {ctx.command_path} weigh {name} --on 8xH100; {hint}"
        raise InputError(f"`{ctx.command_path}` has no command {name!r}", hint=hint)


def _type_of(option: TyperOption) -> str:
    """Return what an option takes in a word; "" for a flag."""
    kind = option.type_descriptor
    if option.is_flag or kind.is_choice:
        return "" if option.is_flag else "|".join(map(str, kind.choices or ()))
    text = option.bare_type()
    return "NUMBER" if text in ("int", "float") or kind.is_ranged else "PATH" if kind.is_path else "TEXT"


def _meant(name: str, given: Sequence[str], params: Iterable[Any]) -> str:
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
    from meshwright.config import keys_named

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
    from meshwright.config import AXES, AXIS_ALIASES

    word = _PARALLEL_SIZE.sub("", plain).replace("-", "_")
    return word if word in AXES else AXIS_ALIASES.get(word, "")


_PARALLEL_SIZE = re.compile(r"(?<=.)(-model)?(-parallel(ism)?)?(-(size|degree|ways))?$")


def _in_our_words(key: str, plain: str, value: str | None) -> str:
    """Return the value in the configuration's words; a flag such as --bf16 is itself the value."""
    from meshwright.config import load_config, value_meant

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
