import dataclasses

import pytest

from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import Message
from meshwright.predict._collectives import transfer_of
from meshwright.predict._machine import machine_of

GB = 10**9


def gather(groups, size, kind="all-gather", payload=GB, axes=("data",)):
    times = {"all-reduce": 2}.get(kind, 1)
    wire = payload if kind == "collective-permute" else times * payload * (size - 1) // size
    return Message(
        kind=kind, axes=axes, group_size=size, payload_bytes=payload, wire_bytes=wire, groups=groups
    )


def on(fleet):
    fleet = Fleet.parse(fleet)
    return machine_of(fleet, None), fleet.num_devices


def seconds(fleet, message):
    machine, num_devices = on(fleet)
    return transfer_of(machine, message, num_devices).seconds


def test_a_gather_in_a_host_runs_at_the_measured_bus_bandwidth():
    found = transfer_of(on("16xH100")[0], gather("[2,8]<=[16]", 8), 16)
    assert (found.name, found.link) == ("all-gather[data]", "inside")
    # the public table: 335 GB/s at 512 MiB, rising
    assert 0.875 * GB / found.seconds == pytest.approx(345e9, rel=0.05)


def test_a_group_of_one_device_per_host_has_each_network_link_to_itself():
    # devices 0 and 8: one per host, so half of the array over 50 GB/s at 0.85
    found = transfer_of(on("16xH100")[0], gather("[8,2]<=[2,8]T(1,0)", 2), 16)
    assert found.link == "between"
    assert found.seconds == pytest.approx(GB / 2 / 42.5e9, rel=0.01)


def test_a_group_over_whole_hosts_uses_all_their_links():
    # two hosts of eight: each host sends half of the array over its eight links
    found = transfer_of(on("16xH100")[0], gather("{}", 16), 16)
    assert found.link == "between"
    by_network, by_nvlink = GB / 2 / 8 / 42.5e9, (15 / 16) * GB / 345e9
    assert found.seconds == pytest.approx(max(by_network, by_nvlink), rel=0.05)


def test_a_rack_is_one_domain_though_it_has_many_hosts():
    assert transfer_of(on("72xGB200")[0], gather("{}", 72), 72).link == "inside"
    assert transfer_of(on("144xGB200")[0], gather("{}", 144), 144).link == "between"


def test_an_all_to_all_sends_the_other_domains_part_over_the_network():
    assert seconds("16xH100", gather("{}", 16, "all-to-all")) == pytest.approx(GB / 2 / 42.5e9, rel=0.01)


def test_one_crossing_pair_makes_a_permute_cross():
    inside = gather("{{0,1},{1,0}}", 2, "collective-permute")
    crossing = gather("{{0,1},{7,8}}", 2, "collective-permute")
    assert seconds("16xH100", crossing) == pytest.approx(GB / 42.5e9, rel=0.01)
    assert seconds("16xH100", inside) < seconds("16xH100", crossing)


def test_a_message_over_no_block_of_the_mesh_is_named_by_its_size():
    found = transfer_of(on("16xH100")[0], gather("{{0,1,2,5}}", 4, axes=None), 16)
    assert found.name == "all-gather[groups of 4]"


@pytest.mark.parametrize(
    "kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
)
@pytest.mark.parametrize("groups", ["[2,8]<=[16]", "[8,2]<=[2,8]T(1,0)", "[1,16]<=[16]"])
def test_half_the_bandwidth_is_slower_by_at_most_two(kind, groups):
    machine, num_devices = on("16xH100")
    if kind == "collective-permute":
        groups = "{{0,1}}" if groups == "[2,8]<=[16]" else "{{0,8}}"
    message = gather(groups, 8, kind)
    half = dataclasses.replace(
        machine,
        inside_bytes_per_second=machine.inside_bytes_per_second / 2,
        between_bytes_per_second=machine.between_bytes_per_second / 2,
    )
    whole_seconds = transfer_of(machine, message, num_devices).seconds
    assert whole_seconds < transfer_of(half, message, num_devices).seconds <= 2 * whole_seconds


@pytest.mark.parametrize(
    ("field", "groups", "where"),
    [
        ("inside_bytes_per_second", "[2,8]<=[16]", "inside a domain"),
        ("between_bytes_per_second", "{}", "between domains"),
    ],
)
def test_a_link_without_a_figure_is_refused(field, groups, where):
    machine, num_devices = on("16xH100")
    unknown = dataclasses.replace(machine, **{field: None})
    with pytest.raises(InputError, match=f"no figure for the link {where} of H100") as caught:
        transfer_of(unknown, gather(groups, 8), num_devices)
    assert "one fast domain" in caught.value.hint
