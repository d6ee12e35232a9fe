"""Translated sharding errors for a training loop of the user's own, in one process or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from ..compiler import Surroundings, sharding_error


@contextmanager
def sharding_errors(mesh: Any, **arguments: Any) -> Iterator[None]:
    """Around steps of your own: JAX's complaints about shardings, in the words that `weigh` has for them.

    They name the path, dimension, axes and sizes, and the nearest that works. In several processes they
    tell the rows that one has read, passed as if they were the global batch, and what converts them. Other
    errors pass as they are. JAX is silent where the rows of one process, as a `jax.Array`, divide as the
    global batch would: each process' devices then take their share of its own.

    Args:
        mesh: the `jax.sharding.Mesh` that the step runs on.
        arguments: what the step is given, whole trees of arrays, by the names that errors shall use.

    Raises:
        InputError: in place of what JAX raised about a sharding, which is its cause.

    Source: the words of jax 0.10.2 and 0.12.0, by which alone such errors are told apart.
    """
    try:
        yield
    except Exception as failed:
        leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
        shapes = {
            f"{keys[0].key}{jax.tree_util.keystr(keys[1:])}": tuple(leaf.shape)
            for keys, leaf in leaves
            if hasattr(leaf, "shape")
        }
        known = Surroundings(axes=mesh.shape_tuple, shapes=shapes, num_processes=jax.process_count())
        translated = sharding_error(failed, known)
        if translated is None:
            raise
        raise translated from failed
