"""Meshes of a user's program on several TPU slices. No libtpu is here: devices are names of them."""

from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.worker import check_mesh_of_slices


def mesh(slices, **sizes):
    devices = np.array([SimpleNamespace(slice_index=number) for number in slices], dtype=object)
    return SimpleNamespace(
        devices=devices.reshape(tuple(sizes.values())), shape=sizes, shape_tuple=sizes.items()
    )


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"x": 8}, {"a": 4, "b": 2}])
def test_a_mesh_in_the_order_of_its_slices_passes(sizes):
    check_mesh_of_slices(mesh([0, 0, 0, 0, 1, 1, 1, 1], **sizes), "2xv5e-4")
    check_mesh_of_slices(mesh([0] * 8, **sizes), "v5e-8")


def test_a_mesh_that_returns_to_a_slice_is_refused():
    with pytest.raises(
        InputError, match="fsdp=4,data=2 of the program goes through the slices of 2xv5e-4 more"
    ):
        check_mesh_of_slices(mesh([0, 1] * 4, fsdp=4, data=2), "2xv5e-4")


def test_a_mesh_of_the_program_that_straddles_slices_is_refused():
    with pytest.raises(InputError, match="groups of fsdp=6 straddle slices of 4"):
        check_mesh_of_slices(mesh([0] * 4 + [1] * 4 + [2] * 4, dp=2, fsdp=6), "3xv5e-4")


def test_other_devices_have_no_slices():
    devices = np.array([SimpleNamespace() for _ in range(8)], dtype=object)
    own = SimpleNamespace(devices=devices, shape={"data": 8}, shape_tuple=(("data", 8),))
    check_mesh_of_slices(own, "8xH100")
