"""Compute what the tokens of one chunk of a scan do to each other: decayed products, and an inverse.

Both are made of products of blocks, halves of halves, which a GPU and a TPU compile well. A library's
triangular solve has a price that is not known, and one row after the other has as many kernels as rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

SMALL = 16
"""Tokens of a block that is not halved: a tensor core multiplies 16 rows at a time."""
WIDE = jax.lax.Precision.HIGH
"""Of the inverse's products: TF32 on NVIDIA, three passes on a TPU, float32 on a CPU."""


def inverse_of_unit_lower(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Return (I + L)^-1 for L strictly lower triangular in float32; n is a power of two.

    Entries of `lower` on the diagonal and above must be zero.
    """
    return _inverse(lower)


@jax.custom_vjp
def _inverse(lower: Array) -> Array:
    return _by_halves(lower)


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    inner = jnp.matmul(jnp.matmul(transposed, gradient, precision=WIDE), transposed, precision=WIDE)
    return (-jnp.tril(inner, -1),)


def _by_halves(lower: Array) -> Array:
    size = lower.shape[-1]
    if size <= SMALL:
        return _by_doubling(lower)
    half = size // 2
    both = _by_halves(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = jnp.matmul(both[1], lower[..., half:, :half], precision=WIDE)
    corner = -jnp.matmul(corner, both[0], precision=WIDE)
    upper = jnp.concatenate([both[0], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, both[1]], axis=-1)], axis=-2)


def _by_doubling(lower: Array) -> Array:
    """Invert blocks on the diagonal of size 1, 2, 4, ... by products of whole matrices."""
    size = lower.shape[-1]
    place = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    width = 1
    while width < size:
        block = place // width
        joins = (block[:, None] == block[None] + 1) & (block[:, None] % 2 == 1)
        corner = jnp.where(jnp.broadcast_to(joins, lower.shape), lower, 0.0)
        if width > 1:
            corner = jnp.matmul(jnp.matmul(inverse, corner, precision=WIDE), inverse, precision=WIDE)
        inverse, width = inverse - corner, 2 * width
    return inverse


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverse = _by_halves(lower)
    return inverse, inverse


_inverse.defvjp(_inverse_forward, _inverse_backward)


def pair_sums(
    left: Float[Array, "*batch n key_dim"],
    right: Float[Array, "*batch n key_dim"],
    decays: Float[Array, "*batch n key_dim"],
) -> Float[Array, "*batch n n"]:
    """Return in float32 the sums over d of left_id right_jd exp(decays_id - decays_jd); zero where j > i.

    No exponent is above zero, as `decays` never rise from row to row: a block of rows i that all come after
    its columns j is a product of left exp(decays_i - m) and right exp(m - decays_j), where m are the decays
    of the last row before its rows. Blocks on the diagonal of `SMALL` rows are summed one by one.

    Args:
        left, right: in the format of the products.
        decays: sums of log decays up to and with each row, in float32.
    """
    return _pair_sums(left, right, decays)


@jax.custom_vjp
def _pair_sums(left: Array, right: Array, decays: Array) -> Array:
    return _pairs(left, right, decays)


def _pairs(left: Array, right: Array, decays: Array) -> Array:
    size = left.shape[-2]
    if size <= SMALL:
        wide = left.astype(jnp.float32)[..., :, None, :] * right.astype(jnp.float32)[..., None, :, :]
        return jnp.sum(wide * _factors(decays), axis=-1)
    both = _pairs(_halves(left), _halves(right), _halves(decays))
    later, earlier = _split(left, right, decays)
    corner = jnp.einsum("...ik,...jk->...ij", later, earlier, preferred_element_type=jnp.float32)
    upper = jnp.concatenate([both[0], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, both[1]], axis=-1)], axis=-2)


def _factors(decays: Array) -> Array:
    """Return exp(decays_i - decays_j) for j <= i, else zero: [..., i, j, key_dim]."""
    size = decays.shape[-2]
    seen = jnp.tril(jnp.ones((size, size), bool))[:, :, None]
    between = decays[..., :, None, :] - decays[..., None, :, :]
    return jnp.exp(jnp.where(jnp.broadcast_to(seen, between.shape), between, -jnp.inf))


def _halves(x: Array) -> Array:
    return jnp.stack(jnp.split(x, 2, axis=-2))


def _middle(decays: Array) -> tuple[Array, Array]:
    """Return the decay of the later rows since the middle, and of the earlier ones up to it."""
    half = decays.shape[-2] // 2
    middle = decays[..., half - 1 : half, :]
    return jnp.exp(decays[..., half:, :] - middle), jnp.exp(middle - decays[..., :half, :])


def _split(left: Array, right: Array, decays: Array) -> tuple[Array, Array]:
    half = left.shape[-2] // 2
    after, before = _middle(decays)
    later = (left[..., half:, :] * after).astype(left.dtype)
    return later, (right[..., :half, :] * before).astype(right.dtype)


def _pairs_backward(saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    left, right, decays = saved
    d_left, d_right = _pairs_back(left, right, decays, gradient)
    # A row's decay multiplies what its `left` does, and divides what its `right` does.
    d_decays = left.astype(jnp.float32) * d_left - right.astype(jnp.float32) * d_right
    return d_left.astype(left.dtype), d_right.astype(right.dtype), d_decays


def _pairs_back(left: Array, right: Array, decays: Array, gradient: Array) -> tuple[Array, Array]:
    """Return the gradients of `left` and `right` in float32."""
    size = left.shape[-2]
    if size <= SMALL:
        weighed = _factors(decays) * gradient[..., None]
        d_left = jnp.sum(weighed * right.astype(jnp.float32)[..., None, :, :], axis=-2)
        return d_left, jnp.sum(weighed * left.astype(jnp.float32)[..., :, None, :], axis=-3)
    half = size // 2
    inner = jnp.stack([gradient[..., :half, :half], gradient[..., half:, half:]])
    d_left, d_right = _pairs_back(_halves(left), _halves(right), _halves(decays), inner)
    corner = gradient[..., half:, :half].astype(left.dtype)
    later, earlier = _split(left, right, decays)
    after, before = _middle(decays)
    d_later = jnp.einsum("...ij,...jk->...ik", corner, earlier, preferred_element_type=jnp.float32)
    d_earlier = jnp.einsum("...ij,...ik->...jk", corner, later, preferred_element_type=jnp.float32)
    d_left = jnp.concatenate([d_left[0], d_left[1] + d_later * after], axis=-2)
    return d_left, jnp.concatenate([d_right[0] + d_earlier * before, d_right[1]], axis=-2)


def _pairs_forward(left: Array, right: Array, decays: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _pairs(left, right, decays), (left, right, decays)


_pair_sums.defvjp(_pairs_forward, _pairs_backward)
