"""Order the rows of epochs, seed the random generators, and generate rows for regression.

The order of windows in an epoch is a permutation that is computed, not stored. A balanced Feistel network of
six rounds permutes [0, 4^k). A result outside [0, size) is permuted again until it is inside
("cycle-walking"), which leaves a permutation of [0, size) (Black and Rogaway 2002,
https://doi.org/10.1007/3-540-45760-7_9). 4^k is at most 4 x size, so an index needs at most four passes on
average. Rounds mix with SplitMix64's finaliser (Steele et al. 2014). This integer arithmetic is our own, so
the order does not change with NumPy's generators. It is not cryptography.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

Split = Literal["train", "held-out"]
STREAMS: dict[Split, int] = {"train": 0, "held-out": 1}
_FIXED = 2
Rows = slice | np.ndarray
"""The rows of a batch that are requested: a slice for all of them, or their numbers in ascending order. A
row has the same content whether or not the other rows are requested with it."""
ALL = slice(None)


@runtime_checkable
class Dataset(Protocol):
    """Gives the batch of each step. Data of tokens also have `unigram_entropy_nats` and `decode`."""

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return the whole batch of a step, or some of its rows."""
        ...


def generator(seed: int, step: int, split: Split) -> np.random.Generator:
    """Return a generator that depends only on these three values, so that any step can be repeated."""
    return np.random.default_rng([seed, STREAMS[split], step])


def fixed_generator(seed: int) -> np.random.Generator:
    """Return a generator that depends only on the seed, for values shared by all steps of both splits."""
    return np.random.default_rng([seed, _FIXED])


_ROUNDS = 6
_AT_ONCE = 4096  # this many places share the cost of a NumPy call
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def windows_at(first: int, count: int, *, size: int, seed: int, split: Split) -> np.ndarray:
    """Return the windows at places `first` to `first + count - 1` of an endless run of epochs.

    The result is int64 [count], with values below `size`. Place p belongs to epoch p // size. Each epoch
    holds every window once, in its own order. The time does not depend on the place.
    """
    blocks = range(first // _AT_ONCE, (first + count - 1) // _AT_ONCE + 1)
    windows = np.concatenate([_block(block, size, seed, split) for block in blocks])
    start = first - blocks.start * _AT_ONCE
    return windows[start : start + count]


@functools.lru_cache(maxsize=64)  # 2 MiB; each source of a mixture has its own
def _block(block: int, size: int, seed: int, split: Split) -> np.ndarray:
    places = np.arange(block * _AT_ONCE, (block + 1) * _AT_ONCE, dtype=np.uint64)
    epochs, indices = np.divmod(places, np.uint64(size))
    windows = _permuted(indices, _key(seed, split, epochs), size).astype(np.int64)
    windows.flags.writeable = False  # all callers share the cached array
    return windows


def _key(seed: int, split: Split, epochs: np.ndarray) -> np.ndarray:
    """Return one random key per index; indices of one epoch share a key."""
    root = _mixed(np.array([seed], np.uint64) * np.uint64(len(STREAMS)) + np.uint64(STREAMS[split]))
    return _mixed(root + epochs)


def _permuted(indices: np.ndarray, key: np.ndarray, size: int) -> np.ndarray:
    """Permute each of `indices` within [0, size); for equal keys the mapping is one to one."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    permuted = _rounds(indices, key, half_bits)
    while (outside := permuted >= size).any():
        permuted[outside] = _rounds(permuted[outside], key[outside], half_bits)
    return permuted


def _rounds(indices: np.ndarray, key: np.ndarray, half_bits: int) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = indices >> bits, indices & mask
    for number in range(_ROUNDS):
        # Keep the keys of the rounds distant: with neighbouring keys, small halves would yield the same few
        # numbers in every round.
        mixed = _mixed(right ^ (key + np.uint64(number << 40)))
        left, right = right, left ^ (mixed & mask)
    return (left << bits) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output for the state `x`, with arithmetic modulo 2^64."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionRows:
    """Standard normal inputs with targets that are inputs . [0, 1, ..., D-1] without noise, or normal too.

    `has_answer`: the targets follow from the inputs.
    """

    seed: int
    rows: int
    dim: int
    has_answer: bool

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return `inputs` float32 [rows, dim] and `targets` float32 [rows]."""
        random = generator(self.seed, step, split)
        inputs = random.standard_normal((self.rows, self.dim), dtype=np.float32)
        if self.has_answer:
            targets = inputs @ np.arange(self.dim, dtype=np.float32)
        else:
            targets = random.standard_normal(self.rows, dtype=np.float32)
        return {"inputs": inputs[rows], "targets": targets[rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRows:
    """Points near a line: slope x + intercept + noise x a standard normal number, with x standard normal."""

    seed: int
    rows: int
    slope: float
    intercept: float
    noise: float

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return `inputs` float32 [rows, 1] and `targets` float32 [rows]."""
        random = generator(self.seed, step, split)
        inputs = random.standard_normal((self.rows, 1), dtype=np.float32)
        off = random.standard_normal(self.rows, dtype=np.float32)
        targets = np.float32(self.slope) * inputs[:, 0] + np.float32(self.intercept)
        return {"inputs": inputs[rows], "targets": (targets + np.float32(self.noise) * off)[rows]}
