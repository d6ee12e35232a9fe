"""Budgets: what is within, over or not weighed; what is written for people and machines."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

import meshwright as mw
from meshwright.contrib.check import (
    LONGEST_COMMENT,
    Figures,
    annotations_of,
    comment_of,
    figures_of,
    junit_of,
    sarif_of,
)
from meshwright.errors import InputError
from tests.commands import run

FILE = """# what we promise
[budget.small]  # the smallest
weigh = ["linear", "--on", "8xH100"]
peak = { was = "1 GiB", allow = "+1 %" }
flops = { was = "1 GFLOP", allow = "0" }
traffic = { data = { was = "1 MiB", allow = "+1 KiB" } }
time = { was = "2 ms", allow = "+3 %" }
fits = true
"""


@cache
def real():
    return figures_of(mw.weigh("linear", on="8xH100").to_dict(), "small")


def made_of(**fields) -> Figures:
    """Return figures that are within the budget of `FILE`, but for the given fields."""
    within = {
        "memory": {"parameters": 2**30},
        "flops": {"": 10**9},
        "flops_by_format": {"bf16": 10**9},
        "wire_bytes_by_axis": {"data": 2**20},
        "traffic": {"all-reduce over data": 2**20},
        "messages": {"all-reduce over data": 1},
        "by_place": {("check_me.py:7", "parameters", "layer"): 2**30},
        "flops_by_place": {("check_me.py:9", "bf16", ""): 10**9},
        "seconds": {"matmul": 2e-3},
        "step_seconds": 2e-3,
        "fits": True,
    }
    return replace(real(), **(within | fields))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "meshwright.toml"
    path.write_text(FILE)
    return path


def checked(weigher=lambda side: made_of(), **options):
    return mw.check(weigher=weigher, **options)


def test_a_weighing_within_its_budget_has_status_0(file):
    made = checked()
    assert (made.status, made.line) == (0, "meshwright.toml: 1 within")
    assert comment_of(made) == ""
    assert annotations_of(made) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"memory": {"parameters": int(1.012 * 2**30)}},
            "peak: 1.01 GiB, was 1.00 GiB (+1.2 %; +1 % allowed)",
        ),
        ({"flops": {"": 10**9 + 10**7}}, "flops: 1.01 GFLOP, was 1.00 GFLOP (+1 %; 0 allowed)"),
        ({"wire_bytes_by_axis": {"data": 2**20 + 3000}}, "traffic over data: 1.00 MiB, was 1.00 MiB"),
        ({"step_seconds": 2.1e-3}, "time: 2.10 ms, was 2.00 ms (+5 %; +3 % allowed)"),
        ({"fits": False}, "it does not fit"),
    ],
)
def test_what_is_over_is_said_with_its_figures(fields, words, file):
    made = checked(lambda side: made_of(**fields))
    assert made.status == 1
    (budget,) = made.budgets
    assert budget.reasons[0].startswith(words)
    assert "1 over" in str(made)


def test_less_than_the_budget_is_within(file):
    assert checked(lambda side: made_of(memory={"parameters": 2**29}, step_seconds=1e-3)).status == 0


def test_rounding_of_what_was_written_is_not_over(file):
    file.write_text(FILE.replace('was = "1 GFLOP"', 'was = "1.000 GFLOP"'))
    assert checked(lambda side: made_of(flops={"": 10**9 + 4 * 10**5})).status == 0
    assert checked(lambda side: made_of(flops={"": 10**9 + 6 * 10**5})).status == 1


def test_what_cannot_be_weighed_is_never_taken_for_over(file):
    def refuse(side):
        raise InputError("no such preset", hint="look at presets")

    made = checked(refuse)
    assert made.status == 2
    assert "no such preset" in made.budgets[0].reasons[0]
    assert ElementTree.fromstring(junit_of(made)).attrib["errors"] == "1"


def test_a_limit_without_a_figure_needs_one_or_another_commit(file):
    file.write_text(FILE.replace('{ was = "1 GiB", allow = "+1 %" }', '"+1 %"'))
    assert checked().status == 2
    assert "meshwright check --update" in checked().budgets[0].reasons[-1]

    def grown(side):
        return made_of(memory={"parameters": 2**30 if side.revision else 2**31})

    made = checked(grown, against="main")
    assert made.status == 1
    assert made.budgets[0].difference.line.startswith("+1.00 GiB per device (1.00 GiB to 2.00 GiB, +100.0 %)")


def test_update_writes_the_figures_and_keeps_comments_and_order(file):
    bigger = made_of(memory={"parameters": 2**31}, step_seconds=None)
    assert checked(lambda side: bigger, update=True).status == 2  # the time is no longer known
    text = file.read_text()
    assert text.startswith("# what we promise\n[budget.small]  # the smallest\nweigh = ")
    assert 'peak = {was = "2 GiB", allow = "+1 %"}' in text
    assert 'traffic = { data = {was = "1 MiB", allow = "+1 KiB"} }' in text
    assert checked(lambda side: replace(bigger, step_seconds=1.0)).status == 2


def test_a_budget_is_added_with_all_figures(tmp_path, monkeypatch, meshwright):
    monkeypatch.chdir(tmp_path)
    done = meshwright("check", "--init", "linear --on 8xH100 --layout data=8")
    assert done.status == 0, done.output
    again = meshwright("check", "--json")
    (budget,) = again.json["budgets"]
    assert budget["name"] == "linear on 8xH100 --layout data=8"
    assert {limit["name"] for limit in budget["limits"]} == {"peak", "flops", "time", "traffic.data"}
    assert all(limit["state"] == "within" for limit in budget["limits"])


def test_budgets_may_be_in_pyproject(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inner = FILE.replace("[budget.small]", "[tool.meshwright.budget.small]")
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'x'\n\n{inner}")
    assert checked(update=True).status == 0
    assert "[tool.meshwright.budget.small]" in (tmp_path / "pyproject.toml").read_text()


def test_the_place_of_what_is_over_is_named_everywhere(file, monkeypatch):
    monkeypatch.setattr(
        "meshwright.contrib.check._outputs._files_by_name", lambda: {"check_me.py": ["src/check_me.py"]}
    )
    made = checked(lambda side: made_of(memory={"parameters": 2**31}))
    (result,) = json.loads(sarif_of(made))["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("src/check_me.py", 7)
    assert annotations_of(made).startswith(
        "::error file=src/check_me.py,line=7,title=small::peak: 2.00 GiB, was"
    )
    suite = ElementTree.fromstring(junit_of(made))
    assert (suite.attrib["failures"], suite.find("testcase").attrib["name"]) == ("1", "small")
    assert "the largest part is at check me.py:7 layer" in str(made)


def test_a_comment_is_short_marked_and_escapes_what_a_stranger_wrote(file):
    file.write_text(FILE.replace("[budget.small]", '[budget."<script>@all `x` | y"]'))
    many = {f"category_{n}" * 50: 2**31 for n in range(400)}
    text = comment_of(checked(lambda side: made_of(memory=many)))
    assert text.startswith("<!-- meshwright check -->\n")
    assert len(text) <= LONGEST_COMMENT
    assert "<script>" not in text
    assert "@all" not in text
    assert "```text" in text


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[budget.small]", "[budgets.small]", r"no budgets in|has no \[budget"),
        ("peak =", "peek =", "peek is no key of a budget"),
        ('"linear", "--on", "8xH100"', "", "weigh is no list of words"),
        ('"1 GiB"', '"1 GFLOP"', "peak"),
        ('"1 GiB"', '"much"', "cannot read 'much'"),
        ('allow = "+1 %"', 'allow = "some %"', "cannot read 'some %'"),
        ("fits = true", "fits = 1", "fits = 1"),
        ('{ data = { was = "1 MiB", allow = "+1 KiB" } }', "5", "traffic = 5"),
        ("[budget.small]", "[budget", "cannot be read"),
        ('"2 ms"', '"2 GiB"', "no amount of seconds"),
    ],
)
def test_a_wrong_file_is_refused_in_words(before, after, words, file):
    file.write_text(FILE.replace(before, after, 1))
    with pytest.raises(InputError, match=words):
        checked()


def test_a_budget_that_is_not_there_is_refused_with_those_that_are(file):
    with pytest.raises(InputError, match="has no budget 'large'") as error:
        checked(only=["large"])
    assert "small" in error.value.hint


def test_in_a_workflow_the_summary_is_written(file, monkeypatch, tmp_path, meshwright):
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    file.write_text('[budget.a]\nweigh = ["absent", "--on", "8xH100"]\n')
    done = meshwright("check", "--comment", "comment.md", "--junit", "junit.xml", "--sarif", "out.sarif")
    assert done.status == 2
    assert "::warning file=meshwright.toml,line=1,title=a::" in done.talk
    assert summary.read_text().startswith("<!-- meshwright check -->")
    assert (tmp_path / "comment.md").read_text() == summary.read_text()
    assert {"junit.xml", "out.sarif"} <= {path.name for path in tmp_path.iterdir()}
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no/summary.md"))
    done = meshwright("check")
    assert (done.status, "note: no summary was written to" in done.talk) == (2, True)


def test_a_line_that_only_moved_did_not_grow_and_a_time_has_no_place(file):
    before = {("check_me.py:7", "parameters", "layer"): 2**30, ("check_me.py:9", "saved", "layer"): 2**20}
    after = {("check_me.py:8", "parameters", "layer"): 2**30, ("check_me.py:10", "saved", "layer"): 2**29}

    def weigh(side):
        if side.revision:
            return made_of(memory={"parameters": 2**30, "saved": 2**20}, by_place=before)
        return made_of(memory={"parameters": 2**30, "saved": 2**29}, by_place=after, step_seconds=1.0)

    (budget,) = checked(weigh, against="main").budgets
    assert [place for place, _ in budget.places("peak")] == [("check_me.py:10", "saved", "layer")]
    assert budget.places("time") == []


def test_words_that_cannot_be_weighed_add_no_budget(tmp_path, meshwright):
    done = meshwright("check", "--init", "absent --on 8xH100", folder=tmp_path)
    assert done.status == 2
    assert done.talk.endswith("nothing was added to meshwright.toml: not all of it could be weighed\n")
    assert list(tmp_path.iterdir()) == []


def added(folder, text, *options, name="meshwright.toml"):
    """Return what `check --init` did to a file, and its text."""
    if text is not None:
        (folder / name).write_text(text)
    done = run("check", "--init", "linear --on 1xCPU", *options, folder=folder)
    return done, (folder / name).read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("garbage [[[\n", "meshwright.toml cannot be read: "),
        ("budget = 3\n", "no budget can be added to the table budget"),
        ('budget = { a = { weigh = ["linear"] } }\n', "no budget can be added to the table budget"),
        ('[budget."linear on 1xCPU"]\n', "there is a budget 'linear on 1xCPU' already"),
    ],
)
def test_a_file_to_which_no_budget_can_be_added_stays_as_it_is(text, words, tmp_path):
    done, after = added(tmp_path, text)
    assert (done.status, after) == (2, text), done.talk
    assert done.talk.startswith(f"error: {words}")


def test_a_budget_is_added_where_the_others_are_whose_figures_stay(tmp_path):
    before = "[project]\nname = 'x'\n\n" + FILE.replace("[budget.", "[tool.meshwright.budget.")
    done, after = added(tmp_path, before, name="pyproject.toml")
    assert done.status == 0, done.talk
    assert after.startswith(before.rstrip("\n"))
    assert '[tool.meshwright.budget."linear on 1xCPU"]' in after
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_a_budget_that_is_not_weighed_is_taken_out_again(tmp_path):
    done, after = added(tmp_path, FILE, "--only", "large")
    assert (done.status, after) == (2, FILE)
    assert "has no budget 'large'" in done.talk


def test_update_renews_limits_that_are_tables_of_their_own(file):
    text = '[budget.small]\nweigh = ["linear"]\n[budget.small.peak]\nallow = "0"\n[budget.small.traffic]\n'
    file.write_text(f'{text}data = "+1 %"\n[budget.small.traffic.fsdp]\nallow = "0"\n')
    assert checked(update=True).status == 0
    assert checked().status == 0


def test_a_disk_that_is_full_leaves_the_budgets_as_they_were(file, monkeypatch):
    before = file.read_text()

    def full(path, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(file), "replace", full)
    with pytest.raises(InputError, match="No space left"):
        checked(update=True)
    assert file.read_text() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_link_to_the_budgets_stays_one(file):
    kept = file.rename(file.with_name("kept.toml"))
    file.symlink_to(kept)
    kept.chmod(0o640)
    assert checked(update=True).status == 0
    assert file.is_symlink()
    assert "was = " in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o640


def test_the_ends_of_lines_of_windows_stay(tmp_path, monkeypatch):
    done, _ = added(tmp_path, FILE.replace("\n", "\r\n"))
    assert done.status == 0, done.talk
    monkeypatch.chdir(tmp_path)
    checked(update=True)
    content = (tmp_path / "meshwright.toml").read_bytes()
    assert content.count(b"\r\n") == content.count(b"\n") > FILE.count("\n")
    assert b"\r\r" not in content
