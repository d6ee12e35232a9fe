"""Define `meshwright reconcile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import (
    JsonFlag,
    LayoutOption,
    SetOption,
    answer_with,
    phases,
    print_json,
    say_readings,
    show,
)
from meshwright.errors import InputError

if TYPE_CHECKING:
    from ._cause import Gap
    from ._reconcile_verb import Took

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the page: of the gap, or with --history."),
]


def reconcile(
    programs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM",
            help="Folders of runs; or with --on what was run elsewhere, as for `weigh`.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="FLEET", help="The fleet on which it ran: 64xH100, 2xCPU.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            "--trace", metavar="FILE", help="A trace: XPlane, folder, or JSON. One for each host or rank."
        ),
    ] = None,
    measured: Annotated[
        str | None, typer.Option("--measured", metavar="TIME", help="The time of one step: 9.6s, 9600ms.")
    ] = None,
    tokens_per_second: Annotated[
        str | None, typer.Option("--tokens-per-second", metavar="N", help="Of the whole fleet: 1.2M.")
    ] = None,
    layout: LayoutOption = None,
    overrides: SetOption = None,
    history: Annotated[
        bool, typer.Option("--history", help="Show the history of errors of all runs.")
    ] = False,
    cures: Annotated[
        bool,
        typer.Option("--cures", help="Weigh changes that would cure it: at most 4, none begun after 2 min."),
    ] = False,
    html: HtmlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say why a step is slow: predicted beside measured, of a run of ours or of anybody's trace."""
    given = (trace, measured, tokens_per_second)
    is_of_others = on is not None or any(each is not None for each in given)
    if cures and trace is None:
        raise InputError("--cures weighs changes for the causes that a trace tells", hint="add --trace FILE")
    if history:
        if programs or is_of_others:
            raise InputError("--history shows all runs", hint="leave the rest out")
        _history(html, as_json)
        return
    if not programs:
        raise InputError("no run is named", hint="name its folder, or --history for all runs so far")
    if not is_of_others:
        _folders([Path(each) for each in programs], html, as_json)
        return
    if len(programs) > 1:
        raise InputError(f"{len(programs)} programs and one trace", hint="name one program")
    if on is not None:
        say_readings(programs[0], on, layout)
    from ._reconcile_verb import Took

    took = Took(trace=trace, measured=measured, tokens_per_second=tokens_per_second)
    _say(_gap(programs[0], took, cures, on=on, layout=layout, overrides=overrides or ()), html, as_json)


def _gap(program: str, took: Took, cures: bool, **settings: Any) -> Gap:
    from ._reconcile_verb import gap_with

    with phases("reconciling") as on_phase:
        gap = gap_with(program, took, **settings, on_event=lambda event: on_phase(event.name))
        return gap.with_cures(on_event=lambda event: on_phase(event.name)) if cures else gap


def _say(gap: Gap, html: Path | None, as_json: bool) -> None:
    answer_with(gap, as_json, html)


def _folders(runs: list[Path], html: Path | None, as_json: bool) -> None:
    if html is not None:
        raise InputError(
            "--html draws a gap or the history",
            hint="add --trace or --history; a run's own page is its report.html",
        )
    from meshwright.api import history_path

    from ._own_runs import reconciled

    found = {}
    for folder in runs:
        with phases(f"reconciling {folder}") as on_phase:
            found[str(folder)] = reconciled(folder, lambda event: on_phase(event.name))[0]
    if as_json:
        print_json([{"run": run, **json.loads(each.to_json())} for run, each in found.items()])
        return
    from meshwright.report import renderable

    for run, each in found.items():
        typer.echo(run)
        show(renderable(each))
    typer.echo(f"History of errors: {history_path()}")


def _history(html: Path | None, as_json: bool) -> None:
    from ._own_runs import history

    answer_with(history(), as_json, html)
