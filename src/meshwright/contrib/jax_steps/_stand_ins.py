"""Stand in for what surrounds a user's code: the fleet's devices and processes.

The code is process 0 of the fleet. Other processes do not exist, so what waits for them returns at once.
Imports jax: only the process that runs a script may import this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

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
