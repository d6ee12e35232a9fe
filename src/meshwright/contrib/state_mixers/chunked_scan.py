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

The last line is linear in S. Its matrix, exp(G_C) I - (exp(G_C - G) K)^T W, and what it adds are computed for
all chunks at once, so that a loop over chunks has one product: its rounds are small, and a GPU launches each
kernel of each. No exponent is positive: differences of G are masked before `exp`, and decays per key
dimension are split at the middle of each block (`pair_sums`). The inverse is made of products of blocks,
halves of halves.

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

    delta rule                      2 C (2 K / R + K + 2 V) + 2 K^2 (1 + V / C) + inverse
    with decays of key dimensions   2 (C - 16) K + 2 C (K + 2 V) + 2 K^2 (1 + V / C) + inverse
    without the delta rule          2 C (K / R + V)
    inverse                         3,072 + 2 (16^2 + 32^2 + ... + (C / 2)^2), for C of 16 or more

Backward twice as many, but 4 C^2 for the inverse and half for the products of keys with keys; and the forward
pass once more. Over `context` the loop of the delta rule has V + K columns in place of V, and 2 K^2 V / C are
for the states before pieces.
"""

from __future__ import annotations

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
    """Return what each token does to the states, and reads of them.

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
    states = _states(chunks, size)
    new = chunks.values
    if chunks.erase is not None:
        new = new - jnp.einsum("nbgrck,nbgrkv->nbgrcv", chunks.erase, states)
    out = jnp.einsum("nbgck,nbgrkv->nbgrcv", chunks.query, states).astype(WIDE)
    out = out if chunks.read is None else out * chunks.read
    with jax.named_scope(PARALLEL):
        out = out + jnp.einsum("nbgrij,nbgrjv->nbgriv", chunks.scores, new).astype(WIDE)
    out = out.astype(steps.value.dtype).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(batch, -1, heads, value_dim)[:, :length]


def _wide_product(dims: str, *factors: Array) -> Array:
    """Return a product in float32; its gradient's products would have float32 factors."""
    return jnp.einsum(dims, *factors, preferred_element_type=WIDE)


@jax.custom_vjp
def _gram(key: Array) -> Array:
    """Return the products of keys with each other, in float32, whose gradients are rounded as keys are."""
    return _wide_product("nbgik,nbgjk->nbgij", key, key)


def _gram_backward(key: Array, gradient: Array) -> tuple[Array]:
    both = (gradient + jnp.swapaxes(gradient, -1, -2)).astype(key.dtype)
    return (jnp.einsum("nbgij,nbgjk->nbgik", both, key),)


_gram.defvjp(lambda key: (_gram(key), key), _gram_backward)


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
    """Return what a token sees of its own chunk, for one head of each; None where it sees all.

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
        values = jnp.einsum("nbgrij,nbgrjv->nbgriv", inverse.astype(dtype), values)
        erase = jnp.einsum("nbgrij,nbgjk->nbgrik", columns.astype(dtype), chunks.erase)
    return chunks._replace(values=values, erase=erase)


def _decayed_by_head(
    query: Array, key: Array, values: Array, decays: Array, seen: _Seen, has_delta: bool
) -> tuple[_Chunks, Array | None]:
    """Return chunks with the keys as `erase`, and the decayed products of keys if there is a delta rule."""
    sums = jnp.cumsum(decays, axis=-1)
    last = sums[..., -1:]
    pairs = _factor(sums[..., :, None] - sums[..., None, :], seen.pairs)

    def decayed(x: Array) -> Array:
        return x[:, :, :, None].astype(WIDE) * pairs

    chunks = _Chunks(
        query=query,
        key=key,
        values=values,
        scores=decayed(jnp.einsum("nbgik,nbgjk->nbgij", query, key)).astype(values.dtype),
        erase=key if has_delta else None,
        read=_factor(sums, seen.before)[..., None],
        write=_factor(last - sums, seen.after)[..., None],
        keep=_factor(last, seen.through)[..., None],
    )
    return chunks, decayed(_gram(key)) if has_delta else None


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


def _states(chunks: _Chunks, size: int) -> Array:
    """Return the state before each chunk, in the format of products."""
    dtype, value_dim = chunks.values.dtype, chunks.values.shape[-1]
    added = jnp.einsum("nbgck,nbgrcv->nbgrkv", chunks.key, _left(chunks.values, chunks))
    rows, key_dim = added.shape[1:4], added.shape[-2]
    start, erase = jnp.zeros((*rows, key_dim, value_dim), WIDE), None
    with jax.named_scope(PARALLEL):
        if chunks.erase is not None:
            erase = jnp.einsum("nbgck,nbgrcj->nbgrkj", chunks.key, _left(chunks.erase, chunks))
            if size > 1:
                # States are linear in the first one, by a matrix: a state that begins as the identity.
                whole = jnp.broadcast_to(jnp.eye(key_dim, dtype=WIDE), (*rows, key_dim, key_dim))
                start = jnp.concatenate([start, whole], axis=-1)
        found: Any = _linear_states(start, chunks.keep, erase, added)
        states, last = found
        if size == 1:
            return states
        if erase is None:
            kept = jnp.cumprod(chunks.keep, axis=0)
            last = jnp.concatenate([last, jnp.broadcast_to(kept[-1], (*last.shape[:-1], 1))], axis=-1)
            kept = jnp.concatenate([jnp.ones_like(kept[:1]), kept[:-1]])
            return (states + kept * _first_states(last, value_dim, size)[None]).astype(dtype)
        first = _first_states(last, value_dim, size).astype(dtype)
        first = jnp.broadcast_to(first[None], (states.shape[0], *first.shape))
        return states[..., :value_dim] + jnp.einsum("nbgrkj,nbgrjv->nbgrkv", states[..., value_dim:], first)


def _left(x: Array, chunks: _Chunks) -> Array:
    """Return what is left after the chunk of what its tokens add or erase."""
    return x if chunks.write is None else (x * chunks.write).astype(x.dtype)


def _first_states(ends: Array, value_dim: int, size: int) -> Array:
    """Return the state before each of the device's pieces, from the last states of all pieces.

    Args:
        ends: the state after a piece that starts with zeros [rows, ..., key_dim, value_dim], and beside it
            how it depends on the first state: a matrix [key_dim, key_dim], or its only column where it is
            diagonal.
        value_dim: the width of the former.
        size: the devices that share a sequence.
    """

    def one(state: Array, end: Array) -> tuple[Array, Array]:
        return _depending(end[..., value_dim:], state) + end[..., :value_dim], state

    of_all = of_all_pieces(ends, size)
    _, before = jax.lax.scan(one, jnp.zeros_like(of_all[0, ..., :value_dim]), of_all)
    return of_own_pieces(before, size)


def _depending(dependence: Array, state: Array) -> Array:
    """Return the part of a later state that depends on an earlier one."""
    if dependence.shape[-1] == 1:
        return dependence * state
    return jnp.matmul(dependence, state, precision=HIGHEST)


@jax.custom_vjp
def _linear_states(initial: Array, keep: Array, erase: Array | None, added: Array) -> tuple[Array, Array]:
    """Return the state before each chunk, in the format of `added`, and the last one in float32.

    S <- keep S - erase S + added, where `added` may lack the last columns of states. A loop has one product,
    and its gradient's another, for a round's kernels are small.
    """
    return _linear_forward(initial, keep, erase, added)[0]


def _linear_forward(initial: Array, keep: Array, erase: Array | None, added: Array) -> tuple[Any, Any]:
    wider = [(0, 0)] * 4 + [(0, initial.shape[-1] - added.shape[-1])]

    def one(state: Array, chunk: tuple[Array, Array | None, Array]) -> tuple[Array, Array]:
        keep, erase, added = chunk
        narrow = state.astype(added.dtype)
        state = keep * state + jnp.pad(added.astype(WIDE), wider)
        return state if erase is None else state - _wide_product("bgrkj,bgrjv->bgrkv", erase, narrow), narrow

    last, states = jax.lax.scan(one, initial, (keep, erase, added))
    return (states, last), (keep, erase, added[:0], states)


def _linear_backward(saved: tuple[Array, Array | None, Array, Array], gradients: tuple[Array, Array]) -> Any:
    keep, erase, like, states = saved

    def one(d_state: Array, chunk: tuple[Array, Array | None, Array]) -> tuple[Array, Array]:
        keep, erase, d_read = chunk
        narrow = d_state.astype(like.dtype)
        d_state = keep * d_state + d_read
        if erase is not None:
            d_state = d_state - _wide_product("bgrjk,bgrjv->bgrkv", erase, narrow)
        return d_state, narrow

    d_initial, d_states = jax.lax.scan(one, gradients[1], (keep, erase, gradients[0]), reverse=True)
    d_erase = None
    if erase is not None:
        d_erase = -jnp.einsum("nbgrkv,nbgrjv->nbgrkj", d_states, states)
    ones = tuple(dim for dim, size in enumerate(keep.shape) if size == 1 and dim > 3)
    d_keep = jnp.sum(d_states.astype(WIDE) * states.astype(WIDE), axis=ones, keepdims=True)
    return d_initial, d_keep, d_erase, d_states[..., : like.shape[-1]]


_linear_states.defvjp(_linear_forward, _linear_backward)
