"""Stand in for NVIDIA's assembler, and hold machine code up until a program is known to need it.

XLA starts the assembler once for each kernel. A weighing loads no machine code, so a script stands in
(docs/dev/adr/0010). While a gate is held, the script waits in front of it, and with it XLA's threads: they
would take processors from the work that follows the reports (docs/dev/adr/0021).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SCRIPT = """#!/bin/sh
[ "$1" = --version ] && echo 'Cuda compilation tools, release 13.0, V13.0.0' && exit
[ ! -p "${0%/*}/gate" ] || { : > "${0%/*}/waits"; : < "${0%/*}/gate"; }
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo 'no machine code' > "$2"; shift; done
"""
MOST_SECONDS = 1.0  # for which the script waits before it is plain that no report will follow


def put_assembler(toolkit: Path) -> None:
    """Make a folder that XLA takes for a CUDA toolkit, with the script as its assembler."""
    assembler = toolkit / "bin/ptxas"
    assembler.parent.mkdir(parents=True)
    assembler.write_text(SCRIPT)
    assembler.chmod(0o700)


class Gate:
    """A named pipe that the assembler waits for, until it is opened. What still waits ends with the session.

    Args:
        toolkit: the folder of `put_assembler`.
    """

    def __init__(self, toolkit: Path) -> None:
        self._pipe, self._waits = toolkit / "bin/gate", toolkit / "bin/waits"
        try:
            os.mkfifo(self._pipe)
            self._is_open = False
        except OSError:  # a file system without named pipes: nothing waits
            self._is_open = True

    def open(self) -> None:
        """Let the assembler go on for as long as this process lives, which keeps the pipe open."""
        if not self._is_open:
            os.open(self._pipe, os.O_RDWR)
            self._is_open = True

    def has_kept_waiting(self) -> bool:
        """Return whether the assembler has waited for longer than XLA takes to write a report."""
        return self._waits.exists() and time.time() - self._waits.stat().st_mtime > MOST_SECONDS
