"""Run a script's JAX with arrays that are shapes: nothing large is computed, and every call is seen.

`ShapeTracer` is an array with a type and a place on the fleet's devices. It also holds its value where that
is small and follows from what the script gives: keys, step counters, learning rates. `held_as_shapes`
replaces the function that JAX calls for each operation outside `jit`. An operation whose operands are known
and small runs on the CPU; any other gives shapes, by the primitive's own abstract evaluation. A jitted call
is handed to a `ShapeWatch`. One with matrix products never runs; any other is evaluated equation by equation.

A place follows an array through `device_put`, sharding constraints and `out_shardings`. The result of any
other operation keeps each dimension's mesh axes where the dimension keeps its size, because only XLA knows.

JAX has no public names for this. `PRIVATE` lists the private ones; a release that lacks one is refused.
Imports jax: only the process that runs a script may import this module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from meshwright.errors import InputError

PRIVATE = {
    "jax._src.core": (
        "EvalTrace.process_primitive", "EvalTrace.process_shard_map", "ShapedArray", "Tracer",
        "check_eval_args", "escaped_tracer_error", "eval_jaxpr", "eval_trace", "set_current_trace",
        "shaped_abstractify",
    ),
    "jax._src.dispatch": ("_batched_device_put_impl", "update_dp_aval"),
    "jax._src.pjit": ("_pjit_call_impl_python", "convert_to_metaty"),
    "jax._src.array": ("make_array_from_callback", "make_array_from_single_device_arrays"),
    "jax._src.lax.lax": ("full_like",),
    "jax._src.mesh": ("empty_abstract_mesh", "empty_concrete_mesh", "get_concrete_mesh", "use_abstract_mesh"),
    "jax._src.sharding_impls": ("_internal_use_concrete_mesh",),
}  # fmt: skip
KNOWN_BYTES = 2**16  # arrays up to this size are computed where their operands are known
CALLS = ("jit", "pjit")
EFFECTS = ("debug_callback", "debug_print")  # they have no results
PLACING = ("layout_constraint", "mesh_cast", "reshard", "sharding_constraint")  # the value is the operand's


def _private(module: str, name: str) -> Any:
    """Return a private name of JAX.

    Raises:
        InputError: this release has no such name.
    """
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(
                f"jax {jax.__version__} has no {module}.{name}, which running a script with arrays as shapes "
                "needs",
                hint="use a release from jax 0.10.2 to 0.12, or weigh the step by itself: "
                "mw.weigh(step, args=..., on=...)",
            )
        found = getattr(found, part)
    return found


for _module, _names in PRIVATE.items():
    for _name in _names:
        _private(_module, _name)

from jax._src import core, mesh  # noqa: E402  after the check
from jax._src.dispatch import update_dp_aval  # noqa: E402
from jax._src.sharding_impls import _internal_use_concrete_mesh  # noqa: E402


class ShapeWatch(Protocol):
    """See what a script does."""

    def has_products(self, closed: Any) -> bool:
        """Return whether a jaxpr has matrix products."""
        ...

    def called(self, args: Sequence[Any], params: dict[str, Any]) -> bool:
        """Take note of a jitted call of the script's with matrix products, and return whether it is one."""
        ...

    def read(self, array: ShapeTracer, how: str) -> None:
        """Take note that the script reads an array whose value is not known."""
        ...


_watch: ShapeWatch
_device: Any
_thread = threading.local()


TRACER: Any = core.Tracer  # its methods raise, so no other type fits them


class ShapeTracer(TRACER):
    """An array of the script: its type, its place, and its value where it is known.

    `placed`: its sharding, or None where the script named no device. `known`: a NumPy array, or a JAX array
    of keys, or None.
    """

    def __init__(self, aval: Any, placed: Sharding | None = None, known: Any = None) -> None:
        super().__init__(core.eval_trace, aval)
        self.placed, self.known = placed, known

    @property
    def sharding(self) -> Sharding:
        """Return where it lies; arrays without a place lie on the first device."""
        return SingleDeviceSharding(_device) if self.placed is None else self.placed

    @property
    def committed(self) -> bool:
        """Return whether the script has named its place."""
        return self.placed is not None

    _committed = committed
    is_fully_addressable = property(lambda self: self.sharding.is_fully_addressable)
    is_fully_replicated = property(lambda self: self.sharding.is_fully_replicated)
    device = property(lambda self: _device if self.placed is None else self.placed)
    weak_type = property(lambda self: self.aval.weak_type)

    @property
    def global_shards(self) -> list[Any]:
        """Return its part on each device: the device, the place in the array, and a shape."""
        aval = core.ShapedArray(self.sharding.shard_shape(self.shape), self.dtype)
        return [
            types.SimpleNamespace(device=device, index=index, replica_id=0, data=ShapeTracer(aval))
            for device, index in self.sharding.devices_indices_map(self.shape).items()
        ]

    @property
    def addressable_shards(self) -> list[Any]:
        """Return its part on each device of this process."""
        return [part for part in self.global_shards if part.device.process_index == 0]

    def addressable_data(self, index: int) -> ShapeTracer:
        """Return its part on a device of this process."""
        return self.addressable_shards[index].data

    def devices(self) -> set[Any]:
        """Return the devices on which it lies."""
        return set(self.sharding.device_set)

    def block_until_ready(self) -> ShapeTracer:
        """Return itself: nothing is computed."""
        return self

    def copy_to_host_async(self) -> None:
        """Do nothing: there is nothing to copy."""

    def delete(self) -> None:
        """Do nothing: there is nothing to free."""

    def is_deleted(self) -> bool:
        """Return False: a donated array is one that the script no longer uses."""
        return False

    def to_concrete_value(self) -> Any:
        """Return the value if it is known."""
        return self.known

    def read(self, how: str) -> np.ndarray[Any, Any]:
        """Return the value; where it is not known, ones or zeros in its place, after telling the watch."""
        if self.known is None:
            _watch.read(self, how)
            ones = jnp.issubdtype(self.dtype, jnp.inexact)
            return np.full(self.shape, 1 if ones else 0, self.dtype)
        with _for_real():
            return np.asarray(self.known)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.read("np.asarray").astype(dtype or self.dtype)

    def item(self, *args: int) -> Any:
        """Return one entry as Python's number."""
        return self.read("item").item(*args)

    def tolist(self) -> Any:
        """Return the entries as Python's numbers."""
        return self.read("tolist").tolist()

    def tobytes(self, order: str = "C") -> bytes:
        """Return the bytes of the entries."""
        return self.read("tobytes").tobytes(order)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return bool(self.read("bool"))

    def __int__(self) -> int:
        return int(self.read("int"))

    def __index__(self) -> int:
        return self.read("index").__index__()

    def __float__(self) -> float:
        return float(self.read("float"))

    def __complex__(self) -> complex:
        return complex(self.read("complex"))

    def __repr__(self) -> str:
        if self.known is None:
            _watch.read(self, "print")
            return f"Array({self.aval.str_short()}, not computed)"
        return repr(self.read("print"))

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and self.ndim == 0 else str(self), spec)

    def __reduce__(self) -> Any:
        return (jnp.asarray, (self.read("pickle"),))

    def __copy__(self) -> ShapeTracer:
        return self

    def __deepcopy__(self, memo: Any) -> ShapeTracer:
        return self


@contextlib.contextmanager
def held_as_shapes(watch: ShapeWatch, device: Any) -> Iterator[None]:
    """Hold arrays as shapes in the block. `device`: where an array lies whose place is not named."""
    global _watch, _device
    _watch, _device = watch, device
    jax.clear_caches()  # else a function that was called before takes its compiled form
    with contextlib.ExitStack() as stack:
        for module, name, function in (
            ("jax._src.core", "EvalTrace.process_primitive", _process),
            ("jax._src.core", "check_eval_args", _check),
            ("jax._src.pjit", "_pjit_call_impl_python", _call_of_jit),
            ("jax._src.dispatch", "_batched_device_put_impl", _put_of_api),
            ("jax._src.array", "make_array_from_callback", _from_callback),
            ("jax", "make_array_from_callback", _from_callback),
            ("jax._src.array", "make_array_from_single_device_arrays", _from_parts),
            ("jax", "make_array_from_single_device_arrays", _from_parts),
            ("jax._src.lax.lax", "full_like", _full_like),
            ("jax.lax", "full_like", _full_like),
            ("jax.stages", "Traced.lower", _Lowered),
            ("jax._src.core", "EvalTrace.process_shard_map", _call_of_shard_map),
        ):
            stack.enter_context(replaced(module, name, function))
        yield


@contextlib.contextmanager
def replaced(module: str, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of another in the block. It is called with the original one first."""
    *outer, last = name.split(".")
    holder = functools.reduce(getattr, outer, importlib.import_module(module))
    original = getattr(holder, last)

    def instead(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "depth", 0):
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    setattr(holder, last, functools.wraps(original)(instead))
    try:
        yield
    finally:
        setattr(holder, last, original)


@contextlib.contextmanager
def unreplaced() -> Iterator[None]:
    """Let JAX's own functions serve this thread in the block."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _thread.depth -= 1


@contextlib.contextmanager
def _for_real() -> Iterator[None]:
    """Let JAX compute in the block, on the CPU and outside any mesh."""
    with (
        unreplaced(),
        mesh.use_abstract_mesh(mesh.empty_abstract_mesh),
        _internal_use_concrete_mesh(mesh.empty_concrete_mesh),
        jax.default_device(jax.local_devices(backend="cpu")[0]),
    ):
        yield


def _aval(value: Any) -> Any:
    return value.aval if isinstance(value, core.Tracer) else core.shaped_abstractify(value)


def _known(value: Any) -> Any:
    """Return a value that can be computed with, or None."""
    return value.known if isinstance(value, ShapeTracer) else value


def _placed(value: Any) -> NamedSharding | None:
    """Return the place of an array over a mesh."""
    sharding = value.placed if isinstance(value, ShapeTracer) else getattr(value, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 1)


def _shape(value: Any) -> ShapeTracer:
    """Return any array as a `ShapeTracer`; a small one keeps its value."""
    if isinstance(value, ShapeTracer):
        return value
    aval = _aval(value)
    return ShapeTracer(aval, _placed(value), value if _bytes(aval) <= KNOWN_BYTES else None)


def _check(original: Any, args: Any) -> None:
    """Accept shapes where JAX accepts arrays only."""


def _process(original: Any, trace: Any, primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Evaluate one operation outside `jit`, in place of `EvalTrace.process_primitive`."""
    _refuse_leaked(args)
    with core.set_current_trace(trace):
        if primitive.name in CALLS:
            return call(args, params)
        _check_devices(args, primitive.name)
        if primitive.name == "device_put":
            devices = params["devices"]
            return [_put(value, where) for value, where in zip(args, devices, strict=True)]
        if primitive.name in EFFECTS:
            return []
        if primitive.name == "stage":
            with _for_real():
                return _shape(original(trace, primitive, args, params))
        outs, _ = primitive.abstract_eval(*map(_aval, args), **params)
        places = _carried(primitive.name, args, _listed(outs), params)
        values = _values(functools.partial(original, trace), primitive, args, _listed(outs), params)
        made = [ShapeTracer(*each) for each in zip(_listed(outs), places, values, strict=True)]
        return made if primitive.multiple_results else made[0]


def _check_devices(args: Sequence[Any], name: str, debug: Any = None) -> None:
    """Raise, in JAX's words, if two operands were put on different single devices.

    `debug`: the debug information of a jaxpr, which names its arguments.
    """
    names = list(getattr(debug, "arg_names", None) or ())
    names = [f"argument {each}" for each in names] if len(names) == len(args) else ["an argument"] * len(args)
    single = [
        (f"{named} of {name} with shape {value.aval.str_short()}", next(iter(place.device_set)))
        for named, value in zip(names, args, strict=True)
        if isinstance(value, ShapeTracer) and isinstance(place := value.placed, SingleDeviceSharding)
    ]
    for (_, here), (_, there) in itertools.pairwise(single):
        if here != there:
            words = [
                f"{what} and with device ids [{device.id}] on platform {device.platform.upper()}"
                for what, device in single
                if device in (here, there)
            ]
            raise ValueError(
                f"Received incompatible devices for jitted computation. Got {words[0]} and {words[1]}"
            )


def _values(
    evaluate: Callable[..., Any], primitive: Any, args: Sequence[Any], outs: list[Any], params: dict[str, Any]
) -> list[Any]:
    """Return the values of an operation's results, where they are small and follow from known ones."""
    known = [_known(value) for value in args]
    small = all(_bytes(out) <= KNOWN_BYTES for out in outs)
    if not small or any(value is None for value in known) or primitive.name.endswith("_callback"):
        return [None] * len(outs)
    if primitive.name in PLACING:
        return known[:1]
    programs = [each for value in params.values() for each in _listed(value) if hasattr(each, "eqns")]
    in_mesh = not jax.sharding.get_abstract_mesh().empty  # the types in a program may be of that mesh
    if programs and (in_mesh or any(map(_watch.has_products, programs))):
        return [None] * len(outs)
    # The CPU has no part in the fleet's meshes.
    here = {name: None if isinstance(value, Sharding) else value for name, value in params.items()}
    with _for_real():
        return _listed(evaluate(primitive, known, here))


def _listed(outs: Any) -> list[Any]:
    return list(outs) if isinstance(outs, list | tuple) else [outs]


def _carried(
    name: str, args: Sequence[Any], outs: list[Any], params: dict[str, Any]
) -> list[NamedSharding | None]:
    """Return the places of an operation's results."""
    if name in PLACING and isinstance(
        wanted := params.get("sharding", params.get("dst_sharding")), NamedSharding
    ):
        return [_concrete(wanted)]
    split = [(value, place) for value in args if (place := _placed(value)) is not None]
    places: list[NamedSharding | None] = []
    for out in outs:
        own = getattr(out, "sharding", None)
        if own is not None and not own.mesh.empty and any(part is not None for part in own.spec):
            places.append(_concrete(NamedSharding(own.mesh, own.spec)))  # of explicit axes
        elif not split:
            places.append(None)
        else:
            array, place = max(split, key=lambda each: sum(part is not None for part in each[1].spec))
            places.append(NamedSharding(place.mesh, _moved(name, array, place, out, params)))
    return places


def _concrete(sharding: NamedSharding) -> NamedSharding:
    """Return a sharding on the mesh that the script has set, if it is one of its abstract mesh."""
    present = mesh.get_concrete_mesh()
    if present.empty or present.abstract_mesh != getattr(sharding.mesh, "abstract_mesh", sharding.mesh):
        return sharding
    return NamedSharding(present, sharding.spec, memory_kind=sharding.memory_kind)


def _moved(name: str, array: Any, place: NamedSharding, out: Any, params: dict[str, Any]) -> PartitionSpec:
    """Return the mesh axes of a result's dimensions: those of the operand's dimensions that it keeps."""
    shape = np.shape(array)
    axes = [*place.spec, *[None] * (len(shape) - len(place.spec))]
    if name == "transpose":
        source: dict[int, int] = dict(enumerate(params["permutation"]))
    elif name == "broadcast_in_dim":
        source = {there: here for here, there in enumerate(params["broadcast_dimensions"])}
    elif len(out.shape) == len(shape):
        source = {dim: dim for dim in range(len(shape))}
    else:  # dimensions were dropped or added: each keeps its axes in the same order
        dropped = set(params.get("axes", params.get("dimensions", ())) or ())
        kept = [dim for dim in range(len(shape)) if dim not in dropped]
        source = dict(enumerate(kept)) if len(kept) == len(out.shape) else {}
    return PartitionSpec(
        *(
            axes[source[dim]] if dim in source and size == shape[source[dim]] else None
            for dim, size in enumerate(out.shape)
        )
    )


def _refuse_leaked(args: Sequence[Any]) -> None:
    """Raise JAX's error if an operation outside `jit` gets a traced value, as JAX itself does."""
    for value in args:
        if isinstance(value, TRACER) and not isinstance(value, ShapeTracer):
            raise core.escaped_tracer_error(value)


def call(args: Sequence[Any], params: dict[str, Any], *, runs: bool = True) -> list[Any]:
    """Return the results of a jitted call. One with matrix products does not run, nor one without `runs`."""
    _refuse_leaked(args)
    closed = params["jaxpr"]
    _check_devices(args, params["name"], closed.jaxpr.debug_info)
    if not _watch.called(args, params) and runs:
        outs = core.eval_jaxpr(closed.jaxpr, closed.consts, *args)
        outs = [_shape(out) for out in outs]
    else:
        outs = [ShapeTracer(aval, place) for aval, place in zip(closed.out_avals, _same_places(args, closed),
                                                          strict=True)]  # fmt: skip
    for out, wanted in zip(outs, params["out_shardings"], strict=True):
        if isinstance(wanted, Sharding):
            out.placed = _concrete(wanted) if isinstance(wanted, NamedSharding) else wanted
    return outs


def _same_places(args: Sequence[Any], closed: Any) -> list[NamedSharding | None]:
    """Return the place of each result: what `shard_map` says, or that of the next argument of its type.

    Else it is over no axis.
    """
    mapped = {
        variable: NamedSharding(eqn.params["mesh"], spec)
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "shard_map"
        for variable, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)
    }
    places = [_placed(value) for value in args]
    split = [(str(_aval(value)), place) for value, place in zip(args, places, strict=True) if place]
    found: list[NamedSharding | None] = []
    for aval, variable in zip(closed.out_avals, closed.jaxpr.outvars, strict=True):
        if not hasattr(variable, "val") and variable in mapped:
            found.append(_concrete(mapped[variable]))
            continue
        match = next((each for each in split if each[0] == str(aval)), None)
        if match is not None:
            split.remove(match)
            found.append(match[1])
        else:
            some = next((place for place in places if place is not None), None)
            found.append(None if some is None else NamedSharding(some.mesh, PartitionSpec()))
    return found


def _call_of_jit(original: Any, *args: Any, **params: Any) -> tuple[Any, ...]:
    return call(args, params), None, None, []


def _put(value: Any, where: Any) -> ShapeTracer:
    """Return an array at a place: a sharding, a device, or None for where it is."""
    array = _shape(value)
    where = getattr(where, "sharding", where)  # of a layout
    if where is None:
        return array
    if isinstance(where, Sharding):
        where.shard_shape(array.shape)  # raises where it does not divide
        return ShapeTracer(update_dp_aval(array.aval, where), where, array.known)
    if isinstance(where, jax.Device):
        return ShapeTracer(array.aval, SingleDeviceSharding(where), array.known)
    kind = getattr(where, "name", "").lower()  # a memory space
    placed = _placed(array)
    if placed is not None and kind in ("host", "device"):
        placed = placed.with_memory_kind("pinned_host" if kind == "host" else "device")
    return ShapeTracer(array.aval, placed, array.known)


def _put_of_api(original: Any, *values: Any, devices: Sequence[Any], **rest: Any) -> list[ShapeTracer]:
    return [_put(value, where) for value, where in zip(values, devices, strict=True)]


def _from_callback(
    original: Any, shape: Any, sharding: Any, data_callback: Any = None, dtype: Any = None, **rest: Any
) -> ShapeTracer:
    sharding = getattr(sharding, "sharding", sharding)
    if dtype is None:
        index = next(iter(sharding.devices_indices_map(tuple(shape)).values()))
        dtype = _aval(data_callback(index)).dtype
    return _put(ShapeTracer(core.ShapedArray(tuple(shape), dtype)), sharding)


def _from_parts(original: Any, shape: Any, sharding: Any, arrays: Any, *, dtype: Any = None) -> ShapeTracer:
    dtype = _aval(arrays[0]).dtype if arrays else dtype
    return _put(ShapeTracer(core.ShapedArray(tuple(shape), dtype)), getattr(sharding, "sharding", sharding))


def _full_like(
    original: Any, x: Any, fill_value: Any, dtype: Any = None, shape: Any = None, sharding: Any = None
) -> Any:
    """Keep the place of `x`, as JAX does for its arrays, and not for its tracers."""
    made = original(x, fill_value, dtype, shape, sharding)
    if isinstance(x, ShapeTracer) and isinstance(made, ShapeTracer) and shape is None and sharding is None:
        made.placed = x.placed
    return made


def _call_of_shard_map(
    original: Any, trace: Any, primitive: Any, function: Any, args: Sequence[Any], **params: Any
) -> Any:
    """Take a `shard_map` outside `jit` for a jitted one, in place of `EvalTrace.process_shard_map`."""
    results: list[Any] = []

    def mapped(*arrays: Any) -> list[Any]:
        results.append(primitive.bind(*arrays, subfuns=(function,), **params))
        return list(results[0])

    mapped.__name__ = params["debug_info"].func_name
    with core.set_current_trace(trace):
        outs = call(args, jax.jit(mapped).trace(*args)._params, runs=False)
    return results[0].update(outs)


class _Lowered:
    """Stands in for `jax.stages.Lowered` and `Compiled`: a call of it is a call of the jitted function."""

    def __init__(self, original: Any, traced: Any, **options: Any) -> None:
        self._lower = functools.partial(original, traced, **options)
        self._traced = traced
        self.out_tree = traced.out_tree

    def compile(self, *args: Any, **options: Any) -> _Lowered:
        """Return itself: only the weighed call is compiled, in another process."""
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outs = call(jax.tree.leaves((args, kwargs)), self._traced._params)
        return jax.tree.unflatten(self.out_tree, outs)

    def cost_analysis(self) -> dict[str, float]:
        """Return nothing known."""
        return {}

    def memory_analysis(self) -> None:
        """Return nothing known."""

    def __getattr__(self, name: str) -> Any:
        with unreplaced():
            return getattr(self._lower(), name)
