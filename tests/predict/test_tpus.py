"""TPUs: products at what published runs sustain, memory on the chip, sorts and splash attention.

The compiler for TPUs writes a matrix product as a convolution without a window; JAX's name of it tells. It
places arrays in the chip's vector memory (S(1) in their layouts), and copies between the memories beside
computation.
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


def test_a_ragged_dot_of_a_tpu_is_priced_as_a_product(walked_on):
    says = '{mosaic_fusion_entry_point="true",ragged_dot_tiling="128,1024,1024"}'
    text = f"""
%step (n: s32[1], t: s32[79], a: bf16[8192,1024], b: bf16[16,1024,2048]) -> bf16[8192,2048] {{
  %n = s32[1]{{0}} parameter(0)
  %t = s32[79]{{0}} parameter(1)
  %a = bf16[8192,1024]{{1,0}} parameter(2)
  %b = bf16[16,1024,2048]{{2,1,0}} parameter(3)
  ROOT %d = bf16[8192,2048]{{1,0}} custom-call(%n, %t, %t, %t, %n, %a, %b),
    custom_call_target="tpu_custom_call",
    frontend_attributes={says}, metadata={{op_name="ragged-dot-none"}}
}}
""".replace(",\n    ", ", ")
    walked = walked_on(text, "v5e-8")
    rate = runs()["sustained"]["v5e"]["flops_per_second"]
    assert walked.total["matmul"] == pytest.approx(2 * 79 * 128 * 1024 * 2048 / rate)
    assert not walked.unpriced


ROW = 4 * 2**20  # bytes of f32[1048576]
FUSED = """
%fused (p: f32[1048576]) -> (f32[1048576], f32[1048576]) {
  %p = f32[1048576]{0} parameter(0)
  %n = f32[1048576]{0} negate(%p)
  ROOT %both = (f32[1048576]{0}, f32[1048576]{0}) tuple(%n, %n)
}

%step (x: f32[1048576]) -> (f32[1048576], f32[1048576]) {
  %x = f32[1048576]{0:IN} parameter(0)
  ROOT %f = (f32[1048576]{0:T(1024)S(1)}, f32[1048576]{0:OUT}) fusion(%x), kind=kLoop, calls=%fused
}
"""
COPIED = """
%step (x: f32[1048576], y: bf16[SIZE,SIZE]) -> f32[1048576] {
  %x = f32[1048576]{0:T(1024)} parameter(0)
  %y = bf16[SIZE,SIZE]{1,0:T(8,128)S(1)} parameter(1)
  %begun = (f32[1048576]{0:T(1024)S(1)}, f32[1048576]{0:T(1024)}, u32[]{:S(2)}) copy-start(%x)
  BESIDE
  ROOT %done = f32[1048576]{0:T(1024)S(1)} copy-done(%begun)
}
"""
PRODUCTS = """%p = bf16[SIZE,SIZE]{1,0:T(8,128)S(1)} convolution(%y, %y), dim_labels=bf_io->bf,
  metadata={op_name="step/mlp/dot_general"}""".replace("\n", "")
NOTHING = "%nothing = f32[] constant(0)"
READS = "%n = f32[1048576]{0:T(1024)S(1)} negate(%x)"


def main_memory_seconds(num_bytes, chip="v6e-8"):
    machine = machine_of(Fleet.parse(chip), None)
    return num_bytes / (machine.memory_bytes_per_second * machine.memory_efficiency)


@pytest.mark.parametrize(
    ("read", "written", "rows"), [("", "", 2), ("S(1)", "", 1), ("", "S(1)", 1), ("S(1)", "S(1)", 0)]
)
def test_what_lies_in_vector_memory_takes_no_time_of_the_main_memory(walked_on, read, written, rows):
    text = FUSED.replace("IN", f"T(1024){read}").replace("OUT", f"T(1024){written}")
    seconds = walked_on(text, "v6e-8").seconds
    if rows:
        assert seconds == pytest.approx(main_memory_seconds(rows * ROW))
    else:
        assert 0 < seconds < main_memory_seconds(ROW) / 5


def test_a_gpus_other_memory_space_is_main_memory_too(walked_on):
    texts = (FUSED.replace("IN", f"T(1024){s}").replace("OUT", "T(1024)") for s in ("", "S(1)"))
    here, there = (walked_on(text, "8xH100").seconds for text in texts)
    assert here == there


@pytest.mark.parametrize("beside", [NOTHING, READS, PRODUCTS])
def test_a_copy_runs_beside_what_leaves_the_main_memory_to_it(walked_on, beside):
    walked = walked_on(COPIED.replace("BESIDE", beside).replace("SIZE", "1024"), "v6e-8")
    product = 2 * 1024**3 / runs()["sustained"]["v6e"]["flops_per_second"]
    copied = main_memory_seconds(ROW)
    expected = {NOTHING: copied, READS: 2 * copied, PRODUCTS: max(copied, product)}[beside]
    assert walked.seconds == pytest.approx(expected)
    assert sum(walked.exposed.values()) == pytest.approx(walked.seconds)


def test_a_copied_slice_runs_beside_a_product_and_its_parts_are_read_where_they_lie(walked_on):
    text = """
%sliced (p: f32[1048576]) -> f32[524288] {
  %p = f32[1048576]{0:T(1024)} parameter(0)
  ROOT %s = f32[524288]{0:T(1024)S(1)} slice(%p), slice={[0:524288]}
}

%step (x: f32[1048576]) -> f32[1048576] {
  %x = f32[1048576]{0:T(1024)} parameter(0)
  %begun = ((f32[1048576]{0}), f32[524288]{0:T(1024)S(1)}, s32[]{:S(2)}) async-start(%x), calls=%sliced
  %done = f32[524288]{0:T(1024)S(1)} async-done(%begun)
  ROOT %w = f32[1048576]{0:T(1024)S(1)} custom-call(%done, %done), custom_call_target="ConcatBitcast"
}
"""
    assert walked_on(text, "v6e-8").seconds == pytest.approx(main_memory_seconds(ROW / 2))
