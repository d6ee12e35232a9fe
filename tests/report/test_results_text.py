"""Runs and sweeps on a terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from meshwright.contrib.sweeps import Sweep, SweepRun
from meshwright.measure import Reconciliation, Row
from meshwright.report import row_cells
from meshwright.results import Run

GIB = 2**30
ROWS = (
    Row(quantity="argument bytes", unit="bytes", predicted=2**20, measured=2**20, how="live arrays"),
    Row(quantity="executed FLOPs", unit="FLOP", predicted=3e9, measured=0, how="a count of [nothing]"),
    Row(
        quantity="step seconds",
        unit="seconds",
        predicted=0.012,
        measured=0.016,
        how="the clock",
        low=0.01,
        high=0.014,
    ),
    Row(quantity="MFU", unit="share", predicted=0.5, measured=0.4, how="model FLOPs over the median step"),
)
COMPARED = Reconciliation(
    same_program=True, rows=ROWS, not_compared={"model FLOPs": "nothing sees them alone"}
)
NOTHING = Reconciliation(same_program=True, rows=(), not_compared={})


@pytest.fixture
def run(weighing, measurement):
    """A run whose measurement may be changed."""

    def make(reconciliation: Reconciliation = NOTHING, **changes: object) -> Run:
        made = measurement(**changes)
        return Run(
            folder=Path("r"),
            weighing=weighing(),
            measurement=made,
            reconciliation=reconciliation,
            not_written={},
        )

    return make


def test_a_run_reads_as_agreed(run, golden):
    golden("run.txt", run(COMPARED))


def test_an_interrupted_run_says_so_and_shows_what_it_has(run, text):
    nothing = {"held_out_losses": {}, "step_seconds": None, "sample": "", "sample_prompt": ""}
    made = text(run(signal="SIGINT", steps=1, losses={1: 5.75}, **nothing))
    assert made.startswith("1 steps, interrupted on 1 x cpu\ntraining loss 5.750 at step 1\n")
    assert "What it writes" not in made


def test_a_sample_cannot_command_the_terminal(run, text):
    made = text(run(sample="a\x1b[31mred\x07\r\tb\x9bx"))
    assert not set(made) & {"\x1b", "\x07", "\r", "\t", "\x9b"}
    assert "a�[31mred��    b�x" in made


def test_a_long_sample_is_cut(run, text):
    assert text(run(sample="line\n" * 40)).count("line") == 12


def test_a_program_that_is_not_the_weighed_one_is_said_loudly(run, words):
    assert "NOT THE PROGRAM THAT WAS WEIGHED" in words(run(dataclasses.replace(NOTHING, same_program=False)))
    assert "their fingerprints are equal" in words(run(NOTHING))
    assert "is not known: on a TPU" in words(run(dataclasses.replace(NOTHING, same_program=None)))


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("bytes", "2.00 KiB"),
        ("FLOP", "2.05 kFLOP"),
        ("seconds", "34.1 min"),
        ("share", "204800.0 %"),
        ("tokens per second", "2.05K tokens per second"),
    ],
)
def test_each_unit_is_printed_as_people_write_it(unit: str, expected: str):
    assert (
        row_cells(Row(quantity="q", unit=unit, predicted=2048, measured=1024, how="by hand"))[1] == expected
    )


@pytest.mark.parametrize(("measured", "error"), [(1024, "+100.0 %"), (4096, "-50.0 %"), (0, "")])
def test_the_error_is_signed_and_absent_where_nothing_was_measured(measured: int, error: str):
    row = Row(quantity="q", unit="bytes", predicted=2048, measured=measured, how="by hand")
    assert row_cells(row)[3] == error


def test_an_interval_stands_beside_its_expected_value():
    row = Row(quantity="q", unit="seconds", predicted=2, measured=2, how="by hand", low=1, high=3)
    assert row_cells(row)[1] == "2.00 s (1.00 s to 3.00 s)"


def sweep_run(number, loss, failed="", **values):
    return SweepRun(
        values={f"optimizer.{key}": value for key, value in values.items()},
        folder=Path(f"here/{number:04d}-x"),
        steps=4,
        held_out_loss=loss,
        loss=None if loss is None else loss - 0.5,
        step_seconds=None if loss is None else 0.0125,
        tokens_per_second=None if loss is None else 40_960.0,
        failed=failed,
        earlier=False,
    )


def a_sweep(*runs, not_run=0):
    keys = tuple(runs[0].values)
    return Sweep(
        name="nano", fleet="1xCPU", folder=Path("here"), keys=keys, runs=runs, not_run=not_run, stopped=False
    )


SWEEP_RUNS = (
    sweep_run(1, 3.5, learning_rate="1e-4"),
    sweep_run(2, None, failed="step 4: the loss is nan", learning_rate="1e4"),
    sweep_run(3, 2.25, learning_rate="1e-3"),
)


def test_the_best_comes_first_and_what_failed_last():
    sweep = a_sweep(*SWEEP_RUNS)
    assert sweep.ranked == (SWEEP_RUNS[2], SWEEP_RUNS[0], SWEEP_RUNS[1])
    assert sweep.best is SWEEP_RUNS[2]
    assert a_sweep(SWEEP_RUNS[1]).best is None


def test_the_table_is_aligned_and_failures_say_why(text):
    lines = text(a_sweep(*SWEEP_RUNS, not_run=2)).splitlines()
    assert lines[0] == "2 finished runs of nano on 1xCPU, 1 not finished, 2 not begun"
    assert lines[2].split() == ["0003", "1e-3", "2.2500", "1.7500", "12.5", "ms", "41K"]
    assert lines[3].split() == ["0001", "1e-4", "3.5000", "3.0000", "12.5", "ms", "41K"]
    assert lines[4].split() == ["0002", "1e4", "-", "-", "-", "-"]
    assert lines[1].index("learning_rate") + len("learning_rate") == lines[2].index("1e-3") + 4
    assert lines[-1].strip() == "learning_rate=1e4: step 4: the loss is nan"


def test_keys_of_one_short_name_are_written_whole(text):
    values = {"optimizer.kind": "sgd", "schedule.kind": "constant"}
    run = SweepRun(
        values=values,
        folder=Path("here/0001-x"),
        steps=4,
        held_out_loss=1.0,
        loss=1.0,
        step_seconds=None,
        tokens_per_second=None,
        failed="",
        earlier=False,
    )
    assert "optimizer.kind" in text(a_sweep(run))


def test_as_json_the_runs_are_ranked():
    told = a_sweep(*SWEEP_RUNS).to_dict()
    assert [run["held_out_loss"] for run in told["runs"]] == [2.25, 3.5, None]
    assert told["runs"][2]["failed"] == "step 4: the loss is nan"
    assert told["keys"] == ["optimizer.learning_rate"]
