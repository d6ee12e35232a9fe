"""A weighing waits for the compiler's reports on the optimised program, not for machine code.

No compiler for TPUs is installed where these tests run: a function stands in, which writes reports as libtpu
0.0.42 does (docs/dev/adr/0019).
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from meshwright.worker import Gate, is_steady, optimised, put_assembler

LAST = "module_0000.jit_step.after_optimizations_after_buffer_assignment.txt"


def test_complete_reports_end_the_wait_before_machine_code_is_made(tmp_path: Path) -> None:
    is_over = threading.Event()

    def compile_program() -> str:
        (tmp_path / "module_0000.jit_step.after_optimizations.txt").write_text("HloModule step")
        (tmp_path / LAST).write_text("HloModule step")
        assert is_over.wait(60)
        return "machine code"

    try:
        assert optimised(compile_program, lambda: is_steady(tmp_path, 0.2)) is None
        assert not is_over.is_set()
    finally:
        is_over.set()


def test_a_compiler_without_the_last_report_is_waited_for(tmp_path: Path) -> None:
    def compile_program() -> str:
        (tmp_path / "module_0000.jit_step.after_optimizations.txt").write_text("HloModule step")
        return "machine code"

    assert optimised(compile_program, lambda: is_steady(tmp_path, 0.0)) == "machine code"


def test_an_error_of_the_compiler_is_raised(tmp_path: Path) -> None:
    def compile_program() -> str:
        raise RuntimeError("RESOURCE_EXHAUSTED: 17 GiB of 16 GiB")

    with pytest.raises(RuntimeError, match="17 GiB of 16 GiB"):
        optimised(compile_program, lambda: is_steady(tmp_path))


def test_a_program_that_may_be_refused_late_is_waited_for(tmp_path: Path) -> None:
    """The reports are complete long before the compiler refuses it."""
    asked = threading.Event()

    def compile_program() -> str:
        assert asked.wait(60)
        raise RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")

    def may_fail() -> bool:
        asked.set()
        return True

    with pytest.raises(RuntimeError, match="Shared memory"):
        optimised(compile_program, lambda: True, may_fail)


def test_the_assembler_waits_at_its_gate_until_that_is_opened(tmp_path: Path) -> None:
    put_assembler(tmp_path)
    gate, code = Gate(tmp_path), tmp_path / "code"
    command = [str(tmp_path / "bin/ptxas"), "kernel.ptx", "-o", str(code)]
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=60)
    assert "release" in version.stdout  # it does not wait to say so
    with subprocess.Popen(command) as process:
        waits = tmp_path / "bin/waits"
        while not waits.exists():
            time.sleep(0.01)
        assert not gate.has_kept_waiting()
        os.utime(waits, (0, 0))
        assert gate.has_kept_waiting()
        assert process.poll() is None
        assert not code.exists()
        gate.open()
        assert process.wait(60) == 0
    assert code.read_text() == "no machine code\n"
    assert subprocess.run(command, timeout=60).returncode == 0  # the gate stays open
