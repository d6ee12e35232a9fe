"""Define `meshwright sweep`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli import (
    EXIT_INTERRUPTED,
    Config,
    JsonFlag,
    LayoutOption,
    OnOption,
    answer_with,
    bars,
    say,
    say_readings,
)
from meshwright.run_lines import bar_state

if TYPE_CHECKING:
    from meshwright.run_lines import Event

    from ._sweep_records import SweepRunStarted

EXIT_FAILED = 1


def sweep(
    config: Config,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,VALUE",
            help="Values of a key: optimizer.learning_rate=1e-4,1e-3. Repeatable: all combinations are run.",
        ),
    ] = None,
    on: OnOption = "local",
    layout: LayoutOption = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of each run.", show_default="the config's")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="The sweep's folder; finished runs in it are not run again.",
            show_default="runs/sweep-NAME-TIME",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Train with every combination of some values; a table and a picture, the best held-out loss first."""
    from ._sweep import sweep as run_sweep

    say_readings(config, on, layout)
    with _progress(config) as on_event:
        where = {"on": on, "layout": layout, "steps": steps, "folder": folder}
        made = run_sweep(config, over or (), **where, on_event=on_event)
    answer_with(made, as_json)
    if not as_json:
        say(f"Report: {made.folder / 'report.html'}")
    if made.stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    if made.best is None:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _progress(config: str) -> Iterator[Callable[[Event | SweepRunStarted], None]]:
    """Yield a function that shows each event as bars, of the runs and the run's steps; none in a pipe."""
    from ._sweep_records import SweepRunStarted

    if not sys.stderr.isatty():
        yield lambda event: None
        return
    with bars() as progress:
        runs = progress.add_task(f"sweep of {config}", total=None)
        steps = progress.add_task("", total=None)

        def on_event(event: Event | SweepRunStarted) -> None:
            if isinstance(event, SweepRunStarted):
                values = ", ".join(f"{key}={value}" for key, value in event.values.items())
                words = f"run {event.number} of {event.total}: {values}"
                progress.update(runs, description=words, completed=event.number - 1, total=event.total)
                progress.reset(steps, description="weighing", total=None)
            else:
                progress.update(steps, **bar_state(event))

        yield on_event
