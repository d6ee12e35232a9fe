"""Elementwise ATen operations as JAX functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Rule = Callable[..., Any]


def _add(self: Any, other: Any, alpha: Any = 1) -> Any:
    return jnp.add(self, other if alpha == 1 else alpha * other)


def _sub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return jnp.subtract(self, other if alpha == 1 else alpha * other)


def _div(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(self, other)
    if rounding_mode == "trunc":
        if jnp.issubdtype(jnp.result_type(self, other), jnp.integer):
            return lax.div(*jnp.broadcast_arrays(*_alike(self, other)))
        return jnp.trunc(jnp.true_divide(self, other))
    return jnp.true_divide(self, other)


def _alike(*values: Any) -> list[Any]:
    dtype = jnp.result_type(*values)
    return [jnp.asarray(value, dtype) for value in values]


def magnitude(self: Any) -> Any:
    """Return absolute values; the gradient at 0 is 0, as in PyTorch (`jnp.abs` has 1)."""
    return jnp.where(self == 0, jnp.zeros_like(self), jnp.abs(self))


def _pow(self: Any, exponent: Any) -> Any:
    if isinstance(exponent, float) and exponent.is_integer():
        exponent = int(exponent)
    if isinstance(exponent, float) and exponent == 0.5:
        return jnp.sqrt(self)
    return jnp.power(self, exponent)


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    # The gradient passes where the value is on a limit, as PyTorch's does; `jnp.clip` passes half of it.
    made = self
    if min is not None:
        made = jnp.where(self < min, min, made)
    if max is not None:
        made = jnp.where(self > max, max, made)
    return made


def _softplus(self: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    scaled = self * beta
    is_large = scaled > threshold
    return jnp.where(is_large, self, jnp.logaddexp(jnp.where(is_large, 0, scaled), 0) / beta)


def _hardtanh(self: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    # The gradient is 0 on a limit, where that of `clamp` is 1.
    return jnp.where(self <= min_val, min_val, jnp.where(self >= max_val, max_val, self))


def _atan2(self: Any, other: Any) -> Any:
    # Where both are 0 the gradient is 0 as in PyTorch, and not undefined.
    is_defined = (self != 0) | (other != 0)
    constant = lax.stop_gradient(jnp.arctan2(self, other))  # 0 or pi, by the signs of the zeros
    return jnp.where(is_defined, jnp.arctan2(self, jnp.where(is_defined, other, 1)), constant)


def _elu(self: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    if scale != 1 or input_scale != 1:
        raise NotImplementedError("only elu without scales has a rule")
    return jax.nn.elu(self, alpha)


def _to_format(self: Any, dtype: str | None = None, *_: Any, **__: Any) -> Any:
    if dtype == "bool":
        return self != 0
    return self  # cast to the result's format


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = next((a for a in args if isinstance(a, str)), kwargs.get("dtype"))
    return _to_format(self, dtype)


def _same(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _glu(self: Any, dim: int = -1) -> Any:
    left, right = jnp.split(self, 2, axis=dim)
    return left * jax.nn.sigmoid(right)


def _nan_to_num(self: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    return jnp.nan_to_num(self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


def _stop(self: Any) -> Any:
    return lax.stop_gradient(self)


ONE: dict[str, Rule] = {
    "abs": magnitude, "neg": jnp.negative, "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1,
    "log": jnp.log, "log2": jnp.log2, "log10": jnp.log10, "log1p": jnp.log1p, "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "reciprocal": jnp.reciprocal, "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "asin": jnp.arcsin,
    "acos": jnp.arccos, "atan": jnp.arctan, "sinh": jnp.sinh, "cosh": jnp.cosh, "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid, "erf": jax.scipy.special.erf, "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv, "lgamma": jax.scipy.special.gammaln, "floor": jnp.floor,
    "ceil": jnp.ceil, "round": jnp.round, "trunc": jnp.trunc, "sign": jnp.sign, "sgn": jnp.sign,
    "isnan": jnp.isnan, "isinf": jnp.isinf, "isfinite": jnp.isfinite, "logical_not": jnp.logical_not,
    "bitwise_not": jnp.bitwise_not, "square": jnp.square, "relu": jax.nn.relu, "relu6": jax.nn.relu6,
    "silu": jax.nn.silu, "mish": jax.nn.mish, "log_sigmoid": jax.nn.log_sigmoid,
    "hardswish": jax.nn.hard_swish, "hardsigmoid": jax.nn.hard_sigmoid, "real": jnp.real, "imag": jnp.imag,
}  # fmt: skip

TWO: dict[str, Rule] = {
    "mul": jnp.multiply, "true_divide": jnp.true_divide, "floor_divide": jnp.floor_divide,
    "remainder": jnp.remainder, "maximum": jnp.maximum, "minimum": jnp.minimum,
    "atan2": _atan2, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge, "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor, "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or, "bitwise_xor": jnp.bitwise_xor, "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or, "__xor__": jnp.bitwise_xor, "logaddexp": jnp.logaddexp,
    "min.other": jnp.minimum, "max.other": jnp.maximum,
}  # fmt: skip

MORE: dict[str, Rule] = {
    "add": _add, "sub": _sub,
    "rsub": lambda self, other, alpha=1: _sub(other, self, alpha),
    "subtract": _sub, "div": _div, "divide": _div,
    "fmod": lambda self, other: lax.rem(*jnp.broadcast_arrays(*_alike(self, other))),
    "multiply": jnp.multiply, "pow": _pow, "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda self, min: _clamp(self, min), "clamp_max": lambda self, max: _clamp(self, None, max),
    "gelu": lambda self, approximate='none': jax.nn.gelu(self, approximate=approximate == "tanh"),
    "softplus": _softplus, "elu": _elu, "selu": jax.nn.selu, "celu": jax.nn.celu,
    "leaky_relu": lambda self, negative_slope=0.01:
        jnp.where(self > 0, self, negative_slope * self),  # as PyTorch at 0; `jax.nn`'s has a slope of 1
    "hardtanh": _hardtanh,
    # Of two equal values the first one has the gradient, in JAX the second.
    "fmax": lambda self, other: jnp.fmax(other, self), "fmin": lambda self, other: jnp.fmin(other, self),
    "prelu": lambda self, weight: jnp.where(self > 0, self, self * _channels(weight, self.ndim)),
    "glu": _glu,
    "where": lambda condition, self, other: jnp.where(condition, self, other),
    "masked_fill": lambda self, mask, value: jnp.where(mask, jnp.asarray(value, self.dtype), self),
    "to": _to, "_to_copy": _to_format,
    "type_as": _same, "clone": _same, "contiguous": _same, "alias": _same, "lift_fresh_copy": _same,
    "lift_fresh": _same, "detach": _stop, "detach_copy": _stop, "alias_copy": _same, "positive": _same,
    "addcmul": lambda self, tensor1, tensor2, value=1: self + value * tensor1 * tensor2,
    "addcdiv": lambda self, tensor1, tensor2, value=1: self + value * tensor1 / tensor2,
    "lerp": lambda self, end, weight: self + weight * (end - self),
    "nan_to_num": _nan_to_num,
    "deg2rad": lambda self: self * (math.pi / 180), "complex": lax.complex, "_conj": jnp.conj,
    "polar": lambda abs, angle: lax.complex(abs * jnp.cos(angle), abs * jnp.sin(angle)),
    "view_as_complex": lambda self: lax.complex(self[..., 0], self[..., 1]),
    "view_as_real": lambda self: jnp.stack([self.real, self.imag], axis=-1),
}  # fmt: skip


def _channels(weight: Any, ndim: int) -> Any:
    return weight.reshape((1, -1, *[1] * (ndim - 2))) if weight.size > 1 and ndim > 1 else weight


ELEMENTWISE = {f"aten::{name}": rule for name, rule in {**ONE, **TWO, **MORE}.items()}
