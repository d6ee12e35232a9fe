import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter  # noqa: F401  the format that is read below

from meshwright.errors import InputError
from meshwright.training._files import NoFiles, RunFiles, metrics_of
from meshwright.training._run_folder import Writes


def opened(folder: Path, *, keep_to: int = -1) -> RunFiles:
    return RunFiles(folder, Writes(folder), keep_to=keep_to)


@pytest.fixture
def full_disk(monkeypatch) -> Iterator[Callable[[bool], None]]:
    """Makes the disk full, or gives it room again; what it takes it takes in small parts."""
    written, full = os.write, [False]

    def write(file: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, data[:7])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        yield lambda now: full.__setitem__(0, now)


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
    (tmp_path / "run").mkdir()
    with opened(tmp_path / "run") as files:
        files.write(1, "train", {"loss": 0.5})
        files.write(2, "train", {"loss": 0.25})
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
        assert tensorboard_scalars(tmp_path / "run") == {("train/loss", 1): 0.5, ("train/loss", 2): 0.25}


def test_files_that_cannot_be_opened_are_an_error_with_the_folder(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"cannot write a run to .*: Is a directory"):
        opened(tmp_path)


def test_a_resumed_run_keeps_the_whole_lines_up_to_its_step(tmp_path):
    with opened(tmp_path) as files:
        for step in (1, 2, 3):
            files.write(step, "train", {"loss": step / 2})
            files.notice(step, "spike", "high", "")
    with (tmp_path / "metrics.jsonl").open("a") as cut_short:
        cut_short.write('{"step": 2, "lo')  # as a process that is killed leaves it
    with opened(tmp_path, keep_to=2) as files:
        assert metrics_of(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}]
        files.write(3, "train", {"loss": 9.0})
    assert [line["loss"] for line in metrics_of(tmp_path)] == [0.5, 1.0, 9.0]
    assert len((tmp_path / "notices.jsonl").read_text().splitlines()) == 2
    with opened(tmp_path, keep_to=-1):
        assert metrics_of(tmp_path) == []


def test_tensorboard_forgets_the_steps_after_the_one_resumed_from(tmp_path):
    with opened(tmp_path) as files:
        files.write(3, "train", {"loss": 0.5})
    for path in tmp_path.glob("events*"):
        path.rename(tmp_path / "old")
    with opened(tmp_path, keep_to=2):
        pass
    (path,) = tmp_path.glob("events*")
    started = [event for event in records(path.read_bytes()) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in started] == [(3, SessionLog.START)]


def test_lines_and_tensorboards_records_wait_until_the_disk_has_room(tmp_path, full_disk):
    writes = Writes(tmp_path)
    with RunFiles(tmp_path, writes) as files:
        files.write(1, "train", {"loss": 0.5})
        full_disk(True)
        files.write(2, "train", {"loss": 0.25})
        assert set(writes.refused.values()) == {"No space left on device"}
        assert len(writes.refused) == 2
        full_disk(False)
        files.write(3, "train", {"loss": 0.125})
        assert writes.refused == {}
    assert [line["loss"] for line in metrics_of(tmp_path)] == [0.5, 0.25, 0.125]
    assert [step for _, step in tensorboard_scalars(tmp_path)] == [1, 2, 3]


def test_a_disk_that_stays_full_ends_nothing_and_the_lost_bytes_are_counted(tmp_path, full_disk):
    writes = Writes(tmp_path)
    with RunFiles(tmp_path, writes) as files:
        full_disk(True)
        files.write(3, "train", {"loss": 0.5})
    assert writes.refused["metrics.jsonl"] == "No space left on device (25 bytes are lost)"
    assert metrics_of(tmp_path) == []


def test_a_reason_is_told_once_with_all_its_files_and_again_after_an_hour(tmp_path):
    clock = [0.0]
    writes = Writes(tmp_path, now=lambda: clock[0])
    for name in ("a.json", "b.json"):
        (tmp_path / name).mkdir()
        writes.document(name, "text")
    assert writes.untold() == {"Is a directory": ["a.json", "b.json"]}
    writes.retry()
    assert writes.untold() == {}
    clock[0] = 4000.0
    assert list(writes.untold()) == ["Is a directory"]


def test_a_document_that_waits_is_written_when_there_is_room(tmp_path):
    writes = Writes(tmp_path)
    (tmp_path / "config.json").mkdir()
    writes.document("config.json", "{}")
    (tmp_path / "config.json").rmdir()
    writes.retry()
    assert (tmp_path / "config.json").read_text() == "{}"
    assert writes.refused == {}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_number_that_is_not_finite_is_null_and_not_in_tensorboard(tmp_path):
    with opened(tmp_path) as files:
        files.write(1, "train", {"loss": None, "applied": 0.0})
    assert metrics_of(tmp_path) == [{"step": 1, "loss": None, "applied": 0.0}]
    assert tensorboard_scalars(tmp_path) == {("train/applied", 1): 0.0}


def test_a_process_that_writes_no_files_takes_what_there_is_to_write():
    files = NoFiles()
    files.write(1, "train", {"loss": 1.0})
    files.notice(1, "spike", "high", "")
    files.retry()
    assert files.untold() == {}
