import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.hardware import CATALOG, Fleet, find_chip, fleet_reading, topology_arguments

SLICES = [
    f"{name}-{math.prod(map(int, shape.split('x'))) * chip.slices.cores_per_chip_in_name}"
    for chip in CATALOG.values()
    if chip.slices
    for name in (chip.name, *chip.aliases)
    for shape in chip.slices.shapes
]
several = st.builds(
    "{}x{}".format, st.integers(1, 40), st.sampled_from([name for name in SLICES if name[:2] != "v3"])
).filter(lambda text: "TPU-v3" not in text)


def _is_whole_trays(count: str, name: str) -> bool:
    """Whether a rack of such a chip has as many devices in whole trays; any host of another chip has."""
    chip, each = CATALOG[name], int(count)
    return (
        chip.chips_per_domain == chip.chips_per_host
        or each % chip.chips_per_host == 0 <= chip.chips_per_domain - each
    )


counted = st.builds(
    "{}x{}x{}".format,
    st.integers(1, 600),
    st.integers(1, 80),
    st.sampled_from([c.name for c in CATALOG.values() if c.slices is None]),
).filter(lambda text: _is_whole_trays(*text.split("x", 2)[1:]))


@pytest.mark.parametrize(
    ("text", "hosts", "chips", "domain"),
    [
        ("64xH100", 8, 8, 8),
        ("4xH100", 1, 4, 4),
        ("1xT4", 1, 1, 1),
        ("16x4xA100-80GB", 16, 4, 4),
        ("512xh100-sxm", 64, 8, 8),
        ("144xGB200", 36, 4, 72),  # trays of four, a rack of 72
        ("8xGB200", 2, 4, 8),
        ("256xGB200", 64, 4, 64),  # as many of each of four racks
        ("1024xGB300", 256, 4, 64),
        ("148xGB200", 37, 4, 72),  # one tray of each rack would be even
        ("3x48xGB200", 36, 4, 48),
        ("2x4xGB200", 2, 4, 8),  # hosts
        ("8xGH200", 8, 1, 1),
        ("8xCPU", 1, 8, 8),
        ("100xcpu", 1, 100, 100),
        ("2x4xCPU", 2, 4, 4),
        (" 8 x MI300X ", 1, 8, 8),
    ],
)
def test_a_counted_fleet_has_these_hosts(text: str, hosts: int, chips: int, domain: int):
    fleet = Fleet.parse(text)
    assert (fleet.num_hosts, fleet.chips_per_host, fleet.chips_per_domain) == (hosts, chips, domain)
    assert fleet.num_devices == hosts * chips


@pytest.mark.parametrize(
    ("text", "topology", "hosts", "devices"),
    [  # shapes: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; hosts and devices: libtpu 0.0.42
        ("v5p-512", "v5p:4x8x8", 64, 256),
        ("v5p-12288", "v5p:16x16x24", 1536, 6144),
        ("v4-8", "v4:2x2x1", 1, 4),
        ("v3-8", "v3:2x2", 1, 8),
        ("v6e-256", "v6e:16x16", 64, 256),
        ("v5litepod-256", "v5e:16x16", 64, 256),
        ("V5E-1", "v5e:1x1", 1, 1),
        ("v5e-8", "v5e:2x4", 2, 8),
        ("tpu7x-128", "tpu7x:4x4x4", 16, 128),
        ("v7x-8", "tpu7x:2x2x1", 1, 8),
    ],
)
def test_a_slice_is_read_as_google_names_it(text: str, topology: str, hosts: int, devices: int):
    fleet = Fleet.parse(text)
    assert (fleet.topology, fleet.num_hosts, fleet.num_devices) == (topology, hosts, devices)
    assert fleet.chips_per_domain == devices


@pytest.mark.parametrize(
    ("text", "name", "slices", "devices"),
    [
        ("4xv5e-256", "4xv5e-256", 4, 1024),
        ("16 x v5litepod-256", "16xv5e-256", 16, 4096),
        ("2xv5p-128", "2xv5p-128", 2, 128),
        ("3xTrillium-256", "3xv6e-256", 3, 768),
        ("2xtpu7x-128", "2xv7x-128", 2, 256),
        ("8xv5e-1", "8xv5e-1", 8, 8),
        ("1xv5e-256", "v5e-256", 1, 256),
    ],
)
def test_several_slices_are_a_count_and_a_slice(text: str, name: str, slices: int, devices: int):
    fleet = Fleet.parse(text)
    assert (fleet.name, fleet.num_domains, fleet.num_devices) == (name, slices, devices)
    one = Fleet.parse(name.partition("x")[2] if slices > 1 else name)
    assert fleet.chips_per_domain == one.num_devices
    assert fleet.num_hosts == slices * one.num_hosts
    assert (fleet.topology, fleet.domain) == (one.topology, "slice")
    arguments = topology_arguments(fleet)
    assert arguments.pop("num_slices", 1) == slices
    assert arguments == topology_arguments(one)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("2x4xv5e-256", "several TPU slices are one count and one slice", "write 8xv5e-256"),
        ("4xv5e", "a count of chips does not determine it", "several of them: 2xv5e-256"),
        ("2xv3-8", "no link joins those of v3", "v3-2048"),
        ("0xv5e-256", "has 0 devices", "write v5e-256 for one slice"),
        ("99999xv6e-256", "has 25599744 devices", "4xv6e-256 for four"),
        ("v6e-512", "no such slice", "as several slices: 2xv6e-256"),
        ("3xv6e-512", "no such slice", "as several slices: 6xv6e-256"),
        ("2xv5e-100", "no such slice", "the nearest is 2xv5e-128"),
        ("v5litepod-256x4", "cannot read the fleet", "did you mean 4xv5e-256?"),
        ("4 v5p-128", "cannot read the fleet", "did you mean 4xv5p-128?"),
    ],
)
def test_slices_that_do_not_exist_are_refused_with_those_that_do(text: str, message: str, hint: str):
    with pytest.raises(InputError) as refused:
        Fleet.parse(text)
    assert message in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xRTX4090", "8xRTX-4090"),
        ("8x4090", "8xRTX-4090"),
        ("8xGeForce RTX 4090", "8xRTX-4090"),
        ("8xA100", "8xA100-80GB"),
        ("8xA100 40GB", "8xA100-40GB"),
        ("8xa100-80g", "8xA100-80GB"),
        ("8xNVIDIA H100 80GB HBM3", "8xH100"),
        ("8xH100-SXM", "8xH100"),
        ("8xmi300x", "8xMI300X"),
        ("8xAMD Instinct MI300X", "8xMI300X"),
        ("TPU v4-8", "v4-8"),
        ("TPU v7x-8", "v7x-8"),
        ("Ironwood-128", "v7x-128"),
    ],
)
def test_a_chip_may_be_written_as_people_write_it(text: str, name: str):
    assert Fleet.parse(text).name == name


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        (
            "8xA100",
            "fleet '8xA100' read as 8xA100-80GB (the others of that name: A100-40GB, A100-PCIe-40GB, "
            "A100-PCIe-80GB)",
        ),
        ("8x4090", "fleet '8x4090' read as 8xRTX-4090"),
        ("tpu7x-128", "fleet 'tpu7x-128' read as v7x-128"),
        ("8xh100", ""),
        ("16x4xA100-80GB", ""),
        ("v5p-512", ""),
        ("2xv5p-512", ""),
        ("2xv5litepod-256", "fleet '2xv5litepod-256' read as 2xv5e-256"),
        ("8xcpu", ""),
    ],
)
def test_what_an_alias_was_read_as_is_said(text: str, reading: str):
    assert fleet_reading(text) == reading


@given(counted | st.sampled_from(SLICES) | several)
def test_the_name_of_a_fleet_is_that_fleet(text: str):
    fleet = Fleet.parse(text)
    assert Fleet.parse(fleet.name) == fleet
    assert Fleet.parse(fleet.name).name == fleet.name


def test_canonical_names_are_short():
    names = {
        t: Fleet.parse(t).name for t in ("8x8xh100-sxm", "1x4xH100", "1x12xH100", "2x8xCPU", "tpu7x-128")
    }
    assert list(names.values()) == ["64xH100", "4xH100", "1x12xH100", "2x8xCPU", "v7x-128"]


def test_a_fleet_has_the_links_of_its_chip():
    fleet = Fleet.parse("64xH100")
    assert fleet.inside is find_chip("H100").inside
    assert fleet.between is find_chip("H100").between


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("12xH100", "12 is not a multiple of 8, the H100 of one host", "8xH100, 16xH100"),
        ("0xH100", "has 0 devices", "write 8xH100"),
        ("0x8xH100", "has 0 devices", "write 8xH100"),
        ("99999999xH100", "has 99999999 devices", "write 8xH100"),
        ("8xH1000", "unknown chip 'H1000'", "'H100'"),
        ("64xA100-81GB", "unknown chip 'A100-81GB'", "A100-80GB"),
        ("8xA100-SXM", "unknown chip 'A100-SXM'", "'A100-SXM-40GB' or 'A100-SXM-80GB'"),
        ("RTX4090", "does not say how many", "write 8xRTX-4090"),
        ("H100", "does not say how many", "write 8xH100"),
        ("v5p", "does not say how many", "write v5p-12288"),
        ("v5p-500", "no such slice", "nearest is v5p-512"),
        ("v5p-0", "no such slice", "nearest is v5p-8"),
        ("256xv5p", "a TPU slice has a shape", "v5p-512"),
        ("v9z-8", "cannot read the fleet 'v9z-8'", "64xH100"),
        ("A100-40", "cannot read the fleet 'A100-40'", "64xH100"),
        ("", "cannot read the fleet ''", "64xH100"),
        ("-8xH100", "cannot read the fleet", "64xH100"),
        ("x8x", "cannot read the fleet", "64xH100"),
        ("H100x8", "cannot read the fleet 'H100x8'", "did you mean 8xH100?"),
        ("8 H100", "cannot read the fleet", "did you mean 8xH100?"),
        ("4*a100", "cannot read the fleet", "did you mean 4xA100-80GB?"),
    ],
)
def test_what_is_no_fleet_is_refused_with_the_nearest(text: str, message: str, hint: str):
    with pytest.raises(InputError) as refused:
        Fleet.parse(text)
    assert message in refused.value.message
    assert hint in refused.value.hint


@given(st.text(max_size=30))
def test_no_text_does_anything_worse_than_be_refused(text: str):
    try:
        fleet = Fleet.parse(text)
    except InputError:
        return
    assert Fleet.parse(fleet.name) == fleet


@pytest.mark.parametrize(
    ("kind", "count", "name"),
    [
        ("NVIDIA H200", 1, "1xH200"),
        ("NVIDIA H100 80GB HBM3", 8, "8xH100"),
        ("NVIDIA L4", 12, "1x12xL4"),
        ("cpu", 3, "3xCPU"),
        ("TPU v5 lite", 4, "v5e-4"),
        ("TPU v3", 8, "v3-8"),
    ],
)
def test_what_is_attached_is_found_by_its_exact_kind(kind: str, count: int, name: str):
    fleet = Fleet.local(kind, count)
    assert fleet.name == name
    assert fleet.num_devices == count


def test_an_attached_device_that_nobody_knows_is_refused():
    with pytest.raises(InputError, match="device kind 'NVIDIA H2000'") as refused:
        Fleet.local("NVIDIA H2000", 1)
    assert "NVIDIA H200" in refused.value.hint


def test_attached_tpus_that_are_no_slice_are_refused():
    with pytest.raises(InputError, match="no slice of v5e has 3 devices") as refused:
        Fleet.local("TPU v5 lite", 3)
    assert "v5e-4" in refused.value.hint


@pytest.mark.parametrize(
    "text", ["8xH100 reserve 20GiB", "v5p-512 reserve 1536MiB", "2x4xA100-80GB reserve 1000B"]
)
def test_a_fleet_with_a_reserve_is_read_as_it_is_written(text):
    fleet = Fleet.parse(text)
    assert fleet.reserve_bytes in (20 * 2**30, 1536 * 2**20, 1000)
    assert Fleet.parse(fleet.name) == fleet
    assert fleet_reading(text) == ""
    plain, reserve = text.split(" reserve ")
    assert fleet.options == f"--on {plain} --reserve {reserve}".replace(
        "2x4xA100-80GB", fleet.name.split()[0]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH100 reserve 90GiB", "a reserve of 90.0 GiB does not fit into the 79.1 GiB of one H100"),
        ("8xH100 reserve 20", "cannot read '20' as an amount of memory"),
        ("8xH100 reserve 1.5B", "cannot read '1.5B'"),
        ("8xCPU reserve 20GiB", "8xCPU has no memory of its own of which 20GiB could be reserved"),
    ],
)
def test_a_reserve_that_a_device_cannot_give_is_refused(text, words):
    with pytest.raises(InputError, match=words):
        Fleet.parse(text)
