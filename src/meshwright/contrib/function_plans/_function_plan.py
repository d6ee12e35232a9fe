"""List the meshes and arguments that a user's function may have on a fleet, as candidates of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.compiler import RulesFile, declared_by
from meshwright.config import Layout
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import allowance, usable_bytes
from meshwright.planning import Search
from meshwright.programs import Candidates, RunFacts, request_of, weigh_request
from meshwright.results import Weighing

from ._foreign_programs import ForeignPrograms
from ._function_space import FUNCTION_PRIORS, FunctionSpace, function_space


def function_candidates(
    function: str,
    fleet: Fleet,
    search: Mapping[str, Sequence[str]],
    facts: RunFacts,
    rules: RulesFile | None,
) -> Candidates:
    """Return what a plan of a function can choose from: its meshes, and the arguments that it declares.

    Args:
        search: values by mesh axis and argument.
        facts: the tokens of its step, and the steps of the whole run.
        rules: for the kernels of its step.

    Raises:
        InputError: no mesh has the devices of the fleet, or the function cannot be called.
    """
    axes = Layout(axes=(("data", fleet.num_devices),))
    found = declared_by(request_of(function, fleet, axes))
    space = checked_space(function_space(fleet, found.axes or ("data",), found.knobs, search), fleet)
    return Candidates(
        programs=FunctionPrograms(config=function, fleet=fleet, space=space, facts=facts, rules=rules),
        search=Search(space, space.estimates(), room_for(space, fleet), FUNCTION_PRIORS),
        num_layouts=space.num_layouts,
        num_considered=len(space),
        knobs=search,
    )


def checked_space(space: FunctionSpace, fleet: Fleet) -> FunctionSpace:
    """Return a space that has candidates.

    Raises:
        InputError: it has none.
    """
    if not len(space):
        raise InputError(
            f"no mesh of {', '.join(space.axes)} has the {fleet.num_devices} devices of {fleet.name}",
            hint="fix fewer sizes",
        )
    return space


def room_for(space: FunctionSpace, fleet: Fleet) -> NDArray[np.float64]:
    """Return the bytes of one device that each candidate [candidates] may take; infinite if unknown."""
    usable = usable_bytes(fleet)
    others = [sum(allowance(fleet, space.layout(row).axes).values()) for row in range(len(space))]
    return np.full(len(space), np.inf) if usable is None else usable - np.array(others, float)


@dataclass(frozen=True, kw_only=True)
class FunctionPrograms(ForeignPrograms):
    """The candidates of a function of the user's own on a fleet."""

    config: str
    fleet: Fleet
    space: FunctionSpace
    facts: RunFacts
    rules: RulesFile | None

    @property
    def are_alike(self) -> bool:
        """Return False: a function may well refuse the first mesh alone."""
        return False

    def layout(self, row: int) -> Layout:
        """Return the mesh of a candidate."""
        return self.space.layout(row)

    def words(self, row: int) -> str:
        """Return the knobs of a candidate in words."""
        return self.space.words(row)

    def overrides(self, row: int) -> dict[str, Any]:
        """Return mesh and knobs of a candidate."""
        return self.space.overrides(row)

    def weigh(self, row: int) -> Weighing:
        """Trace and compile a candidate, and account for it."""
        knobs = self.space.chosen(row)
        request = request_of(self.config, self.fleet, self.layout(row), knobs=knobs)
        return weigh_request(replace(request, rules=self.rules), self.fleet, None, facts=self.facts)
