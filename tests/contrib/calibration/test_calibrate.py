"""`calibrate` learns from measured steps, later predictions use it, and `reconcile` keeps the errors."""

import dataclasses
import json
import shutil

import pytest

import meshwright as mw
from meshwright.api import history_path
from meshwright.compiler import write_cached
from meshwright.contrib.calibration import forget, measured_steps_in
from meshwright.contrib.causes import history
from meshwright.hardware import Fleet
from meshwright.measure import (
    calibration_of_this_machine,
    calibration_path,
    describe_host,
    measured_runs_path,
)
from meshwright.predict import class_of

pytestmark = pytest.mark.once
SMALL = ["model.num_layers=1", "batch.sequences=8", "evaluation.every_steps=100"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of its own: what is learnt here must not reach other tests, nor theirs these."""
    rates, folder = calibration_of_this_machine(), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE_DIR", str(folder))
        write_cached(calibration_path("CPU"), rates.to_json())
    return str(folder)


@pytest.fixture(autouse=True)
def nothing_known(cache, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", cache)
    for on in ("8xH100", "2xCPU"):
        forget(on)
    history_path().unlink(missing_ok=True)


@pytest.fixture(scope="module")
def traced(cache, tmp_path_factory):
    """A run of two simulated devices with a trace of it."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE_DIR", cache)
        run = mw.train(
            "bytes-nano",
            on="2xCPU",
            steps=6,
            folder=folder / "run",
            overrides=SMALL,
            session=mw.Session(profile=folder / "trace"),
        )
    return run, folder / "trace"


def weighed(**changes):
    return mw.weigh("linear", **{"on": "8xH100", **changes})


def test_a_measured_step_changes_later_predictions_of_that_chip_alone():
    plain, other = weighed(), weighed(on="8xA100")
    traced = plain.trace()
    made = mw.calibrate("linear", on="8xH100", measured=1.5 * plain.step_seconds)
    (step,) = made.steps
    assert (made.chip, made.num_runs, step.what, step.matched) == ("H100", 1, "step time", None)
    assert step.before == plain.prediction.step_seconds
    after = weighed()
    assert after.prediction.step_seconds == step.after
    assert after.step_seconds == pytest.approx(1.5 * plain.step_seconds, rel=0.05)
    assert "factors of 1 measured step kept on this machine" in after.prediction.basis
    assert weighed(on="16xH100").step_seconds > plain.step_seconds
    assert weighed(on="8xA100").prediction == other.prediction
    assert plain.trace() == traced, "a trace is by the rates of the time that is printed"
    assert after.trace() != traced
    assert forget("8xH100") == 1
    assert weighed().prediction == plain.prediction


def test_steps_are_kept_and_fitted_together_and_again_in_any_order():
    seconds = {on: weighed(on=on).step_seconds for on in ("8xH100", "16xH100", "2xH100")}
    steps = [mw.MeasuredStep(config="linear", on=on, measured=2 * each) for on, each in seconds.items()]
    together = mw.calibrate(steps)
    assert together.num_runs == len(together.steps) == 3
    forget("8xH100")
    for step in reversed(steps):
        one_by_one = mw.calibrate([step])
    assert one_by_one.num_runs == 3
    found = [{each.name: each.factor for each in made.classes} for made in (together, one_by_one)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_kernels_that_the_backward_pass_runs_again_have_a_factor_of_their_own():
    found = {}
    for remat in ("none", "full"):
        changes = {"on": "8xH100", "layout": "data=8", "overrides": [*SMALL, f"remat={remat}"]}
        weighed = mw.weigh("bytes-nano", **changes)
        (products,) = (each for each in weighed.prediction.slices if each.name == "matmul")
        found[remat] = products.recomputed_seconds / products.seconds
        made = mw.calibrate("bytes-nano", measured=1.3 * weighed.step_seconds, **changes)
    # Without a policy only the loss repeats products. With `full` a forward pass of the layer is run again.
    assert found["none"] < 0.06
    assert 0.12 < found["full"] < 0.25
    again = {each.name: each for each in made.classes}["recomputed"]
    assert (again.num_runs, again.measured_seconds) == (2, None)
    assert 0 < again.predicted_seconds < made.steps[0].before.expected / 2


def test_a_run_calibrates_by_the_steps_that_its_folder_holds(traced):
    run, _ = traced
    made = mw.calibrate(str(run.folder))
    (step,) = made.steps
    assert step.measured_seconds == run.measurement.step_seconds.median
    assert (step.fleet, made.chip) == ("2xCPU", "CPU")
    after = mw.weigh("bytes-nano", on="2xCPU", overrides=SMALL)
    assert after.prediction.step_seconds == step.after
    error = abs(step.after.expected / step.measured_seconds - 1)
    assert error < abs(step.before.expected / step.measured_seconds - 1) or error < 0.05


def test_a_trace_of_our_own_run_calibrates_that_run_to_five_percent(traced):
    _, trace = traced
    made = mw.calibrate("bytes-nano", on="2xCPU", trace=trace, overrides=SMALL)
    (step,) = made.steps
    assert (step.what, step.notes) == ("trace", ())
    assert step.matched > 0.99
    again = mw.weigh("bytes-nano", on="2xCPU", overrides=SMALL)
    assert again.step_seconds == pytest.approx(step.measured_seconds, rel=0.05)  # by the trace's own clock
    classes = {each.name: each for each in made.classes}
    assert classes["matmul"].measured_seconds > 0
    assert sum(each.measured_seconds or 0.0 for each in made.classes) >= 0.9 * step.measured_seconds


def test_a_trace_of_another_program_is_refused(traced):
    with pytest.raises(mw.InputError, match="% of the trace's kernel time is matched with the program"):
        mw.calibrate("linear", on="2xCPU", trace=traced[1])


def test_a_trace_of_pytorch_calibrates_by_the_names_of_its_kernels(tmp_path):
    changes = {"overrides": SMALL, "layout": "data=8"}
    plain = mw.weigh("bytes-nano", on="8xH100", **changes)
    predicted: dict[str, float] = {}
    for each in plain.prediction.slices:
        name = class_of(each.name)
        predicted[name] = predicted.get(name, 0.0) + each.exposed_seconds
    names = {"matmul": "gemm", "memory-bound": "elementwise", "all-reduce": "ncclDevKernel_AllReduce"}
    kernels = [(name, 3e6 * predicted[kind]) for kind, name in names.items()] + [("conv2d", 10.0)]
    events, begin = [], 0.0
    for name, dur in kernels:  # gaps of three times the predicted launches lie between the first two
        event = {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": dur, "args": {"device": 0}}
        events.append(event)
        begin += dur + (3e6 * predicted["launch"] if name == "gemm" else 0.0)
    (tmp_path / "t.json").write_text(json.dumps(events))
    made = mw.calibrate("bytes-nano", on="8xH100", trace=tmp_path / "t.json", **changes)
    assert {each.name: each.factor for each in made.classes}["matmul"] == pytest.approx(3, rel=0.05)
    (step,) = made.steps
    assert "convolution: 10.0 us of the trace, which the program does not have" in step.notes
    assert any("elementwise" in note for note in step.notes)


def test_measured_steps_are_read_from_a_file(tmp_path):
    path = tmp_path / "runs.toml"
    path.write_text(
        '[[run]]\nconfig = "linear"\non = "8xH100"\nmeasured = "12ms"\nset = ["batch.sequences=64"]\n'
    )
    (step,) = measured_steps_in(path)
    assert (step.config, step.on, step.measured, step.overrides) == (
        "linear",
        "8xH100",
        "12ms",
        ["batch.sequences=64"],
    )
    for text, words in (
        ("", r"has no \[\[run\]\]"),
        ("[[run]]\non = '8xH100'", "run 1 has no config"),
        ("[[run]]\nconfig = 'a'\nseconds = 1", "run 1 has unknown keys"),
        ("[[run]]\nconfig = 'a'\non = 8", "run 1 has wrong values of"),
        ("[run", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(mw.InputError, match=words):
            measured_steps_in(path)


def test_what_cannot_have_been_measured_is_refused_in_words(tmp_path, traced):
    with pytest.raises(mw.InputError, match="its products take at least"):
        mw.calibrate("bytes-nano", on="8xH100", measured="0.001us", overrides=SMALL)
    for never in ("1e99s", 1e99, -1.0, float("nan"), 0.0):
        with pytest.raises(mw.InputError, match=r"was not measured|cannot read"):
            mw.calibrate("linear", on="8xH100", measured=never)
    with pytest.raises(mw.InputError, match="cannot read 'soon' as the seconds of a step"):
        mw.calibrate("linear", on="8xH100", measured="soon")
    with pytest.raises(mw.InputError, match="no fleet is named"):
        mw.calibrate("linear", measured=1.0)
    with pytest.raises(mw.InputError, match="nothing was measured: linear is not the folder of a run"):
        mw.calibrate("linear", on="8xH100")
    with pytest.raises(mw.InputError, match="is not the folder of a finished run"):
        mw.calibrate(str(tmp_path))
    with pytest.raises(mw.InputError, match="no measured step is given"):
        mw.calibrate([])
    steps = [mw.MeasuredStep(config="linear", on=on, measured=1.0) for on in ("8xH100", "8xA100")]
    with pytest.raises(mw.InputError, match=r"steps of A100\S* and H100"):
        mw.calibrate(steps)
    assert weighed().prediction.basis.count("measured step") == 0, "nothing was kept"
    elsewhere = shutil.copytree(traced[0].folder, tmp_path / "run")
    told = json.loads((elsewhere / "measurement.json").read_text())
    (elsewhere / "measurement.json").write_text(json.dumps({**told, "host": "another machine"}))
    with pytest.raises(mw.InputError, match="was run on another machine, and this is") as refused:
        mw.calibrate(str(elsewhere))
    assert describe_host() in refused.value.message
    (elsewhere / "measurement.json").write_text(
        json.dumps({**told, "host": describe_host(), "step_seconds": None})
    )
    with pytest.raises(mw.InputError, match="no step was timed"):
        mw.calibrate(str(elsewhere))


def test_a_fleet_for_which_no_time_is_predicted_cannot_be_calibrated():
    fleet = Fleet.parse("8xH100")
    unknown = dataclasses.replace(
        fleet, chip=dataclasses.replace(fleet.chip, memory_bytes_per_second=None, name="H100")
    )
    with pytest.raises(mw.InputError, match="no time is predicted for linear") as refused:
        mw.calibrate("linear", on=unknown, measured=1.0)
    assert "meshwright probe" in refused.value.hint


def test_kept_steps_that_cannot_be_read_stop_a_prediction_with_the_way_back():
    path = measured_runs_path(Fleet.parse("8xH100"))
    path.write_text('{"schema": 1, "chip": "H100"')
    with pytest.raises(mw.InputError, match="this is not a list of measured runs") as refused:
        weighed()
    assert "meshwright calibrate --forget --on 8xH100" in refused.value.hint
    assert forget("8xH100") is None
    assert weighed().prediction is not None
    path.mkdir()
    with pytest.raises(mw.InputError, match="cannot be read"):
        weighed()
    with pytest.raises(mw.InputError, match="cannot remove"):
        forget("8xH100")
    path.rmdir()


def test_a_run_too_short_to_trace_and_a_trace_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(mw.InputError, match="a run of 4 steps is too short for a trace"):
        mw.train(
            "linear",
            on="1xCPU",
            steps=4,
            folder=tmp_path / "run",
            session=mw.Session(profile=tmp_path / "trace"),
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(mw.InputError, match="cannot write a trace to"):
        mw.train(
            "linear",
            on="1xCPU",
            steps=6,
            folder=tmp_path / "run",
            session=mw.Session(profile=tmp_path / "file" / "trace"),
        )
    assert not (tmp_path / "run").exists()


def test_a_run_and_its_folder_give_the_same_comparison_and_the_history_holds_it_once(traced):
    run, _ = traced
    assert mw.reconcile(run) == mw.reconcile(run.folder) == mw.reconcile(str(run.folder))
    rows = history().rows
    assert [row.quantity for row in rows] == [row.quantity for row in run.reconciliation.rows]
    (step,) = [row for row in rows if row.quantity == "step seconds"]
    assert (step.run, step.config, step.fleet, step.steps) == (str(run.folder), "bytes-nano", "2xCPU", 6)
    assert step.measured == run.measurement.step_seconds.median


def test_training_adds_to_the_history(tmp_path):
    mw.train("linear", on="1xCPU", steps=3, folder=tmp_path / "run")
    assert {(row.run, row.steps) for row in history().rows} == {(str(tmp_path / "run"), 3)}
    mw.train(on="1xCPU", steps=5, folder=tmp_path / "run", session=mw.Session(resume=True))
    assert {row.steps for row in history().rows} == {3, 5}


def test_a_folder_without_a_comparison_is_weighed_now(traced, tmp_path):
    folder = shutil.copytree(traced[0].folder, tmp_path / "run")
    (folder / "reconciliation.json").unlink()
    plain = traced[0].reconciliation
    assert {row.quantity for row in mw.reconcile(folder).rows} == {row.quantity for row in plain.rows}
    (folder / "measurement.json").unlink()
    with pytest.raises(mw.InputError, match=r"reconciliation\.json cannot be read"):
        mw.reconcile(folder)
    shutil.copy(traced[0].folder / "measurement.json", folder)
    (folder / "weighing.json").write_text("{}")
    with pytest.raises(mw.InputError, match="does not say what was run and where"):
        mw.reconcile(folder)


def test_a_line_of_the_history_that_was_cut_off_is_left_out(traced):
    mw.reconcile(traced[0].folder)
    rows = history().rows
    with history_path().open("a") as file:
        file.write('{"date": "2026-')
    assert history().rows == rows


def test_a_history_that_cannot_be_kept_stops_no_run_and_one_that_cannot_be_read_says_so(traced):
    history_path().mkdir()
    assert mw.reconcile(traced[0].folder) == traced[0].reconciliation
    with pytest.raises(mw.InputError, match=r"history\.jsonl cannot be read"):
        history()
    history_path().rmdir()
