from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from meshwright.checkpoint import host_copy_bytes
from meshwright.checkpoint._restore import box_of, copy_off, leaves_by_path

# By hand: 8 x 16 x 4 + 3 x 8 x 2 + 16 x 1 + 8 x 8 x 5 x 4 + 4 + 2 x 4 + 4
STATE_BYTES = 512 + 48 + 16 + 1280 + 4 + 8 + 4


def test_leaves_have_the_names_of_their_paths(small_state: Callable[..., Any]):
    assert list(leaves_by_path(small_state())) == [
        "key",
        "optimizer/0/mean",
        "optimizer/1/count",
        "parameters/low",
        "parameters/matrix",
        "parameters/tiny",
        "step",
    ]


def test_a_box_is_where_a_shard_begins_and_its_shape():
    assert box_of((slice(4, 8), slice(None)), (8, 16)) == ((4, 0), (4, 16))
    assert box_of((), ()) == ((), ())


@pytest.mark.parametrize("axes", [{}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_every_element_is_copied_once_however_many_devices_hold_it(
    small_state: Callable[..., Any], axes: dict[str, int]
):
    state = small_state(**axes)
    copied = copy_off(state)
    assert sum(piece.nbytes for array in copied for piece in array.pieces) == STATE_BYTES
    assert host_copy_bytes(state) == STATE_BYTES
    assert {array.path for array in copied} == set(leaves_by_path(state))


def test_an_abstract_state_says_what_a_save_will_take(
    small_state: Callable[..., Any], abstract: Callable[..., Any]
):
    assert host_copy_bytes(abstract(small_state(fsdp=2, tensor=4))) == STATE_BYTES


def test_what_was_copied_may_be_donated_in_place():
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = increment(jax.numpy.zeros((512, 512)))
    address = state.unsafe_buffer_pointer()
    (copied,) = copy_off({"x": state})
    after = increment(state)
    assert state.is_deleted()
    assert after.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(copied.pieces[0], np.ones((512, 512), np.float32))
