"""`meshwright data`: token files from text, and a small set of images."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ._console import Command, JsonFlag, console, print_json, show

data = typer.Typer(help="Make token files from text, or a small set of images.", no_args_is_help=True)


@data.command(
    cls=Command, epilog="Example: meshwright data tokenize book.txt --to book.bin --end-of-document 256"
)
def tokenize(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Text files, a document each; .jsonl and .ndjson: a document per line."
        ),
    ],
    to: Annotated[str, typer.Option(help="The token file to make; what is known of it goes to FILE.json.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, or the path of a Hugging Face tokenizer.json.")
    ] = "bytes",
    dtype: Annotated[str, typer.Option(help="Type of an id: uint16, int32 or uint32.")] = "uint16",
    end_of_document: Annotated[
        str | None,
        typer.Option(
            help="What to put behind each document: 256 with bytes; a token or its id.", show_default=False
        ),
    ] = None,
    text_key: Annotated[str, typer.Option(help="Where a line's object has its text.")] = "text",
    workers: Annotated[
        int | None, typer.Option(help="Processes; one for each core unless told.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tokens of texts, as training reads them. Killed, the same command goes on where it stopped."""
    from meshwright.data import tokenize as make

    with _progress("tokenizing") as on_progress:
        facts = make(
            inputs,
            to,
            tokenizer=tokenizer,
            dtype=dtype,
            end_of_document=end_of_document,
            text_key=text_key,
            workers=os.cpu_count() or 1 if workers is None else workers,
            on_progress=on_progress,
        )
    if as_json:
        print_json(dataclasses.asdict(facts))
        return
    ends = "" if facts.end_of_document is None else f", each ending with {facts.end_of_document}"
    show(
        f"{to}: {facts.num_tokens:,} tokens of {facts.num_documents:,} documents{ends}; {facts.dtype}, "
        f"vocabulary {facts.vocab_size:,}"
    )


@data.command(
    "sample-images", cls=Command, epilog="Example: meshwright data sample-images --to data/fashion-mnist"
)
def sample_images(
    to: Annotated[Path, typer.Option(help="The folder to make; the four files go there.")],
    as_json: JsonFlag = False,
) -> None:
    """A small set of images of ten classes in Fashion-MNIST's files, made by arithmetic."""
    from meshwright.data import write_sample_images

    rows = write_sample_images(to)
    if as_json:
        print_json({"folder": str(to), "rows": rows})
        return
    show(f"{to}: {rows['train']:,} images to train and {rows['held-out']:,} held out; data.folder={to}")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes done on stderr; silent in a pipe."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
