"""`meshwright train`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import JsonFlag, console, print_json, show
from ._weigh import Config, LayoutOption, SetOption

if TYPE_CHECKING:
    from meshwright.api import Run
    from meshwright.training import Event

SCHEMA = 1
EXIT_INTERRUPTED = 130


def train(
    config: Config,
    on: Annotated[
        str, typer.Option("--on", metavar="FLEET", help="Attached devices (local) or simulated ones: 8xCPU.")
    ] = "local",
    layout: LayoutOption = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of this run.", show_default="the config's")
    ] = None,
    overrides: SetOption = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="The run's folder.", show_default="runs/NAME-TIME"),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the step that `weigh` weighs on real or simulated devices; set predicted beside measured."""
    from meshwright import api

    with _progress(config, on) as (on_phase, on_event):
        run = api.train(
            config,
            on=on,
            layout=layout,
            overrides=overrides or (),
            steps=steps,
            folder=folder,
            on_phase=on_phase,
            on_event=on_event,
        )
    if as_json:
        print_json(_answer(run))
    else:
        from meshwright.report import run_text

        show(run_text(run.measurement, run.reconciliation))
        print(f"Report: {run.folder / 'report.html'}")  # on one line, however long
    if run.measurement.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _answer(run: Run) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "folder": str(run.folder),
        "weighing": run.weighing.to_dict(),
        "measurement": json.loads(run.measurement.to_json()),
        "reconciliation": json.loads(run.reconciliation.to_json()),
    }


@contextmanager
def _progress(config: str, on: str) -> Iterator[tuple[Callable[[str], None], Callable[[Event], None]]]:
    """A bar with step, loss, rate and time left; what to tell of phases and of events. Silent in a pipe."""
    if not sys.stderr.isatty():
        yield (lambda phase: None), (lambda event: None)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"weighing {config} on {on}", total=None)

        def on_event(event: Event) -> None:
            progress.update(task, **_state_of(event))

        yield (
            lambda phase: progress.update(task, description=f"weighing {config} on {on}: {phase}"),
            on_event,
        )


def _state_of(event: Event) -> dict[str, Any]:
    """What the progress bar shows after `event`."""
    from meshwright.training import Compiled, Evaluated, Started, StepDone
    from meshwright.units import format_count, format_seconds

    match event:
        case Started():
            return {"description": f"compiling {event.name} for {event.num_devices} x {event.device_kind}"}
        case Compiled():
            return {"description": "first step"}
        case StepDone():
            words = (
                f"step {event.step} of {event.steps}, loss {event.loss:.3f}, "
                f"{format_count(event.tokens_per_second)} tokens/s, {format_seconds(event.seconds_left)} left"
            )
            return {"description": words, "completed": event.step, "total": event.steps}
        case Evaluated():
            return {"description": f"step {event.step}, held-out loss {event.held_out_loss:.3f}"}
        case _:
            return {}
