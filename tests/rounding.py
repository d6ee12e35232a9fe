"""Bound how far rounding takes gradients in a narrow format from those of float32, on any machine.

The distance of one run from float32 is no bound for another run. It is one draw: the rounding errors of a
small array point in a few independent directions, and another order of additions draws again. A tenth of
such arrays are twice as far as the run beside them.

What is the same on every machine is the spread of that draw. A rounded computation is the exact one of data
that were each moved by a few units of roundoff (backward stability), so moved data show how far errors of
that size carry. `rounding_of` therefore runs one device's program in the narrow format several times, each
time with every parameter moved at random by up to one unit of roundoff. That also draws all later roundings
anew. Eight draws give the root mean square of one number to a quarter, of an array better.

Two figures of each array are bounded by their own root mean square:

* Its distance from float32's, in the norm, by `FARTHEST` times. A layout rounds more than one device does:
  each product that `tensor` splits, each message, each microbatch's addition. Those are no more roundings
  than one device already has on the way to a gradient, which is a factor of the root of two. The rest of
  `FARTHEST`, 2.8, is for chance: errors in three independent directions exceed 2.8 times their root mean
  square in fewer than one of 10,000 arrays.
* Its portion of float32's, which is the projection on it and 1 without error. It is one number, which chance
  takes farther, so it has `PORTION` times. Of a large array it errs far less than the distance, because
  errors are nearly at right angles to the gradient: it shows in eight bits that a device's share is missing,
  where the distance does not. A lone number, such as the loss, is judged by its portion alone.

Both hold as long as errors are those of roundings. A factor, a missing device and a missing term of a sum
move an array by a part of itself, whatever the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

# In float32 a figure may be off by 168 units of roundoff of the largest number that goes into it. A chain of
# roundings errs by about the root of their number, and so does a sum of terms: 168 is the root of 28,000.
# What is missing from a sum is a thousand times as large.
FLOAT32 = 1e-5
FARTHEST, PORTION = 4, 6
DRAWS = 8
# The unit of roundoff, 2 to the minus of the mantissa's bits and one. In eight bits parameters are kept wide
# and activations in bfloat16, whose units change enough of the roundings to eight bits.
UNITS = {"bf16": 2.0**-8, "fp8": 2.0**-8, "fp16": 2.0**-11}


def distance(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact))


def portion(found: np.ndarray, exact: np.ndarray) -> float:
    """Return how much of the exact array is in the one found: 1, whatever error is at right angles to it."""
    wide = np.asarray(exact, np.float64)
    return float(np.vdot(found, wide) / (np.vdot(wide, wide) or 1.0))


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """The spread of each array of a tree about its exact value, where nothing errs but rounding."""

    exact: list[np.ndarray]
    names: list[str]
    distances: np.ndarray
    portions: np.ndarray  # of what the portion lacks or has too much

    def used(self, found: Any) -> dict[str, float]:
        """Return the part of its bound that each array uses; above 1 it is farther than rounding takes it."""
        pairs = list(zip(map(np.asarray, jax.tree.leaves(found)), self.exact, strict=True))
        far = np.array([distance(*pair) for pair in pairs]) / (FARTHEST * self.distances)
        far[[exact.size == 1 for exact in self.exact]] = 0
        off = np.array([abs(portion(*pair) - 1) for pair in pairs]) / (PORTION * self.portions)
        return dict(zip(self.names, np.maximum(far, off).tolist(), strict=True))

    def strays(self, found: Any) -> dict[str, float]:
        """Return those of `used` that rounding does not explain; not a number is among them."""
        return {name: used for name, used in self.used(found).items() if not used <= 1}


def rounding_of(run: Callable[[Any], Any], parameters: Any, exact: Any, precision: str) -> Rounding:
    """Draw the spread of what `run` makes of parameters, a tree of arrays, about the same tree in float32.

    Args:
        run: one device's program in `precision`; it does not donate its parameters.
        exact: what float32 makes of the parameters as they are.
    """
    draw = np.random.default_rng(0)

    def moved(x: jax.Array) -> np.ndarray:
        return np.asarray(x * (1 + UNITS[precision] * draw.uniform(-1, 1, x.shape)), x.dtype)

    named = [(path, np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(exact)]
    wanted = [x for _, x in named]
    far, off = [], []
    for _ in range(DRAWS):
        pairs = list(zip(jax.tree.leaves(run(jax.tree.map(moved, parameters))), wanted, strict=True))
        far.append([distance(*pair) for pair in pairs])
        off.append([portion(*pair) - 1 for pair in pairs])
    least = np.finfo(np.float64).tiny
    distances, portions = (
        np.maximum(np.sqrt(np.mean(np.square(each), axis=0)), least) for each in (far, off)
    )
    names = [jax.tree_util.keystr(path) for path, _ in named]
    return Rounding(exact=wanted, names=names, distances=distances, portions=portions)
