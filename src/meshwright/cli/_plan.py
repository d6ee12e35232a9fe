"""Define `meshwright plan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import InputError, nearest_name
from meshwright.units import format_seconds

from ._console import JsonFlag, answer, say_readings
from ._progress import bars
from ._train import EXIT_INTERRUPTED
from ._weigh import (
    EXIT_DOES_NOT_FIT,
    AsOption,
    Config,
    LoraOption,
    PriceOption,
    SetOption,
    TokensOption,
    TokensPerStepOption,
    with_lora,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.results import Plan, PlanProgress

OnOption = Annotated[
    str | None,
    typer.Option("--on", metavar="FLEET", help="64xH100, 16x4xA100-80GB, v5p-512, 8xCPU, or local."),
]
FleetsOption = Annotated[
    str | None,
    typer.Option("--fleets", metavar="A,B,C", help="Compare fleets by time and cost, in place of --on."),
]
MinDevicesFlag = Annotated[
    bool, typer.Option("--min-devices", help="Plan for the smallest fleet that fits, up to --on.")
]
BudgetOption = Annotated[
    float, typer.Option("--budget", metavar="SECONDS", help="Begin no compilation after this time.")
]
TomlOption = Annotated[
    Path | None, typer.Option("--toml", metavar="FILE", help="Write the best as a run that `train` runs.")
]
EmitOption = Annotated[
    str | None,
    typer.Option("--emit", metavar="KIND", help="Write a job file beside --toml: slurm, k8s, skypilot."),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the plan as a page with pictures.")
]
FixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="KNOB=VALUE",
        help="Keep a knob: tensor=8, remat=full; or rest: all that are not named. Repeatable.",
    ),
]
VaryOption = Annotated[
    list[str] | None,
    typer.Option("--vary", metavar="KNOB=V1,V2", help="Try only these values: microbatch=1,2. Repeatable."),
]
TopOption = Annotated[
    int | None, typer.Option("--top", min=1, help="Rows of the ranked table.", show_default="8")
]
CheckFlag = Annotated[bool, typer.Option("--check", help="Exit with status 3 if nothing fits.")]


def plan(
    config: Config,
    on: OnOption = None,
    fleets: FleetsOption = None,
    min_devices: MinDevicesFlag = False,
    fix: FixOption = None,
    vary: VaryOption = None,
    overrides: SetOption = None,
    lora: LoraOption = None,
    as_: AsOption = None,
    budget: BudgetOption = 60.0,
    tokens: TokensOption = None,
    tokens_per_step: TokensPerStepOption = None,
    price: PriceOption = None,
    top: TopOption = None,
    toml: TomlOption = None,
    emit: EmitOption = None,
    html: HtmlOption = None,
    check: CheckFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Search the layouts and settings of a run for the fastest that fits a fleet, by compiling them."""
    if as_ is not None and on != "local":  # the module is traced here, and an attached GPU is not used
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from meshwright import plan as run_plan

    _check_emit(emit, toml)
    common = {"fix": fix or (), "vary": vary or (), "overrides": with_lora(overrides, lora)}
    common |= {"as_": as_, "tokens": tokens, "tokens_per_step": tokens_per_step}
    if fleets is not None:
        _refuse_beside_fleets(on=on, min_devices=min_devices or None, price=price, top=top, toml=toml)
        _compare(config, fleets.split(","), budget, common, html, check=check, as_json=as_json)
        return
    if on is None:
        raise InputError("no fleet is named", hint="--on 64xH100; `meshwright fleets` lists chips")
    say_readings(config, on, None)
    with _progress(f"planning {config} on {on}") as on_event:
        made = run_plan(
            config,
            on=on,
            smallest_fleet=min_devices,
            budget_seconds=budget,
            price_per_device_hour=price,
            on_event=on_event,
            **common,
        )
    if html is not None:
        made.to_html(html)

    def page() -> tuple[RenderableType, ...]:
        from meshwright.report import plan_renderable

        return (plan_renderable(made, top, _more(toml, html, config)),)

    answer(as_json, made.to_dict(), page)
    if toml is not None and made.winner is not None:
        _write_files(made, toml, emit)
    if made.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if check and made.winner is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _write_files(made: Plan, toml: Path, emit: str | None) -> None:
    """Write the winner's run, and the files of a job that trains it.

    They come after the answer: a function has no run to write, and a scheduler may not suit the fleet.
    """
    from meshwright.shown import write_result

    write_result(toml, made.to_toml())
    if emit is not None:
        _write_job(made, emit, toml)


def _refuse_beside_fleets(**given: object) -> None:
    """Raise if an option is given that means one fleet."""
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"--fleets compares fleets, and {option} is of one",
                hint=f"leave {option} out; then plan for the fleet of your choice with --on",
            )


def _compare(
    config: str,
    fleets: list[str],
    budget: float,
    common: dict[str, Any],
    html: Path | None,
    *,
    check: bool,
    as_json: bool,
) -> None:
    """Plan for several fleets and print their comparison."""
    from meshwright import plan_fleets

    for fleet in fleets:
        say_readings(config, fleet, None)
    with _progress(f"planning {config} on {len(fleets)} fleets") as on_event:
        made = plan_fleets(config, on=fleets, budget_seconds=budget, on_event=on_event, **common)
    if html is not None:
        made.to_html(html)

    def page() -> RenderableType:
        from meshwright.report import renderable

        return renderable(made, more=f"One of them in full: meshwright plan {config} --on FLEET")

    answer(as_json, made.to_dict(), page)
    if made.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if check and made.fastest is None:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _check_emit(kind: str | None, toml: Path | None) -> None:
    """Raise, before anything is compiled, if no job file can be written."""
    from meshwright.launch import JOB_KINDS

    if kind is None:
        return
    if kind not in JOB_KINDS:
        raise InputError(f"--emit {kind!r} is not known", hint=nearest_name(kind, JOB_KINDS))
    if toml is None:
        raise InputError("--emit needs the run that the job trains", hint="add --toml FILE")


def _write_job(made: Plan, kind: str, toml: Path) -> None:
    """Write the job file beside the run's file, and say where."""
    from meshwright.launch import JOB_KINDS, job_file
    from meshwright.results import write_result

    name = made.name
    folder = f"runs/{name}" if kind == "slurm" else f"/runs/{name}"
    text = job_file(kind, config_file=str(toml), fleet=made.fleet, name=name, steps=None, folder=folder)
    path = toml.with_suffix(JOB_KINDS[kind])
    write_result(path, text)
    print(f"job file: {path}", file=sys.stderr)


def _more(toml: Path | None, html: Path | None, config: str) -> str:
    """Return what to do with the plan."""
    words = [] if html else ["Pictures: --html FILE."]
    if toml is None and ":" in config:
        return " ".join(words)
    words += (
        [f"Train it: meshwright train {toml}"]
        if toml
        else [f"A file to train it: --toml {Path(config).stem}-plan.toml"]
    )
    return " ".join(words)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[PlanProgress], None]]:
    """Yield a function that shows the search: the best so far and what is being compiled; none in a pipe."""
    if not sys.stderr.isatty():
        yield lambda event: None
        return
    with bars() as progress:
        task = progress.add_task(what, total=None)

        def on_event(event: PlanProgress) -> None:
            words = f"{event.num_compiled} of {event.num_considered:,} compiled"
            if event.best is not None and event.best.step_seconds is not None:
                words += f", best {event.best.layout} {format_seconds(event.best.step_seconds.expected)}"
            shown = min(event.seconds, event.budget_seconds)
            progress.update(task, description=words, completed=shown, total=event.budget_seconds)

        yield on_event
