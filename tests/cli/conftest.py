from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
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


@pytest.fixture
def meshwright(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Runs the real command line in this process."""

    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Done(status=int(ended.value.code or 0), output=captured.out, talk=captured.err)

    return run
