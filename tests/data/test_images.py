import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.data import ImageFiles, LabelledImages, open_data
from meshwright.data._images import IdxPart, resized


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
    np.testing.assert_allclose(resized(images, side), wanted[:, 0].numpy(), atol=1e-3)
