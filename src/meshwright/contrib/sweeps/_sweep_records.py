"""Hold the result of a sweep: its runs, and which is the best."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.reportable import Reportable

if TYPE_CHECKING:
    from meshwright.report import Document

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep: its values by key as text, and its results.

    `held_out_loss` (nats) is measured after the last step; `loss` is that of the last step. Both are None if
    the run did not finish, and the former also if it is not finite; `failed` says why. `earlier`: the run
    existed already and was not repeated.
    """

    values: dict[str, str]
    folder: Path
    steps: int
    held_out_loss: float | None
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    failed: str
    earlier: bool

    @property
    def label(self) -> str:
        """Short form of the values: "learning_rate=1e-3, momentum=0.9"."""
        return self.label_of(self.values)

    @staticmethod
    def label_of(values: dict[str, str]) -> str:
        """Return the short form of values by key."""
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Reportable):
    """Runs of one configuration with several values of some `keys`, in the order of execution.

    `stopped`: the user stopped the sweep. `not_run`: the number of runs that had not begun by then.
    `batch_unit`: what a run's `tokens_per_second` counts.
    """

    name: str
    fleet: str
    folder: Path
    keys: tuple[str, ...]
    runs: tuple[SweepRun, ...]
    not_run: int
    stopped: bool
    batch_unit: str = "tokens"

    @property
    def ranked(self) -> tuple[SweepRun, ...]:
        """Runs by held-out loss, the lowest first; then the runs without one, in the order of execution."""
        finished = [run for run in self.runs if run.held_out_loss is not None]
        return (
            *sorted(finished, key=lambda run: run.held_out_loss or 0.0),
            *(run for run in self.runs if run.held_out_loss is None),
        )

    @property
    def best(self) -> SweepRun | None:
        """Run with the lowest held-out loss; None if no run has one."""
        return next((run for run in self.ranked if run.held_out_loss is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `sweep --json` prints, the best run first."""
        return {
            "schema": SCHEMA,
            "config": self.name,
            "fleet": self.fleet,
            "folder": str(self.folder),
            "keys": list(self.keys),
            "not_run": self.not_run,
            "stopped": self.stopped,
            "runs": [{**dataclasses.asdict(run), "folder": str(run.folder)} for run in self.ranked],
        }

    def document(self) -> Document:
        """Return what a terminal shows of it: its runs, the best first."""
        from ._sweep_report import sweep_document

        return sweep_document(self)

    def page_document(self) -> Document:
        """Return its page: its table, and plots from its runs' folders."""
        from ._sweep_report import sweep_page

        return sweep_page(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRunStarted:
    """The event that run `number` (from 1) of a sweep's `total` begins, with its values by key."""

    number: int
    total: int
    values: dict[str, str]
