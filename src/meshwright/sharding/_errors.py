"""Explain JAX's sharding errors in terms of the user's layout: the problem, the array, and what would work.

JAX's errors differ only in their wording, so the wording is what is recognised here (that of jax 0.10.2 and
0.12.0). JAX's own text stays at the end of the message. Errors that are not recognised are left to the
caller. The compile worker uses `sharding_error`. Users wrap the steps of their own training loops, in one
process or several, in `sharding_errors`.
"""

from __future__ import annotations

import ast
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from ..config import near_divisors, near_multiples, or_list
from ..errors import InputError, nearest_name

Axes = Sequence[tuple[str, int]]
Shape = tuple[int, ...]
Found = tuple[str, str]  # the problem, and the hint

MAKE_GLOBAL = (
    "jax.make_array_from_process_local_data(sharding, rows), or "
    "jax.experimental.multihost_utils.host_local_array_to_global_array(rows, mesh, spec)"
)
ROWS_OF_ONE = f"if these are the rows that this process has read, make them global first: {MAKE_GLOBAL}"
_COLLECTIVES = "psum|pmean|pmax|pmin|psum_scatter|all_gather|all_to_all|ppermute|axis_index|axis_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The context of a JAX error: the layout's axes, the arguments' shapes by path, the number of processes.

    For a fleet that is not present, `num_processes` is the number of its hosts.
    """

    axes: Axes
    shapes: Mapping[str, Shape]
    num_processes: int = 1

    @property
    def layout(self) -> str:
        """Layout in the form that `--layout` takes."""
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def named(self, shape: Shape) -> str:
        """Name an array that JAX identifies by its shape alone.

        Return the only argument of that shape, or else the shape and the arguments that may be meant.
        """
        paths = [path for path, each in self.shapes.items() if each == shape]
        if len(paths) == 1:
            return f"{paths[0]} {shape}"
        among = f" (that of {', '.join(paths[:3])})" if paths else ""
        return f"an array of shape {shape}{among}"


def sharding_error(failed: BaseException, known: Surroundings, start: str = "") -> InputError | None:
    """Return a translation of `failed` if it is one of JAX's sharding errors; else None.

    Args:
        failed: the error that JAX raised.
        known: the context of the error.
        start: the beginning of the message, which says where the error happened.
    """
    text = str(failed)
    for recognise in (_divides, _map_divides, _dimensions, _map_dimensions, _twice, _unknown, _no_mesh):
        if found := recognise(text, known):
            return _error(start, found, failed)
    for recognise in (_contradiction, _devices, _host_local):
        if found := recognise(text, known):
            return _error(start, found, failed)
    found = _unknown_in_line(failed, known)
    return _error(start, found, failed) if found else None


def _error(start: str, found: Found, failed: BaseException) -> InputError:
    words = f"{type(failed).__name__}: {failed}".rstrip(": \n")
    return InputError(f"{start}{found[0]}\n  in JAX's words: {words}", hint=found[1])


def indivisible(shape: Shape, spec: Sequence[Any], sizes: Mapping[str, int]) -> list[tuple[int, Axes]]:
    """Return the dimensions of `shape` that the axes in `spec` do not divide evenly, with those axes."""
    split = [[(axis, sizes[axis]) for axis in axes_of(entry)] for entry in spec]
    return [
        (dim, axes)
        for dim, (size, axes) in enumerate(zip(shape, split, strict=False))
        if size % math.prod(ways for _, ways in axes)
    ]


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the axes of one entry of a PartitionSpec, which is None, one name or several names."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple | list) else ()


def does_not_divide(dim: int, size: int, axes: Axes, num_processes: int = 1) -> Found:
    """Return the problem and the hint for dimension `dim` of `size`, which `axes` do not divide evenly.

    The hint names the nearest sizes of the axes and of the dimension that work. If the rows of all processes
    together would divide, these may be the rows of one process. The hint then says how to make them global.
    """
    ways = math.prod(each for _, each in axes)
    names = "*".join(name for name, _ in axes)
    told = "*".join(str(each) for _, each in axes) + (f" = {ways}" if len(axes) > 1 else "")
    hint = (
        f"use {names} = {or_list(near_divisors(size, ways))}, or a dimension of "
        f"{or_list(near_multiples(ways, size))}"
    )
    if dim == 0 and num_processes > 1 and size * num_processes % ways == 0:
        hint += (
            f"; if these are the rows that one of {num_processes} processes has read, the global array has "
            f"{size * num_processes}: {MAKE_GLOBAL}"
        )
    return f"dimension {dim} = {size} does not divide over {names} = {told}", hint


def _divides(text: str, known: Surroundings) -> Found | None:
    """Recognise the error of `Sharding.shard_shape`: arguments and results of jit, and device_put."""
    found = re.search(
        r"array axis (\d+) is partitioned (\d+) times, but the dimension size is (\d+) "
        r"\(full shape: (\([^)]*\))",
        text,
    )
    if found is None:
        return None
    dim, ways, size = (int(found[n]) for n in (1, 2, 3))
    spec, sizes = _spec(text), _mesh_sizes(text)
    axes = [(axis, sizes[axis]) for axis in axes_of(spec[dim])] if dim < len(spec) else []
    what, hint = does_not_divide(dim, size, axes or [("the devices", ways)], known.num_processes)
    return f"{known.named(ast.literal_eval(found[4]))}: {what}", hint


def _map_divides(text: str, known: Surroundings) -> Found | None:
    """Recognise the same error of `jax.shard_map`, which names its own arguments."""
    found = re.search(
        r"the passed (\S+) of shape (\S+?),"
        r"(?: where args\[\d+\] is bound to .*? '(\w+)',)? corresponds to .*?"
        r"array axis (\d+) \(of size (\d+)\) to mesh (?:axis|axes) (.*?) \(of (?:total )?size (\d+)\)",
        text,
    )
    if found is None:
        return None
    names = re.findall(r"'(\w+)'", found[6])
    sizes = dict(known.axes)
    axes = [(name, sizes[name]) for name in names if name in sizes]
    if math.prod(size for _, size in axes) != int(found[7]):  # the error is about another mesh
        axes = [("*".join(names), int(found[7]))]
    what, hint = does_not_divide(int(found[4]), int(found[5]), axes, known.num_processes)
    path = re.sub(r"^args\[\d+\]", found[3], found[1]) if found[3] else found[1]
    return f"shard_map's argument {path} {found[2]}: {what}", hint


def _dimensions(text: str, known: Surroundings) -> Found | None:
    """Recognise a sharding with more dimensions than the array has."""
    found = re.search(r"values of rank at least (\d+), but was applied to a value of rank (\d+)", text)
    if found is None:
        return None
    told, have = int(found[1]), int(found[2])
    path = re.search(r"One of (.*?)(?: with pytree key path (.*?))? is incompatible with", text)
    if path is None:
        what = "an array"
    elif path[2] is None:
        what = f"one of {path[1]}"
    else:
        what = {"pjit outputs": "output "}.get(path[1], "") + path[2]
    if path and path[2] in known.shapes:
        what += f" {known.shapes[path[2]]}"
    return _too_long(what, have, "its sharding", _spec(text), told)


def _too_long(what: str, have: int, whose: str, spec: Sequence[Any], told: int) -> Found:
    return (
        f"{what} has {_dims(have)}, and {whose} {_text(spec)} has {told}",
        f"use {_text(spec[:have])}, or give the array {_dims(told)}",
    )


def _dims(number: int) -> str:
    return f"{number} dimension{'' if number == 1 else 's'}"


def _map_dimensions(text: str, known: Surroundings) -> Found | None:
    """Recognise the same error of `jax.shard_map`."""
    found = re.search(
        r"((?:in|out)_specs\S*) is (P\(.*?\)) which has length (\d+), but (?:the passed )?(.*?)"
        r"(?:,? where .*?,)?"
        r" has shape (\S+), which has rank (\d+)",
        text,
    )
    if found is None:
        return None
    what = f"shard_map's {found[4]} {found[5].split('{')[0].rstrip(',')}"
    return _too_long(what, int(found[6]), found[1], _read(found[2]), int(found[3]))


def _twice(text: str, known: Surroundings) -> Found | None:
    found = re.search(r"but (P\(.*\)) has duplicate entries for `?(.*?)`?$", text, re.M)
    if found is None:
        return None
    seen: set[str] = set()
    once: list[Any] = []
    for entry in _read(found[1]):
        new = tuple(axis for axis in axes_of(entry) if axis not in seen)
        seen.update(new)
        once.append(new if len(new) > 1 else new[0] if new else None)
    free = [name for name, _ in known.axes if name not in seen]
    other = f", or another axis: {', '.join(free)}" if free else ""
    axes = found[2].replace("`", "")
    return (
        f"{found[1]} uses mesh axis {axes} twice; an axis can split one dimension of an array",
        f"use {_text(once)}{other}",
    )


def _unknown(text: str, known: Surroundings) -> Found | None:
    if found := re.search(r"Resource axis: (\S+) of (P\(.*\)) is not found in mesh: (\(.*?\))", text):
        return _no_axis(found[1], f"{found[2]} names", ast.literal_eval(found[3]), known)
    if found := re.search(r"(\w+_specs\S*) refers to '(\w+)'", text):
        return _no_axis(found[2], f"shard_map's {found[1]} names", [n for n, _ in known.axes], known)
    if found := re.search(r"unbound axis name: (\w+)", text):
        if found[1] in dict(known.axes):
            return (
                f"a collective over mesh axis {found[1]!r} stands outside jax.shard_map",
                "call it inside jax.shard_map(..., mesh=mesh), or leave it out: under jax.jit the compiler "
                "puts collectives in",
            )
        return _no_axis(found[1], "a collective names", [n for n, _ in known.axes], known)
    return None


def _no_axis(axis: str, who: str, names: Iterable[str], known: Surroundings) -> Found:
    names = list(names)
    near = nearest_name(axis, names)
    near += "" if near.endswith("?") else ";"
    mesh = f"layout {known.layout}" if names == [n for n, _ in known.axes] else f"mesh ({', '.join(names)})"
    return (
        f"{who} mesh axis {axis!r}, which the {mesh} does not have",
        f"{near} or name it in the layout: --layout {known.layout},{axis}=1",
    )


def _unknown_in_line(failed: BaseException, known: Surroundings) -> Found | None:
    """Recognise an error without a message by the failing line.

    The line names an unknown axis in a collective or in `mesh.shape`.
    """
    lines = [frame.line or "" for frame in traceback.extract_tb(failed.__traceback__)]
    sizes = dict(known.axes)
    if isinstance(failed, KeyError) and failed.args and isinstance(failed.args[0], str):
        axis = failed.args[0]
        if axis not in sizes and any(
            re.search(rf"\.shape\[['\"]{re.escape(axis)}['\"]\]", li) for li in lines
        ):
            return _no_axis(axis, "mesh.shape is asked for", sizes, known)
    if isinstance(failed, AssertionError) and not failed.args:
        for line in lines:
            found = re.search(rf"\b(?:{_COLLECTIVES})\(.*?['\"](\w+)['\"]", line)
            if found and found[1] not in sizes:
                return _no_axis(found[1], "a collective names", sizes, known)
    return None


def _no_mesh(text: str, known: Surroundings) -> Found | None:
    found = re.search(
        r"requires a non-empty mesh in context|context mesh cannot be empty|not under a mesh context", text
    )
    if found is None:
        return None
    spec = re.search(r"Got (P\(.*\))", text)
    spec_text = spec[1] if spec else "P(...)"
    return (
        f"a PartitionSpec {spec_text} stands where no mesh is set",
        f"write NamedSharding(mesh, {spec_text}) with the mesh that the function is given ({known.layout})",
    )


def _contradiction(text: str, known: Surroundings) -> Found | None:
    found = re.search(
        r"Sharding passed to jit does not match .*?Got jit sharding: (.*?),\s*arg sharding: (.*?) "
        r"for arg type: (\w+)\[([\d,]*)\]",
        text,
        re.S,
    )
    if found is None:
        return None
    shape = tuple(int(n) for n in found[4].split(",") if n)
    asked, lies = (f"{_text(_spec(found[n]))} on mesh {_mesh_text(found[n])}" for n in (1, 2))
    if _mesh_sizes(found[1]) != _mesh_sizes(found[2]):
        hint = f"use one mesh for both, the one that the function is given ({known.layout})"
    else:
        hint = f"place the argument as {_text(_spec(found[1]))} too, or leave it out of in_shardings"
    return f"{known.named(shape)} lies as {lies}, and in_shardings asks for {asked}", hint


def _devices(text: str, known: Surroundings) -> Found | None:
    found = re.search(
        r"Received incompatible devices for jitted computation\. "
        r"Got (.*?) with device ids \[(.*?)\] on platform (\w+) "
        r"and (.*?) with device ids \[(.*?)\] on platform (\w+)",
        text,
        re.S,
    )
    if found is None:
        return None
    first, second = (f"{found[n]} on {_ids(found[n + 1])} ({found[n + 2]})" for n in (1, 4))
    return (
        f"what one program uses lies on different devices: {first}, {second}",
        f"place both on the mesh that the function is given ({known.layout}): NamedSharding(mesh, ...); "
        "make no second mesh of other devices" + (f"; {ROWS_OF_ONE}" if known.num_processes > 1 else ""),
    )


def _ids(text: str) -> str:
    ids = [each.strip() for each in text.split(",")]
    return f"device {ids[0]}" if len(ids) == 1 else f"{len(ids)} devices ({ids[0]} to {ids[-1]})"


def _host_local(text: str, known: Surroundings) -> Found | None:
    """Recognise errors that JAX raises only in runs of several processes."""
    if found := re.search(
        r"non-trivial shardings for numpy inputs is not allowed.*Got arg type: (\S+)", text, re.S
    ):
        return f"a NumPy array {found[1]} of one process is passed as if it were the global one", ROWS_OF_ONE
    if "passed to device_put is not the same on each process" in text:
        return "the processes place different arrays as if each were the whole, global one", ROWS_OF_ONE
    found = re.search(
        r"In dimension (\d+), the process data has (\d+) elements\. Process addresses (\d+) elements and "
        r"global_shape=(\(.*?\))",
        text,
    )
    if found is None:
        return None
    return (
        f"this process gives {found[2]} elements of dimension {found[1]} of a global array {found[4]}; "
        f"its devices hold {found[3]}",
        f"give {found[3]} elements in each process, or leave global_shape out: it is then computed",
    )


def _spec(text: str) -> list[Any]:
    found = re.search(r"spec=(P\(.*?\)), memory_kind", text)
    return _read(found[1]) if found else []


def _read(spec: str) -> list[Any]:
    """Return the entries of a printed PartitionSpec; an entry that is not an axis becomes None."""
    inner = re.sub(r",?\s*(?:un)?reduced=.*", "", spec.removeprefix("P(").removesuffix(")"))
    inner = re.sub(r"\bUNCONSTRAINED\b|PartitionSpec\.UNCONSTRAINED", "None", inner)
    return list(ast.literal_eval(f"[{inner}]"))


def _text(spec: Sequence[Any]) -> str:
    """Return the entries in the form that users write: P('data', None)."""
    return f"P({', '.join(repr(entry) for entry in spec)})"


def _mesh_sizes(text: str) -> dict[str, int]:
    found = re.search(r"Mesh\((.*?)(?:axis_types|\))", text)
    return {name: int(size) for name, size in re.findall(r"'(\w+)': (\d+)", found[1] if found else "")}


def _mesh_text(text: str) -> str:
    return ",".join(f"{name}={size}" for name, size in _mesh_sizes(text).items())


@contextmanager
def sharding_errors(mesh: Any, **arguments: Any) -> Iterator[None]:
    """Translate JAX's sharding errors in your own steps into the messages that `weigh` has for them.

    A message names the path, dimension, axes and sizes, and the nearest sizes that work. In several
    processes, messages also point out rows of one process that were passed as if they were the global batch,
    and name the function that converts them. Other errors pass unchanged. JAX raises no error if the rows of
    one process, as a `jax.Array`, divide as the global batch would. Each process's devices then take their
    share of that process's own rows.

    Args:
        mesh: the `jax.sharding.Mesh` that the step runs on.
        arguments: the inputs of the step, as whole trees of arrays, under the names that errors shall use.

    Raises:
        InputError: in place of JAX's sharding error, which becomes its cause.

    Source: the wording of jax 0.10.2 and 0.12.0; nothing else distinguishes such errors.
    """
    try:
        yield
    except Exception as failed:
        leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
        shapes = {
            f"{keys[0].key}{jax.tree_util.keystr(keys[1:])}": tuple(leaf.shape)
            for keys, leaf in leaves
            if hasattr(leaf, "shape")
        }
        known = Surroundings(axes=mesh.shape_tuple, shapes=shapes, num_processes=jax.process_count())
        translated = sharding_error(failed, known)
        if translated is None:
            raise
        raise translated from failed
