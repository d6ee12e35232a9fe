"""Define what a plan can choose from: the candidates of a program on a fleet, and how each is compiled.

Imports: `planning`, `results`. Used by: each kind of program that can be planned, and `api`, which searches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshwright.config import Layout, RunConfig
from meshwright.planning import Search
from meshwright.results import Weighing


class CandidatePrograms(Protocol):
    """The candidates of a plan, each by its row, as programs that can be compiled."""

    @property
    def config(self) -> RunConfig | str:
        """The run, or the name of the function or module."""
        ...

    @property
    def are_alike(self) -> bool:
        """Return whether an input error of the first candidate is most likely one that all would have."""
        ...

    def layout(self, row: int) -> Layout:
        """Return the mesh of a candidate."""
        ...

    def words(self, row: int) -> str:
        """Return everything but the layout in words."""
        ...

    def overrides(self, row: int) -> dict[str, Any]:
        """Return what makes the program this candidate, as `weigh` takes it."""
        ...

    def is_cached(self, row: int) -> bool:
        """Return whether a candidate is known to be compiled already."""
        ...

    def weigh(self, row: int) -> Weighing:
        """Compile a candidate and account for it."""
        ...

    def unrolled(self, row: int) -> dict[str, Any] | None:
        """Return the overrides of a candidate without a loop over its layers; None if it has no such loop."""
        ...

    def weigh_with(self, overrides: Mapping[str, Any]) -> Weighing:
        """Compile the program with other overrides than a candidate's, and account for it."""
        ...

    @property
    def unrolling_seconds(self) -> float:
        """About how long one program without its loop over layers compiles; 0 if there is none to try."""
        ...


@dataclass(kw_only=True)
class Candidates:
    """The candidates of a program on a fleet, before any is compiled.

    Args:
        programs: each candidate as a program that can be compiled.
        search: bounds and estimates of each, and the order in which they are tried.
        num_layouts, num_considered: how many meshes, and candidates, are legal.
        illegal: by rule, how many were left out before.
        knobs: the values of each knob that is not free.
        own: the candidate that the program is as it stands; None if it is none on this fleet.
        simplest: the candidates that a person would try first.
        changes: overrides that follow from the tokens of the run; they change no byte and no FLOP of a step.
        notes: on these changes.
        too_large: the rule that removes a candidate by its bound of memory.
        seconds: that it took to make the program, which the budget of a plan does not count.
    """

    programs: CandidatePrograms
    search: Search
    num_layouts: int
    num_considered: int
    illegal: Mapping[str, int] = field(default_factory=dict[str, int])
    knobs: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    own: int | None = None
    simplest: Sequence[int] = ()
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: tuple[str, ...] = ()
    too_large: str = "state and block inputs alone do not fit"
    seconds: float = 0.0
