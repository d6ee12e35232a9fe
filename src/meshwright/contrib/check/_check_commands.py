"""Define `meshwright check` and `meshwright diff`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli import JsonFlag, answer_with, phases
from meshwright.errors import InputError
from meshwright.reportable import check_place, write_result

if TYPE_CHECKING:
    from ._check import Check

OnOption = Annotated[str | None, typer.Option("--on", metavar="FLEET", help="The fleet of both sides.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page.")]


def diff(
    before: Annotated[
        str,
        typer.Argument(
            metavar="BEFORE",
            help='"llama3-8b --on 8xH100", a file of weigh --json, a run, @COMMIT, or --with PACKAGE.',
            show_default=False,
        ),
    ],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The other side.", show_default=False)],
    on: OnOption = None,
    layout: Annotated[str | None, typer.Option("--layout", help="The layout of both sides.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key of both sides.")
    ] = None,
    as_json: JsonFlag = False,
    html: HtmlOption = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 if anything moved.")] = False,
) -> None:
    """Compare two weighings: what moved, by how much, and at which line."""
    from ._verbs import diff as run_diff

    check_place(html)
    common: list[str] = []
    for option, value in (("--on", on), ("--layout", layout), *(("--set", text) for text in overrides or ())):
        common += [] if value is None else [option, value]
    with phases("comparing") as on_event:
        made = run_diff(before, after, common=tuple(common), on_event=on_event)
    answer_with(made, as_json, html)
    if check and not made.is_nothing:
        raise typer.Exit(1)


def check(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", metavar="FILE", help="Budgets.", show_default="meshwright.toml, pyproject.toml"
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Check this budget alone. Repeatable.")
    ] = None,
    against: Annotated[
        str, typer.Option("--against", metavar="COMMIT", help="Weigh this commit too, and say what moved.")
    ] = "",
    update: Annotated[
        bool, typer.Option("--update", help="Write the figures of today into the file.")
    ] = False,
    init: Annotated[
        list[str] | None,
        typer.Option("--init", metavar="WORDS", help='Add a budget: --init "llama3-8b --on 8xH100".'),
    ] = None,
    as_json: JsonFlag = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit's XML.")] = None,
    sarif: Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write SARIF.")] = None,
    comment: Annotated[
        Path | None,
        typer.Option("--comment", metavar="FILE", help="Write a comment in Markdown, or nothing."),
    ] = None,
) -> None:
    """Hold weighings to budgets: status 0 within, 1 over, 2 not weighed."""
    from ._check import check as run_check

    check_place(junit, sarif, comment)

    def weigh(path: Path | None, names: Sequence[str], renews: bool) -> Check:
        with phases("checking") as on_event:
            return run_check(path, only=names, against=against, update=renews, on_event=on_event)

    made = _extended(file, init, only or (), update, weigh) if init else weigh(file, only or (), update)
    _write(made, junit, sarif, comment)
    answer_with(made, as_json)
    if made.status:
        raise typer.Exit(made.status)


def _extended(
    file: Path | None,
    init: list[str],
    only: Sequence[str],
    update: bool,
    weigh: Callable[[Path, Sequence[str], bool], Check],
) -> Check:
    """Add budgets with the figures of today, and leave the file as it was if one cannot be weighed.

    Those that the file has keep their figures, unless `update`.
    """
    from ._budgets import FILES, found_file

    file = file or found_file() or Path(FILES[0])
    before = file.read_bytes() if file.is_file() else None
    added = _add(file, init)
    is_weighed = False
    try:
        made = weigh(file, only if update else [*only, *added], True)
        is_weighed = made.status != 2
        return made
    finally:  # Ctrl-C too: a budget without figures guards nothing
        if not is_weighed:
            file.write_bytes(before) if before is not None else file.unlink(missing_ok=True)
            typer.echo(f"nothing was added to {file}: not all of it could be weighed", err=True)


def _add(path: Path, init: list[str]) -> list[str]:
    """Add budgets without figures to a file, which is made if there is none, and return their names."""
    import shlex

    from ._budgets import budget_text, with_new, write_budgets

    text = budget_text(path) if path.exists() else ""
    names: list[str] = []
    for words in init:
        try:
            split = shlex.split(words)
        except ValueError as wrong:
            raise InputError(f"cannot read {words[:80]!r}: {wrong}", hint="close its quotes") from wrong
        if not split:
            raise InputError("--init names nothing to weigh", hint='--init "llama3-8b --on 8xH100"')
        names.append(" ".join(split).replace("--on ", "on "))
        text = with_new(text, names[-1], tuple(split))
    write_budgets(path, text)
    return names


def _write(made: Check, junit: Path | None, sarif: Path | None, comment: Path | None) -> None:
    """Write the files that are asked for, and in a workflow of GitHub its annotations and its summary."""
    from ._outputs import annotations_of, comment_of, junit_of, sarif_of

    for path, text in ((junit, junit_of), (sarif, sarif_of), (comment, comment_of)):
        if path is not None:
            write_result(path, text(made))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        typer.echo(annotations_of(made), err=True, nl=False)
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            try:
                with open(summary, "a", encoding="utf-8") as file:
                    file.write(comment_of(made) or f"{made.line}\n")
            except OSError as refused:  # as in a container that lacks the runner's folder
                typer.echo(f"note: no summary was written to {summary}: {refused.strerror}", err=True)
