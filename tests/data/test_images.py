import numpy as np

from meshwright.config import load_config
from meshwright.data import LabelledImages, open_data


def test_images_and_labels_have_the_shapes_of_pytorch():
    data = open_data(load_config("lenet"))
    assert isinstance(data, LabelledImages)
    assert {name: (x.shape, x.dtype) for name, x in data.batch(0, "train").items()} == {
        "images": ((64, 1, 28, 28), np.float32),
        "labels": ((64,), np.int32),
    }


def test_the_images_of_a_class_share_a_pattern_that_every_step_and_part_has():
    data = LabelledImages(seed=0, rows=2000)
    first, held_out = data.batch(0, "train"), data.batch(7, "held-out")
    assert set(first["labels"]) == set(range(10))

    def means(batch):
        return np.stack([batch["images"][batch["labels"] == label].mean(axis=0) for label in range(10)])

    # The pattern's pixels are one wide; what noise is left in a mean of about 200 images is 0.07 wide.
    assert means(first).std() > 0.9
    assert (means(first) - means(held_out)).std() < 0.2


def test_images_are_a_function_of_seed_step_and_part():
    data, again = LabelledImages(seed=0, rows=4), LabelledImages(seed=0, rows=4)
    other = LabelledImages(seed=1, rows=4)
    again.batch(0, "train")
    assert np.array_equal(data.batch(5, "train")["images"], again.batch(5, "train")["images"])
    for unlike in (data.batch(6, "train"), data.batch(5, "held-out"), other.batch(5, "train")):
        assert not np.array_equal(data.batch(5, "train")["images"], unlike["images"])
