"""TPUs: products at what published runs sustain, convolutions that are products, sorts and splash attention.

The compiler for TPUs writes a matrix product as a convolution without a window; JAX's name of it tells.
"""

import json

import pytest

from meshwright.hardware import Fleet
from meshwright.ledger import executions_of
from meshwright.predict import machine_of, runs, walk

SIZE = 8192
PRODUCT = """
%step (x: bf16[SIZE,SIZE], y: bf16[SIZE,SIZE]) -> bf16[SIZE,SIZE] {
  %x = bf16[SIZE,SIZE]{1,0} parameter(0)
  %y = bf16[SIZE,SIZE]{1,0} parameter(1)
  ROOT %p = bf16[SIZE,SIZE]{1,0} convolution(%x, %y), dim_labels=bf_io->bf, metadata={op_name="step/NAME"}
}
""".replace("SIZE", str(SIZE))
SORT = """
%step (x: s32[1000000]) -> s32[1000000] {
  %x = s32[1000000]{0} parameter(0)
  ROOT %sorted = s32[1000000]{0} sort(%x), dimensions={0}, to_apply=%sum
}
"""


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
def test_products_take_the_time_of_the_rate_that_published_runs_sustain(walked_on, chip):
    walked = walked_on(PRODUCT.replace("NAME", "mlp/dot_general"), f"{chip}-8")
    expected = 2 * SIZE**3 / runs()["sustained"][chip]["flops_per_second"]
    assert walked.total["matmul"] == pytest.approx(expected)
    assert walked.seconds == pytest.approx(expected), "a TPU launches no kernels"


def test_a_generation_without_runs_has_the_share_of_the_others(walked_on):
    fleet = Fleet.parse("v7x-8")
    peak = fleet.chip.peak_flops_per_second["bf16"]
    walked = walked_on(PRODUCT.replace("NAME", "mlp/dot_general"), fleet.name)
    assert walked.total["matmul"] == pytest.approx(2 * SIZE**3 / (peak * runs()["other_tpus"]["share"]))


def test_a_convolution_of_the_users_stays_one(walked_on):
    walked = walked_on(PRODUCT.replace("NAME", "conv_general_dilated"), "v5e-8")
    assert set(walked.exposed) == {"convolution", "launch"}


def test_a_sort_passes_over_memory_once_for_each_stage_of_its_network(walked_on):
    machine = machine_of(Fleet.parse("v5e-8"), None)
    per_second = machine.memory_bytes_per_second * machine.memory_efficiency
    stages = 20 * 21 / 2  # of 2^20 elements
    assert walked_on(SORT, "v5e-8").seconds == pytest.approx(stages * 8e6 / per_second)
    assert walked_on(SORT, "8xH100").seconds < 20 * 8e6 / per_second


@pytest.mark.parametrize(("name", "is_priced"), [("splash_mha_fwd_residuals", True), ("mine", False)])
def test_splash_attention_is_priced_and_a_users_kernel_is_listed(program_of, name, is_priced):
    said = {
        "name": name,
        "flops": 10**12,
        "recompute_flops": 0,
        "kind": "attention",
        "format": "bf16",
        "source": "its body and grid",
        "head_size": 128,
        "length": 8192,
    }
    text = """
%step (x: bf16[8,8192,128]) -> bf16[8,8192,128] {
  %x = bf16[8,8192,128]{2,1,0} parameter(0)
  ROOT %call = bf16[8,8192,128]{2,1,0} custom-call(%x), custom_call_target="tpu_custom_call", SAID
}
"""
    marked = text.replace("SAID", f"meshwright_kernel={json.dumps(said)}")
    machine = machine_of(Fleet.parse("v5e-8"), None)
    walked = walk(machine, executions_of(program_of(marked)), (("data", 8),))
    assert walked.total["attention"] > 10**12 / machine.peak_flops_per_second["bf16"]
    assert (not walked.unpriced) == is_priced
