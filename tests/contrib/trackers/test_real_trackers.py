"""What the real libraries keep of a run, read back by their own readers; nothing leaves this machine.

Their libraries are in no lock of the tests: `pip install -e '.[wandb,mlflow,trackio]' tensorboard` in an
environment of your own, then `pytest -m wide tests/contrib/trackers`.
"""

from __future__ import annotations

import json
import struct

import pytest

import meshwright as mw

pytestmark = pytest.mark.wide
STEPS = 6


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that trains and goes on with a run, reported to one tracker."""
    monkeypatch.chdir(tmp_path)

    def trained(name: str):
        told: list[str] = []

        def listen(event):
            if getattr(event, "kind", "") == "tracker":
                told.append(event.message)

        for steps, resume in ((4, False), (STEPS, True)):
            made = mw.train(
                "linear",
                on="1xCPU",
                steps=steps,
                folder=tmp_path / "run",
                overrides={"checkpoint.every_steps": 2},
                session=mw.Session(report_to=[name], resume=resume),
                on_event=listen,
            )
        assert not told
        return made, json.loads((tmp_path / "run/run.json").read_text())["id"]

    return trained


def losses(made):
    return {step: pytest.approx(loss) for step, loss in made.measurement.losses.items()}


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
    made, number = run("wandb")
    found, predicted, artifacts, ids, tags = {}, set(), set(), set(), set()
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
                if "train/loss" in items:
                    found[items["train/global_step"]] = items["train/loss"]
                    predicted.add(items["predicted/step_seconds"])
            elif kind == "artifact":
                artifacts.add(record.artifact.type)
            elif kind == "request" and record.request.HasField("log_artifact"):
                artifacts.add(record.request.log_artifact.artifact.type)
    assert ids == {number}
    assert found == losses(made)
    assert predicted == {made.weighing.prediction.step_seconds.expected}
    assert {"linear", "1xCPU"} <= tags
    assert config["fleet"] == "1xCPU"
    assert "weighing" in artifacts


@pytest.mark.filterwarnings("default")
def test_mlflow_in_sqlite(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    made, number = run("mlflow")
    client = mlflow.MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    history = {point.step: point.value for point in client.get_metric_history(kept.info.run_id, "train/loss")}
    assert history == losses(made)
    assert kept.info.status == "FINISHED"
    assert kept.data.tags["meshwright.run"] == number
    assert kept.data.params["fleet"] == "1xCPU"
    assert kept.data.metrics["predicted/step_seconds"] == made.weighing.prediction.step_seconds.expected
    names = {item.path for item in client.list_artifacts(kept.info.run_id)}
    assert names == {"weighing.json", "config.json"}


@pytest.mark.filterwarnings("default")
def test_trackio_in_its_own_file(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    made, number = run("trackio")
    name = f"run-{number}"
    assert SQLiteStorage.get_runs("meshwright") == [name]
    lines = SQLiteStorage.get_logs("meshwright", name)
    found = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert found == losses(made)
    assert any("predicted/step_seconds" in line for line in lines)
    weighing = (tmp_path / "run/weighing.json").read_bytes()
    kept = [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert any(path.read_bytes() == weighing for path in kept)  # the artifact
    assert capsys.readouterr().out == ""  # `--json` has it alone


@pytest.mark.filterwarnings("default")
def test_tensorboards_own_reader(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made, _ = run("tensorboard")
    reader = EventAccumulator(str(tmp_path / "run/tensorboard"))
    reader.Reload()
    assert {point.step: point.value for point in reader.Scalars("train/loss")} == losses(made)
    assert "predicted/step_seconds" in reader.Tags()["scalars"]
    assert any("weighing" in tag for tag in reader.Tags()["tensors"])
