"""`meshwright sweep`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import JsonFlag, console, print_json, say_readings, show
from ._progress import bar_state
from ._train import EXIT_INTERRUPTED
from ._weigh import Config, LayoutOption

if TYPE_CHECKING:
    from meshwright.training import Event

EXIT_FAILED = 1
Told = tuple[Callable[[int, int, dict[str, str]], None], Callable[[str], None], Callable[["Event"], None]]


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
    on: Annotated[
        str, typer.Option("--on", metavar="FLEET", help="Attached devices (local) or simulated ones: 8xCPU.")
    ] = "local",
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
    from meshwright import sweep as run_sweep

    say_readings(config, on, layout)
    with _progress(config) as (on_run, on_phase, on_event):
        made = run_sweep(
            config,
            over or (),
            on=on,
            layout=layout,
            steps=steps,
            folder=folder,
            on_run=on_run,
            on_phase=on_phase,
            on_event=on_event,
        )
    if as_json:
        print_json(made.to_dict())
    else:
        from meshwright.report import sweep_text

        show(sweep_text(made))
        print(f"Report: {made.folder / 'report.html'}")
    if made.stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    if made.best is None:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _progress(config: str) -> Iterator[Told]:
    """A bar for the runs, and one for the steps of the run that goes on. Silent in a pipe."""
    if not sys.stderr.isatty():
        yield (lambda number, total, values: None), (lambda phase: None), (lambda event: None)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        runs = progress.add_task(f"sweep of {config}", total=None)
        steps = progress.add_task("", total=None)

        def on_run(number: int, total: int, values: dict[str, str]) -> None:
            told = ", ".join(f"{key}={value}" for key, value in values.items())
            progress.update(
                runs, description=f"run {number} of {total}: {told}", completed=number - 1, total=total
            )
            progress.reset(steps, description="weighing", total=None)

        def on_event(event: Event) -> None:
            changed: dict[str, Any] = bar_state(event)
            progress.update(steps, **changed)

        yield on_run, (lambda phase: progress.update(steps, description=f"weighing: {phase}")), on_event
