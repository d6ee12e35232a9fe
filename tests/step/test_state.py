import jax.numpy as jnp
import pytest

from meshwright.config import load_config
from meshwright.step._state import abstract_batch

TOKENS = ["data.source=tokens", "data.path=absent.bin", "data.dtype=uint16", "batch.microbatch_sequences=2"]


@pytest.mark.parametrize(
    ("more", "wanted"),
    [([], ["tokens"]), (["data.documents=packed", "data.end_of_document=0"], ["segments", "tokens"])],
)
def test_packed_documents_have_a_segment_for_each_token(more: list[str], wanted: list[str], mesh):
    batch = abstract_batch(load_config("bytes-nano", [*TOKENS, *more]), mesh(data=2))
    assert sorted(batch) == wanted
    for array in batch.values():
        assert array.shape == (2, 4, 65)  # 8 sequences: 2 microbatches of 2 for each of 2 replicas
        assert array.dtype == jnp.int32
        assert tuple(array.sharding.spec) == (None, "data")


@pytest.mark.parametrize(("preset", "side"), [("lenet-fashion", 28), ("resnet18-fashion", 96)])
def test_images_of_files_have_weights_and_images_made_from_the_seed_have_none(preset, side, mesh):
    batch = abstract_batch(load_config(preset), mesh(data=2))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "images": ((1, 256, 1, side, side), jnp.float32),
        "labels": ((1, 256), jnp.int32),
        "weights": ((1, 256), jnp.float32),
    }
    assert "weights" not in abstract_batch(load_config(preset, ["data.source=synthetic"]), mesh(data=2))
