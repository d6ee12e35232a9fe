from __future__ import annotations

import dataclasses
import errno
import gc
import importlib.util
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.contrib.clusters import ProcessGroup
from meshwright.errors import MeshwrightError
from meshwright.trainer.checkpoint import (
    Checkpoints,
    Rejected,
    Saved,
    SaveFailed,
    _checkpoints,
    checkpoint_of,
    restore,
)
from meshwright.trainer.checkpoint import _stored_arrays as _arrays
from meshwright.trainer.checkpoint._folder import found_at

SAVING = Path(__file__).with_name("saving.py")


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if not path.name.startswith("."))


def held_writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before this is set."""
    may_write, write = threading.Event(), _checkpoints.write_part

    def held(*arguments: Any) -> Any:
        assert may_write.wait(30)
        return write(*arguments)

    monkeypatch.setattr(_checkpoints, "write_part", held)
    return may_write


def test_what_was_saved_comes_back_bit_for_bit_with_what_was_told_about_it(
    tmp_path: Path,
    small_state: Callable[..., Any],
    abstract: Callable[..., Any],
    same_bits: Callable[[Any, Any], bool],
):
    about = {"config": {"name": "x"}, "losses": [2.5, 2.25], "fingerprint": "ab"}
    state = small_state(3, fsdp=4)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.newest() is None
    checkpoints.save(12, state, about)
    checkpoints.close()
    (saved,) = checkpoints.finished()
    assert isinstance(saved, Saved)
    assert saved.step == 12
    assert saved.blocked_seconds > 0
    assert saved.write_seconds > 0
    folder = tmp_path / "run" / "checkpoints" / "12"
    files = [path for path in folder.rglob("*") if path.is_file() and "manifest.json" not in path.name]
    assert saved.num_bytes == sum(path.stat().st_size for path in files)

    again = Checkpoints(tmp_path / "run" / "checkpoints")
    found = again.newest()
    assert found is not None
    assert (found.step, found.about, found.rejected) == (12, about, ())
    assert same_bits(restore(found, abstract(state)), state)
    again.close()


def test_a_state_that_is_donated_at_once_is_saved_as_it_was(checkpoints: Checkpoints):
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {"x": increment(jnp.zeros((1024, 1024)))}
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for step in range(1, 9):
        checkpoints.save(step, state, {})
        state = {"x": increment(state["x"])}
        found = checkpoints.newest()
        assert found is not None
        np.testing.assert_array_equal(restore(found, wanted)["x"], np.full((1024, 1024), step))


def test_finished_tells_each_save_once_and_in_order(
    checkpoints: Checkpoints, small_state: Callable[..., Any]
):
    assert checkpoints.finished() == ()
    for step in (1, 2, 3):
        checkpoints.save(step, small_state(step), {})
    checkpoints.wait()
    assert [saved.step for saved in checkpoints.finished()] == [1, 2, 3]
    assert checkpoints.finished() == ()


def test_finished_does_not_wait_for_the_save_in_flight(
    checkpoints: Checkpoints, small_state: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    may_write = held_writing(monkeypatch)
    checkpoints.save(1, small_state(), {})
    assert checkpoints.finished() == ()
    may_write.set()
    checkpoints.wait()
    assert [saved.step for saved in checkpoints.finished()] == [1]


def test_a_second_copy_is_made_only_when_the_first_is_written_and_gone(
    checkpoints: Checkpoints, small_state: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    may_write = held_writing(monkeypatch)
    copies: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []
    copy_off = _checkpoints.copy_off

    def counting(state: Any, num_layers: int | None) -> Any:
        gc.collect()
        alive.append(sum(copy() is not None for copy in copies))
        arrays = copy_off(state, num_layers)
        copies.extend(weakref.ref(piece) for array in arrays for piece in array.pieces)
        return arrays

    monkeypatch.setattr(_checkpoints, "copy_off", counting)
    checkpoints.save(1, small_state(1), {})
    second = threading.Thread(target=checkpoints.save, args=(2, small_state(2), {}))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert alive == [0]
    may_write.set()
    second.join(30)
    checkpoints.wait()
    assert alive == [0, 0]
    assert [saved.step for saved in checkpoints.finished()] == [1, 2]


@pytest.mark.parametrize("record", [Saved, SaveFailed, Rejected])
def test_what_was_told_cannot_be_changed(record: type):
    told = record(**{field.name: 1 for field in dataclasses.fields(record)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        told.step = 2


def test_what_json_cannot_say_is_refused_before_anything_is_copied(
    checkpoints: Checkpoints, small_state: Callable[..., Any]
):
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(1, small_state(), {"path": Path("x")})


def test_a_mistake_of_ours_in_the_background_is_raised_in_the_foreground(
    checkpoints: Checkpoints, small_state: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_checkpoints, "write_part", lambda *arguments: 1 / 0)
    checkpoints.save(1, small_state(), {})
    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, None, [10]), (3, None, [8, 9, 10]), (2, 4, [4, 8, 9, 10]), (20, None, list(range(1, 11)))],
)
def test_old_checkpoints_are_deleted_but_the_last_and_every_so_manyeth(
    tmp_path: Path, keep_last: int, keep_every: int | None, kept: list[int]
):
    checkpoints = Checkpoints(tmp_path, keep_last=keep_last, keep_every=keep_every)
    for step in range(1, 11):
        checkpoints.save(step, {"x": jnp.int32(step)}, {})
    checkpoints.close()
    assert steps_of(tmp_path) == kept


def test_none_is_deleted_before_the_new_one_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    there_at_commit: list[list[int]] = []
    folder = checkpoints._owned[0]
    commit = folder.commit

    def noting(step: int) -> None:
        there_at_commit.append(steps_of(tmp_path))
        commit(step)

    monkeypatch.setattr(folder, "commit", noting)
    for step in (1, 2, 3):
        checkpoints.save(step, {"x": jnp.int32(step)}, {})
    checkpoints.close()
    assert there_at_commit == [[], [1], [2]]
    assert steps_of(tmp_path) == [3]


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For a loss of power: files, then the manifest, then their folder, the name, the folder above."""
    checkpoints = Checkpoints(tmp_path)
    happened: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noting_sync(file: int) -> None:
        happened.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def noting_rename(path: Path, to: Path) -> Path:
        happened.append(f"{path.name} -> {to.name}")
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(Path, "rename", noting_rename)
    checkpoints.save(5, {"x": jnp.int32(1)}, {})
    checkpoints.close()
    *before, manifest, its_hash, folder, named, above = happened
    for path in (tmp_path / "5").rglob("*"):
        assert path.name in before or path.name.startswith("manifest.json")
    assert (manifest, its_hash) == ("manifest.json", "manifest.json.sha256")
    assert (folder, named, above) == (".5.partial", ".5.partial -> 5", tmp_path.name)


def flip_a_bit(folder: Path) -> None:
    path = folder / "state/manifest.ocdbt"
    values = bytearray(path.read_bytes())
    values[0] ^= 1
    path.write_bytes(values)


def test_a_damaged_checkpoint_is_told_passed_over_and_not_counted_as_kept(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        checkpoints.save(step, {"x": jnp.int32(step)}, {})
    checkpoints.wait()
    flip_a_bit(tmp_path / "3")
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 2
    why = "state/manifest.ocdbt was altered: its hash is not the manifest's"
    assert found.rejected == (Rejected(step=3, folder=tmp_path / "3", why=why),)
    checkpoints.save(4, {"x": jnp.int32(4)}, {})
    checkpoints.close()
    assert steps_of(tmp_path) == [2, 4]


def test_a_run_that_went_back_replaces_what_it_saves_anew_and_leaves_later_ones_until_then(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step, value in ((10, 1), (20, 1), (10, 2)):
        checkpoints.save(step, {"x": jnp.int32(value)}, {"value": value})
        checkpoints.wait()
    assert steps_of(tmp_path) == [10, 20]
    checkpoints.save(20, {"x": jnp.int32(2)}, {"value": 2})
    found = checkpoints.newest()
    assert found is not None
    assert (found.step, found.about) == (20, {"value": 2})
    checkpoints.close()


def test_an_old_one_that_cannot_be_deleted_is_told_and_the_new_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoints = Checkpoints(tmp_path, keep_last=1)

    def refuse(step: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints._owned[0], "remove", refuse)
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.int32(step)}, {})
    checkpoints.close()
    last = checkpoints.finished()[-1]
    assert isinstance(last, Saved)
    assert last.not_removed == f"an older checkpoint in {tmp_path} could not be removed: Permission denied"
    assert steps_of(tmp_path) == [1, 2]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel then refuses to write more to any file of this process, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_refused_write_ends_that_save_and_leaves_the_last_good_one(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    state = {"x": jnp.arange(1 << 18, dtype=jnp.float32)}
    checkpoints.save(1, state, {})
    checkpoints.wait()
    with files_of_at_most(1 << 19):
        checkpoints.save(2, state, {})
        checkpoints.wait()
    good, failed = checkpoints.finished()
    assert isinstance(good, Saved)
    assert isinstance(failed, SaveFailed)
    start = "the checkpoint of step 2 was not saved: File too large (it needs 1.00 MiB, and "
    assert failed.reason.startswith(start)
    assert failed.hint == "make room for 1.00 MiB or more; of checkpoints, that of step 1 is kept"
    assert not list(tmp_path.glob(".2.*"))
    found = checkpoints.newest()
    assert found is not None
    assert (found.step, found.rejected) == (1, ())
    checkpoints.save(2, state, {})  # room was made
    checkpoints.close()
    assert steps_of(tmp_path) == [1, 2]


def test_a_disk_without_room_is_not_filled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(checkpoints, "_free_bytes", lambda: 1000)
    checkpoints.save(5, {"x": jnp.zeros(1024)}, {})
    checkpoints.close()
    (failed,) = checkpoints.finished()
    assert isinstance(failed, SaveFailed)
    assert failed.reason == (
        "the checkpoint of step 5 was not saved: No space left on device "
        f"(it needs 4.00 KiB, and 1000 B are free in {tmp_path})"
    )
    assert failed.hint.endswith("of checkpoints, there is none yet")
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]


def test_a_folder_that_is_gone_while_the_run_goes_on_is_told(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "here")
    shutil.rmtree(tmp_path / "here")
    checkpoints.save(1, {"x": jnp.int32(1)}, {})
    checkpoints.close()
    (failed,) = checkpoints.finished()
    assert isinstance(failed, SaveFailed)
    assert "No such file or directory" in failed.reason


FULL_DISK = """
import sys
from pathlib import Path
import jax.numpy as jnp
from meshwright.trainer.checkpoint import Checkpoints
folder = Path(sys.argv[1])
checkpoints = Checkpoints(folder / "checkpoints", keep_last=9)
for step in range(1, 6):
    checkpoints.save(step, {"x": jnp.full(1 << 18, step, jnp.float32)}, {})
checkpoints.close()
for ended in checkpoints.finished():
    print(type(ended).__name__, ended.step, getattr(ended, "reason", ""))
print("good", checkpoints.newest().step, sorted(path.name for path in (folder / "checkpoints").iterdir()))
"""


def on_a_small_disk(tmp_path: Path, options: str) -> list[str]:
    """The lines that a process prints that saves 1 MiB five times on a filesystem of its own."""
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets us mount nothing")
    run = [*command, sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("options", ["size=3500k", "size=100m,nr_inodes=34"], ids=["bytes", "inodes"])
def test_a_full_disk_stops_saving_and_keeps_the_good_ones(tmp_path: Path, options: str):
    *ended, last = on_a_small_disk(tmp_path, options)
    assert [line.split()[:2] for line in ended] == [
        *(["Saved", str(step)] for step in (1, 2, 3)),
        *(["SaveFailed", str(step)] for step in (4, 5)),
    ]
    assert "No space left on device" in ended[-1]
    assert last == "good 3 ['.lock', '1', '2', '3']"


def saving() -> Any:
    spec = importlib.util.spec_from_file_location("saving", SAVING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def killed_inside_a_save(folder: Path, rng: random.Random) -> bool:
    """Start a process that saves, kill it at a random moment; whether it left a save unfinished."""
    run = [sys.executable, str(SAVING), str(folder)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while not steps_of(folder):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.05, 0.6))
        os.kill(process.pid, signal.SIGKILL)
    return any(folder.glob(".*.partial"))


def check_kills(folder: Path, num_kills: int, seed: int) -> int:
    """After each kill the newest checkpoint is whole and right, and no step goes back; saves cut short."""
    state_of, inside, last = saving().state_of, 0, 0
    rng = random.Random(seed)
    for _ in range(num_kills):
        inside += killed_inside_a_save(folder, rng)
        checkpoints = Checkpoints(folder)
        assert not list(folder.glob(".[0-9]*"))
        found = checkpoints.newest()
        if found is not None:
            assert found.rejected == ()
            assert found.step >= last
            last = found.step
            expected = state_of(last)
            place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            wanted = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in expected.items()
            }
            restored = restore(found, wanted)
            assert all((np.asarray(restored[name]) == expected[name]).all() for name in expected)
        checkpoints.close()
    assert last > 0
    return inside


def test_killed_saves_leave_the_last_good_one_and_nothing_else(tmp_path: Path):
    check_kills(tmp_path, 3, seed=1)


@pytest.mark.long
def test_forty_killed_saves_leave_the_last_good_one_and_nothing_else(tmp_path: Path):
    assert check_kills(tmp_path, 40, seed=2) >= 3


def test_all_damaged_is_an_error_and_not_a_new_beginning(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.int32(1)}, {})
    checkpoints.wait()
    flip_a_bit(tmp_path / "1")
    with pytest.raises(MeshwrightError, match="none of the 1 checkpoints"):
        checkpoints.newest()
    checkpoints.close()


class Store:
    """In place of jax's coordination service, for processes that are threads here."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        time.sleep(0.001)
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def key_value_delete(self, key: str) -> None:
        del self.values[key]


def in_two_processes(folder: Path, do: Callable[[Checkpoints], Any]) -> list[Any]:
    """What `do` gives in each of two processes with checkpoints of one folder."""
    store = Store()

    def one(index: int) -> Any:
        checkpoints = Checkpoints(folder, peers=ProcessGroup(store, index, 2))
        try:
            return do(checkpoints)
        finally:
            checkpoints.close()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_a_disk_that_refuses_one_process_is_told_to_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_state: Callable[..., Any]
):
    write = _checkpoints.write_part

    def refuse(folder: Path, arrays: Any, process: int) -> Any:
        if process == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(folder, arrays, process)

    monkeypatch.setattr(_checkpoints, "write_part", refuse)

    def save(checkpoints: Checkpoints) -> Any:
        checkpoints.save(1, small_state(), {})
        checkpoints.wait()
        return checkpoints.finished()

    first, second = in_two_processes(tmp_path, save)
    assert first == second
    assert isinstance(first[0], SaveFailed)
    assert "the checkpoint of step 1 was not saved: No space left on device" in first[0].reason
    assert steps_of(tmp_path) == []
    assert not list(tmp_path.glob(".1.*"))


def test_the_first_process_says_which_checkpoint_is_the_newest_good_one(
    tmp_path: Path, small_state: Callable[..., Any]
):
    alone = Checkpoints(tmp_path)
    for step in (1, 2):
        alone.save(step, small_state(step), {"of": step})
    alone.close()
    (tmp_path / "2/state/manifest.ocdbt").write_bytes(b"damaged")
    first, second = in_two_processes(tmp_path, lambda checkpoints: checkpoints.newest())
    assert (first.step, second.step) == (1, 1)
    assert [each.step for each in first.rejected] == [2]
    assert second.manifest == first.manifest


def test_a_checkpoint_that_a_process_does_not_see_is_an_error(tmp_path: Path):
    with pytest.raises(MeshwrightError, match="is not whole for process") as error:
        found_at(tmp_path, 3)
    assert "on a disk that every host can read" in error.value.hint


@pytest.mark.parametrize("way", ["run", "../run", "absent/../run", "link/../run", "./a b/..//run", "é#?%20"])
def test_a_checkpoint_is_where_its_path_says_however_that_is_written(tmp_path: Path, monkeypatch, way: str):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "here/link").symlink_to(tmp_path / "elsewhere/deep")
    monkeypatch.chdir(tmp_path / "here")
    run = Path(way)
    with closing(Checkpoints(run / "checkpoints")) as checkpoints:
        checkpoints.save(1, {"weights": jnp.arange(3.0)}, {})
        assert isinstance((checkpoints.wait(), checkpoints.finished())[1][0], Saved)
    found = checkpoint_of(run)
    assert (found.folder / "state/d").is_dir()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored = restore(found, {"weights": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=place)})
    assert restored["weights"].tolist() == [0, 1, 2]


def test_a_save_whose_arrays_lie_elsewhere_is_not_called_saved(tmp_path: Path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()

    def astray(folder: Path) -> Path:
        return tmp_path / "elsewhere" / folder.relative_to(tmp_path)

    monkeypatch.setattr(_arrays, "path_for_arrays", astray)
    with closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(1, {"weights": jnp.ones(3)}, {})
        checkpoints.wait()
        (failed,) = checkpoints.finished()
    assert isinstance(failed, SaveFailed)
    assert "does not name state/manifest.ocdbt, which holds the arrays" in failed.reason
    assert steps_of(tmp_path / "checkpoints") == []


def test_a_save_is_opened_again_before_it_is_called_saved(tmp_path: Path, monkeypatch):
    def lose(folder: Path, num_processes: int, arrays: Any) -> None:
        other = [dataclasses.replace(array, keys=("other",)) for array in arrays]
        shutil.rmtree(folder / "state")
        _arrays.write_shards(
            folder,
            [dataclasses.replace(array, starts=((0,),), pieces=(np.ones(3, "f4"),)) for array in other],
            0,
        )

    monkeypatch.setattr(_checkpoints, "merge_processes", lose)
    with closing(Checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(1, {"weights": jnp.ones(3)}, {})
        checkpoints.wait()
        (failed,) = checkpoints.finished()
    assert isinstance(failed, SaveFailed)
    assert "weights cannot be read back" in failed.reason
