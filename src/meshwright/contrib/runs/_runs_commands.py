"""Define `meshwright runs` with its commands `rm` and `tag`, and `meshwright compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli import Command, JsonFlag, Verbs, answer, answer_with
from meshwright.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ._removal import Removal
    from ._runs_list import Listed

MOST_SHOWN = 25  # rows of a kind, which leave a screen room for what is to know
InOption = Annotated[
    list[Path] | None,
    typer.Option("--in", metavar="DIR", help="Look for runs below this folder too, and remember them."),
]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page.")]
Named = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="Ids or their beginnings, folders, names or tags.", show_default=False
    ),
]

runs = typer.Typer(
    cls=Verbs,
    help="List what was run, weighed and planned, with states, losses and step times against predictions.",
    epilog="Example: meshwright runs --where state=dead --sort -began",
    invoke_without_command=True,
)


@runs.callback()
def listed(
    context: typer.Context,
    places: InOption = None,
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="runs, weighings, plans or all.")
    ] = "runs",
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="FILTER",
            help='state=dead, "loss<3", name~llama, tag=good, optimizer.learning_rate=0.01. Repeatable.',
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option("--sort", metavar="FIELD", help="loss, -tokens, name.", show_default="the newest first"),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Show every row, not one screen.")] = False,
    as_json: JsonFlag = False,
    html: HtmlOption = None,
) -> None:
    """List what was run, weighed and planned, with states, losses and step times against predictions."""
    context.obj = places or []
    if context.invoked_subcommand is not None:
        return
    from ._runs_list import runs as list_runs

    most = None if every else MOST_SHOWN
    made = list_runs(*context.obj, kind=kind, where=where or (), sort=sort, most=most)
    answer_with(made, as_json, html)


@runs.command(cls=Command, epilog="Example: meshwright runs rm r3f9a2c")
def rm(
    context: typer.Context,
    names: Named,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove runs: the files that each wrote, and nothing else in its folder; or weighings and plans."""
    from ._removal import removal_of, remove

    asked = [removal_of(record) for record in _chosen(context, names)]
    for each in asked:
        for line in _removal_words(each):
            typer.echo(line, err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("removing asks first, and nobody is at the terminal", hint="add --yes")
        if not typer.confirm("Remove it?" if len(asked) == 1 else f"Remove these {len(asked)}?", err=True):
            raise typer.Exit(1)
    for each in asked:
        remove(each)
    names_removed = [each.record.id or each.record.name for each in asked]

    def page() -> RenderableType:
        from rich.text import Text

        return Text(f"removed {', '.join(names_removed)}")

    answer(as_json, {"removed": names_removed}, page)


def _removal_words(removal: Removal) -> list[str]:
    """Return what a removal removes, and what it leaves."""
    from meshwright.errors import printable
    from meshwright.units import format_bytes

    from ._run_record import RunRecord

    record = removal.record
    what = f"{record.id or 'no id'} {record.name}"
    if not isinstance(record, RunRecord):
        return [printable(f"{what}: its record")]
    if record.state == "gone":
        return [printable(f"{what}: its record alone, for {record.words}")]
    files = f"{removal.num_files:,} files" if removal.num_files != 1 else "1 file"
    words = f"{what}: {files}, {format_bytes(removal.num_bytes)}, in {record.folder}"
    count = len(record.checkpoints())
    checkpoints = [f"{count} checkpoint{'s' if count != 1 else ''} among them"] if count else []
    stays = f"{len(removal.kept)} other files stay: {', '.join(removal.kept[:5])}" if removal.kept else ""
    return [printable(line) for line in (words, *checkpoints, stays) if line]


@runs.command(cls=Command, epilog="Example: meshwright runs tag r3f9a2c baseline")
def tag(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="RUN", help="An id, a folder, a name.", show_default=False)],
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Words.", show_default=False)],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tags away.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Give tags to a run, a weighing or a plan, by which --where tag=TAG and compare find it."""
    from ._kept_figures import change_tags

    (record,) = _chosen(context, [name])
    now = change_tags(record, () if remove else tags, tags if remove else ())

    def page() -> RenderableType:
        from rich.text import Text

        return Text(f"{record.id or record.name}: {', '.join(now) or 'no tags'}")

    answer(as_json, {"id": record.id, "tags": now}, page)


def _chosen(context: typer.Context, names: list[str]) -> list[Listed]:
    """Return the records that texts name, each once."""
    from ._kept_figures import chosen
    from ._runs_list import runs as list_runs

    records = list_runs(*context.obj, kind="all").records
    found = [chosen(name, records) for name in names]
    return list({id(each): each for each in found}.values())


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="Ids, folders, names or tags of runs, weighings and plans; or files of weigh --json.",
            show_default=False,
        ),
    ],
    places: InOption = None,
    as_json: JsonFlag = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page with curves.")
    ] = None,
) -> None:
    """Put runs, weighings and plans side by side: settings, losses, step time, memory and cost."""
    from ._comparison import compare as run_compare

    made = run_compare(*sides, places=tuple(places or ()))
    answer_with(made, as_json, html)
