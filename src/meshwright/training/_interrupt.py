"""Ctrl-C and SIGTERM while steps run: noted, and obeyed between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def noting_signals() -> Iterator[Callable[[], int | None]]:
    """A function that says which signal has asked to stop, None while none has. A second Ctrl-C stops at
    once; SIGTERM may come often, as schedulers send it.

    Signals belong to the main thread: elsewhere nothing is noted, and who owns the thread decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {each: signal.signal(each, note) for each in SIGNALS}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
