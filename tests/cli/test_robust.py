"""What a command meets outside itself: streams, arguments that are no text, a cache that is not writable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

COMMAND = [sys.executable, "-m", "meshwright"]


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The line in bash, `meshwright` being this interpreter's."""
    line = line.replace("meshwright", " ".join(COMMAND))
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("command", "redirected"),
    [
        ("fleets", ">/dev/full"),
        ("formats --json", ">&-"),
        ("--help", ">/dev/full"),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (("fleets", ">&-"), ("formats --json", ">/dev/full"), ("--help", ">&-"))
        ),
    ],
)
def test_an_answer_that_cannot_be_written_is_an_error_with_words(command: str, redirected: str):
    done = shell(f"meshwright {command} {redirected}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the answer cannot be written to stdout: ")
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-"])
def test_talk_that_cannot_be_written_leaves_answer_and_status(redirected: str):
    assert shell(f"meshwright formats --json {redirected}").stdout.startswith("{")
    done = shell(f"meshwright fleets nothing {redirected}")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_reader_that_has_gone_leaves_the_status():
    write = "print('x' * 10**6); sys.exit(3)"
    code = (
        f"import sys; from meshwright.cli._console import standard_streams\nwith standard_streams(): {write}"
    )
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -c 1', sys.executable, code],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "x", "")


@pytest.mark.parametrize(
    "columns",
    ["0", "9" * 5000, *(pytest.param(each, marks=pytest.mark.wide) for each in ("1", "-1", "many"))],
)
def test_a_width_that_is_none_is_not_believed(columns: str):
    done = shell("meshwright formats", COLUMNS=columns)
    assert max(len(line) for line in done.stdout.splitlines()) in range(90, 101)


def test_what_an_encoding_lacks_is_replaced():
    done = shell("meshwright fleets --help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


@pytest.mark.parametrize("argument", [b"\xff.toml", b"a\xe2b"])
def test_an_argument_that_is_no_text_is_the_users_input(argument: bytes):
    done = subprocess.run([*COMMAND, "presets", argument], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: argument 2, ")


@pytest.mark.parametrize(
    "delay", [0.1, 0.4, *(pytest.param(each, marks=pytest.mark.wide) for each in (0.02, 0.25, 0.6))]
)
def test_ctrl_c_at_any_time_shows_no_traceback_of_ours(delay: float):
    command = [*COMMAND, "weigh", "linear", "--on", "1xCPU"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=60)
    assert "site-packages" not in talk
    assert "meshwright/cli/_" not in talk
    assert process.returncode in (130, -signal.SIGINT, 1, 0)  # 1: before Python runs any code of ours


@pytest.mark.parametrize(
    "given",
    [
        ["weigh", "linear", "--on", "1xCPU", "--on", "8xCPU"],
        ["weigh", "linear", "--on=1xCPU", "--on=1xCPU"],
        ["train", "linear", "--on", "1xCPU", "--on", "8xCPU"],
        ["sweep", "linear", "--on", "1xCPU", "--on", "8xCPU"],
        ["data", "tokenize", "x", "--to", "a", "--to", "b"],
    ],
)
def test_an_option_with_one_value_is_refused_twice(meshwright, given: list[str]):
    done = meshwright(*given)
    assert (done.status, done.output) == (2, ""), done.talk
    assert "is given 2 times, and takes one value\nhint: keep one of them" in done.talk


def test_set_may_be_given_again_and_a_flag_repeated(meshwright):
    done = meshwright(
        "weigh", "linear", "--on", "8xH100", "--set", "stepz=1", "--set", "stepy=2", "--check", "--check"
    )
    assert "stepz" in done.talk
    assert "stepy" in done.talk


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["export", "run", "--to", ""], "--to is empty"),
        (["export", "", "--to", "x"], "RUN is empty"),
        (["weigh", "linear", "--on", "8xH100", "--html", ""], "--html is empty"),
        (["weigh", "linear", "--on", "8xH100", "--trace", "no/t.json"], "cannot write no/t.json: No such"),
        (["weigh", "linear", "--on", "8xH100", "--longest", "--price", "2"], "--price is not read beside it"),
        (["weigh", "linear", "--on", "8xH100", "--longest", "--largest-batch"], "--longest is not read"),
        (["weigh", "linear", "--on", "8xH100", "--longest", "--spares", "2"], "--spares is not read beside"),
        (["weigh", "linear", "--on", "8xH100", "--longest", "--as", "jax"], "--as is not read beside it"),
        (["check", "--junit", "no/junit.xml"], "cannot write no/junit.xml: No such"),
        (["train", "linear", "--folder", ""], "--folder is empty"),
        (["weigh", "", "--on", "8xH100"], "CONFIG is empty"),
        (["plan", "", "--on", "8xH100"], "CONFIG is empty"),
        (["fleets", ""], "is empty"),
        (["data", "tokenize", "x", "--to", ""], "names no file"),
        (["train", "--restarts", "2"], "no config is named"),
        (["weigh", "linear", "--on", "9" * 5000 + "xH100"], "cannot read the fleet"),
        (["weigh", "linear", "--on", "8xH100", "--layout", "data=" + "9" * 5000], "more than 1e+12 devices"),
        (["weigh", "linear", "--on", "8xH100", "--set", "steps=" + "9" * 5000], "expected a whole number"),
        (["weigh", "linear", "--on", "8xH100", "--set", "steps=0x" + "f" * 6000], "cannot be read"),
        (
            ["weigh", "linear", "--on", "8xH100", "--set", "model=" + "{a=" * 300 + "1" + "}" * 300],
            "cannot be read",
        ),
        (["weigh", "x" * 5000 + ":y", "--on", "nothing"], "cannot read the fleet"),
        (["weigh", "y" * 300 + ".toml", "--on", "8xH100"], "File name too long"),
        (["sample", "run", "--seed", str(2**64)], "--seed"),
        (["sample", "run", "--tokens", str(2**64)], "--tokens"),
    ],
)
def test_what_cannot_be_is_told_in_words(meshwright, tmp_path, monkeypatch, given: list[str], words: str):
    monkeypatch.chdir(tmp_path)
    done = meshwright(*given)
    assert (done.status, done.output) == (2, ""), done.talk
    assert words in done.talk


def test_a_sweep_is_counted_before_it_is_built(meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = ",".join(map(str, range(1, 400)))
    keys = [
        f"--set={key}={values}" for key in ("seed", "steps", "batch.sequences", "optimizer.learning_rate")
    ]
    began = time.process_time()
    done = meshwright("sweep", "linear", *keys)
    assert (done.status, done.output) == (2, ""), done.talk
    assert "a sweep runs at most 1000" in done.talk
    assert time.process_time() - began < 5


def test_a_cache_that_cannot_be_written_is_named(meshwright, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "file"))
    done = meshwright("weigh", "linear", "--on", "1xCPU")
    assert (done.status, done.output) == (1, "")
    assert done.talk.startswith("error: the cache cannot be written: ")
    assert "set MESHWRIGHT_CACHE_DIR to another folder" in done.talk


def test_without_a_home_the_cache_asks_for_a_place(meshwright, monkeypatch):
    monkeypatch.delenv("MESHWRIGHT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom nobody knows
    done = meshwright("weigh", "linear", "--on", "1xCPU")
    assert (done.status, done.output) == (2, ""), done.talk
    assert "set MESHWRIGHT_CACHE_DIR" in done.talk


def test_a_file_that_the_system_refuses_is_no_traceback(meshwright, monkeypatch):

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "/full/place")

    monkeypatch.setattr("meshwright.weigh", fail)
    done = meshwright("weigh", "linear", "--on", "1xCPU")
    assert done.status == 1
    assert done.talk.startswith(
        "error: the system refuses a file /full/place: No space left on device\nhint: "
    )


def test_escape_sequences_of_a_user_do_not_reach_the_terminal(meshwright, monkeypatch):

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("\x1b[31mred\x07")

    monkeypatch.setattr("meshwright.weigh", fail)
    done = meshwright("weigh", "linear", "--on", "1xCPU")
    assert done.status == 4
    assert "\x1b" not in done.talk
    assert r"\x1b[31mred\x07" in done.talk


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(0)", "ended its process, which ended with status 0"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    ],
)
def test_a_function_that_ends_its_process_is_told_in_words(meshwright, tmp_path, monkeypatch, body, words):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "ending.py").write_text(f"import torch\ndef make(): {body}")
    monkeypatch.chdir(Path(tmp_path))
    done = meshwright("weigh", "ending:make", "--on", "1xH100")
    assert (done.status, done.output) == (2, ""), done.talk
    assert words in done.talk


@pytest.mark.parametrize(
    "words", ["presets", "weigh linear --on 1xCPU", "plan linear --on 2xCPU", "train linear"]
)
def test_a_working_directory_that_was_deleted_is_named(meshwright, words, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = meshwright(*words.split())
    assert (done.status, done.output) == (2, "")
    assert "error: the working directory of this command is gone: " in done.talk
