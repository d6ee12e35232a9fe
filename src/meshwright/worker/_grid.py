"""Count the products of a Pallas kernel at each point of its grid.

A kernel's body is a program like any other, but it runs once for each point of the grid, and most kernels of
attention decide there which blocks they compute. So scalars are held as arrays over the whole grid:
`program_id`, the arithmetic on it, the bounds of loops, the predicates of `cond`, and the blocks of a mask
that is a constant of the program. Blocks of data are not computed at all.

A loop runs by its bounds, with a counter of known value in each round. A predicate that depends on data takes
the most expensive branch, and a loop of unknown length runs once; both are said (`notes`). Only the axes of
the grid that the body asks for are spread out: the others multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MOST_POINTS, MOST_ROUNDS = 1 << 20, 512
Known = Any  # a scalar's values over the grid as a numpy array, or None where they depend on data

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "neg": np.negative, "sign": np.sign, "rem": np.fmod, "abs": np.abs,
}  # fmt: skip
_SAME = ("convert_element_type", "copy", "stop_gradient", "reshape", "squeeze", "multiple_of")
# What a kernel's body may hold beside the arithmetic of other programs: none of it multiplies matrices.
_IN_KERNELS = """
program_id num_programs get swap load store masked_load masked_swap addupdate atomic_rmw atomic_cas
multiple_of max_contiguous run_scoped dma_start dma_wait semaphore_read semaphore_signal semaphore_wait
get_global repeat debug_print delay roll prng_seed prng_random_bits bitcast assume debug_barrier
copy_gmem_to_smem copy_smem_to_gmem wait_smem_to_gmem commit_group barrier_wait barrier_arrive
set_max_registers
"""
IN_KERNELS = frozenset(_IN_KERNELS.split())


class Undecided(Exception):
    """Say why the body of a kernel cannot be counted."""


class GridCount:
    """Sum up the FLOPs of a kernel's body over its grid."""

    def __init__(
        self, grid: Sequence[int], vmapped: Sequence[int], free: frozenset[str], dot: Callable[[Any], int]
    ) -> None:
        self.flops = 0
        self.notes: list[str] = []
        self.compares_positions = False  # a mask is made from the positions of rows and columns
        self._free, self._dot = free, dot
        self._asked = [size for axis, size in enumerate(grid) if axis not in vmapped]
        self._beside = math.prod(size for axis, size in enumerate(grid) if axis in vmapped)
        self._points: dict[int, Any] = {}
        self._entered: dict[str, Callable[[Any, list[Known], Any], Sequence[Known]]] = {
            "dot_general": self._product,
            "program_id": self._coordinate,
            "num_programs": self._size,
            "get": self._read,
            "cond": self._cond,
            "while": self._while,
            "scan": self._scan,
        }

    def run(self, body: Any, operands: Mapping[int, Any]) -> None:
        """Count a body.

        Args:
            body: the kernel's jaxpr.
            operands: by the place among the body's inputs, the values of a constant array.

        Raises:
            Undecided: the body has a primitive that is not known, or the grid too many points.
        """
        axes = sorted({eqn.params["axis"] for eqn in _equations(body) if eqn.primitive.name == "program_id"})
        sizes = [self._asked[axis] for axis in axes]
        if math.prod(sizes) > MOST_POINTS:
            raise Undecided(f"its grid has {math.prod(sizes):,} points to decide")
        coordinates = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), int)
        self._points = dict(zip(axes, coordinates, strict=True))
        rest = [size for axis, size in enumerate(self._asked) if axis not in axes]
        times = np.full(coordinates.shape[1], self._beside * math.prod(rest), dtype=object)
        known = [operands.get(place) for place in range(len(body.invars))]
        self._walk(body, known, times)

    def evaluate(self, jaxpr: Any, inputs: Sequence[Known]) -> list[Known]:
        """Return the results of a program of scalars, None for each that is not known.

        Raises:
            Undecided: it has a primitive that is not known.
        """
        return self._walk(jaxpr, inputs, np.ones(1, dtype=object))

    def _walk(self, jaxpr: Any, inputs: Sequence[Known], times: Any) -> list[Known]:
        values: dict[Any, Known] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Known:
            return np.asarray(atom.val) if hasattr(atom, "val") else values.get(atom)

        for eqn in jaxpr.eqns:
            found = self._step(eqn, [read(atom) for atom in eqn.invars], times)
            values.update(zip(eqn.outvars, found, strict=False))
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, eqn: Any, inputs: list[Known], times: Any) -> Sequence[Known]:
        name = eqn.primitive.name
        if (enter := self._entered.get(name)) is not None:
            return enter(eqn, inputs, times)
        if (inner := _program(eqn)) is not None:
            given = [*inputs, *[None] * (len(inner.invars) - len(inputs))]  # `run_scoped` makes its own
            return self._walk(inner, given, times)
        if name not in self._free and name not in IN_KERNELS:
            raise Undecided(f"its body has a {name}")
        shape = eqn.outvars[0].aval.shape if eqn.outvars else None
        if name in ("ge", "gt", "le", "lt") and len(shape or ()) == 2:
            self.compares_positions |= all(v.aval.dtype.kind in "iu" for v in eqn.invars)
        scalars = shape == () and all(getattr(v.aval, "shape", None) == () for v in eqn.invars)
        return [_scalar(name, eqn, inputs)] if scalars else []

    def _product(self, eqn: Any, inputs: list[Known], times: Any) -> Sequence[Known]:
        self.flops += self._dot(eqn) * int(times.sum())
        return []

    def _coordinate(self, eqn: Any, inputs: list[Known], times: Any) -> Sequence[Known]:
        return [self._points[eqn.params["axis"]]]

    def _size(self, eqn: Any, inputs: list[Known], times: Any) -> Sequence[Known]:
        return [np.asarray(self._asked[eqn.params["axis"]])]

    def _read(self, eqn: Any, inputs: list[Known], times: Any) -> Sequence[Known]:
        return [_element(eqn, inputs)]

    def _cond(self, eqn: Any, inputs: list[Known], times: Any) -> list[Known]:
        index, *operands = inputs
        branches = eqn.params["branches"]
        if index is not None:
            index = np.clip(np.broadcast_to(index, times.shape).astype(int), 0, len(branches) - 1)
            results = [self._walk(b.jaxpr, operands, times * (index == n)) for n, b in enumerate(branches)]
            return [
                None if any(each is None for each in found) else np.choose(index, found)
                for found in zip(*results, strict=True)
            ]
        before, costs = self.flops, list[int]()
        for branch in branches:
            self._walk(branch.jaxpr, operands, times)
            costs.append(self.flops - before)
            self.flops = before
        self.flops = before + max(costs)
        if len(set(costs)) > 1:
            self.notes.append("a branch that depends on data counts as its most expensive one")
        return [None] * len(eqn.outvars)

    def _while(self, eqn: Any, inputs: list[Known], times: Any) -> list[Known]:
        """Run a loop while its condition, which is known at each point of the grid, holds."""
        params = eqn.params
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        conditions, constants = inputs[:of_cond], inputs[of_cond : of_cond + of_body]
        carry = inputs[of_cond + of_body :]
        running = times
        for _ in range(MOST_ROUNDS):
            (goes,) = self._walk(params["cond_jaxpr"].jaxpr, [*conditions, *carry], running * 0)
            if goes is None:
                self.notes.append("a loop whose length depends on data counts once")
                self._walk(params["body_jaxpr"].jaxpr, [*constants, *[None] * len(carry)], running)
                return [None] * len(eqn.outvars)
            running = running * np.broadcast_to(goes, times.shape).astype(int)
            if not running.any():
                return [None] * len(eqn.outvars)
            carry = self._walk(params["body_jaxpr"].jaxpr, [*constants, *carry], running)
        raise Undecided(f"a loop of its body runs more than {MOST_ROUNDS} rounds")

    def _scan(self, eqn: Any, inputs: list[Known], times: Any) -> list[Known]:
        params = eqn.params
        num_constants, num_carry = scan_sizes(params)
        body, constants, length = params["jaxpr"].jaxpr, inputs[:num_constants], params["length"]
        carry = inputs[num_constants : num_constants + num_carry]
        per_round = [None] * (len(inputs) - num_constants - num_carry)
        if length > MOST_ROUNDS:
            self._walk(body, [*constants, *[None] * num_carry, *per_round], times * length)
            return [None] * len(eqn.outvars)
        for _ in range(length):
            carry = self._walk(body, [*constants, *carry, *per_round], times)[:num_carry]
        return [*carry, *[None] * (len(eqn.outvars) - num_carry)]


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` stay the same and how many it carries, in jax 0.10 and in 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def _equations(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns"):
                    yield from _equations(getattr(part, "jaxpr", part))


def _program(eqn: Any) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        value = eqn.params.get(key)
        if value is not None and hasattr(value, "eqns"):
            return getattr(value, "jaxpr", value)
    return None


def _element(eqn: Any, inputs: list[Known]) -> Known:
    """Return one element of a constant array at a known place; None for any other read."""
    array, *indices = inputs
    whole = getattr(array, "shape", None)
    if eqn.outvars[0].aval.shape != () or whole is None or len(indices) != len(whole):
        return None
    if any(index is None for index in indices):
        return None
    limits = zip(indices, whole, strict=True)
    return array[tuple(np.clip(np.asarray(index).astype(int), 0, size - 1) for index, size in limits)]


def _scalar(name: str, eqn: Any, inputs: list[Known]) -> Known:
    if any(value is None for value in inputs):
        return None
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](*inputs)
    if name == "div" and eqn.outvars[0].aval.dtype.kind in "iu":
        return np.trunc(np.asarray(inputs[0]) / np.where(np.equal(inputs[1], 0), 1, inputs[1])).astype(int)
    if name == "select_n":
        return np.choose(np.asarray(inputs[0]).astype(int), inputs[1:])
    if name == "clamp":
        return np.clip(inputs[1], inputs[0], inputs[2])
    if name in _SAME or name == "broadcast_in_dim":
        return np.asarray(inputs[0]).astype(eqn.outvars[0].aval.dtype)
    return None
