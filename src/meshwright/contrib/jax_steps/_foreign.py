"""Trace and lower the user's own train step, named `package.module:function`.

The function is called with the mesh, and with the knobs that are asked for, and returns
(step, args[, kwargs]).
Imports jax: only the worker process may import this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.compiler import Request, TakesNoMesh
from meshwright.config import Problem, input_error
from meshwright.contrib.sharding_words import Surroundings, does_not_divide, indivisible
from meshwright.errors import InputError, nearest_name
from meshwright.hardware import Fleet
from meshwright.registry import room
from meshwright.worker import callbacks_without_devices, count_traced

from ._arguments import argument_paths
from ._find_function import USERS_FAILURES, find_function, needs, place_of, takes_no_mesh, where
from ._leaks import leak_error, noting_leaks_in_threads
from ._live import refuse_leaks
from ._shapes import held_as_shapes, unreplaced
from ._stand_ins import as_the_fleet

_OWN = Path(__file__).parents[2]
ROOMS = ("worker", "contrib/jax_steps", "contrib/scripts")
# Frames of jax, and of our packages that call the user's function.
JAX = (str(Path(jax.__file__).parent), *(str(_OWN / room) for room in ROOMS))
_STANDARD = sysconfig.get_path("stdlib")
DEFAULT_AXIS = "data"  # of the mesh of a function for which no layout was asked
CONTRACT = "it is called with the mesh, if it takes one, and returns (step, args) or (step, args, kwargs)"


class _Reads:
    """See what a user's function does with arrays that are held as shapes, in place of a script's watch."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def has_products(self, closed: Any) -> bool:
        """Return whether a jaxpr has matrix products."""
        found = count_traced(getattr(closed, "jaxpr", closed), self._request.platform)
        return any(found.by_phase.values())

    def called(self, args: Any, params: dict[str, Any]) -> bool:
        """Return whether a jitted call has matrix products, and therefore does not run."""
        return self.has_products(params["jaxpr"])

    def read(self, array: Any, how: str) -> None:
        """Refuse to read a value that was not computed, unless it is only printed.

        Raises:
            InputError: the function reads it.
        """
        if how == "print":
            return
        frames = [f for f in traceback.extract_stack() if not f.filename.startswith((*JAX, _STANDARD))]
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        raise InputError(
            f"{self._request.function} reads the value of an array of shape {tuple(array.shape)}{place} "
            f"({how})",
            hint="arrays are shapes while it is called, and have no values: return the step and its "
            "arguments without a look at them",
        )


@contextlib.contextmanager
def on_the_fleet(request: Request, devices: list[Any]) -> Iterator[None]:
    """Let a user's function be called in the block as on the fleet: jax.devices() answers with its devices.

    Arrays are held as shapes, so that what the function puts on the fleet takes no memory.
    """
    with as_the_fleet(devices, request.platform), held_as_shapes(_Reads(request), devices[0]):
        yield


def foreign_program(request: Request, mesh: Mesh) -> tuple[Any, tuple[Any, ...], dict[str, Any], Mesh]:
    """Return the step, jitted if it was not, its arguments and keywords made abstract, and their mesh.

    The mesh is that of the layout. It is the program's own if that has as many devices, all arguments that
    are split lie on it, and the layout is the default one, whose only axis is `data`.

    Raises:
        InputError: the module or function does not exist, fails, or returns something else.
    """
    assert request.function is not None
    function = find_function(request.function, request.search_path, libraries=JAX)
    if takes_no_mesh(function):
        raise TakesNoMesh(
            f"{request.function} takes no mesh, so it takes no layout and no knobs",
            hint="give it a parameter `mesh`; `meshwright weigh` alone takes it without one",
        )
    knobs = _values(request, function)
    try:
        returned = function(mesh, **knobs)
    except ModuleNotFoundError as missing:
        raise needs(request.function, missing) from missing
    except InputError:
        raise
    except USERS_FAILURES as failed:
        raise _failed(
            f"{request.function}({', '.join(['mesh', *(f'{k}={v!r}' for k, v in knobs.items())])}) failed",
            failed,
            _known(request, {}),
            "its devices are descriptions and hold no data: return `jax.ShapeDtypeStruct` arguments "
            "(jax.eval_shape makes them), with NamedSharding(mesh, ...) where they are split",
        ) from failed
    step, arguments, keywords = checked_program(request.function, returned)
    with unreplaced():
        jitted = step if hasattr(step, "trace") else jax.jit(step)
        leaves, tree = jax.tree.flatten((tuple(arguments), dict(keywords)))
        paths = argument_paths(step, arguments, keywords)
        known = _known(request, _shapes(paths, leaves))
        shardings = [None] * len(leaves)
        if jitted is step:
            shardings = _in_shardings(request, jitted, tree, leaves, known)
        if (own := _own_mesh(leaves, shardings, mesh)) is not None:
            mesh = own
            request = dataclasses.replace(request, mesh_axes=tuple(mesh.shape_tuple))
        abstract = [_abstract(request, *each, mesh) for each in zip(paths, leaves, shardings, strict=True)]
        _check_division(request, dict(zip(paths, abstract, strict=True)))
        return jitted, *jax.tree.unflatten(tree, abstract), mesh


def _own_mesh(leaves: list[Any], shardings: list[Any], given: Mesh) -> Mesh | None:
    """Return the one mesh of the program's own on which its arguments lie; None if they lie on `given`."""
    placed = [_sharding_of(leaf) for leaf in leaves]
    meshes = [each.mesh for each in (*placed, *shardings) if isinstance(each, NamedSharding)]
    others = {mesh.shape_tuple: mesh for mesh in meshes if mesh.size > 1}
    if len(others) != 1 or given.axis_names != (DEFAULT_AXIS,):
        return None
    (own,) = others.values()
    is_own = own.shape_tuple != given.shape_tuple and own.size == given.size
    return own if is_own and isinstance(own, Mesh) else None


def _sharding_of(leaf: Any) -> Any:
    """Return the sharding of an array; None of anything else, and of one that names a spec without a mesh."""
    try:
        return getattr(leaf, "sharding", None)
    except TypeError:
        return None


def checked_program(name: str, returned: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the step, arguments and keywords that the function `name` returned.

    Raises:
        InputError: it returned something else.
    """
    if not isinstance(returned, tuple) or len(returned) not in (2, 3) or not callable(returned[0]):
        raise InputError(
            f"{name} returned {type(returned).__name__}, not a step with arguments", hint=CONTRACT
        )
    step, arguments, keywords = returned if len(returned) == 3 else (*returned, {})
    if not isinstance(arguments, tuple | list):
        raise InputError(f"{name}: args is {type(arguments).__name__}, not a tuple", hint=CONTRACT)
    return step, arguments, keywords


def declared(request: Request) -> tuple[list[str], dict[str, list[str]]]:
    """Return the mesh axes and the knobs that the request's function declares, as text, defaults first.

    Axes: the function's attribute `axes`; none if it has no such attribute. Knobs: its parameters after the
    mesh whose annotation is `Literal[...]` or `bool`.

    Raises:
        InputError: the module or function does not exist or fails, or `axes` is no list of names.
    """
    assert request.function is not None
    function = find_function(request.function, request.search_path, libraries=JAX)
    axes = getattr(function, "axes", ())
    if isinstance(axes, str) or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
        raise InputError(
            f"{request.function}.axes is {axes!r}", hint='give the names of its mesh axes: ("data", "model")'
        )
    knobs = {name: [str(value) for value in values] for name, values in _knobs(request, function).items()}
    if both := sorted(set(axes) & knobs.keys()):
        raise InputError(f"{request.function} has an axis and a parameter {both[0]!r}", hint="rename one")
    return list(axes), knobs


def _knobs(request: Request, function: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values of each parameter whose annotation lists them, the default first."""
    try:
        annotations = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except USERS_FAILURES as failed:
        raise InputError(
            f"the annotations of {request.function} cannot be read: {failed}",
            hint="annotate a knob with bool or Literal[...], whose names its module imports",
        ) from failed
    knobs = {}
    for each in parameters:
        annotation = annotations.get(each.name)
        values = (False, True) if annotation is bool else get_args(annotation)
        if annotation is bool or get_origin(annotation) is Literal:
            default = values[0] if each.default is inspect.Parameter.empty else each.default
            knobs[each.name] = tuple(dict.fromkeys((default, *values)))
    return knobs


def _values(request: Request, function: Any) -> dict[str, Any]:
    """Return the request's knobs as the values that the function's annotations list.

    Raises:
        InputError: the function declares no such knob, or not that value.
    """
    if not request.knobs:
        return {}
    known, values = _knobs(request, function), dict[str, Any]()
    for name, text in request.knobs.items():
        if name not in known:
            raise InputError(
                f"{request.function} declares no knob {name!r}",
                hint=f"{nearest_name(name, list(known))}; a knob is a parameter annotated with bool or "
                "Literal[...]",
            )
        matching = [value for value in known[name] if str(value).lower() == text.lower()]
        if not matching:
            listed = [str(value) for value in known[name]]
            raise InputError(
                f"{name} = {text!r} is no value of {request.function}", hint=nearest_name(text, listed)
            )
        values[name] = matching[0]
    return values


def lower_foreign(
    request: Request, step: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the step traced, and lowered for the request's platform.

    Raises:
        InputError: the step fails on its own arguments.
    """
    paths = argument_paths(step, arguments, keywords)
    shapes = _shapes(paths, jax.tree.leaves((arguments, keywords)))
    who, noted = f"the step that {request.function} returned", list[Exception]()
    try:
        with unreplaced():
            with noting_leaks_in_threads() as noted:
                traced = step.trace(*arguments, **keywords)
            refuse_leaks(traced, noted, who)
            with callbacks_without_devices():
                return traced, traced.lower(lowering_platforms=(request.platform,))
    except InputError:
        raise
    except USERS_FAILURES as failed:
        if noted:
            raise leak_error(noted[0], who) from failed
        known = _known(request, shapes)
        raise _step_failed(request, failed, known, (arguments, keywords)) from failed


def _shapes(paths: list[str], leaves: list[Any]) -> dict[str, tuple[int, ...]]:
    return {path: np.shape(leaf) for path, leaf in zip(paths, leaves, strict=True) if hasattr(leaf, "dtype")}


def _known(request: Request, shapes: dict[str, tuple[int, ...]]) -> Surroundings:
    hosts = Fleet.parse(request.fleet).num_hosts
    return Surroundings(axes=request.mesh_axes, shapes=shapes, num_processes=hosts)


def _in_shardings(
    request: Request, step: Any, tree: Any, leaves: list[Any], known: Surroundings
) -> list[Any]:
    """Return the sharding of each leaf in the step's own `jax.jit(in_shardings=...)`, or None."""
    bare = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_array(leaf) else leaf for leaf in leaves]
    arguments, keywords = jax.tree.unflatten(tree, bare)
    try:
        traced = step.trace(*arguments, **keywords)
    except USERS_FAILURES as failed:
        raise _step_failed(request, failed, known, (arguments, keywords)) from failed
    # jax makes this public only for compiled programs. Both releases of jax that we know have `_params`.
    shardings = traced._params["in_shardings"]
    if len(shardings) != len(leaves):
        return [None] * len(leaves)
    return [sharding if isinstance(sharding, NamedSharding) else None for sharding in shardings]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _step_failed(request: Request, failed: BaseException, known: Surroundings, given: Any) -> InputError:
    shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), given)
    hint = f"it was traced with arguments of these shapes: {str(shapes)[:300]}"
    return _failed(f"the step that {request.function} returned failed", failed, known, hint)


def _failed(what: str, failed: BaseException, known: Surroundings, hint: str) -> InputError:
    """Translate JAX's error about a sharding. Return any other error as it is, with `hint`."""
    if isinstance(failed, jax.errors.UnexpectedTracerError):
        return leak_error(failed, f"{what.removesuffix(' failed')} {place_of(failed, JAX)}".rstrip())
    sharding_error = room("sharding_words").sharding_error
    translated = sharding_error(failed, known, f"{what} {place_of(failed, JAX)}".rstrip() + ": ")
    return translated or InputError(f"{what} {where(failed, JAX)}", hint=hint)


def _abstract(request: Request, path: str, leaf: Any, wanted: Any, mesh: Mesh) -> Any:
    """Return an array as a shape on the mesh, with its own sharding, else `wanted`, else replicated.

    Raises:
        InputError: the array is on several devices of another mesh, or its sharding is invalid.
    """
    if not _is_array(leaf):
        return leaf
    known = _known(request, {path: leaf.shape})
    try:
        sharding = getattr(leaf, "sharding", None)
    except TypeError as failed:  # a PartitionSpec without a mesh
        raise _failed(f"{request.function}: argument {path}", failed, known, "") from failed
    here = mesh.shape_tuple
    if not isinstance(sharding, NamedSharding) or (
        sharding.mesh.shape_tuple != here and sharding.mesh.size <= 1
    ):
        sharding = wanted
    spec = PartitionSpec()
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple == here:
        spec = sharding.spec
    elif isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        other = ",".join(f"{name}={size}" for name, size in sharding.mesh.shape_tuple)
        raise InputError(
            f"{request.function}: argument {path} {leaf.shape} is on the mesh {other}, not on that of the "
            f"layout, {known.layout}",
            hint="use the mesh that the function is given: NamedSharding(mesh, ...); or weigh it on that "
            f"mesh: --layout {other}",
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _check_division(request: Request, arguments: dict[str, Any]) -> None:
    """Raise if any dimension of an argument is not divisible by the axes that shard it. List all at once."""
    problems: list[Problem] = []
    known = _known(request, {})
    sizes = dict(known.axes)
    for path, leaf in arguments.items():
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            for dim, axes in indivisible(leaf.shape, tuple(leaf.sharding.spec), sizes):
                what, hint = does_not_divide(dim, leaf.shape[dim], axes, known.num_processes)
                problems.append((path, f"{leaf.shape}: {what}", hint))
    if problems:
        raise input_error(f"{request.function} on layout {known.layout}", problems)
