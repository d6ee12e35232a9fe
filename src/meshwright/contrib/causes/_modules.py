"""Divide the seconds of a traced step's kernels among modules, and match these with the weighed program's.

A trace of torch.profiler names the instances of classes ("Layer_3/Linear_7"), the account of a weighed module
its attributes ("layers/*/up") and their classes: both are compared as paths of classes. Programs of JAX have
the caller's scopes on both sides. A wrapper around the module (data parallelism, a compiled module) is
skipped. What belongs to no module is counted, by what is known of it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.eager import EagerAccount
from meshwright.results import Weighing

from ._recorded import Recorded, Work

UPDATE, ASIDE, NOWHERE = "(the update)", "(outside of modules)", "(launched by nothing that is recorded)"
HOLDERS = ("ModuleList", "ModuleDict")  # which are never called, so no trace has them
NUMBER = re.compile(r"(?<![A-Za-z])\d+")
INSTANCE = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """The kernels of one kind of module in a step of one device, without those of modules inside of it.

    Args:
        name: a path of classes or of scopes; in brackets, why kernels belong to no module.
        seconds: of whole kernels, hidden ones too: they do not sum to the step.
        exposed_seconds: of the mean step, in which the device waits for the module's messages.
        num_kernels: in a step.
        flops: that the weighed program has there, forward, backward and again; None where it is not known.
        is_weighed: whether the weighed program has such a module; None if that is not known.
    """

    name: str
    seconds: float
    exposed_seconds: float = 0.0
    num_kernels: float
    flops: int | None = None
    is_weighed: bool | None = None


def module_rows(
    recorded: Recorded, weighing: Weighing, exposed: Mapping[int, float]
) -> tuple[ModuleRow, ...]:
    """Return the modules of a trace, the longest first; none where the trace names no module.

    `exposed`: the seconds of each piece of work, by its `id`, in which it is not hidden.
    """
    if not any(work.scope for work in recorded.work):
        return ()
    known = _weighed_modules(weighing)
    # The ledger of a compiled program names scopes with products alone: others may be there as well.
    names_products = not isinstance(weighing.made_by, EagerAccount) or not known
    steps = len(recorded.steps) / max(1, len({step.rank for step in recorded.steps}))
    share = 1 / max(1.0, steps * len(recorded.devices))
    seconds, kernels = defaultdict[str, float](float), Counter[str]()
    bare = defaultdict[str, float](float)
    for work in recorded.work:
        name = _name(work, recorded.profiler, known)
        seconds[name] += work.seconds * share
        kernels[name] += 1
        bare[name] += exposed.get(id(work), 0.0)
    rows = [
        ModuleRow(
            name=name,
            seconds=seconds[name],
            exposed_seconds=bare[name],
            num_kernels=kernels[name] * share,
            flops=known.get(name),
            is_weighed=True if name in known else None if names_products or name.startswith("(") else False,
        )
        for name in seconds
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _name(work: Work, profiler: str, known: Mapping[str, int]) -> str:
    if work.scope:
        parts = work.scope.split("/")
        if profiler == "jax":
            return NUMBER.sub("*", work.scope)
        parts = [INSTANCE.sub("", part) for part in parts]
        tails = ["/".join(parts[place:]) for place in range(len(parts))]
        return next((tail for tail in tails if tail in known), tails[0])
    if work.phase == "optimizer":
        return UPDATE
    return ASIDE if work.source or work.phase or work.instruction else NOWHERE


def _weighed_modules(weighing: Weighing) -> dict[str, int]:
    """Return the FLOPs of the weighed program's modules, without those inside of them, by name as in rows."""
    account = weighing.made_by
    found = Counter[str]()
    if isinstance(account, EagerAccount):
        kinds = {module.scope: module.kind for module in account.modules}
        own = {module.scope: sum(module.flops_by_phase.values()) for module in account.modules}
        for scope, flops in list(own.items()):
            if scope:
                parent = scope.rpartition("/")[0]
                while parent and parent not in own:
                    parent = parent.rpartition("/")[0]
                if parent in own:
                    own[parent] -= flops
        for scope, flops in own.items():
            parts = scope.split("/") if scope else []
            scopes = ["", *("/".join(parts[: place + 1]) for place in range(len(parts)))]
            classes = [kinds[each] for each in scopes if kinds.get(each) and kinds[each] not in HOLDERS]
            found["/".join(classes)] += max(0, flops)
    elif weighing.figures is not None:
        for module, flops in weighing.figures.flops.by_module.items():  # of all devices
            if module:
                found[NUMBER.sub("*", module)] += flops // weighing.fleet.num_devices
    return dict(found)
