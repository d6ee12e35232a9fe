"""Serve the page of some runs on this machine: read-only, by a random token in the address.

`Guard` answers what is refused, before any of the page's own code runs. Runs are known to a page by hashes of
their folders: no request holds a path.

Imports: `_shelf`, `_watch_page`, starlette, uvicorn. Used by: `_watch_command`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.contrib.runs import Have

from ._shelf import Shelf
from ._watch_page import live_page, text_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
RAW_HEADERS = [(name.encode(), text.encode()) for name, text in HEADERS.items()]
READ_SECONDS = 1.0  # between two looks at the folders, while a page is open
TELL_SECONDS, PING_SECONDS = 0.5, 15.0
MOST_ASKED = 1000  # runs of one request


def new_token() -> str:
    """Return a random token of 192 bits."""
    return secrets.token_urlsafe(24)


class Guard:
    """Refuse what is not the page's own request, and send its headers with each answer.

    403: another token, a name of a host that is not this machine's (a stranger's page may have its own name
    lead here), or the origin of another page. 405: anything but reading. The rest of the path is the page's.
    """

    def __init__(self, app: ASGIApp, token: str, names: tuple[str, ...]) -> None:
        self._app, self._token = app, token.encode()
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket is closed
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *RAW_HEADERS]
            await send(message)

        refused = self._refusal(Request(scope))
        if refused is not None:
            await refused(scope, receive, with_headers)
            return
        _, _, rest = scope["path"].lstrip("/").partition("/")
        inner = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode(), "root_path": ""}
        await self._app(inner, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            words = "This page answers to this machine's own names and addresses only."
            return PlainTextResponse(f"{words}\n", 403)
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return PlainTextResponse("This page does not answer other pages.\n", 403)
        token, slash, _ = request.url.path.lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            words = "The address has another token. `meshwright watch` prints the whole address."
            return PlainTextResponse(f"{words}\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This page is read only.\n", 405, {"allow": "GET, HEAD"})
        if not slash:
            return Response(None, 307, {"location": f"/{token}/"})
        return None

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this machine by an address, or by a name that it has."""
        name, bracket, _ = host.partition("]")
        name = name.lstrip("[") if bracket else host.rpartition(":")[0] or host
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower().rstrip(".") in self._names
        return True


class Watcher:
    """Answers the requests of a page from the runs of a shelf, and reads on while a page is open."""

    def __init__(self, shelf: Shelf, is_over: Callable[[], bool] = lambda: False) -> None:
        self._shelf, self._is_over = shelf, is_over
        self._num_open = 0

    def app(self, token: str, names: tuple[str, ...] = ()) -> ASGIApp:
        """Return the application: all of its paths are below the token."""
        routes = [
            Route("/", self.page),
            Route("/watch.js", _file("watch.js", "text/javascript")),
            Route("/watch.css", _file("watch.css", "text/css")),
            Route("/events", self.events),
            Route("/curves", self.curves),
            Route("/details", self.details),
            Route("/log", self.log),
        ]
        made = Starlette(routes=routes, lifespan=self._reading)
        made.router.redirect_slashes = False  # to a place without the token
        return Guard(made, token, names)

    async def page(self, request: Request) -> Response:
        """Answer with the page, which asks for all that it shows."""
        return Response(live_page(), media_type="text/html")

    async def events(self, request: Request) -> Response:
        """Answer with a stream of events: a message for all runs at first, then for those that change."""
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._messages(request), 200, headers, "text/event-stream")

    async def _messages(self, request: Request) -> AsyncIterator[str]:
        self._num_open += 1
        told: dict[str, int] = {}
        told_sweeps, waited = "", 0.0
        try:
            while not self._is_over():
                rows = await asyncio.to_thread(self._shelf.rows)
                changed = [row for row in rows if told.get(row["id"]) != row["version"]]
                told |= {row["id"]: row["version"] for row in changed}
                sweeps = json.dumps(self._shelf.sweeps())
                waited += TELL_SECONDS
                if changed or sweeps != told_sweeps or not waited - TELL_SECONDS:
                    yield f'data: {{"runs":{json.dumps(changed)},"sweeps":{sweeps}}}\n\n'
                    told_sweeps, waited = sweeps, TELL_SECONDS
                elif waited >= PING_SECONDS:
                    yield ": still here\n\n"
                    waited = TELL_SECONDS
                await asyncio.sleep(TELL_SECONDS)
        finally:
            self._num_open -= 1

    async def curves(self, request: Request) -> Response:
        """Answer with the curves of the runs that are asked for, as far as the page lacks them."""
        asked = request.query_params.getlist("run")[:MOST_ASKED]
        ends = {end: _whole(request.query_params.get(end)) for end in ("low", "high")}
        have = _have(request.query_params.getlist("have"))
        made = await asyncio.to_thread(lambda: self._shelf.curves(asked, **ends, have=have))
        return _json(made)

    async def details(self, request: Request) -> Response:
        """Answer with what the page shows of one run besides curves."""
        run = self._shelf.run(request.query_params.get("run", ""))
        return _nothing() if run is None else _json(await asyncio.to_thread(run.details))

    async def log(self, request: Request) -> Response:
        """Answer with the lines of a run's log from an offset on."""
        run, offset = self._shelf.run(request.query_params.get("run", "")), request.query_params.get("offset")
        return _nothing() if run is None else _json(await asyncio.to_thread(run.log, _whole(offset)))

    @asynccontextmanager
    async def _reading(self, app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        task = asyncio.create_task(self._read())
        yield {}
        task.cancel()

    async def _read(self) -> None:
        while True:
            if self._num_open and not await asyncio.to_thread(self._shelf.read_on):
                await asyncio.to_thread(self._shelf.refresh)
                await asyncio.sleep(READ_SECONDS)
            elif not self._num_open:
                await asyncio.sleep(TELL_SECONDS)


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    return lambda request: Response(text_of(name), media_type=kind)


def _json(fields: object) -> Response:
    return Response(json.dumps(fields, allow_nan=False), media_type="application/json")


def _nothing() -> Response:
    return PlainTextResponse("There is no such run.\n", 404)


def _whole(text: str | None) -> int | None:
    """Return the number that a request holds; None for anything else."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else None


def _have(texts: list[str]) -> dict[str, dict[str, Have]]:
    """Return what a page has, from "RUN:KIND:GENERATION:WIDTH:BUCKETS" of each curve."""
    found: dict[str, dict[str, Have]] = defaultdict(dict)
    for text in texts[: 3 * MOST_ASKED]:
        match text.split(":"):
            case [run, kind, *numbers] if len(numbers) == 3:
                generation, width, count = (_whole(each) for each in numbers)
                if generation is not None and width is not None and count is not None:
                    found[run][kind] = (generation, width, count)
            case _:
                pass
    return found


def serve(shelf: Shelf, *, host: str, port: int, on_start: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `on_start` gets its address.

    Raises:
        OSError: the address cannot be had.
    """
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listening:
        token, number = new_token(), listening.getsockname()[1]
        how = {"log_level": "warning", "timeout_graceful_shutdown": 5, "server_header": False}
        config = uvicorn.Config(lambda: None, lifespan="on", **how)
        server = uvicorn.Server(config)
        names = (host, socket.gethostname(), socket.getfqdn())
        config.app = Watcher(shelf, lambda: server.should_exit).app(token, names)
        on_start(f"http://{_address(host)}:{number}/{token}/")
        server.run(sockets=[listening])


def _address(host: str) -> str:
    """Return the host of the address to open: of a wildcard, the loopback's."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown
