from pathlib import Path

from rich.console import Console

from meshwright.report import sweep_text
from meshwright.results import Sweep, SweepRun


def a_run(number, loss, failed="", **values):
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


RUNS = (
    a_run(1, 3.5, learning_rate="1e-4"),
    a_run(2, None, failed="step 4: the loss is nan", learning_rate="1e4"),
    a_run(3, 2.25, learning_rate="1e-3"),
)


def text_of(sweep):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(sweep_text(sweep))
    console.file.close()
    return console.export_text()


def test_the_best_comes_first_and_what_failed_last():
    sweep = a_sweep(*RUNS)
    assert sweep.ranked == (RUNS[2], RUNS[0], RUNS[1])
    assert sweep.best is RUNS[2]
    assert a_sweep(RUNS[1]).best is None


def test_the_table_is_aligned_and_failures_say_why():
    lines = text_of(a_sweep(*RUNS, not_run=2)).splitlines()
    assert lines[0] == "2 finished runs of nano on 1xCPU, 1 not finished, 2 not begun"
    assert lines[2].split() == ["0003", "1e-3", "2.2500", "1.7500", "12.5", "ms", "41K"]
    assert lines[3].split() == ["0001", "1e-4", "3.5000", "3.0000", "12.5", "ms", "41K"]
    assert lines[4].split() == ["0002", "1e4", "-", "-", "-", "-"]
    assert lines[1].index("learning_rate") + len("learning_rate") == lines[2].index("1e-3") + 4
    assert lines[-1].strip() == "learning_rate=1e4: step 4: the loss is nan"


def test_keys_of_one_short_name_are_written_whole():
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
    assert "optimizer.kind" in text_of(a_sweep(run))


def test_as_json_the_runs_are_ranked():
    told = a_sweep(*RUNS).to_dict()
    assert [run["held_out_loss"] for run in told["runs"]] == [2.25, 3.5, None]
    assert told["runs"][2]["failed"] == "step 4: the loss is nan"
    assert told["keys"] == ["optimizer.learning_rate"]
