"""FLOPs of a traced program, before any compiler: global shapes, without what nothing uses.

Imports jax: only the worker process may import this module.

Dead code is removed first, as XLA does: what no output and no effect needs. What it leaves is counted by
the rules of `_primitives`, loops by their length, `cond` by the branch that costs most,
`platform_dependent` by the target's branch. Inside a scope `needed_A_of_B` (or `busy_...`, `taken_...`, see
`_modules`) the arithmetic counts A/B: causal attention written in blocks says so of itself. Not counted:
elementwise arithmetic, reductions, sorts.
Listed as unpriced, with shapes: every primitive that `_primitives` does not know, among them custom calls,
Pallas kernels, decompositions and solves, Fourier transforms; and `while`, whose length is not known.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from fractions import Fraction
from typing import Any

from jax.extend import core
from jax.interpreters import partial_eval

from ._modules import module_of, shares_of
from ._primitives import FREE, RULES, WALKED, convolution, program_in
from ._record import TracedFlops

PHASES = ("forward", "backward", "recompute", "optimizer", "other")


def count_traced(jaxpr: core.Jaxpr, platform: str) -> TracedFlops:
    """Return the FLOPs of `jaxpr` by phase and module, and list the calls that have no rule.

    Work that remat repeats counts as recomputation where its first run is alive. Where nothing uses the first
    run (the loss itself is rematerialised and its value dropped), the second is the only one and counts as
    forward.

    Args:
        jaxpr: the whole step, with global shapes.
        platform: cuda | tpu | cpu: the one it is compiled for.
    """
    alive, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    counter = _Counter(platform)
    counter.walk(alive, "", Fraction(1))
    if counter.again:
        written = _Counter(platform)
        written.walk(jaxpr, "", Fraction(1))
        counter.call_first_what_is_not_repeated(written)
    counts = {key: flops for key, flops in counter.counts.items() if flops}
    if {phase for phase, _ in counts} == {"other"}:  # nothing was differentiated: all of it is forward
        counts = {("forward", module): flops for (_, module), flops in counts.items()}
    phases, modules = dict[str, Fraction](), dict[str, Fraction]()
    for (phase, module), flops in counts.items():
        _increase(phases, phase, flops)
        if phase != "recompute":
            _increase(modules, module, flops)
    assert all(flops.denominator == 1 for flops in phases.values()), phases
    return TracedFlops(
        by_phase={phase: int(phases.get(phase, 0)) for phase in PHASES},
        unpriced=tuple(f"{what} x{times}" for what, times in sorted(counter.unpriced.items())),
        attention=int(counter.attention),
        by_module={module: int(flops) for module, flops in modules.items()},
        by_phase_and_module={
            phase: {module: int(flops) for (its, module), flops in counts.items() if its == phase}
            for phase in PHASES
            if phase in phases
        },
    )


def phase_of(scopes: str) -> str:
    """Return the phase of an operation by the scopes and transforms it was traced under."""
    if "rematted_computation" in scopes:
        return "recompute"
    if re.search(r"\boptimizer\b", scopes):
        return "optimizer"
    if "transpose(" in scopes:
        return "backward"
    return "forward" if "jvp(" in scopes else "other"


# The line that a product was traced at, its primitive, its module, and whether it is attention's.
_Key = tuple[Any, str, str, bool]


class _Counter:
    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.counts: dict[tuple[str, str], Fraction] = {}  # by phase and module
        self.unpriced: Counter[str] = Counter()
        self.attention: Fraction = Fraction(0)
        # Of what remat runs, the first runs and the repeated ones.
        self.first: dict[_Key, Fraction] = {}
        self.again: dict[_Key, Fraction] = {}

    def walk(self, jaxpr: core.Jaxpr, outer: str, times: Fraction) -> None:
        """Add every equation of `jaxpr`, run `times` times under the scopes `outer`."""
        reversed_kernels = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "rev"}
        for eqn in jaxpr.eqns:
            scopes = f"{outer}/{eqn.source_info.name_stack}"
            name = eqn.primitive.name
            if name == "conv_general_dilated":
                flipped = eqn.invars[1] in reversed_kernels
                self._add(scopes, eqn, _convolution(eqn, scopes, flipped), times)
            elif name in RULES:
                self._add(scopes, eqn, RULES[name](eqn), times)
            elif name == "scan":
                self.walk(eqn.params["jaxpr"].jaxpr, scopes, times * eqn.params["length"])
            elif name == "while":
                self._loop(eqn, scopes, times)
            elif name == "shard_map":  # its shapes are one device's
                manual = eqn.params["newly_manual_axes"]
                ways = math.prod(eqn.params["mesh"].shape[axis] for axis in manual)
                self.walk(eqn.params["jaxpr"], scopes, times * ways)
            elif name == "cond":
                self._branch(eqn, scopes, times)
            elif name in WALKED and (inner := program_in(eqn)) is not None:
                self.walk(inner, scopes, times)
            elif name not in FREE:
                shapes = ", ".join(str(v.aval) for v in eqn.invars)
                self.unpriced[f"{name}({shapes})"] += int(times)

    def call_first_what_is_not_repeated(self, written: _Counter) -> None:
        """Count as forward what is repeated here but whose first run is in `written` alone.

        A line that runs several times, some of its first runs dead, is taken for the one whose repetition
        is alive.
        """
        for key, again in self.again.items():
            dead = written.first.get(key, Fraction(0)) - self.first.get(key, Fraction(0))
            if moved := min(again, dead):
                self.counts["recompute", key[2]] -= moved
                _increase(self.counts, ("forward", key[2]), moved)
                self.attention += moved if key[3] else 0

    def _add(self, scopes: str, eqn: Any, flops: dict[str, int], times: Fraction) -> None:
        name = eqn.primitive.name
        module = module_of(f"{scopes}/{name}")
        for part, amount in flops.items():
            scaled = times * amount
            for share in shares_of(scopes).values():
                scaled *= share
            phase = phase_of(scopes) if part == "work" else part
            _increase(self.counts, (phase, module), scaled)
            of_attention = "attention" in name or ("needed_" in scopes and "attention" in scopes)
            line = (eqn.source_info.traceback, name, module, of_attention)
            if phase in ("forward", "other"):
                _increase(self.first, line, scaled)
            elif phase == "recompute":
                _increase(self.again, line, scaled)
            if of_attention and phase != "recompute":
                self.attention += scaled

    def _loop(self, eqn: Any, scopes: str, times: Fraction) -> None:
        """Add one round of a `while`, and list it."""
        place = scopes.strip("/") or "the step"
        self.unpriced[f"while of unknown length under {place}, counted once"] += 1
        for part in ("cond_jaxpr", "body_jaxpr"):
            self.walk(eqn.params[part].jaxpr, scopes, times)

    def _branch(self, eqn: Any, scopes: str, times: Fraction) -> None:
        """Add the target's branch of `platform_dependent`, else the branch that costs most."""
        branches = eqn.params["branches"]
        for branch, platforms in zip(branches, eqn.params.get("branches_platforms") or (), strict=False):
            if platforms is None or self.platform in platforms:  # the default comes last
                self.walk(branch.jaxpr, scopes, times)
                return
        counters = [_Counter(self.platform) for _ in branches]
        for counter, branch in zip(counters, branches, strict=True):
            counter.walk(branch.jaxpr, scopes, times)
            self.unpriced.update(counter.unpriced)
        costliest = max(counters, key=lambda counter: sum(counter.counts.values()))
        self.attention += costliest.attention
        for mine, theirs in (
            (self.counts, costliest.counts),
            (self.first, costliest.first),
            (self.again, costliest.again),
        ):
            for key, flops in theirs.items():
                _increase(mine, key, flops)


def _convolution(eqn: Any, scopes: str, flipped: bool) -> dict[str, int]:
    return convolution(eqn, gradient=phase_of(scopes) == "backward", flipped=flipped)


def _increase(counts: dict[Any, Fraction], key: Any, flops: Fraction) -> None:
    counts[key] = counts.get(key, Fraction(0)) + flops
