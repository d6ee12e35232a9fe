"""`mw.train`: what it writes, what it refuses, and how it goes on with a run."""

import json
import shutil
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.compiler._request import DETERMINISTIC_OPTIONS
from meshwright.errors import InputError, MeshwrightError
from meshwright.training import StepDone

EVERY = ("checkpoint.every_steps=4", "evaluation.every_steps=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> mw.Run:
    folder = tmp_path_factory.mktemp("run") / "linear"
    return mw.train("linear", on="1xCPU", steps=8, folder=folder, overrides=EVERY)


def test_config_and_weighing_are_on_the_disk_with_the_checkpoints_and_the_ledger_in_them(run):
    manifest = json.loads((run.folder / "checkpoints/8/manifest.json").read_text())
    weighed = json.loads((run.folder / "weighing.json").read_text())
    assert manifest["about"]["ledger"] == weighed["ledger"]
    assert manifest["about"]["config"] == json.loads((run.folder / "config.json").read_text())


def test_the_first_steps_are_compared_before_the_run_is_over(tmp_path):
    order: list[str] = []
    mw.train(
        "linear",
        on="1xCPU",
        steps=9,
        folder=tmp_path / "run",
        on_event=lambda event: order.append(type(event).__name__),
        on_first_steps=lambda rows: order.extend(row.quantity for row in rows),
    )
    place = order.index("argument bytes per device")
    assert order[place + 1] == "step seconds"
    assert order[:place].count("StepDone") == 7


def test_a_run_is_resumed_from_its_folder_alone(run):
    longer = mw.train(folder=run.folder, resume=True, on="1xCPU", steps=10)
    assert longer.measurement.resumed_from == 8
    assert list(longer.measurement.losses) == list(range(1, 11))
    assert longer.weighing.config == run.weighing.config


def test_a_batch_by_replica_is_settled_for_the_layout_that_trains(tmp_path):
    over = ["batch.sequences_per_replica=16", "batch.base_sequences=16", "schedule.scale=linear"]
    run = mw.train("linear", on="4xCPU", steps=2, folder=tmp_path / "run", overrides=over)
    assert run.measurement.tokens_per_step == 4 * 16
    config = json.loads((run.folder / "config.json").read_text())
    assert (config["batch"]["sequences"], config["batch"]["sequences_per_replica"]) == (64, None)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("learning_rate") for line in lines]
    assert max(rate for rate in rates if rate) == pytest.approx(
        4 * run.weighing.config.optimizer.learning_rate
    )


def test_a_deterministic_program_is_weighed_as_it_is_run():
    plain, repeats = (
        mw.weigh("linear", on="1xH100", overrides=[f"deterministic={value}"]) for value in ("false", "true")
    )
    assert repeats.compiled.options == {**plain.compiled.options, **DETERMINISTIC_OPTIONS}
    assert repeats.compiled.fingerprint != plain.compiled.fingerprint


def test_the_report_grows_while_the_run_goes_on(tmp_path, monkeypatch):
    from meshwright import _train

    monkeypatch.setattr(_train, "REPORT_SECONDS", 0.0)
    sizes: list[int] = []

    def look(event: object) -> None:
        if isinstance(event, StepDone) and event.step in (3, 7):
            sizes.append((tmp_path / "run/report.html").stat().st_size)

    over = ["evaluation.every_steps=2"]
    mw.train("linear", on="1xCPU", steps=8, folder=tmp_path / "run", overrides=over, on_event=look)
    assert 0 < sizes[0] < sizes[1]


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(InputError, match="no config is named") as error:
        mw.train()
    assert "meshwright presets" in error.value.hint
    with pytest.raises(InputError, match="no run to resume is named") as error:
        mw.train("linear", resume=True)
    assert "--folder" in error.value.hint
    with pytest.raises(InputError, match=r"is no run: config\.json cannot be read"):
        mw.train(folder=tmp_path, resume=True, on="1xCPU")


def test_a_run_that_stops_has_its_report(tmp_path):
    wild = ["optimizer.learning_rate=1e12", "faults.bad_step=stop"]
    with pytest.raises(MeshwrightError, match="training stopped"):
        mw.train("linear", on="1xCPU", folder=tmp_path / "run", overrides=wild)
    assert (tmp_path / "run/report.html").exists()
    assert not (tmp_path / "run/measurement.json").exists()


def test_a_run_that_another_process_writes_is_left_alone(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    holder = Checkpoints(folder / "checkpoints")
    try:
        before = (folder / "config.json").read_bytes()
        with pytest.raises(InputError, match="are being written by process"):
            mw.train(folder=folder, resume=True, on="1xCPU", steps=20, overrides=["faults.bad_step=skip"])
    finally:
        holder.close()
    assert (folder / "config.json").read_bytes() == before


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    folder: Path = tmp_path / "run"
    (folder / "config.json").mkdir(parents=True)
    with pytest.raises(InputError, match=r"cannot write .*config.json: Is a directory"):
        mw.train("linear", on="1xCPU", folder=folder)
