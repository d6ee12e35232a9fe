"""Compile until the optimised program is written, and wait for no machine code (docs/dev/adr/0019, 0021).

XLA writes its reports on the optimised program, then makes machine code, which takes as long again for a GPU
and ten to a hundred times as long for a TPU. A weighing reads the reports alone. So the compiler runs in a
thread, and the worker goes on as soon as the reports are complete. The thread ends with the process
(`end_after`).

A program is waited for as long as making machine code of it may fail: it is refused then, as a run of it
would be.

For NVIDIA GPUs XLA starts the assembler once for each kernel, and a script stands in for it
(docs/dev/adr/0010). While a gate is held, the script waits in front of it, and with it XLA's threads: they
would take processors from the work that follows the reports.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

LAST_REPORT = "*after_optimizations_after_buffer_assignment.txt"
"""The last report that the compiler for TPUs writes before it makes machine code."""
STEADY_SECONDS = 1.0  # no report of a TPU's program has changed for so long
_POLL_SECONDS = 0.02

SCRIPT = """#!/bin/sh
[ "$1" = --version ] && echo 'Cuda compilation tools, release 13.0, V13.0.0' && exit
[ ! -p "${0%/*}/gate" ] || { : > "${0%/*}/waits"; : < "${0%/*}/gate"; }
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo 'no machine code' > "$2"; shift; done
"""
MOST_WAITED_SECONDS = 1.0  # for which the script waits before it is plain that no report will follow

# Calls that XLA leaves to libraries, which it does not ask before the program runs. Other calls (kernels of
# Pallas and Triton, the user's own, callbacks) are looked up, built or compiled late.
LIBRARY_CALLS = re.compile(r"__cublas\$|__cudnn\$|AllocateBuffer$")
# Fusions that XLA cuts into tiles by its own rules. Those for matrix products, whose tiles a file of results
# or the user may choose, have longer names.
FUSIONS = {"__triton", "__custom_fusion", "__ynn_fusion"}
# XLA has kernels for these numbers on every GPU and CPU. Others (four bits, rarer eight-bit floats) depend on
# the target.
NUMBERS = {"pred", "token", "opaque", "bf16", "f16", "f32", "f64", "c64", "c128", "f8e4m3fn", "f8e5m2"}
NUMBERS |= {f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)}
_OPERATIONS = """
    abs add all-gather all-reduce all-to-all and async bitcast bitcast-convert broadcast call ceil clamp
    collective-permute compare complex concatenate conditional constant convert copy cosine custom-call divide
    dynamic-slice dynamic-update-slice erf exponential exponential-minus-one floor fusion gather
    get-tuple-element imag iota is-finite log log-plus-one logistic map maximum minimum multiply negate not or
    pad parameter partition-id power real reduce reduce-precision reduce-scatter reduce-window remainder
    replica-id reshape reverse round-nearest-afz round-nearest-even rsqrt scatter select shift-left
    shift-right-arithmetic shift-right-logical sign sine slice sort sqrt subtract tan tanh transpose tuple
    while xor
"""
OPERATIONS = frozenset(_OPERATIONS.split())
ON_CPUS = {"convolution", "dot"}  # for a GPU they are calls of libraries, or kernels with tiles of their own
_OPERATION = re.compile(
    r"^\s+(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([a-z][a-z0-9-]*?)(?:-start|-done)?\(", re.MULTILINE
)
_NUMBER = re.compile(r"(?<=[ (])([a-z]+[0-9]+[a-z0-9]*)\[")
_FUSION = re.compile(r'"kind":"([^"]*)"')
_CALL = re.compile(r'custom_call_target="([^"]*)"')


def optimised(
    compile_program: Callable[[], Any],
    are_complete: Callable[[], bool],
    may_fail: Callable[[], bool] = lambda: False,
) -> Any:
    """Return the executable, or None as soon as the compiler's reports are complete, whichever is first.

    A compiler that never writes them is waited for.

    Args:
        may_fail: whether making machine code may fail, as the complete reports show. Then it is waited for.

    Raises:
        Exception: whatever the compiler raises before the wait is over.
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
        if thread.is_alive() and are_complete():
            if not may_fail():
                return None
            thread.join()
    if failures:
        raise failures[0]
    return results[0]


def is_steady(reports: Path, steady_seconds: float = STEADY_SECONDS) -> bool:
    """Return whether the reports on a TPU's program are complete: the last is there, and none changes."""
    if not any(reports.glob(LAST_REPORT)):
        return False
    changed = max((path.stat().st_mtime for path in reports.iterdir()), default=0.0)
    return time.time() - changed >= steady_seconds


def may_fail_late(program: str, platform: str, compiled: Collection[str] = ()) -> bool:
    """Return whether XLA may still refuse an optimised program while it makes machine code.

    It may where another compiler makes a kernel of the user's (Triton, Mosaic), or one whose tiles a file of
    results chose; where a call is looked up by its name; and where an operation or number format is rare.

    Args:
        compiled: targets of calls that are known to compile.

    >>> may_fail_late('  %a = f32[2] custom-call(%b), custom_call_target="somebodys_kernel"', "cuda")
    True
    """
    known = OPERATIONS | ON_CPUS if platform == "cpu" else OPERATIONS
    return (
        not known.issuperset(_OPERATION.findall(program))
        or not NUMBERS.issuperset(_NUMBER.findall(program))
        or not FUSIONS.issuperset(_FUSION.findall(program))
        or not all(LIBRARY_CALLS.match(call) for call in _CALL.findall(program) if call not in compiled)
    )


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
        return self._waits.exists() and time.time() - self._waits.stat().st_mtime > MOST_WAITED_SECONDS
