"""Compute attention over a part of the keys, forward and backward, in plain blocks or by cuDNN.

cuDNN's attention with the log-sum-exp of each query, forward and backward.

`jax.nn.dot_product_attention` rounds the log-sum-exp to the format of the computation and has no gradient
that takes one from outside; a ring needs both. So this reaches into `jax._src`, here and nowhere else. The
flash kernel's gradient is exact for a part of the keys, if it is given output and log-sum-exp over all.

Attention to a part of the keys, with what is needed to add parts up, forward and backward.

Two kernels of one form: cuDNN's, and blocks of queries in plain JAX, which hold no [queries, keys] matrix of
the whole part either. Both compute the scores again in the backward pass, from the log-sum-exp of all parts.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jaxtyping import Array, Float, Int

LogSumExp = Float[Array, "batch heads queries"]
SEED = 42  # of dropout, which is 0
# From jax 0.12 on a function may change the scores (flex attention); these are left as they are.
SCORES_AS_THEY_ARE: dict[str, None] = (
    {"score_mod": None}
    if "score_mod" in inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters  # pyright: ignore[reportPrivateUsage]
    else {}
)


def _mask(causal: bool) -> cudnn.MaskType:
    return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK


def forward(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    causal: bool,
) -> tuple[Float[Array, "batch queries heads head_dim"], LogSumExp]:
    """What the queries see of these keys, in their format, and the log-sum-exp of their scores in float32."""
    both: Any = cudnn.dot_product_attention(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5,
        mask_type=_mask(causal),
        return_residual=True,
    )
    out, log_sum_exp = both
    return out, log_sum_exp


def backward(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    causal: bool,
    log_sum_exp: LogSumExp,
    out: Float[Array, "batch queries heads head_dim"],
    d_out: Float[Array, "batch queries heads head_dim"],
) -> tuple[Array, Array, Array]:
    """What these keys give to the gradients of query, key and value, in their format.

    Args:
        log_sum_exp: over all the keys that the queries see, not these alone.
        out: the same.
    """
    none = jnp.zeros(0, query.dtype)  # bias, lengths, offsets and pages
    d_query, d_key, d_value = cudnn._dot_product_attention_bwd_p_wrapper.bind(  # pyright: ignore[reportPrivateUsage]
        *(query, key, value, *(none,) * 7, log_sum_exp, out, d_out),
        scale=query.shape[-1] ** -0.5,
        seed=SEED,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=_mask(causal),
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **SCORES_AS_THEY_ARE,
    )
    return d_query, d_key, d_value


MAX_BLOCKS = 16
MIN_BLOCK = 128
AGAIN = "rematted_computation"  # names the scores in the backward pass as JAX names what it computes again
ALL_NEEDED = "needed_1_of_1"  # tells the counter of model FLOPs that it is attention
NEVER = float(jnp.finfo(jnp.float32).min)

Gradients = tuple[Array, Array, Array]


class Part(NamedTuple):
    """Queries [batch, queries, heads, head_dim], keys and values [batch, keys, kv_heads, head_dim] that they
    look at, and where windows hold several documents the segments of both [batch, queries], [batch, keys]."""

    query: Array
    key: Array
    value: Array
    segments: tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]] | None


class Seen(NamedTuple):
    """Of each query, over all its keys or some: the output [batch, queries, heads, head_dim], of a part in
    float32, and the log-sum-exp of its scores [batch, heads, queries], float32."""

    out: Array
    log_sum_exp: Array


@runtime_checkable
class Kernel(Protocol):
    """One way to attend."""

    def forward(self, part: Part, causal: bool) -> Seen:
        """What the queries see. `causal`: as many keys as queries, and each sees its own and those before."""
        ...

    def backward(self, part: Part, causal: bool, seen: Seen, d_out: Array) -> Gradients:
        """This part's share of the gradients of query, key and value, in float32.

        Args:
            seen: by the queries of all their keys, not of this part alone.
            d_out: the gradient of that output.
        """
        ...


def merged(one: Seen, other: Seen) -> Seen:
    """What the queries see of two parts together.

    With -inf or `NEVER` for its log-sum-exp, `other` adds nothing.
    """
    log_sum_exp = jnp.logaddexp(one.log_sum_exp, other.log_sum_exp)
    shares = (rearrange(jnp.exp(x.log_sum_exp - log_sum_exp), "b h s -> b s h 1") for x in (one, other))
    out = sum(x.out * share for x, share in zip((one, other), shares, strict=True))
    return Seen(jnp.asarray(out), log_sum_exp)


class Cudnn:
    """cuDNN's flash kernel: half precision on NVIDIA targets. It knows no documents."""

    def forward(self, part: Part, causal: bool) -> Seen:
        """See `Kernel`."""
        assert part.segments is None, "cuDNN attends to whole windows"
        out, log_sum_exp = forward(part.query, part.key, part.value, causal)
        return Seen(out.astype(jnp.float32), log_sum_exp)

    def backward(self, part: Part, causal: bool, seen: Seen, d_out: Array) -> Gradients:
        """See `Kernel`."""
        assert part.segments is None, "cuDNN attends to whole windows"
        out = seen.out.astype(d_out.dtype)
        found = backward(part.query, part.key, part.value, causal, seen.log_sum_exp, out, d_out)
        d_query, d_key, d_value = (x.astype(jnp.float32) for x in found)
        return d_query, d_key, d_value


class Blocks:
    """Plain JAX, a block of queries at a time.

    Of a causal part each block looks at its own share of the keys, and says what of that causality needs
    (`needed_..._of_...`, as in `attention`); other parts' blocks are alike, and run in a loop.
    """

    def forward(self, part: Part, causal: bool) -> Seen:
        """See `Kernel`."""
        rows, keys = _heads_first(part)
        length = part.query.shape[1]
        if causal:
            found = []
            for start, stop in _causal_blocks(length):
                with jax.named_scope(f"needed_{start + stop}_of_{2 * stop}"):
                    found.append(_forward(rows.at(start, stop - start), keys.until(stop), start))
            out, log_sum_exp = (jnp.concatenate(x, axis=3) for x in zip(*found, strict=True))
        else:
            size = _even_block(length)
            with jax.named_scope(ALL_NEEDED):
                looped = jax.lax.map(
                    lambda start: _forward(rows.at(start, size), keys, None), jnp.arange(0, length, size)
                )
            out, log_sum_exp = (_joined(x) for x in looped)
        return Seen(
            rearrange(out, "b k g s d -> b s (k g) d"), rearrange(log_sum_exp, "b k g s -> b (k g) s")
        )

    def backward(self, part: Part, causal: bool, seen: Seen, d_out: Array) -> Gradients:
        """See `Kernel`."""
        rows, keys = _heads_first(part, seen, d_out)
        length = part.query.shape[1]
        d_key, d_value = (jnp.zeros(x.shape, jnp.float32) for x in (keys.key, keys.value))
        if causal:
            found = []
            for start, stop in _causal_blocks(length):
                with jax.named_scope(f"needed_{start + stop}_of_{2 * stop}"):
                    d_rows, more_key, more_value = _backward(
                        rows.at(start, stop - start), keys.until(stop), start
                    )
                found.append(d_rows)
                d_key, d_value = d_key.at[:, :, :stop].add(more_key), d_value.at[:, :, :stop].add(more_value)
            d_query = jnp.concatenate(found, axis=3)
        else:
            size = _even_block(length)

            def one(totals: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], Array]:
                d_rows, more_key, more_value = _backward(rows.at(start, size), keys, None)
                return (totals[0] + more_key, totals[1] + more_value), d_rows

            with jax.named_scope(ALL_NEEDED):
                (d_key, d_value), looped = jax.lax.scan(one, (d_key, d_value), jnp.arange(0, length, size))
            d_query = _joined(looped)
        d_query = rearrange(d_query, "b k g s d -> b s (k g) d")
        d_key, d_value = (rearrange(x, "b k s d -> b s k d") for x in (d_key, d_value))
        return d_query, d_key, d_value


class _Rows(NamedTuple):
    """Queries by key-value head and group; in the backward pass also what belongs to each of them."""

    query: Float[Array, "batch kv_heads group queries head_dim"]
    segments: Int[Array, "batch 1 1 queries"] | None
    log_sum_exp: Float[Array, "batch kv_heads group queries"] | None
    d_out: Float[Array, "batch kv_heads group queries head_dim"] | None
    product: Float[Array, "batch kv_heads group queries"] | None  # of the output and its gradient

    def at(self, start: Array | int, num: int) -> _Rows:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, num, axis=3), self)


class _Keys(NamedTuple):
    key: Float[Array, "batch kv_heads keys head_dim"]
    value: Float[Array, "batch kv_heads keys head_dim"]
    segments: Int[Array, "batch 1 keys"] | None

    def until(self, stop: int) -> _Keys:
        return jax.tree.map(lambda x: x[:, :, :stop], self)


def _heads_first(part: Part, seen: Seen | None = None, d_out: Array | None = None) -> tuple[_Rows, _Keys]:
    kv_heads = part.key.shape[2]
    of_queries, of_keys = (None, None) if part.segments is None else part.segments
    log_sum_exp = product = None
    if seen is not None and d_out is not None:
        log_sum_exp = rearrange(seen.log_sum_exp, "b (k g) s -> b k g s", k=kv_heads)
        product = jnp.sum(d_out.astype(jnp.float32) * seen.out.astype(jnp.float32), axis=-1)
        product = rearrange(product, "b s (k g) -> b k g s", k=kv_heads)
        d_out = rearrange(d_out, "b s (k g) d -> b k g s d", k=kv_heads)
    rows = _Rows(
        query=rearrange(part.query, "b s (k g) d -> b k g s d", k=kv_heads) * part.query.shape[-1] ** -0.5,
        segments=None if of_queries is None else of_queries[:, None, None],
        log_sum_exp=log_sum_exp,
        d_out=d_out,
        product=product,
    )
    key, value = (rearrange(x, "b s k d -> b k s d") for x in (part.key, part.value))
    return rows, _Keys(key, value, None if of_keys is None else of_keys[:, None])


def _limit(length: int) -> int:
    return max(MIN_BLOCK, -(-length // MAX_BLOCKS))


def _causal_blocks(length: int) -> list[tuple[int, int]]:
    size = _limit(length)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _even_block(length: int) -> int:
    """The largest block within the limit that divides the length."""
    return next(size for size in range(min(_limit(length), length), 0, -1) if length % size == 0)


def _joined(blocks: Array) -> Array:
    """[blocks, batch, kv_heads, group, rows, ...] to [batch, kv_heads, group, blocks * rows, ...]."""
    return rearrange(blocks, "n b k g s ... -> b k g (n s) ...")


def _scores(rows: _Rows, keys: _Keys, first: int | None) -> Float[Array, "batch kv_heads group rows keys"]:
    """`first`: the place of the first row among the keys, where each sees those up to its own; None: all."""
    scores = jnp.einsum("bkgqd,bksd->bkgqs", rows.query, keys.key).astype(jnp.float32)
    if first is not None:
        places = first + jnp.arange(rows.query.shape[3])
        causal = places[:, None] >= jnp.arange(keys.key.shape[2])[None, :]
        scores = jnp.where(causal[None, None, None], scores, NEVER)
    if rows.segments is not None and keys.segments is not None:
        same = rows.segments[..., None] == keys.segments[:, None, :, None]
        scores = jnp.where(same, scores, NEVER)
    return scores


def _forward(rows: _Rows, keys: _Keys, first: int | None) -> tuple[Array, Array]:
    scores = _scores(rows, keys, first)
    peak = scores.max(axis=-1)
    weights = jnp.exp(scores - peak[..., None])
    mass = weights.sum(axis=-1)
    out = _product("bkgqs,bksd->bkgqd", weights.astype(keys.value.dtype), keys.value)
    return out / mass[..., None], peak + jnp.log(mass)


def _backward(rows: _Rows, keys: _Keys, first: int | None) -> Gradients:
    assert rows.log_sum_exp is not None, "rows of the forward pass"
    assert rows.d_out is not None, "rows of the forward pass"
    assert rows.product is not None, "rows of the forward pass"
    with jax.named_scope(AGAIN):
        scores = _scores(rows, keys, first)
    weights = jnp.exp(scores - rows.log_sum_exp[..., None])
    d_value = _product("bkgqs,bkgqd->bksd", weights.astype(rows.d_out.dtype), rows.d_out)
    d_weights = _product("bkgqd,bksd->bkgqs", rows.d_out, keys.value)
    d_scores = (weights * (d_weights - rows.product[..., None])).astype(keys.key.dtype)
    d_query = _product("bkgqs,bksd->bkgqd", d_scores, keys.key) * rows.query.shape[-1] ** -0.5
    return d_query, _product("bkgqs,bkgqd->bksd", d_scores, rows.query), d_value


def _product(equation: str, *operands: Array) -> Array:
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)
