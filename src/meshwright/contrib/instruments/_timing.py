"""Time functions and matrix products.

`clock` measures how long a function takes until its call returns, and until its results are ready. JAX and
CUDA work asynchronously: a call hands work to a device and returns. The time of the call is therefore the
time of the dispatch, not of the work. `matmul_mfu` compares the rate of one large square product with the
device's peak. The peak is a catalog entry for an accelerator. For a CPU it is an estimate from cores, clock
and instruction set.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.contrib.jax_steps import explaining_leaks, refuse_traced
from meshwright.contrib.sharding_words import Surroundings, sharding_error
from meshwright.errors import InputError, nearest_name
from meshwright.hardware import chip_of_device_kind
from meshwright.measure import CPUINFO, Percentiles, cpu_model, usable_cores
from meshwright.reportable import OneLine
from meshwright.units import aligned, format_rate, format_seconds

from ._array_storages import is_fake

_MOST_NAMED = 8  # arguments of an error


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Timing(OneLine):
    """The seconds of repeated calls of one function.

    `dispatch_seconds`: from the start until the call returned. `execution_seconds`: from the same start until
    the results were ready. `first_call_seconds`: the very first call, with tracing and compiling.
    `waited_for`: the results that each call waited for, in words.
    """

    dispatch_seconds: Percentiles
    execution_seconds: Percentiles
    first_call_seconds: float
    num_repeats: int
    waited_for: str

    @property
    def line(self) -> str:
        """The medians of execution and dispatch."""
        execution, dispatch = self.execution_seconds.median, self.dispatch_seconds.median
        words = f"execution {format_seconds(execution)}, dispatch {format_seconds(dispatch)}"
        return f"{words}, of {self.num_repeats} calls"

    def __str__(self) -> str:
        rows = [
            (name, *(format_seconds(value) for value in (spread.median, spread.low, spread.high)))
            for name, spread in (("dispatch", self.dispatch_seconds), ("execution", self.execution_seconds))
        ]
        header = ("", "median", "5 %", "95 %")
        table = aligned(header, rows, right=set(header[1:]))
        return (
            f"{table}\nof {self.num_repeats} calls; first call {format_seconds(self.first_call_seconds)}; "
            f"waited for {self.waited_for}"
        )


def clock(fn: Any, /, *args: Any, warm_up: int = 2, repeats: int = 10, **kwargs: Any) -> Timing:
    """Time `fn(*args, **kwargs)`, any function or other callable.

    The first `warm_up` calls are excluded from the spreads (the very first one compiles). Before the first
    call, this waits for all live jax arrays; before each later call, for the results of the previous one. It
    does not wait for work that the function starts but does not return.

    Raises:
        InputError: `fn` returns nothing that can be waited for, donates its arguments, leaks or receives a
            traced value, or works on arrays of different devices; or `repeats` or `warm_up` is below 1.
            Errors that `fn` itself raises pass through.

    Example:
        >>> import jax.numpy as jnp
        >>> timing = clock(jnp.sin, jnp.ones(3), repeats=5)
        >>> timing.num_repeats, timing.waited_for
        (5, '1 jax array on cpu:0')
    """
    if not callable(fn):
        raise InputError(
            f"{fn!r} is not a function", hint="call clock(function, arguments...), without its result"
        )
    for name, count in (("warm_up", warm_up), ("repeats", repeats)):
        if count < 1:
            raise InputError(f"{name} = {count}", hint=f"use {name} = 1 or more: the first call compiles")
    for path, argument in _arguments(args, kwargs):
        refuse_traced(argument, path, "time")
    _finish_earlier_work(args, kwargs)
    first, waited_for, dispatch, execution = 0.0, "", list[float](), list[float]()
    with explaining_leaks(), explaining_devices(args, kwargs):
        for call in range(warm_up + repeats):
            _check_arguments(args, kwargs, call)
            started = time.perf_counter()
            result = fn(*args, **kwargs)
            returned = time.perf_counter()
            leaves = list(_leaves(result))
            ready = time.perf_counter() if _wait(leaves) else returned
            waited_for = _waited_for(result, leaves)
            if call == 0:
                first = ready - started
            if call >= warm_up:
                dispatch.append(returned - started)
                execution.append(ready - started)
    return Timing(
        dispatch_seconds=Percentiles.of(dispatch),
        execution_seconds=Percentiles.of(execution),
        first_call_seconds=first,
        num_repeats=repeats,
        waited_for=waited_for,
    )


_TWO_DEVICES = re.compile(
    r"Expected all tensors to be on the same device|Tensor on device \S+ is not on the expected device"
)


@contextmanager
def explaining_devices(args: Any, kwargs: Any) -> Iterator[None]:
    """Run the block, and explain errors of JAX and of PyTorch that arrays are on different devices.

    Raises:
        InputError: in place of such an error. Every other error passes.
    """
    try:
        yield
    except ValueError as failed:
        if "incompatible devices for jitted computation" not in str(failed):
            raise
        error = sharding_error(failed, Surroundings(axes=(), shapes={}))
        if error is None:
            raise
        raise error from failed
    except RuntimeError as failed:
        if not _TWO_DEVICES.search(str(failed)):
            raise
        tensors = [(path, leaf.device) for path, leaf in _arguments(args, kwargs) if hasattr(leaf, "device")]
        where = ", ".join(f"{path} on {device}" for path, device in tensors[:_MOST_NAMED])
        raise InputError(
            f"the tensors of one operation are on different devices{f': {where}' if where else ''}\n"
            f"  in PyTorch's words: {str(failed).splitlines()[0]}",
            hint="copy one to where the other is: y.to(x.device); or a module with module.to(device)",
        ) from failed


def _arguments(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf of the arguments with its path: "argument 0['weight']"."""
    import jax

    for name, value in (*enumerate(args), *kwargs.items()):
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value):
            yield f"argument {name}{jax.tree_util.keystr(keys)}", leaf


def _finish_earlier_work(args: Any, kwargs: Any) -> None:
    """Wait for earlier work, since the first call would wait for it too."""
    import jax

    for array in jax.live_arrays():
        # An array that another thread deleted, or whose computation failed, is finished as well.
        with suppress(RuntimeError):
            array.block_until_ready()
    _synchronize_torch([leaf for _, leaf in _arguments(args, kwargs)])


def _check_arguments(args: Any, kwargs: Any, call: int) -> None:
    """Raise if an argument is deleted: a function that donates its arguments cannot be called twice."""
    import jax

    for path, leaf in _arguments(args, kwargs):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise InputError(
                f"{path} of shape {list(leaf.shape)} is deleted"
                + (f" after call {call}: the function donates it" if call else ""),
                hint="time a function without donate_argnums, or one that makes its own arguments",
            )


def _leaves(result: Any) -> Iterator[Any]:
    """Yield the leaves of a result, including those in mappings and dataclasses that are not pytrees.

    Hugging Face's outputs are of that kind.
    """
    import jax

    for leaf in jax.tree.leaves(result):
        if isinstance(leaf, Mapping):
            yield from _leaves(list(leaf.values()))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


def _wait(leaves: list[Any]) -> bool:
    """Wait until everything in a result is ready; return True if anything was asynchronous.

    Raises:
        InputError: the result holds a traced value or a deleted array, which never become ready.
    """
    import jax

    for place, leaf in enumerate(leaves):
        refuse_traced(leaf, f"result {place}", "time")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise InputError(
                f"result {place}, a jax array of shape {list(leaf.shape)}, is deleted, so never ready",
                hint="return an array that the function neither deletes nor donates",
            )
    if arrays := [leaf for leaf in leaves if isinstance(leaf, jax.Array)]:
        jax.block_until_ready(arrays)
    return _synchronize_torch(leaves) or bool(arrays)


def _waited_for(result: Any, leaves: list[Any]) -> str:
    """Describe the results that were waited for.

    Raises:
        InputError: nothing was waited for, and what was returned may still be in progress.
    """
    import jax

    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    tensors, accelerators = _tensors(leaves), _accelerators(leaves)
    waited = []
    if arrays:
        devices = sorted({f"{d.platform}:{d.id}" for array in arrays for d in array.devices()})
        waited.append(f"{len(arrays)} jax array{'s' * (len(arrays) > 1)} on {_listed(devices)}")
    if accelerators:
        waited.append(f"torch tensors on {_listed(accelerators)}")
    if waited:
        return " and ".join(waited)
    host_types = (np.ndarray, np.generic, numbers.Number, str, bytes)
    tensor_ids = {id(tensor) for tensor in tensors}
    others = [leaf for leaf in leaves if id(leaf) not in tensor_ids and not isinstance(leaf, host_types)]
    if others or not leaves:
        inside = "".join(f" with {type(leaf).__name__} in it" for leaf in others[:1] if leaf is not result)
        raise InputError(
            f"the function returned {type(result).__name__}{inside}: nothing to wait for, so only the "
            "dispatch could be timed",
            hint="return the arrays that it computes, or a number made from them",
        )
    if tensors or any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        return f"nothing asynchronous: {'torch on a CPU' if tensors else 'numpy'}"
    return "nothing asynchronous: a value of the host"


def _synchronize_torch(leaves: list[Any]) -> bool:
    """Wait for torch's devices; return True if there was one to wait for."""
    accelerators = _accelerators(leaves)
    for device in accelerators:
        sys.modules["torch"].accelerator.synchronize(device)
    return bool(accelerators)


def _accelerators(leaves: list[Any]) -> list[str]:
    """Return torch's devices that work asynchronously to the host."""
    return sorted({str(tensor.device) for tensor in _tensors(leaves) if tensor.device.type != "cpu"})


def _listed(devices: list[str]) -> str:
    return ", ".join(devices) if len(devices) <= 2 else f"{len(devices)} devices"


def _tensors(leaves: list[Any]) -> list[Any]:
    """Return torch's tensors that hold numbers, without meta and fake ones, for which nothing is computed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]
    return [tensor for tensor in tensors if not is_fake(tensor)]


CPU_SIZE, ACCELERATOR_SIZE = 1024, 8192
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Float32 lanes of a fused multiply-add unit, by instruction set. A core has two units (Intel's and AMD's
# optimisation manuals). Some server processors have only one 512-bit unit, so this is an upper estimate.
_LANES = (("avx512f", 16), ("avx2", 8), ("asimd", 4))
_UNITS, _FLOPS_PER_MULTIPLY_ADD = 2, 2


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatmulMFU(OneLine):
    """One square product of `size`, with 2 x size^3 FLOPs.

    `promised_flops_per_second`: the dense peak in this format; None if unknown, with the reason in
    `promised_source`. `promise_is_estimate`: the peak comes from cores, clock and instruction set, not from a
    data sheet; `mfu` may then exceed 1. `mfu`: achieved over promised, the utilisation of one kernel; a
    model's is lower. It is None without a promise, and if the rate exceeds a data sheet's peak, which
    `promised_source` then says.
    """

    device: str
    format: str
    size: int
    num_flops: int
    seconds: Percentiles
    achieved_flops_per_second: float
    promised_flops_per_second: float | None
    promised_source: str
    promise_is_estimate: bool
    mfu: float | None

    def __str__(self) -> str:
        rate = format_rate(self.achieved_flops_per_second, "FLOP/s")
        achieved = (
            f"{self.format}, {self.size} x {self.size} on {self.device}: "
            f"{rate} in {format_seconds(self.seconds.median)}"
        )
        if self.promised_flops_per_second is None:
            return f"{achieved}\n  promised: not known, {self.promised_source}"
        promised = format_rate(self.promised_flops_per_second, "FLOP/s")
        share = "promised:" if self.mfu is None else f"{self.mfu:.1%} of"
        return f"{achieved}\n  {share} {promised}, {self.promised_source}"


def matmul_mfu(
    size: int | None = None, *, formats: Sequence[str] = ("fp32", "bf16"), device: Any = None
) -> tuple[MatmulMFU, ...]:
    """Time a square product in each format, and compare its rate with the device's peak.

    Args:
        size: rows and columns; by default 1024 on a CPU and 8192 on an accelerator.
        formats: of fp64, fp32, bf16, fp16. fp32 is computed at full precision, not as tf32.
        device: a `jax.Device`; the first by default.

    Raises:
        InputError: an unknown format, a size below 1, or no device.

    Example:
        >>> (product,) = matmul_mfu(64, formats=["fp32"])
        >>> product.num_flops == 2 * 64**3
        True
    """
    import jax

    first = jax.local_devices()[0]
    device = first if device is None else device
    if not isinstance(device, jax.Device):
        raise InputError(f"{device!r} is not a device", hint=f"give one of jax.devices(), such as {first!r}")
    if isinstance(formats, str):
        raise InputError(f"formats = {formats!r} is one name", hint=f"use formats = [{formats!r}]")
    if size is None:
        size = CPU_SIZE if device.platform == "cpu" else ACCELERATOR_SIZE
    if size < 1:
        raise InputError(f"a product of size {size}", hint=f"use size = {CPU_SIZE}")
    for name in formats:
        if name not in DTYPES:
            raise InputError(f"no product is timed in format {name!r}", hint=nearest_name(name, DTYPES))
    return tuple(_time_product(device, name, size) for name in formats)


def _time_product(device: Any, name: str, size: int) -> MatmulMFU:
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(name == "fp64"):
        square = jnp.full((size, size), 1e-3, DTYPES[name], device=device)
        product = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
        seconds = clock(product, square, square).execution_seconds
    num_flops = 2 * size**3
    achieved = num_flops / seconds.median
    promised, source, estimated = _promise(device, name)
    exceeded = promised is not None and not estimated and achieved > promised
    kind = cpu_model() if device.platform == "cpu" else device.device_kind
    return MatmulMFU(
        device=f"{device.platform}:{device.id} ({kind})",
        format=name,
        size=size,
        num_flops=num_flops,
        seconds=seconds,
        achieved_flops_per_second=achieved,
        promised_flops_per_second=promised,
        promised_source=f"{source}; exceeded, so the clock or the catalog is wrong" if exceeded else source,
        promise_is_estimate=estimated,
        mfu=None if promised is None or exceeded else achieved / promised,
    )


def _promise(device: Any, name: str) -> tuple[float | None, str, bool]:
    """Return the promised FLOP/s, its source or the reason for its absence, and True for an estimate."""
    if device.platform == "cpu":
        return _cpu_promise(name)
    try:
        chip = chip_of_device_kind(device.device_kind)
    except InputError as unknown:
        return None, unknown.message, False
    peak = chip.peak_flops_per_second.get(name)
    if peak is None:
        return None, f"the catalog has no dense peak of {chip.name} in {name}", False
    return peak, f"catalog: {chip.name}, dense", False


def _cpu_promise(name: str) -> tuple[float | None, str, bool]:
    """Estimate cores x clock x multiply-adds per cycle, since a CPU's maker promises no such figure."""
    if name not in ("fp32", "fp64"):
        return None, f"whether this CPU has units for {name} is not known here", True
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    flags = set((re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M) or ["", ""])[1].split())
    clocks = [float(megahertz) for megahertz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.M)]
    known = [(flag, lanes) for flag, lanes in _LANES if flag in flags]
    if not known or not clocks:
        return None, "this system does not report the processor's clock and instruction sets", True
    flag, lanes = known[0]
    per_cycle = _UNITS * _FLOPS_PER_MULTIPLY_ADD * (lanes if name == "fp32" else lanes // 2)
    hertz, cores = max(clocks) * 1e6, _cores(text)
    source = f"estimate: {cores} cores x {hertz / 1e9:.2f} GHz x {per_cycle} FLOPs a cycle by {flag}"
    return cores * hertz * per_cycle, source, True


def _cores(text: str) -> int:
    """Return the physical cores that this process may use: two threads of a core share its units."""
    threads, cores = (re.search(rf"^{key}\s*:\s*(\d+)", text, re.M) for key in ("siblings", "cpu cores"))
    per_core = int(threads[1]) // int(cores[1]) if threads and cores else 1
    return max(1, usable_cores() // max(1, per_core))
