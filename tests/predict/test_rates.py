"""Rows: https://github.com/ai-dynamo/aiconfigurator (Apache-2.0), from the fifth that was not fitted."""

import re
import statistics
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.hardware import CATALOG, Fleet, find_chip
from meshwright.predict import (
    CollectiveRate,
    GemmRate,
    attention_seconds,
    collective_seconds,
    gemm_seconds,
    machine_of,
    shared,
    sustained_share,
    widths,
)
from meshwright.predict import _rates as _constants
from meshwright.predict._rate_files import provenance
from meshwright.predict._rates import attention_of, rates_of

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
        # Consumer cards run above the clock of their data sheet.
        assert 0.4 < rates.gemm_for(format_name).efficiency < 1.2
    for head_size in (32, 64, 80, 128, 256):
        assert 0.3 < rates.attention_for(head_size).efficiency < 1
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"):
        for size in (2, 3, 8, 72, 512):
            rate = rates.collective_for(kind, size)
            assert 0 < rate.efficiency < 1.3  # NVLS reduces in the switch: less is sent than the ring's share
            assert rate.alpha_seconds >= 0


def test_a_chip_without_tables_gets_the_medians():
    medians = rates_of(find_chip("GH200"))
    same = ("A100-40GB", "A800-80GB", "H100-96GB-HBM2e", "H800")  # another chip's silicon, one table
    own = [rates_of(find_chip(name)).gemm["bf16"].efficiency for name in MEASURED if name not in same]
    assert medians.gemm["bf16"].efficiency == statistics.median(own)


def test_a_pcie_chip_without_tables_gets_the_pcie_collectives():
    pcie, nvlink = rates_of(find_chip("A10")), rates_of(find_chip("H20"))
    assert pcie.collectives == rates_of(find_chip("RTX-PRO-6000")).collectives
    assert pcie.collective_for("all-gather", 8).efficiency < nvlink.collective_for("all-gather", 8).efficiency


@pytest.mark.parametrize("name", ["RTX-3090", "RTX-4090", "RTX-5090"])
def test_a_card_without_peer_to_peer_transfers_sends_through_the_host(name):
    assert rates_of(find_chip(name)).collectives == rates_of(find_chip("L40S")).collectives
    assert machine_of(Fleet.parse(f"2x{name}"), None).through_host
    assert not machine_of(Fleet.parse("2xL40S"), None).through_host  # measured on that chip itself


# bf16 products of n x n x n by PyTorch, in TFLOP/s: zzc0721/torch-performance-test-data, issues 78, 96, 124
SQUARE = [
    ("RTX-4090", 2048, 164.81),
    ("RTX-4090", 4096, 151.50),
    ("RTX-4090", 8192, 160.17),
    ("RTX-4090", 10240, 158.54),
    ("RTX-5090", 2048, 170.77),
    ("RTX-5090", 4096, 181.17),
    ("RTX-5090", 8192, 234.89),
    ("RTX-5090", 10240, 236.99),
]


@pytest.mark.parametrize(("name", "size", "teraflops"), SQUARE)
def test_products_that_others_measured_lie_in_the_interval(name, size, teraflops):
    measured = 2 * size**3 / (teraflops * 1e12)
    width = widths()["products"]
    assert width.low < measured / gemm(name, size, size, size) < width.high


def test_latency_grows_with_groups_beyond_the_tables():
    rates = rates_of(find_chip("GB200"))
    four, eight = (rates.collective_for("all-gather", n).alpha_seconds for n in (4, 8))
    assert eight == pytest.approx(2 * four)


def test_the_rates_say_where_they_come_from():
    assert "aiconfigurator (Apache-2.0)" in provenance()
    assert "2026-11-21" in provenance()


def test_chips_of_one_silicon_sustain_one_share_unless_both_were_measured():
    assert sustained_share(find_chip("A100-40GB")) == sustained_share(find_chip("A100-80GB"))
    assert sustained_share(find_chip("H800")) == sustained_share(find_chip("H100"))
    assert sustained_share(find_chip("H200")) > sustained_share(find_chip("H100"))
    assert sustained_share(find_chip("B200")) is None
    assert sustained_share(find_chip("T4")) is None


def test_shared_constants_are_shares_and_times():
    found = shared()
    of_attention = found.backward_attention_share.values()
    for share in (found.memory_efficiency, found.network_efficiency, found.slowest_share, *of_attention):
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


FOLDER = Path(_constants.__file__).parent
# Numbers that are no property of a machine: counts, halves, the identity, percents, microseconds, the size of
# a memo, the least shares that are printed and proposed, the orders of four axes, XLA's number for host
# memory, a head size that stands for any, the seconds of an hour, the bounds of a run's steps and price.
ALLOWED = {"0", "1", "2", "0.0", "1.0", "100", "1e6", "10_000", "0.002", "0.01", "24", "5", "128"}
ALLOWED |= {"3600", "10", "18", "1e9"}
ALLOWED |= {"26"}  # of the threshold of laws, 10^26 FLOPs of a run
# Of the fit of factors: quantiles of the normal and of Student's distribution, rounds and precision of a
# search, the half of a width, the letters of a digest, the spans of a picture.
ALLOWED |= {"1.6449", "2.92", "50", "1e-9", "0.5", "16", "240"}


def test_the_files_hold_their_source():
    assert "aiconfigurator" in _constants.fitted()["source"]
    products = {"products", "products_reached", "unaligned"}
    others = {"sustained", "other_tpus", "shared", "attention", "interval", "factors", "alone", "grouped"}
    assert others | products == set(_constants.runs())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_no_constant_of_a_machine_stands_in_code(path):
    text = re.sub(r'"""[\s\S]*?"""|#.*|"[^"\n]*"', "", path.read_text())
    numbers = set(re.findall(r"(?<![\w.])\d[\d_]*(?:\.\d+)?(?:e-?\d+)?(?![\w.])", text))
    assert numbers <= ALLOWED


@pytest.mark.parametrize(
    "table",
    [
        "shared",
        "sustained",
        "other_tpus",
        "products",
        "unaligned",
        "attention",
        "interval",
        "factors",
        "alone",
        "grouped",
    ],
)
def test_every_table_of_constants_is_explained_beside_it(table):
    text = (FOLDER / "runs.toml").read_text()
    place = re.search(rf"^\[{table}[\].]", text, re.M).start()
    assert text[:place].rstrip().splitlines()[-1].startswith("#") or "#" in text[place : place + 200]


# chip, m, n, k of a bf16 product; milliseconds measured
GEMMS = [
    ("A100-80GB", 4096, 7168, 4096, 0.9319),
    ("A100-80GB", 4096, 12288, 3584, 1.3598),
    ("A100-80GB", 8192, 6144, 5120, 2.0107),
    ("A100-80GB", 8192, 8192, 65536, 34.1267),
    ("H100", 1024, 65536, 3072, 0.5695),
    ("H100", 1792, 7168, 2560, 0.0868),
    ("H100", 2048, 6144, 3584, 0.1235),
    ("H100", 2048, 10240, 6144, 0.3299),
    ("H200", 1536, 1536, 4096, 0.0285),
    ("H200", 3072, 1024, 6144, 0.0510),
    ("H200", 4352, 4096, 8192, 0.3742),
    ("H200", 4352, 12288, 4096, 0.5601),
    ("B200", 2048, 4096, 16384, 0.1790),
    ("B200", 2048, 10240, 51200, 1.5680),
    ("B200", 2304, 5120, 3584, 0.0607),
    ("B200", 3840, 16384, 12288, 1.2172),
    ("B300", 2816, 10240, 16384, 0.5679),
    ("B300", 3072, 1536, 16384, 0.0966),
    ("B300", 3072, 51200, 8192, 1.6029),
    ("B300", 3328, 6144, 10240, 0.3008),
    ("GB200", 2304, 5120, 3584, 0.0522),
    ("GB200", 3584, 3072, 1024, 0.0153),
    ("GB200", 3840, 7168, 1536, 0.0566),
    ("GB200", 4352, 3584, 3584, 0.0893),
    ("GB300", 1536, 6144, 2048, 0.0226),
    ("GB300", 3584, 1536, 2048, 0.0149),
    ("GB300", 8192, 1536, 2560, 0.0377),
    ("GB300", 8192, 3072, 8192, 0.2501),
    ("L40S", 1024, 8192, 7168, 0.5219),
    ("L40S", 1536, 2048, 65536, 1.9452),
    ("L40S", 3072, 2560, 1536, 0.1174),
    ("L40S", 32768, 3072, 2048, 2.0512),
    ("RTX-PRO-6000", 2816, 1024, 4096, 0.0610),
    ("RTX-PRO-6000", 3072, 2560, 1536, 0.0844),
    ("RTX-PRO-6000", 3584, 4096, 10240, 0.7653),
    ("RTX-PRO-6000", 4352, 12288, 16384, 4.2376),
]

# chip, sequences, heads (of 128), positions of a causal bf16 forward pass; milliseconds measured
ATTENTION = [
    ("A100-80GB", 16, 64, 1536, 5.4028),
    ("A100-80GB", 64, 4, 1024, 0.7316),
    ("H100", 16, 96, 3072, 9.2606),
    ("H100", 16, 64, 3072, 5.8951),
    ("H200", 16, 16, 2048, 0.7164),
    ("H200", 16, 4, 1536, 0.1519),
    ("B200", 8, 40, 1024, 0.2583),
    ("B200", 16, 16, 8192, 4.7840),
    ("B300", 1, 96, 8192, 1.5783),
    ("B300", 2, 24, 3072, 0.1460),
    ("GB200", 16, 64, 2048, 1.4859),
    ("GB200", 16, 24, 6144, 3.6419),
    ("GB300", 4, 48, 3072, 0.5726),
    ("GB300", 4, 10, 8192, 0.5207),
    ("L40S", 2, 64, 12288, 35.0403),
    ("L40S", 4, 32, 6144, 9.9758),
    ("RTX-PRO-6000", 32, 16, 1536, 1.9429),
    ("RTX-PRO-6000", 4, 8, 2048, 0.2335),
]

# chip, kind, GPUs, bytes of the whole array; milliseconds measured
COLLECTIVES = [
    ("A100-80GB", "all-gather", 8, 134217728, 0.6603),
    ("A100-80GB", "all-reduce", 8, 134217728, 1.1691),
    ("H100", "all-gather", 8, 134217728, 0.3928),
    ("H100", "all-reduce", 8, 134217728, 0.5787),
    ("H200", "all-gather", 8, 134217728, 0.3799),
    ("H200", "all-reduce", 8, 134217728, 0.5645),
    ("B200", "all-gather", 8, 134217728, 0.2068),
    ("B200", "all-reduce", 8, 134217728, 0.3984),
    ("B300", "all-gather", 8, 134217728, 0.2045),
    ("B300", "all-reduce", 8, 134217728, 0.3915),
    ("GB200", "all-gather", 4, 134217728, 0.1953),
    ("GB200", "all-reduce", 4, 134217728, 0.3425),
    ("GB300", "all-gather", 4, 134217728, 0.1918),
    ("GB300", "all-reduce", 4, 134217728, 0.3388),
    ("L40S", "all-gather", 8, 134217728, 99.3170),
    ("L40S", "all-reduce", 8, 134217728, 162.4810),
    ("RTX-PRO-6000", "all-gather", 8, 134217728, 5.1379),
    ("RTX-PRO-6000", "all-reduce", 8, 134217728, 9.7574),
]


def gemm(chip_name, m, n, k, **changed):
    chip = find_chip(chip_name)
    settings = {
        "num_bytes": 2 * (m * k + k * n + m * n),
        "flops_per_second": chip.peak_flops_per_second["bf16"],
        "memory_bytes_per_second": chip.memory_bytes_per_second,
        "num_sms": chip.num_sms,
    }
    return gemm_seconds(rates_of(chip).gemm["bf16"], m=m, n=n, k=k, **{**settings, **changed})


def relative_errors(predicted_and_measured):
    return [abs(predicted / measured - 1) for predicted, measured in predicted_and_measured]


def test_gemms_that_were_not_fitted_are_met_within_a_few_percent():
    errors = relative_errors((gemm(chip, m, n, k), ms * 1e-3) for chip, m, n, k, ms in GEMMS)
    assert statistics.median(errors) < 0.06
    assert max(errors) < 0.35


def test_attention_that_was_not_fitted_is_met_within_a_few_percent():
    def predicted(name, sequences, heads, length):
        chip = find_chip(name)
        matmuls = 2 * (2 * sequences * heads * length * length * 128)
        peak = chip.peak_flops_per_second["bf16"]
        rate = rates_of(chip).attention_for(128)
        return attention_seconds(rate, flops=matmuls / 2, length=length, flops_per_second=peak)

    errors = relative_errors((predicted(*row[:-1]), row[-1] * 1e-3) for row in ATTENTION)
    assert statistics.median(errors) < 0.08
    assert max(errors) < 0.35


def test_collectives_that_were_not_fitted_are_met_within_a_tenth():
    def predicted(name, kind, size, num_bytes):
        chip = find_chip(name)
        wire = (2 if kind == "all-reduce" else 1) * num_bytes * (size - 1) / size
        rate = rates_of(chip).collective_for(kind, size)
        return collective_seconds(rate, wire_bytes=wire, bytes_per_second=chip.inside.bytes_per_second)

    # L40S, without peer-to-peer transfers, scatters by a factor within its own table
    steady = [row for row in COLLECTIVES if row[0] != "L40S"]
    errors = relative_errors((predicted(*row[:-1]), row[-1] * 1e-3) for row in steady)
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.25


@pytest.mark.parametrize("field", ["flops_per_second", "memory_bytes_per_second"])
def test_half_the_rate_is_never_faster_nor_more_than_twice_as_slow(field):
    chip = find_chip("H100")
    rate = chip.peak_flops_per_second["bf16"] if "flops" in field else chip.memory_bytes_per_second
    for m, n, k in [(128, 128, 128), (4096, 4096, 4096), (8192, 128, 64), (1, 4096, 4096)]:
        whole, half = gemm("H100", m, n, k), gemm("H100", m, n, k, **{field: rate / 2})
        assert whole <= half <= 2 * whole


def test_a_started_wave_costs_as_much_as_it_is_paid():
    rate = GemmRate(
        efficiency=1.0, k_half=0.0, start_seconds=0.0, memory_efficiency=1.0, wave_share=1.0,
        small_tile_exponent=9.0,
    )  # fmt: skip
    fixed = {"k": 1024, "num_bytes": 0, "flops_per_second": 1e15, "memory_bytes_per_second": 1e12}
    # 256 x 128 tiles on 4 SMs: 4 are one wave, 5 are two
    four = gemm_seconds(rate, m=256 * 4, n=128, num_sms=4, **fixed)
    five = gemm_seconds(rate, m=256 * 5, n=128, num_sms=4, **fixed)
    assert four == pytest.approx(2 * 1024 * 128 * 1024 / 1e15)
    assert five == pytest.approx(2 * four)


def test_a_collective_of_nothing_takes_its_latency():
    rate = CollectiveRate(efficiency=0.5, alpha_seconds=1e-5, ramp_seconds=1e-5)
    assert collective_seconds(rate, wire_bytes=0, bytes_per_second=1e9) == pytest.approx(1e-5)
    # 1 GB at half of 1 GB/s is 2 s, and the ramp's geometric mean with it
    assert collective_seconds(rate, wire_bytes=1e9, bytes_per_second=1e9) == pytest.approx(
        2.00001 + 2e-5**0.5
    )
