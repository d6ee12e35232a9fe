"""Anybody's train step: `package.module:function`, called with the mesh, returning (step, args[, kwargs]).

Imports jax: only the worker process may import this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import InputError
from ._functions import find_function, needs, where
from ._request import Request

JAX = (str(Path(jax.__file__).parent),)
CONTRACT = "it is called with the mesh and returns (step, args) or (step, args, kwargs)"


def foreign_program(request: Request, mesh: Mesh) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step, jitted if it was not, and its arguments made abstract.

    Raises:
        InputError: the module or function is not there, fails, or returns something else.
    """
    assert request.function is not None
    function = find_function(request.function, request.search_path, libraries=JAX)
    try:
        returned = function(mesh)
    except ModuleNotFoundError as missing:
        raise needs(request.function, missing) from missing
    except Exception as failed:
        raise InputError(
            f"{request.function}(mesh) failed {where(failed, JAX)}",
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
            f"the step that {name} returned failed {where(failed, JAX)}",
            hint=f"it was traced with arguments of these shapes: {str(shapes)[:300]}",
        ) from failed


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
