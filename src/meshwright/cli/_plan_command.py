"""Define `meshwright plan`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import InputError, nearest_name
from meshwright.reportable import check_place

from ._console import JsonFlag, answer, say_readings
from ._plan_progress import end_search, ended_by_signals, plan_progress
from ._train_command import DataOption
from ._weigh_command import (
    AsOption,
    Config,
    LoraOption,
    OperationsOption,
    PriceOption,
    ReserveOption,
    SetOption,
    TokensOption,
    TokensPerStepOption,
    keep_from_gpu,
    with_lora,
    with_operations,
    with_reserve,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.config import RunConfig
    from meshwright.planned import Plan

JOB_KINDS = "meshwright.jobs"  # the group in which rooms outside the core register job files
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
ImageOption = Annotated[
    str | None,
    typer.Option("--image", metavar="NAME", help="The container image with Meshwright, for --emit k8s."),
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


def _page(made: Plan, top: int | None, more: str) -> tuple[RenderableType, ...]:
    from meshwright.report import plan_renderable

    return (plan_renderable(made, top, more),)


@with_operations
def plan(
    config: Config,
    data: DataOption = None,
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
    reserve: ReserveOption = None,
    top: TopOption = None,
    toml: TomlOption = None,
    emit: EmitOption = None,
    image: ImageOption = None,
    html: HtmlOption = None,
    check: CheckFlag = False,
    as_json: JsonFlag = False,
    operations: OperationsOption = None,
) -> None:
    """Search the layouts and settings of a run for the fastest that fits a fleet, by compiling them."""
    _check_files(toml, html, emit, image, on)
    from meshwright import RunLength
    from meshwright.programs import program_named

    keep_from_gpu(as_, on)
    length = RunLength(
        tokens=tokens, tokens_per_step=tokens_per_step, price_per_device_hour=price, operations=operations
    )
    search = _merged(fix or (), vary or ())
    common: dict[str, Any] = {"search": search, "overrides": with_lora(overrides, lora), "run": length}
    program = program_named([config], {"as_": as_})
    on = None if on is None else with_reserve(on, reserve)
    if fleets is not None:
        of_one = {"on": on, "min_devices": min_devices or None, "price": price, "top": top, "data": data}
        several = (with_reserve(each, reserve) for each in fleets.split(","))
        how: dict[str, Any] = {"check": check, "as_json": as_json, "of_one": {**of_one, "toml": toml}}
        _fleets_room().compare(config, program, several, budget, common, html, **how)
        return
    if on is None:
        raise InputError("no fleet is named", hint="--on 64xH100; `meshwright fleets` lists chips")
    say_readings(config, on, None)
    if as_ is None and (data is not None or toml is not None):
        program = _run_to_plan(config, data, common, emit) or program
    with ended_by_signals() as signals, plan_progress(f"planning {config} on {on}") as on_event:
        from meshwright import plan as run_plan

        common |= {"on": on, "smallest_fleet": min_devices}
        made = run_plan(program, budget_seconds=budget, on_event=on_event, **common)
    if html is not None:
        made.to_html(html)

    answer(as_json, made.to_dict(), lambda: _page(made, top, _more(made, toml, html, config)))
    if toml is not None and made.winner is not None:
        _write_files(made, toml, emit, image)
    end_search(made.interrupted, signals, nothing_fits=check and made.winner is None)


def _fleets_room() -> Any:
    from meshwright.registry import room

    return room("fleet_plans")


def _merged(fixed: Sequence[str], varied: Sequence[str]) -> list[str]:
    """Return the search that `--fix` and `--vary` say together.

    Raises:
        InputError: a knob is in both.
    """
    names = {text.partition("=")[0].strip() for text in fixed}
    for text in varied:
        if (name := text.partition("=")[0].strip()) in names:
            raise InputError(f"{name} is fixed and varied", hint=f"name {name} once")
    return [*fixed, *varied]


def _run_to_plan(config: str, data: str | None, common: dict[str, Any], emit: str | None) -> RunConfig | None:
    """Return the configuration that a plan writes, with its data; None for a function.

    It is checked before anything is compiled. Its overrides are then part of it.
    """
    if ":" in config and not Path(config).exists():
        return None
    from meshwright.api import run_to_write

    tokens = common["run"].tokens
    run, notes = run_to_write(config, data, common["overrides"], tokens, for_job=emit is not None)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    common["overrides"] = ()
    return run


def _write_files(made: Plan, toml: Path, emit: str | None, image: str | None) -> None:
    """Write the winner's run, and the files of a job that trains it.

    They come after the answer: a function has no run to write, and a scheduler may not suit the fleet.
    """
    from meshwright.reportable import write_result

    write_result(toml, made.to_toml())
    if emit is not None:
        _write_job(made, emit, toml, image)


def _check_files(
    toml: Path | None, html: Path | None, kind: str | None, image: str | None, on: str | None
) -> None:
    """Raise, before anything is compiled, if a file cannot be written, or nothing could read or run it."""
    from meshwright.registry import registered

    check_place(toml, html)
    if toml is not None and toml.suffix != ".toml":
        what = f"--toml {toml} does not end in .toml, as the file of a run does"
        hint = f"name it {toml.with_suffix('.toml')}; --emit writes the job file beside it"
        raise InputError(what, hint=hint)
    kinds = registered(JOB_KINDS)
    if image is not None and kind != "k8s":
        raise InputError("--image is of a job for Kubernetes", hint="add --emit k8s, or leave it out")
    if kind is None:
        return
    if kind not in kinds:
        raise InputError(f"--emit {kind!r} is not known", hint=nearest_name(kind, kinds))
    if toml is None:
        raise InputError("--emit needs the run that the job trains", hint="add --toml FILE")
    if on is not None:
        from meshwright.programs import fleet_of

        kinds[kind].check_chip(fleet_of(on))


def _write_job(made: Plan, kind: str, toml: Path, image: str | None) -> None:
    """Write the job file beside the run's file, and say where, and what it still needs."""
    from meshwright.registry import registered
    from meshwright.results import write_result

    name = made.name
    folder = f"runs/{name}" if kind == "slurm" else f"/runs/{name}"
    order: dict[str, Any] = {"config_file": str(toml), "fleet": made.fleet, "name": name, "steps": None}
    found = registered(JOB_KINDS)[kind]
    path = toml.with_suffix(found.suffix)
    write_result(path, found.write(**order, folder=folder, image=image))
    print(f"job file: {path}", file=sys.stderr)
    path = getattr(getattr(made.config, "data", None), "path", None)
    if kind != "slurm" and path is not None and not str(path).startswith("/runs/"):
        print(
            f"note: {path} must lie on the volume that is mounted on /runs, under that name", file=sys.stderr
        )
    if kind == "k8s" and image is None:
        print("note: it names no image, as none is published: --image NAME, or edit it", file=sys.stderr)


def _more(made: Plan, toml: Path | None, html: Path | None, config: str) -> str:
    """Return what to do with the plan."""
    words = [] if html else ["Pictures: --html FILE."]
    if made.winner is None:
        words += [] if toml is None else [f"{toml} is not written: nothing was found that fits."]
        return " ".join(words)
    if isinstance(made.config, str):  # a function, which `train` does not run
        return " ".join(words)
    if toml is None:
        return " ".join([*words, f"A file to train it: --toml {Path(config).stem}-plan.toml"])
    from meshwright.config import RunConfig, holds_nothing

    run = made.config
    has_steps = not isinstance(run, RunConfig) or run.steps is not None or "steps" in made.of_tokens
    missing = [] if has_steps else ["--steps 1000"]
    missing += ["--data PATH"] if isinstance(run, RunConfig) and holds_nothing(run) else []
    return " ".join([*words, "Train it:", *(f"meshwright train {toml}", *missing)])
