"""A calibration written by hand: each of its figures moves the slices it is about, and no other."""

import dataclasses

import pytest

from meshwright.errors import InputError
from meshwright.hardware import (
    CATALOG,
    Calibration,
    Fleet,
    MeasuredAttention,
    MeasuredCollective,
    measured_attention,
)
from meshwright.ledger import executions_of
from meshwright.predict import machine_of, predict

PROBED = Calibration(
    matmul_flops_per_second={"fp32": 3e11},
    memory_bytes_per_second=2e10,
    launch_seconds=1e-6,
    date="2026-11-21",
    source="by hand",
)


def test_simulated_devices_share_their_host():
    one, eight = (machine_of(Fleet.parse(f"{n}xCPU"), PROBED) for n in (1, 8))
    assert eight.peak_flops_per_second["fp32"] == pytest.approx(one.peak_flops_per_second["fp32"] / 8)
    assert eight.memory_bytes_per_second == pytest.approx(one.memory_bytes_per_second / 8)


def test_a_cpu_without_a_calibration_is_told_to_probe():
    with pytest.raises(InputError, match="no rates are known for 8xCPU") as caught:
        machine_of(Fleet.parse("8xCPU"), None)
    assert caught.value.hint == "measure them first: `meshwright probe`"


def test_a_chip_without_a_memory_bandwidth_is_refused():
    fleet = Fleet.parse("8xH100")
    chip = dataclasses.replace(fleet.chip, memory_bytes_per_second=None)
    with pytest.raises(InputError, match="does not know the memory bandwidth of H100"):
        machine_of(dataclasses.replace(fleet, chip=chip), None)


def test_one_device_has_the_rates_of_a_card_and_a_fleet_waits_for_its_slowest():
    one, fleet = (machine_of(Fleet.parse(f"{n}xH100"), None) for n in (1, 8))
    assert one.sustained_flops_per_second("bf16") == pytest.approx(735e12)
    # Products one behind another, records 2026-11-26_ and 2026-11-27_gpu_kernels; cards differ by 8 %.
    assert fleet.sustained_flops_per_second("bf16") == pytest.approx(664e12 * 0.96)
    # Records 2026-11-27_gpu_kernels and _gpu_attention, rounded.
    measured = {"cudnn": (363e12, 246e12), "flash-2": (246e12, 195e12)}
    for kernel, (forward, backward) in measured.items():
        card = machine_of(Fleet.parse("1xH100"), None, kernel)
        rates = [card.attention_rate(128, 1024, "bf16", backward=b) for b in (False, True)]
        assert [rate.efficiency * 989.4e12 for rate in rates] == pytest.approx([forward, backward])
    assert fleet.attention_rate(128, 1024, "bf16", backward=True).efficiency * 989.4e12 == pytest.approx(
        246e12
    )
    assert not machine_of(Fleet.parse("8xH100"), None, "flash-2").measured_attention


def test_one_device_with_less_power_is_slower_and_one_of_silicon_that_was_not_measured_is_as_in_a_fleet():
    fleet = Fleet.parse("1xH100")
    weaker = dataclasses.replace(fleet, chip=dataclasses.replace(fleet.chip, watts=350))
    share = machine_of(weaker, None).sustained_flops_per_second("bf16") / 735e12
    assert share == pytest.approx(0.5 ** (1 / 3))
    one, eight = (machine_of(Fleet.parse(f"{n}xA100-80GB"), None) for n in (1, 8))
    assert eight.sustained_share == pytest.approx(0.96 * one.sustained_share)
    assert not one.alone


def test_a_calibration_of_the_card_takes_the_place_of_what_other_cards_reached():
    probed = dataclasses.replace(PROBED, matmul_flops_per_second={"bf16": 600e12})
    machine = machine_of(Fleet.parse("1xH100"), probed)
    assert machine.sustained_flops_per_second("bf16") == pytest.approx(600e12)
    assert not machine.alone
    assert not machine.measured_attention


@pytest.mark.parametrize("name", [n for n, c in CATALOG.items() if c.platform != "cpu" and not c.slices])
def test_every_other_chip_makes_a_machine(name):
    machine = machine_of(Fleet.parse(f"8x{name}"), None)
    assert machine.basis in ("tables", "products", "default", "roofline")
    assert machine.matmul_of_fp32 in ("tf32", "fp32")


def test_float32_products_run_reduced_where_jax_lets_them():
    assert machine_of(Fleet.parse("8xH100"), None).matmul_of_fp32 == "tf32"
    assert machine_of(Fleet.parse("v5p-8"), None).matmul_of_fp32 == "bf16"
    assert machine_of(Fleet.parse("8xT4"), None).matmul_of_fp32 == "fp32"  # Turing has no tf32


def test_products_sustain_what_such_cards_did_and_fp8_is_left_alone():
    machine = machine_of(Fleet.parse("8xH100"), None)
    assert machine.sustained_flops_per_second("bf16") == pytest.approx(637.44e12)
    assert machine.gemm_flops_per_second("bf16") == 989.4e12
    assert machine.sustained_flops_per_second("fp8-e4m3") is None
    assert machine.gemm_flops_per_second("nvfp4") is None


def test_a_lower_power_limit_sustains_the_cube_root():
    limited = machine_of(Fleet.parse("8xH100-96GB-HBM2e"), None)  # 500 W of 700
    assert limited.sustained_flops_per_second("bf16") == pytest.approx(637.44e12 * (500 / 700) ** (1 / 3))


def test_a_chip_of_which_no_run_was_published_has_a_factor_for_bf16_alone():
    machine = machine_of(Fleet.parse("8xB200"), None)
    assert machine.sustained_flops_per_second("bf16") is None
    assert machine.gemm_flops_per_second("bf16") == pytest.approx(0.81 * 2250e12)
    assert machine.gemm_flops_per_second("fp8-e4m3") == machine.peak_flops_per_second["fp8-e4m3"]


def test_what_was_measured_of_an_accelerator_goes_before_catalog_and_published_runs():
    measured = Calibration(
        matmul_flops_per_second={"bf16": 6e14},
        memory_bytes_per_second=3e12,
        launch_seconds=2e-6,
        date="2026-11-21",
        source="a test",
        chip="H200",
    )
    fleet = Fleet.parse("8xH200")
    machine, plain = machine_of(fleet, measured), machine_of(fleet, None)
    assert machine.sustained_flops_per_second("bf16") == pytest.approx(6e14)
    assert machine.memory_bytes_per_second * machine.memory_efficiency == 3e12
    assert machine.launch_seconds == 2e-6
    assert machine.rates == plain.rates
    assert plain.sustained_flops_per_second("bf16") != pytest.approx(6e14)


CALIBRATION = Calibration(
    matmul_flops_per_second={"bf16": 400e12},
    memory_bytes_per_second=2e12,
    launch_seconds=2e-6,
    attention=(
        MeasuredAttention(
            head_size=128, length=4096, forward_flops_per_second=300e12, backward_flops_per_second=200e12
        ),
    ),
    collectives=(
        MeasuredCollective(kind="all-gather", group_size=8, bytes_per_second=200e9, latency_seconds=20e-6),
        MeasuredCollective(kind="all-reduce", group_size=8, bytes_per_second=100e9, latency_seconds=30e-6),
        MeasuredCollective(kind="reduce-scatter", group_size=2, bytes_per_second=50e9, latency_seconds=40e-6),
    ),
    date="2026-11-21",
    source="by hand",
    chip="H100",
)
FMHA = (
    'backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16",'
    '"dimensions":["2","32","4096","4096"]},"mask_type":"CAUSAL"}}'
)
BACKWARD = f'custom_call_target="__cudnn$fmhaSoftmaxBackward", {FMHA}'
QKV = "bf16[2,4096,32,128]"
STEP = f"""
%main (a: bf16[8192,8192], q: {QKV}, s: f32[1000000]) -> f32[500000] {{
  %a = bf16[8192,8192] parameter(0)
  %q = {QKV} parameter(1)
  %s = f32[1000000] parameter(2)
  %m = bf16[8192,8192] dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %f = (bf16[2,32,4096,128], u8[0]) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", {FMHA}
  %b = (bf16[2,32,4096,128], u8[0]) custom-call(%q, %q, %q, %q, %q, %q), {BACKWARD}
  %c = f32[1000000] copy(%s)
  %g = f32[8000000] all-gather(%s), replica_groups=[1,8]<=[8], dimensions={{0}}
  %r = f32[1000000] all-reduce(%s), replica_groups=[1,8]<=[8], to_apply=%sum
  ROOT %t = f32[500000] reduce-scatter(%s), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%sum
}}"""
# What changes: which part of the calibration, and the slices with the factor by which they then take longer,
# None where a part of the slice's time is of something else.
CHANGES = {
    "matmul": ({"matmul_flops_per_second": {"bf16": 200e12}}, {"matmul": 2.0}),
    "memory": ({"memory_bytes_per_second": 1e12}, {"memory-bound": 2.0}),
    "launch": ({"launch_seconds": 4e-6}, {"launch": 2.0}),
    "forward": ({"attention": {0: {"forward_flops_per_second": 150e12}}}, {"attention": None}),
    "backward": ({"attention": {0: {"backward_flops_per_second": 100e12}}}, {"attention": None}),
    "gather": ({"collectives": {0: {"bytes_per_second": 100e9}}}, {"all-gather[data]": None}),
    "gather latency": ({"collectives": {0: {"latency_seconds": 40e-6}}}, {"all-gather[data]": None}),
    "reduce": ({"collectives": {1: {"bytes_per_second": 50e9}}}, {"all-reduce[data]": None}),
    "scatter among two": ({"collectives": {2: {"latency_seconds": 80e-6}}}, {"reduce-scatter[data]": None}),
}


def changed(changes):
    fields = {}
    for name, value in changes.items():
        if name in ("attention", "collectives"):
            parts = list(getattr(CALIBRATION, name))
            for place, part in value.items():
                parts[place] = dataclasses.replace(parts[place], **part)
            value = tuple(parts)
        fields[name] = value
    return dataclasses.replace(CALIBRATION, **fields)


@pytest.fixture
def predicted(program_of, compiled_for, ledger_with):
    def make(calibration, attention_kernel="cudnn"):
        return predict(
            executions_of(program_of(STEP)),
            ledger_with(),
            compiled_for("8xH100"),
            Fleet.parse("8xH100"),
            calibration,
            attention_kernel,
        )

    return make


def seconds(prediction):
    return {each.name: each.seconds for each in prediction.slices}


@pytest.mark.parametrize("name", CHANGES)
def test_each_measured_figure_moves_the_slices_it_is_about_and_no_other(predicted, name):
    changes, expected = CHANGES[name]
    before, after = (seconds(predicted(c)) for c in (CALIBRATION, changed(changes)))
    moved = {slice_: after[slice_] / before[slice_] for slice_ in before if after[slice_] != before[slice_]}
    assert set(moved) == set(expected)
    for slice_, factor in expected.items():
        assert moved[slice_] == pytest.approx(factor) if factor else moved[slice_] > 1


def test_times_are_those_that_the_figures_say(predicted):
    found = seconds(predicted(CALIBRATION))
    scores = 2 * 32 * 4096 * 4096 * 128  # one product, halved by the mask, times two
    wire = 4e6 * 7  # seven others' parts of 4 MB
    assert found["matmul"] == pytest.approx(2 * 8192**3 / 400e12)
    assert found["attention"] == pytest.approx(2 * scores / 300e12 + 5 * scores / 200e12)
    assert found["all-gather[data]"] == pytest.approx(20e-6 + wire / 200e9)
    assert found["all-reduce[data]"] == pytest.approx(30e-6 + 2 * 4e6 * 7 / 8 / 100e9)
    assert found["reduce-scatter[data]"] == pytest.approx(40e-6 + 4e6 / 2 / 50e9)
    assert found["memory-bound"] == pytest.approx(8e6 / 2e12)


def test_the_basis_says_which_figures_were_measured_and_which_are_the_tables(predicted):
    words = predicted(CALIBRATION).basis
    assert "Measured on 2026-11-21 (by hand): large products in bf16; memory; launches; " in words
    assert (
        "attention with heads of 128; all-gather and all-reduce among 8; reduce-scatter among 2; from tables"
        in words
    )
    assert "): the shape of products and other groups; width" in words


def test_the_basis_without_attention_and_collectives_names_them_among_the_tables(predicted):
    words = predicted(dataclasses.replace(CALIBRATION, attention=(), collectives=())).basis
    assert "launches; from tables" in words
    assert "): the shape of products, attention and collectives;" in words


def test_groups_that_were_not_measured_stay_the_tables():
    fleet = Fleet.parse("8xH100")
    tables, measured = machine_of(fleet, None).rates, machine_of(fleet, CALIBRATION).rates
    assert measured.collective_for("all-gather", 4) == tables.collective_for("all-gather", 4)
    assert measured.collective_for("all-gather", 8) != tables.collective_for("all-gather", 8)


def test_another_librarys_attention_is_not_what_was_measured(predicted):
    assert seconds(predicted(CALIBRATION, "flash-2"))["attention"] == pytest.approx(
        seconds(predicted(dataclasses.replace(CALIBRATION, attention=()), "flash-2"))["attention"]
    )


def test_a_link_that_the_catalog_does_not_know_is_known_once_it_was_measured():
    fleet = Fleet.parse("8xH100")
    unlinked = dataclasses.replace(fleet, chip=dataclasses.replace(fleet.chip, inside=None))
    assert machine_of(unlinked, None).inside_bytes_per_second is None
    machine = machine_of(unlinked, CALIBRATION)
    rate = machine.rates.collective_for("all-reduce", 8)
    assert rate.efficiency * machine.inside_bytes_per_second == pytest.approx(100e9)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_measured_group_keeps_its_rate_where_the_link_depends_on_the_group(size):
    collective = MeasuredCollective(
        kind="all-gather", group_size=size, bytes_per_second=20e9, latency_seconds=1e-5
    )
    measured = dataclasses.replace(CALIBRATION, collectives=(collective,))
    machine = machine_of(Fleet.parse("8xV100"), measured)
    rate = machine.rates.collective_for("all-gather", size)
    assert rate.efficiency * machine.inside_rate(size) == pytest.approx(20e9)


def test_simulated_devices_share_what_was_measured_of_their_host_together():
    cpu = dataclasses.replace(CALIBRATION, chip="CPU", attention=())
    machine = machine_of(Fleet.parse("8xCPU"), cpu)
    rate = machine.rates.collective_for("all-gather", 8)
    assert rate.efficiency * machine.inside_bytes_per_second == pytest.approx(200e9 / 8)
    assert rate.alpha_seconds == 20e-6


def test_larger_groups_of_simulated_devices_wait_longer():
    cpu = dataclasses.replace(CALIBRATION, chip="CPU", attention=())
    rate = machine_of(Fleet.parse("16xCPU"), cpu).rates.collective_for("all-gather", 16)
    assert rate.alpha_seconds == pytest.approx(40e-6)


MEASURED = tuple(
    MeasuredAttention(
        head_size=head, length=length, forward_flops_per_second=rate, backward_flops_per_second=rate / 2
    )
    for head, length, rate in ((64, 1000, 100e12), (64, 4000, 400e12), (128, 1000, 150e12))
)


@pytest.mark.parametrize(
    ("head_size", "length", "backward", "expected"),
    [
        (64, 1000, False, 100e12),
        (64, 4000, True, 200e12),
        (64, 2000, False, 200e12),  # the middle, in logarithms
        (80, 4000, False, 400e12),  # the nearest head size
        (128, 3000, False, 150e12 * 0.75 / 0.5),  # beyond: as the table's curve rises
        (64, 500, False, 100e12 * (500 / 1500) / 0.5),
    ],
)
def test_attention_is_read_between_and_beyond_the_measured_lengths(head_size, length, backward, expected):
    assert measured_attention(MEASURED, 1000.0, head_size, length, backward) == pytest.approx(expected)


@pytest.mark.parametrize(("devices", "expected"), [(1, 2e-6), (2, 3e-6), (3, 3e-6), (8, 9e-6), (16, 18e-6)])
def test_simulated_devices_wait_for_each_others_launches(devices, expected):
    cpu = dataclasses.replace(CALIBRATION, chip="CPU", launch_seconds_among={2: 3e-6, 8: 9e-6})
    assert machine_of(Fleet.parse(f"{devices}xCPU"), cpu).launch_seconds == pytest.approx(expected)


def test_a_launch_of_one_device_stands_for_several_where_those_were_not_measured():
    cpu = dataclasses.replace(CALIBRATION, chip="CPU")
    assert machine_of(Fleet.parse("8xCPU"), cpu).launch_seconds == 2e-6
