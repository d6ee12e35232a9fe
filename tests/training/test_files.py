import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter  # noqa: F401  the format that is read below

from meshwright.errors import InputError, MeshwrightError
from meshwright.processes import Alone
from meshwright.training._files import NoFiles, RunFiles, check_shared, metrics_of


def tensorboard_scalars(folder: Path) -> dict[tuple[str, int], float]:
    """By tag and step; a TFRecord is length (8 bytes), its checksum (4), the record, its checksum (4)."""
    (path,) = folder.glob("events*")
    return {
        (value.tag, event.step): value.simple_value
        for event in records(path.read_bytes())
        for value in event.summary.value
    }


def records(data: bytes) -> Iterator[Event]:
    while data:
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_metrics_are_on_disk_before_the_file_is_closed(tmp_path):
    with RunFiles(tmp_path / "run") as files:
        files.write(1, "train", {"loss": 0.5})
        files.write(2, "train", {"loss": 0.25})
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
        assert tensorboard_scalars(tmp_path / "run") == {("train/loss", 1): 0.5, ("train/loss", 2): 0.25}


def test_a_folder_that_cannot_be_written_is_named_with_one_that_exists(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write a run to .*file/run: Not a directory") as error:
        RunFiles(tmp_path / "file/run")
    assert str(tmp_path) in error.value.hint


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    with RunFiles(tmp_path) as files:
        files.write(1, "train", {"loss": 0.5})
    with pytest.raises(InputError, match="holds a run already"):
        RunFiles(tmp_path)


def test_a_resumed_run_keeps_the_whole_lines_up_to_its_step(tmp_path):
    with RunFiles(tmp_path) as files:
        for step in (1, 2, 3):
            files.write(step, "train", {"loss": step / 2})
            files.notice(step, "spike", "high", "")
    with (tmp_path / "metrics.jsonl").open("a") as cut_short:
        cut_short.write('{"step": 2, "lo')  # as a process that is killed leaves it
    with RunFiles(tmp_path, keep_to=2) as files:
        assert metrics_of(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}]
        files.write(3, "train", {"loss": 9.0})
    assert [line["loss"] for line in metrics_of(tmp_path)] == [0.5, 1.0, 9.0]
    assert len((tmp_path / "notices.jsonl").read_text().splitlines()) == 2
    with RunFiles(tmp_path, keep_to=-1):
        assert metrics_of(tmp_path) == []


def test_tensorboard_forgets_the_steps_after_the_one_resumed_from(tmp_path):
    with RunFiles(tmp_path) as files:
        files.write(3, "train", {"loss": 0.5})
    for path in tmp_path.glob("events*"):
        path.rename(tmp_path / "old")
    with RunFiles(tmp_path, keep_to=2):
        pass
    (path,) = tmp_path.glob("events*")
    started = [event for event in records(path.read_bytes()) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in started] == [(3, SessionLog.START)]


def test_lines_wait_until_the_disk_has_room(tmp_path, monkeypatch):
    written, full = os.write, []

    def write(file: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, data[:7])  # the system may take a part of it

    monkeypatch.setattr(os, "write", write)
    with RunFiles(tmp_path) as files:
        files.write(1, "train", {"loss": 0.5})
        full.append(True)
        files.write(2, "train", {"loss": 0.25})
        assert files.trouble == "No space left on device"
        full.clear()
        files.write(3, "train", {"loss": 0.125})
        assert files.trouble == ""
    assert [line["loss"] for line in metrics_of(tmp_path)] == [0.5, 0.25, 0.125]


def test_a_disk_that_stays_full_is_an_error_at_the_end(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    files = RunFiles(tmp_path)
    files.write(3, "train", {"loss": 0.5})
    files.write(4, "train", {"loss": 0.5})
    with pytest.raises(MeshwrightError, match=r"2 lines of .*metrics.jsonl could .*: No space left on dev"):
        files.__exit__(None, None, None)


def test_an_error_of_the_run_is_not_hidden_by_a_full_disk(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    files = RunFiles(tmp_path)
    files.write(3, "train", {"loss": 0.5})
    files.__exit__(ZeroDivisionError, ZeroDivisionError(), None)


def test_tensorboards_file_is_given_up_where_it_cannot_be_written(tmp_path, monkeypatch):
    with RunFiles(tmp_path) as files:

        def fail() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files._events, "flush", fail)
        files.write(1, "train", {"loss": 0.5})
        assert files.trouble == "No space left on device"
        monkeypatch.undo()
        files.write(2, "train", {"loss": 0.5})
        assert files.trouble
    assert len(metrics_of(tmp_path)) == 2


def test_a_number_that_is_not_finite_is_null_and_not_in_tensorboard(tmp_path):
    with RunFiles(tmp_path) as files:
        files.write(1, "train", {"loss": None, "applied": 0.0})
    assert metrics_of(tmp_path) == [{"step": 1, "loss": None, "applied": 0.0}]
    assert tensorboard_scalars(tmp_path) == {("train/applied", 1): 0.0}


class Second(Alone):
    """The second of two processes; the first has left `token` in its folder."""

    index, count, is_first, name, token = 1, 2, False, "process 1 of 2 on b", "0af1"

    def from_first(self, what, make):
        return self.token

    def gathered(self, what, value):
        return ["", value]


def test_processes_that_see_one_folder_go_on(tmp_path):
    (tmp_path / ".shared").write_text(Second.token)
    check_shared(tmp_path, Second())
    check_shared(tmp_path / "absent", Alone())


@pytest.mark.parametrize("mark", [None, "of another run"])
def test_a_process_that_sees_another_folder_is_named(tmp_path, mark):
    if mark is not None:
        (tmp_path / ".shared").write_text(mark)
    with pytest.raises(InputError, match=r"of the first process is not that of process 1 of 2 on b") as error:
        check_shared(tmp_path, Second())
    assert "that all hosts share" in error.value.hint


def test_the_first_process_leaves_no_mark(tmp_path):
    class First(Alone):
        count = 2

    check_shared(tmp_path, First())
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_writes_no_files_takes_what_there_is_to_write():
    files = NoFiles()
    files.write(1, "train", {"loss": 1.0})
    files.notice(1, "spike", "high", "")
    assert files.trouble == ""
