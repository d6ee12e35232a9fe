"""A run in a process of its own, begun again where it stopped when that process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from meshwright.children import own_python
from meshwright.errors import EXIT_BROKE_OFF, InputError

from ._progress import own_command_for_children

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_with_restarts(restarts: int, config: str | None, folder: Path | None) -> int:
    """Run this process's command again as a child, at most `restarts` times more; its last exit status.

    A child that was killed, that broke with an error nobody foresaw, or that the watchdog ended is resumed;
    one that ended with words for the user is not: they would be the same again. SIGTERM and Ctrl-C are the
    child's, and end both.

    Raises:
        InputError: neither a config nor a folder is named.
    """
    arguments = without_option(sys.argv[1:], "--restarts")
    if folder is None:
        if config is None:
            raise InputError(
                "no config is named", hint="name a preset or a TOML file; `meshwright presets` lists some"
            )
        name = f"{Path(config).stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        folder = Path("runs") / name
        arguments += ["--folder", str(folder)]
    for left in range(restarts, -1, -1):
        status, asked = _run(own_python("-m", "meshwright", *arguments))
        if asked or not left or not _is_worth_it(status):
            return status if status >= 0 else 128 - status
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        number = restarts - left + 1
        print(f"restart {number} of {restarts}: the run {how}; it is resumed", file=sys.stderr)
        if "--resume" not in arguments:
            arguments.append("--resume")
    raise AssertionError("the last run returns")


def _is_worth_it(status: int) -> bool:
    """Whether a process that ended so may do better the next time."""
    return status < 0 or status == EXIT_BROKE_OFF


def _run(command: list[str]) -> tuple[int, bool]:
    """The child's exit status, and whether a signal has asked for the end meanwhile."""
    child = subprocess.Popen(command, env={**os.environ, **own_command_for_children()})

    def pass_on(number: int) -> None:
        if number == signal.SIGTERM:  # a terminal's Ctrl-C came to both; once is enough for it
            child.send_signal(number)

    with noting_signals(pass_on) as asked:
        return child.wait(), bool(asked)


@contextmanager
def noting_signals(tell: Callable[[int], None]) -> Iterator[list[int]]:
    """The signals that ask for the end, which have come so far; each is told, and ends nothing here."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        tell(number)

    before = {each: signal.signal(each, note) for each in SIGNALS}
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def without_option(arguments: list[str], name: str) -> list[str]:
    """A command line without an option and its value."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == name:
            next(words)
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return kept
