"""Runs, weighings and plans side by side, and the commands that list, tag, remove and compare them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import meshwright as mw
from tests.commands import run
from tests.contrib.runs.conftest import begun, run_in


def told(*words: str, status: int = 0) -> str:
    done = run(*words)
    assert done.status == status, done
    return done.talk + done.output


def test_a_weighing_is_kept_once_and_is_compared_by_lines_while_its_program_is_cached(store: Path):
    for _ in range(2):
        mw.weigh("linear", on="8xH100")
    mw.weigh("linear", on="4xH100")
    eight, four = sorted(mw.runs(kind="weighings"), key=lambda each: each.fields["fleet"], reverse=True)
    made = mw.compare(eight.id, four.id)
    assert made.settings["fleet"] == ("8xH100", "4xH100")
    assert made.difference is not None
    assert (
        made.difference.settings
        == mw.diff(mw.weigh("linear", on="8xH100"), mw.weigh("linear", on="4xH100")).settings
    )
    assert made.sides[0].amounts["needed_bytes"] == eight.fields["needed_bytes"]
    again = mw.compare(eight, mw.weigh("linear", on="8xH100"))
    assert again.settings == {}
    assert again.difference is not None
    assert again.difference.is_nothing


def test_a_weighing_that_weighs_otherwise_today_keeps_its_own_figures_and_says_so(store: Path):
    mw.weigh("linear", on="8xH100")
    (kept,) = mw.runs(kind="weighings")
    file = next((store / "cache/store/weighings").glob("w*.json"))
    fields = json.loads(file.read_text())
    fields["step_seconds"]["expected"] *= 2
    file.write_text(json.dumps(fields))
    made = mw.compare(kept.id, mw.weigh("linear", on="4xH100"))
    assert made.sides[0].amounts["predicted_seconds"] == fields["step_seconds"]["expected"]
    assert made.difference is None
    assert "weighs otherwise today" in made.sides[0].notes[0]


def test_a_plan_is_kept_with_its_candidates_and_compared_by_its_best(store: Path):
    plan = mw.plan("linear", on="2xH100", budget_seconds=1)
    (kept,) = mw.runs(kind="plans")
    assert plan.winner is not None
    assert kept.fields["best"] == plan.winner.words
    assert len(kept.fields["candidates"]) == len(plan.candidates)
    made = mw.compare(kept, plan)
    assert made.sides[0].amounts["predicted_seconds"] == made.sides[1].amounts["predicted_seconds"]
    assert made.settings == {}


@pytest.mark.once
def test_real_runs_are_listed_with_prediction_and_end_and_compared_by_settings_and_curves(store: Path):
    mw.train("linear", on="1xCPU", steps=4, folder=Path("runs/good"))
    changed = ["optimizer.learning_rate=1e30"]
    with pytest.raises(mw.MeshwrightError):
        mw.train("linear", on="1xCPU", steps=4, folder=Path("runs/bad"), overrides=changed)
    bad, good = mw.runs()
    assert (good.state, good.step, good.held_out_loss is not None) == ("finished", 4, True)
    assert (bad.state, "the loss is" in bad.words) == ("failed", True)
    assert good.predicted.expected == pytest.approx(good.sessions[-1]["step_seconds"] / (1 + good.step_error))
    assert all(sum(each.phases().values()) > 0 for each in (bad, good))
    assert (bad.folder / "phases.json").exists()
    made = mw.compare("runs/good", "bad")
    assert list(made.settings) == ["optimizer.learning_rate"]
    assert made.sides[0].curves["loss"].steps == (1, 2, 3, 4)
    text = str(made)
    assert "step, predicted" in text
    assert "bad failed: step" in text
    assert made.to_html().count("<svg") >= 2 * 3, "each curve is drawn for wide and for narrow screens"
    loss = made.to_dict()["sides"][0]["curves"]["loss"]
    assert loss["values"] == [line["loss"] for line in _lines(good.folder) if "loss" in line]


def _lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_cannot_be_compared_is_refused_with_what_to_do(store: Path):
    run_in(store / "runs" / "a")
    run_in(store / "runs" / "b")
    Path("x.json").write_text("{")
    for sides, words in (
        (("a",), "1 side cannot"),
        (("a", "nothing"), "named 'nothing'"),
        (("a", "plain"), "names 2 records"),
        (("a", "x.json"), "x.json"),
    ):
        with pytest.raises(mw.InputError, match=words):
            mw.compare(*sides)
    with pytest.raises(mw.InputError, match=r"^3 is nothing that can be compared"):
        mw.compare(3, 4)  # type: ignore
    with pytest.raises(mw.InputError, match=r"^7 is no folder"):
        mw.compare("a", "b", places=7)  # type: ignore
    for wrong in ({"where": 3}, {"where": [3]}, {"sort": 3}, {"kind": None}, {"most": "x"}, {"most": -1}):
        with pytest.raises(mw.InputError, match=r"is no text|cannot be shown"):
            mw.runs(**wrong)
    with pytest.raises(mw.InputError, match=r"^None is no folder"):
        mw.runs(None)  # type: ignore


def test_a_weighing_that_the_store_cannot_keep_says_so_in_a_line(store: Path):
    mw.weigh("linear", on="8xH100")
    mw.plan("linear", on="2xH100", budget_seconds=1)
    for kind in ("weighings", "plans"):
        shutil.rmtree(store / "cache/store" / kind)
        (store / "cache/store" / kind).write_text("a file where a folder is to be")
    made = mw.weigh("linear", on="8xH100")
    (words,) = made.warnings
    assert words.startswith(
        "not in the list of `meshwright runs --kind weighings`: the cache cannot be written"
    )
    assert made.fits
    assert words in " ".join(told("weigh", "linear", "--on", "8xH100").split())
    plan = mw.plan("linear", on="2xH100", budget_seconds=1)
    assert plan.notes[-1].startswith("not in the list of `meshwright runs --kind plans`")


def test_the_commands_list_tag_and_compare(store: Path):
    number = run_in(store / "runs" / "a")
    run_in(store / "runs" / "b", loss=3.0)
    assert json.loads(told("runs", "--json"))["records"][1]["id"] == number
    assert "baseline" in told("runs", "tag", number[:7], "baseline")
    assert "baseline" in told("runs", "--where", "tag=baseline")
    assert "training loss" in told("compare", "baseline", "b", "--html", "page.html")
    assert "<svg" in Path("page.html").read_text()
    assert "no tags" in told("runs", "tag", "baseline", "baseline", "--remove")
    assert "is no tag" in told("runs", "tag", "b", "<b>", status=2)


def test_rm_removes_what_the_run_wrote_and_nothing_else(store: Path):
    folder, outside = store / "runs" / "a", store / "precious"
    run_in(folder)
    outside.mkdir()
    (outside / "file").write_text("kept")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "link").symlink_to(outside)
    (folder / "mine.py").write_text("kept")
    (folder / "log.txt").symlink_to(outside / "file")
    told("runs", "rm", "a", status=2)  # nobody is at the terminal to answer
    assert (folder / "run.json").exists()
    assert "1 other files stay: mine.py" in told("runs", "rm", "a", "--yes")
    assert [path.name for path in folder.iterdir()] == ["mine.py"]
    assert (outside / "file").read_text() == "kept"
    assert len(mw.runs()) == 0


def test_rm_removes_a_whole_folder_and_the_records_of_what_is_gone(store: Path):
    run_in(store / "runs" / "a")
    run_in(store / "runs" / "b")
    (store / "runs" / "b").rename(store / "elsewhere")
    told("runs", "rm", "a", "nothing", "--yes", status=2)
    assert (store / "runs" / "a").exists(), "all are found before one is removed"
    assert "its record alone" in told("runs", "rm", "a", "b", "--yes")
    assert not (store / "runs" / "a").exists()
    assert (store / "elsewhere" / "run.json").exists()
    assert len(mw.runs()) == 0


def test_rm_refuses_a_run_that_is_under_way_and_a_folder_that_is_a_link(store: Path):
    held, _ = begun(store / "runs" / "a")
    told("runs", "rm", "a", "--yes", status=2)
    held.close()
    (store / "runs" / "a").rename(store / "real")
    (store / "runs" / "a").symlink_to(store / "real")
    told("runs", "rm", "runs/a", "--yes", status=2)
    assert (store / "real" / "run.json").exists()
