import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.measure._storages import facts_of, format_name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "fp32"),
        (jnp.bfloat16.dtype, "bf16"),
        ("torch.float8_e4m3fn", "fp8-e4m3"),
        ("int64", "int64"),
    ],
)
def test_formats_have_our_names_and_other_types_their_own(dtype, name):
    assert format_name(dtype) == name


def test_numpys_strides_count_elements_not_bytes():
    array = np.zeros((3, 5), np.float64)[:, ::2]
    facts = facts_of(array, "a")
    assert facts.strides == tuple(stride // 8 for stride in array.strides)
    assert facts.storages[0].num_bytes == 3 * 5 * 8


def test_a_negative_stride_begins_at_the_end():
    facts = facts_of(np.arange(4, dtype=np.int32)[::-1], "a")
    assert (facts.strides, facts.offset_elements) == ((-1,), 3)


def test_a_jax_array_has_the_address_that_its_runtime_gives():
    array = jnp.ones((2, 2))
    (storage,) = facts_of(array, "a").storages
    assert (storage.address, storage.num_bytes) == (array.unsafe_buffer_pointer(), 16)
