"""Make the page of some runs: one that a server keeps alive, or one file that needs no server.

Both have the same script and style, which are files of this package. Imports: `_shelf`. Used by: `_server`,
`_watch_command`.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from ._shelf import Shelf, as_json


@cache
def text_of(name: str) -> str:
    """Return a file of this package."""
    return (Path(__file__).parent / name).read_text("utf-8")


def live_page() -> str:
    """Return the page that a server keeps alive."""
    links = '<link rel="stylesheet" href="watch.css">\n<script type="module" src="watch.js"></script>'
    return text_of("watch.html").replace("<!-- head -->", links)


def static_page(shelf: Shelf) -> str:
    """Return the page of the runs as they are, as one file: its policy allows its own script and style."""
    shelf.refresh()
    shelf.read_whole()
    rows = shelf.rows()
    names = [row["id"] for row in rows]
    data = as_json(
        {
            "runs": rows,
            "sweeps": shelf.sweeps(),
            "curves": shelf.curves(names),
            "details": {run.id: run.details() for run in shelf.runs},
            "log": {run.id: run.log(None) for run in shelf.runs},
        }
    )
    script, style = text_of("watch.js"), text_of("watch.css")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:"
    head = f'<meta http-equiv="content-security-policy" content="{policy}">\n<style>{style}</style>'
    foot = f'<script type="application/json" id="data">{data}</script>'
    foot += f'\n<script type="module">{script}</script>'
    return text_of("watch.html").replace("<!-- head -->", head).replace("<!-- foot -->", foot)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
