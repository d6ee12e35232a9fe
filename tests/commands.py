"""The command line in the tests' own process: the real `main`, without the seconds of another interpreter.

A test starts a real process where it is about one: signals, pipes, crashes, what a command imports.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main


@dataclass(frozen=True, kw_only=True)
class Done:
    """What one command did."""

    status: int
    output: str
    talk: str

    @property
    def json(self) -> Any:
        return json.loads(self.output)


def run(*arguments: str, folder: Path | None = None) -> Done:
    """Run `meshwright ARGUMENT ...`, in `folder` if one is given."""
    output, talk = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
        patch.setattr(sys, "argv", ["meshwright", *arguments])
        if folder is not None:
            patch.chdir(folder)
        redirected = contextlib.redirect_stdout(output), contextlib.redirect_stderr(talk)
        with redirected[0], redirected[1], pytest.raises(SystemExit) as ended:
            main()
    return Done(status=int(ended.value.code or 0), output=output.getvalue(), talk=talk.getvalue())
