import jax
import pytest
from jax.sharding import AxisType

from meshwright.sharding import mesh_of


def test_devices_fill_the_axes_in_order_the_last_axis_fastest():
    mesh = mesh_of((("data", 2), ("fsdp", 1), ("tensor", 4)), jax.devices())
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == (2, 1, 4)
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]
    assert [d.id for d in mesh.devices[1, 0]] == [d.id for d in jax.devices()[4:]]
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_axes_that_do_not_cover_the_devices_are_our_own_mistake():
    with pytest.raises(AssertionError, match=r"axes {'data': 3} do not cover 8 devices"):
        mesh_of((("data", 3),), jax.devices())
