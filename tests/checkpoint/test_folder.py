from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.trainer.checkpoint import CheckpointFolder, steps_in

HOLD = """
import sys, time
from pathlib import Path
from meshwright.trainer.checkpoint._folder import CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]))
(folder.begin(7) / "half").write_bytes(b"x")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    made = CheckpointFolder(tmp_path)
    yield made
    made.close()


def checkpoint(folder: CheckpointFolder, step: int, text: str = "") -> None:
    (folder.begin(step) / "file").write_text(text)
    folder.commit(step)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_only_folders_named_by_a_step_are_checkpoints(tmp_path: Path):
    for name in ("10", "9", "0", "007", "1x", ".12.partial", "-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "11").write_text("a file")
    assert steps_in(tmp_path) == [0, 9, 10]


def test_a_checkpoint_has_its_name_only_when_it_is_committed(tmp_path: Path, folder: CheckpointFolder):
    (folder.begin(4) / "file").write_text("x")
    assert steps_in(tmp_path) == []
    folder.commit(4)
    assert steps_in(tmp_path) == [4]
    assert (tmp_path / "4" / "file").read_text() == "x"
    folder.remove(4)
    assert names(tmp_path) == set()


def test_a_step_that_is_saved_again_replaces_its_checkpoint(tmp_path: Path, folder: CheckpointFolder):
    checkpoint(folder, 4, "old")
    checkpoint(folder, 4, "new")
    folder.drop_replaced(4)
    assert (tmp_path / "4" / "file").read_text() == "new"
    assert names(tmp_path) == {"4"}
    for text in ("newer", "newest"):  # what could not be deleted is deleted the next time
        checkpoint(folder, 4, text)
    assert (tmp_path / "4" / "file").read_text() == "newest"


def test_what_a_killed_process_left_is_removed_or_taken_back(tmp_path: Path):
    for name in (".5.partial", ".4.replaced", ".3.replaced", "3", ".2.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / ".note").write_text("somebody's own")
    CheckpointFolder(tmp_path).close()
    assert names(tmp_path) == {"4", "3", ".note"}
    assert (tmp_path / "3" / "file").read_text() == "3"
    assert (tmp_path / "4" / "file").read_text() == ".4.replaced"


def test_an_abandoned_save_gives_back_what_it_was_to_replace(tmp_path: Path, folder: CheckpointFolder):
    checkpoint(folder, 4, "old")
    folder.begin(4)
    (tmp_path / "4").rename(tmp_path / ".4.replaced")  # as where `commit` failed half way
    folder.abandon(4)
    assert names(tmp_path) == {"4"}
    assert (tmp_path / "4" / "file").read_text() == "old"


def test_a_folder_that_a_live_process_writes_is_refused_and_left_alone_until_that_is_killed(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"are being written by process {held.pid} on ") as refused:
            CheckpointFolder(tmp_path)
        assert refused.value.hint == "wait until that run has ended, or choose another run folder"
        assert (tmp_path / ".7.partial" / "half").exists()
        os.kill(held.pid, signal.SIGKILL)
    CheckpointFolder(tmp_path).close()
    assert names(tmp_path) == set()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write checkpoints to .*file/checkpoints: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "checkpoints")


def test_a_disk_that_takes_no_byte_is_found_at_once_and_the_folder_stays_free(tmp_path: Path):
    """A process of its own whose files the kernel limits to none."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from meshwright.trainer.checkpoint._folder import CheckpointFolder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "try: CheckpointFolder(Path(sys.argv[1]))\n"
        "except Exception as told: print(told)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert f"cannot write checkpoints to {tmp_path}: File too large" in done.stdout
    assert "choose a run folder on a disk that can be written and locked" in done.stdout
    assert names(tmp_path) == set()
    CheckpointFolder(tmp_path).close()


def test_a_read_only_disk_is_found_at_once(tmp_path: Path):
    mount = 'mount -t tmpfs -o size=1m,ro none "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets us mount nothing")
    code = "import sys; from pathlib import Path; from meshwright.trainer.checkpoint import _folder\n"
    code += "_folder.CheckpointFolder(Path(sys.argv[1]) / 'checkpoints')"
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert "checkpoints: Read-only file system" in done.stderr


@pytest.mark.parametrize("name", ["a\\b", "b\\", "\udcff\udcfe"])
def test_a_name_by_which_the_arrays_would_lie_elsewhere_is_refused_and_another_offered(tmp_path: Path, name):
    with pytest.raises(InputError, match="checkpoints cannot be kept in ") as refused:
        CheckpointFolder(tmp_path / name / "checkpoints")
    assert refused.value.hint.endswith(
        f"name another folder: {tmp_path / re.sub('[^ab]+', '_', name)}/checkpoints"
    )
    assert list(tmp_path.iterdir()) == []
