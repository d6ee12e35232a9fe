"""ATen operations that reduce, count or accumulate, as JAX functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._array_rules import held
from ._elementwise import magnitude

Rule = Callable[..., Any]


def _dims(self: Any, dim: Any) -> Any:
    """Return dims for jnp: PyTorch's empty list means all of them, and a number has none."""
    if dim is None or dim == [] or self.ndim == 0:
        return None
    return tuple(dim) if isinstance(dim, list | tuple) else int(dim)


def _widened(self: Any, dtype: str | None) -> Any:
    """Return values in the format in which they are summed: integers if they are booleans."""
    if dtype is not None:
        return self.astype(held(dtype))
    return self.astype(jnp.int32) if self.dtype == jnp.bool_ else self


def _reduced(reduce: Callable[..., Any]) -> Rule:
    def rule(self: Any, dim: Any = None, keepdim: bool = False, dtype: str | None = None) -> Any:
        return reduce(_widened(self, dtype), axis=_dims(self, dim), keepdims=keepdim)

    return rule


_sum, _mean, _prod = map(_reduced, (jnp.sum, jnp.mean, jnp.prod))


def _ddof(correction: Any, unbiased: Any) -> Any:
    if isinstance(unbiased, bool):
        return 1 if unbiased else 0
    return 1 if correction is None else correction


def _var(
    self: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None
) -> Any:
    if isinstance(dim, bool):  # the overload that has no dims
        dim, unbiased = None, dim
    return jnp.var(self, axis=_dims(self, dim), ddof=_ddof(correction, unbiased), keepdims=keepdim)


def _var_by_correction(self: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    return jnp.var(self, axis=_dims(self, dim), ddof=_ddof(correction, None), keepdims=keepdim)


def _power(x: Any, exponent: float) -> Any:
    """Return a power whose gradient at 0 is 0, as in PyTorch's norms and deviations."""
    return jnp.where(x == 0, 0, jnp.where(x == 0, 1, x) ** exponent)


def _with_place(choose: Callable[..., Any]) -> Rule:
    """Return a rule that returns the chosen values along a dim, and their places."""

    def rule(self: Any, dim: int, keepdim: bool = False) -> Any:
        if self.ndim == 0:
            return self, jnp.zeros((), jnp.int32)
        places = jnp.expand_dims(choose(self, axis=dim), dim)
        values = jnp.take_along_axis(self, places, axis=dim)
        return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))

    return rule


def _extreme(reduce: Callable[..., Any]) -> Rule:
    return lambda self, dim=None, keepdim=False: reduce(self, axis=_dims(self, dim), keepdims=keepdim)


def _norm(self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: str | None = None) -> Any:
    values, axes = _widened(self, dtype), _dims(self, dim)
    if ord == 2:
        return _power(jnp.sum(jnp.square(values), axis=axes, keepdims=keepdim), 0.5)
    if ord == 0:
        return jnp.sum(values != 0, axis=axes, keepdims=keepdim)
    values = magnitude(values)
    if ord == 1:
        return jnp.sum(values, axis=axes, keepdims=keepdim)
    if ord in (float("inf"), float("-inf")):
        return (jnp.max if ord > 0 else jnp.min)(values, axis=axes, keepdims=keepdim)
    return _power(jnp.sum(_power(values, ord), axis=axes, keepdims=keepdim), 1 / ord)


def _along(function: Callable[..., Any]) -> Rule:
    # `_softmax` has a flag third, and `softmax.int` a format.
    return lambda self, dim, dtype=None: function(
        _widened(self, dtype if isinstance(dtype, str) else None), axis=dim
    )


_softmax, _log_softmax = _along(jax.nn.softmax), _along(jax.nn.log_softmax)


def _histc(self: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Count values in equal intervals from `min` to `max`, which is in the last one."""
    if min == max:
        raise NotImplementedError("limits that are those of the data have no rule")
    values = self.reshape(-1).astype(jnp.promote_types(self.dtype, jnp.float32))
    places = jnp.floor((values - min) * (bins / (max - min))).astype(jnp.int32)
    places = jnp.where(values == max, bins - 1, places)
    counted = (values >= min) & (values <= max)
    return jnp.zeros(bins, jnp.int32).at[jnp.where(counted, places, bins)].add(1, mode="drop")


_RULES: dict[str, Rule] = {
    "sum": _sum, "mean": _mean, "prod.default": lambda self, dtype=None: _prod(self, dtype=dtype),
    "prod.dim_int": _prod, "var": _var, "var.correction": _var_by_correction,
    "std": lambda self, *args, **kwargs: _power(_var(self, *args, **kwargs), 0.5),
    "std.correction": lambda self, *args, **kwargs: _power(_var_by_correction(self, *args, **kwargs), 0.5),
    "var_mean.correction": lambda self, dim=None, correction=None, keepdim=False:
        (_var_by_correction(self, dim, correction, keepdim), _mean(self, dim, keepdim)),
    "max.dim": _with_place(jnp.argmax),
    "min.dim": _with_place(jnp.argmin), "max.default": _extreme(jnp.max), "min.default": _extreme(jnp.min),
    "amax": _extreme(jnp.max), "amin": _extreme(jnp.min), "argmax": _extreme(jnp.argmax),
    "argmin": _extreme(jnp.argmin), "any": _extreme(jnp.any), "all": _extreme(jnp.all),
    "linalg_vector_norm": _norm, "logsumexp": lambda self, dim, keepdim=False: jax.nn.logsumexp(
        self, axis=_dims(self, dim), keepdims=keepdim
    ),
    "softmax.int": _softmax, "_softmax": _softmax, "log_softmax.int": _log_softmax,
    "_log_softmax": _log_softmax, "cumsum": _along(jnp.cumsum), "cumprod": _along(jnp.cumprod),
    "histc": _histc,
}  # fmt: skip
REDUCTIONS = {f"aten::{name}": rule for name, rule in _RULES.items()}
