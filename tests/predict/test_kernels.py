import dataclasses

import pytest

from meshwright.hardware import Fleet
from meshwright.predict._kernels import kernel_of
from meshwright.predict._machine import machine_of

ATTENTION = (
    'backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16",'
    '"dimensions":["2","32","4096","4096"]},"mask_type":"CAUSAL"}}'
)
GEMM = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}%s}}'
)


@pytest.fixture
def kernel(program_of):
    """The kernel of the entry's root on a fleet's device."""

    def make(text, fleet="8xH100", machine=None):
        program = program_of(text)
        machine = machine or machine_of(Fleet.parse(fleet), None)
        return kernel_of(machine, program, program.entry, program.entry.root)

    return make


def dot(dtype="bf16", attributes="", m=4096, n=4096, k=4096):
    return f"""
%main (a: {dtype}[{m},{k}], b: {dtype}[{k},{n}]) -> {dtype}[{m},{n}] {{
  %a = {dtype}[{m},{k}] parameter(0)
  %b = {dtype}[{k},{n}] parameter(1)
  ROOT %c = {dtype}[{m},{n}] dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{attributes}
}}"""


def call(target, config, shapes, results):
    names = [f"p{n}" for n in range(len(shapes))]
    lines = [f"  %{n} = {s} parameter({k})" for k, (n, s) in enumerate(zip(names, shapes, strict=True))]
    uses = ", ".join(f"%{n}" for n in names)
    return (
        f"\n%main ({', '.join(f'{n}: {s}' for n, s in zip(names, shapes, strict=True))}) -> {results} {{\n"
        + "\n".join(lines)
        + f'\n  ROOT %c = {results} custom-call({uses}), custom_call_target="{target}", {config}\n}}'
    )


def test_a_large_product_runs_near_what_h100s_are_known_to_reach(kernel):
    found = kernel(dot())
    # published bf16 runs sustain some 570 TFLOP/s, whatever isolated kernels reach
    assert found.kind == "matmul"
    assert 2 * 4096**3 / found.seconds == pytest.approx(570e12, rel=0.01)
    assert found.flops == {"bf16": 2 * 4096**3}


def test_the_product_inside_a_fusion_is_found(kernel):
    bare, fused = kernel(dot()), kernel(
        dot().replace("%main", "%inner")
        + """
%main (a: bf16[4096,4096], b: bf16[4096,4096]) -> bf16[4096,4096] {
  %a = bf16[4096,4096] parameter(0)
  %b = bf16[4096,4096] parameter(1)
  ROOT %c = bf16[4096,4096] fusion(%a, %b), kind=kCustom, calls=%inner
}"""
    )  # fmt: skip
    assert fused == bare


def test_a_cublas_call_costs_as_the_dot_it_replaces(kernel):
    shapes = ["bf16[4096,4096]", "bf16[4096,4096]"]
    found = kernel(call("__cublas$lt$matmul", GEMM % "", shapes, "(bf16[4096,4096], s8[4194304])"))
    assert found.flops == {"bf16": 2 * 4096**3}
    assert found.seconds == pytest.approx(kernel(dot()).seconds, rel=1e-6)


def test_a_batch_of_products_costs_as_one_with_as_many_tiles(kernel):
    batched = kernel(
        """
%main (a: bf16[16,1024,512], b: bf16[16,512,1024]) -> bf16[16,1024,1024] {
  %a = bf16[16,1024,512] parameter(0)
  %b = bf16[16,512,1024] parameter(1)
  ROOT %c = bf16[16,1024,1024] dot(%a, %b), lhs_batch_dims={0}, rhs_batch_dims={0}, DIMS
}""".replace("DIMS", "lhs_contracting_dims={2}, rhs_contracting_dims={1}")
    )
    assert batched.seconds == pytest.approx(kernel(dot(m=16 * 1024, n=1024, k=512)).seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("attributes", "format_name"),
    [
        ("", "tf32"),
        (", operand_precision={highest,highest}", "fp32"),
        (", algorithm=dot_tf32_tf32_f32", "tf32"),
        (", algorithm=dot_bf16_bf16_f32", "bf16"),
        (", algorithm=dot_f32_f32_f32", "fp32"),
    ],
)
def test_a_float32_product_runs_in_the_format_its_precision_asks_for(kernel, attributes, format_name):
    assert list(kernel(dot("f32", attributes)).flops) == [format_name]


def test_a_cublas_call_says_its_precision_in_its_configuration(kernel):
    shapes = ["f32[64,64]", "f32[64,64]"]
    highest = GEMM % ',"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}'
    assert list(kernel(call("__cublas$gemm", highest, shapes, "f32[64,64]")).flops) == ["fp32"]
    assert list(kernel(call("__cublas$gemm", GEMM % "", shapes, "f32[64,64]")).flops) == ["tf32"]


def test_a_product_in_a_format_without_a_peak_is_listed(kernel):
    found = kernel(dot("bf16"), fleet="8xT4")
    assert found.unpriced == ("matmul in bf16: T4 has no known peak for it",)
    assert found.kind == "memory-bound"


def test_flash_attention_backward_is_five_matmuls_at_a_lower_rate(kernel):
    qkv = ["bf16[2,4096,32,128]"] * 3
    forward = kernel(call("__cudnn$fmhaSoftmax", ATTENTION, qkv, "(bf16[2,32,4096,128], u8[0])"))
    backward = kernel(call("__cudnn$fmhaSoftmaxBackward", ATTENTION, qkv * 2, "(bf16[2,32,4096,128], u8[0])"))
    flops = 2 * (2 * 2 * 32 * 4096 * 4096 * 128) // 2
    assert forward.kind == backward.kind == "attention"
    assert forward.flops == {"bf16": flops}
    # the public table has 402 to 444 TFLOP/s in the middle half of its rows at this length
    assert 400e12 < flops / forward.seconds < 450e12
    assert backward.seconds / forward.seconds == pytest.approx(2.5 / 0.6, rel=0.03)


def test_a_convolution_costs_at_least_its_product(kernel):
    found = kernel("""
%main (x: bf16[64,56,56,256], w: bf16[3,3,256,256]) -> bf16[64,56,56,256] {
  %x = bf16[64,56,56,256] parameter(0)
  %w = bf16[3,3,256,256] parameter(1)
  ROOT %y = bf16[64,56,56,256] convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
}""")
    flops = found.flops["bf16"]
    assert found.kind == "convolution"
    assert flops == pytest.approx(2 * 64 * 56 * 56 * 256 * 256 * 9, rel=0.03)  # less what meets the padding
    assert 0.4 < flops / found.seconds / 989.4e12 < 0.58


def test_what_multiplies_elementwise_is_bound_by_memory(kernel):
    found = kernel("""
%main (a: f32[1048576], b: f32[1048576]) -> f32[1048576] {
  %a = f32[1048576] parameter(0)
  %b = f32[1048576] parameter(1)
  ROOT %c = f32[1048576] multiply(%a, %b), metadata={op_name="dot_general"}
}""")
    assert found.kind == "memory-bound"
    assert found.seconds == pytest.approx(3 * 4 * 2**20 / (0.85 * 3.35e12))


def test_a_copy_to_the_host_runs_over_the_host_link(kernel):
    text = """
%main (a: f32[1048576]) -> f32[1048576] {
  %a = f32[1048576]{0} parameter(0)
  ROOT %c = f32[1048576]{0:S(5)} copy(%a)
}"""
    found = kernel(text)
    link = Fleet.parse("8xH100").chip.host.bytes_per_second
    assert (found.kind, found.seconds) == ("host-transfer", pytest.approx(4 * 2**20 / link))


def test_one_layers_array_written_among_many_on_the_host_costs_its_own_bytes(kernel):
    found = kernel(
        """
%one (all: f32[32,1024], new: f32[1,1024], at: s32[]) -> f32[32,1024] {
  %all = f32[32,1024]{1,0:S(5)} parameter(0)
  %new = f32[1,1024]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %d = f32[32,1024]{1,0:S(5)} dynamic-update-slice(%all, %new, %at, %at)
}

ENTRY %main (all: f32[32,1024], new: f32[1,1024], at: s32[]) -> f32[32,1024] {
  %a = f32[32,1024]{1,0:S(5)} parameter(0)
  %n = f32[1,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %f = f32[32,1024]{1,0:S(5)} fusion(%a, %n, %i), kind=kCustom, calls=%one
}"""
    )
    link = Fleet.parse("8xH100").chip.host.bytes_per_second
    assert (found.kind, found.seconds) == ("host-transfer", pytest.approx(4 * 1024 / link))


def test_a_cpu_widens_what_was_not_measured(kernel, round_machine):
    assert kernel(dot("bf16"), machine=round_machine).flops == {"fp32": 2 * 4096**3}


def test_without_sms_the_roofline_alone_holds(kernel, round_machine):
    # 8 x 1 x 4096: 32768 multiply-adds on 4 bytes each are bound by 1e9 bytes/s
    found = kernel(dot("f32", m=8, n=1, k=4096), machine=round_machine)
    assert found.seconds == pytest.approx(4 * (8 * 4096 + 4096 + 8) / 1e9)
    faster = dataclasses.replace(round_machine, memory_bytes_per_second=1e15)
    assert kernel(dot("f32", m=8, n=1, k=4096), machine=faster).seconds == pytest.approx(65536 / 1e12)
