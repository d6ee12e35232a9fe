"""Time functions and training steps.

`clock` measures how long a function takes until its call returns, and until its results are ready. JAX and
CUDA work asynchronously: a call hands work to a device and returns. The time of the call is therefore the
time of the dispatch, not of the work. `StepClock` records the seconds of each training step and summarises
them.
"""

from __future__ import annotations

import dataclasses
import numbers
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..reconciliation import Spread
from ..units import aligned, format_seconds
from ._storages import explaining_leaks, is_fake, refuse_traced

WARM_UP_STEPS = 2
"""Left out of the spread: the first steps fill allocators and caches."""


class StepClock:
    """A clock that is read when a step is done; `start` excludes the time since the previous step.

    Args:
        now: the clock in seconds; it never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self.seconds: list[float] = []

    def start(self) -> None:
        """Begin the next step now."""
        self._last = self._now()

    def leave_out(self, seconds: float) -> None:
        """Exclude some seconds from the current step."""
        self._last += seconds

    def tick(self) -> float:
        """End a step; return its seconds since `start` or the previous `tick`."""
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now
        return self.seconds[-1]

    def usual_seconds(self) -> float:
        """Return the median so far; the first steps count only while there are no others."""
        return statistics.median(self.seconds[WARM_UP_STEPS:] or self.seconds)

    def spread(self) -> Spread | None:
        """Summarise all steps but the first two; None if there are no others."""
        timed = self.seconds[WARM_UP_STEPS:]
        if not timed:
            return None
        low, high = np.quantile(timed, [0.05, 0.95])
        return Spread(median=statistics.median(timed), low=float(low), high=float(high), num_steps=len(timed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The seconds of repeated calls of one function.

    `dispatch_seconds`: from the start until the call returned. `execution_seconds`: from the same start until
    the results were ready. `first_call_seconds`: the very first call, with tracing and compiling.
    `waited_for`: the results that each call waited for, in words.
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

    The first `warm_up` calls are excluded from the spreads (the very first one compiles). Before the first
    call, this waits for all live jax arrays; before each later call, for the results of the previous one. It
    does not wait for work that the function starts but does not return.

    Raises:
        InputError: `fn` returns nothing that can be waited for, donates its arguments, leaks or receives a
            traced value, or `repeats` or `warm_up` is below 1. Errors that `fn` itself raises pass through.
    """
    if not callable(fn):
        raise InputError(f"{fn!r} is no function", hint="clock(function, arguments...), not its result")
    for name, count in (("warm_up", warm_up), ("repeats", repeats)):
        if count < 1:
            raise InputError(f"{name} = {count}", hint=f"use {name} = 1 or more: the first call compiles")
    for path, argument in _arguments(args, kwargs):
        refuse_traced(argument, path, "time")
    _finish_earlier_work(args, kwargs)
    first, waited_for, dispatch, execution = 0.0, "", list[float](), list[float]()
    with explaining_leaks():
        for call in range(warm_up + repeats):
            _check_arguments(args, kwargs, call)
            started = time.perf_counter()
            result = fn(*args, **kwargs)
            returned = time.perf_counter()
            leaves = list(_leaves(result))
            ready = time.perf_counter() if _wait(leaves) else returned
            waited_for = _words(result, leaves)
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
    for device in _accelerators([leaf for _, leaf in _arguments(args, kwargs)]):
        sys.modules["torch"].accelerator.synchronize(device)


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
                f"result {place}, a jax array of shape {list(leaf.shape)}, is deleted: it is never ready",
                hint="return an array that the function neither deletes nor donates",
            )
    if arrays := [leaf for leaf in leaves if isinstance(leaf, jax.Array)]:
        jax.block_until_ready(arrays)
    accelerators = _accelerators(leaves)
    for device in accelerators:
        sys.modules["torch"].accelerator.synchronize(device)
    return bool(arrays or accelerators)


def _words(result: Any, leaves: list[Any]) -> str:
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
    of_the_host = (np.ndarray, np.generic, numbers.Number, str, bytes)
    known = {id(tensor) for tensor in tensors}
    others = [leaf for leaf in leaves if id(leaf) not in known and not isinstance(leaf, of_the_host)]
    if others or not leaves:
        inside = "".join(f" with {type(leaf).__name__} in it" for leaf in others[:1] if leaf is not result)
        raise InputError(
            f"the function returned {type(result).__name__}{inside}: nothing to wait for, so only its "
            "dispatch could be timed",
            hint="return the arrays that it computes, or a number made from them",
        )
    if tensors or any(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
        return f"nothing asynchronous: {'torch on a CPU' if tensors else 'numpy'}"
    return "nothing asynchronous: a value of the host"


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
