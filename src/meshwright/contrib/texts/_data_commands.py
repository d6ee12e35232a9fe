"""Define `meshwright data`, which makes token files from text, and a small set of images."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import Command, JsonFlag, Verbs, answer, bar

data = typer.Typer(
    cls=Verbs, help="Make token files from text, or a small set of images.", no_args_is_help=True
)


@data.command(
    cls=Command, epilog="Example: meshwright data tokenize book.txt --to book.bin --end-of-document 256"
)
def tokenize(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Text files, a document each; .jsonl, .ndjson: one per line; .parquet: per row; or folders.",
        ),
    ],
    to: Annotated[str, typer.Option(help="The token file to make; FILE.json describes it.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, or the path of a Hugging Face tokenizer.json.")
    ] = "bytes",
    dtype: Annotated[str, typer.Option(help="Type of the token ids: uint16, int32 or uint32.")] = "uint16",
    end_of_document: Annotated[
        str | None,
        typer.Option(
            help="The token that ends each document, or its id; 256 with bytes.", show_default=False
        ),
    ] = None,
    text_key: Annotated[
        str, typer.Option(help="The key of the text in a JSON line, or the column in Parquet.")
    ] = "text",
    workers: Annotated[
        int | None, typer.Option(help="Number of processes; by default one per core.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a token file from texts. If it is killed, the same command continues where it stopped."""
    from ._tokenize import tokenize as made_tokens  # imports numpy

    with bar("tokenizing", of_bytes=True) as update:
        made = made_tokens(
            inputs,
            to,
            tokenizer=tokenizer,
            dtype=dtype,
            end_of_document=end_of_document,
            text_key=text_key,
            workers=os.cpu_count() or 1 if workers is None else workers,
            on_progress=lambda done, total: update(completed=done, total=total),
        )
    ends = "" if made.end_of_document is None else f", each ending with {made.end_of_document}"
    words = f"{made.num_tokens:,} tokens of {made.num_documents:,} documents{ends}; {made.dtype}, vocabulary"
    answer(as_json, dataclasses.asdict(made), lambda: f"{to}: {words} {made.vocab_size:,}")


@data.command(
    "sample-images", cls=Command, epilog="Example: meshwright data sample-images --to data/fashion-mnist"
)
def sample_images(
    to: Annotated[Path, typer.Option(help="The folder to make; the four files go there.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a small set of images of ten classes in the format of Fashion-MNIST, by arithmetic."""
    from meshwright.contrib.images import write_sample_images

    rows = write_sample_images(to)
    words = f"{rows['train']:,} images to train and {rows['held-out']:,} held out; data.folder={to}"
    answer(as_json, {"folder": str(to), "rows": rows}, lambda: f"{to}: {words}")
