"""Fleets of other sizes have whole hosts or slices, and are else as the fleet."""

import pytest

from meshwright.contrib.fleet_plans import fleet_times, smaller_fleets
from meshwright.hardware import Fleet


@pytest.mark.parametrize(
    ("largest", "names"),
    [
        ("24xH100", ["1xH100", "2xH100", "3xH100", "4xH100", "6xH100", "8xH100", "16xH100", "24xH100"]),
        ("2x4xA100-80GB", ["1xA100-80GB", "2xA100-80GB", "3xA100-80GB", "4xA100-80GB", "2x4xA100-80GB"]),
        ("v5p-32", ["v5p-8", "v5p-16", "v5p-32"]),
        ("1xH200", ["1xH200"]),
    ],
)
def test_smaller_fleets_have_whole_hosts_and_end_with_the_largest(largest, names):
    assert [fleet.name for fleet in smaller_fleets(Fleet.parse(largest))] == names


def test_fleets_of_other_sizes_leave_as_much_of_each_device_to_another_process():
    fleet = Fleet.parse("16xH100 reserve 20GiB")
    others = [*smaller_fleets(fleet), fleet_times(fleet, 4)]
    assert {each.reserve_bytes for each in others} == {20 * 2**30}
    assert others[-1].name == "64xH100 reserve 20GiB"
