import dataclasses
import json

import pytest

from meshwright.errors import InputError
from meshwright.formats import FORMATS
from meshwright.hardware import CATALOG, Chip, Fleet, chip_of_device_kind, find_chip, memory_fraction

CHIPS = list(CATALOG.values())
GPUS = [c for c in CHIPS if c.platform in ("cuda", "rocm")]
FIELDS = set(Chip.__dataclass_fields__) | set(FORMATS)


def test_the_catalog_has_the_chips_that_people_rent():
    assert len(CATALOG) >= 30
    assert {c.platform for c in CHIPS} == {"cuda", "rocm", "tpu", "cpu"}


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: c.name)
def test_every_chip_is_reached_by_each_of_its_own_keys(chip: Chip):
    assert find_chip(chip.name) is chip
    for alias in chip.aliases:
        assert find_chip(alias) is find_chip(alias.upper()) is chip
    for kind in chip.device_kinds:
        assert chip_of_device_kind(kind) is chip


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: c.name)
def test_every_figure_has_a_source(chip: Chip):
    groups = {
        "rates": chip.peak_flops_per_second or chip.memory_bytes_per_second,
        "memory": chip.memory_bytes,
        "device_kinds": chip.device_kinds,
        "between": chip.between,
        "target": chip.target,
        "slices": chip.slices,
    }
    missing = [group for group, figures in groups.items() if figures and not chip.sources.get(group)]
    assert not missing
    assert chip.confidence in ("high", "medium", "low")
    assert set(chip.uncertain_fields) <= FIELDS


@pytest.mark.parametrize("chip", GPUS, ids=lambda c: c.name)
def test_the_peaks_of_one_gpu_have_the_ratios_of_dense_arithmetic(chip: Chip):
    peak = chip.peak_flops_per_second
    bf16 = peak.get("bf16", peak["fp16"])
    assert peak["fp16"] == bf16
    if "tf32" in peak:  # half of bf16; a figure with sparsity would break one of these
        assert peak["tf32"] == pytest.approx(bf16 / 2, rel=0.02)
    if "fp8-e4m3" in peak:
        assert peak["fp8-e4m3"] == peak["fp8-e5m2"] == pytest.approx(bf16 * 2, rel=0.02)


# Dense 16-bit FLOPs with 32-bit accumulation per clock and multiprocessor, by compute capability: NVIDIA's
# architecture white papers. Consumer cards of GA102 and later have half of it, and so has the L40.
PER_CLOCK = {(7, 5): 1024, (8, 0): 2048, (8, 6): 1024, (8, 9): 1024, (12, 0): 1024}
HALVED = ("RTX-3", "RTX-4", "RTX-5")
# The A10G is cut down, and the clocks of the others' targets are not those of their rates.
OTHER_CLOCKS = ("A10G", "RTX-PRO-6000", "A100-PCIe-40GB", "A100-PCIe-80GB")
CLOCKED = [
    c for c in CHIPS if c.target and c.target.compute_capability in PER_CLOCK and c.name not in OTHER_CLOCKS
]


@pytest.mark.parametrize("chip", CLOCKED, ids=lambda c: c.name)
def test_the_peak_of_a_gpu_is_what_its_clock_and_multiprocessors_give(chip: Chip):
    assert chip.target is not None
    assert chip.num_sms is not None
    per_clock = PER_CLOCK[chip.target.compute_capability]
    if chip.name.startswith(HALVED) or chip.name == "L40":
        per_clock /= 2
    by_hand = chip.num_sms * per_clock * chip.target.clock_ghz * 1e9
    assert chip.peak_flops_per_second["fp16"] == pytest.approx(by_hand, rel=0.015)


@pytest.mark.parametrize(
    ("name", "bf16", "memory_gib", "inside"),
    [
        ("A100-80GB", 312e12, 79.15, 300e9),  # not 624 sparse, not 600 both ways
        ("H100", 989.4e12, 79.11, 450e9),  # not 1979 sparse, not 900 both ways
        ("H200", 989.4e12, 139.8, 450e9),
        ("A10G", 70e12, 22.06, 31.5e9),  # not the A10's 125
        ("RTX-4090", 165.2e12, 23.64, 31.5e9),  # not 330 with 16-bit accumulation
        ("GB200", 2500e12, 184.31, 900e9),
        ("MI250X", 191.5e12, 63.98, 175e9),  # one GCD, not the card
        ("MI300X", 1307.4e12, 191.69, 448e9),
        ("v3", 61.5e12, 15.48, 140e9),  # one core, not the chip
        ("v5p", 459e12, 95.74, 600e9),  # not 1200 both ways
        ("v7x", 1153.5e12, 94.75, 300e9),  # one core, not the chip
    ],
)
def test_the_known_traps_of_datasheets_are_avoided(name: str, bf16: float, memory_gib: float, inside: float):
    chip = find_chip(name)
    assert chip.peak_flops_per_second["bf16"] == bf16
    assert chip.memory_bytes == int(memory_gib * 2**30)
    assert chip.inside is not None
    assert chip.inside.bytes_per_second == inside


@pytest.mark.parametrize("chip", [c for c in CHIPS if c.target], ids=lambda c: c.name)
def test_two_sources_agree_on_a_chip_that_xla_knows(chip: Chip):
    assert chip.target is not None
    assert chip.memory_bytes_per_second == pytest.approx(chip.target.memory_bytes_per_second, rel=0.13)
    # NVLink is 25 GB/s a link and direction up to Hopper, 50 from Blackwell on; XLA counts the links.
    per_link = 50e9 if chip.target.compute_capability >= (10, 0) else 25e9
    if chip.target.nvlink_active_links and chip.inside:
        assert chip.inside.bytes_per_second == chip.target.nvlink_active_links * per_link
    assert chip.num_sms == chip.target.core_count or "num_sms" in chip.uncertain_fields


def test_a_fleet_can_be_a_key_and_a_plain_record():
    fleet = Fleet.parse("8xH100")
    assert {fleet: 1}[Fleet.parse("8xh100-sxm")] == 1
    assert json.loads(json.dumps(dataclasses.asdict(fleet)))["chip"]["name"] == "H100"


def test_a_simulated_device_claims_nothing():
    chip = find_chip("CPU")
    assert (dict(chip.peak_flops_per_second), chip.memory_bytes, chip.inside) == ({}, None, None)


def test_no_name_is_matched_by_a_part_of_it():
    for name in ("H100-SX", "A100-80", "NVIDIA H1"):
        with pytest.raises(InputError, match="unknown chip"):
            find_chip(name)


def test_an_unknown_chip_names_the_nearest():
    with pytest.raises(InputError, match="unknown chip 'H1000'") as refused:
        find_chip("H1000")
    assert "'H100'" in refused.value.hint


def test_an_unknown_device_kind_names_the_nearest():
    with pytest.raises(InputError, match="no chip of the catalog reports") as refused:
        chip_of_device_kind("NVIDIA H100 80GB HBM2")
    assert "NVIDIA H100 80GB HBM3" in refused.value.hint


def test_the_pool_is_what_the_allowance_leaves():
    chip = find_chip("H100")
    assert chip.memory_bytes is not None
    fraction = memory_fraction(chip, 5 * 2**30)
    assert fraction == 0.936  # (79.11 - 5) / 79.11 = 0.93679...
    assert chip.memory_bytes * fraction + 5 * 2**30 <= chip.memory_bytes
    assert memory_fraction(chip, 0) == 1


@pytest.mark.parametrize("allowance_bytes", [-1, 2**40])
def test_an_allowance_that_leaves_no_pool_is_refused(allowance_bytes: int):
    with pytest.raises(InputError, match=r"do not fit into the 79\.1 GiB"):
        memory_fraction(find_chip("H100"), allowance_bytes)


def test_a_chip_of_unknown_memory_has_no_pool():
    with pytest.raises(InputError, match="does not know how much memory B100 has"):
        memory_fraction(find_chip("B100"), 0)
