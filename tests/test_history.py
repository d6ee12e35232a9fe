"""The history of errors: what many runs add to it at once, and what a damaged line does."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.api import _history, add_to_history, history_path
from meshwright.contrib.causes import history
from meshwright.measure import PastRow, Reconciliation, Row
from tests import commands

pytestmark = pytest.mark.once  # a file of lines, whatever Python and jax write them
ROW = Row(quantity="step seconds", unit="seconds", predicted=1.0, measured=2.0, how="clock")
COMPARED = Reconciliation(same_program=True, rows=(ROW,), not_compared={})


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))


def add(run: str, steps: int = 3) -> tuple[PastRow, ...]:
    measured: Any = SimpleNamespace(date="2026-11-28T00:00:00+00:00", steps=steps)
    return add_to_history(Path(run), COMPARED, measured, "linear", "1xCPU")


def test_runs_that_end_at_once_are_all_kept_and_each_once():
    together = threading.Barrier(8)

    def end(number: int) -> None:
        together.wait()
        add(f"/runs/{number % 4}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(end, range(8)))
    assert sorted(row.run for row in history().rows) == [f"/runs/{number}" for number in range(4)]
    assert len(history_path().read_text().splitlines()) == 4


def test_the_end_of_a_run_parses_no_line_of_another_run(monkeypatch: pytest.MonkeyPatch):
    add("/runs/a")
    add("/runs/b")
    parsed: list[str] = []
    read = _history.row_in
    monkeypatch.setattr(_history, "row_in", lambda line: (parsed.append(line), read(line))[1])
    add("/runs/b", steps=4)
    assert len(parsed) == 1
    assert '"/runs/b"' in parsed[0]


def test_a_line_that_a_crash_cut_off_spoils_no_later_one():
    add("/runs/a")
    history_path().write_text(history_path().read_text() + '{"date": "20')
    add("/runs/b")
    assert [row.run for row in history().rows] == ["/runs/a", "/runs/b"]


@pytest.mark.parametrize(
    "change",
    [
        {"predicted": 1e308, "measured": 1e-308},
        {"predicted": float("nan")},
        {"measured": float("-inf")},
        {"predicted": 10**400},
        {"steps": "three"},
        {"unit": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_line_of_a_stranger_is_left_out(change: dict[str, Any]):
    (row,) = add("/runs/a")
    with history_path().open("a") as file:
        file.write(json.dumps({**asdict(row), "run": "/runs/b", **change}) + "\n")
        file.write("[" * 100_000 + "\n")
    done = commands.run("reconcile", "--history", "--json")
    assert done.status == 0, done.talk
    assert [each["run"] for each in done.json["rows"]] == ["/runs/a"]


@pytest.mark.parametrize("name", ["measurement.json", "weighing.json", "reconciliation.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "null", '{"schema": 1e999}', "\0"]
)
def test_a_damaged_file_of_a_run_is_named(tmp_path: Path, name: str, text: str):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text(text)
    done = commands.run("reconcile", str(run))
    assert done.status == 2
    assert done.talk.startswith("error: ")
    assert "Traceback" not in done.talk
