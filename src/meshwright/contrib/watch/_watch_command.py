"""Define `meshwright watch`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli import JsonFlag, answer
from meshwright.errors import InputError

if TYPE_CHECKING:
    from ._shelf import Shelf

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, or that hold runs; ids, names or tags.",
            show_default="runs/",
        ),
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="A live screen in place of the page; lines in a pipe.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the page as one file, and serve nothing."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="ADDRESS", help="Serve beyond this machine.", show_default=LOOPBACK[0]
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Serve at this port.", show_default="a free one"),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Follow runs while they run: a page in the browser, or a screen of the terminal."""
    from ._shelf import Shelf, folders_of

    served = {"--terminal": terminal, "--host": host is not None, "--port": port is not None}
    unused = [option for option, given in served.items() if given]
    if html is None and not as_json:
        unused = unused if terminal and len(unused) > 1 else []
    if unused:
        chosen = "--html" if html is not None else "--json" if as_json else unused.pop(0)
        raise InputError(f"{chosen} has no use for {' and '.join(unused)}", hint="give one or the other")
    shelf = Shelf(folders_of(runs or []))
    if html is not None:
        _write(shelf, html)
    if as_json:
        answer(True, {"runs": shelf.rows(), "sweeps": shelf.sweeps()}, lambda: "")
    if html is not None or as_json:
        return
    if terminal or (host is None and port is None and not _has_browser()):
        from ._screen import follow

        follow(shelf)
    else:
        _serve(shelf, host or LOOPBACK[0], port or 0, opens=browser and _has_browser())


def _has_browser() -> bool:
    """Return whether a browser can be opened here: over SSH not without a display."""
    return "SSH_CONNECTION" not in os.environ or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))


def _write(shelf: Shelf, html: Path) -> None:
    from meshwright.reportable import write_result

    from ._watch_page import static_page

    if not shelf.runs:
        raise InputError("no run is there to write a page of", hint="name the folder of a run")
    write_result(html, static_page(shelf))
    typer.echo(f"Page: {html}", err=True)


def _serve(shelf: Shelf, host: str, port: int, *, opens: bool) -> None:
    from meshwright.extras import check_installed

    check_installed("watch", ["starlette", "uvicorn"], "the page")
    from ._server import serve

    def say(address: str) -> None:
        if host not in LOOPBACK:
            words = "it is not encrypted, and who has the address or reads the traffic sees these runs"
            typer.echo(f"warning: the page is served beyond this machine, at {host}; {words}", err=True)
        typer.echo(f"Watching {len(shelf.runs)} runs at {address}")
        typer.echo("Ctrl-C ends it; the runs go on.", err=True)
        if opens:
            import webbrowser

            webbrowser.open(address)

    try:
        serve(shelf, host=host, port=port, on_start=say)
    except OSError as refused:
        hint = "choose another --port, or an address of this machine for --host"
        raise InputError(f"cannot serve at {host}, port {port}: {refused.strerror}", hint=hint) from refused
