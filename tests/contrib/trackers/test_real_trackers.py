"""What the real libraries keep of a run, read back by their own readers; nothing leaves this machine.

Their libraries are in no lock of the tests: `pip install -e '.[wandb,mlflow,trackio]' tensorboard` in an
environment of your own, then `pytest -m wide tests/contrib/trackers`.
"""

from __future__ import annotations

import json
import struct

import pytest

import meshwright as mw
from meshwright.contrib.trackers._reporting import figures_of
from meshwright.trainer.loop import StepDone

pytestmark = pytest.mark.wide
STEPS = 12


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that trains and goes on with a run, reported to one tracker.

    It returns the run, its number, and each figure that was reported, by name and step.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.api._train.REPORT_SECONDS", 0.0)  # an estimate of the finish at each step
    monkeypatch.setattr("meshwright.api._train._draw", lambda held, **_: None)
    monkeypatch.setattr("meshwright.contrib.trackers._reporting.END_SECONDS", 600.0)  # of a loaded machine

    def trained(name: str):
        events = []
        for steps, resume in ((9, False), (STEPS, True)):
            made = mw.train(
                "linear",
                on="1xCPU",
                steps=steps,
                folder=tmp_path / "run",
                overrides={"checkpoint.every_steps": 3, "evaluation.every_steps": 4},
                session=mw.Session(report_to=[name], resume=resume),
                on_event=events.append,
            )
        assert not [event.message for event in events if getattr(event, "kind", "") == "tracker"]
        figures, seconds = {}, made.weighing.prediction.step_seconds
        for event in events:
            step, values = figures_of(event, made.weighing.tokens_per_step)
            if isinstance(event, StepDone):
                values |= {
                    "predicted/step_seconds": seconds.expected,
                    "predicted/step_seconds_low": seconds.low,
                }
            figures |= {(key, step): pytest.approx(value, rel=1e-6) for key, value in values.items()}
        assert {key.partition("/")[0] for key, _ in figures} == {
            *("train", "eval", "checkpoint", "finish", "predicted")
        }
        assert {step for key, step in figures if key == "train/loss"} == set(range(1, STEPS + 1))
        return made, json.loads((tmp_path / "run/run.json").read_text())["id"], figures

    return trained


def reported(found, figures):
    """What was found of these figures."""
    return {at: value for at, value in found.items() if at in figures}


def records_of(data: bytes):
    """Yield the records of a file of wandb: a head of 7 bytes, then LevelDB's log (crc, length, kind)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of several
            yield whole
            whole = b""


@pytest.mark.filterwarnings("default")
def test_wandb_offline(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    _, number, figures = run("wandb")
    found, artifacts, ids, tags = {}, set(), set(), set()
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in records_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                tags |= set(record.run.tags)
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                found |= {(key, items["train/global_step"]): value for key, value in items.items()}
            elif kind == "artifact":
                artifacts.add(record.artifact.type)
            elif kind == "request" and record.request.HasField("log_artifact"):
                artifacts.add(record.request.log_artifact.artifact.type)
    assert ids == {number}
    assert reported(found, figures) == figures
    assert {"linear", "1xCPU"} <= tags
    assert config["fleet"] == "1xCPU"
    assert "weighing" in artifacts


@pytest.mark.filterwarnings("default")
def test_mlflow_in_sqlite(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    _, number, figures = run("mlflow")
    client = mlflow.MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    found = {
        (key, point.step): point.value
        for key in kept.data.metrics
        for point in client.get_metric_history(kept.info.run_id, key)
    }
    assert reported(found, figures) == figures
    assert kept.info.status == "FINISHED"
    assert kept.data.tags["meshwright.run"] == number
    assert kept.data.params["fleet"] == "1xCPU"
    names = {item.path for item in client.list_artifacts(kept.info.run_id)}
    assert names == {"weighing.json", "config.json"}


@pytest.mark.filterwarnings("default")
def test_trackio_in_its_own_file(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    _, number, figures = run("trackio")
    name = f"run-{number}"
    assert SQLiteStorage.get_runs("meshwright") == [name]
    found = {
        (key, line["step"]): value
        for line in SQLiteStorage.get_logs("meshwright", name)
        for key, value in line.items()
    }
    assert reported(found, figures) == figures
    weighing = (tmp_path / "run/weighing.json").read_bytes()
    kept = [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert any(path.read_bytes() == weighing for path in kept)  # the artifact
    assert capsys.readouterr().out == ""  # `--json` has it alone


@pytest.mark.filterwarnings("default")
def test_tensorboards_own_reader(run, tmp_path):
    pytest.importorskip("tensorboard")
    _, _, figures = run("tensorboard")
    found, reader = scalars(tmp_path / "run/tensorboard")
    assert reported(found, figures) == figures
    assert any("weighing" in tag for tag in reader.Tags()["tensors"])


@pytest.mark.filterwarnings("default")
def test_tensorboards_own_reader_reads_the_events_of_every_run(run, tmp_path):
    """Those that a run writes by itself, with each number of metrics.jsonl."""
    pytest.importorskip("tensorboard")
    run("tensorboard")
    found, _ = scalars(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    written = {
        (name, line["step"]): pytest.approx(value, rel=1e-6)
        for line in lines
        for name, value in line.items()
        if name != "step" and value is not None
    }
    assert {(tag.partition("/")[2], step): value for (tag, step), value in found.items()} == written


@pytest.mark.filterwarnings("default")
def test_steps_that_a_crash_left_behind_its_checkpoint_are_dropped_by_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from contextlib import closing

    from meshwright.trainer.loop import RunFolder
    from meshwright.trainer.loop._recording import RunWriter

    for keep_to, steps, loss in ((-1, range(1, 9), 1.0), (4, range(5, 7), 2.0)):
        with closing(RunFolder(tmp_path / "run", resume=keep_to > 0, discard_steps=True)) as held:
            held.create()
            with closing(RunWriter(held, keep_to=keep_to)) as files:
                for step in steps:
                    files.write(step, "train", {"loss": loss, "gradient_norm": float("nan")})
    found, _ = scalars(tmp_path / "run")
    assert found == {("train/loss", step): 1.0 if step <= 4 else 2.0 for step in range(1, 7)}


def scalars(folder):
    """Each scalar by name and step, as TensorBoard's own reader has them, and the reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # all of them
    reader.Reload()
    points = {name: reader.Scalars(name) for name in reader.Tags()["scalars"]}
    return {(name, point.step): point.value for name, some in points.items() for point in some}, reader
