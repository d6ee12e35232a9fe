"""The file to which `calibrate` adds measured runs, when several processes do so at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.hardware import STEP_TIME, Fleet, MeasuredRun
from meshwright.measure import forget_measured_runs, keep_measured_run, measured_runs_for

FLEET = Fleet.parse("8xH100")


def run_of(number: int) -> MeasuredRun:
    return MeasuredRun(
        what=STEP_TIME,
        program=f"step {number}",
        fleet=FLEET.name,
        fingerprint=f"{number:016x}",
        rates="0" * 16,
        date="2026-11-28",
        measured_seconds=1.0 + number,
        predicted_seconds=1.0,
        exposed_seconds={"products": 1.0},
        recomputed_seconds={},
        classes={},
    )


@pytest.mark.parametrize("rounds", range(3))
def test_eight_that_add_a_run_at_once_keep_eight(rounds, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path))
    together = threading.Barrier(8)

    def add(number: int) -> None:
        together.wait()
        keep_measured_run(FLEET, run_of(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    kept = measured_runs_for(FLEET)
    assert kept is not None
    assert {run.program for run in kept.runs} == {f"step {number}" for number in range(8)}
    assert forget_measured_runs(FLEET) == 8
    assert measured_runs_for(FLEET) is None
