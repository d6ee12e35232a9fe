"""Where output goes: results to stdout, talk to stderr, colour and progress only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import InputError, MeshwrightError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 100  # columns where no terminal says how wide it is

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else.")]


def console(*, stderr: bool) -> Console:
    """A console for results or for talk, as wide as its terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def show(*parts: RenderableType) -> None:
    """Print results for a person."""
    console(stderr=False).print(*parts, sep="\n")


def print_json(answer: object) -> None:
    """Print results as JSON, and nothing else."""
    print(json.dumps(answer, indent=2, allow_nan=False))


def write_json(path: Path, answer: object) -> None:
    """Write JSON to a file.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(answer, allow_nan=False))
    except OSError as refused:
        hint = "name a file in a folder that exists and can be written"
        raise InputError(f"cannot write {path}: {refused.strerror}", hint=hint) from refused


def print_error(error: MeshwrightError) -> None:
    """What happened and what to do, to stderr."""
    print(f"error: {error.message}", file=sys.stderr)
    print(f"hint: {error.hint}", file=sys.stderr)


@contextmanager
def phases(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the phase and the time it has taken; a function to name the phase. Silent in a pipe."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda phase: progress.update(task, description=f"{what}: {phase}")


def _ignore(phase: str) -> None:
    """Nobody is looking."""


def table(*columns: str, right: Sequence[str] = ()) -> Any:
    """A rich table in the one style of all commands; columns named in `right` hold numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        # The first column names things: broken over lines, a name cannot be copied.
        justify = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=place == 0)
    return made


def row(made: Any, *cells: str, style: str = "") -> None:
    """Add a row whose text is no markup: "[tensor]" stays as it is."""
    from rich.text import Text

    made.add_row(*(Text(cell) for cell in cells), style=style)
