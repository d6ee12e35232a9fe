"""Make matrices nearly orthogonal, each on one device: the part of Muon that needs whole matrices.

A matrix of a parameter may be split over `fsdp`, `tensor` and, under ZeRO-1, `data`. The iteration multiplies
it with itself. On split matrices the partitioner gathers each one on every device, in every iteration, and
all devices compute the same. Here layers (or a layer's experts) are dealt to the devices instead: one
exchange makes each device the owner of whole matrices, it iterates on these alone, and another exchange
returns the results. This is what Moonlight's distributed Muon does (Liu et al. 2025,
https://arxiv.org/abs/2502.16982, section 2.3).

Matrices of layers that are not stacked are stacked here by shape. Where fewer matrices than devices have a
shape, the other devices wait.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from meshwright.sharding import axes_of, axis_size, parameter_spec
from meshwright.trainer.models import Parameter
from meshwright.trainer.step import matrix_dims, merged_entry

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan 2024, https://kellerjordan.github.io/posts/muon/
LEAST_NORM = 1e-8


def orthogonal(
    parameters: Sequence[Parameter], arrays: Sequence[Array], num_steps: int, mesh: Mesh | None, zero1: bool
) -> list[Array]:
    """Return arrays with each of their matrices made nearly orthogonal.

    Args:
        parameters: the declarations of `arrays`, whose shardings follow from them.
        num_steps: iterations.
        mesh: None where nothing is split.
    """
    found: list[Array] = list(arrays)
    alone: defaultdict[Any, list[int]] = defaultdict(list)
    for index, (parameter, x) in enumerate(zip(parameters, arrays, strict=True)):
        dims = matrix_dims(parameter)
        flat, spec = x.reshape(dims.flat_shape(x.shape)), _flat_spec(parameter, mesh, zero1)
        if dims.stack:
            found[index] = _dealt(flat, spec, num_steps, mesh).reshape(x.shape)
        else:
            alone[flat.shape, spec].append(index)
            found[index] = flat
    for (_, spec), indices in alone.items():
        stack = jnp.stack([found[index] for index in indices])
        made = _dealt(stack, PartitionSpec(None, *spec), num_steps, mesh)
        for place, index in enumerate(indices):
            found[index] = made[place].reshape(arrays[index].shape)
    return found


def newton_schulz(x: Array, num_steps: int) -> Array:
    """Return matrices [..., rows, columns] whose singular values are near 1, by `num_steps` iterations.

    >>> import numpy as np
    >>> x = newton_schulz(jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32), 5)
    >>> bool(np.all(np.abs(np.linalg.svd(x, compute_uv=False) - 1) < 0.35))
    True
    """
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, num_steps).mT
    a, b, c = COEFFICIENTS
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + LEAST_NORM)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _flat_spec(parameter: Parameter, mesh: Mesh | None, zero1: bool) -> PartitionSpec:
    """Return the PartitionSpec of a parameter with the dims of each side of its matrices merged."""
    if mesh is None:
        return PartitionSpec()
    spec = parameter_spec(parameter.dims, mesh, zero1, parameter.shape)
    padded = PartitionSpec(*spec, *(None for _ in parameter.shape[len(spec) :]))
    return PartitionSpec(*(merged_entry(side, padded) for side in matrix_dims(parameter).sides))


def _dealt(x: Array, spec: PartitionSpec, num_steps: int, mesh: Mesh | None) -> Array:
    """Return a stack of matrices made orthogonal, with whole matrices dealt to the devices that split them.

    They are dealt along the dim of the stack with the most of them for each device. The axes move there side
    by side, for the partitioner makes an exchange of one side's move, and gathers where both move at once.
    """
    if mesh is None or not any(axes_of(entry) for entry in spec[-2:]):
        return newton_schulz(x, num_steps)
    entries = [axes_of(entry) for entry in spec]
    each = [
        size / math.prod(axis_size(mesh, axis) for axis in entry)
        for size, entry in zip(x.shape[:-2], entries[:-2], strict=True)
    ]
    longest, moves = each.index(max(each)), [spec]
    for side in (-1, -2):
        if entries[side]:
            entries[longest], entries[side] = (*entries[longest], *entries[side]), ()
            moves.append(PartitionSpec(*(entry or None for entry in entries)))
    for move in moves:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, move))
    x = newton_schulz(x, num_steps)
    for move in reversed(moves):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, move))
    return x
