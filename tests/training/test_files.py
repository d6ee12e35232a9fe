import json
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter  # noqa: F401  the format that is read below

from meshwright.errors import InputError, MeshwrightError
from meshwright.training._files import RunFiles


def tensorboard_scalars(folder: Path) -> dict[tuple[str, int], float]:
    """TFRecord: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    (path,) = folder.glob("events*")
    data, found = path.read_bytes(), {}
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    return found


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


def test_a_full_disk_ends_the_run_in_words(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        pytest.raises(MeshwrightError, match=r"metrics of step 3 .*: No space left on device"),
        RunFiles(tmp_path) as files,
    ):
        files.write(3, "train", {"loss": 0.5})


def test_an_error_on_closing_is_not_lost(tmp_path, monkeypatch):
    files = RunFiles(tmp_path)
    close = files._events.close

    def close_and_fail() -> None:
        close()
        raise OSError("the disk is gone")

    monkeypatch.setattr(files._events, "close", close_and_fail)
    with pytest.raises(OSError, match="gone"), files:
        pass
