"""What a user's code may do to the folder through which its process answers: each way ends in words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.compiler import _compile_process as _run
from meshwright.compiler import compile_program
from meshwright.contrib.scripts import _run_script as _scripts
from meshwright.contrib.scripts._run_script import ScriptRequest, run_script
from meshwright.contrib.torch_eager import answer_apart
from meshwright.errors import InputError, MeshwrightError
from meshwright.subprocesses import from_child

CANDIDATE = {"name": "f", "place": "", "num_calls": 1, "model_flops": 1, "has_backward": True}


def answer(text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "answer.json").write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )


def candidate(*files: str) -> Callable[[Path], None]:
    return answer(json.dumps({"candidates": [{**CANDIDATE, "files": files}]}))


def link(folder: Path) -> None:
    (folder / "answer.json").symlink_to("/etc/passwd")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "answer.json")


def call_that_is_a_link(folder: Path) -> None:
    (folder / "call0").symlink_to("/etc")
    candidate("call0/passwd")(folder)


WAYS = [
    (shutil.rmtree, "it was deleted"),
    (lambda folder: (folder / "answer.json").mkdir(), "it is not a file"),
    (link, "Too many levels of symbolic links"),
    (pipe, "it is not a file"),
    (answer(b"\xff\xfe"), "it is not text in UTF-8"),
]
NO_ANSWERS = ["", "null", "5", "[1]", "[" * 100_000, '{"a":' * 100_000, '{"error": 5}', "9" * 5000]


@pytest.mark.parametrize(("spoil", "why"), WAYS)
def test_what_is_in_the_place_of_a_childs_file_is_named_and_not_waited_for(spoil, why, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert from_child(folder / "answer.json") is None
    spoil(folder)
    with pytest.raises(InputError, match=why):
        from_child(folder / "answer.json")


def run_a_script(monkeypatch, spoil: Callable[[Path], Any]) -> Any:
    def start(module: str, folder: Path, *, said: Path) -> None:
        said.write_text("its last line\n")
        spoil(folder)

    monkeypatch.setattr(_scripts, "start", start)
    monkeypatch.setattr(_scripts, "wait", lambda process, seconds: 0)
    how: dict[str, Any] = {
        "function": "",
        "platform": "cpu",
        "topology": {},
        "num_devices": 1,
        "all_calls": False,
    }
    return run_script(ScriptRequest(command=("train.py",), **how))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        *WAYS,
        *((answer(text), "this is not a script's answer") for text in NO_ANSWERS),
        (candidate("../../etc/passwd"), "it is not in a call's folder"),
        (candidate("/etc/passwd"), "it is not in a call's folder"),
        (candidate("script.json"), "it is not in a call's folder"),
        (call_that_is_a_link, "it is not in a call's folder"),
        (candidate("call0/program"), "it was deleted"),
        (lambda folder: None, "before it called its training step"),
    ],
)
def test_a_script_that_changes_its_folder_is_told_so(spoil, why, monkeypatch):
    with pytest.raises(InputError, match=why):
        run_a_script(monkeypatch, spoil)


class Spoiler:
    """A worker whose function has spoiled its folder."""

    def __init__(self, status: int | None) -> None:
        self.status = status

    def poll(self) -> int | None:
        return self.status

    def end(self) -> None: ...


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        *WAYS,
        *((answer(text), "it is no answer") for text in NO_ANSWERS),
        (answer('{"key": "x"}'), "cannot be"),
    ],
)
def test_a_function_that_changes_its_workers_folder_is_told_so(
    spoil, why, request_for, monkeypatch, tmp_path
):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))

    def start(work: Path, made: Path) -> Spoiler:
        spoil(work)
        return Spoiler(0)

    monkeypatch.setattr(_run, "start_worker", start)
    with pytest.raises(MeshwrightError, match=why):
        compile_program(request_for("a:b", "1xCPU", "data=1"))


@pytest.mark.parametrize(
    "spoil",
    [shutil.rmtree, lambda folder: (folder / "phases").mkdir(), lambda folder: (folder / "pid").mkdir()],
)
def test_a_worker_whose_folder_is_gone_is_not_waited_for(spoil, request_for, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))

    def start(work: Path, made: Path) -> Spoiler:
        spoil(work)
        return Spoiler(None)

    monkeypatch.setattr(_run, "start_worker", start)
    with pytest.raises(InputError, match="through which its process answers"):
        compile_program(request_for("a:b", "1xCPU", "data=1"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [*WAYS, *((answer(text), "it is no answer") for text in ("", "[", "5", "null", '{"message": 5}'))],
)
def test_a_function_of_pytorch_that_changes_its_folder_is_told_so(spoil, why, monkeypatch):
    from meshwright.contrib.torch_eager import _account_process as _apart

    monkeypatch.setattr(_apart, "start", lambda server, folder, *, said: folder)
    monkeypatch.setattr(_apart, "wait", lambda folder, seconds, on_poll: [spoil(folder), 0][1])
    with pytest.raises(InputError, match=why):
        answer_apart("server", b"{}", "module:function", lambda phase: None)


@pytest.mark.once
@pytest.mark.parametrize("way", ["shutil.rmtree(folder)", "os.mkdir(folder + '/answer.json')"])
def test_a_real_script_that_does_so_is_told_so(way, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import glob, os, shutil, sys\n"
        f"folder = open('/proc/self/cmdline').read().split(chr(0))[-2]\n{way}\n"
        "import jax\nprint(jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8))))\n"
    )
    how: dict[str, Any] = {
        "function": "",
        "platform": "cpu",
        "topology": {},
        "num_devices": 1,
        "all_calls": False,
    }
    with pytest.raises(InputError, match="through which its process answers"):
        run_script(ScriptRequest(command=(str(script),), **how))
