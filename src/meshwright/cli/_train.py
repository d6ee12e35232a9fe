"""`meshwright train`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import InputError
from meshwright.processes import join, over, place_in

from ._console import JsonFlag, console, print_json, show
from ._processes import run_processes
from ._restarts import run_with_restarts
from ._weigh import LayoutOption, SetOption

if TYPE_CHECKING:
    from meshwright._train import Run
    from meshwright.reconcile import Row
    from meshwright.training import Event

SCHEMA = 2
SIGNAL_BASE = 128
EXIT_INTERRUPTED = SIGNAL_BASE + signal.SIGINT


OptionalConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG", help="A preset or a TOML file; with --resume the run's own.", show_default=False
    ),
]
OnOption = Annotated[
    str, typer.Option("--on", metavar="FLEET", help="Attached devices (local) or simulated ones: 8xCPU.")
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="Of the whole run.", show_default="the config's")
]
FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", metavar="DIR", help="The run's folder.", show_default="runs/NAME-TIME"),
]
ResumeFlag = Annotated[
    bool, typer.Option("--resume", help="Go on from --folder's newest good checkpoint; begin if it has none.")
]
RestartsOption = Annotated[
    int,
    typer.Option(
        "--restarts", min=0, metavar="N", help="Resume it up to N times when it is killed, breaks or hangs."
    ),
]


ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        metavar="N",
        help="Start N processes on this machine, each with its share of the devices.",
        show_default=False,
    ),
]


def train(
    config: OptionalConfig = None,
    on: OnOption = "local",
    layout: LayoutOption = None,
    steps: StepsOption = None,
    overrides: SetOption = None,
    folder: FolderOption = None,
    resume: ResumeFlag = False,
    restarts: RestartsOption = 0,
    processes: ProcessesOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the step that `weigh` weighs on real or simulated devices; set predicted beside measured."""
    if restarts:
        _check_restarts()
        raise typer.Exit(run_with_restarts(restarts, config, folder))
    if processes is not None:
        raise typer.Exit(run_processes(processes, on))
    from meshwright._train import train as run_train
    from meshwright.compiler import keep_executables

    keep_executables()
    is_first = _joined()
    with _progress(config or str(folder), on, is_first) as (on_phase, on_event, on_first_steps):
        run = run_train(
            config,
            on=on,
            layout=layout,
            overrides=overrides or (),
            steps=steps,
            folder=folder,
            resume=resume,
            on_phase=on_phase,
            on_event=on_event,
            on_first_steps=on_first_steps,
        )
    over()
    if is_first and as_json:
        print_json(_answer(run))
    elif is_first:
        from meshwright.report import run_text

        show(run_text(run.measurement, run.reconciliation))
        print(f"Report: {run.folder / 'report.html'}")  # on one line, however long
    if run.measurement.signal:
        raise typer.Exit(SIGNAL_BASE + signal.Signals[run.measurement.signal])


def _check_restarts() -> None:
    place = place_in(os.environ)
    if place is not None:
        raise InputError(
            f"--restarts in one of the processes that {place.launcher} has started: alone it cannot return",
            hint="leave --restarts out, and let the job file begin all of them again, as those of deploy/ do",
        )


def _joined() -> bool:
    """Join the other processes of the run, where there are some; whether this is the first, or alone."""
    place = place_in(os.environ)
    return place is None or join(place).is_first


def _answer(run: Run) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "folder": str(run.folder),
        "weighing": run.weighing.to_dict(),
        "measurement": json.loads(run.measurement.to_json()),
        "reconciliation": json.loads(run.reconciliation.to_json()),
    }


Told = tuple[Callable[[str], None], Callable[["Event"], None], Callable[["tuple[Row, ...]"], None]]


@contextmanager
def _progress(config: str, on: str, is_first: bool) -> Iterator[Told]:
    """What to tell of phases, events and first steps. Notices and first steps are lines on stderr; on a
    terminal there is also a bar with step, loss, rate and time left. Of several processes the first tells."""
    from meshwright.training import Noticed

    if not is_first:
        yield (lambda phase: None), (lambda event: None), (lambda rows: None)
        return

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    def lines_of(event: Event) -> None:
        if isinstance(event, Noticed):
            say(f"{event.kind}: {event.message}" + (f"\nhint: {event.hint}" if event.hint else ""))

    if not sys.stderr.isatty():
        yield (lambda phase: None), lines_of, (lambda rows: say(_first_steps_line(rows)))
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), words, BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"weighing {config} on {on}", total=None)

        def on_event(event: Event) -> None:
            lines_of(event)
            progress.update(task, **_state_of(event))

        yield (
            lambda phase: progress.update(task, description=f"weighing {config} on {on}: {phase}"),
            on_event,
            (lambda rows: say(_first_steps_line(rows))),
        )


def _first_steps_line(rows: tuple[Row, ...]) -> str:
    """ "first steps: step seconds 1.10 s (predicted 0.9 s, 0.8 to 1.2: inside), ..."."""
    from meshwright.report import row_cells

    parts: list[str] = []
    for row in rows:
        _, predicted, measured, error, _ = row_cells(row)
        where = {True: ", inside the interval", False: ", outside the interval", None: ""}[row.inside]
        parts.append(f"{row.quantity} {measured} (predicted {predicted}, {error}{where})")
    return "first steps: " + "; ".join(parts)


def _state_of(event: Event) -> dict[str, Any]:
    """What the progress bar shows after `event`."""
    from meshwright.training import CheckpointSaved, Compiled, EpochDone, Evaluated, Started, StepDone
    from meshwright.units import format_count, format_seconds

    match event:
        case Started():
            return {"description": f"compiling {event.name} for {event.num_devices} x {event.device_kind}"}
        case Compiled():
            return {"description": "first step"}
        case StepDone():
            more = "".join(f", {name} {value:.3f}" for name, value in event.metrics.items())
            mfu = "" if event.mfu is None else f", MFU {100 * event.mfu:.1f} %"
            words = (
                f"step {event.step} of {event.steps}, loss {event.loss:.3f}{more}, "
                f"{format_count(event.tokens_per_second)} tokens/s{mfu}, "
                f"{format_seconds(event.seconds_left)} left"
            )
            return {"description": words, "completed": event.step, "total": event.steps}
        case Evaluated():
            more = "".join(f", held-out {name} {value:.3f}" for name, value in event.metrics.items())
            return {"description": f"step {event.step}, held-out loss {event.held_out_loss:.3f}{more}"}
        case EpochDone():
            means = "".join(f", {name} {value:.3f}" for name, value in event.metrics.items())
            return {"description": f"epoch {event.epoch} in {format_seconds(event.seconds)}{means}"}
        case CheckpointSaved():
            return {"description": f"checkpoint of step {event.step} saved"}
        case _:
            return {}
