import gzip
import shutil

import numpy as np
import pytest

from meshwright.data import write_images
from meshwright.data._images import NAMES, idx_parts, read_idx, write_idx
from meshwright.errors import InputError

FOUR = [name for names in NAMES.values() for name in names]


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for (images, labels), rows in zip(NAMES.values(), (5, 3), strict=True):
        write_idx(tmp_path / images, random.integers(256, size=(rows, 4, 6), dtype=np.uint8))
        write_idx(tmp_path / f"{labels}.gz", random.integers(10, size=rows, dtype=np.uint8))
    return tmp_path


def test_the_names_are_those_that_fashion_mnist_is_published_with():
    assert FOUR == [
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ]


def test_files_are_read_plain_or_gzipped(folder):
    parts = idx_parts(folder)
    assert {split: part.images.shape for split, part in parts.items()} == {
        "train": (5, 4, 6),
        "held-out": (3, 4, 6),
    }
    raw = (folder / FOUR[0]).read_bytes()
    assert raw[:16] == bytes((0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0, 6))  # the published header
    assert parts["train"].images.tobytes() == raw[16:]
    assert gzip.decompress((folder / f"{FOUR[1]}.gz").read_bytes())[8:] == parts["train"].labels.tobytes()


def refused(folder):
    with pytest.raises(InputError) as caught:
        idx_parts(folder)
    return caught.value


def test_absent_files_are_named_with_all_four_that_are_expected(folder):
    (folder / FOUR[2]).unlink()
    error = refused(folder)
    assert error.message == f"data.folder: {folder} has no {FOUR[2]}"
    assert all(name in error.hint for name in FOUR)
    assert "meshwright data sample-images" in error.hint
    assert all(name in refused(folder / "none").message for name in FOUR)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (lambda raw: raw[:-1], "119 bytes follow its header, which says 5 x 4 x 6 = 120", "copy it again"),
        (lambda raw: raw + b"x", "121 bytes follow its header", "copy it again"),
        (lambda raw: raw[:9], "is cut short: 9 bytes, and its header has 16", "copy it again"),
        (lambda raw: b"\0\0\x08\1" + raw[4:], "begins with 00 00 08 01", "another file"),
        (lambda raw: b"", "begins with nothing, and an IDX file of 3 dimensions", "another file"),
        (gzip.compress, "begins with 1f 8b", "still compressed"),
    ],
)
def test_a_file_that_is_cut_or_of_another_kind_is_named(folder, change, message, hint):
    path = folder / FOUR[0]
    path.write_bytes(change(path.read_bytes()))
    error = refused(folder)
    assert f"{path}" in error.message
    assert message in error.message
    assert hint in error.hint


def test_a_gzip_file_that_is_cut_is_named(folder):
    path = folder / f"{FOUR[1]}.gz"
    path.write_bytes(path.read_bytes()[:-6])
    assert f"{path} is no whole gzip file" in refused(folder).message
    path.write_bytes(b"no gzip")
    assert f"{path} is no whole gzip file" in refused(folder).message


def test_images_without_their_labels_are_refused(folder):
    shutil.copy(folder / f"{FOUR[3]}.gz", folder / f"{FOUR[1]}.gz")
    assert f"{FOUR[0]} has 5 images and {FOUR[1]} 3 labels" in refused(folder).message


def test_a_label_that_is_none_of_the_ten_is_refused(folder):
    write_idx(folder / f"{FOUR[1]}.gz", np.array([1, 2, 3, 4, 10], np.uint8))
    assert "holds label 10; the models tell 10 classes apart" in refused(folder).message


def test_a_file_that_may_not_be_read_is_named(folder, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)
    with pytest.raises(InputError, match=r"cannot read .*: Permission denied"):
        read_idx(folder, FOUR[0], 3)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (np.zeros((3, 8, 8), np.float32), np.zeros(3, np.uint8)),
        (np.zeros((3, 64), np.uint8), np.zeros(3, np.uint8)),
        (np.zeros((3, 8, 8), np.uint8), np.zeros(2, np.uint8)),
        (np.zeros((3, 8, 8), np.uint8), np.full(3, 10, np.uint8)),
        (np.zeros((0, 8, 8), np.uint8), np.zeros(0, np.uint8)),
    ],
)
def test_arrays_that_are_not_ten_classes_of_images_are_not_written(tmp_path, images, labels):
    good = (np.zeros((1, 8, 8), np.uint8), np.zeros(1, np.uint8))
    with pytest.raises(InputError, match=r"held_out: images .* are not ten classes of images"):
        write_images(tmp_path / "images", train=good, held_out=(images, labels))
    assert not (tmp_path / "images").exists()
