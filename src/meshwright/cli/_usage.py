"""Read a command's words, answer wrong ones as unknown keys are answered, and show types as words.

An unknown option is an `InputError`, whose hint a room outside the core has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from meshwright.errors import InputError, near_names, nearest_name

HELP_NAMES = ["--help", "-h"]


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
                f"`{ctx.command_path}` has no option {name}", hint=_option_hint(name, given, self.params)
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


def _option_hint(name: str, given: Sequence[str], params: Iterable[Any]) -> str:
    from meshwright.registry import room  # outside the core

    return room("config_words").option_hint(name, given, params)


def _type_of(option: TyperOption) -> str:
    """Return what an option takes in a word; "" for a flag."""
    kind = option.type_descriptor
    if option.is_flag or kind.is_choice:
        return "" if option.is_flag else "|".join(map(str, kind.choices or ()))
    text = option.bare_type()
    return "NUMBER" if text in ("int", "float") or kind.is_ranged else "PATH" if kind.is_path else "TEXT"
