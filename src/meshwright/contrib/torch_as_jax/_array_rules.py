"""ATen operations that make, move, select or join entries of arrays, as JAX functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Rule = Callable[..., Any]


def _dtype(name: str | None) -> Any:
    """Return JAX's format: 64-bit formats become 32 bits wide unless `jax_enable_x64` is set."""
    return None if name is None else held(name)


def held(name: str) -> np.dtype[Any]:
    """Return PyTorch's format of this name as JAX holds it."""
    return jax.dtypes.canonicalize_dtype(jnp.dtype(jnp.bool_ if name == "bool" else name))


def _sizes(size: Any, more: Sequence[Any]) -> list[int]:
    return [int(s) for s in (size if isinstance(size, list | tuple) else [size, *more])]


def _view(self: Any, size: Any, *more: Any) -> Any:
    if isinstance(size, str):
        raise NotImplementedError("a view as another format has no rule")
    return jnp.reshape(self, _sizes(size, more))


def _flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if self.ndim == 0:
        return self.reshape(1)
    start, end = start_dim % self.ndim, end_dim % self.ndim
    return self.reshape(*self.shape[:start], -1, *self.shape[end + 1 :])


def _unflatten(self: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= self.ndim
    return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])


def _expand(self: Any, size: Sequence[int], implicit: bool = False) -> Any:
    kept = [1] * (len(size) - self.ndim) + list(self.shape)
    return jnp.broadcast_to(self, [k if s == -1 else s for s, k in zip(size, kept, strict=True)])


def _squeeze(self: Any, dim: Any = None) -> Any:
    dims = range(self.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(self, tuple(d % self.ndim for d in dims if self.ndim and self.shape[d] == 1))


def _transpose(self: Any, dim0: int, dim1: int) -> Any:
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


def _bounds(length: int, start: Any, end: Any, step: int) -> slice:
    start = 0 if start is None else int(start)
    end = length if end is None else int(end)
    return slice(*slice(start, end, step).indices(length))


def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    chosen = _bounds(self.shape[dim], start, end, step)
    return lax.slice_in_dim(self, chosen.start, max(chosen.start, chosen.stop), chosen.step, dim)


def _select(self: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(self, index, dim, keepdims=False)


def _place(ndim: int, dim: int, what: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * (dim % ndim), what)


def _slice_scatter(
    self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    chosen = _bounds(self.shape[dim], start, end, step)
    return self.at[_place(self.ndim, dim, chosen)].set(src.astype(self.dtype))


def _split(self: Any, split_size: Any, dim: int = 0) -> list[Any]:
    if isinstance(split_size, list | tuple):
        return _pieces(self, split_size, dim)
    length = self.shape[dim]
    return _pieces(self, [min(split_size, length - at) for at in range(0, length, split_size)], dim)


def _pieces(self: Any, split_sizes: Sequence[int], dim: int = 0) -> list[Any]:
    ends = np.cumsum(split_sizes)
    return [
        lax.slice_in_dim(self, int(end) - size, int(end), 1, dim)
        for size, end in zip(split_sizes, ends, strict=True)
    ]


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    # PyTorch skips empty arrays of one dim, whatever the others are.
    kept = [t for t in tensors if t.shape != (0,)] or list(tensors)
    return jnp.concatenate(kept, axis=dim)


def _repeat(self: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(self.reshape([1] * (len(repeats) - self.ndim) + list(self.shape)), repeats)


def _repeat_interleave(self: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:
    if not isinstance(repeats, int):
        raise NotImplementedError("numbers of repeats that are data have no rule")
    return jnp.repeat(self, repeats, axis=dim)


def _roll(self: Any, shifts: Any, dims: Any = ()) -> Any:
    return jnp.roll(self, tuple(_sizes(shifts, ())), tuple(_sizes(dims, ())) if dims != [] else None)


def _pad(self: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    widths = [(0, 0)] * (self.ndim - len(pad) // 2)
    widths += [(pad[2 * at], pad[2 * at + 1]) for at in reversed(range(len(pad) // 2))]
    if any(min(width) < 0 for width in widths):
        kept = tuple(
            slice(max(-lo, 0), n - max(-hi, 0)) for (lo, hi), n in zip(widths, self.shape, strict=True)
        )
        self, widths = self[kept], [(max(lo, 0), max(hi, 0)) for lo, hi in widths]
    if mode == "constant":
        return jnp.pad(self, widths, constant_values=0 if value is None else value)
    names = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    return jnp.pad(self, widths, mode=names[mode])


def _index(self: Any, indices: Sequence[Any]) -> Any:
    return self[tuple(slice(None) if index is None else index for index in indices)]


def _index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    at = self.at[tuple(slice(None) if index is None else index for index in indices)]
    values = jnp.asarray(values, self.dtype)
    return at.add(values) if accumulate else at.set(values)


def _index_add(self: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    return self.at[_place(self.ndim, dim, index)].add((alpha * source).astype(self.dtype))


def _grid(index: Any, dim: int) -> tuple[Any, ...]:
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij", sparse=True))
    grid[dim] = index
    return tuple(grid)


def _gather(self: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    if self.ndim == 0:
        return jnp.broadcast_to(self, index.shape)
    kept = [slice(None) if at == dim % self.ndim else slice(n) for at, n in enumerate(index.shape)]
    return jnp.take_along_axis(self[tuple(kept)], index, axis=dim, mode="clip")


def _scatter(self: Any, dim: int, index: Any, src: Any, reduce: str | None = None) -> Any:
    if reduce is not None:
        raise NotImplementedError("scatter with a reduction has no rule")
    if not isinstance(src, int | float | bool) and jnp.ndim(src):
        src = src[tuple(slice(n) for n in index.shape)].astype(self.dtype)
    return self.at[_grid(index, dim)].set(src)


def _scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    return self.at[_grid(index, dim)].add(src[tuple(slice(n) for n in index.shape)].astype(self.dtype))


def _like(value: Any) -> Rule:
    def rule(self: Any, dtype: str | None = None, **_: Any) -> Any:
        return jnp.full(self.shape, value, _dtype(dtype) or self.dtype)

    return rule


def _new_full(self: Any, size: Sequence[int], fill_value: Any, dtype: str | None = None, **_: Any) -> Any:
    return jnp.full(size, fill_value, _dtype(dtype) or self.dtype)


def _new(value: Any) -> Rule:
    return lambda self, size, dtype=None, **_: jnp.full(size, value, _dtype(dtype) or self.dtype)


def _made(value: Any) -> Rule:
    return lambda size, *_, dtype=None, **__: jnp.full(size, value, _dtype(dtype) or jnp.float32)


def _arange(*ends: Any, dtype: str | None = None, **_: Any) -> Any:
    # `arange.start_step` takes its step third; formats and devices are given by name.
    return jnp.arange(*[end for end in ends if not isinstance(end, str)], dtype=_dtype(dtype))


def _copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(src, self.shape)


def _sort(self: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    order = jnp.argsort(self, axis=dim, descending=descending, stable=True)
    return jnp.take_along_axis(self, order, axis=dim), order


def _topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    moved = jnp.moveaxis(self, dim, -1)
    values, places = lax.top_k(moved if largest else -moved, k)
    values = values if largest else -values
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim)


def _diff(self: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    if self.dtype == jnp.bool_:
        raise NotImplementedError("differences of booleans have no rule")
    return jnp.diff(self, n, dim, prepend, append)


def _one_hot(self: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise NotImplementedError("the number of classes must be given")
    return jax.nn.one_hot(self, num_classes, dtype=jnp.int32)


_RULES: dict[str, Rule] = {
    "view": _view, "_unsafe_view": _view, "reshape": _view, "view_copy": _view, "flatten": _flatten,
    "_reshape_copy": _view, "unflatten": _unflatten, "expand": _expand, "expand_copy": _expand,
    "expand_as": lambda self, other: jnp.broadcast_to(self, other.shape),
    "view_as": lambda self, other: self.reshape(other.shape),
    "broadcast_to": lambda self, size: jnp.broadcast_to(self, size), "squeeze": _squeeze,
    "unsqueeze": lambda self, dim: jnp.expand_dims(self, dim),
    "transpose": _transpose, "swapaxes": _transpose, "swapdims": _transpose,
    "t": lambda self: self.T, "numpy_T": lambda self: self.T, "mT": lambda self: jnp.swapaxes(self, -1, -2),
    "permute": lambda self, dims: jnp.transpose(self, tuple(dims)),
    "movedim": lambda self, source, destination: jnp.moveaxis(self, source, destination),
    "slice": _slice,
    "narrow": lambda self, dim, start, length:
        lax.slice_in_dim(self, start % max(self.shape[dim], 1), start + length, 1, dim),
    "select": _select, "slice_scatter": _slice_scatter,
    "select_scatter": lambda self, src, dim, index:
        self.at[_place(self.ndim, dim, index)].set(src.astype(self.dtype)),
    "split": _split, "split_with_sizes": _pieces,
    "chunk": lambda self, chunks, dim=0: _split(self, -(-self.shape[dim] // chunks), dim),
    "unbind": lambda self, dim=0: [_select(self, dim, at) for at in range(self.shape[dim])],
    "cat": _cat, "concat": _cat,
    "stack": lambda tensors, dim=0: jnp.stack(tensors, axis=dim), "repeat": _repeat, "tile": _repeat,
    "repeat_interleave.self_int": _repeat_interleave,
    "flip": lambda self, dims: jnp.flip(self, tuple(dims)),
    "roll": _roll, "pad": _pad,
    "constant_pad_nd": lambda self, pad, value=0: _pad(self, pad, "constant", value), "index": _index,
    "index_put": _index_put,
    "index_select": lambda self, dim, index: jnp.take(self, index, axis=dim, mode="clip"),
    "index_add": _index_add,
    "index_fill.int_Scalar": lambda self, dim, index, value:
        self.at[_place(self.ndim, dim, index)].set(value),
    "gather": _gather, "scatter.src": _scatter,
    "scatter.value": lambda self, dim, index, value: _scatter(self, dim, index, value),
    "scatter_add": _scatter_add,
    "full": lambda size, fill_value, dtype=None, **_: jnp.full(size, fill_value, _dtype(dtype)),
    "zeros": _made(0), "ones": _made(1), "empty": _made(0),
    "full_like": lambda self, fill_value, dtype=None, **_:
        jnp.full(self.shape, fill_value, _dtype(dtype) or self.dtype),
    "zeros_like": _like(0), "ones_like": _like(1), "empty_like": _like(0),
    "new_zeros": _new(0), "new_ones": _new(1), "new_empty": _new(0), "new_full": _new_full,
    "scalar_tensor": lambda s, dtype=None, **_: jnp.asarray(s, _dtype(dtype)), "arange": _arange,
    "linspace": lambda start, end, steps, dtype=None, **_:
        jnp.linspace(start, end, steps, dtype=_dtype(dtype)),
    "eye": lambda n, m=None, **_: jnp.eye(n, m),
    "tril": lambda self, diagonal=0: jnp.tril(self, diagonal),
    "triu": lambda self, diagonal=0: jnp.triu(self, diagonal), "copy": _copy,
    "fill": lambda self, value: jnp.broadcast_to(jnp.asarray(value, self.dtype), self.shape),
    "sort": _sort,
    "argsort": lambda self, dim=-1, descending=False, **_:
        jnp.argsort(self, axis=dim, descending=descending, stable=True),
    "topk": _topk, "diff": _diff, "one_hot": _one_hot,
    "diagonal": lambda self, offset=0, dim1=0, dim2=1: jnp.diagonal(self, offset, dim1, dim2),
    "meshgrid": lambda tensors, indexing="ij": jnp.meshgrid(*map(jnp.ravel, tensors), indexing=indexing),
}  # fmt: skip
ARRAYS = {f"aten::{name}": rule for name, rule in _RULES.items()}
