"""Define `meshwright calibrate`, which learns from what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import (
    JsonFlag,
    LayoutOption,
    LoraOption,
    SetOption,
    answer_with,
    complete_config,
    phases,
    print_json,
    say,
    say_readings,
    with_lora,
)
from meshwright.errors import InputError

Measured = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="What was run: as for `weigh`. Or the folder of a run, whose measurement is taken.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
FleetOption = Annotated[
    str | None,
    typer.Option("--on", metavar="FLEET", help="The fleet on which it was measured: 64xH100, 2xCPU."),
]
SecondsOption = Annotated[
    str | None, typer.Option("--measured", metavar="TIME", help="The time of one step: 1.31s, 1310ms.")
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="A trace: .xplane.pb, a folder of jax.profiler, or JSON of torch.profiler.",
    ),
]
RunsOption = Annotated[
    Path | None, typer.Option("--runs", metavar="FILE.toml", help="Several measured steps: [[run]] tables.")
]
ForgetFlag = Annotated[bool, typer.Option("--forget", help="Remove all measured steps of the chip of --on.")]


def calibrate(
    config: Measured = None,
    on: FleetOption = None,
    measured: SecondsOption = None,
    trace: TraceOption = None,
    runs: RunsOption = None,
    layout: LayoutOption = None,
    overrides: SetOption = None,
    lora: LoraOption = None,
    forget: ForgetFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Fit predictions to measured steps: a time, a trace, or a run; later predictions use the factors."""
    if forget:
        _forget(config, on, as_json)
        return
    if on is not None:
        say_readings(config, on, layout)
    from ._calibrate import MeasuredStep, measured_steps_in
    from ._calibrate import calibrate as run_calibrate

    if runs is not None:
        given = (config, on, measured, trace, layout, overrides, lora)
        if any(each is not None for each in given):
            raise InputError("--runs names everything in its file", hint="leave the other options out")
        steps = measured_steps_in(runs)
    elif config is None:
        raise InputError(
            "no measured run is named", hint="name its config or its folder, or --runs FILE.toml"
        )
    else:
        changed = with_lora(overrides, lora)
        step = MeasuredStep(config=config, on=on, measured=measured, trace=trace)
        steps = (dataclasses.replace(step, layout=layout, overrides=changed),)
    with phases("calibrating") as on_phase:
        made = run_calibrate(steps, on_event=lambda event: on_phase(event.name))
    answer_with(made, as_json)


def _forget(config: str | None, on: str | None, as_json: bool) -> None:
    from ._calibrate import forget

    if config is not None or on is None:
        raise InputError(
            "--forget removes all measured steps of a chip", hint="name a fleet of it: --on 8xH100"
        )
    number = forget(on)
    if as_json:
        print_json({"schema": 1, "forgotten": number})
    else:
        steps = "1 measured step" if number == 1 else f"{number} measured steps"
        words = "a file that could not be read" if number is None else steps
        say(f"removed {words}: predictions for the chip of {on} use no factors")
