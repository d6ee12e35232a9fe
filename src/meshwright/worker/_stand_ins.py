"""Stand in for what surrounds a script: the fleet's devices and processes, and checkpoints.

The script is process 0 of the fleet. Other processes do not exist, so what waits for them returns at once. A
checkpoint manager of Orbax has no checkpoints and writes none, since arrays have no values.
Imports jax: only the process that runs a script may import this module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from meshwright.errors import InputError

from ._shapes import ShapeTracer, replaced


@contextlib.contextmanager
def as_the_fleet(devices: list[Any], platform: str) -> Iterator[None]:
    """Let JAX answer with the fleet's devices in the block, as its process 0; `platform`: cuda, tpu, cpu."""
    kinds = {"cuda": ("gpu", "cuda"), "tpu": ("tpu",), "cpu": ("cpu",)}[platform]
    processes = sorted({device.process_index for device in devices})

    def is_fleet(backend: Any) -> bool:
        return backend is None or backend in kinds or not isinstance(backend, str)

    def of_fleet(answer: Callable[..., Any]) -> Callable[..., Any]:
        def instead(original: Any, *args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", args[-1] if args and isinstance(args[-1], str) else None)
            return answer(**kwargs) if is_fleet(backend) else original(*args, **kwargs)

        return instead

    def local(process_index: int | None = None, **rest: Any) -> list[Any]:
        return [device for device in devices if device.process_index == (process_index or 0)]

    answers: dict[str, Callable[..., Any]] = {
        "devices": lambda **rest: list(devices),
        "local_devices": local,
        "device_count": lambda **rest: len(devices),
        "local_device_count": lambda **rest: len(local()),
        "process_count": lambda **rest: len(processes),
        "process_index": lambda **rest: 0,
        "process_indices": lambda **rest: list(processes),
        "default_backend": lambda **rest: kinds[0],
    }
    distributed, multihost = "jax.distributed", "jax.experimental.multihost_utils"
    with contextlib.ExitStack() as stack:
        for module in ("jax._src.xla_bridge", "jax"):
            for name, answer in answers.items():
                stack.enter_context(replaced(module, name, of_fleet(answer)))
        for module, name, instead in (
            (distributed, "initialize", lambda original, *args, **kwargs: None),
            (distributed, "is_initialized", lambda original: len(processes) > 1),
            (multihost, "sync_global_devices", lambda original, *args, **kwargs: None),
            (multihost, "assert_equal", lambda original, *args, **kwargs: None),
            (multihost, "broadcast_one_to_all", lambda original, tree, *args, **kwargs: tree),
            ("jax._src.pmap", "host_local_array_to_global_array", _of_all_processes),
            ("jax._src.pmap", "global_array_to_host_local_array", _of_this_process),
            ("jax", "config.update", _unless_of_devices),
            ("jax", "Device.memory_stats", lambda original, device: {}),
        ):
            stack.enter_context(replaced(module, name, instead))
        yield


@contextlib.contextmanager
def meshes_without_types(say: Callable[[], None], *, auto: bool) -> Iterator[None]:
    """See calls of `jax.make_mesh` without `axis_types` in the block, whose axes JAX makes Explicit.

    `say`: called at each. `auto`: make the axes Auto, as they were before JAX 0.9.
    """

    def make(original: Any, axis_shapes: Any, axis_names: Any, axis_types: Any = None, **rest: Any) -> Any:
        if axis_types is None:
            say()
            axis_types = (AxisType.Auto,) * len(axis_names) if auto else None
        return original(axis_shapes, axis_names, axis_types, **rest)

    with replaced("jax", "make_mesh", make):
        yield


def _unless_of_devices(original: Any, name: str, value: Any) -> None:
    """Keep the script from choosing devices: they are the fleet's."""
    if name not in ("jax_num_cpu_devices", "jax_platforms", "jax_platform_name"):
        original(name, value)


def _of_all_processes(original: Any, values: Any, mapped: Any, *rest: Any) -> list[Any]:
    """Return the slices of all processes, where a pmapped function is handed those of one."""
    processes = jax.process_count()
    given = zip(values, mapped.in_global_shardings, strict=True)
    return [_resized(value, place, place, lambda size: size * processes) for value, place in given]


def _of_this_process(original: Any, results: Any, *rest: Any) -> Any:
    """Return this process's slices of a pmapped function's results."""
    processes = jax.process_count()
    return jax.tree.map(
        lambda leaf: _resized(leaf, leaf.sharding, None, lambda size: size // processes), results
    )


def _resized(array: Any, sharding: Any, place: NamedSharding | None, resize: Callable[[int], int]) -> Any:
    """Return an array as a shape whose mapped dimension has another size; one that is not mapped as it is."""
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    if not any(spec):
        return array
    mapped = [*map(bool, spec), *[False] * (array.ndim - len(spec))]
    sizes = zip(array.shape, mapped, strict=True)
    shape = tuple(resize(size) if is_mapped else size for size, is_mapped in sizes)
    return ShapeTracer(jax.typeof(array).update(shape=shape), place)


def without_checkpoints(say: Callable[[str], None]) -> None:
    """Keep Orbax from writing, if the script imports it. `say`: called with what is left out."""
    sys.meta_path.insert(0, _Changed("orbax.checkpoint", lambda orbax: _without_files(orbax, say)))


def at_torch_steps(stop: Callable[[], None]) -> None:
    """Call `stop` before each step of an optimizer of PyTorch, if the script imports it."""

    def change(torch: Any) -> None:
        hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook
        hook(lambda optimizer, args, kwargs: stop())

    sys.meta_path.insert(0, _Changed("torch", change))


class _Changed(MetaPathFinder):
    """Find one module, and change it once it is loaded."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the one module; None for any other."""
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # pyright: ignore[reportAttributeAccessIssue]
        return spec


def _without_files(orbax: Any, say: Callable[[str], None]) -> None:
    """Let the checkpoint managers of Orbax save nothing and find nothing."""

    def save(manager: Any, *args: Any, **kwargs: Any) -> bool:
        say("the checkpoint that is saved")
        return True

    def restore(manager: Any, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "the script restores a checkpoint, and arrays are held as shapes",
            hint="let it start from scratch: the step is the same",
        )

    def keep_folder(manager: Any, directory: Any = None, *args: Any, **kwargs: Any) -> None:
        manager._directory = directory

    manager: dict[str, Any] = {
        "__init__": keep_folder,
        "directory": property(lambda self: self._directory),
        "save": save,
        "restore": restore,
        "should_save": lambda self, *args, **kwargs: True,
        "reached_preemption": lambda self, *args, **kwargs: False,
        "all_steps": lambda self, *args, **kwargs: [],
        "__enter__": lambda self: self,
    }
    nothing = ("latest_step", "best_step", "wait_until_finished", "check_for_errors", "reload", "delete")
    nothing += ("close", "__exit__")
    manager |= dict.fromkeys(nothing, lambda self, *args, **kwargs: None)
    for name, instead in manager.items():
        setattr(orbax.CheckpointManager, name, instead)
    for kind in (orbax.Checkpointer, orbax.AsyncCheckpointer):
        kind.save = save
