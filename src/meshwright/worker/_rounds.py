"""Find how often a `while` of a traced program runs, where counters of known values decide it.

Of the loop only that part is evaluated on which its condition depends: mostly a counter and a bound. A loop
whose condition depends on data, on floating-point numbers or on an unknown primitive is undecided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.interpreters import partial_eval

from ._grid import GridCount, Undecided

MOST_ROUNDS = 10_000  # of a loop that is evaluated; a longer one is undecided


def rounds_of(eqn: Any, known: Mapping[Any, Any], free: frozenset[str]) -> int | None:
    """Return how often the body of a `while` runs, or None where that is not decided.

    Args:
        known: values of constants of the program, by variable.
        free: the primitives without products, of which the evaluator has the scalar ones.
    """
    params = eqn.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    given = [_scalar_of(atom, known) for atom in eqn.invars]
    for_cond, for_body = given[:of_cond], given[of_cond : of_cond + of_body]
    carry = given[of_cond + of_body :]
    condition, in_cond = partial_eval.dce_jaxpr(params["cond_jaxpr"].jaxpr, [True])
    needed = in_cond[of_cond:]
    while True:
        body, in_body = partial_eval.dce_jaxpr(params["body_jaxpr"].jaxpr, needed)
        more = [a or b for a, b in zip(needed, in_body[of_body:], strict=True)]
        if more == needed:
            break
        needed = more
    if not all(_is_whole(v) for v, each in zip(eqn.outvars, needed, strict=True) if each):
        return None  # NumPy would round its numbers otherwise than the device
    evaluate = GridCount((), (), free, _no_product).evaluate
    try:
        for done in range(MOST_ROUNDS):
            (goes,) = evaluate(condition, _kept([*for_cond, *carry], in_cond))
            if goes is None:
                return None
            if not np.all(goes):
                return done
            new = iter(evaluate(body, _kept([*for_body, *carry], in_body)))
            carry = [next(new) if each else None for each in needed]
    except Undecided:
        return None
    return None


def _is_whole(atom: Any) -> bool:
    """Return whether a value is a truth value or an integer; keys of JAX have no kind."""
    return getattr(atom.aval.dtype, "kind", "") in ("b", "i", "u")


def _scalar_of(atom: Any, known: Mapping[Any, Any]) -> Any:
    """Return the value of a scalar that the program holds, or None."""
    value = atom.val if hasattr(atom, "val") else known.get(atom)
    return np.asarray(value) if value is not None and atom.aval.shape == () and _is_whole(atom) else None


def _kept(values: list[Any], used: list[bool]) -> list[Any]:
    return [value for value, each in zip(values, used, strict=True) if each]


def _no_product(eqn: Any) -> int:
    raise Undecided("its condition depends on a product")
