"""Image files in IDX format, batches of images, resizing, and the sample set."""

import gzip
import shutil

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.contrib.images import (
    NAMES,
    IdxPart,
    ImageFiles,
    LabelledImages,
    idx_parts,
    read_idx,
    resized,
    write_idx,
    write_images,
    write_sample_images,
)
from meshwright.errors import InputError
from meshwright.trainer.data import open_data
from tests.rounding import FLOAT32

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
    assert f"{path}: it is no whole gzip file" in refused(folder).message
    path.write_bytes(b"no gzip")
    assert f"{path}: it is no whole gzip file" in refused(folder).message


def test_images_without_their_labels_are_refused(folder):
    shutil.copy(folder / f"{FOUR[3]}.gz", folder / f"{FOUR[1]}.gz")
    assert f"{FOUR[0]} has 5 images and {FOUR[1]} 3 labels" in refused(folder).message


def test_a_label_that_is_none_of_the_ten_is_refused(folder):
    write_idx(folder / f"{FOUR[1]}.gz", np.array([1, 2, 3, 4, 10], np.uint8))
    assert "holds label 10; the models know 10 classes" in refused(folder).message


def test_a_file_that_may_not_be_read_is_named(folder, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", denied)
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


def test_images_and_labels_have_the_shapes_of_pytorch():
    data = open_data(load_config("lenet"))
    assert isinstance(data, LabelledImages)
    assert {name: (x.shape, x.dtype) for name, x in data.batch(0, "train").items()} == {
        "images": ((64, 1, 28, 28), np.float32),
        "labels": ((64,), np.int32),
    }


def test_the_images_of_a_class_share_a_pattern_that_every_step_and_part_has():
    data = LabelledImages(seed=0, rows=2000, side=28)
    first, held_out = data.batch(0, "train"), data.batch(7, "held-out")
    assert set(first["labels"]) == set(range(10))

    def means(batch):
        return np.stack([batch["images"][batch["labels"] == label].mean(axis=0) for label in range(10)])

    # The pattern's pixels are one wide; what noise is left in a mean of about 200 images is 0.07 wide.
    assert means(first).std() > 0.9
    assert (means(first) - means(held_out)).std() < 0.2


def test_images_are_a_function_of_seed_step_and_part():
    data, again = LabelledImages(seed=0, rows=4, side=28), LabelledImages(seed=0, rows=4, side=28)
    other = LabelledImages(seed=1, rows=4, side=28)
    again.batch(0, "train")
    assert np.array_equal(data.batch(5, "train")["images"], again.batch(5, "train")["images"])
    for unlike in (data.batch(6, "train"), data.batch(5, "held-out"), other.batch(5, "train")):
        assert not np.array_equal(data.batch(5, "train")["images"], unlike["images"])


def files(rows=4, evaluation_batches=3, side=2):
    """Seven images to train and five held out, each filled with a number of its own."""

    def part(count):
        images = np.repeat(np.arange(count, dtype=np.uint8), 4).reshape(count, 2, 2)
        return IdxPart(images=images, labels=np.arange(count, dtype=np.uint8))

    parts = {"train": part(7), "held-out": part(5)}
    return ImageFiles(parts=parts, seed=3, rows=rows, side=side, evaluation_batches=evaluation_batches)


def test_an_epoch_takes_each_image_once_and_pads_its_last_batch_with_rows_of_weight_zero():
    data = files()
    assert (data.steps_per_epoch("train"), data.steps_per_epoch("held-out")) == (2, 2)
    orders = []
    for epoch in range(3):
        batches = [data.batch(2 * epoch + place, "train") for place in range(2)]
        seen = np.concatenate([batch["labels"][batch["weights"] > 0] for batch in batches])
        assert sorted(seen) == list(range(7))
        orders.append(tuple(seen))
        assert [list(batch["weights"] > 0) for batch in batches] == [[True] * 4, [True] * 3 + [False]]
        assert all(batch["weights"].mean() == pytest.approx(1) for batch in batches)
    assert len(set(orders)) == 3


def test_a_batch_is_a_function_of_its_step_and_holds_pixels_from_0_to_1():
    batch = files().batch(5, "train")
    again = files().batch(5, "train")
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "images": ((4, 1, 2, 2), np.float32),
        "labels": ((4,), np.int32),
        "weights": ((4,), np.float32),
    }
    for name, array in batch.items():
        assert np.array_equal(array, again[name])
    assert batch["images"][0] == pytest.approx(batch["labels"][0] / 255)


@pytest.mark.parametrize("rows", [[0, 3], [2, 3], [1, 2]])
@pytest.mark.parametrize("split", ["train", "held-out"])
def test_some_rows_of_a_short_batch_are_those_of_the_whole(split, rows):
    whole, some = (files().batch(5, split, *asked) for asked in ((), (np.array(rows),)))
    for name, array in some.items():
        assert np.array_equal(array, whole[name][rows])


@pytest.mark.parametrize("evaluation_batches", [1, 2, 3])
def test_held_out_weights_make_a_mean_of_means_that_over_all_images_judged(evaluation_batches):
    data = files(evaluation_batches=evaluation_batches)
    batches = [data.batch(step, "held-out") for step in range(evaluation_batches)]
    judged = [[0, 1, 2, 3], [4], [0, 1, 2, 3]][:evaluation_batches]
    for batch, wanted in zip(batches, judged, strict=True):
        assert list(batch["labels"][batch["weights"] > 0]) == wanted
    found = np.mean([np.mean(batch["weights"] * batch["labels"]) for batch in batches])
    assert found == pytest.approx(np.mean(np.concatenate(judged)), rel=1e-6)


@pytest.mark.parametrize(("height", "width", "side"), [(28, 28, 96), (28, 28, 28), (9, 7, 4), (1, 2, 3)])
def test_images_are_resized_as_pytorch_does(height, width, side):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    images = np.random.default_rng(0).integers(256, size=(3, height, width), dtype=np.uint8)
    wanted = torch.nn.functional.interpolate(
        torch.tensor(images).float()[:, None], size=(side, side), mode="bilinear", align_corners=False
    )
    # A place among 28 pixels is off by a few units of roundoff of 28; the next pixel differs by up to 255.
    np.testing.assert_allclose(resized(images, side), wanted[:, 0].numpy(), atol=255 * FLOAT32)


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
