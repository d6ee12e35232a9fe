"""Define `meshwright train`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import MeshwrightError
from meshwright.run_lines import LogEvery
from meshwright.trainer.launch import join, over, place_in

from ._console import SIGNAL_BASE, JsonFlag, complete_config, print_json, say_readings, show
from ._progress import how_to_go_on, progress
from ._weigh_command import (
    LayoutOption,
    LoraOption,
    ReserveOption,
    SetOption,
    with_lora,
    with_reserve,
)

if TYPE_CHECKING:
    from meshwright import Run
    from meshwright.run_lines import Event

OptionalConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="A preset, a TOML file or the folder of a run; with --resume the run's own.",
        show_default=False,
        autocompletion=complete_config,
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
    bool,
    typer.Option(
        "--resume", help="Go on from the newest good checkpoint of a run's folder; begin if it has none."
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="FOLDER", help="Begin with the weights of a Hugging Face model."),
]
DiscardFlag = Annotated[
    bool,
    typer.Option("--discard-steps", help="With --resume: train again steps that no checkpoint was to hold."),
]
LogEveryOption = Annotated[
    str | None,
    typer.Option(
        "--log-every",
        metavar="N|TIME",
        help="Print a line every N steps (50) or once in a time (30s, 5m, 1h).",
        show_default="30s without a terminal, none on one",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="DIR", help="Trace steps 3 to 5 with jax.profiler, for calibrate --trace DIR."
    ),
]
RestartsOption = Annotated[
    int,
    typer.Option(
        "--restarts", min=0, metavar="N", help="Resume it up to N times when it is killed, breaks or hangs."
    ),
]


ReportToOption = Annotated[
    str | None,
    typer.Option(
        "--report-to",
        metavar="A,B",
        help="Trackers that get the run's figures too: trackio, wandb, mlflow, tensorboard.",
        show_default=False,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="What to train on: text, .jsonl, .parquet, token files, or a folder of one of these.",
        show_default="the config's",
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
    data: DataOption = None,
    on: OnOption = "local",
    layout: LayoutOption = None,
    steps: StepsOption = None,
    overrides: SetOption = None,
    lora: LoraOption = None,
    folder: FolderOption = None,
    resume: ResumeFlag = False,
    discard_steps: DiscardFlag = False,
    begin_from: FromOption = None,
    restarts: RestartsOption = 0,
    processes: ProcessesOption = None,
    reserve: ReserveOption = None,
    profile: ProfileOption = None,
    report_to: ReportToOption = None,
    log_every: LogEveryOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the step that `weigh` weighs on real or simulated devices; set predicted beside measured."""
    every, trackers = None if log_every is None else LogEvery.parse(log_every), _trackers_in(report_to)
    if resume and folder is None:
        config, folder = _run_to_resume(config)
    if restarts:
        raise typer.Exit(_clusters().run_with_restarts(restarts, config, folder, begin_from))
    if processes is not None:
        raise typer.Exit(_clusters().run_processes(processes, on))
    on = with_reserve(on, reserve)
    from meshwright import Session
    from meshwright import train as run_train
    from meshwright.compiler import keep_executables

    not_kept, place = keep_executables(), place_in(os.environ)
    is_first = place is None or join(place).is_first  # of several processes only the first prints
    if is_first:
        say_readings(config, on, layout, not_kept)
    stopped = _Stopped(says=is_first)
    shown = progress(config or str(folder), on, every) if is_first else nullcontext(lambda event: None)
    try:
        with shown as on_event:

            def listen(event: Event) -> None:
                stopped.event(event)
                on_event(event)

            given = [*with_lora(overrides, lora), *([] if layout is None else [f"layout={layout}"])]
            begun = {"resume": resume, "discard_steps": discard_steps, "begin_from": begin_from}
            how = {"on": on, "folder": folder, "data": data, "steps": steps, "on_event": listen}
            session = Session(**begun, profile=profile, report_to=trackers)
            run = run_train(config, overrides=given, session=session, **how)
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        stopped.say()
        raise
    over()
    if is_first:
        _print(run, as_json)
    if run.measurement.signal:
        stopped.say()
        raise typer.Exit(SIGNAL_BASE + signal.Signals[run.measurement.signal])
    _check_written(run)


def _clusters() -> Any:
    """Return the room outside the core that starts processes, as a module."""
    from meshwright.registry import room

    return room("clusters")


def _trackers_in(text: str | None) -> tuple[str, ...]:
    """Return the names of trackers.

    Raises:
        InputError: there is no tracker of that name.
    """
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    if names:
        from meshwright.api import check_trackers

        check_trackers(names)
    return names


def _run_to_resume(config: str | None) -> tuple[str | None, Path | None]:
    """Return the configuration and the folder, where the folder of a run may be named as the former."""
    from meshwright.api import named_run

    named, folder = named_run(config, None, True)
    return named if isinstance(named, str) else None, folder


def _check_written(run: Run) -> None:
    if run.not_written:
        files = "; ".join(f"{name}: {why}" for name, why in run.not_written.items())
        raise MeshwrightError(
            f"the run is done, but files of {run.folder} could not be written: {files}",
            hint="make room there, then resume the run: no step is left to train, and its files are written",
        )


def _print(run: Run, as_json: bool) -> None:
    if as_json:
        print_json(run.to_dict())
        return
    from meshwright.report import renderable

    show(renderable(run))
    print(f"Report: {run.folder / 'report.html'}", flush=True)  # on one line, however long


class _Stopped:
    """Track a run's folder and its last step, for the message when the run is stopped.

    Args:
        says: whether this process prints the message.
    """

    def __init__(self, *, says: bool) -> None:
        self._says = says
        self._folder: Path | None = None
        self._step = 0

    def event(self, event: Event) -> None:
        """Record an event."""
        from meshwright.trainer.loop import Finished, Started, StepDone

        if isinstance(event, Started):
            self._folder = event.folder
        elif isinstance(event, StepDone):
            self._step = event.step
        elif isinstance(event, Finished):
            self._step = event.steps

    def say(self) -> None:
        """Print the command that resumes the run, if the run has a folder."""
        if self._says and self._folder is not None:
            words = how_to_go_on(self._folder, self._step)
            print(f"stopped after step {self._step}; {words}", file=sys.stderr)
