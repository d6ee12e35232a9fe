import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hlo import Array, leaves_of, parse_shape
from meshwright.hlo._text import split_text

NUMPY = {
    "pred": "bool", "s8": "int8", "u16": "uint16", "s32": "int32", "f16": "float16", "f32": "float32",
    "f64": "float64", "c64": "complex64",
}  # fmt: skip


@given(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 7), max_size=4))
def test_bytes_are_those_of_numpy(dtype, dims):
    shape = parse_shape(f"{dtype}[{','.join(map(str, dims))}]")
    assert isinstance(shape, Array)
    assert shape.num_bytes == np.zeros(dims, NUMPY[dtype]).nbytes


def test_four_bit_numbers_share_bytes():
    assert parse_shape("s4[3]").num_bytes == 2
    assert parse_shape("f4e2m1fn[8,2]").num_bytes == 8


def test_a_token_has_no_bytes():
    assert parse_shape("token[]").num_bytes == 0


def test_layout_tiles_and_memory_space_are_kept():
    shape = parse_shape("bf16[2,<=4]{1,0:T(8,128)(2,1)S(5)}")
    assert (shape.dims, shape.memory_space, str(shape)) == ((2, 4), 5, "bf16[2,4]")


def test_tuples_nest():
    shape = parse_shape("((f32[2]{0}, s8[]), /*index=1*/(), u32[]{:S(2)})")
    assert [str(a) for a in leaves_of(shape)] == ["f32[2]", "s8[]", "u32[]"]
    assert len(shape) == 3


@pytest.mark.parametrize("text", ["x", "f33[2]", "f32", "f32[a]"])
def test_what_is_no_shape_raises(text):
    with pytest.raises(ValueError, match="shape '"):
        parse_shape(text)


def test_commas_in_brackets_and_strings_do_not_split():
    assert split_text('a={1,2}, b="x, (", c=(3, [4, 5])') == ["a={1,2}", 'b="x, ("', "c=(3, [4, 5])"]
