"""Errors about values that exist only while JAX traces a function."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from ..errors import InputError


def refuse_traced(value: Any, path: str, wanted: str) -> None:
    """Stop at a traced value: it has a shape, and no storage, device or time of its own.

    Args:
        path: where it was found.
        wanted: what was to be measured of it: "bytes".

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


@contextmanager
def explaining_leaks() -> Iterator[None]:
    """Say in words what happened where a traced value left the function, or the thread, that made it.

    Raises:
        InputError: in the place of JAX's `UnexpectedTracerError` and the errors that follow from using
            a leaked value as a number or an array of numpy; every other error passes, so too these where
            a function of the user's was being traced and asked its own value for a number.
    """
    import jax

    try:
        yield
    except jax.errors.UnexpectedTracerError as leaked:
        raise _explained(leaked) from leaked
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as error:
        if _while_tracing(error):
            raise
        raise _explained(error) from error


def _explained(leaked: Exception) -> InputError:
    return InputError(
        "a traced value is used outside the function, or the thread, that JAX was tracing when it was "
        f"made: {str(leaked).strip().splitlines()[0]}",
        hint="return it from the traced function instead of storing it, and use in each thread only what "
        "that thread was given",
    )


def _while_tracing(error: Exception) -> bool:
    """Whether it was raised by a function that JAX called, and not by a value that JAX had let go.

    JAX traces by calling the function, so its own frames then stand above the function's. Where they were
    taken out, as they are unless JAX_TRACEBACK_FILTERING says else, a note or a cause tells so.
    """
    if any("JAX has removed its internal frames" in note for note in getattr(error, "__notes__", ())):
        return True
    if type(error.__cause__).__name__ == "UnfilteredStackTrace":
        return True
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = [name.partition(".")[0] == "jax" for name in modules]
    return any(above and not below for above, below in pairwise(inside))
