"""Compile for a TPU until the optimised program is written, and wait for no machine code (docs/dev/adr/0019).

XLA's compiler for TPUs writes its reports on the optimised program, then makes machine code, which takes ten
to a hundred times as long. A weighing reads the reports alone. So the compiler runs in a thread, and the
worker goes on as soon as the reports are complete. The thread ends with the process (`end_after`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAST_REPORT = "*after_optimizations_after_buffer_assignment.txt"
"""The last report that is written before machine code is made."""
STEADY_SECONDS = 1.0  # no report has changed for so long
_POLL_SECONDS = 0.05


def optimised(
    compile_program: Callable[[], Any], reports: Path, steady_seconds: float = STEADY_SECONDS
) -> Any:
    """Return the executable, or None as soon as the reports in a folder are complete, whichever is first.

    A compiler that does not write `LAST_REPORT` is waited for.

    Raises:
        Exception: whatever the compiler raises before its reports are complete.
    """
    results: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(compile_program())
        except BaseException as failed:  # raised again by the caller's thread
            failures.append(failed)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if thread.is_alive() and _is_complete(reports, steady_seconds):
            return None
    if failures:
        raise failures[0]
    return results[0]


def _is_complete(reports: Path, steady_seconds: float) -> bool:
    if not any(reports.glob(LAST_REPORT)):
        return False
    changed = max((path.stat().st_mtime for path in reports.iterdir()), default=0.0)
    return time.time() - changed >= steady_seconds
