"""Import a function by its name `package.module:function`, and locate failures in the user's code. No jax."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, nearest_name

USERS_FAILURES = (Exception, SystemExit)
"""Exceptions of a user's code that are reported in words; a `sys.exit` in it does not end the command."""


def find_function(
    name: str, search_path: tuple[str, ...], *, libraries: tuple[str, ...]
) -> Callable[..., Any]:
    """Return a function by its name.

    Args:
        name: "package.module:function", "folder/file.py:function", or "module:Class.method". A method that
            takes an instance gets one that is made without arguments.
        search_path: folders. The named module, or its outermost package, is looked up there first. Its own
            imports are looked up there last, after the standard library and installed packages. So a file
            `secrets.py` or `numpy.py` next to the user's module replaces no other module.
        libraries: folders whose lines are not the user's.

    Raises:
        InputError: the module or function does not exist, the module has the name of another, or its import
            fails; or a class cannot be made without arguments.
    """
    module_name, _, function_name = name.rpartition(":")
    if module_name.endswith(".py"):
        file = Path(search_path[0], module_name) if search_path else Path(module_name)
        if not file.is_file():
            raise InputError(f"no file {module_name}", hint=f"it is looked up in {', '.join(search_path)}")
        search_path, module_name = (str(file.parent), *search_path), file.stem
    sys.path += [path for path in search_path if path not in sys.path]
    try:
        with _Named(module_name.partition(".")[0], search_path):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and not f"{module_name}.".startswith(f"{missing.name}."):
            raise needs(module_name, missing) from missing
        near = [path.stem for folder in search_path for path in Path(folder).glob("*.py")]
        raise InputError(
            f"no module {module_name!r} in {', '.join(search_path)}", hint=nearest_name(module_name, near)
        ) from missing
    except InputError:
        raise
    except USERS_FAILURES as failed:
        raise InputError(
            f"importing {module_name} failed {where(failed, libraries)}",
            hint=f"`python -c 'import {module_name}'` shows it",
        ) from failed
    return _attribute(module, module_name, function_name, libraries)


def _attribute(
    module: Any, module_name: str, function_name: str, libraries: tuple[str, ...]
) -> Callable[..., Any]:
    """Return the function, or the method of a class, that a module's attribute names."""
    owner: Any = None
    found: Any = module
    part = ""
    for part in function_name.split("."):
        owner, found = found, getattr(found, part, None)
    if not callable(found):
        known = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        raise InputError(
            f"{module_name} has no function {function_name!r}", hint=nearest_name(function_name, known)
        )
    method = isinstance(owner, type) and inspect.isfunction(
        inspect.getattr_static(owner, found.__name__, None)
    )
    if not method:
        return found
    try:
        return getattr(owner(), part)
    except USERS_FAILURES as failed:
        raise InputError(
            f"{module_name}:{owner.__name__}() failed {where(failed, libraries)}",
            hint=f"{function_name} takes an instance, which is made without arguments; name a function",
        ) from failed


def takes_no_mesh(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called without arguments and has no place for a mesh."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters)


class _Named(MetaPathFinder):
    """A finder that, inside a `with` block, searches one module in `search_path` before any other place.

    Raises:
        InputError: the module there has the name of one of Python's own, or of one that is already loaded.
    """

    def __init__(self, module: str, search_path: tuple[str, ...]) -> None:
        self._module, self._search_path = module, search_path

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the one module; None for any other."""
        return PathFinder.find_spec(fullname, self._search_path) if fullname == self._module else None

    def __enter__(self) -> None:
        found, loaded = self.find_spec(self._module, None), sys.modules.get(self._module)
        origin = None if found is None else found.origin
        if origin is not None and origin != getattr(loaded, "__file__", None):
            known = getattr(loaded, "__file__", None) or "Python's own"
            if loaded is not None or self._module in sys.stdlib_module_names:
                raise InputError(
                    f"{origin} has the same name as a module that is already imported: {known}",
                    hint=f"rename it, for example to my_{self._module}{Path(origin).suffix}",
                )
        sys.meta_path.insert(0, self)

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)


def needs(name: str, missing: ModuleNotFoundError) -> InputError:
    """Return the error for a package that `name` imports and that is not installed."""
    return InputError(
        f"{name} needs {missing.name!r}, which is not installed", hint=f"install {missing.name}"
    )


def where(failed: BaseException, libraries: tuple[str, ...]) -> str:
    """Return the line of the user's code that failed, if it is known, and the error's own words."""
    return f"{place_of(failed, libraries) or 'in a library'}: {type(failed).__name__}: {failed}"


def place_of(failed: BaseException, libraries: tuple[str, ...]) -> str:
    """Return the innermost line outside the folders `libraries`; "" if all lines are inside."""
    frames = traceback.extract_tb(failed.__traceback__)
    places = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f"at {places[-1].filename}:{places[-1].lineno}" if places else ""
