"""The list of runs: nothing is lost, nothing invented, none listed twice, whatever happens to folders."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.contrib.runs import found_runs, run_record
from meshwright.contrib.watch import Shelf
from meshwright.kept_records import KeptRun, store_folder
from meshwright.trainer.checkpoint import lock_folder
from meshwright.trainer.loop import RunFolder
from tests.contrib.runs.conftest import CONFIG, begun, ended, run_in

WRITERS = Path(__file__).with_name("killed_writers.py")


def killed(folder: Path, kills: int) -> dict[str, Any]:
    (folder / "runs").mkdir()
    environment = {**os.environ, "MESHWRIGHT_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(WRITERS), str(folder / "runs"), str(kills), "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder)
    return json.loads(done.stdout)


def check_kills(found: dict[str, Any], kills: int) -> None:
    assert found["killed"] >= kills
    listed = [number for number, _, _ in found["listed"]]
    there = {path: number for path, number in found["there"].items() if number}
    originals = {number.partition("-")[0] for number in listed}
    assert len(set(listed)) == len(listed), "a run is listed twice"
    assert set(there.values()) == originals, "a run is lost, or invented"
    assert set(found["acknowledged"]) <= originals
    assert sorted(path for _, _, paths in found["listed"] for path in paths) == sorted(there)
    assert {state for _, state, _ in found["listed"]} == {"dead", "finished"}
    assert sorted(found["again"]) == sorted(listed)
    assert not found["notes"]


def test_writers_that_are_killed_lose_no_run_and_invent_none(tmp_path: Path):
    check_kills(killed(tmp_path, 25), 25)


@pytest.mark.long
def test_a_thousand_killed_writers_lose_no_run_and_invent_none(tmp_path: Path):
    check_kills(killed(tmp_path, 1000), 1000)


def test_a_run_is_running_while_its_lock_is_held_then_dead_without_an_end(store: Path):
    held, _ = begun(store / "runs" / "a")
    assert run_record(store / "runs" / "a").state == "running"
    held.close()
    run = run_record(store / "runs" / "a")
    assert (run.state, run.step, run.loss) == ("dead", 5, pytest.approx(0.2))
    assert f"process {os.getpid()}" in run.words


def test_a_lock_that_is_asked_for_keeps_no_run_from_beginning(store: Path):
    folder = store / "runs" / "a"
    run_in(folder)
    for _ in range(20):
        assert run_record(folder).state == "finished"
        lock_folder(folder, "it is").close()


def test_ends_are_told_apart(store: Path):
    run_in(store / "runs" / "finished")
    run_in(store / "runs" / "stopped", signal="SIGTERM")
    held, kept = begun(store / "runs" / "failed")
    with pytest.raises(mw.MeshwrightError), kept.ending():
        raise mw.MeshwrightError("step 2: the loss is nan", hint="lower it")
    held.close()
    states = {run.folder.name: (run.state, run.words) for run in found_runs().runs}
    assert states == {
        "finished": ("finished", ""),
        "stopped": ("stopped", "SIGTERM"),
        "failed": ("failed", "step 2: the loss is nan"),
    }


def test_each_session_has_its_own_devices_in_the_device_hours(store: Path):
    run_in(store / "run")
    path = store / "run" / "run.json"
    fields = json.loads(path.read_text())
    (last,) = fields["sessions"]
    at = "2026-11-30T{:02}:00:00+00:00".format
    hours = [(0, 10, {"num_devices": 8}), (10, 11, {})]  # the second died before it said how many
    fields["sessions"] = [{**last, "began": at(began), "ended": at(end)} for began, end, _ in hours]
    for session, (_, _, devices) in zip(fields["sessions"], hours, strict=True):
        del session["num_devices"]
        session |= devices
    path.write_text(json.dumps({**fields, "weighing": {"num_devices": 2}}))
    record = run_record(store / "run")
    assert (record.seconds, record.device_hours) == (11 * 3600, 10 * 8 + 1 * 2)
    assert record.to_dict()["device_hours"] == 82


def test_a_run_of_another_host_whose_lock_is_free_is_dead_only_once_it_is_silent(store: Path):
    folder = store / "runs" / "a"
    begun(folder)[0].close()
    run = json.loads((folder / "run.json").read_text())
    run["sessions"][-1]["host"] = "gpu-7"
    (folder / "run.json").write_text(json.dumps(run))
    assert run_record(folder).state == "unknown"
    for name in os.listdir(folder):
        os.utime(folder / name, (1e9, 1e9))
    assert run_record(folder).state == "dead"


def test_a_moved_run_is_the_same_run_and_one_that_is_gone_is_still_known(store: Path):
    number = run_in(store / "runs" / "a")
    shutil.move(store / "runs" / "a", store / "runs" / "b")
    (run,) = found_runs().runs
    assert (run.id, run.folder, run.state) == (number, store / "runs" / "b", "finished")
    shutil.move(store / "runs" / "b", store / "far")
    (run,) = found_runs().runs
    assert (run.id, run.state, run.step) == (number, "gone", 5)
    assert "is not here" in run.words
    (run,) = found_runs(store).runs
    assert (run.id, run.folder) == (number, store / "far")
    assert found_runs().runs == (run,), "it is remembered"


def test_a_copied_run_is_listed_once_until_it_is_trained_further(store: Path):
    number = run_in(store / "runs" / "a")
    shutil.copytree(store / "runs" / "a", store / "runs" / "b")
    (run,) = found_runs().runs
    assert (run.id, run.folder.name, [path.name for path in run.copies]) == (number, "a", ["b"])
    other = run_in(store / "runs" / "b")
    assert other != number
    assert {run.id for run in found_runs().runs} == {number, other}
    assert json.loads((store / "runs" / "b" / "run.json").read_text())["copy_of"] == number


def test_copies_that_an_unknown_store_lets_diverge_are_two_runs(store: Path):
    number = run_in(store / "runs" / "a")
    shutil.copytree(store / "runs" / "a", store / "runs" / "b")
    for name in ("a", "b"):
        run = json.loads((store / "runs" / name / "run.json").read_text())
        run["sessions"].append({"began": f"2026-01-01T00:00:0{ord(name) % 10}+00:00"})
        (store / "runs" / name / "run.json").write_text(json.dumps(run))
    assert {run.id for run in found_runs().runs} == {number, f"{number}-2"}


def test_a_copied_store_lists_the_same_runs_each_once(store: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = {run_in(store / "runs" / name) for name in "abc"}
    shutil.copytree(store_folder(), store / "other" / "store")
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(store / "other"))
    assert {run.id for run in found_runs().runs} == numbers
    assert len(found_runs().runs) == 3


def test_damaged_records_are_set_aside_by_name_and_made_again_from_the_folders(store: Path):
    numbers = {run_in(store / "runs" / name) for name in "abc"}
    files = sorted((store_folder() / "runs").glob("r*.json"))
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[: len(whole) // 2])
    files[1].write_bytes(b"")
    files[2].write_bytes(b"\0" * 4096)
    found = found_runs()
    assert {run.id for run in found.runs} == numbers
    assert "3 damaged records of runs set aside" in found.notes[0]
    assert {path.name for path in (store_folder() / "damaged").iterdir()} == {
        f"runs-{file.name}" for file in files
    }
    assert found_runs().notes == ()
    assert sorted((store_folder() / "runs").glob("r*.json")) == files


def test_a_store_that_is_gone_is_made_again_from_the_folders(store: Path):
    numbers = {run_in(store / "runs" / name) for name in "ab"}
    shutil.rmtree(store_folder())
    assert {run.id for run in found_runs().runs} == numbers


def test_a_damaged_run_file_is_read_from_the_store_and_is_written_again_by_the_next_session(store: Path):
    folder = store / "runs" / "a"
    number = run_in(folder)
    (folder / "run.json").write_text('{"schema": 1, "id": ')
    (run,) = found_runs().runs
    assert (run.id, run.step) == (number, 5)
    assert "run.json cannot be read" in run.notes[0]
    assert run_in(folder) == number
    assert (folder / "run.json.damaged").exists()
    assert len(json.loads((folder / "run.json").read_text())["sessions"]) == 2


def test_records_of_a_newer_release_are_left_as_they_are(store: Path):
    folder = store / "runs" / "a"
    number = run_in(folder)
    newer = json.dumps({"schema": 2, "id": number, "anything": []})
    (folder / "run.json").write_text(newer)
    (store_folder() / "runs" / f"{number}.json").write_text(newer)
    found = found_runs()
    assert [run.state for run in found.runs] == ["unknown"]
    assert "of schema 2" in found.runs[0].words
    assert "1 records of runs are of a newer release" in found.notes[0]
    held = RunFolder(folder, resume=True, discard_steps=True)
    held.create()
    refused = KeptRun(held, CONFIG, "1xCPU", 5).refused
    held.close()
    assert "another release wrote" in refused
    assert (folder / "run.json").read_text() == newer


def test_a_store_that_cannot_be_written_is_words_and_the_runs_are_listed(store: Path):
    shutil.rmtree(store_folder(), ignore_errors=True)
    store_folder().parent.mkdir(exist_ok=True)
    store_folder().write_text("a file where the store should be")
    held, kept = begun(store / "runs" / "a")
    held.close()
    assert "cannot be written" in kept.refused
    found = found_runs()
    assert [run.folder.name for run in found.runs] == ["a"]
    assert any("cannot be written" in note for note in found.notes)


def test_a_full_disk_loses_nothing_once_there_is_room(store: Path):
    folder = store / "runs" / "a"
    held = RunFolder(folder, resume=True)
    held.create()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as a full disk, for files and for the store
    try:
        kept = KeptRun(held, CONFIG, "1xCPU", 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written" in kept.refused
    assert "run.json" in held.writes.refused
    assert not (folder / "run.json").exists()
    ended(kept)
    held.close()
    (run,) = found_runs().runs
    assert (run.state, run.step, run.folder) == ("finished", 5, folder)


def test_files_that_are_pipes_or_loops_are_words_and_nothing_hangs(store: Path):
    folder = store / "runs" / "a"
    run_in(folder)
    for name in ("weighing.json", "measurement.json", "notices.jsonl"):
        os.mkfifo(folder / name)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    run = run_record(folder)
    assert (run.phases(), run.notices(), run.samples(), run.config()) == ({}, (), (), {})
    made = mw.compare(folder, folder)
    assert "weighing.json cannot be read: it is a pipe, not a file" in made.sides[0].notes[0]
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    (run,) = found_runs().runs
    assert "it is a pipe" in run.notes[0]


def test_half_a_run_is_listed_with_words(store: Path):
    folder = store / "runs" / "a"
    run_in(folder)
    for name in ("run.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "lo')
    shutil.rmtree(store_folder())
    (run,) = found_runs().runs
    assert (run.id, run.step, run.loss) == ("", 5, pytest.approx(0.2))
    assert "run.json is not there" in run.notes[0]


def test_hostile_folders_and_names_are_read_without_harm(store: Path):
    folder = store / "runs" / "a"
    run_in(folder)
    run = json.loads((folder / "run.json").read_text())
    evil = "\x1b[2J<script>alert(1)</script>\u202e"
    run |= {"name": evil, "fleet": evil, "steps": "many", "tokens_per_step": -(10**200), "sessions": [7, {}]}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "loop").symlink_to(folder)
    (store / "runs" / "self").symlink_to(store / "runs")
    (folder / "tags.json").write_text('{"tags": [1, null, "<b>", {}]}')
    (folder / "notices.jsonl").write_text('[]\n{"step": 1, "message": "\\u001b[2J"}\n{"step": "x"}\n')
    made = mw.runs(store)
    assert [each.steps for each in made] == [None]
    assert "\x1b" not in str(made)
    assert "<script>alert" not in made.to_html()
    assert [entry["step"] for entry in run_record(folder).notices()] == [1]


@pytest.mark.parametrize("seconds", [1e-320, 1e299])
def test_seconds_that_no_step_takes_leave_every_answer_finite(store: Path, seconds: float):
    for name in ("run", "other"):
        run_in(store / name)
    path = store / "run" / "run.json"
    fields = json.loads(path.read_text())
    fields["sessions"][-1]["step_seconds"] = seconds
    weighing = {"step_seconds": dict.fromkeys(("low", "expected", "high"), seconds), "mfu": seconds}
    path.write_text(json.dumps({**fields, "weighing": weighing, "tokens_per_step": 2**62}))
    (live,) = Shelf([store / "run"]).runs
    compared = mw.compare(store / "run", store / "other")
    for answer in (mw.runs(store).to_dict(), compared.to_dict(), live.row(), live.details()):
        json.dumps(answer, allow_nan=False)
    assert str(compared)
    assert str(mw.runs(store))


def test_curves_follow_a_file_that_grows_is_cut_and_is_rolled_back(store: Path):
    folder = store / "runs" / "a"
    run_in(folder)
    curves = run_record(folder).curves()
    assert curves.curve("loss").steps == (1, 2, 3, 4, 5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": NaN}\nnoise\n{"step": 4, "loss": 9.0}\n{"step": 5, "lo')
    assert curves.read_whole()
    assert curves.curve("loss").steps == (1, 2, 3, 4)
    assert curves.curve("loss").means[-1] == 9.0
    assert curves.broken == 1
    assert not curves.read_whole()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    assert curves.read_whole()
    assert curves.curve("loss").means == (3.0,)


def test_a_long_run_is_down_sampled_and_keeps_its_extremes(store: Path):
    folder = store / "runs" / "a"
    run_in(folder)
    losses = [1.0] * 5000
    losses[3210] = 50.0
    lines = (json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    curve = run_record(folder).curves().curve("loss", most=100)
    assert 50 <= len(curve.steps) <= 100
    assert curve.steps[-1] == 5000
    assert max(curve.highs) == 50.0
    assert sum(high == 50.0 for high in curve.highs) == 1


@pytest.fixture
def two(store: Path) -> SimpleNamespace:
    return SimpleNamespace(a=run_in(store / "runs" / "a"), b=run_in(store / "runs" / "b", loss=3.0))


def test_runs_are_filtered_and_sorted_by_their_fields(two: SimpleNamespace):
    assert [run.id for run in mw.runs(where="loss>1")] == [two.b]
    assert [run.id for run in mw.runs(where=["state=finished", "folder~/a"])] == [two.a]
    assert [run.id for run in mw.runs(sort="-loss")] == [two.b, two.a]
    assert [run.id for run in mw.runs(sort="loss")] == [two.a, two.b]
    assert len(mw.runs(where=["optimizer.learning_rate=0.5"])) == 2
    assert len(mw.runs(where=["state!=finished"])) == 0
    assert mw.runs(where=["state!=finished"]).line == "the filters leave none of 2"
    for wrong in ("losss<3", "loss", "=3", "loss<low", "loss>nan"):
        with pytest.raises(mw.InputError):
            mw.runs(where=[wrong])
    with pytest.raises(mw.InputError, match="no kind"):
        mw.runs(kind="run")


def test_the_list_is_one_screen_with_the_words_of_what_died(store: Path):
    for number in range(3):
        run_in(store / "runs" / f"good-{number}")
    begun(store / "runs" / "bad")[0].close()
    made = mw.runs(most=2)
    text = str(made)
    assert "4 runs: 1 dead, 3 finished" in text
    assert "and 2 more" in text
    assert "dead: process" in text
    assert max(map(len, text.splitlines())) <= 100
    assert made.to_dict()["records"][0]["state"] == "dead"
    assert "<table" in made.to_html()


def test_a_step_that_is_far_from_its_prediction_shows_by_how_much_and_no_multiple(store: Path):
    run_in(store / "runs" / "a")
    path = store / "runs" / "a" / "run.json"
    predicted = {"step_seconds": {"low": None, "expected": 4e-6, "high": None}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "weighing": predicted}))
    assert "500 ms more" in str(mw.runs(store / "runs"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, r"^3 is not the name of a folder"),
        (None, r"^None is not the name of a folder"),
        (["a"], r"is not the name of a folder"),
        ("a\0b", "is no folder: .*no name of a file"),
        ("x" * 5000, "is no folder: .*too long"),
        ("nowhere", "'nowhere' is no folder: nothing is there"),
    ],
)
def test_a_record_of_what_is_no_folder_is_refused_in_words(given, words):
    with pytest.raises(mw.InputError, match=words) as refused:
        run_record(given)
    assert "meshwright train" in refused.value.hint
    assert len(refused.value.message) < 500
