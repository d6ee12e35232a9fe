"""`mw.train`: what it writes, what it refuses, and how it goes on with a run."""

import json
import shutil
from pathlib import Path

import jax
import pytest

import meshwright as mw
from meshwright.errors import EXIT_BROKE_OFF, InputError, MeshwrightError
from meshwright.results import FirstStepsCompared
from meshwright.run_lines import bar_state
from meshwright.trainer.checkpoint import Checkpoints
from meshwright.trainer.loop import Noticed, StepDone

pytestmark = pytest.mark.quick

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

    def listen(event: object) -> None:
        if isinstance(event, FirstStepsCompared):
            order.extend(row.quantity for row in event.rows)
        else:
            order.append(type(event).__name__)

    mw.train("linear", on="1xCPU", steps=9, folder=tmp_path / "run", on_event=listen)
    place = order.index("argument bytes per device")
    assert order[place + 1] == "step seconds"
    assert order[:place].count("StepDone") == 7


def test_a_run_is_resumed_from_its_folder_alone(run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    longer = mw.train(folder=folder, on="1xCPU", steps=10, session=mw.Session(resume=True))
    assert longer.measurement.resumed_from == 8
    assert list(longer.measurement.losses) == list(range(1, 11))
    assert longer.weighing.config == run.weighing.config


@pytest.mark.parametrize("further", [0, 2])  # the first two steps of a session are not timed
def test_a_run_with_too_few_steps_left_keeps_those_that_were_measured(tmp_path, further):
    def session(steps, **resumed):
        how = {"steps": steps, "folder": tmp_path / "run", "session": mw.Session(**resumed)}
        return mw.train("linear", on="1xCPU", **how)

    first, again = session(5), session(5 + further, resume=True)
    assert again.measurement.resumed_from == 5
    assert again.measurement.step_seconds == first.measurement.step_seconds
    assert "step_seconds" not in again.measurement.not_measured
    rows = [
        [row for row in made.reconciliation.rows if row.quantity != "executed FLOPs"]
        for made in (first, again)
    ]
    assert rows[1] == rows[0]
    (listed,) = mw.runs(tmp_path, where=f"folder={tmp_path}/run")
    assert listed.step_seconds == first.measurement.step_seconds.median


def test_a_batch_by_replica_is_resolved_for_the_layout_that_trains(tmp_path):
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


@pytest.mark.parametrize(
    ("config", "is_another"), [("linear", False), pytest.param("bytes-nano", True, marks=pytest.mark.wide)]
)
def test_a_deterministic_program_is_weighed_as_it_is_run(config, is_another):
    """A program that sums nothing in another order is the same one."""
    plain, repeats = (
        mw.weigh(config, on="1xH100", overrides=[f"deterministic={value}"]) for value in ("false", "true")
    )
    added = repeats.compiled.options.items() - plain.compiled.options.items()
    assert added == {("xla_gpu_exclude_nondeterministic_ops", True), ("xla_gpu_deterministic_ops", True)}
    assert (repeats.compiled.fingerprint != plain.compiled.fingerprint) == is_another


@pytest.mark.once
def test_the_report_grows_while_the_run_goes_on(tmp_path, monkeypatch):
    from meshwright.api import _train

    monkeypatch.setattr(_train, "REPORT_SECONDS", 0.0)
    sizes: list[int] = []

    def look(event: object) -> None:
        if isinstance(event, StepDone) and event.step in (2, 4):
            sizes.append((tmp_path / "run/report.html").stat().st_size)

    over = ["evaluation.every_steps=1"]
    mw.train("linear", on="1xCPU", steps=4, folder=tmp_path / "run", overrides=over, on_event=look)
    assert 0 < sizes[0] < sizes[1]


def test_the_curve_is_there_while_the_run_goes_on_and_its_page_loads_itself_again(tmp_path, monkeypatch):
    from meshwright.api import _train

    monkeypatch.setattr(_train, "FIRST_PAGE_SECONDS", 0.0)
    pages: dict[int, str] = {}
    page = tmp_path / "run/report.html"

    def look(event: object) -> None:
        if isinstance(event, StepDone) and page.exists():
            pages[event.step] = page.read_text()

    over = ["evaluation.every_steps=8"]
    run = mw.train("linear", on="1xCPU", steps=8, folder=tmp_path / "run", overrides=over, on_event=look)
    first = pages[min(pages)]
    assert min(pages) <= 3
    assert "<h2>Loss</h2>" in first
    assert 'http-equiv="refresh"' in first
    assert "under way" in first
    assert "Not whole" not in first
    assert len(set(pages.values())) == 1  # the next is due after half a minute
    assert 'http-equiv="refresh"' not in page.read_text()
    assert "page" in run.measurement.seconds_by_phase


@pytest.mark.once
def test_images_and_rows_are_not_called_tokens(tmp_path):
    rates: list[str] = []

    def look(event: object) -> None:
        if isinstance(event, StepDone):
            rates.append(bar_state(event)["description"])

    few = ["batch.sequences=4"]
    run = mw.train("lenet", on="1xCPU", steps=4, folder=tmp_path / "run", overrides=few, on_event=look)
    assert "4 images per step" in str(run.weighing)
    assert "images/s" in str(run)
    assert all("images/s" in words for words in rates)
    page = (tmp_path / "run/report.html").read_text()
    assert "images per second" in page
    for words in (str(run.weighing), run.weighing.to_html(), str(run), page, *rates):
        assert "tokens/s" not in words
        assert "tokens per s" not in words
        assert "tokens in" not in words
    assert run.weighing.to_dict()["batch_unit"] == "images"


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(InputError, match="no config is named") as error:
        mw.train()
    assert "meshwright presets" in error.value.hint
    with pytest.raises(InputError, match="nothing to resume: 'linear' is not the folder of a run") as error:
        mw.train("linear", session=mw.Session(resume=True))
    assert "runs/NAME --resume" in error.value.hint
    for config, resume in ((None, False), ("bytes-nano", True)):
        absent = mw.Session(begin_from=tmp_path / "absent", resume=resume)
        with pytest.raises(InputError, match=r"there is no folder of weights .*absent") as error:
            mw.train(config, folder=tmp_path / "run", session=absent)
        assert ("leave --from out" in error.value.hint) is resume
    with pytest.raises(InputError, match=r"is not a run: config\.json cannot be read"):
        mw.train(folder=tmp_path, on="1xCPU", session=mw.Session(resume=True))


def test_a_run_that_stops_has_its_report(tmp_path):
    wild = ["optimizer.learning_rate=1e12", "faults.bad_step=stop"]
    with pytest.raises(MeshwrightError, match="training stopped"):
        mw.train("linear", on="1xCPU", folder=tmp_path / "run", overrides=wild)
    assert (tmp_path / "run/report.html").exists()
    assert not (tmp_path / "run/measurement.json").exists()


def test_a_device_without_memory_is_told_in_words_and_the_run_may_be_tried_again(tmp_path, monkeypatch):
    def lacking(request):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: [0] Failed to get module function f")

    monkeypatch.setattr("meshwright.trainer.loop.run_training", lacking)
    with pytest.raises(mw.MeshwrightError, match=r"memory of cpu is used up: .*Failed to get") as error:
        mw.train("linear", on="1xCPU", steps=2, folder=tmp_path / "run")
    assert "batch.microbatch_sequences" in error.value.hint
    assert error.value.exit_code == EXIT_BROKE_OFF


def test_a_run_that_another_process_writes_is_left_alone(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    holder = Checkpoints(folder / "checkpoints")
    try:
        before = (folder / "config.json").read_bytes()
        with pytest.raises(InputError, match="are being written by process"):
            mw.train(
                folder=folder,
                on="1xCPU",
                steps=20,
                overrides=["faults.bad_step=skip"],
                session=mw.Session(resume=True),
            )
    finally:
        holder.close()
    assert (folder / "config.json").read_bytes() == before


@pytest.mark.once
@pytest.mark.parametrize("when", ["while it runs", "at its end"])
def test_what_the_disk_refuses_ends_no_run_and_is_told_once(tmp_path, monkeypatch, when):
    """The page that is due each minute, and all that is written when the run is over."""
    from meshwright.api import _train

    folder: Path = tmp_path / "run"
    refused = (
        ("config.json", "report.html", "measurement.json") if when == "while it runs" else ("report.html",)
    )
    for name in refused:
        (folder / name).mkdir(parents=True)
    monkeypatch.setattr(_train, "REPORT_SECONDS", 0.0 if when == "while it runs" else 1e9)
    events: list[object] = []
    over = ["evaluation.every_steps=2"]
    run = mw.train("linear", on="1xCPU", steps=4, folder=folder, overrides=over, on_event=events.append)
    assert run.measurement.steps == 4
    assert run.not_written == dict.fromkeys(refused, "Is a directory")
    told = [event.message for event in events if isinstance(event, Noticed) and event.kind == "disk"]
    names = [
        name for each in told for name in each.removesuffix(" cannot be written: Is a directory").split(", ")
    ]
    assert names == list(refused)  # each once


def test_a_page_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch):
    from meshwright.contrib import pages

    monkeypatch.setattr(pages, "write_report", lambda folder, **how: 1 / 0)
    run = mw.train("linear", on="1xCPU", steps=2, folder=tmp_path / "run")
    assert run.not_written == {"report.html": "it could not be drawn: ZeroDivisionError: division by zero"}


def test_a_refused_resume_changes_nothing_and_the_hint_works(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for refused in ("seed=5", "optimizer.momentum=0.9"):  # of another run; with another state
        with pytest.raises(InputError):
            mw.train(folder=folder, on="1xCPU", steps=9, overrides=[refused], session=mw.Session(resume=True))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    again = mw.train(folder=folder, on="1xCPU", steps=9, session=mw.Session(resume=True))
    assert again.measurement.resumed_from == 8


def test_checkpoints_that_exist_are_used_whatever_the_setting(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    off = ["checkpoint.every_steps=none"]
    longer = mw.train(folder=folder, on="1xCPU", steps=10, overrides=off, session=mw.Session(resume=True))
    assert longer.measurement.resumed_from == 8
    assert list(longer.measurement.losses) == list(range(1, 11))
    with pytest.raises(InputError, match="resuming would discard steps 9 to 10"):
        mw.train(folder=folder, on="1xCPU", steps=12, session=mw.Session(resume=True))
    again = mw.train(folder=folder, on="1xCPU", steps=12, session=mw.Session(resume=True, discard_steps=True))
    assert again.measurement.resumed_from == 8
    assert list(again.measurement.losses) == list(range(1, 13))


def test_a_run_is_resumed_by_its_folder_alone(tmp_path):
    mw.train("linear", on="1xCPU", steps=2, folder=tmp_path / "run", overrides=["checkpoint.every_steps=2"])
    resumed = mw.train(str(tmp_path / "run"), on="1xCPU", steps=4, session=mw.Session(resume=True))
    assert resumed.folder == tmp_path / "run"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("finished after") == 2, "a log lies in the folder, and is continued"
    assert "resumed: from the checkpoint of step 2" in log
    assert (resumed.measurement.resumed_from, resumed.measurement.steps) == (2, 4)
