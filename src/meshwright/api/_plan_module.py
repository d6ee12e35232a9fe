"""Plan a PyTorch module as a JAX program: sizes of `data` and `fsdp`, what is computed again, and loops.

The module is exported once, with the inputs of one device. All candidates then do the same work on the same
batch. The bytes of parameters and optimizer state on a device are known before anything is compiled; of the
rest the search learns from compiled candidates alone, as for a function.

Imports: `_candidates`, `_torch_program`, `planning`. Used by: `_plan`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import Layout
from ..errors import InputError, nearest_name
from ..hardware import Fleet
from ..ledger import allowance, usable_bytes
from ..planned import Plan, PlanProgress
from ..planning import FUNCTION_PRIORS, FunctionSpace, Search, function_space
from ..results import Weighing, ignore
from ._candidates import CandidateRunner, ForeignPrograms, end_of
from ._requests import request_of
from ._torch_program import LOOP, UNROLLED, NamedProgram, module_program, module_step, weigh_module_program
from ._weigh import RunFacts

AXES = ("data", "fsdp")  # outermost first: gathers stay within hosts
CHECKPOINT, LAYERS = "checkpoint", "layers"
REST_BYTES = 2**30  # of a step's memory beside the state, before anything is compiled


@dataclass(frozen=True, kw_only=True)
class ModulePrograms(ForeignPrograms):
    """The candidates of an exported module on a fleet.

    `known`: its tokens per step, and steps of the run.
    """

    module: NamedProgram
    fleet: Fleet
    space: FunctionSpace
    known: RunFacts

    @property
    def config(self) -> str:
        """The module's name."""
        return f"{self.module.name} as a JAX program"

    @property
    def are_alike(self) -> bool:
        """Return True: every candidate runs the same operations."""
        return True

    def layout(self, row: int) -> Layout:
        """Return the mesh of a candidate, without axes of one device."""
        axes = tuple((name, size) for name, size in self.space.layout(row).axes if size > 1)
        return Layout(axes=axes or ((AXES[-1], 1),))

    def words(self, row: int) -> str:
        """Return the knobs of a candidate in words."""
        return self.space.words(row)

    def overrides(self, row: int) -> dict[str, Any]:
        """Return mesh and knobs of a candidate."""
        return {"layout": str(self.layout(row)), **self.space.chosen(row)}

    def weigh(self, row: int) -> Weighing:
        """Trace and compile a candidate, and account for it."""
        how: dict[str, Any] = {**self.space.chosen(row), "known": self.known, "on_event": ignore}
        return weigh_module_program(self.module, self.fleet, self.layout(row), **how)

    def state_bytes(self, row: int) -> int:
        """Return the bytes of one device between steps."""
        return module_step(self.module, self.fleet, self.layout(row)).state_bytes


def plan_module(
    as_: str,
    config: Any,
    given: Mapping[str, Any],
    arguments: Mapping[str, str],
    fleet: Fleet,
    restricted: Mapping[str, Sequence[str]],
    *,
    known: RunFacts,
    budget_seconds: float,
    num_workers: int,
    on_event: Callable[[PlanProgress], None],
) -> Plan:
    """Return the plan of a module as a JAX program. The budget begins when the module is exported.

    Args:
        as_, config, given, arguments: as for `module_program`.
        restricted: the values that `data`, `fsdp`, `checkpoint` or `layers` may have.

    Raises:
        InputError: as `module_program`; another knob, or a value that it does not have; the fleet's compiler
            is not installed; or the error of the first candidate.
    """
    started = time.monotonic()
    knobs = (*AXES, CHECKPOINT, LAYERS)
    for name in restricted:
        if name not in knobs:
            raise InputError(f"a module as a JAX program has no knob {name}", hint=nearest_name(name, knobs))
    request_of("a module", fleet, Layout(axes=(("fsdp", fleet.num_devices),)))  # is its compiler installed?
    module = module_program(as_, config, given, arguments, ignore)
    whole = Layout(axes=(("fsdp", fleet.num_devices),))
    own = module_step(module, fleet, whole)
    declared = {
        CHECKPOINT: module.program.checkpoints,
        LAYERS: (LOOP, UNROLLED) if own.num_looped else (UNROLLED,),
    }
    space = function_space(fleet, AXES, declared, restricted)
    if not len(space):
        raise InputError(
            f"no mesh of data and fsdp has the {fleet.num_devices} devices of {fleet.name}",
            hint="fix fewer sizes",
        )
    programs = ModulePrograms(module=module, fleet=fleet, space=space, known=known)
    now = time.monotonic()
    runner = CandidateRunner(
        programs=programs,
        fleet=fleet,
        search=_search(programs),
        num_layouts=space.num_layouts,
        num_considered=len(space),
        illegal={},
        budget_seconds=budget_seconds,
        started=now,
        ends=end_of(now, budget_seconds),
        on_event=on_event,
        too_large="parameters and optimizer state alone do not fit",
    )
    first = {"layout": str(whole), CHECKPOINT: own.checkpoint, LAYERS: LOOP if own.has_loops else UNROLLED}
    runner.search.prefer(row for row in range(len(space)) if programs.overrides(row) == first)
    made = runner.plan(runner.search_until_done(num_workers))
    return dataclasses.replace(made, seconds=time.monotonic() - started)


def _search(programs: ModulePrograms) -> Search:
    """Return the search over a module's candidates, with the bytes of their state as bounds."""
    space, fleet = programs.space, programs.fleet
    by_layout: dict[str, int] = {}
    for row in range(len(space)):
        layout = str(programs.layout(row))
        by_layout[layout] = by_layout.get(layout) or programs.state_bytes(row)
    state = np.array([by_layout[str(programs.layout(row))] for row in range(len(space))], float)
    estimates = dataclasses.replace(space.estimates(), memory_bound=state, memory=state + REST_BYTES)
    usable = usable_bytes(fleet)
    beside = [sum(allowance(fleet, programs.layout(row).axes).values()) for row in range(len(space))]
    room = np.full(len(space), np.inf) if usable is None else usable - np.array(beside, float)
    return Search(space, estimates, room, FUNCTION_PRIORS)
