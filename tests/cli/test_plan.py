"""`meshwright plan`: one screen, files to train with, and exit statuses for scripts."""

import pytest

from tests import commands

pytestmark = pytest.mark.once  # tests/test_plan.py has plans by another Python

FIX = [f"--fix={knob}" for knob in ("offload=none", "context=1", "inner=tensor", "remat=full", "stage=1")]


def run(*arguments, cwd):
    return commands.run("plan", *arguments, folder=cwd)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    options = ["--toml", "best.toml", "--emit", "slurm", "--html", "plan.html"]
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
        (["--fix", "tensor"], "cannot read"),
        (["--budget", "0"], "cannot be spent"),
        (["--fleets", "8xH100"], "--on is of one"),
    ],
)
def test_wrong_options_end_with_status_2_and_words(options, words, tmp_path):
    done = run("bytes-nano", "--on", "16xH100", *options, cwd=tmp_path)
    assert done.status == 2
    assert words in done.talk
    assert "hint:" in done.talk
