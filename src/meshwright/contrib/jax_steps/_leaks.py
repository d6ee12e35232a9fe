"""Explain traced values that are used where they must not be: after their function, in another thread.

While JAX traces a function, the function's values are traced values: a shape and a format, without numbers.
They belong to that call of the function and to the thread that made it. Elsewhere JAX refuses to compute with
them; but while it traces another function, it takes them as further arguments of that function.
Used by: `clock`, `footprint`, and the tracing of steps that are weighed.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

_OWN = str(Path(__file__).parents[2])
_MADE = re.compile(r"The function being traced when the value leaked was (.+?) at (.+?:\d+) traced for")
_TYPE = re.compile(r"intermediate value with type (\S+)")


def refuse_traced(value: Any, path: str, wanted: str) -> None:
    """Raise if a value is traced: it has a shape, but no storage, device or time of its own.

    Args:
        path: the place where the value was found.
        wanted: the quantity that was to be measured, for example "bytes".

    Raises:
        InputError: `value` is a tracer of `jit`, `grad`, `vmap` or the like.
    """
    from jax.core import Tracer

    if isinstance(value, Tracer):
        raise InputError(
            f"{path} is a traced value ({type(value).__name__}, {value.aval.str_short()}): while a function "
            f"is traced it has a shape, but no {wanted}",
            hint="call this outside the traced function, or ask about jax.eval_shape(function, ...); if that "
            "function is over, the value has leaked from it: return it instead of storing it",
        )


def refuse_leaked(values: Iterable[Any], who: str) -> None:
    """Raise if a value was traced by a function that is over, or in another thread.

    Args:
        values: what a traced function was called with and what it closes over.
        who: that function, as the error's subject.

    Raises:
        InputError: JAX would raise `UnexpectedTracerError` if the function were called.
    """
    import jax
    from jax.core import Tracer

    for value in values:
        if isinstance(value, Tracer):
            try:
                jax.lax.optimization_barrier(value)  # refuses what does not belong to the trace of now
            except jax.errors.UnexpectedTracerError as leaked:
                raise leak_error(leaked, who) from leaked


@contextmanager
def explaining_leaks() -> Iterator[None]:
    """Run the block, and explain errors from a traced value that left the function or thread that made it.

    Raises:
        InputError: in place of JAX's `UnexpectedTracerError`, and of the errors from using a leaked value as
            a number or a numpy array. Every other error passes. So do the latter errors if they come from
            inside a function being traced, which asked one of its own values for a number.
    """
    import jax

    try:
        yield
    except jax.errors.UnexpectedTracerError as leaked:
        raise leak_error(leaked) from leaked
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        if _while_tracing(error):
            raise
        raise leak_error(error) from error


def leak_error(leaked: Exception, who: str = "") -> InputError:
    """Return JAX's error about a leaked value in words: who uses it, its type, and what made it."""
    text = str(leaked).strip()
    found, made = _TYPE.search(text), _MADE.search(text)
    value = f"a traced value ({found[1]})" if found else "a traced value"
    used = f"{who} uses {value}" if who else f"{value} is used"
    place = ""
    if made and not made[2].startswith(_OWN):
        place = f": it is of {made[1]} at {made[2]}"
    elif not found:
        place = f": {text.splitlines()[0]}"
    return InputError(
        f"{used} outside the function, or the thread, that JAX was tracing when it was made{place}",
        hint="return it from the traced function instead of storing it, and use in each thread only values "
        "that were passed to that thread; start threads around a step, not inside it",
    )


_noting: list[list[Exception]] = []
_lock = threading.Lock()


@contextmanager
def noting_leaks_in_threads() -> Iterator[list[Exception]]:
    """Collect JAX's errors of leaked values in threads that end with one, which Python would only print."""
    noted: list[Exception] = []
    before = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        if _noting and type(args.exc_value).__name__ == "UnexpectedTracerError":
            for each in _noting:
                each.append(args.exc_value)  # pyright: ignore[reportArgumentType]
        else:
            before(args)

    with _lock:
        if not _noting:
            threading.excepthook = note
        _noting.append(noted)
    try:
        yield noted
    finally:
        with _lock:
            _noting[:] = [each for each in _noting if each is not noted]
            if threading.excepthook is note:
                threading.excepthook = before


def _while_tracing(error: Exception) -> bool:
    """Return True if a function that JAX called raised the error, and False if a leaked value did.

    JAX traces by calling the function, so its frames are then above the function's. Unless
    JAX_TRACEBACK_FILTERING says otherwise, JAX removes these frames, and a note or a cause of the error
    records the removal.
    """
    if any("JAX has removed its internal frames" in note for note in getattr(error, "__notes__", ())):
        return True
    if type(error.__cause__).__name__ == "UnfilteredStackTrace":
        return True
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [name.partition(".")[0] == "jax" for name in modules]
    return any(above and not below for above, below in pairwise(inside))
