"""Anybody's train step: `package.module:function`, called with the mesh, returning (step, args[, kwargs]).

Imports jax: only the worker process may import this module.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import InputError, nearest_name
from ._request import Request

CONTRACT = "it is called with the mesh and returns (step, args) or (step, args, kwargs)"


def foreign_program(request: Request, mesh: Mesh) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step, jitted if it was not, and its arguments made abstract.

    Raises:
        InputError: the module or function is not there, fails, or returns something else.
    """
    assert request.function is not None
    function = _find(request.function, request.search_path)
    try:
        returned = function(mesh)
    except ModuleNotFoundError as missing:
        raise _needs(request.function, missing) from missing
    except Exception as failed:
        raise InputError(
            f"{request.function}(mesh) failed {_where(failed)}",
            hint="its devices are descriptions and hold no data: return `jax.ShapeDtypeStruct` arguments "
            "(jax.eval_shape makes them), with NamedSharding(mesh, ...) where they are split",
        ) from failed
    if not isinstance(returned, tuple) or len(returned) not in (2, 3) or not callable(returned[0]):
        raise InputError(
            f"{request.function} returned {type(returned).__name__}, not a step with arguments", hint=CONTRACT
        )
    step, arguments, keywords = returned if len(returned) == 3 else (*returned, {})
    if not isinstance(arguments, tuple | list):
        raise InputError(
            f"{request.function}: args is {type(arguments).__name__}, not a tuple", hint=CONTRACT
        )
    jitted = step if hasattr(step, "trace") else jax.jit(step)
    abstract = jax.tree.map(lambda leaf: _abstract(leaf, mesh), (tuple(arguments), dict(keywords)))
    return jitted, *abstract


def trace_foreign(name: str, step: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """The step of `name`, traced.

    Raises:
        InputError: it fails on the arguments that came with it.
    """
    try:
        return step.trace(*arguments, **keywords)
    except Exception as failed:
        shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), (arguments, keywords))
        raise InputError(
            f"the step that {name} returned failed {_where(failed)}",
            hint=f"it was traced with arguments of these shapes: {str(shapes)[:300]}",
        ) from failed


def _needs(name: str, missing: ModuleNotFoundError) -> InputError:
    return InputError(
        f"{name} needs {missing.name!r}, which is not installed", hint=f"install {missing.name}"
    )


def _where(failed: Exception) -> str:
    """At which line, the innermost that is not JAX's own, with what words."""
    ours = str(Path(jax.__file__).parent)
    frames = traceback.extract_tb(failed.__traceback__)
    place = [frame for frame in frames if not frame.filename.startswith(ours)][-1]
    return f"at {place.filename}:{place.lineno}: {type(failed).__name__}: {failed}"


def _find(name: str, search_path: tuple[str, ...]) -> Callable[[Mesh], Any]:
    module_name, _, function_name = name.partition(":")
    sys.path[:0] = [path for path in search_path if path not in sys.path]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and not f"{module_name}.".startswith(f"{missing.name}."):
            raise _needs(module_name, missing) from missing
        near = [path.stem for folder in search_path for path in Path(folder).glob("*.py")]
        raise InputError(
            f"no module {module_name!r} in {', '.join(search_path)}", hint=nearest_name(module_name, near)
        ) from missing
    except Exception as failed:
        raise InputError(
            f"importing {module_name} failed {_where(failed)}",
            hint=f"`python -c 'import {module_name}'` shows it",
        ) from failed
    if not callable(getattr(module, function_name, None)):
        known = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        raise InputError(
            f"{module_name} has no function {function_name!r}", hint=nearest_name(function_name, known)
        )
    return getattr(module, function_name)


def _abstract(leaf: Any, mesh: Mesh) -> Any:
    """An array as its shape on the mesh: kept if it says how it is split, else replicated."""
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    if not (isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple == mesh.shape_tuple):
        sharding = NamedSharding(mesh, PartitionSpec())
    else:
        sharding = NamedSharding(mesh, sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
