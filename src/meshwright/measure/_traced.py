"""Errors about values that exist only while JAX traces a function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
            a leaked value as an array; every other error passes.
    """
    import jax

    try:
        yield
    except (
        jax.errors.UnexpectedTracerError,
        jax.errors.TracerArrayConversionError,
        jax.errors.ConcretizationTypeError,
    ) as leaked:
        raise InputError(
            "a traced value is used outside the function, or the thread, that JAX was tracing when it was "
            f"made: {str(leaked).strip().splitlines()[0]}",
            hint="return it from the traced function instead of storing it, and use in each thread only what "
            "that thread was given",
        ) from leaked
