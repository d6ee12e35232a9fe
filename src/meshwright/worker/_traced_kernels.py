"""Count the FLOPs of one call of a Pallas kernel or of a foreign function, where it is traced.

The first of these sources that applies is taken, and named in `Kernel.source`:
1. a rule that the user registered (`mw.register_kernel`);
2. for attention that comes with JAX (Pallas' Triton attention, TPU flash attention, splash attention): the
   textbook products, of which a causal mask needs half. What the kernel executes is counted by its body;
3. the products of its body at each point of its grid (`_grid`);
4. its `cost_estimate`, as with megablox' gmm, whose grid only the run knows.
Without any of them the call is unpriced, and the reason is said.

Attention's products: forward S = Q K^T and P V. Backward: dV, dP, dQ, dK are needed; S is recomputed. TPU
flash and splash attention compute dK and dV in one kernel (S, dP, dV, dK) and dQ in another (S, dP, dQ), so S
and dP are executed twice. Source: Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4.

A block that the mask leaves in part counts by half in model FLOPs of splash attention, which is exact for a
causal mask of square blocks. Elementwise work of a kernel is not counted, as elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.compiler import FOREIGN, MAPPED, KernelCall, NamedKernel, registered_rule

from ._grid import GridCount, Undecided

FORMATS = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8",
    "float8_e4m3fn": "fp8-e4m3", "float8_e5m2": "fp8-e5m2",
}  # fmt: skip
_TYPES = {"bool": "pred", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """FLOPs of one run of a kernel: for the model, recomputed, and the record for the compiled program."""

    work: int
    recompute: int
    kernel: NamedKernel
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """A kernel of attention that comes with JAX.

    `needed`, `repeated`, `products`: of its products, those that the model needs, those that recompute, and
    all. `heads_first`: whether the query is [batch, heads, q, head_dim], else [batch, q, heads, head_dim].
    """

    needed: int
    repeated: int
    products: int
    heads_first: bool = True


_ATTENTION = {
    "mha_forward": _Attention(needed=2, repeated=0, products=2, heads_first=False),
    "mha_backward": _Attention(needed=4, repeated=1, products=7, heads_first=False),
    "_flash_attention_kernel": _Attention(needed=2, repeated=0, products=2),
    "_flash_attention_dkv_kernel": _Attention(needed=3, repeated=1, products=4),
    "_flash_attention_dq_kernel": _Attention(needed=1, repeated=0, products=3),
    "splash_mha_fwd": _Attention(needed=2, repeated=0, products=2),
    "splash_mha_dkv": _Attention(needed=3, repeated=1, products=4),
    "splash_mha_dq": _Attention(needed=1, repeated=0, products=3),
}
_LIBRARY = "pallas/ops/"  # in the path of every kernel that comes with JAX


def kernel_of(eqn: Any, known: Mapping[Any, Any], free: frozenset[str], dot: Callable[[Any], int]) -> Counted:
    """Count one run of a `pallas_call` or `ffi_call` on one device.

    Args:
        known: values of constants of the program, by variable.
        free: the primitives without products.
        dot: from a `dot_general` to its FLOPs.

    Raises:
        Undecided: no source has its FLOPs; the text says why.
    """
    call = _call(eqn)
    if (rule := registered_rule(call.name)) is not None:
        given = rule(call)
        executed = given.model if given.executed is None else given.executed
        return _counted(call, eqn, given.model, given.recomputed, executed, source="a registered rule")
    if eqn.primitive.name == FOREIGN:
        raise Undecided("no rule is registered for it")
    estimate = eqn.params.get("cost_estimate")
    if eqn.primitive.name == MAPPED:
        return _mapped(call, eqn, estimate)
    try:
        body = _body(eqn, known, free, dot)
    except Undecided as unknown:
        if estimate is None:
            raise Undecided(f"{unknown}, and it has no cost_estimate") from unknown
        flops = int(estimate.flops)
        return _counted(call, eqn, flops, 0, flops, source=f"its cost_estimate: {unknown}")
    source = eqn.params["jaxpr"].debug_info.func_src_info or ""
    if _LIBRARY in source:
        for name, attention in _ATTENTION.items():
            if source.startswith(name):
                return _attention(call, eqn, attention, body, known, splash=name.startswith("splash"))
    if body.notes and estimate is not None:
        flops = int(estimate.flops)
        return _counted(call, eqn, flops, 0, flops, source=f"its cost_estimate: {body.notes[0]}")
    made = _counted(call, eqn, body.flops, 0, body.flops, source="its body and grid")
    return dataclasses.replace(made, notes=tuple(dict.fromkeys(body.notes)))


def _mapped(call: KernelCall, eqn: Any, estimate: Any) -> Counted:
    """Count a kernel whose body says nothing: by its estimate, or as a grouped product by its arrays.

    Raises:
        Undecided: it is another, and has no estimate.
    """
    if estimate is not None:
        flops = int(estimate.flops)
        return _counted(call, eqn, flops, 0, flops, source="its cost_estimate")
    if (flops := _ragged(call)) is not None:
        source = "the products of each row with one matrix, as its arrays are those of a grouped product"
        return _counted(call, eqn, flops, 0, flops, source=source)
    raise Undecided("its warps divide the work by code of their own, and it has no cost_estimate and no rule")


def _ragged(call: KernelCall) -> int | None:
    """Return the FLOPs of a grouped product of ragged rows; None if the arrays are not those of one.

    Taken are the numbers of rows [groups], and rows [m, k] and matrices [groups, k, n], in either order of
    the last two, for [m, n]; or rows [k, m] and [k, n] for [groups, m, n], as JAX's `ragged_dot_mgpu` does.
    """
    (_, result), *_ = call.results
    shapes = [shape for _, shape in call.operands]
    if len(shapes) != 3 or len(shapes[0]) != 1 or call.operands[0][0] != "s32":
        return None
    (groups,), rows, other = shapes
    if len(rows) == len(result) == 2 and len(other) == 3:
        sides = sorted((rows[1], result[1]))
        is_product = other[0] == groups and sorted(other[1:]) == sides and rows[0] == result[0]
    else:
        is_product = (
            len(rows) == len(other) == 2 and result == (groups, rows[1], other[1]) and rows[0] == other[0]
        )
    return 2 * math.prod(rows) * result[-1] if is_product else None


def _call(eqn: Any) -> KernelCall:
    arrays = [v.aval for v in eqn.invars if getattr(v.aval, "shape", None) is not None]
    results = tuple(_shape(v.aval) for v in eqn.outvars)
    operands = tuple(map(_shape, arrays))
    if eqn.primitive.name == FOREIGN:
        return KernelCall(name=eqn.params["target_name"], operands=operands, results=results)
    sizes = eqn.params["meshes"][0].grid if eqn.primitive.name == MAPPED else eqn.params["grid_mapping"].grid
    grid = tuple(size if isinstance(size, int) else None for size in sizes)
    return KernelCall(name=name_of(eqn), operands=operands, results=results, grid=grid)


def name_of(eqn: Any) -> str:
    """Return a kernel's own name, or its function's name if it has none."""
    if eqn.primitive.name == FOREIGN:
        return eqn.params["target_name"]
    if eqn.primitive.name == MAPPED:
        return eqn.params["meshes"][0].kernel_name or eqn.params["name"]
    function, _, place = (eqn.params["jaxpr"].debug_info.func_src_info or "").partition(" at ")
    if function == "kernel":  # half of all kernels: the file says more
        function = Path(place.rpartition(":")[0]).stem or function
    return eqn.params.get("name") or function or "a kernel without a name"


def _shape(aval: Any) -> tuple[str, tuple[int, ...]]:
    name = str(aval.dtype)
    short = name[0] + name.lstrip("abcdefghijklmnopqrstuvwxyz") if name[0] in "fcu" else name
    if name.startswith("int"):
        short = "s" + name.removeprefix("int")
    return _TYPES.get(name, short), tuple(aval.shape)


def _body(eqn: Any, known: Mapping[Any, Any], free: frozenset[str], dot: Callable[[Any], int]) -> GridCount:
    mapping, body = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    if not all(isinstance(size, int) for size in mapping.grid):
        raise Undecided("only the run knows the size of its grid")
    first = mapping.num_dynamic_grid_bounds
    values: dict[int, Any] = {}
    for place, atom in enumerate(eqn.invars[first : first + mapping.num_index_operands]):
        value = atom.val if hasattr(atom, "val") else known.get(atom)
        if value is not None:
            values[place] = np.asarray(value)
    count = GridCount(mapping.grid, mapping.vmapped_dims, free, dot)
    count.run(body, values)
    return count


def _attention(
    call: KernelCall, eqn: Any, kind: _Attention, body: GridCount, known: Mapping[Any, Any], *, splash: bool
) -> Counted:
    """Count a kernel of attention: for the model by its textbook products, executed by its body."""
    mapping = eqn.params["grid_mapping"]
    start = mapping.num_dynamic_grid_bounds + mapping.num_index_operands
    (_, query), (_, key) = call.operands[start : start + 2]
    length, heads, dim = (query[-2], query[-3], query[-1]) if kind.heads_first else (*query[1:3], query[3])
    keys = key[-2] if kind.heads_first else key[1]
    whole = 2 * math.prod(query[: -3 if kind.heads_first else 1]) * heads * length * keys * dim
    share, notes = Fraction(1, 2) if body.compares_positions else Fraction(1), tuple(body.notes)
    if splash:
        share = Fraction(body.flops, kind.products * whole)  # of all blocks, those that the mask touches
        blocks = eqn.invars[mapping.num_dynamic_grid_bounds : start][1:2]  # after the order of the blocks
        mask = known.get(blocks[0]) if blocks and not hasattr(blocks[0], "val") else None
        if mask is None:
            notes = (*notes, "its mask is no constant of the program: blocks count whole")
        else:
            full, part = (int((np.asarray(mask) == value).sum()) for value in (2, 1))
            share *= Fraction(2 * full + part, 2 * max(full + part, 1))
    work, again = (int(share * products * whole) for products in (kind.needed, kind.repeated))
    source = "attention's products, executed by its body and grid"
    made = _counted(call, eqn, work, again, body.flops, source=source)
    kernel = dataclasses.replace(made.kernel, kind="attention", head_size=dim, length=max(length, keys))
    return dataclasses.replace(made, kernel=kernel, notes=notes)


def _counted(
    call: KernelCall,
    eqn: Any,
    work: int,
    recompute: int,
    executed: int,
    *,
    source: str,
) -> Counted:
    formats = [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars) if str(v.aval.dtype) in FORMATS]
    floats = [name for name in formats if name != "int8"] or formats  # 8-bit integers beside floats are masks
    kernel = NamedKernel(
        name=call.name,
        operands=call.operands,
        results=call.results,
        flops=executed,
        recompute_flops=min(recompute, executed),
        kind="matmul",
        format=FORMATS[floats[0]] if floats else "fp32",
        source=source,
    )
    return Counted(work=work, recompute=recompute, kernel=kernel)
