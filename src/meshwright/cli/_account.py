"""`meshwright account`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._console import JsonFlag, phases, print_json, show


def account(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION",
            help="package.module:function; it takes nothing and returns (module, *inputs) or a dict with "
            "'module', 'inputs', 'optimizer', 'loss', 'autocast'.",
            show_default=False,
        ),
    ],
    as_json: JsonFlag = False,
) -> None:
    """Memory and FLOPs of one eager training step of a PyTorch module on one device, without computing it."""
    from meshwright.eager import account_function

    with phases(f"accounting {function}"):
        found = account_function(function, search_path=(str(Path.cwd()),))
    if as_json:
        print_json(found.to_dict())
    else:
        from meshwright.report import account_text

        show(account_text(found))
