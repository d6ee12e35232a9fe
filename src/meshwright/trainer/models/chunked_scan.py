"""Compute linear attention by its state, chunk by chunk: gated delta rule, KDA and Mamba-2.

Each head has a state S [key_dim, value_dim] in float32. A token decays it, may erase what the state holds at
its key (the delta rule), adds its value there, and reads it with its query:

    S <- Diag(a) S,   S <- S + beta k (v - S^T k)^T   (or + k v^T without beta),   out = S^T q

The decay a is one number per head (Mamba-2; gated delta rule, https://arxiv.org/abs/2412.06464) or one per
key dimension (KDA, https://arxiv.org/abs/2510.26692). Key heads serve value heads in groups.

Chunks of C tokens are computed by products. With G the sum of log decays from the chunk's first token on:

    M   = strictly lower part of beta_i (k_i . k_j) exp(G_i - G_j)
    X   = (I + M)^-1 Diag(beta)                     the delta rule's WY form (https://arxiv.org/abs/2406.06484)
    U   = X V,  W = X (exp(G) K)                    (U = V without the delta rule)
    new = U - W S                                   S: the state before the chunk
    out = exp(G) Q S + lower part of (q_i . k_j) exp(G_i - G_j) new
    S  <- exp(G_C) S + (exp(G_C - G) K)^T new

A loop over chunks has the two products that need the state of the chunk before; all others run for all chunks
at once. No exponent is positive: differences of G are masked before `exp`, and decays per key dimension are
split at the middle of each block (`pair_sums`). The inverse is made of products of blocks, halves of halves.

Numbers: products take the inputs' format and sum in float32; decays, the inverse and states are float32. A
product reads a state rounded to the inputs' format, as the kernels of flash-linear-attention do. A decay is
as exact as a difference of sums of log decays within its chunk.

Documents: where a token begins one, the state before it counts as zero. Masks do it, with no message.

Order over `context`: as for attention, device i of N holds pieces i and 2N-1-i of the sequence. Each piece
starts from a state of zeros, and notes how its chunks' states depend on its first one. One message brings the
pieces' final states and dependences [key_dim, key_dim] of all devices; from these, each device computes the
states before its pieces and adds what follows from them. The short convolution has a message of its last
tokens before that.

FLOPs: the recurrence itself needs 6 K V for each token and value head with the delta rule (the state's
product with k, the outer product, the product with q) and 4 K V without, whatever the chunks are. As many run
in the products with states, so these count as the model's. Those within a chunk are the price of parallel
work: executed FLOPs alone (scope `needed_0_of_1`). For a token and value head, forward, R value heads to a
key head:

    delta rule                      2 C (2 K / R + K + 2 V) + inverse
    with decays of key dimensions   2 (C - 16) K + 2 C (K + 2 V) + inverse
    without the delta rule          2 C (K / R + V)
    inverse                         3,072 + 2 (16^2 + 32^2 + ... + (C / 2)^2), for C of 16 or more

Backward twice as many but for the inverse, which has 4 C^2, and the forward pass once more. Over `context`,
the products that change states have V + K columns in place of V, of which V are the model's, and the
corrections 2 K V (K / C + 1) more.

"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .chunk_products import inverse_of_unit_lower, pair_sums
from .pieces import of_all_pieces, of_own_pieces

PARALLEL = "needed_0_of_1"
"""The scope of products which the recurrence does not need."""
WIDE = jnp.float32
HIGHEST = jax.lax.Precision.HIGHEST


class Steps(NamedTuple):
    """What each token does to the states, and reads of them.

    `log_decay` is [batch, sequence, heads], or [..., key_dim] for a decay of each key dimension, which needs
    as many key heads as value heads. `beta` is None without the delta rule. Both are in float32, the others
    in the format of products. Of H value heads and G key heads, each key head serves H / G neighbours.
    """

    query: Float[Array, "batch sequence key_heads key_dim"]
    key: Float[Array, "batch sequence key_heads key_dim"]
    value: Float[Array, "batch sequence heads value_dim"]
    log_decay: Float[Array, "batch sequence heads *key_dim"]
    beta: Float[Array, "batch sequence heads"] | None


class _Chunks(NamedTuple):
    """The work with states of all chunks: [chunks, batch, key_heads, heads of each, tokens, ...].

    Queries and keys have no dim of the heads of each. `read` and `write` multiply what a token reads of the
    state before its chunk, and what it leaves in the state after; None where queries and keys hold them.
    `keep` multiplies the state, and `erase`, None without the delta rule, takes from values.
    """

    query: Array
    key: Array
    values: Array
    scores: Array
    erase: Array | None
    read: Array | None
    write: Array | None
    keep: Array


def chunked_scan(
    steps: Steps, begins: Bool[Array, "batch sequence"] | None, chunk: int, size: int = 1
) -> Float[Array, "batch sequence heads value_dim"]:
    """Return what each token's query reads of its head's state, in the format of the values.

    Runs on each device.

    Args:
        steps: of the tokens; over `context`, of the device's pieces as rows (`pieces`).
        begins: whether a token begins a document; None where windows have one each.
        chunk: the tokens of a chunk, a power of two; a shorter sequence is one chunk.
        size: the devices that share a sequence.
    """
    batch, length, heads, value_dim = steps.value.shape
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunks = _prepared(steps, begins, chunk)
    shape = (*chunks.values.shape[1:4], steps.key.shape[-1], value_dim)
    if size == 1:
        states, new, _ = _run(chunks, jnp.zeros(shape, WIDE))
    else:
        states, new = _run_over_devices(chunks, shape, size)
    out = _product("nbgck,nbgrkv->nbgrcv", chunks.query, states)
    out = out if chunks.read is None else out * chunks.read
    with jax.named_scope(PARALLEL):
        out = out + _product("nbgrij,nbgrjv->nbgriv", chunks.scores, new)
    out = out.astype(steps.value.dtype).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(batch, -1, heads, value_dim)[:, :length]


def _product(dims: str, *factors: Array) -> Array:
    return jnp.einsum(dims, *factors, preferred_element_type=WIDE)


def _in_chunks(x: Array, chunk: int, *heads: int) -> Array:
    """Return `x` [batch, sequence, heads, ...] as [chunks, batch, *heads, tokens, ...], padded with zeros.

    Zeros write nothing and decay nothing.
    """
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk, *heads, *x.shape[3:])
    inner = range(3, 3 + len(heads))
    return x.transpose(1, 0, *inner, 2, *range(3 + len(heads), x.ndim))


def _factor(log_decay: Array, is_seen: Array | None) -> Array:
    """Return exp(log_decay) where it is seen, else zero; no exponent may overflow where it is not seen."""
    return jnp.exp(log_decay if is_seen is None else jnp.where(is_seen, log_decay, -jnp.inf))


class _Seen(NamedTuple):
    """What a token sees of its own chunk, for one head of each; None where it sees all.

    `pairs`: whether token i sees j. `before` and `after`: whether its document is that of the state before
    the chunk, and of the state after it. `through`: whether that is one document.
    """

    pairs: Array
    before: Array | None
    after: Array | None
    through: Array | None


def _seen(begins: Array | None, chunk: int) -> _Seen:
    earlier = jnp.tril(jnp.ones((1, 1, 1, 1, chunk, chunk), bool))
    if begins is None:
        return _Seen(earlier, None, None, None)
    count = jnp.cumsum(_in_chunks(begins.astype(jnp.int32), chunk), axis=-1)[:, :, None, None]
    last = count[..., -1:]
    return _Seen(earlier & (count[..., :, None] == count[..., None, :]), count == 0, count == last, last == 0)


def _prepared(steps: Steps, begins: Array | None, chunk: int) -> _Chunks:
    """Compute what needs no state, for all chunks."""
    groups = steps.key.shape[2]
    heads = groups, steps.value.shape[2] // groups
    query, key = (_in_chunks(x, chunk, groups) for x in (steps.query, steps.key))
    values, seen = _in_chunks(steps.value, chunk, *heads), _seen(begins, chunk)
    by_head = steps.log_decay.ndim == 3
    decays = _in_chunks(steps.log_decay, chunk, *(heads if by_head else heads[:1]))
    prepare = _decayed_by_head if by_head else _decayed_by_channel
    with jax.named_scope(PARALLEL):
        chunks, gram = prepare(query, key, values, decays, seen, steps.beta is not None)
        if steps.beta is None or gram is None or chunks.erase is None:
            return chunks
        beta = _in_chunks(steps.beta, chunk, *heads)
        lower = jnp.tril(gram, -1) * beta[..., :, None]
        inverse = inverse_of_unit_lower(lower) * beta[..., None, :]
        columns = inverse if chunks.read is None else inverse * jnp.swapaxes(chunks.read, -1, -2)
        dtype = values.dtype
        values = _product("nbgrij,nbgrjv->nbgriv", inverse.astype(dtype), values).astype(dtype)
        erase = _product("nbgrij,nbgjk->nbgrik", columns.astype(dtype), chunks.erase).astype(dtype)
    return chunks._replace(values=values, erase=erase)


def _decayed_by_head(
    query: Array, key: Array, values: Array, decays: Array, seen: _Seen, has_delta: bool
) -> tuple[_Chunks, Array | None]:
    """Return chunks with the keys as `erase`, and the decayed products of keys if there is a delta rule."""
    sums = jnp.cumsum(decays, axis=-1)
    last = sums[..., -1:]
    pairs = _factor(sums[..., :, None] - sums[..., None, :], seen.pairs)

    def products(x: Array) -> Array:
        return _product("nbgik,nbgjk->nbgij", x, key)[:, :, :, None] * pairs

    chunks = _Chunks(
        query=query,
        key=key,
        values=values,
        scores=products(query).astype(values.dtype),
        erase=key if has_delta else None,
        read=_factor(sums, seen.before)[..., None],
        write=_factor(last - sums, seen.after)[..., None],
        keep=_factor(last, seen.through)[..., None],
    )
    return chunks, products(key) if has_delta else None


def _decayed_by_channel(
    query: Array, key: Array, values: Array, decays: Array, seen: _Seen, has_delta: bool
) -> tuple[_Chunks, Array | None]:
    """Do the same where each key dimension decays by itself, and key heads serve one value head each."""
    assert values.shape[3] == 1, "a decay of each key dimension belongs to one value head"
    dtype, sums = values.dtype, jnp.cumsum(decays, axis=-2)
    last = sums[..., -1:, :]
    before, after, through = (None if x is None else x[:, :, 0, :, :, None] for x in seen[1:])
    read, write = _factor(sums, before), _factor(last - sums, after)
    both = jnp.stack([query, key]) if has_delta else query[None]
    pairs = pair_sums(both, *(jnp.broadcast_to(x, both.shape) for x in (key, sums)))[:, :, :, :, None]
    pairs = jnp.where(seen.pairs[None], pairs, 0.0)
    chunks = _Chunks(
        query=(query * read).astype(dtype),
        key=(key * write).astype(dtype),
        values=values,
        scores=pairs[0].astype(dtype),
        erase=(key * read).astype(dtype) if has_delta else None,
        read=None,
        write=None,
        keep=jnp.swapaxes(_factor(last, through), -1, -2)[:, :, :, None],
    )
    return chunks, pairs[1] if has_delta else None


class _Writes(NamedTuple):
    """What a loop over chunks reads: the parts of `_Chunks` that change states."""

    key: Array
    values: Array
    erase: Array
    write: Array
    keep: Array


def _run(chunks: _Chunks, initial: Array) -> tuple[Array, Array, Array]:
    """Return the state before each chunk, what each token adds at its key, and the last state.

    The first two are in the format of products, the last in float32.
    """
    if chunks.erase is None:
        written = chunks.values if chunks.write is None else (chunks.values * chunks.write)
        added = _product("nbgck,nbgrcv->nbgrkv", chunks.key, written.astype(chunks.values.dtype))
        found: Any = _sum_states(initial, chunks.keep, added, chunks.values.dtype)
        return found[0], chunks.values, found[1]
    write = jnp.ones((1,) * 6, WIDE) if chunks.write is None else chunks.write
    write = jnp.broadcast_to(write, (*chunks.values.shape[:-1], 1))
    writes = _Writes(chunks.key, chunks.values, chunks.erase, write, chunks.keep)
    return _delta_states(initial, writes)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sum_states(initial: Array, keep: Array, added: Array, dtype: Any) -> tuple[Array, Array]:
    return _sum_forward(initial, keep, added, dtype)[0]


def _sum_forward(initial: Array, keep: Array, added: Array, dtype: Any) -> tuple[Any, Any]:
    def one(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        keep, added = chunk
        return keep * state + added, state.astype(dtype)

    last, states = jax.lax.scan(one, initial, (keep, added))
    return (states, last), (keep, states)


def _sum_backward(dtype: Any, saved: tuple[Array, Array], gradients: tuple[Array, Array]) -> Any:
    keep, states = saved

    def one(d_state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        keep, d_read = chunk
        return d_read + keep * d_state, d_state

    d_initial, d_added = jax.lax.scan(one, gradients[1], (keep, gradients[0]), reverse=True)
    return d_initial, _sum_like(d_added * states, keep), d_added


_sum_states.defvjp(_sum_forward, _sum_backward)


def _sum_like(x: Array, like: Array) -> Array:
    """Sum `x` in float32 over the dims that are one in `like`."""
    dims = tuple(dim for dim, size in enumerate(like.shape) if size == 1)
    return jnp.sum(x, axis=dims, keepdims=True, dtype=WIDE)


@jax.custom_vjp
def _delta_states(initial: Array, writes: _Writes) -> tuple[Array, Array, Array]:
    return _delta_forward(initial, writes)[0]


def _delta_forward(initial: Array, writes: _Writes) -> tuple[Any, Any]:
    dtype = writes.values.dtype

    def one(state: Array, chunk: _Writes) -> tuple[Array, tuple[Array, Array]]:
        narrow = state.astype(dtype)
        new = chunk.values - _product("bgrck,bgrkv->bgrcv", chunk.erase, narrow)
        added = _product("bgck,bgrcv->bgrkv", chunk.key, (new * chunk.write).astype(dtype))
        return chunk.keep * state + added, (narrow, new.astype(dtype))

    last, (states, new) = jax.lax.scan(one, initial, writes)
    return (states, new, last), (writes, states, new)


def _delta_backward(saved: tuple[_Writes, Array, Array], gradients: tuple[Array, Array, Array]) -> Any:
    """Return gradients; in the loop runs only what each chunk's gradient needs of the next one's."""
    writes, states, new = saved
    dtype = new.dtype

    def one(d_state: Array, chunk: tuple[_Writes, Array, Array]) -> tuple[Array, tuple[Array, ...]]:
        writes, d_read, d_new = chunk
        narrow = d_state.astype(dtype)
        d_written = _product("bgck,bgrkv->bgrcv", writes.key, narrow)
        d_new = (d_new + writes.write * d_written).astype(dtype)
        d_before = d_read + writes.keep * d_state - _product("bgrck,bgrcv->bgrkv", writes.erase, d_new)
        return d_before, (narrow, d_written.astype(dtype), d_new)

    chunks = writes, gradients[0], gradients[1]
    d_initial, (d_states, d_written, d_new) = jax.lax.scan(one, gradients[2], chunks, reverse=True)
    written = (new * writes.write).astype(dtype)
    d_writes = _Writes(
        key=_product("nbgrcv,nbgrkv->nbgck", written, d_states).astype(dtype),
        values=d_new,
        erase=-_product("nbgrcv,nbgrkv->nbgrck", d_new, states).astype(dtype),
        write=jnp.sum((new * d_written).astype(WIDE), axis=-1, keepdims=True),
        keep=_sum_like(d_states * states, writes.keep),
    )
    return d_initial, d_writes


_delta_states.defvjp(_delta_forward, _delta_backward)


def _run_over_devices(chunks: _Chunks, shape: tuple[int, ...], size: int) -> tuple[Array, Array]:
    """Return states and values as `_run` does, for pieces of a sequence that several devices share."""
    *heads, key_dim, value_dim = shape
    dtype = chunks.values.dtype
    if chunks.erase is None:
        states, new, last = _run(chunks, jnp.zeros(shape, WIDE))
        kept = jnp.cumprod(chunks.keep, axis=0)
        column = jnp.broadcast_to(kept[-1], (*heads, key_dim, 1))
        start = _before_pieces(jnp.concatenate([last, column], axis=-1), value_dim, size)
        kept = jnp.concatenate([jnp.ones_like(kept[:1]), kept[:-1]])
        return (states + kept * start[None]).astype(dtype), new
    # The state is linear in the one before the piece, by a matrix which is a state that begins as identity.
    whole = jnp.broadcast_to(jnp.eye(key_dim, dtype=WIDE), (*heads, key_dim, key_dim))
    wider = [(0, 0)] * 5 + [(0, key_dim)]
    padded = chunks._replace(values=jnp.pad(chunks.values, wider))
    with jax.named_scope(f"needed_{value_dim}_of_{value_dim + key_dim}"):
        states, new, last = _run(padded, jnp.concatenate([jnp.zeros(shape, WIDE), whole], axis=-1))
    start = _before_pieces(last, value_dim, size).astype(dtype)
    with jax.named_scope(PARALLEL):
        more, more_new = (_product("nbgrxk,bgrkv->nbgrxv", x[..., value_dim:], start) for x in (states, new))
    return (states[..., :value_dim] + more).astype(dtype), (new[..., :value_dim] + more_new).astype(dtype)


def _before_pieces(ends: Array, value_dim: int, size: int) -> Array:
    """Return the state before each of the device's pieces, from all pieces' last states.

    Args:
        ends: the state after a piece that starts with zeros [..., key_dim, value_dim], and beside it how it
            depends on the one before: a matrix [key_dim, key_dim], or its only column where that is diagonal.
        value_dim: the width of the first.
        size: the devices that share a sequence.
    """

    def one(state: Array, end: Array) -> tuple[Array, Array]:
        added, dependence = end[..., :value_dim], end[..., value_dim:]
        is_diagonal = dependence.shape[-1] == 1
        kept = dependence * state if is_diagonal else jnp.matmul(dependence, state, precision=HIGHEST)
        return kept + added, state

    with jax.named_scope(PARALLEL):
        of_all = of_all_pieces(ends, size)
        _, before = jax.lax.scan(one, jnp.zeros_like(of_all[0, ..., :value_dim]), of_all)
        return of_own_pieces(before, size)
