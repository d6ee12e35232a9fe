"""Trace and lower for devices that this process lacks: calls to the host, and kernels for a kind of device.

A program may call the host: `jax.debug.print`, `io_callback`, `pure_callback`. JAX lowers such a call with
the runtime client of the target, which holds the Python function that the program will call. A weighing never
runs the program, and no such client exists where the target's devices are only described. For the time of one
lowering `callbacks_without_devices` gives JAX a client that holds nothing. The program is otherwise the one
that runs: the operands of the call are computed and its results are used.

JAX also asks NVIDIA's libraries for their releases, and the extra `nvidia` does not bring them. Before it
lowers `jnp.linalg.eig` it asks cuSOLVER, and is told CUDA 13's. While it traces cuDNN's attention, or Pallas'
attention for Hopper, it asks cuDNN and CUDA's runtime; `libraries_of_plugin` answers for what is absent.

JAX has no public name for this. The private names are those of jax 0.10 to 0.12, and a test of each release
reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import callback, debugging, dispatch
from jax._src.lax import linalg
from jax._src.lib import cuda_versions
from jax.extend.backend import backends
from jax.sharding import AbstractDevice, AbstractMesh

_VERSIONS_LOCK = threading.Lock()
_OWN = dict[str, Callable[[], int]]()  # the plugin's own functions
_LOCK = threading.Lock()  # the names that are replaced belong to the process
_CALLBACKS = (
    callback.io_callback_p,
    callback.pure_callback_p,
    debugging.debug_callback_p,
    debugging.debug_print_p,
)


class _Versions:
    """Stand in for the versions of CUDA's libraries."""

    @staticmethod
    def cusolver_get_version() -> int:
        """Return cuSOLVER's version in CUDA 13.0; since 11.7.1 it has the decomposition that JAX calls."""
        return 12000


class _Client:
    """Stand in for the runtime's client of a platform."""

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def make_python_callback_from_host_send_and_recv(self, *arguments: Any) -> None:
        """Hold no function: a TPU's host sends and receives, and this one never does."""


_answering = 0  # blocks of `libraries_of_plugin` that are open, in all threads
_LIBRARIES = ("cudnn", "cuda_runtime")


@contextlib.contextmanager
def libraries_of_plugin(platform: str) -> Iterator[None]:
    """Let JAX trace as if libraries that are absent had the releases that its plugin was built with.

    JAX only compares them with the least release of a feature. A library that answers is asked itself.
    """
    global _answering
    asked: Any = cuda_versions
    if platform != "cuda" or asked is None:
        yield
        return
    with _VERSIONS_LOCK:
        _answering += 1
        if _answering == 1:
            for name in _LIBRARIES:
                _OWN[name] = getattr(asked, f"{name}_get_version")
                setattr(asked, f"{name}_get_version", _release(name))
    try:
        yield
    finally:
        with _VERSIONS_LOCK:
            _answering -= 1
            if not _answering:
                for name, own in _OWN.items():
                    setattr(asked, f"{name}_get_version", own)


def _release(name: str) -> Callable[[], int]:
    """Return a function that answers with a library's release, or the one that the plugin was built with."""
    own = _OWN[name]
    built: Callable[[], int] = getattr(cuda_versions, f"{name}_build_version")

    def release() -> int:
        try:
            return own()
        except RuntimeError:  # "cuDNN not found."
            return built()

    return release


@contextlib.contextmanager
def callbacks_without_devices() -> Iterator[None]:
    """Let JAX lower calls to the host, on an abstract mesh and for a platform that this process lacks.

    One lowering at a time has these rules. Afterwards JAX has its own again.
    """
    emit, names = callback.emit_python_callback, linalg.__dict__
    versions = names["cuda_versions"]

    def emit_without_client(ctx: Any, *arguments: Any, **keywords: Any) -> Any:
        module = ctx.module_context
        if module.platforms[0] in backends():  # JAX keeps this lowering for a run of the user's own
            return emit(ctx, *arguments, **keywords)
        alone = module.replace(backend=_Client(module.platforms[0]), host_callbacks=[])
        return emit(ctx.replace(module_context=alone), *arguments, **keywords)

    needing = dispatch.prim_requires_devices_during_lowering
    with _LOCK:
        removed = needing & set(_CALLBACKS)
        callback.emit_python_callback = emit_without_client
        names["cuda_versions"] = _Versions
        needing -= removed
        dispatch.jaxpr_has_prim_requiring_devices.cache_clear()  # it would keep an earlier refusal
        try:
            yield
        finally:
            callback.emit_python_callback = emit
            names["cuda_versions"] = versions
            needing |= removed
            dispatch.jaxpr_has_prim_requiring_devices.cache_clear()


def devices_of_kind(kind: str, platform: str) -> contextlib.AbstractContextManager[Any]:
    """Let JAX trace and lower as if it ran on devices of a kind, as JAX names it: Pallas asks for it."""
    context = jax.sharding.get_abstract_mesh()
    if not kind or not context.empty or platform == "cpu":
        return contextlib.nullcontext()
    names = {"device_kind": kind, "num_cores": None, "platform": "gpu" if platform == "cuda" else platform}
    known = {field.name: names[field.name] for field in dataclasses.fields(AbstractDevice)}
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**known)))
