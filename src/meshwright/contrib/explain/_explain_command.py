"""Define `meshwright explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import JsonFlag, answer_with


def explain(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A log with an out-of-memory error, a folder of --xla_dump_to, a memory snapshot of "
            "PyTorch, or "
            "a memory profile of JAX.",
            show_default=False,
        ),
    ],
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="FLEET", help="Compare a dump or a profile with these devices."),
    ] = None,
    as_json: JsonFlag = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page.")] = None,
) -> None:
    """Say what ran out of memory, from a log, a dump, a snapshot or a profile."""
    from ._explain_verb import explain_file

    made = explain_file(file, on=on)
    answer_with(made, as_json, html)
