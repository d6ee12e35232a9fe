"""A run's folder: who may write it, what is refused, and that a refusal changes nothing."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import Layout, RunConfig, load_config
from meshwright.errors import InputError
from meshwright.trainer.checkpoint import Checkpoints, Found, Manifest
from meshwright.trainer.launch import SingleProcess
from meshwright.trainer.loop import (
    RunFolder,
    about_complaint,
    about_of,
    changes_since,
    check_shared,
    config_of,
    last_recorded_step,
)

LINEAR = load_config("linear")
NONE = load_config("linear", ["checkpoint.every_steps=none"])


def run_in(folder: Path, *, steps: int, saved: tuple[int, ...] = (), config: RunConfig = LINEAR) -> Path:
    """A folder as a run of so many steps leaves it, with checkpoints of those that are `saved`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if saved:
        checkpoints = Checkpoints(folder / "checkpoints", keep_last=9)
        about = {"config": config.model_dump(mode="json"), "layout": "data=1", "data_offset": 0}
        for step in saved:
            checkpoints.save(step, {}, about)
        checkpoints.close()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def look(folder: Path, config: RunConfig = LINEAR, **asked: bool) -> None:
    held = RunFolder(folder, **asked)
    try:
        held.validate_resume(config)
    finally:
        held.close()


def test_a_run_is_resumed_only_when_asked(tmp_path):
    for name, run in (("metrics", {"steps": 3}), ("checkpoints", {"steps": 0, "saved": (3,)})):
        folder = run_in(tmp_path / name, **run)
        with pytest.raises(InputError, match="already holds a run"):
            look(folder)
        look(folder, resume=True)
    look(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_another_run_is_refused_and_the_folder_stays_as_it_was(tmp_path):
    folder = run_in(tmp_path / "run", steps=9, saved=(5, 9))
    before = contents(folder)
    with pytest.raises(InputError, match=r"seed is 5, and the checkpoint of step 9 in .* with 0") as refused:
        look(folder, load_config("linear", ["seed=5"]), resume=True)
    assert "out CONFIG and --set seed" in refused.value.hint
    assert contents(folder) == before


def test_a_batch_that_follows_the_layout_is_compared_later(tmp_path):
    look(run_in(tmp_path / "run", steps=3, saved=(3,)), resume=True)
    by_replica = load_config("linear", ["batch.sequences_per_replica=7"])
    look(tmp_path / "run", by_replica, resume=True)


@pytest.mark.parametrize("config", [LINEAR, NONE])
@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"steps": 3, "config": NONE}, "a run of 3 steps, and it has no checkpoint: resuming would discard"),
        ({"steps": 9, "saved": (5,), "config": NONE}, "newest checkpoint is of step 5: .* steps 6 to 9"),
        ({"steps": 2001}, "it has no checkpoint: .* steps 1 to 2001"),
    ],
)
def test_steps_that_no_checkpoint_was_to_hold_are_discarded_only_by_an_explicit_word(
    tmp_path, config, run, words
):
    folder = run_in(tmp_path / "run", **run)
    with pytest.raises(InputError, match=words) as refused:
        look(folder, config, resume=True)
    assert "--resume --discard-steps" in refused.value.hint
    look(folder, config, resume=True, discard_steps=True)


@pytest.mark.parametrize("run", [{"steps": 2000}, {"steps": 9000, "saved": (5,)}, {"steps": 0}])
def test_what_a_crash_loses_needs_no_word(tmp_path, run):
    look(run_in(tmp_path / "run", **run), NONE, resume=True)


def test_two_processes_never_write_one_folder_even_without_checkpoints(tmp_path):
    held = RunFolder(tmp_path / "run")
    held.create()
    code = (
        "import sys; from pathlib import Path; from meshwright.trainer.loop import RunFolder\n"
        "try: RunFolder(Path(sys.argv[1])).create()\n"
        "except Exception as told: print(told)"
    )
    tried = [sys.executable, "-c", code, str(tmp_path / "run")]
    told = subprocess.run(tried, capture_output=True, text=True, check=True).stdout
    assert f"run is being written by process {os.getpid()} on " in told
    held.close()
    assert subprocess.run(tried, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize("name", [".lock", ".probe"])
@pytest.mark.parametrize("use", [lambda path: RunFolder(path).create(), Checkpoints])
def test_a_symbolic_link_in_place_of_our_own_files_is_not_followed(tmp_path, name, use):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(theirs)
    with pytest.raises(InputError, match=f"{name} is a symbolic link, which is not followed"):
        use(tmp_path / "run")
    assert theirs.read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_named_with_one_that_exists(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write a run to .*file/run: Not a directory") as error:
        RunFolder(tmp_path / "file/run").create()
    assert str(tmp_path) in error.value.hint


def test_the_config_is_the_runs_own_even_where_config_json_is_not(tmp_path):
    folder = run_in(tmp_path / "run", steps=3, saved=(3,))
    faster = load_config("linear", ["optimizer.learning_rate=0.5"])
    (folder / "config.json").write_text(faster.model_dump_json())
    assert config_of(folder) == faster  # a change that the run may make
    for spoilt in (load_config("linear", ["seed=5"]).model_dump_json(), "{", None):
        (folder / "config.json").unlink()
        if spoilt is not None:
            (folder / "config.json").write_text(spoilt)
        assert config_of(folder) == LINEAR


def test_the_last_recorded_step_is_that_of_the_last_whole_line(tmp_path):
    assert last_recorded_step(tmp_path) == 0
    run_in(tmp_path, steps=9000)
    with (tmp_path / "metrics.jsonl").open("a") as cut_short:
        cut_short.write('{"step": 9001, "lo')
    assert last_recorded_step(tmp_path) == 9000


def test_a_refusal_loads_no_jax(tmp_path):
    folder = run_in(tmp_path / "run", steps=9, saved=(9,))
    code = (
        "import sys, meshwright as mw; from pathlib import Path\n"
        "try: mw.train(folder=Path(sys.argv[1]), session=mw.Session(resume=True), overrides=['seed=5'])\n"
        "except mw.InputError as refused: print(refused.message, 'jax' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("seed is 5, and the checkpoint of step 9 in ")
    assert told.endswith(" False\n")


class Second(SingleProcess):
    """The second of two processes; the first has left `token` in its folder."""

    index, count, is_first, name, token = 1, 2, False, "process 1 of 2 on b", "0af1"

    def broadcast(self, what, make):
        return self.token

    def gathered(self, what, value):
        return ["", value]


def test_processes_that_see_one_folder_go_on(tmp_path):
    (tmp_path / ".shared").write_text(Second.token)
    check_shared(tmp_path, Second())
    check_shared(tmp_path / "absent", SingleProcess())


@pytest.mark.parametrize("mark", [None, "of another run"])
def test_a_process_that_sees_another_folder_is_named(tmp_path, mark):
    if mark is not None:
        (tmp_path / ".shared").write_text(mark)
    with pytest.raises(InputError, match=r"of the first process is not that of process 1 of 2 on b") as error:
        check_shared(tmp_path, Second())
    assert "that all hosts share" in error.value.hint


def test_the_first_process_leaves_no_mark(tmp_path):
    class First(SingleProcess):
        count = 2

    check_shared(tmp_path, First())
    assert list(tmp_path.iterdir()) == []


ONE = Layout.parse("data=1")


def found(config, layout):
    about = about_of(config, layout)
    manifest = Manifest(format=2, step=20, about=about, files=(), arrays=())
    return Found(step=20, folder=Path("run/checkpoints/20"), about=about, rejected=(), manifest=manifest)


def test_what_has_changed_is_told_and_what_concerns_no_training_is_not():
    was = load_config("bytes-nano")
    now = load_config("bytes-nano", ["optimizer.learning_rate=0.5", "steps=7", "faults.bad_step=skip"])
    said = changes_since(found(was, ONE), now, Layout.parse("fsdp=8"))
    rate = was.optimizer.learning_rate
    assert said == [f"optimizer.learning_rate: {rate} -> 0.5", "layout: data=1 -> fsdp=8"]
    assert changes_since(found(was, ONE), was, ONE) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.num_layers=3", "model.num_layers"),
        ("seed=5", "seed"),
        ("batch.sequences=16", "batch.sequences"),
        ("optimizer.kind=sgd", "optimizer.kind"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(override, key):
    was, now = load_config("bytes-nano"), load_config("bytes-nano", [override])
    with pytest.raises(InputError, match=rf"{key} is .*, and the checkpoint of step 20 in .* is of a run"):
        changes_since(found(was, ONE), now, ONE)


def test_a_token_file_that_was_replaced_or_cut_is_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(256, dtype=np.uint16).repeat(4).tofile(path)
    config = load_config("bytes-nano", ["data.source=tokens", f"data.path={path}", "data.dtype=uint16"])
    made = found(config, ONE)
    assert changes_since(made, config, ONE) == []
    np.arange(256, dtype=np.uint16).repeat(3).tofile(path)
    with pytest.raises(InputError, match=r"is not what the checkpoint of step 20 .* 1536 bytes") as told:
        changes_since(made, config, ONE)
    assert "restore it as it was" in told.value.hint
    np.zeros(1024, np.uint16).tofile(path)
    with pytest.raises(InputError, match="2048 bytes are as many as before, and not the same"):
        changes_since(made, config, ONE)


def test_data_that_were_moved_are_still_those_of_the_run(tmp_path):
    paths = [tmp_path / name for name in ("tokens.bin", "moved.bin")]
    for path in paths:
        np.arange(256, dtype=np.uint16).repeat(4).tofile(path)
    was, now = (
        load_config("bytes-nano", ["data.source=tokens", f"data.path={path}", "data.dtype=uint16"])
        for path in paths
    )
    made = found(was, ONE)
    assert changes_since(made, now, ONE) == [f"data.path: {paths[0]} -> {paths[1]}"]
    np.zeros(1024, np.uint16).tofile(paths[1])
    with pytest.raises(InputError, match=r"moved.bin is not what the checkpoint of step 20"):
        changes_since(made, now, ONE)
    unknown = dataclasses.replace(made, about={**made.about, "data": None})
    with pytest.raises(InputError, match=r"data.path is .*, and the checkpoint of step 20"):
        changes_since(unknown, now, ONE)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ""),
        ({"data": None}, ""),
        ({"config": None}, "config"),
        ({"layout": 3}, "layout"),
        ({"data_offset": -1}, "data_offset"),
        ({"data_offset": None}, "data_offset"),
        ({"data": {"name": "x"}}, "data"),
    ],
)
def test_what_a_checkpoint_says_of_its_run_is_checked_before_it_is_used(change, wrong):
    about = {**about_of(load_config("bytes-nano"), ONE), "data_offset": 0, **change}
    said = about_complaint(about)
    assert said == (f"manifest.json is not as a run writes it: about.{wrong}" if wrong else "")


def test_a_folder_whose_name_cannot_hold_checkpoints_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(InputError, match=r"takes its backslash for a slash") as refused:
        look(tmp_path / "a\\b")
    assert refused.value.hint == f"name another folder: {tmp_path}/a_b"
    assert contents(tmp_path) == {}
