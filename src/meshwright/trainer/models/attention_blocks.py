"""Compute attention over a part of the keys, forward and backward, in plain blocks or by cuDNN.

Over `context`, parts are merged by the log-sum-exp of each query; elsewhere a part is the whole window.
`Kernel` has two implementations: `Cudnn`, and `Blocks` of queries in plain JAX. Neither holds a
[queries, keys] matrix of the whole part. Both recompute the scores in the backward pass, from the
log-sum-exp over all parts.

cuDNN's kernels are bound through `jax._src`, in this module only, for two reasons.
`jax.nn.dot_product_attention` rounds the log-sum-exp to the compute format, and its gradient does not accept
one from outside; a ring needs both. And it asks the GPU of this process which heads its kernels take, so that
wide heads could not be compiled for a GPU that is not present; `attention.uses_cudnn` asks the target
instead. The flash kernel's gradient is exact for a part of the keys, given the output and log-sum-exp over
all keys.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax._src import dispatch
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jaxtyping import Array, Float, Int

AXIS = "context"
MAX_BLOCKS = 16
MIN_BLOCK = 128
# A CPU computes a smaller block's scores in its cache, and fewer of them are masked: attention of 12 x 256
# tokens over 6 heads takes 5 to 11 % less time than with blocks of 128 (AMD EPYC with AVX2, two cores).
CPU_MIN_BLOCK = 64
# For GPUs XLA's fusion pass takes seconds for each block, and fewer, larger blocks are no slower:
# `gemma-2-2b` on 8xH100 compiles in 78 s with 16 and in 20 s with 4; its predicted step, 32.3 s and 30.7 s.
GPU_BLOCKS = 4
GPU_MAX_BLOCK = 2048
AGAIN = "rematted_computation"  # JAX's scope for recomputed work; used here for the scores
ALL_NEEDED = "needed_1_of_1"  # marks attention for the counter of model FLOPs
NEVER = float(jnp.finfo(jnp.float32).min)
SEED = 42  # for dropout, whose rate is 0
# Since jax 0.12 a function may change the scores (flex attention). None leaves them unchanged.
SCORES_AS_THEY_ARE: dict[str, None] = (
    {"score_mod": None}
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters  # pyright: ignore[reportPrivateUsage]
    else {}
)
# The primitive below the wrapper takes the function's name and program.
LOCAL_SCORES_AS_THEY_ARE: dict[str, None] = (
    {"score_mod_name": None, "score_mod_jaxpr": None} if SCORES_AS_THEY_ARE else {}
)

Gradients = tuple[Array, Array, Array]


class Part(NamedTuple):
    """Queries, and the part of the keys and values that they attend to.

    `query` is [batch, queries, heads, head_dim]; `key` and `value` are [batch, keys, kv_heads, head_dim].
    `segments` are those of the queries and of the keys if windows hold several documents, otherwise None.
    With a `window`, the first query stands at the key `place`, and each sees so many keys, its own included.
    """

    query: Array
    key: Array
    value: Array
    segments: tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]] | None
    window: int | None = None
    place: Int[Array, ""] | None = None


class PartResult(NamedTuple):
    """The result of attention over all keys of each query, or over a part of them.

    `out` is [batch, queries, heads, head_dim], in float32 for a part of the keys. `log_sum_exp`, of the
    scores, is [batch, heads, queries] in float32.
    """

    out: Array
    log_sum_exp: Array


def merged(one: PartResult, other: PartResult) -> PartResult:
    """Merge the results of two parts of the keys.

    If the log-sum-exp of `other` is -inf or `NEVER`, `other` adds nothing.
    """
    log_sum_exp = jnp.logaddexp(one.log_sum_exp, other.log_sum_exp)
    shares = (rearrange(jnp.exp(x.log_sum_exp - log_sum_exp), "b h s -> b s h 1") for x in (one, other))
    out = sum(x.out * share for x, share in zip((one, other), shares, strict=True))
    return PartResult(jnp.asarray(out), log_sum_exp)


class Kernel(ABC):
    """The interface of an attention kernel."""

    @abstractmethod
    def forward(self, part: Part, causal: bool) -> PartResult:
        """Attend to the part; if `causal`, query i of n attends to the first i of n keys or its window."""

    @abstractmethod
    def twice_multiplied(self, num_queries: int, num_keys: int, window: int) -> int:
        """Return twice the number of pairs that are multiplied for a part with a window."""

    @abstractmethod
    def backward(self, part: Part, causal: bool, result: PartResult, d_out: Array) -> Gradients:
        """Return this part's contributions to the gradients of query, key and value, in float32.

        Args:
            part: as in the forward pass.
            causal: as in the forward pass.
            result: over all keys of the queries, not over this part only.
            d_out: the gradient of `result.out`.
        """


@dataclass(frozen=True)
class Cudnn(Kernel):
    """cuDNN's flash kernel: half precision on NVIDIA targets, without documents."""

    def forward(self, part: Part, causal: bool) -> PartResult:
        """Attend to the part; both results are in float32, the log-sum-exp unrounded."""
        assert part.segments is None, "cuDNN attends to whole windows"
        query, length = _among_keys(part.query, part), part.query.shape[1]
        how = _How(causal, part.window, query.shape[-1] ** -0.5)
        out, log_sum_exp = _cudnn_forward(query, part.key, part.value, None, how)
        if part.place is not None:
            out = jax.lax.dynamic_slice_in_dim(out, part.place, length, axis=1)
            log_sum_exp = jax.lax.dynamic_slice_in_dim(log_sum_exp, part.place, length, axis=2)
        return PartResult(out.astype(jnp.float32), log_sum_exp)

    def twice_multiplied(self, num_queries: int, num_keys: int, window: int) -> int:
        """Return twice the pairs in the windows of as many queries as keys."""
        return (2 * num_keys - window) * window

    def backward(self, part: Part, causal: bool, result: PartResult, d_out: Array) -> Gradients:
        """Return the part's gradients: computed in the compute format, converted to float32."""
        query, out, d_out = (
            _among_keys(x, part) for x in (part.query, result.out.astype(d_out.dtype), d_out)
        )
        saved = _among_keys(result.log_sum_exp, part, axis=2), out, d_out
        how = _How(causal, part.window, query.shape[-1] ** -0.5)
        gradients = _cudnn_backward(query, part.key, part.value, None, how, saved)
        d_query, d_key, d_value = (x.astype(jnp.float32) for x in gradients)
        if part.place is not None:
            d_query = jax.lax.dynamic_slice_in_dim(d_query, part.place, part.query.shape[1], axis=1)
        return d_query, d_key, d_value


def _among_keys(x: Array, part: Part, axis: int = 1) -> Array:
    """Return an array of the queries with zeros around it, so that they stand at their own keys.

    So cuDNN's window needs no mask. The gradient of the output is zero there too, and adds nothing.
    """
    if part.place is None:
        return x
    shape = *x.shape[:axis], part.key.shape[1], *x.shape[axis + 1 :]
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, part.place, axis)


def cudnn_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads value_dim"],
    bias: Float[Array, "batch 1 queries keys"] | None,
    window: int | None,
    *,
    sinks: Float[Array, " heads"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    partitioned: bool = True,
) -> Float[Array, "batch queries heads value_dim"]:
    """Attend by cuDNN's flash kernel, which takes heads of whole eights: others end with zeros.

    Zeros add nothing to scores, and their values are left out again. The scope tells the counter of model
    FLOPs which share of the work the heads need; what runs is counted as it runs.

    Args:
        query: the queries.
        key: the keys.
        value: the values; of the keys' width, or both of whole eights.
        bias: added to the scores; cuDNN computes its gradient too.
        window: the positions that a token sees, its own included; None for all.
        sinks: scores of each head that weigh nothing (`attention_sinks`).
        causal: whether a query sees no later key.
        scale: of the scores; the inverse root of the heads' width if None.
        partitioned: whether XLA is to split the call over a mesh of devices, which must then be there when it
            is lowered; False for the arrays of one device.
    """
    how = _How(causal, window, query.shape[-1] ** -0.5 if scale is None else scale, partitioned)
    width, held = value.shape[-1], in_eights(value.shape[-1])
    if query.shape[-1] == in_eights(query.shape[-1]) and width == held:
        return _cudnn_attention(query, key, value, bias, sinks, how)
    assert query.shape[-1] == width, "uses_cudnn refuses to fill heads and values of two widths"
    query, key, value = (jnp.pad(x, [(0, 0)] * 3 + [(0, held - width)]) for x in (query, key, value))
    with jax.named_scope(f"needed_{width}_of_{held}"):
        filled: Any = _cudnn_attention(query, key, value, bias, sinks, how)
        return filled[..., :width]


def in_eights(width: int) -> int:
    """Return the least multiple of 8 that is at least `width`: the numbers of a head in cuDNN's kernels.

    >>> in_eights(100), in_eights(128)
    (104, 128)
    """
    return -(-width // 8) * 8


@contextlib.contextmanager
def without_devices() -> Iterator[None]:
    """Let calls on one device's arrays (`partitioned=False`) be lowered for a mesh without devices.

    JAX lists each primitive of cuDNN's attention among those that need devices, because of the wrapper that
    asks how the mesh splits it.
    """
    listed = dispatch.prim_requires_devices_during_lowering
    local = {cudnn._dot_product_attention_fwd_p, cudnn._dot_product_attention_bwd_p} & listed  # pyright: ignore[reportPrivateUsage]
    listed -= local
    try:
        yield
    finally:
        listed |= local


class _How(NamedTuple):
    """The settings of a call; `partitioned` as for `cudnn_attention`."""

    causal: bool
    window: int | None
    scale: float
    partitioned: bool = True


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cudnn_attention(
    query: Array, key: Array, value: Array, bias: Array | None, sinks: Array | None, how: _How
) -> Array:
    return _cudnn_attention_forward(query, key, value, bias, sinks, how)[0]


def _cudnn_attention_forward(
    query: Array, key: Array, value: Array, bias: Array | None, sinks: Array | None, how: _How
) -> tuple[Array, tuple[Array | None, ...]]:
    out, log_sum_exp = _cudnn_forward(query, key, value, bias, how)
    if sinks is not None:
        from .attention_sinks import with_sinks

        out, log_sum_exp = with_sinks(out, log_sum_exp, sinks)
    return out, (query, key, value, bias, sinks, log_sum_exp, out)


def _cudnn_attention_backward(how: _How, saved: Any, d_out: Array) -> tuple[Array | None, ...]:
    query, key, value, bias, sinks, log_sum_exp, out = saved
    gradients = _cudnn_backward(query, key, value, bias, how, (log_sum_exp, out, d_out))
    d_sinks = None
    if sinks is not None:
        from .attention_sinks import gradient_of_sinks

        d_sinks = gradient_of_sinks(out, log_sum_exp, sinks, d_out)
    return (*gradients, d_sinks) if len(gradients) == 4 else (*gradients, None, d_sinks)


_cudnn_attention.defvjp(_cudnn_attention_forward, _cudnn_attention_backward)


def _cudnn_settings(bias: Array | None, how: _How) -> dict[str, Any]:
    has_bias = bias is not None
    return {
        "scale": how.scale,
        "mask_type": cudnn.MaskType.CAUSAL if how.causal else cudnn.MaskType.NO_MASK,
        "seed": SEED,
        "dropout_rate": 0.0,
        "variadic_args": (has_bias, has_bias),  # a bias, and its gradient
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": how.window,
        **(SCORES_AS_THEY_ARE if how.partitioned else LOCAL_SCORES_AS_THEY_ARE),
    }


def _cudnn_forward(
    query: Array, key: Array, value: Array, bias: Array | None, how: _How
) -> tuple[Array, Array]:
    """Return the output, and the log-sum-exp of the scores [batch, heads, queries] in float32."""
    none = jnp.zeros(0, query.dtype)  # for lengths, offsets and pages
    whole, local = cudnn._dot_product_attention_fwd_p_wrapper, cudnn._dot_product_attention_fwd_p  # pyright: ignore[reportPrivateUsage]
    out, log_sum_exp = (whole if how.partitioned else local).bind(
        query, key, value, none if bias is None else bias, *(none,) * 6,
        **_cudnn_settings(bias, how), is_training=True,
    )  # fmt: skip
    return out, log_sum_exp


def _cudnn_backward(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    how: _How,
    result: tuple[Array, Array, Array],
) -> tuple[Array, ...]:
    """Return the gradients of query, key and value, and of `bias` if there is one.

    `result` is the log-sum-exp, the output and the gradient of the output.
    """
    none = jnp.zeros(0, query.dtype)
    whole, local = cudnn._dot_product_attention_bwd_p_wrapper, cudnn._dot_product_attention_bwd_p  # pyright: ignore[reportPrivateUsage]
    return tuple(
        (whole if how.partitioned else local).bind(
            query, key, value, none if bias is None else bias, *(none,) * 6, *result,
            **_cudnn_settings(bias, how),
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Blocks(Kernel):
    """A kernel in plain JAX that processes one block of queries at a time.

    In a causal part, each block reads only the keys up to its own last position, or those of its windows. In
    other parts all blocks have the same shape and run in a loop. So they do where queries with a window stand
    at a place that only the device knows: each block then reads as many keys, those before its last one.

    Args:
        cap: scores become cap x tanh(scores / cap); None leaves them as they are.
        platform: of the devices, which sets the size of blocks.
    """

    cap: float | None = None
    platform: str = "cpu"

    def twice_multiplied(self, num_queries: int, num_keys: int, window: int) -> int:
        """Return twice the pairs of each block's queries and the keys that it reads."""
        return 2 * num_queries * _windowed_block(num_queries, num_keys, window)[1]

    def forward(self, part: Part, causal: bool) -> PartResult:
        """Attend to the part, block by block."""
        rows, keys = _heads_first(part)
        length = part.query.shape[1]
        if part.window is not None and part.place is not None:
            return self._windowed(part, part.window, rows, keys)
        if causal:
            blocks = []
            for low, start, stop, scope in causal_blocks(length, part.window, self.platform):
                with scope:
                    block = rows.at(start, stop - start), keys.at(low, stop - low)
                    blocks.append(_forward(*block, _Seen(start - low, part.window, self.cap)))
            out, log_sum_exp = (jnp.concatenate(x, axis=3) for x in zip(*blocks, strict=True))
        else:
            size = _even_block(length, part.key.shape[1])
            with jax.named_scope(ALL_NEEDED):
                looped = jax.lax.map(
                    lambda start: _forward(rows.at(start, size), keys, _Seen(cap=self.cap)),
                    jnp.arange(0, length, size),
                )
            out, log_sum_exp = (_joined(x) for x in looped)
        return _heads_last(out, log_sum_exp)

    def _windowed(self, part: Part, window: int, rows: _Rows, keys: _Keys) -> PartResult:
        length, num_keys = part.query.shape[1], part.key.shape[1]
        size, num = _windowed_block(length, num_keys, window)

        def one(start: Array) -> tuple[Array, Array]:
            low, seen = self._seen(part, window, start, size, num)
            return _forward(rows.at(start, size), keys.at(low, num), seen)

        return _heads_last(*(_joined(x) for x in jax.lax.map(one, jnp.arange(0, length, size))))

    def _seen(self, part: Part, window: int, start: Array, size: int, num: int) -> tuple[Array, _Seen]:
        """Return the first key that a block of queries reads, and what the queries see of its keys."""
        assert part.place is not None, "queries with a window stand somewhere among the keys"
        row = part.place + start
        low = jnp.maximum(row + size - num, 0)
        return low, _Seen(row - low, window, self.cap)

    def _windowed_back(self, part: Part, window: int, rows: _Rows, keys: _Keys) -> tuple[Array, Array, Array]:
        length, num_keys = part.query.shape[1], part.key.shape[1]
        size, num = _windowed_block(length, num_keys, window)

        def one(totals: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], Array]:
            low, seen = self._seen(part, window, start, size, num)
            d_rows, *more = _backward(rows.at(start, size), keys.at(low, num), seen)
            added = (
                jax.lax.dynamic_update_slice_in_dim(
                    total, jax.lax.dynamic_slice_in_dim(total, low, num, axis=2) + each, low, axis=2
                )
                for total, each in zip(totals, more, strict=True)
            )
            d_key, d_value = added
            return (d_key, d_value), d_rows

        zeros = (jnp.zeros(keys.key.shape, jnp.float32), jnp.zeros(keys.value.shape, jnp.float32))
        (d_key, d_value), looped = jax.lax.scan(one, zeros, jnp.arange(0, length, size))
        return _joined(looped), d_key, d_value

    def backward(self, part: Part, causal: bool, result: PartResult, d_out: Array) -> Gradients:
        """Return the part's gradients, block by block."""
        rows, keys = _heads_first(part, result, d_out)
        length = part.query.shape[1]
        d_key, d_value = (jnp.zeros(x.shape, jnp.float32) for x in (keys.key, keys.value))
        if part.window is not None and part.place is not None:
            d_query, d_key, d_value = self._windowed_back(part, part.window, rows, keys)
        elif causal:
            blocks = []
            for low, start, stop, scope in causal_blocks(length, part.window, self.platform):
                with scope:
                    block = rows.at(start, stop - start), keys.at(low, stop - low)
                    d_rows, *more = _backward(*block, _Seen(start - low, part.window, self.cap))
                blocks.append(d_rows)
                d_key, d_value = (
                    total.at[:, :, low:stop].add(each)
                    for total, each in zip((d_key, d_value), more, strict=True)
                )
            d_query = jnp.concatenate(blocks, axis=3)
        else:
            size = _even_block(length, part.key.shape[1])

            def one(totals: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], Array]:
                d_rows, more_key, more_value = _backward(rows.at(start, size), keys, _Seen(cap=self.cap))
                return (totals[0] + more_key, totals[1] + more_value), d_rows

            with jax.named_scope(ALL_NEEDED):
                (d_key, d_value), looped = jax.lax.scan(one, (d_key, d_value), jnp.arange(0, length, size))
            d_query = _joined(looped)
        d_query = rearrange(d_query, "b k g s d -> b s (k g) d")
        d_key, d_value = (rearrange(x, "b k s d -> b s k d") for x in (d_key, d_value))
        return d_query, d_key, d_value


class _Rows(NamedTuple):
    """Queries by key-value head and group; for the backward pass also log-sum-exps and output gradients."""

    query: Float[Array, "batch kv_heads group queries head_dim"]
    segments: Int[Array, "batch 1 1 queries"] | None
    log_sum_exp: Float[Array, "batch kv_heads group queries"] | None = None
    d_out: Float[Array, "batch kv_heads group queries head_dim"] | None = None
    product: Float[Array, "batch kv_heads group queries"] | None = None  # sum over head_dim of out x d_out

    def at(self, start: Array | int, num: int) -> _Rows:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, num, axis=3), self)


class _Keys(NamedTuple):
    key: Float[Array, "batch kv_heads keys head_dim"]
    value: Float[Array, "batch kv_heads keys head_dim"]
    segments: Int[Array, "batch 1 keys"] | None

    def at(self, start: Array | int, num: int) -> _Keys:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, num, axis=2), self)


class _Seen(NamedTuple):
    """Says which keys a block's queries see, and at what value their scores are capped.

    `first`: the place of the first query among the keys, of which each query sees those up to its own; None
    if they see all. `window`: how many of them, its own included; None for all.
    """

    first: Array | int | None = None
    window: int | None = None
    cap: float | None = None


def _heads_last(out: Array, log_sum_exp: Array) -> PartResult:
    out = rearrange(out, "b k g s d -> b s (k g) d")
    return PartResult(out, rearrange(log_sum_exp, "b k g s -> b (k g) s"))


def _heads_first(
    part: Part, result: PartResult | None = None, d_out: Array | None = None
) -> tuple[_Rows, _Keys]:
    kv_heads = part.key.shape[2]
    of_queries, of_keys = (None, None) if part.segments is None else part.segments
    backward: dict[str, Array] = {}
    if result is not None and d_out is not None:
        log_sum_exp = rearrange(result.log_sum_exp, "b (k g) s -> b k g s", k=kv_heads)
        product = jnp.sum(d_out.astype(jnp.float32) * result.out.astype(jnp.float32), axis=-1)
        backward = {
            "log_sum_exp": log_sum_exp,
            "product": rearrange(product, "b s (k g) -> b k g s", k=kv_heads),
            "d_out": rearrange(d_out, "b s (k g) d -> b k g s d", k=kv_heads),
        }
    query = rearrange(part.query, "b s (k g) d -> b k g s d", k=kv_heads) * part.query.shape[-1] ** -0.5
    rows = _Rows(query, None if of_queries is None else of_queries[:, None, None], **backward)
    key, value = (rearrange(x, "b s k d -> b k s d") for x in (part.key, part.value))
    return rows, _Keys(key, value, None if of_keys is None else of_keys[:, None])


def _smallest_block(platform: str) -> int:
    return min(CPU_MIN_BLOCK, MIN_BLOCK) if platform == "cpu" else MIN_BLOCK


def _largest_block(length: int, platform: str = "") -> int:
    size = max(_smallest_block(platform), -(-length // MAX_BLOCKS))
    return max(size, min(-(-length // GPU_BLOCKS), GPU_MAX_BLOCK)) if platform == "cuda" else size


def causal_blocks(
    length: int, window: int | None, platform: str
) -> Iterator[tuple[int, int, int, AbstractContextManager[Any]]]:
    """Yield for each block of queries its first key, its first row, the end of both, and its work's scope.

    With a `window`, row i sees the keys from i - window + 1 to i; without, all keys up to i. The scope tells
    the counter of model FLOPs which share of the work that needs: row i counts min(i + 1/2, window) keys.
    Blocks are smaller for the `platform` "cpu", and larger for "cuda".
    """
    size, least = _largest_block(length, platform), _smallest_block(platform)
    window = length if window is None else min(window, length)

    def twice_needed(rows: int) -> int:  # twice the keys that the first rows need
        return rows**2 if rows <= window else (2 * rows - window) * window

    for start in range(0, length, size):
        stop = min(start + size, length)
        low = max(0, start - window + 1) // least * least
        needed, done = twice_needed(stop) - twice_needed(start), 2 * (stop - start) * (stop - low)
        if window == length:  # the same share in smaller numbers
            needed, done = start + stop, 2 * stop
        yield low, start, stop, jax.named_scope(f"needed_{needed}_of_{done}")


def _even_block(length: int, num_keys: int) -> int:
    """Return the largest block size within the limit that divides `length`.

    With more keys than queries a block is smaller, so that it holds no more scores than with as many.
    """
    most = max(1, min(_largest_block(length), length) * length // max(length, num_keys))
    return next(size for size in range(most, 0, -1) if length % size == 0)


def _windowed_block(length: int, num_keys: int, window: int) -> tuple[int, int]:
    """Return how many queries a block of a part with a window has, and how many keys it reads."""
    size = _even_block(length, min(length + window, num_keys))
    return size, min(window - 1 + size, num_keys)


def _joined(blocks: Array) -> Array:
    """Join [blocks, batch, kv_heads, group, rows, ...] to [batch, kv_heads, group, blocks * rows, ...]."""
    return rearrange(blocks, "n b k g s ... -> b k g (n s) ...")


def _capped_scores(rows: _Rows, keys: _Keys, cap: float | None) -> Array:
    """Return scores [batch, kv_heads, group, rows, keys] before the mask."""
    scores = jnp.einsum("bkgqd,bksd->bkgqs", rows.query, keys.key).astype(jnp.float32)
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _masked(scores: Array, rows: _Rows, keys: _Keys, seen: _Seen) -> Array:
    if seen.first is not None:
        row = (seen.first + jnp.arange(rows.query.shape[3]))[:, None]
        column = jnp.arange(keys.key.shape[2])[None, :]
        is_seen = row >= column
        if seen.window is not None:
            is_seen = is_seen & (column > row - seen.window)
        scores = jnp.where(is_seen[None, None, None], scores, NEVER)
    if rows.segments is not None and keys.segments is not None:
        same = rows.segments[..., None] == keys.segments[:, None, :, None]
        scores = jnp.where(same, scores, NEVER)
    return scores


def _forward(rows: _Rows, keys: _Keys, seen: _Seen) -> tuple[Array, Array]:
    scores = _masked(_capped_scores(rows, keys, seen.cap), rows, keys, seen)
    peak = scores.max(axis=-1)
    weights = jnp.exp(scores - peak[..., None])
    mass = weights.sum(axis=-1)
    out = _product("bkgqs,bksd->bkgqd", weights.astype(keys.value.dtype), keys.value)
    return out / mass[..., None], peak + jnp.log(mass)


def _backward(rows: _Rows, keys: _Keys, seen: _Seen) -> Gradients:
    _, _, log_sum_exp, d_out, product = rows
    if log_sum_exp is None or d_out is None or product is None:
        raise AssertionError("these are rows of the forward pass")
    with jax.named_scope(AGAIN):
        scores = _capped_scores(rows, keys, seen.cap)
    weights = jnp.exp(_masked(scores, rows, keys, seen) - log_sum_exp[..., None])
    d_value = _product("bkgqs,bkgqd->bksd", weights.astype(d_out.dtype), d_out)
    # In the compute format, as the scores are: these are the largest arrays that a block writes.
    d_weights = jnp.einsum("bkgqd,bksd->bkgqs", d_out, keys.value).astype(jnp.float32)
    d_scores = weights * (d_weights - product[..., None])
    if seen.cap is not None:
        d_scores = d_scores * (1 - jnp.square(scores / seen.cap))  # the slope of tanh
    d_scores = d_scores.astype(keys.key.dtype)
    d_query = _product("bkgqs,bksd->bkgqd", d_scores, keys.key) * rows.query.shape[-1] ** -0.5
    return d_query, _product("bkgqs,bkgqd->bksd", d_scores, rows.query), d_value


def _product(equation: str, *operands: Array) -> Array:
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)
