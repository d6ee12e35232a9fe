"""Explain JAX's sharding errors in terms of the user's layout: the problem, the array, and what would work.

JAX's errors differ only in their wording, so `_ERRORS` lists the wordings (those of jax 0.10.2 and 0.12.0)
with an explanation of each. JAX's own text stays at the end of the message. Errors that are not in the list
are left to the caller. The compile worker uses `sharding_error`. Users wrap the steps of their own training
loops, in one process or several, in `sharding_errors`.
"""

from __future__ import annotations

import ast
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from meshwright.errors import InputError, nearest_name
from meshwright.sharding import axes_of

from ._uneven import MAKE_GLOBAL, Explanation, Surroundings, does_not_divide

ROWS_OF_ONE = f"if these are the rows that this process has read, make them global first: {MAKE_GLOBAL}"
_COLLECTIVES = "psum|pmean|pmax|pmin|psum_scatter|all_gather|all_to_all|ppermute|axis_index|axis_size"


def sharding_error(failed: BaseException, known: Surroundings, start: str = "") -> InputError | None:
    """Return a translation of `failed` if it is one of JAX's sharding errors; else None.

    Args:
        failed: the error that JAX raised.
        known: the context of the error.
        start: the beginning of the message, which says where the error happened.
    """
    text = str(failed)
    matches = ((re.search(pattern, text, re.M), explain) for pattern, explain in _ERRORS)
    explanation = next((explain(match, known) for match, explain in matches if match), None)
    what, hint = explanation or _unknown_in_line(failed, known) or ("", "")
    if not what:
        return None
    words = f"{type(failed).__name__}: {failed}".rstrip(": \n")
    return InputError(f"{start}{what}\n  in JAX's words: {words}", hint=hint)


def _words(what: str, hint: str) -> Callable[[re.Match[str], Surroundings], Explanation]:
    """Return an explanation from templates; {0} is the first group of the pattern."""

    def explain(match: re.Match[str], known: Surroundings) -> Explanation:
        return what.format(*match.groups("")), hint.format(*match.groups(""))

    return explain


def _divides(match: re.Match[str], known: Surroundings) -> Explanation:
    dim, ways, size = (int(match[n]) for n in (1, 2, 3))
    spec, sizes = _spec_in(match.string), _mesh_in(match.string)
    axes = [(axis, sizes[axis]) for axis in axes_of(spec[dim])] if dim < len(spec) else []
    what, hint = does_not_divide(dim, size, axes or [("the devices", ways)], known.num_processes)
    return f"{known.named(ast.literal_eval(match[4]))}: {what}", hint


def _map_divides(match: re.Match[str], known: Surroundings) -> Explanation:
    names, sizes = re.findall(r"'(\w+)'", match[6]), dict(known.axes)
    axes = [(name, sizes[name]) for name in names if name in sizes]
    if math.prod(size for _, size in axes) != int(match[7]):  # the error is about another mesh
        axes = [("*".join(names), int(match[7]))]
    what, hint = does_not_divide(int(match[4]), int(match[5]), axes, known.num_processes)
    path = re.sub(r"^args\[\d+\]", match[3], match[1]) if match[3] else match[1]
    return f"shard_map's argument {path} {match[2]}: {what}", hint


def _too_long(match: re.Match[str], known: Surroundings) -> Explanation:
    path = re.search(r"One of (.*?)(?: with pytree key path (.*?))? is incompatible with", match.string)
    what = "an array"
    if path is not None:
        what = {"pjit outputs": "output "}.get(path[1], "") + path[2] if path[2] else f"one of {path[1]}"
        what += f" {known.shapes[path[2]]}" if path[2] in known.shapes else ""
    return _dimensions(what, int(match[2]), "its sharding", _spec_in(match.string), int(match[1]))


def _map_too_long(match: re.Match[str], known: Surroundings) -> Explanation:
    what = f"shard_map's {match[4]} {match[5].split('{')[0].rstrip(',')}"
    return _dimensions(what, int(match[6]), match[1], _entries(match[2]), int(match[3]))


def _dimensions(what: str, num_dims: int, whose: str, spec: Sequence[Any], length: int) -> Explanation:
    def dims(number: int) -> str:
        return f"{number} dimension{'' if number == 1 else 's'}"

    return (
        f"{what} has {dims(num_dims)}, and {whose} {_text(spec)} has {length}",
        f"use {_text(spec[:num_dims])}, or give the array {dims(length)}",
    )


def _twice(match: re.Match[str], known: Surroundings) -> Explanation:
    used: set[str] = set()
    once: list[Any] = []
    for entry in _entries(match[1]):
        new = tuple(axis for axis in axes_of(entry) if axis not in used)
        used.update(new)
        once.append(new if len(new) > 1 else new[0] if new else None)
    free = [name for name, _ in known.axes if name not in used]
    other = f", or another axis: {', '.join(free)}" if free else ""
    axis = match[2].replace("`", "")
    what = f"{match[1]} uses mesh axis {axis} twice; an axis can split one dimension of an array"
    return what, f"use {_text(once)}{other}"


def _unbound(match: re.Match[str], known: Surroundings) -> Explanation:
    if match[1] not in dict(known.axes):
        return _no_axis(match[1], "a collective names", known)
    return (
        f"a collective over mesh axis {match[1]!r} stands outside jax.shard_map",
        "call it inside jax.shard_map(..., mesh=mesh), or leave it out: under jax.jit the compiler puts "
        "collectives in",
    )


def _no_axis(axis: str, who: str, known: Surroundings, names: Iterable[str] | None = None) -> Explanation:
    own = [name for name, _ in known.axes]
    names = own if names is None else list(names)
    near = nearest_name(axis, names)
    near += "" if near.endswith("?") else ";"
    mesh = f"layout {known.layout}" if names == own else f"mesh ({', '.join(names)})"
    what = f"{who} mesh axis {axis!r}, which the {mesh} does not have"
    return what, f"{near} or name it in the layout: --layout {known.layout},{axis}=1"


def _unknown_in_line(failed: BaseException, known: Surroundings) -> Explanation | None:
    """Explain an error without a message by its line: an unknown axis in a collective or in `mesh.shape`."""
    lines = [frame.line or "" for frame in traceback.extract_tb(failed.__traceback__)]
    own = dict(known.axes)
    if isinstance(failed, KeyError) and failed.args and isinstance(failed.args[0], str):
        lookup = re.compile(rf"\.shape\[['\"]{re.escape(failed.args[0])}['\"]\]")
        if failed.args[0] not in own and any(lookup.search(line) for line in lines):
            return _no_axis(failed.args[0], "mesh.shape is asked for", known)
    if isinstance(failed, AssertionError) and not failed.args:
        for line in lines:
            axis = re.search(rf"\b(?:{_COLLECTIVES})\(.*?['\"](\w+)['\"]", line)
            if axis and axis[1] not in own:
                return _no_axis(axis[1], "a collective names", known)
    return None


def _no_mesh(match: re.Match[str], known: Surroundings) -> Explanation:
    spec = re.search(r"Got (P\(.*\))", match.string)
    text = spec[1] if spec else "P(...)"
    hint = f"write NamedSharding(mesh, {text}) with the mesh that the function is given ({known.layout})"
    return f"a PartitionSpec {text} stands where no mesh is set", hint


def _contradicts(match: re.Match[str], known: Surroundings) -> Explanation:
    shape = tuple(int(n) for n in match[4].split(",") if n)
    wanted, actual = (
        f"{_text(_spec_in(text))} on mesh {','.join(f'{name}={n}' for name, n in _mesh_in(text).items())}"
        for text in (match[1], match[2])
    )
    if _mesh_in(match[1]) != _mesh_in(match[2]):
        hint = f"use one mesh for both, the one that the function is given ({known.layout})"
    else:
        hint = f"place the argument as {_text(_spec_in(match[1]))} too, or leave it out of in_shardings"
    return f"{known.named(shape)} has sharding {actual}, and in_shardings requires {wanted}", hint


def _devices(match: re.Match[str], known: Surroundings) -> Explanation:
    def place(text: str) -> str:
        ids = [each.strip() for each in text.split(",")]
        return f"device {ids[0]}" if len(ids) == 1 else f"{len(ids)} devices ({ids[0]} to {ids[-1]})"

    first, second = (f"{match[n]} on {place(match[n + 1])} ({match[n + 2]})" for n in (1, 4))
    what = f"the arrays of one program are on different devices: {first}, {second}"
    if not known.axes:
        return what, (
            "copy one to where the other is: jax.device_put(y, x.sharding); or place both on one mesh: "
            "jax.device_put((x, y), NamedSharding(mesh, P()))"
        )
    return (
        what,
        f"place both on the mesh that the function is given ({known.layout}): NamedSharding(mesh, ...); "
        "make no second mesh of other devices" + (f"; {ROWS_OF_ONE}" if known.num_processes > 1 else ""),
    )


_ERRORS: tuple[tuple[str, Callable[[re.Match[str], Surroundings], Explanation]], ...] = (
    # A dimension that does not divide: of arguments and results of jit, of device_put, of shard_map.
    (
        r"array axis (\d+) is partitioned (\d+) times, but the dimension size is (\d+) "
        r"\(full shape: (\([^)]*\))",
        _divides,
    ),
    (
        r"the passed (\S+) of shape (\S+?),(?: where args\[\d+\] is bound to .*? '(\w+)',)? corresponds to "
        r".*?array axis (\d+) \(of size (\d+)\) to mesh (?:axis|axes) (.*?) \(of (?:total )?size (\d+)\)",
        _map_divides,
    ),
    # A sharding with more dimensions than the array: of jit, of shard_map.
    (r"values of rank at least (\d+), but was applied to a value of rank (\d+)", _too_long),
    (
        r"((?:in|out)_specs\S*) is (P\(.*?\)) which has length (\d+), but (?:the passed )?(.*?)"
        r"(?:,? where .*?,)? has shape (\S+), which has rank (\d+)",
        _map_too_long,
    ),
    (r"but (P\(.*\)) has duplicate entries for `?(.*?)`?$", _twice),
    # An axis that the mesh does not have.
    (
        r"Resource axis: (\S+) of (P\(.*\)) is not found in mesh: (\(.*?\))",
        lambda match, known: _no_axis(match[1], f"{match[2]} names", known, ast.literal_eval(match[3])),
    ),
    (
        r"(\w+_specs\S*) refers to '(\w+)'",
        lambda match, known: _no_axis(match[2], f"shard_map's {match[1]} names", known),
    ),
    (r"unbound axis name: (\w+)", _unbound),
    (r"requires a non-empty mesh in context|context mesh cannot be empty|not under a mesh context", _no_mesh),
    # Two shardings, or two sets of devices, for one program.
    (
        r"Sharding passed to jit does not match (?s:.*?)Got jit sharding: (?s:(.*?)),\s*"
        r"arg sharding: (?s:(.*?)) for arg type: (\w+)\[([\d,]*)\]",
        _contradicts,
    ),
    (
        r"Received incompatible devices for jitted computation\. "
        r"Got (?s:(.*?)) with device ids \[(?s:(.*?))\] on platform (\w+) "
        r"and (?s:(.*?)) with device ids \[(?s:(.*?))\] on platform (\w+)",
        _devices,
    ),
    # Raised only in runs of several processes.
    (
        r"non-trivial shardings for numpy inputs is not allowed(?s:.*)Got arg type: (\S+)",
        _words("a NumPy array {0} of one process is passed as if it were the global one", ROWS_OF_ONE),
    ),
    (
        r"passed to device_put is not the same on each process",
        _words("the processes place different arrays as if each were the whole, global one", ROWS_OF_ONE),
    ),
    (
        r"In dimension (\d+), the process data has (\d+) elements\. Process addresses (\d+) elements and "
        r"global_shape=(\(.*?\))",
        _words(
            "this process gives {1} elements of dimension {0} of a global array {3}; its devices hold {2}",
            "give {2} elements in each process, or leave global_shape out: it is then computed",
        ),
    ),
)
"""Patterns of JAX's wordings, each with its explanation. The first that matches explains an error."""


def _spec_in(text: str) -> list[Any]:
    """Return the entries of the PartitionSpec in the first sharding that `text` prints."""
    found = re.search(r"spec=(P\(.*?\)), memory_kind", text)
    return _entries(found[1]) if found else []


def _entries(spec: str) -> list[Any]:
    """Return the entries of a printed PartitionSpec; an entry that is not an axis becomes None."""
    inner = re.sub(r",?\s*(?:un)?reduced=.*", "", spec.removeprefix("P(").removesuffix(")"))
    inner = re.sub(r"\bUNCONSTRAINED\b|PartitionSpec\.UNCONSTRAINED", "None", inner)
    return list(ast.literal_eval(f"[{inner}]"))


def _text(spec: Sequence[Any]) -> str:
    """Return the entries in the form that users write: P('data', None)."""
    return f"P({', '.join(repr(entry) for entry in spec)})"


def _mesh_in(text: str) -> dict[str, int]:
    """Return the axes of the first mesh that `text` prints."""
    found = re.search(r"Mesh\((.*?)(?:axis_types|\))", text)
    return {name: int(size) for name, size in re.findall(r"'(\w+)': (\d+)", found[1] if found else "")}


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
