import pytest

from meshwright.errors import InputError
from meshwright.training._devices import fleet_of_hosts, share_of

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("visible", "place", "processes", "share"),
    [
        (8, 0, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 1, 2, [4, 5, 6, 7]),
        (8, 7, 8, [7]),
        (1, 5, 8, [0]),  # the scheduler shows each process its own
    ],
)
def test_a_process_takes_its_part_of_what_its_host_has(visible, place, processes, share):
    assert share_of(visible, place, processes) == share


def test_devices_that_cannot_be_shared_are_refused():
    with pytest.raises(InputError, match="3 processes cannot share the 8 devices of a host") as error:
        share_of(8, 0, 3)
    assert error.value.hint == "start 2 or 4 processes on each host"


def test_hosts_of_one_kind_make_a_fleet():
    assert fleet_of_hosts([("a", H100, 8), ("b", H100, 8)]).name == "16xH100"
    assert fleet_of_hosts([("a", H100, 4)] * 2 + [("b", H100, 4)] * 2).name == "2x4xH100"
    assert fleet_of_hosts([(host, H100, 1) for host in "aabb"]).name == "2x2xH100"
    assert fleet_of_hosts([("a", H100, 8)] * 4).name == "8xH100"


def test_hosts_that_differ_are_named():
    with pytest.raises(InputError, match="a has 8 x NVIDIA H100 80GB HBM3; b has 8 x NVIDIA A100-SXM4-80GB"):
        fleet_of_hosts([("a", H100, 8), ("b", A100, 8)])
