"""`meshwright plan`: one screen, files to train with, and exit statuses for scripts."""

import itertools
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from meshwright.cli import _plan_progress
from meshwright.planned import PlanProgress
from tests import commands

pytestmark = pytest.mark.once  # tests/test_plan.py has plans by another Python

FIX = [f"--fix={knob}" for knob in ("offload=none", "context=1", "inner=tensor", "remat=full", "stage=1")]


def run(*arguments, cwd):
    return commands.run("plan", *arguments, folder=cwd)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    options = ["--toml", "best.toml", "--emit", "slurm", "--html", "plan.html", "--tokens", "5000"]
    done = run("bytes-nano", "--on", "16xH100", "--budget", "1", *FIX, *options, cwd=folder)
    return folder, done


def test_it_prints_the_winner_in_one_screen_and_writes_the_files(planned):
    folder, done = planned
    assert done.status == 0, done.talk
    assert "BEST: " in done.output
    assert "meshwright train best.toml" in " ".join(done.output.split())
    assert len(done.output.splitlines()) <= 45
    assert "#SBATCH --nodes=2" in (folder / "best.sbatch").read_text()
    assert "<circle" in (folder / "plan.html").read_text()
    run = tomllib.loads((folder / "best.toml").read_text())
    assert run["steps"] == 10, "the steps that read 5,000 tokens"
    assert "checkpoint" not in run, "defaults are not written"


def test_it_tells_how_far_it_is_where_no_terminal_is(planned):
    _, done = planned
    lines = [line for line in done.talk.splitlines() if " compiled" in line]
    assert "planning bytes-nano on 16xH100" in done.talk.splitlines()[0]
    assert len(lines) >= 2
    assert done.output.splitlines()[1].startswith("COMPILED: ")


def test_lines_come_with_news_and_once_in_a_while(capsys):
    clock = itertools.count(0, 6.0)
    log = _plan_progress.PlanLog("planning", now=lambda: next(clock))
    known = {"num_failed": 0, "best": None, "running": ("fsdp=8",), "budget_seconds": 60.0}
    for compiled in (0, 0, 0, 0, 1):
        log.event(PlanProgress(num_considered=9, num_compiled=compiled, seconds=1.0, **known))
    said = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [words.partition(" of")[0] for words in said] == ["planning", "0", "0", "1"]


def test_sigterm_ends_a_search_with_the_answer_so_far(tmp_path, monkeypatch):
    real = _plan_progress.PlanLog.event

    def event(log, event):
        real(log, event)
        if event.num_compiled:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(_plan_progress.PlanLog, "event", event)
    # So many candidates that some are still running when the first is compiled, also where all are kept.
    done = run("bytes-nano", "--on", "8xH100", "--budget", "60", cwd=tmp_path)
    assert done.status == 128 + signal.SIGTERM
    assert "BEST: " in done.output
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_before_anything_is_compiled_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "meshwright.programs._configured_plan.space_of", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    done = run("linear", "--on", "4xH100", cwd=tmp_path)
    assert done.status == 128 + signal.SIGTERM
    assert "stopped before anything was compiled" in done.talk


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ("llama3-8b", ["--emit", "slurm", "--tokens", "15B"], "reads random tokens"),
        ("qwen2.5-7b", ["--emit", "k8s", "--data", "synthetic"], "has no steps"),
        ("llama3-8b", ["--data", "nowhere.txt"], "no such file or folder"),
        ("llama3-8b", ["--emit", "slurm", "--image", "mine"], "--image is of a job for Kubernetes"),
    ],
)
def test_a_run_that_could_not_train_is_refused_before_compiling(config, options, words, tmp_path):
    done = run(config, "--on", "16xH100", "--toml", "best.toml", *options, cwd=tmp_path)
    assert done.status == 2
    assert words in done.talk
    assert "hint:" in done.talk


def test_where_nothing_fits_no_file_is_written_and_none_is_named_to_train(tmp_path):
    search = ["--fix", "rest", "--set", "layout=fsdp=-1", "--budget", "0.1", "--toml", "best.toml"]
    done = run("llama3-70b", "--on", "1xH100", *search, cwd=tmp_path)
    assert done.status == 0, done.talk
    assert "NOTHING FITS" in done.output
    assert "best.toml is not written: nothing was found that fits." in " ".join(done.output.split())
    assert "meshwright train" not in done.output
    assert not any(tmp_path.iterdir())


STEP = """import jax
import jax.numpy as jnp

def build(mesh):
    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w))
    return step, (jnp.ones((64, 64)), jnp.ones((8, 64)))
"""


def test_a_function_is_not_said_to_be_a_run_to_train(tmp_path):
    (tmp_path / "own.py").write_text(STEP)
    options = ["--on", "1xH100", "--budget", "0.1", "--toml", "best.toml"]
    done = run("own.py:build", *options, cwd=tmp_path)
    assert (done.status, "own.py:build is not a configuration" in done.talk) == (2, True)
    assert "meshwright train" not in done.output


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    """A folder with a planned run of two steps on own text, and its job files."""
    folder = tmp_path_factory.mktemp("emitted")
    (folder / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 40)
    for kind in ("slurm", "k8s"):
        options = ["--toml", "best.toml", "--emit", kind, "--tokens", "1000", "--data", "book.txt"]
        done = run("bytes-nano", "--on", "2xH100", "--budget", "0.1", "--fix", "rest", *options, cwd=folder)
        assert done.status == 0, done.talk
    return folder


def started(command, folder, devices):
    """Run the command of a job where its scheduler would, on simulated devices."""
    assert command[0] == "meshwright"
    command = [sys.executable, "-m", *command, "--on", f"{devices}xCPU"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.wide
def test_a_stub_of_sbatch_runs_the_steps_that_were_planned(emitted):
    # sbatch runs the file with bash where it was submitted; srun starts the command for each task: here one,
    # that has the simulated devices of all.
    srun = emitted / "srun"
    python = shlex.quote(sys.executable)
    srun.write_text(
        f'#!/bin/bash\nwhile [ "$1" != meshwright ]; do shift; done\nexec {python} -m "$@" --on 2xCPU\n'
    )
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{emitted}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", "best.sbatch"], cwd=emitted, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "finished after 2 steps" in done.stderr
    assert (emitted / "runs/bytes-nano/report.html").is_file()


@pytest.mark.wide
def test_a_stub_of_kubectl_runs_the_steps_that_were_planned(emitted, tmp_path):
    documents = {each["kind"]: each for each in yaml.safe_load_all((emitted / "best.k8s.yaml").read_text())}
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    assert "image" not in container, "none is published"
    (tmp_path / "run.toml").write_text(documents["ConfigMap"]["data"]["run.toml"])
    mounts = {"/etc/meshwright": str(tmp_path), "/runs": str(tmp_path / "runs")}
    command = container["command"]
    for mounted, here in mounts.items():
        command = [word.replace(mounted, here) for word in command]
    done = started(command, tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert "finished after 2 steps" in done.stderr
    assert Path(tmp_path, "runs/bytes-nano/report.html").is_file()


def test_json_goes_to_stdout_alone(planned):
    folder, _ = planned
    done = run("bytes-nano", "--on", "16xH100", "--budget", "0.1", *FIX, "--json", cwd=folder)
    fields = done.json
    assert fields["fleet"] == "16xH100"
    assert fields["best"]["fits"] is True


@pytest.mark.wide
def test_fleets_are_compared_on_one_screen(tmp_path):
    options = ["--fleets", "8xH100,8xA100-80GB", "--budget", "0.2", *FIX]
    done = run("bytes-nano", *options, "--html", "fleets.html", cwd=tmp_path)
    assert done.status == 0, done.talk
    assert "FASTEST: " in done.output
    assert len(done.output.splitlines()) <= 30
    assert "8xA100-80GB" in (tmp_path / "fleets.html").read_text()


def test_without_a_fleet_it_says_how_to_name_one(tmp_path):
    done = run("bytes-nano", cwd=tmp_path)
    assert done.status == 2
    assert "--on 64xH100" in done.talk


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--emit", "pbs", "--toml", "x.toml"], "'pbs' is not known"),
        (["--emit", "slurm"], "needs the run"),
        (["--emit", "slurm", "--toml", "x.sbatch"], "hint: name it x.toml;"),
        (["--emit", "slurm", "--toml", "x.toml", "--on", "8xCPU"], "one machine's simulated devices"),
        (["--emit", "slurm", "--toml", "x.toml", "--on", "local"], "one machine's simulated devices"),
        (["--emit", "slurm", "--toml", "x.toml", "--on", "v5p-64"], "comes in whole slices"),
        (["--toml", "no/x.toml"], "cannot write no/x.toml: No such file or directory"),
        (["--html", "."], "cannot write .: Is a directory"),
        (["--fix", "tensor"], "cannot read"),
        (["--budget", "0"], "cannot be spent"),
        (["--fleets", "8xH100"], "--on is of one"),
    ],
)
def test_wrong_options_end_with_status_2_and_words(options, words, tmp_path):
    fleet = [] if "--on" in options else ["--on", "16xH100"]
    done = run("bytes-nano", *fleet, *options, cwd=tmp_path)
    assert done.status == 2
    assert words in done.talk
    assert "hint:" in done.talk
    assert not (tmp_path / "x.toml").exists()
