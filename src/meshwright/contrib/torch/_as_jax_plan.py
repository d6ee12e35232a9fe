"""List what a plan of a PyTorch module as a JAX program can choose from.

Sizes of `data` and `fsdp`, what is computed again, and loops. The module is exported once, with the inputs of
one device. All candidates then do the same work on the same batch. The bytes of parameters and optimizer
state on a device are known before anything is compiled; of the rest the search learns from compiled
candidates alone, as for a function.

Imports: `_as_jax`, `programs`, `planning`. Used by: `_as_jax`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.config import Layout
from meshwright.contrib.function_plans import (
    FUNCTION_PRIORS,
    ForeignPrograms,
    FunctionSpace,
    checked_space,
    function_space,
    room_for,
)
from meshwright.errors import InputError, nearest_name
from meshwright.hardware import Fleet
from meshwright.planning import Search
from meshwright.programs import (
    Candidates,
    RunFacts,
    Settings,
    request_of,
    step_facts,
)
from meshwright.results import Weighing

from ._as_jax import LOOP, UNROLLED, NamedProgram, exported_module, module_step, weigh_module_program

if TYPE_CHECKING:
    from ._torch_step import TorchStep

AXES = ("data", "fsdp")  # outermost first: gathers stay within hosts
CHECKPOINT, LAYERS = "checkpoint", "layers"
REST_BYTES = 2**30  # of a step's memory beside the state, before anything is compiled


@dataclass(frozen=True, kw_only=True)
class ModulePrograms(ForeignPrograms):
    """The candidates of an exported module on a fleet.

    `facts`: its tokens per step, and steps of the run.
    """

    module: NamedProgram
    fleet: Fleet
    space: FunctionSpace
    facts: RunFacts

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
        chosen = self.space.chosen(row)
        return weigh_module_program(
            self.module,
            self.fleet,
            self.layout(row),
            checkpoint=chosen[CHECKPOINT],
            layers=chosen[LAYERS],
            facts=self.facts,
        )

    def state_bytes(self, row: int) -> int:
        """Return the bytes of one device between steps."""
        return module_step(self.module, self.fleet, self.layout(row)).state_bytes


def module_candidates(
    step: TorchStep, fleet: Fleet, search: Mapping[str, Sequence[str]], settings: Settings
) -> Candidates:
    """Return what a plan of a module can choose from on a fleet.

    Args:
        search: the values that `data`, `fsdp`, `checkpoint` or `layers` may have.

    Raises:
        InputError: as `exported_module`; another knob, or a value that it does not have; or the fleet's
            compiler is not installed.
    """
    started = time.monotonic()
    knobs = (*AXES, CHECKPOINT, LAYERS)
    for name in search:
        if name not in knobs:
            raise InputError(f"a module as a JAX program has no knob {name}", hint=nearest_name(name, knobs))
    whole = Layout(axes=(("fsdp", fleet.num_devices),))
    request_of("a module", fleet, whole)  # is its compiler installed?
    facts = step_facts(settings.run, step.name)
    module = exported_module(step, settings.overrides)
    own = module_step(module, fleet, whole)
    declared = {
        CHECKPOINT: module.program.checkpoints,
        LAYERS: (LOOP, UNROLLED) if own.num_looped else (UNROLLED,),
    }
    space = checked_space(function_space(fleet, AXES, declared, search), fleet)
    programs = ModulePrograms(module=module, fleet=fleet, space=space, facts=facts)
    first = {"layout": str(whole), CHECKPOINT: own.checkpoint, LAYERS: LOOP if own.has_loops else UNROLLED}
    return Candidates(
        programs=programs,
        search=_search(programs),
        num_layouts=space.num_layouts,
        num_considered=len(space),
        knobs=search,
        own=next((row for row in range(len(space)) if programs.overrides(row) == first), None),
        too_large="parameters and optimizer state alone do not fit",
        seconds=time.monotonic() - started,
    )


def _search(programs: ModulePrograms) -> Search:
    """Return the search over a module's candidates, with the bytes of their state as bounds."""
    space = programs.space
    by_layout: dict[str, int] = {}
    for row in range(len(space)):
        layout = str(programs.layout(row))
        by_layout[layout] = by_layout.get(layout) or programs.state_bytes(row)
    state = np.array([by_layout[str(programs.layout(row))] for row in range(len(space))], float)
    estimates = dataclasses.replace(space.estimates(), memory_bound=state, memory=state + REST_BYTES)
    return Search(space, estimates, room_for(space, programs.fleet), FUNCTION_PRIORS)
