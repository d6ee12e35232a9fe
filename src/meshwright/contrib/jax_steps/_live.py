"""Lower a live function of the user's for a fleet, in the user's own process, and compile the text apart.

The user's process traces the call and lowers it for the target's platform: it needs neither the target's
compiler nor its devices. What crosses to the worker is StableHLO text and a few facts that the text does not
say (`LoweredText`): which shardings of arguments and results the compiler may choose. Nothing is pickled.

Leaves of the arguments that are no arrays (functions, configurations, `None`) are closed over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import numbers
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.backend import get_compile_options
from jax.sharding import NamedSharding, SingleDeviceSharding

from meshwright.compiler import Argument, TracedFlops
from meshwright.errors import InputError
from meshwright.extras import how_to_install
from meshwright.json_records import EXACT, read_record
from meshwright.sharding import axes_of
from meshwright.worker import (
    callbacks_without_devices,
    could_not_compile,
    count_traced,
    devices_of_kind,
    inner_program,
    libraries_of_plugin,
)

from ._arguments import argument_paths, plain, role_in_tree, roles_of_classes, variables_of_nnx
from ._leaks import leak_error, noting_leaks_in_threads, refuse_leaked
from ._partitioning import answers_of, equations, renamed, rules_text

PROGRAM, FACTS = "program.mlir", "facts.json"  # files for the worker
_LOCATION = re.compile(r'\bloc\("([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredText:
    """A lowered call: its StableHLO text, and what its compilation needs beside it.

    `digest`: of the text without source positions, and of the facts; equal ones mean one program.
    `num_devices`: over which the text is partitioned. `mesh_axes`: of the user's mesh, outermost first; empty
    without one. `free_inputs`, `free_outputs`: for each argument that is used, and each result, whether the
    compiler may choose its sharding. `arguments`: of the call, those that are used. `answers`: from a
    question that the compiler asks while it partitions to its answer; of the process that lowered the call
    only, and None if nothing is asked.
    """

    __pydantic_config__ = EXACT
    text: str
    digest: str
    num_devices: int
    mesh_axes: tuple[tuple[str, int], ...]
    tuple_arguments: bool
    free_inputs: tuple[bool, ...]
    free_outputs: tuple[bool, ...]
    arguments: tuple[Argument, ...]
    traced_flops: TracedFlops
    answers: Callable[[str], str] | None = None

    def files(self) -> dict[str, str]:
        """Return the texts for a worker's folder, by name."""
        fields = dataclasses.asdict(dataclasses.replace(self, answers=None))
        return {PROGRAM: fields.pop("text"), FACTS: json.dumps(fields)}

    @staticmethod
    def load(folder: Path) -> LoweredText:
        """Read what `files` returned, from a worker's folder."""
        fields = json.loads((folder / FACTS).read_text())
        text = (folder / PROGRAM).read_text()
        return read_record(
            LoweredText, json.dumps({**fields, "text": text}), name="a lowered call", hint="report it"
        )


def lowered_call(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platform: str,
    device_kind: str = "",
) -> LoweredText:
    """Return a call of a function, lowered for a platform.

    Args:
        step: any callable: plain, jitted by JAX, Flax NNX or Equinox, a method, a partial; or a
            `jax.stages.Traced`, without arguments.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`, anywhere in them; shardings on a mesh of the user's
            own are kept.
        device_kind: the target's devices as JAX names them; kernels of Pallas are lowered for a kind.

    Raises:
        InputError: the call fails while it is traced or lowered.
    """
    who, noted = f"the call of {_name(step)}", list[Exception]()
    try:
        refuse_leaked([x for x in jax.tree.leaves((tuple(args), dict(kwargs))) if not _is_shape(x)], who)
        _refuse_two_devices(args, kwargs, argument_paths(plain(step), args, kwargs))
        # Equations keep the devices that they are traced for.
        with devices_of_kind(device_kind, platform), libraries_of_plugin(platform):
            with noting_leaks_in_threads() as noted:
                traced, paths = _traced(step, args, kwargs)
            refuse_leaks(traced, noted, who)
            named = variables_of_nnx(args, kwargs, paths, traced.jaxpr.jaxpr.invars)
            roles = {path: role for path, role in named.values() if role}
            roles |= roles_of_classes(args, kwargs, argument_paths(plain(step), args, kwargs))
            paths = [named[path][0] if path in named else path for path in paths]
            return lowered_text(traced, paths, platform, roles)
    except InputError:
        raise
    except Exception as failed:
        if leaks := [e for e in (failed, *noted) if isinstance(e, jax.errors.UnexpectedTracerError)]:
            raise leak_error(leaks[0], who) from failed
        hint = "call it with the same arguments by itself; arrays may be jax.ShapeDtypeStruct"
        if "require devices" in str(failed):  # custom_partitioning, of which cuDNN's attention is one
            hint = (
                "a call with a partitioning rule of its own needs a mesh of devices: simulate them with "
                "jax.config.update('jax_num_cpu_devices', N) before the first use of jax"
            )
        elif getattr(step, "__globals__", {}).get("__name__") == "jax._src.pmap":
            hint = (
                f"jax.pmap needs a device for each slice, and this process has {jax.local_device_count()}: "
                "simulate more with jax.config.update('jax_num_cpu_devices', N) before the first use of jax"
            )
        elif "dnnCreate" in str(failed):  # jax.experimental.rnn
            hint = (
                "cuDNN's recurrent layers ask an attached GPU while they are traced: write the layer with "
                "jax.lax.scan, or weigh where a GPU is and NVIDIA's libraries are installed; "
                f"{how_to_install('cuda')}"
            )
        raise InputError(
            f"{who} failed while it was traced: {type(failed).__name__}: {failed}",
            hint=hint,
        ) from failed


def lowered_text(
    traced: Any, names: Sequence[str], platform: str, roles: Mapping[str, str] | None = None
) -> LoweredText:
    """Return a traced call lowered for a platform.

    Args:
        names: the paths of its arrays, in order. Those of an enclosing scope come first, or have empty ones.
        roles: those of arrays whose paths do not tell them.
    """
    with callbacks_without_devices():
        lowered = traced.lower(lowering_platforms=(platform,))
    facts = lowered._lowering.compile_args
    jaxpr = traced.jaxpr.jaxpr
    outer = len(jaxpr.invars) - len(names)
    names = _all_names(names, jaxpr)
    mesh = _mesh_of(facts, jaxpr)
    free_in, free_out = _free(facts)
    text, asked = renamed(lowered.as_text(debug_info=True))
    text = _with_paths(text, dict(zip(argument_names(traced), names[outer:], strict=False)))
    made = LoweredText(
        text=text,
        digest="",
        num_devices=mesh.size if mesh is not None else 1,
        mesh_axes=() if mesh is None else tuple((str(name), size) for name, size in mesh.shape.items()),
        tuple_arguments=bool(facts["tuple_args"]),
        free_inputs=free_in,
        free_outputs=free_out,
        arguments=_used_arguments(facts, jaxpr, names, roles or {}),
        traced_flops=count_traced(jaxpr, platform, traced.jaxpr.consts, by_source=True),
    )
    parts = (renamed(lowered.as_text())[0], made.files()[FACTS], rules_text(jaxpr) if asked else "")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return dataclasses.replace(made, digest=digest, answers=answers_of(asked, lowered) if asked else None)


def arguments_on_mesh(traced: Any, lowered: Any) -> tuple[Argument, ...]:
    """Return the arguments that a traced and lowered call uses, each with the mesh axes that split it.

    Static arguments are none, nor are arrays that the program does not use. Arrays that the function closes
    over come first.
    """
    jaxpr = traced.jaxpr.jaxpr
    names = _all_names(argument_names(traced), jaxpr)
    return _used_arguments(lowered._lowering.compile_args, jaxpr, names, {}, has_axes=True)


def _all_names(names: Sequence[str], jaxpr: Any) -> list[str]:
    """Return a name for each variable of a jaxpr: the last ones have `names`, the others are closed over."""
    outer = len(jaxpr.invars) - len(names)
    return [name or f"closed_over[{index}]" for index, name in enumerate([*[""] * outer, *names])]


def _used_arguments(
    facts: Mapping[str, Any],
    jaxpr: Any,
    names: Sequence[str],
    roles: Mapping[str, str],
    has_axes: bool = False,
) -> tuple[Argument, ...]:
    """Return the arguments that a lowered call uses.

    `names`: of all variables of its jaxpr, in order. `has_axes`: say which mesh axes split each argument.
    """
    mapped = _mapped(jaxpr)
    used = zip(sorted(facts["kept_var_idx"]), facts["in_shardings"], strict=True)
    found: list[tuple[str, Any, Any]] = [
        (str(names[place]), jaxpr.invars[place].aval, mapped.get(jaxpr.invars[place], sharding))
        for place, sharding in used
    ]
    made = [_argument(name, aval, sharding, roles) for name, aval, sharding in found]
    if not has_axes:
        return tuple(made)
    split = [_axes(sharding) for _, _, sharding in found]
    return tuple(dataclasses.replace(one, axes=axes) for one, axes in zip(made, split, strict=True))


def _axes(sharding: Any) -> tuple[str, ...]:
    """Return the mesh axes of more than one device over which a sharding splits an array."""
    if not isinstance(sharding, NamedSharding):
        return ()
    named = {axis for entry in sharding.spec for axis in axes_of(entry)}
    return tuple(str(name) for name, size in sharding.mesh.shape.items() if size > 1 and name in named)


def _traced(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Return the `jax.stages.Traced` of a call, and the paths of its arrays.

    A function that can trace itself does so, with its own static arguments, donation and shardings; Flax
    NNX's wrapper holds JAX's. Any other call is jitted here, with what its inner calls donate; of its results
    the arrays and numbers are kept (a module of Equinox holds functions, too).
    """
    if isinstance(step, jax.stages.Traced):
        return step, argument_names(step)
    if (trace := getattr(step, "trace", None)) is not None and _can_be_described(args, kwargs):
        args, kwargs = jax.tree.map(_shape_of, (tuple(args), dict(kwargs)))
        traced: Any = trace(*args, **kwargs)
        while not isinstance(traced, jax.stages.Traced):
            traced = traced.traced
        return traced, argument_names(traced)
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [_is_array(leaf) for leaf in leaves]
    fixed = [None if known else leaf for leaf, known in zip(leaves, is_array, strict=True)]
    paths = argument_paths(plain(step), args, kwargs)

    def outer(*arrays: Any) -> Any:
        given = iter(arrays)
        whole = [next(given) if known else leaf for leaf, known in zip(fixed, is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, whole)
        results = jax.tree.leaves(step(*args, **kwargs))
        return [leaf for leaf in results if _is_array(leaf) or isinstance(leaf, numbers.Number)]

    shapes = [_shape_of(leaf) for leaf, known in zip(leaves, is_array, strict=True) if known]
    names = [path for path, known in zip(paths, is_array, strict=True) if known]
    traced = jax.jit(outer).trace(*shapes)
    if donated := _donated(traced.jaxpr.jaxpr):
        traced = jax.jit(outer, donate_argnums=donated).trace(*shapes)
    return traced, names


def _refuse_two_devices(args: Sequence[Any], kwargs: Mapping[str, Any], paths: Sequence[str]) -> None:
    """Raise if arguments were placed on different single devices: JAX runs no program on them."""
    homes: dict[Any, str] = {}
    for path, leaf in zip(paths, jax.tree.leaves((tuple(args), dict(kwargs))), strict=True):
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
        is_placed = is_array and getattr(leaf, "committed", False)
        if is_placed and isinstance(leaf.sharding, SingleDeviceSharding):
            homes.setdefault(next(iter(leaf.sharding.device_set)), path)
    if len(homes) > 1:
        found = ", ".join(
            f"{path} on device {device.id} ({device.platform})" for device, path in homes.items()
        )
        raise InputError(
            f"the arrays of one program are on different devices: {found}",
            hint="copy one to where the other is: jax.device_put(y, x.sharding); or place both on one mesh: "
            "jax.device_put((x, y), NamedSharding(mesh, P()))",
        )


def refuse_leaks(traced: Any, in_threads: Sequence[Exception], who: str) -> None:
    """Raise if a function that was traced closes over a leaked value, or a thread that it started used one.

    JAX does not make public what it closes over; both releases of jax that we know have `_consts`.
    """
    if in_threads:
        raise leak_error(in_threads[0], who) from in_threads[0]
    refuse_leaked([each for each in getattr(traced, "_consts", ()) if not _is_shape(each)], who)


def _is_shape(value: Any) -> bool:
    """Return whether a value is an array that is held as a shape: it belongs to no trace."""
    shapes = sys.modules.get(f"{__package__}._shapes")
    return shapes is not None and isinstance(value, shapes.ShapeTracer)


def _can_be_described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether JAX can describe the arguments when it lowers a call.

    It rebuilds them from `ArgInfo`. A class that computes with its arrays when it is made, such as jmp's
    `DynamicLossScale`, fails on that.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    try:
        jax.tree.unflatten(tree, [jax.stages.ArgInfo(leaf, False) for leaf in leaves])
    except Exception:  # the class raises what it likes
        return False
    return True


def argument_names(traced: Any) -> list[str]:
    """Return the paths of the arguments of a traced call."""
    return [str(name) for name in traced.jaxpr.jaxpr.debug_info.arg_names or ()]


def _with_paths(text: str, paths: Mapping[str, str]) -> str:
    """Return StableHLO text in which the arguments have their paths for names, where JAX gave others."""
    changed = {name: path for name, path in paths.items() if name != path}
    if not changed:
        return text
    return _LOCATION.sub(lambda found: f'loc("{changed.get(found[1], found[1])}"', text)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _name(step: Any) -> str:
    return getattr(step, "__qualname__", None) or type(step).__name__


def _shape_of(leaf: Any) -> Any:
    """Return an array's shape, with its sharding if that is over a mesh; return other values unchanged."""
    if not _is_array(leaf):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    kept = sharding if isinstance(sharding, NamedSharding) else None
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=kept, weak_type=weak)


def _donated(jaxpr: Any) -> tuple[int, ...]:
    """Return the arguments that a call inside donates."""
    found: set[int] = set()
    for eqn in jaxpr.eqns:
        flags = eqn.params.get("donated_invars", ())
        for variable, given in zip(eqn.invars, flags, strict=False):
            if given and variable in jaxpr.invars:
                found.add(jaxpr.invars.index(variable))
    return tuple(sorted(found))


def _mesh_of(facts: Mapping[str, Any], jaxpr: Any) -> Any:
    """Return the mesh of a call: of its arguments, its results, or a `shard_map` (`pmap`) inside; or None."""
    shardings = (*facts["in_shardings"], *facts["out_shardings"])
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    meshes += [eqn.params["mesh"] for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map"]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def _mapped(jaxpr: Any) -> dict[Any, NamedSharding]:
    """Return the places that `shard_map` (`pmap`) gives to arguments that are handed to it as they are."""
    places: dict[Any, NamedSharding] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            found = [NamedSharding(mesh, spec) for spec in eqn.params["in_specs"]]
        elif (inner := inner_program(eqn)) is not None and len(inner.invars) == len(eqn.invars):
            within = _mapped(inner)
            found = [within.get(variable) for variable in inner.invars]
        else:
            continue
        given = zip(eqn.invars, found, strict=True)
        places.update((atom, place) for atom, place in given if place and not hasattr(atom, "val"))
    return places


def _free(facts: Mapping[str, Any]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    from jax._src.interpreters import pxla  # no public name says which shardings were left open

    inputs, outputs = pxla.get_prop_to_input_output(
        facts["in_shardings"], facts["out_shardings"], len(facts["ordered_effects"])
    )
    return tuple(map(bool, inputs)), tuple(map(bool, outputs))


def _argument(path: str, aval: Any, sharding: Any, roles: Mapping[str, str]) -> Argument:
    shape = tuple(aval.shape)
    shard = sharding.shard_shape(shape) if isinstance(sharding, NamedSharding) else shape
    # A typed key is an array of numbers: its bytes are those of its data.
    data = (
        jax.eval_shape(jax.random.key_data, aval) if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval
    )
    per_entry = data.size // max(aval.size, 1) * data.dtype.itemsize
    return Argument(
        path=path,
        role=roles.get(path) or role_in_tree(path, str(aval.dtype)),
        shape=shape,
        dtype=str(aval.dtype),
        device_bytes=int(np.prod(shard)) * per_entry,
        replicated=tuple(shard) == shape,
        axes=None,
    )


def compiled_text(lowered: LoweredText, devices: Sequence[Any], options: Mapping[str, Any], name: str) -> Any:
    """Return the executable of a lowered call for devices: the runtime's own, without JAX's wrapper.

    Raises:
        CompileError: the compiler refused the program, perhaps because it does not fit a device.
    """
    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    chosen = np.array(list(devices))
    compile_options = get_compile_options(
        1,
        len(chosen),
        np.array([device.id for device in chosen]).reshape(1, -1),
        env_options_overrides=dict(options),
        backend=chosen[0].client,
    )
    compile_options.parameter_is_tupled_arguments = lowered.tuple_arguments
    build = compile_options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = list(lowered.free_inputs)
    build.allow_spmd_sharding_propagation_to_output = list(lowered.free_outputs)
    try:
        with mlir.make_ir_context():
            module = ir.Module.parse(lowered.text)
            client = chosen[0].client
            # Described devices have a client that only compiles; the CPU's compiles what it loads.
            compiles = client.compile_and_load if client.platform == "cpu" else client.compile
            devices_list = xla_client.DeviceList(tuple(chosen))
            return compiles(module, executable_devices=devices_list, compile_options=compile_options)
    except Exception as failed:  # XLA raises errors of many kinds
        raise could_not_compile(name, failed) from failed
