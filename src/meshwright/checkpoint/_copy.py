"""The state, copied off the devices: the one part of a save that a step waits for."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Tree = Any
Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in the array, and its shape


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArray:
    """An array of the state in host memory: its path, whole shape, and pieces of it, each in C order."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    starts: tuple[tuple[int, ...], ...]
    pieces: tuple[np.ndarray, ...]


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by path: "parameters/blocks/norm", "optimizer/0/mu/head"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state have one path"
    return named


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """A shard's index in an array of `shape`, as start and extent by dim."""
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges)


def host_copy_bytes(state: Tree) -> int:
    """Host memory that a save takes on top of the run's own: one copy of what this process writes.

    `state` may be abstract, with shardings. Each element counts once, however many devices hold it. Not
    counted: what a file's buffer and the manifest take, below 10 MB.
    """
    total = 0
    for leaf in jax.tree.leaves(state):
        index_map = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        boxes = {box_of(index, leaf.shape) for index in index_map.values()}
        total += sum(math.prod(extent) for _, extent in boxes) * leaf.dtype.itemsize
    return total


def copy_off(state: Tree) -> list[HostArray]:
    """A copy of the state in host memory, which its donation or deletion does not touch.

    Of each shard that several devices hold, one process copies one.
    """
    arrays = leaves_by_path(state)
    shards = {path: _own_shards(array) for path, array in arrays.items()}
    every = [shard.data for own in shards.values() for shard in own]
    for data in every:
        data.copy_to_host_async()  # all copies under way at once
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        copies = iter(list(pool.map(_copied, every)))
    return [
        HostArray(
            path=path,
            shape=array.shape,
            dtype=array.dtype.name,
            starts=tuple(box_of(shard.index, array.shape)[0] for shard in shards[path]),
            pieces=tuple(next(copies) for _ in shards[path]),
        )
        for path, array in arrays.items()
    ]


def _own_shards(array: jax.Array) -> list[Any]:
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _copied(data: jax.Array) -> np.ndarray:
    """A shard as numpy. Where its memory is the host's, numpy would look into the array's own buffer, which
    could then not be donated; elsewhere the transfer has made a copy that is taken as it is."""
    device = next(iter(data.devices()))
    in_host_memory = device.platform == "cpu" or "host" in str(data.sharding.memory_kind)
    return np.array(data, order="C") if in_host_memory else np.asarray(data, order="C")
