"""`meshwright calibrate` and `meshwright reconcile` on the command line."""

import pytest

from meshwright.api import history_path
from meshwright.compiler import write_cached
from meshwright.measure import calibration_of_this_machine, calibration_path

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own: what is learnt here must not reach other tests."""
    rates = calibration_of_this_machine()
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    write_cached(calibration_path("CPU"), rates.to_json())


def test_a_measured_step_prints_classes_and_the_step_before_and_after(meshwright):
    done = meshwright("calibrate", "linear", "--on", "8xH100", "--measured", "150us")
    assert done.status == 0
    lines = done.output.splitlines()
    assert lines[0] == "H100: predictions use these factors from now on"
    assert any(line.split()[:1] == ["memory-bound"] for line in lines)
    assert any(line.split()[:3] == ["linear,", "data=8", "on"] and "150 us" in line for line in lines)
    assert "times factors of 1 measured step" in " ".join(
        meshwright("weigh", "linear", "--on", "8xH100", "--verbose").output.split()
    )
    assert "removed 1 measured step: " in meshwright("calibrate", "--forget", "--on", "8xH100").output
    assert meshwright("calibrate", "--forget", "--on", "8xH100", "--json").json == {
        "schema": 1,
        "forgotten": 0,
    }


def test_several_measured_steps_are_read_from_a_file(meshwright, tmp_path):
    path = tmp_path / "runs.toml"
    path.write_text(
        "".join(f'[[run]]\nconfig = "linear"\non = "{n}xH100"\nmeasured = "150us"\n' for n in (4, 8))
    )
    answer = meshwright("calibrate", "--runs", str(path), "--json").json
    assert (answer["schema"], answer["num_runs"], len(answer["steps"])) == (1, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no measured run is named"),
        (("--forget",), "--forget removes all measured steps of a chip"),
        (("linear", "--forget", "--on", "8xH100"), "--forget removes all measured steps of a chip"),
        (("linear", "--runs", "x.toml"), "--runs names everything in its file"),
        (("linear", "--on", "8xH100", "--measured", "-3s"), "cannot read '-3s' as the seconds of a step"),
        (("linear", "--on", "8xH100", "--trace", "none"), "no trace at none"),
    ],
)
def test_what_calibrate_cannot_use_is_refused_in_words(meshwright, arguments, words):
    done = meshwright("calibrate", *arguments)
    assert (done.status, words in done.talk) == (2, True)


def test_a_run_is_reconciled_and_the_history_is_printed_and_drawn(meshwright, tmp_path):
    run = str(tmp_path / "run")
    assert meshwright("train", "linear", "--on", "1xCPU", "--steps", "4", "--folder", run).status == 0
    done = meshwright("reconcile", run)
    assert done.output.splitlines()[0] == run
    assert "step seconds" in done.output
    assert f"History of errors: {history_path()}" in done.output
    (answer,) = meshwright("reconcile", run, "--json").json
    assert answer["run"] == run
    shown = meshwright("reconcile", "--history", "--html", str(tmp_path / "h.html"))
    assert "History of errors of 1 measured step\n" in shown.output
    assert "<svg" in (tmp_path / "h.html").read_text()
    rows = meshwright("reconcile", "--history", "--json").json["rows"]
    assert {"argument bytes per device", "step seconds"} <= {row["quantity"] for row in rows}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no run is named"),
        (("nowhere",), "nowhere/reconciliation.json cannot be read"),
        (("run", "--history"), "--history shows all runs"),
        (("run", "--html", "h.html"), "--html draws a gap or the history"),
    ],
)
def test_what_reconcile_cannot_use_is_refused_in_words(meshwright, arguments, words):
    done = meshwright("reconcile", *arguments)
    assert (done.status, words in done.talk) == (2, True)


def test_an_empty_history_says_so(meshwright):
    assert "No step yet." in meshwright("reconcile", "--history").output
