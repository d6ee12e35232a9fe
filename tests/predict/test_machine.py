import dataclasses

import pytest

from meshwright.errors import InputError
from meshwright.hardware import CATALOG, Calibration, Fleet
from meshwright.predict._machine import machine_of

CALIBRATION = Calibration(
    matmul_flops_per_second={"fp32": 3e11},
    memory_bytes_per_second=2e10,
    launch_seconds=1e-6,
    date="2026-11-21",
    source="by hand",
)


def test_simulated_devices_share_their_host():
    one, eight = (machine_of(Fleet.parse(f"{n}xCPU"), CALIBRATION) for n in (1, 8))
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


@pytest.mark.parametrize("name", [n for n, c in CATALOG.items() if c.platform != "cpu" and not c.slices])
def test_every_other_chip_makes_a_machine(name):
    machine = machine_of(Fleet.parse(f"8x{name}"), None)
    assert machine.basis in ("tables", "default", "roofline")
    assert machine.matmul_of_fp32 in ("tf32", "fp32")


def test_float32_products_run_reduced_where_jax_lets_them():
    assert machine_of(Fleet.parse("8xH100"), None).matmul_of_fp32 == "tf32"
    assert machine_of(Fleet.parse("v5p-8"), None).matmul_of_fp32 == "bf16"
    assert machine_of(Fleet.parse("8xT4"), None).matmul_of_fp32 == "fp32"  # Turing has no tf32


def test_products_sustain_what_published_bf16_runs_do_and_fp8_is_left_alone():
    machine = machine_of(Fleet.parse("8xH100"), None)
    assert machine.sustained_flops_per_second("bf16") == pytest.approx(570e12)
    assert machine.gemm_flops_per_second("bf16") == 989.4e12
    assert machine.sustained_flops_per_second("fp8-e4m3") is None
    assert machine.gemm_flops_per_second("nvfp4") is None


def test_a_lower_power_limit_sustains_the_cube_root():
    limited = machine_of(Fleet.parse("8xH100-96GB-HBM2e"), None)  # 500 W of 700
    assert limited.sustained_flops_per_second("bf16") == pytest.approx(570e12 * (500 / 700) ** (1 / 3))


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
