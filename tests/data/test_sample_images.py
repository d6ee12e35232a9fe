import numpy as np
import pytest

from meshwright.data import write_sample_images
from meshwright.data._images import idx_parts
from meshwright.errors import InputError


def test_the_small_set_has_ten_classes_in_both_parts_and_is_the_same_each_time(tmp_path):
    for name in ("one", "two"):
        assert write_sample_images(tmp_path / name) == {"train": 4096, "held-out": 1024}
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)
    parts = idx_parts(tmp_path / "one")
    for split, rows in (("train", 4096), ("held-out", 1024)):
        assert parts[split].images.shape == (rows, 28, 28)
        assert set(parts[split].labels) == set(range(10))
    assert not np.array_equal(parts["train"].images[:1024], parts["held-out"].images)


def test_files_that_are_there_are_not_written_over(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"the real ones")
    with pytest.raises(InputError, match="holds train-images-idx3-ubyte already"):
        write_sample_images(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*Not a directory"):
        write_sample_images(tmp_path / "file" / "folder")
