"""From a dataset to the devices: each process makes the rows that its own devices hold, and no others."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..data import ALL, Dataset, Rows, Split

Tree = Any


class Feed:
    """Batches of `dataset` as the step takes them, arrays of all processes.

    Args:
        abstract: the step's batch: shapes [microbatches, rows, ...] and shardings.
    """

    def __init__(self, dataset: Dataset, abstract: Tree) -> None:
        self._dataset, self._abstract = dataset, abstract
        held = [rows_held(each) for each in jax.tree.leaves(abstract)]
        self._held = np.unique(np.concatenate(held))
        num_microbatches, num_rows = jax.tree.leaves(abstract)[0].shape[:2]
        self._has_all = len(self._held) == num_rows
        numbers = np.arange(num_microbatches)[:, None] * num_rows + self._held
        self._rows: Rows = ALL if self._has_all else numbers.reshape(-1)

    def batch(self, index: int, split: Split = "train") -> Tree:
        """Batch `index`, on its devices."""
        return jax.tree.map(self._put, self._dataset.batch(index, split, self._rows), self._abstract)

    def _put(self, rows: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        num_microbatches, num_rows, *rest = abstract.shape
        own = rows.reshape(num_microbatches, len(self._held), *rest)
        if self._has_all:
            return put(own, abstract.sharding)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index, "a step's batch has a shape"
            microbatches, wanted, *others = index
            here = np.searchsorted(self._held, np.arange(num_rows)[wanted])
            return own[microbatches, here[0] : here[-1] + 1, *others]

        return jax.make_array_from_callback(abstract.shape, abstract.sharding, part)


def rows_held(abstract: jax.ShapeDtypeStruct) -> np.ndarray:
    """Which of a microbatch's rows this process's devices hold of an array [microbatches, rows, ...]."""
    indices = abstract.sharding.addressable_devices_indices_map(abstract.shape).values()
    rows = np.arange(abstract.shape[1])
    return np.unique(np.concatenate([rows[index[1]] for index in indices if index]))


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """On the devices of all processes an array that each of them has whole."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index or ...])
