"""How long a function takes: until its call returns, and until its results are there.

JAX and CUDA work asynchronously: a call hands work to a device and returns. Timing the call times the
dispatch, not the work.
"""

from __future__ import annotations

import numbers
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..spread import Spread
from ..tables import aligned
from ..units import format_seconds
from ._traced import explaining_leaks, refuse_traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of calls of one function.

    `dispatch_seconds`: until the call returned. `execution_seconds`: from the same start until its results
    were ready. `first_call_seconds`: of the first call of all, tracing and compiling included.
    `waited_for`: what made the results ready.
    """

    dispatch_seconds: Spread
    execution_seconds: Spread
    first_call_seconds: float
    num_repeats: int
    waited_for: str

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

    The first `warm_up` calls are left out of the spreads (the first of them compiles); before each call the
    results of the one before are waited for.

    Raises:
        InputError: `fn` returns nothing that can be waited for, gives up its arguments, leaks or is given a
            traced value, or `repeats` or `warm_up` are below 1. What `fn` itself raises passes.
    """
    if not callable(fn):
        raise InputError(f"{fn!r} is no function", hint="clock(function, arguments...), not its result")
    for name, count in (("warm_up", warm_up), ("repeats", repeats)):
        if count < 1:
            raise InputError(f"{name} = {count}", hint=f"use {name} = 1 or more: the first call compiles")
    for place, argument in enumerate((*args, *kwargs.values())):
        refuse_traced(argument, f"argument {place}", "time")
    first, waited_for, dispatch, execution = 0.0, "", list[float](), list[float]()
    with explaining_leaks():
        for call in range(warm_up + repeats):
            _check_arguments(args, kwargs, call)
            started = time.perf_counter()
            result = fn(*args, **kwargs)
            returned = time.perf_counter()
            waited_for = _wait(result)
            ready = time.perf_counter()
            if call == 0:
                first = ready - started
            if call >= warm_up:
                dispatch.append(returned - started)
                execution.append(ready - started)
    return Timing(
        dispatch_seconds=_spread(dispatch),
        execution_seconds=_spread(execution),
        first_call_seconds=first,
        num_repeats=repeats,
        waited_for=waited_for,
    )


def _spread(seconds: list[float]) -> Spread:
    low, median, high = (float(value) for value in np.quantile(seconds, [0.05, 0.5, 0.95]))
    return Spread(median=median, low=low, high=high, num_steps=len(seconds))


def _check_arguments(args: Any, kwargs: Any, call: int) -> None:
    """A function that donates its arguments leaves none for a second call."""
    import jax

    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise InputError(
                f"an argument of shape {list(leaf.shape)} is deleted"
                + (f" after call {call}: the function donates it" if call else ""),
                hint="time a function without donate_argnums, or one that makes its own arguments",
            )


def _wait(result: Any) -> str:
    """Until everything that `result` holds is ready; what was waited for, in words.

    Raises:
        InputError: there is nothing in it to wait for.
    """
    import jax

    leaves = jax.tree.leaves(result)
    for place, leaf in enumerate(leaves):
        refuse_traced(leaf, f"result {place}", "time")
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    jax.block_until_ready(arrays)
    tensors = _tensors(leaves)
    accelerators = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"})
    for device in accelerators:
        sys.modules["torch"].accelerator.synchronize(device)
    waited = []
    if arrays:
        devices = sorted({f"{d.platform}:{d.id}" for array in arrays for d in array.devices()})
        waited.append(f"{len(arrays)} jax array{'s' * (len(arrays) > 1)} on {_listed(devices)}")
    if accelerators:
        waited.append(f"torch tensors on {_listed(accelerators)}")
    if waited:
        return " and ".join(waited)
    if tensors or any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        return f"nothing asynchronous: {'torch on a CPU' if tensors else 'numpy'}"
    if any(isinstance(leaf, numbers.Number | str | bytes) for leaf in leaves):
        return "nothing asynchronous: a value of the host"
    raise InputError(
        f"the function returned {type(result).__name__}: nothing to wait for, so only its dispatch could be "
        "timed",
        hint="return the arrays that it computes, or a number made from them",
    )


def _listed(devices: list[str]) -> str:
    return ", ".join(devices) if len(devices) <= 2 else f"{len(devices)} devices"


def _tensors(leaves: list[Any]) -> list[Any]:
    """Torch's tensors that hold numbers: on the device meta nothing is computed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"]
