"""Fingerprints: equal for one program printed with a GPU at hand and without, and for no other."""

import re
from typing import Any

import jax
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import triton

from meshwright.compiler import fingerprint_of
from meshwright.worker import devices_of_kind

# Excerpts of one step as XLA printed it for an H200 (jax 0.11), without a GPU and with it.
WITHOUT = """HloModule jit_step, is_scheduled=true

%region_0.2 (reduce_sum.3: f32[], reduce_sum.4: f32[]) -> f32[] {
  %reduce_sum.3 = f32[] parameter(0)
  %reduce_sum.4 = f32[] parameter(1)
  ROOT %reduce_sum.5.0 = f32[] add(%reduce_sum.3, %reduce_sum.4)
}

%fused_subtract (param_0: f32[8,4], param_1: f32[8,4]) -> f32[8,4] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = f32[8,4]{1,0} parameter(1)
  ROOT %sub.1 = f32[8,4]{1,0} subtract(%param_0, %param_1)
}

%fused_reduce (param_0.1: f32[8,4]) -> f32[8] {
  %param_0.1 = f32[8,4]{1,0} parameter(0)
  %constant.1 = f32[] constant(0)
  ROOT %reduce.1 = f32[8]{0} reduce(%param_0.1, %constant.1), dimensions={1}, to_apply=%region_0.2
}

ENTRY %main (x: f32[8,4], y: f32[4,4]) -> (f32[8,4], f32[8]) {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[4,4]{1,0} parameter(1)
  %gemm.1 = (f32[8,4]{1,0}, s8[4194304]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", \
backend_config={"operation_queue_id":"0","gemm_backend_config":{"selected_algorithm":"0","alpha_real":1,\
"beta":0},"force_earliest_schedule":false,"device_type":"DEVICE_TYPE_INVALID"}
  %product = f32[8,4]{1,0} get-tuple-element(%gemm.1), index=0
  %difference = f32[8,4]{1,0} fusion(%x, %product), kind=kLoop, calls=%fused_subtract
  %sums = f32[8]{0} fusion(%x), kind=kInput, calls=%fused_reduce
  ROOT %tuple.1 = (f32[8,4]{1,0}, f32[8]{0}) tuple(%difference, %sums)
}
"""
WITH = """HloModule jit_step, is_scheduled=true

%fused_reduce.7 (param_0.9: f32[8,4]) -> f32[8] {
  %param_0.9 = f32[8,4]{1,0} parameter(0)
  %constant.3 = f32[] constant(0)
  ROOT %reduce.9 = f32[8]{0} reduce(%param_0.9, %constant.3), dimensions={1}, to_apply=%region_0.2.clone
}

%fused_subtract.1 (param_1.4: f32[8,4], param_0.2: f32[8,4]) -> f32[8,4] {
  %param_0.2 = f32[8,4]{1,0} parameter(1)
  %param_1.4 = f32[8,4]{1,0} parameter(0)
  ROOT %sub.3 = f32[8,4]{1,0} subtract(%param_0.2, %param_1.4)
}

ENTRY %main (x: f32[8,4], y: f32[4,4]) -> (f32[8,4], f32[8]) {
  %x.1 = f32[8,4]{1,0} parameter(0)
  %y.1 = f32[4,4]{1,0} parameter(1)
  %sums.1 = f32[8]{0} fusion(%x.1), kind=kInput, calls=%fused_reduce.7
  %gemm.2 = (f32[8,4]{1,0}, s8[33554432]{0}) custom-call(%x.1, %y.1), \
custom_call_target="__cublas$lt$matmul", backend_config={"device_type":"DEVICE_TYPE_INVALID",\
"gemm_backend_config":{"alpha_real":1.0,"autotune_workspace_size":"33554432","beta":0,\
"selected_algorithm":"6"},"operation_queue_id":"0"}
  %product.1 = f32[8,4]{1,0} get-tuple-element(%gemm.2), index=0
  %difference.1 = f32[8,4]{1,0} fusion(%product.1, %x.1), kind=kLoop, calls=%fused_subtract.1
  ROOT %tuple.3 = (f32[8,4]{1,0}, f32[8]{0}) tuple(%difference.1, %sums.1)
}
"""
SUM = """
%region_0.2.clone (reduce_sum.0: f32[], reduce_sum.1: f32[]) -> f32[] {
  %reduce_sum.1 = f32[] parameter(1)
  %reduce_sum.0 = f32[] parameter(0)
  ROOT %reduce_sum.2.0 = f32[] add(%reduce_sum.1, %reduce_sum.0)
}
"""
WITH = WITH.replace("\n\n%fused_reduce.7", f"\n{SUM}\n%fused_reduce.7")


def test_a_program_compiled_with_the_gpu_is_the_one_compiled_without():
    assert fingerprint_of(WITH) == fingerprint_of(WITHOUT)


@pytest.mark.parametrize(
    ("original", "other"),
    [
        ("subtract(%param_0.2, %param_1.4)", "subtract(%param_1.4, %param_0.2)"),
        ("fusion(%product.1, %x.1)", "fusion(%x.1, %product.1)"),
        ("add(%reduce_sum.1", "multiply(%reduce_sum.1"),
        ("constant(0)", "constant(1)"),
        ("add(%reduce_sum.1, %reduce_sum.0)", "add(%reduce_sum.1, %reduce_sum.1)"),
        ("dimensions={1}", "dimensions={0}"),
        ('"alpha_real":1.0', '"alpha_real":2.0'),
        ("custom-call(%x.1, %y.1)", "custom-call(%y.1, %x.1)"),
        ("tuple(%difference.1, %sums.1)", "tuple(%sums.1, %difference.1)"),
        ("kind=kLoop", "kind=kCustom"),
        ("is_scheduled=true", "is_scheduled=true, num_partitions=8"),
        ("__cublas$lt$matmul", "__cublas$gemm"),
    ],
)
def test_a_program_that_computes_something_else_has_another_fingerprint(original, other):
    assert original in WITH
    assert fingerprint_of(WITH.replace(original, other)) != fingerprint_of(WITH)


def test_a_body_that_is_not_printed_has_no_part_in_it():
    """Libtpu leaves out the bodies of a v7x's asynchronous calls, whose numbers differ between prints."""
    call = "ENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2] parameter(0)\n"
    call += "  ROOT %y = f32[2] async-start(%x), calls=%async_computation.8\n}"
    assert fingerprint_of(call) == fingerprint_of(call.replace(".8", ".9"))
    assert fingerprint_of(call) != fingerprint_of(call.replace("async-start", "async-update"))


def test_a_number_that_is_added_counts():
    """A fusion of a counter has as many lines as the sum of a reduction."""
    counter = """HloModule a

%fused_add (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %c = s32[] constant(1)
  ROOT %add = s32[] add(%p, %c)
}

ENTRY %main (x: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  ROOT %next = s32[] fusion(%x), kind=kLoop, calls=%fused_add
}
"""
    assert fingerprint_of(counter) != fingerprint_of(counter.replace("constant(1)", "constant(2)"))


def test_the_configuration_of_a_foreign_call_counts_though_it_is_no_json():
    calls = [WITH.replace("__cublas$lt$matmul", "f", 1) for _ in range(2)]
    config = re.search(r"backend_config=(\{.*\})", WITH)[1]
    ours, theirs = (call.replace(config, f"{{uplo = {n} : ui8}}") for n, call in enumerate(calls))
    assert fingerprint_of(ours) == fingerprint_of(ours.replace("difference", "d"))
    assert fingerprint_of(ours) != fingerprint_of(theirs)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("added", "is_same"), [(1, True), (2, False)])
def test_where_a_kernel_of_pallas_was_written_does_not_count(added: int, is_same: bool):
    one, other = kernel("one/kernel.py", lines=0, added=1), kernel("another/kernel.py", lines=7, added=added)
    assert one != other
    assert (fingerprint_of(CALL.format(one)) == fingerprint_of(CALL.format(other))) is is_same


def test_code_of_a_kernel_that_cannot_be_read_counts_as_it_is():
    broken = [CALL.format(rf'ir = "ML\EFR\{number}"') for number in ("00", "01")]
    assert fingerprint_of(broken[0]) != fingerprint_of(broken[1])


CALL = """HloModule jit_step

ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %sum = f32[16]{{0}} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", backend_config={{{}}}
}}
"""


def kernel(file: str, lines: int, added: int) -> str:
    """Return Triton's code of a kernel below so many empty lines of a file, as a program has it."""
    source = "\n" * lines + f"def body(x, y):\n    y[...] = x[...] + {added}\n"
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    vector = jax.ShapeDtypeStruct((16,), "float32")
    step = pallas.pallas_call(names["body"], out_shape=vector, compiler_params=triton.CompilerParams())
    with devices_of_kind("NVIDIA H100 80GB HBM3", "cuda"):
        text = jax.jit(step).trace(vector).lower(lowering_platforms=("cuda",)).as_text()
    return re.search(r'ir = "(?:[^"\\]|\\.)*"', text)[0]
