"""A function by its name `package.module:function`, and where user's code failed. Imports no jax."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest_name


def find_function(
    name: str, search_path: tuple[str, ...], *, libraries: tuple[str, ...]
) -> Callable[..., Any]:
    """The function, its module imported with `search_path` looked through first.

    Raises:
        InputError: the module or function is not there, or importing the module fails.
    """
    module_name, _, function_name = name.partition(":")
    sys.path[:0] = [path for path in search_path if path not in sys.path]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and not f"{module_name}.".startswith(f"{missing.name}."):
            raise needs(module_name, missing) from missing
        near = [path.stem for folder in search_path for path in Path(folder).glob("*.py")]
        raise InputError(
            f"no module {module_name!r} in {', '.join(search_path)}", hint=nearest_name(module_name, near)
        ) from missing
    except Exception as failed:
        raise InputError(
            f"importing {module_name} failed {where(failed, libraries)}",
            hint=f"`python -c 'import {module_name}'` shows it",
        ) from failed
    if not callable(getattr(module, function_name, None)):
        known = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        raise InputError(
            f"{module_name} has no function {function_name!r}", hint=nearest_name(function_name, known)
        )
    return getattr(module, function_name)


def needs(name: str, missing: ModuleNotFoundError) -> InputError:
    """What `name` imports is not installed."""
    return InputError(
        f"{name} needs {missing.name!r}, which is not installed", hint=f"install {missing.name}"
    )


def where(failed: Exception, libraries: tuple[str, ...]) -> str:
    """At which line of the user's, if it is known, with what words."""
    return f"{place_of(failed, libraries) or 'in a library'}: {type(failed).__name__}: {failed}"


def place_of(failed: Exception, libraries: tuple[str, ...]) -> str:
    """The innermost line outside the folders `libraries`; nothing where all are inside."""
    frames = traceback.extract_tb(failed.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f"at {places[-1].filename}:{places[-1].lineno}" if places else ""
