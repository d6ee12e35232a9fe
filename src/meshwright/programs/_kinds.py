"""Find the kind of program that a user's words name, by a registry that other rooms add to.

A kind outside the core registers itself by an entry point of the group `meshwright.programs`: a `Kind`, in a
module that is cheap to import. Adding one touches no file here.

Used by: `api` and the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, is_own_configuration, model_room
from meshwright.errors import InputError

from ._configured import Configured, is_configuration
from ._program import Program

ENTRY_POINTS = "meshwright.programs"
PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
NO_PROGRAM = (
    "give a preset, a TOML file, a RunConfig or 'package.module:function'; mw.jax_step(step, *args) for a "
    "function of JAX; mw.torch_step(module, *inputs) for a PyTorch module; mw.script('train.py') for a script"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of program, as it is named on a command line.

    Args:
        what: the kind in words, with its article: "a script".
        claims: tells whether words name this kind. They are a command line's: one word, or a whole command.
        make: makes the program of the words, with `options` as keyword arguments.
        options: the keyword arguments that `make` takes, beside the words.
    """

    what: str
    claims: Callable[[Sequence[str]], bool]
    make: Callable[..., Program]
    options: tuple[str, ...] = ()


def _is_function(words: Sequence[str]) -> bool:
    return len(words) == 1 and not is_configuration(words[0])


def _function(words: Sequence[str], rules: str | Path | None = None) -> Program:
    from meshwright.registry import room  # a configuration needs none of it

    return room("jax_steps").jax_step(words[0], rules=rules)


def without_interpreter(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the Python that runs it.

    >>> without_interpreter(["python3.11", "train.py", "--lr", "3e-4"])
    ['train.py', '--lr', '3e-4']
    """
    return list(words[1:] if words and PYTHON.match(os.path.basename(words[0])) else words)


CONFIGURATION = Kind(
    what="a configuration",
    claims=lambda words: len(words) == 1 and is_configuration(words[0]) and not words[0].endswith(".py"),
    make=lambda words: Configured(words[0]),
)
FUNCTION = Kind(what="a function", claims=_is_function, make=_function, options=("rules",))


def other_kinds() -> tuple[Kind, ...]:
    """Return the kinds that are registered outside the core, by name."""
    from meshwright.registry import registered  # a configuration asks for none

    return tuple(registered(ENTRY_POINTS).values())


def program_named(words: Sequence[str], options: Mapping[str, Any] | None = None) -> Program:
    """Return the program that the words of a command line name.

    Args:
        options: by name; None or False is not given.

    Raises:
        InputError: an option is given that this kind of program does not have; or as its maker.
    """
    given = {name: value for name, value in (options or {}).items() if value not in (None, False)}
    kind = _kind_of(words, given)
    for name in given:
        if name not in kind.options:
            option = "--" + {"all_calls": "all"}.get(name, name).rstrip("_").replace("_", "-")
            kinds = (FUNCTION, *other_kinds())
            owners = dict.fromkeys(each.what for each in kinds if name in each.options)
            hint = f"it is for {' and '.join(owners)}" if owners else f"leave {option} out"
            raise InputError(f"{kind.what} takes no {option}", hint=hint)
    return kind.make(words, **given)


def _kind_of(words: Sequence[str], options: Collection[str]) -> Kind:
    """Return the kind that claims the words. Configurations come first: a preset loads nothing else.

    A Hugging Face model is another kind's if an option of that kind is given, or if its family or one of its
    keys has no counterpart in our configuration.
    """
    is_ours = CONFIGURATION.claims(words)
    if is_ours and not options and (is_own_configuration(words[0]) or not model_room().is_refused(words[0])):
        return CONFIGURATION
    for kind in (*other_kinds(), FUNCTION):
        if kind.claims(words) and (not is_ours or set(options) <= set(kind.options)):
            return kind
    return CONFIGURATION


def program_of(given: Any) -> Program:
    """Return what a verb is given as a program.

    Args:
        given: a program; a `RunConfig`; or a text or path, which names a configuration or a function.

    Raises:
        InputError: it is none of them. The hint names the functions that make a program of it.
    """
    if isinstance(given, Program):
        return given
    if isinstance(given, RunConfig):
        return Configured(given)
    if isinstance(given, str | Path):
        return program_named((str(given),))
    raise InputError(f"{type(given).__name__} is no program", hint=NO_PROGRAM)
