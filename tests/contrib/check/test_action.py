"""The action of the repository, its scripts run in order as a workflow runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / ".github/action"
GH = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
if [[ $* == *--paginate* ]]; then echo "$EARLIER"; fi
"""


def run(script, folder, **variables):
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(
        ["bash", str(script)], cwd=folder, env={**environment, "PATH": path}, capture_output=True, text=True
    )


def test_the_steps_weigh_and_leave_a_comment(tmp_path):
    (tmp_path / "meshwright.toml").write_text(
        '[budget.small]\nweigh = ["linear", "--on", "8xH100"]\npeak = { was = "1 MiB", allow = "0" }\n'
    )
    out, output, summary = tmp_path / "out", tmp_path / "output", tmp_path / "summary.md"
    github = {"GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": output, "GITHUB_STEP_SUMMARY": summary}
    done = run(SCRIPTS / "check.sh", tmp_path, ACTION_FOLDER=ROOT, OUT=out, AGAINST="", FILE="", **github)
    assert done.returncode == 1, done.stderr
    assert output.read_text() == "status=1\n"
    assert "::error file=" in done.stderr
    assert "1 over" in (out / "comment.md").read_text()
    assert summary.read_text() == (out / "comment.md").read_text()
    assert {path.name for path in out.iterdir()} == {"comment.md", "check.sarif", "check.xml", "post.sh"}


@pytest.mark.once
@pytest.mark.parametrize(
    ("comment", "earlier", "method"),
    [("text", "", "POST"), ("text", "17", "PATCH"), ("", "17", "PATCH"), ("", "", None)],
)
def test_there_is_one_comment_which_is_edited_in_place(comment, earlier, method, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gh").write_text(GH)
    (tmp_path / "bin/gh").chmod(0o755)
    (tmp_path / "comment.md").write_text(comment and f"<!-- meshwright check -->\n{comment}\n")
    calls = tmp_path / "calls"
    done = run(SCRIPTS / "post.sh", tmp_path, CALLS=calls, EARLIER=earlier, REPOSITORY="a/b", NUMBER=3)
    assert done.returncode == 0, done.stderr
    posted = [line for line in calls.read_text().splitlines() if "--method" in line]
    assert [line.split()[2] for line in posted] == ([] if method is None else [method])
    if not comment and method:
        assert "Every budget is within" in calls.read_text()


def test_the_action_reads_alone_and_names_scripts_that_exist():
    import yaml

    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    for step in steps:
        assert "${{" not in step.get("run", ""), (
            "an expression in a script is code of whoever wrote its value"
        )
    assert any("check.sh" in step.get("run", "") for step in steps)
