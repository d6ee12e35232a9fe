"""FLOPs of a traced program, before any compiler: global shapes, every multiply-add two.

Imports jax: only the worker process may import this module.

Counted: matmuls, convolutions (multiply-adds that meet neither padding nor dilation holes, as XLA
counts them), cuDNN attention (causal by the needed half), loops by their length, `cond` by the
branch that costs most. Inside a scope `needed_A_of_B` (or `busy_...`, `taken_...`, see `_modules`) the
arithmetic counts A/B: causal attention written in blocks says so of itself. Not counted: elementwise
arithmetic, reductions, sorts.
Listed as unpriced, with shapes: `while` without a known length, custom calls, Pallas kernels, linear
algebra beyond products (decompositions, solves), Fourier transforms.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from jax.extend import core

from ._modules import module_of, shares_of
from ._record import TracedFlops

UNKNOWN = ("pallas_call", "ffi_call", "custom_call", "tpu_custom_call", "pure_callback", "io_callback")
UNKNOWN += (
    "cholesky",
    "eig",
    "eigh",
    "geqrf",
    "householder_product",
    "lu",
    "schur",
    "svd",
    "tridiagonal_solve",
)
UNKNOWN += ("triangular_solve", "custom_linear_solve", "fft")


def count_traced(jaxpr: core.Jaxpr) -> TracedFlops:
    """FLOPs of `jaxpr` by phase, with what has no rule."""
    counter = _Counter()
    counter.walk(jaxpr, "", Fraction(1))
    assert all(value.denominator == 1 for value in counter.by_phase.values()), counter.by_phase
    phases = {phase: int(value) for phase, value in counter.by_phase.items()}
    if set(phases) <= {"other"} and phases:  # nothing was differentiated: all of it is forward
        phases = {"forward": phases["other"]}
    return TracedFlops(
        by_phase={p: phases.get(p, 0) for p in ("forward", "backward", "recompute", "optimizer", "other")},
        unpriced=tuple(f"{what} x{times}" for what, times in sorted(counter.unpriced.items())),
        attention=int(counter.attention),
        by_module={module: int(flops) for module, flops in counter.by_module.items()},
    )


def phase_of(scopes: str) -> str:
    """The phase of an operation from the scopes and transforms it was traced under."""
    if "rematted_computation" in scopes:
        return "recompute"
    if re.search(r"\boptimizer\b", scopes):
        return "optimizer"
    if "transpose(" in scopes:
        return "backward"
    return "forward" if "jvp(" in scopes else "other"


class _Counter:
    def __init__(self) -> None:
        self.by_phase: Counter[str] = Counter()
        self.by_module: Counter[str] = Counter()
        self.unpriced: Counter[str] = Counter()
        self.attention: Fraction = Fraction(0)

    def walk(self, jaxpr: core.Jaxpr, outer: str, times: Fraction) -> None:
        """Add every equation of `jaxpr`, run `times` times under the scopes `outer`."""
        for eqn in jaxpr.eqns:
            scopes = f"{outer}/{eqn.source_info.name_stack}"
            name = eqn.primitive.name
            if name in RULES:
                self._add(scopes, name, RULES[name](eqn), times)
            elif name == "scan":
                self.walk(eqn.params["jaxpr"].jaxpr, scopes, times * eqn.params["length"])
            elif name == "while":
                self.unpriced[
                    f"while of unknown length under {scopes.strip('/') or 'the step'}, counted once"
                ] += 1
                for part in ("cond_jaxpr", "body_jaxpr"):
                    self.walk(eqn.params[part].jaxpr, scopes, times)
            elif name == "shard_map":  # its shapes are one device's
                manual = eqn.params["newly_manual_axes"]
                ways = math.prod(eqn.params["mesh"].shape[axis] for axis in manual)
                self.walk(eqn.params["jaxpr"], scopes, times * ways)
            elif name == "cond":
                self._dearest(eqn, scopes, times)
            elif name in UNKNOWN:
                shapes = ", ".join(str(v.aval) for v in eqn.invars)
                self.unpriced[f"{name}({shapes})"] += int(times)
            else:
                for inner in _inner(eqn):
                    self.walk(inner, scopes, times)

    def _add(self, scopes: str, name: str, flops: dict[str, int], times: Fraction) -> None:
        for part, amount in flops.items():
            scaled = times * amount
            for share in shares_of(scopes).values():
                scaled *= share
            phase = phase_of(scopes) if part == "work" else part
            self.by_phase[phase] += scaled  # type: ignore[assignment]
            if phase != "recompute":
                self.by_module[module_of(f"{scopes}/{name}")] += scaled  # type: ignore[assignment]
            if "attention" in name or ("needed_" in scopes and "attention" in scopes):
                self.attention += scaled if phase != "recompute" else 0

    def _dearest(self, eqn: Any, scopes: str, times: Fraction) -> None:
        counters = []
        for branch in eqn.params["branches"]:
            counter = _Counter()
            counter.walk(branch.jaxpr, scopes, times)
            counters.append(counter)
        dearest = max(counters, key=lambda c: sum(c.by_phase.values()))
        self.by_phase.update(dearest.by_phase)
        self.by_module.update(dearest.by_module)
        self.attention += dearest.attention
        for counter in counters:
            self.unpriced.update(counter.unpriced)


def _inner(eqn: Any) -> Iterator[core.Jaxpr]:
    """The jaxprs that an equation runs once: jit, remat, custom derivatives, shard_map."""
    for key, value in eqn.params.items():
        if key in ("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd"):
            continue
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _dot(eqn: Any) -> dict[str, int]:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return {"work": 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)}


def _convolution(eqn: Any) -> dict[str, int]:
    numbers = eqn.params["dimension_numbers"]
    image, kernel, out = (v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars))
    pairs = 1
    for place, (low, _) in enumerate(eqn.params["padding"]):
        pairs *= _valid_pairs(
            size=image[numbers.lhs_spec[2 + place]],
            window=kernel[numbers.rhs_spec[2 + place]],
            out=out[numbers.out_spec[2 + place]],
            stride=eqn.params["window_strides"][place],
            low=low,
            holes=eqn.params["lhs_dilation"][place],
            spread=eqn.params["rhs_dilation"][place],
        )
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    # The kernel's input features are those of one group already; a batch group sums over its share.
    batch_share = image[numbers.lhs_spec[0]] // eqn.params["batch_group_count"]
    assert batch == batch_share, f"output batch {batch}, expected {batch_share}"
    return {"work": 2 * pairs * batch * features * kernel[numbers.rhs_spec[1]]}


def _valid_pairs(*, size: int, window: int, out: int, stride: int, low: int, holes: int, spread: int) -> int:
    """How many (output, kernel) positions of one dimension meet an element that is really there."""
    last = (size - 1) * holes
    total = 0
    for k in range(window):
        for o in range(out):
            position = o * stride + k * spread - low
            total += 0 <= position <= last and position % holes == 0
    return total


def _ragged_dot(eqn: Any) -> dict[str, int]:
    rows, width = eqn.invars[0].aval.shape
    return {"work": 2 * rows * width * eqn.outvars[0].aval.shape[-1]}


def _scores(eqn: Any) -> int:
    """FLOPs of one of cuDNN attention's matmuls; query [batch, q, heads, head_dim]."""
    query, key = (v.aval.shape for v in eqn.invars[:2])
    heads_first = eqn.params["layout"] == 1  # BNTH
    q_length, heads = (query[2], query[1]) if heads_first else (query[1], query[2])
    k_length = key[2] if heads_first else key[1]
    flops = 2 * query[0] * heads * q_length * k_length * query[3]
    return flops // 2 if "CAUSAL" in str(eqn.params["mask_type"]) else flops


RULES = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "dot_product_attention_fwd_wrapper": lambda eqn: {"work": 2 * _scores(eqn)},
    # Four gradients' matmuls, and the scores once more: the flash kernel does not keep them.
    "dot_product_attention_bwd_wrapper": lambda eqn: {"work": 4 * _scores(eqn), "recompute": _scores(eqn)},
}
