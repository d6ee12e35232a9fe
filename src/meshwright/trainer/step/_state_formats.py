"""Keep parameters and moments in the formats of the config's `state` section; compute the update in float32.

Stochastic rounding: of the two bfloat16 numbers around x one is taken by chance, so that the mean is x
(Gupta et al. 2015, https://arxiv.org/abs/1502.02551). A float32 number has 16 bits more than a bfloat16. A
random number of 16 bits is added to them, and they are cut off: the carry rounds up as often as it should.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from meshwright.config import StateConfig
from meshwright.trainer.models import Parameter, is_parameter

from ._optimizer import is_matrix

Tree = Any
CUT = 0xFFFF_0000  # the bits of a float32 that a bfloat16 keeps
OF_ROUNDING = 2**32 - 1  # folded into a step's key; microbatches fold in their index, which is less


def kept_parameters(formats: StateConfig, declared: Tree, parameters: Tree) -> Tree:
    """Return float32 parameters in the formats in which a new run keeps them.

    Matrices and tables are rounded. Norms, biases and parameters with `Parameter.wide` stay as they are.
    """
    if formats.parameters == "fp32":
        return parameters

    def one(declared: Parameter, x: Array) -> Array:
        return x.astype(jnp.bfloat16) if is_matrix(declared) and not declared.wide else x

    return jax.tree.map(one, declared, parameters, is_leaf=is_parameter)


def kept_moments(formats: StateConfig, moments: Tree) -> Tree:
    """Return an optimizer's new state in the formats in which it is kept; scalars stay as they are."""
    if formats.moments == "fp32":
        return moments
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 and x.ndim else x, moments)


def widened(tree: Tree) -> Tree:
    """Return a tree whose bfloat16 arrays are float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def rounded_as(old: Tree, new: Tree, formats: StateConfig, key: Key[Array, ""]) -> Tree:
    """Return `new` in the formats of `old`'s arrays, rounded as `formats` says.

    Args:
        old, new: trees of the same structure and shapes.
        key: of the step; arrays draw different numbers from it.
    """
    leaves, structure = jax.tree.flatten(new)
    keys = iter(range(len(leaves)))

    def one(old: Array, new: Array) -> Array:
        index = next(keys)
        if old.dtype == new.dtype or formats.rounding == "nearest":
            return new.astype(old.dtype)
        return by_chance(new, jax.random.fold_in(key, index))

    return structure.unflatten([*map(one, jax.tree.leaves(old), leaves)])


def by_chance(x: Array, key: Key[Array, ""]) -> Array:
    """Round a float32 array to bfloat16 up or down by chance, so that the mean is the array.

    Infinities and NaN stay what they are.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    drawn = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type((bits + drawn) & jnp.uint32(CUT), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)
