"""What a sweep's runs came to, and how it reads on a terminal: best held-out loss first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.units import format_count, format_seconds

from ._layout import add_row, heading, indented, plain_table

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep: its values by key as text, and what came of it.

    `held_out_loss` (nats): after the last step; `loss`: of the last step. Both are None where the run was not
    finished, and `failed` says why. `earlier`: it was there already, and was not run again.
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
        """Its values in short: "learning_rate=1e-3, momentum=0.9"."""
        return self.label_of(self.values)

    @staticmethod
    def label_of(values: dict[str, str]) -> str:
        """Values by key in short."""
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Runs of one configuration with several values of some `keys`, in the order in which they were run.

    `stopped`: by the user; `not_run`: how many were then not begun.
    """

    name: str
    fleet: str
    folder: Path
    keys: tuple[str, ...]
    runs: tuple[SweepRun, ...]
    not_run: int
    stopped: bool

    @property
    def ranked(self) -> tuple[SweepRun, ...]:
        """The best held-out loss first; then those that have none, in the order in which they were run."""
        finished = [run for run in self.runs if run.held_out_loss is not None]
        return (
            *sorted(finished, key=lambda run: run.held_out_loss or 0.0),
            *(run for run in self.runs if run.held_out_loss is None),
        )

    @property
    def best(self) -> SweepRun | None:
        """The run with the lowest held-out loss; None where none was finished."""
        return next((run for run in self.ranked if run.held_out_loss is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """As `sweep --json` prints it, the best run first."""
        return {
            "schema": SCHEMA,
            "config": self.name,
            "fleet": self.fleet,
            "folder": str(self.folder),
            "keys": list(self.keys),
            "not_run": self.not_run,
            "stopped": self.stopped,
            "runs": [
                {
                    "values": run.values,
                    "folder": str(run.folder),
                    "steps": run.steps,
                    "held_out_loss": run.held_out_loss,
                    "loss": run.loss,
                    "step_seconds": run.step_seconds,
                    "tokens_per_second": run.tokens_per_second,
                    "failed": run.failed,
                    "earlier": run.earlier,
                }
                for run in self.ranked
            ],
        }


COLUMNS = ("held-out loss", "training loss", "step", "tokens/s")


def number_of(run: SweepRun) -> str:
    """The number that its folder's name begins with."""
    return run.folder.name.partition("-")[0]


def cells(run: SweepRun) -> tuple[str, str, str, str]:
    """A run's figures as text, in the order of `COLUMNS`."""
    return (
        "-" if run.held_out_loss is None else f"{run.held_out_loss:.4f}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.step_seconds is None else format_seconds(run.step_seconds),
        "-" if run.tokens_per_second is None else format_count(run.tokens_per_second),
    )


def sweep_title(sweep: Sweep) -> str:
    """How many runs of what there were."""
    finished = sum(run.held_out_loss is not None for run in sweep.runs)
    title = f"{finished} finished run{'s' if finished != 1 else ''} of {sweep.name} on {sweep.fleet}"
    failed = len(sweep.runs) - finished
    title += f", {failed} not finished" if failed else ""
    return title + (f", {sweep.not_run} not begun" if sweep.not_run else "")


def sweep_text(sweep: Sweep) -> RenderableType:
    """A row for each run, the best first; below them why runs failed."""
    short = [key.rpartition(".")[2] for key in sweep.keys]
    names = short if len(set(short)) == len(short) else list(sweep.keys)
    table = plain_table("run", *names, *COLUMNS, right=(*names, *COLUMNS))
    for column in table.columns[: len(names) + 1]:
        column.no_wrap = True
    failed: list[Text] = []
    for run in sweep.ranked:
        style = "bold" if run is sweep.best else "" if run.held_out_loss is not None else "dim"
        add_row(table, number_of(run), *run.values.values(), *cells(run), style=style)
        if run.failed:
            failed.append(Text(f"{run.label}: {run.failed}"))
    parts: list[RenderableType] = [heading(sweep_title(sweep)), indented(table)]
    if failed:
        parts += [heading("Not finished"), *(indented(line) for line in failed)]
    return Group(*parts)
