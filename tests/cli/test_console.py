from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from meshwright.cli import phases, print_json, show, table

SCRIPT = """
import sys, time
from meshwright.cli._console import phases, print_json
with phases("weighing x") as on_phase:
    on_phase("[compiling]")
    time.sleep(0.3)
print_json({"a": 1})
"""


def test_json_is_all_there_is_and_refuses_what_json_has_not(capsys):
    print_json({"a": [1.5, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"a": float("nan")})


def test_in_a_pipe_phases_say_nothing(capsys):
    with phases("weighing") as on_phase:
        on_phase("compiling")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_on_a_terminal_the_phase_is_shown_and_stdout_stays_clean(environment: dict[str, str]):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(theirs)
        talk = b""
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # Linux says so when the other side is closed
                break
            talk += chunk
        output = process.stdout.read()
    os.close(ours)
    assert json.loads(output) == {"a": 1}
    assert b"weighing x: [compiling]" in talk
    assert (b"\x1b[32m" in talk or b"\x1b[33m" in talk) != bool(environment)  # a coloured spinner or clock


def test_cells_are_text_and_the_first_column_is_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    show(table(("name", "what"), [("all-gather[fsdp]", "words " * 12)], right=("what",)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("all-gather[fsdp]")
    assert max(len(line) for line in lines) <= 40
