"""Define `meshwright plan`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.errors import InputError, nearest_name
from meshwright.units import format_seconds

from ._console import JsonFlag, answer, say_readings
from ._progress import bars
from ._train import EXIT_INTERRUPTED
from ._weigh import EXIT_DOES_NOT_FIT, Config, PriceOption, SetOption, TokensOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.results import Plan, PlanProgress

FixOption = Annotated[
    list[str] | None,
    typer.Option("--fix", metavar="KNOB=VALUE", help="Keep a knob: tensor=8, remat=full. Repeatable."),
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
    on: Annotated[
        str, typer.Option("--on", metavar="FLEET", help="64xH100, 16x4xA100-80GB, v5p-512, 8xCPU, or local.")
    ],
    fix: FixOption = None,
    vary: VaryOption = None,
    overrides: SetOption = None,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="Begin no compilation after this time.")
    ] = 60.0,
    tokens: TokensOption = None,
    price: PriceOption = None,
    top: TopOption = None,
    toml: Annotated[
        Path | None, typer.Option("--toml", metavar="FILE", help="Write the best as a run that `train` runs.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option("--emit", metavar="KIND", help="Write a job file beside --toml: slurm, k8s, skypilot."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the plan as a page with pictures.")
    ] = None,
    check: CheckFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Search the layouts and settings of a run for the fastest that fits a fleet, by compiling them."""
    from meshwright import plan as run_plan

    _check_emit(emit, toml)
    say_readings(config, on, None)
    with _progress(f"planning {config} on {on}") as on_event:
        made = run_plan(
            config,
            on=on,
            fix=fix or (),
            vary=vary or (),
            overrides=overrides or (),
            budget_seconds=budget,
            tokens=tokens,
            price_per_device_hour=price,
            on_event=on_event,
        )
    if html is not None:
        made.to_html(html)
    if toml is not None and made.winner is not None:
        _write(toml, made.to_toml())

    def page() -> tuple[RenderableType, ...]:
        from meshwright.report import plan_renderable

        return (plan_renderable(made, top, _more(toml, html, config)),)

    answer(as_json, made.to_dict(), page)
    if emit is not None and toml is not None and made.winner is not None:
        _write_job(made, emit, toml)  # after the answer: a scheduler may not suit the fleet
    if made.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if check and made.winner is None:
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

    name = made.config.name
    folder = f"runs/{name}" if kind == "slurm" else f"/runs/{name}"
    text = job_file(kind, config_file=str(toml), fleet=made.fleet, name=name, steps=None, folder=folder)
    path = toml.with_suffix(JOB_KINDS[kind])
    _write(path, text)
    print(f"job file: {path}", file=sys.stderr)


def _more(toml: Path | None, html: Path | None, config: str) -> str:
    """Return what to do with the plan."""
    words = [] if html else ["Pictures: --html FILE."]
    words += (
        [f"Train it: meshwright train {toml}"]
        if toml
        else [f"A file to train it: --toml {Path(config).stem}-plan.toml"]
    )
    return " ".join(words)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as refused:
        hint = "name a file in a folder that exists and can be written"
        raise InputError(f"cannot write {path}: {refused.strerror}", hint=hint) from refused


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
