import statistics

import pytest

from meshwright.errors import InputError
from meshwright.hardware import CATALOG, find_chip
from meshwright.predict._rates import attention_of, provenance, rates_of, shared, sustained_share, widths

MEASURED = [
    "A100-40GB",
    "A100-80GB",
    "A800-80GB",
    "H100",
    "H100-96GB-HBM2e",
    "H800",
    "H200",
    "B200",
    "B300",
    "GB200",
    "GB300",
    "L40S",
    "RTX-PRO-6000",
]


def test_exactly_the_chips_with_tables_are_measured():
    assert sorted(name for name, chip in CATALOG.items() if rates_of(chip).measured) == sorted(MEASURED)


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_every_chip_has_a_rate_for_whatever_a_program_holds(name):
    rates = rates_of(CATALOG[name])
    for format_name in ("bf16", "fp8-e4m3", "fp8-e5m2", "tf32", "fp32"):
        assert 0.4 < rates.gemm_for(format_name).efficiency < 1
    for head_size in (32, 64, 80, 128, 256):
        assert 0.3 < rates.attention_for(head_size).efficiency < 1
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"):
        for size in (2, 3, 8, 72, 512):
            rate = rates.collective_for(kind, size)
            assert 0 < rate.efficiency < 1.3  # NVLS reduces in the switch: less is sent than the ring's share
            assert rate.alpha_seconds >= 0


def test_a_chip_without_tables_gets_the_medians():
    medians = rates_of(find_chip("H20"))
    same = ("A100-40GB", "A800-80GB", "H100-96GB-HBM2e", "H800")  # another chip's silicon, one table
    own = [rates_of(find_chip(name)).gemm["bf16"].efficiency for name in MEASURED if name not in same]
    assert medians.gemm["bf16"].efficiency == statistics.median(own)


def test_a_pcie_chip_without_tables_gets_the_pcie_collectives():
    pcie, nvlink = rates_of(find_chip("RTX-4090")), rates_of(find_chip("H20"))
    assert pcie.collectives == rates_of(find_chip("RTX-PRO-6000")).collectives
    assert pcie.collective_for("all-gather", 8).efficiency < nvlink.collective_for("all-gather", 8).efficiency


def test_latency_grows_with_groups_beyond_the_tables():
    rates = rates_of(find_chip("GB200"))
    four, eight = (rates.collective_for("all-gather", n).alpha_seconds for n in (4, 8))
    assert eight == pytest.approx(2 * four)


def test_the_rates_say_where_they_come_from():
    assert "aiconfigurator (Apache-2.0)" in provenance()
    assert "2026-11-21" in provenance()


def test_chips_of_one_silicon_sustain_one_share():
    assert sustained_share(find_chip("A100-40GB")) == sustained_share(find_chip("A100-80GB"))
    assert sustained_share(find_chip("H200")) == sustained_share(find_chip("H100"))
    assert sustained_share(find_chip("B200")) is None
    assert sustained_share(find_chip("T4")) is None


def test_shared_constants_are_shares_and_times():
    found = shared()
    for share in (found.memory_efficiency, found.network_efficiency, found.backward_attention_share):
        assert 0 < share < 1
    assert 1e-7 < found.launch_seconds < found.network_alpha_seconds < 1e-4


def test_every_width_holds_what_is_expected_and_says_why():
    assert all(width.low < 1 < width.high and width.words for width in widths().values())


def test_flash_2_runs_on_hopper_as_on_the_a100_and_elsewhere_as_the_tables_say():
    a100, h100 = (attention_of(find_chip(name), "flash-2")[128].efficiency for name in ("A100-80GB", "H100"))
    assert h100 == pytest.approx(0.62 * a100)
    assert h100 < rates_of(find_chip("H100")).attention[128].efficiency
    assert attention_of(find_chip("B200"), "flash-2") == rates_of(find_chip("B200")).attention
    assert attention_of(find_chip("H100"), "cudnn") == rates_of(find_chip("H100")).attention


def test_an_unknown_attention_kernel_names_the_nearest():
    with pytest.raises(InputError, match="no attention kernel 'flash2' is known") as caught:
        attention_of(find_chip("H100"), "flash2")
    assert "flash-2" in caught.value.hint
