import dataclasses

import pytest

from meshwright.compiler import NamedKernel
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.hlo import parse_program
from meshwright.ledger import Message, mark_kernels
from meshwright.predict import bytes_by_memory, kernel_of, machine_of, transfer_of

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
    # such cards sustain 664 TFLOP/s one product behind another, and the slowest of a fleet 4 % less
    assert found.kind == "matmul"
    assert 2 * 4096**3 / found.seconds == pytest.approx(637.44e12, rel=0.01)
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


def batched(batch, m, n, k, dtype="bf16"):
    return f"""
%main (a: {dtype}[{batch},{m},{k}], b: {dtype}[{batch},{k},{n}]) -> {dtype}[{batch},{m},{n}] {{
  %a = {dtype}[{batch},{m},{k}] parameter(0)
  %b = {dtype}[{batch},{k},{n}] parameter(1)
  ROOT %c = {dtype}[{batch},{m},{n}] dot(%a, %b), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, DIMS
}}""".replace("DIMS", "lhs_contracting_dims={2}, rhs_contracting_dims={1}")


@pytest.mark.parametrize(("fleet", "k"), [("8xH100", 1024), ("8xGB200", 512)])
def test_a_batch_of_products_costs_as_one_with_as_many_tiles(kernel, fleet, k):
    found = kernel(batched(16, 1024, 1024, k), fleet).seconds
    assert found == pytest.approx(kernel(dot(m=16 * 1024, n=1024, k=k), fleet).seconds, rel=1e-6)


def test_narrow_buffers_of_many_experts_reach_less_where_that_was_measured(kernel):
    """A card multiplied 128 experts of 2048 x 768 at 0.80 of what it sustains; all of it was the price."""
    found = kernel(batched(128, 512, 768, 2048)).seconds
    sustained = machine_of(Fleet.parse("8xH100"), None).sustained_flops_per_second("bf16")
    assert 2 * 128 * 512 * 768 * 2048 / found / sustained == pytest.approx(0.82, abs=0.005)


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
    # record 2026-11-27_gpu_kernels: cuDNN on an H100, heads of 128, 4,096 positions
    assert flops / forward.seconds == pytest.approx(542e12)
    assert 2.5 * flops / backward.seconds == pytest.approx(424e12)


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
    assert 0.4 < flops / found.seconds / 989.4e12 < 0.67


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


HOST_AND_DEVICE = """
%one (m: f32[SIZE], v: f32[SIZE], p: f32[LARGE]) -> (f32[SIZE], f32[LARGE]) {
  %m = f32[SIZE]{0:S(5)} parameter(0)
  %v = f32[SIZE]{0:S(5)} parameter(1)
  %p = f32[LARGE]{0} parameter(2)
  %s = f32[SIZE]{0} add(%m, %v)
  %q = f32[LARGE]{0} negate(%p)
  ROOT %t = (f32[SIZE]{0}, f32[LARGE]{0}) tuple(%s, %q)
}

ENTRY %main (m: f32[SIZE], v: f32[SIZE], p: f32[LARGE]) -> (f32[SIZE], f32[LARGE]) {
  %a = f32[SIZE]{0:S(5)} parameter(0)
  %b = f32[SIZE]{0:S(5)} parameter(1)
  %c = f32[LARGE]{0} parameter(2)
  ROOT %f = (f32[SIZE]{0}, f32[LARGE]{0}) fusion(%a, %b, %c), kind=kLoop, calls=%one
}"""


@pytest.mark.parametrize(("size", "large", "kind"), [(2**20, 4, "host"), (1024, 2**24, "device")])
def test_a_fusion_that_reads_the_hosts_memory_is_bound_by_the_slower_memory(kernel, size, large, kind):
    """An update that reads both moments where they lie takes the bytes of both, not those of one."""
    found = kernel(HOST_AND_DEVICE.replace("SIZE", str(size)).replace("LARGE", str(large)))
    link = Fleet.parse("8xH100").chip.host.bytes_per_second
    if kind == "host":
        assert (found.kind, found.seconds) == ("host-transfer", pytest.approx(2 * 4 * size / link))
    else:
        moved = 4 * (size + 2 * large)
        assert (found.kind, found.seconds) == ("memory-bound", pytest.approx(moved / (0.85 * 3.35e12)))


def test_a_cpu_widens_what_was_not_measured(kernel, round_machine):
    assert kernel(dot("bf16"), machine=round_machine).flops == {"fp32": 2 * 4096**3}


def test_without_sms_the_roofline_alone_holds(kernel, round_machine):
    # 8 x 1 x 4096: 32768 multiply-adds on 4 bytes each are bound by 1e9 bytes/s
    found = kernel(dot("f32", m=8, n=1, k=4096), machine=round_machine)
    assert found.seconds == pytest.approx(4 * (8 * 4096 + 4096 + 8) / 1e9)
    faster = dataclasses.replace(round_machine, memory_bytes_per_second=1e15)
    assert kernel(dot("f32", m=8, n=1, k=4096), machine=faster).seconds == pytest.approx(65536 / 1e12)


STACK = 32 * 1024 * 4  # f32[32,1024]
ROW = 1024 * 4


@pytest.fixture
def moved(program_of):
    """Bytes that the entry's root moves."""

    def make(text):
        program = program_of(text)
        return bytes_by_memory(program, program.entry, program.entry.root).total()

    return make


def test_a_fusion_that_slices_a_stack_reads_one_slice(moved):
    assert moved("""
%f (p: f32[32,1024], i: s32[]) -> f32[1,1024] {
  %p = f32[32,1024] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %view = f32[32,1024] bitcast(%p)
  %slice = f32[1,1024] dynamic-slice(%view, %i, %zero), dynamic_slice_sizes={1,1024}
  ROOT %twice = f32[1,1024] add(%slice, %slice)
}
%main (x: f32[32,1024], i: s32[]) -> f32[1,1024] {
  %x = f32[32,1024] parameter(0)
  %i = s32[] parameter(1)
  ROOT %y = f32[1,1024] fusion(%x, %i), kind=kLoop, calls=%f
}""") == pytest.approx(2 * ROW, abs=4)


def test_a_fusion_that_updates_a_slice_in_place_writes_one(moved):
    assert moved("""
%f (p: f32[32,1024], new: f32[1,1024], i: s32[]) -> f32[32,1024] {
  %p = f32[32,1024] parameter(0)
  %new = f32[1,1024] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %set = f32[32,1024] dynamic-update-slice(%p, %new, %i, %zero)
  ROOT %view = f32[32,1024] bitcast(%set)
}
%main (x: f32[32,1024], new: f32[1,1024], i: s32[]) -> f32[32,1024] {
  %x = f32[32,1024] parameter(0)
  %new = f32[1,1024] parameter(1)
  %i = s32[] parameter(2)
  ROOT %y = f32[32,1024] fusion(%x, %new, %i), kind=kLoop, calls=%f
}""") == pytest.approx(2 * ROW, abs=4)


def test_an_elementwise_fusion_of_two_results_reads_once_and_writes_twice(moved):
    assert (
        moved("""
%f (p: f32[32,1024]) -> (f32[32,1024], f32[32,1024]) {
  %p = f32[32,1024] parameter(0)
  %a = f32[32,1024] add(%p, %p)
  %b = f32[32,1024] multiply(%p, %a)
  ROOT %t = (f32[32,1024], f32[32,1024]) tuple(%a, %b)
}
%main (x: f32[32,1024]) -> (f32[32,1024], f32[32,1024]) {
  %x = f32[32,1024] parameter(0)
  ROOT %y = (f32[32,1024], f32[32,1024]) fusion(%x), kind=kLoop, calls=%f
}""")
        == 3 * STACK
    )


def test_what_a_fusion_hands_through_is_not_written(moved):
    assert (
        moved("""
%f (p: f32[32,1024], q: f32[1,1024]) -> (f32[32,1024], f32[1,1024]) {
  %p = f32[32,1024] parameter(0)
  %q = f32[1,1024] parameter(1)
  %a = f32[1,1024] negate(%q)
  ROOT %t = (f32[32,1024], f32[1,1024]) tuple(%p, %a)
}
%main (x: f32[32,1024], q: f32[1,1024]) -> (f32[32,1024], f32[1,1024]) {
  %x = f32[32,1024] parameter(0)
  %q = f32[1,1024] parameter(1)
  ROOT %y = (f32[32,1024], f32[1,1024]) fusion(%x, %q), kind=kLoop, calls=%f
}""")
        == 2 * ROW
    )


def test_a_fusion_within_a_fusion_is_seen_through(moved):
    assert moved("""
%inner (p: f32[32,1024], i: s32[]) -> f32[1,1024] {
  %p = f32[32,1024] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,1024] dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,1024}
}
%f (p: f32[32,1024], i: s32[]) -> f32[1,1024] {
  %p = f32[32,1024] parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,1024] fusion(%p, %i), kind=kLoop, calls=%inner
}
%main (x: f32[32,1024], i: s32[]) -> f32[1,1024] {
  %x = f32[32,1024] parameter(0)
  %i = s32[] parameter(1)
  ROOT %y = f32[1,1024] fusion(%x, %i), kind=kCustom, calls=%f
}""") == pytest.approx(2 * ROW, abs=4)


@pytest.mark.parametrize(
    ("instruction", "num_bytes"),
    [
        ("copy(%x)", 2 * STACK),
        ("add(%x, %x)", 3 * STACK),
        ("broadcast(%s), dimensions={}", STACK),
        ("dynamic-update-slice(%x, %r, %i, %i)", 2 * ROW),
        ("scatter(%x, %i, %r), to_apply=%sum", 2 * ROW),
    ],
)
def test_an_instruction_alone_moves_its_operands_and_result(moved, instruction, num_bytes):
    assert (
        moved(f"""
%main (x: f32[32,1024], r: f32[1,1024], i: s32[], s: f32[]) -> f32[32,1024] {{
  %x = f32[32,1024] parameter(0)
  %r = f32[1,1024] parameter(1)
  %i = s32[] parameter(2)
  %s = f32[] parameter(3)
  ROOT %y = f32[32,1024] {instruction}
}}""")
        == num_bytes
    )


def test_a_gather_reads_the_rows_it_takes(moved):
    assert (
        moved("""
%main (x: f32[32,1024], i: s32[1]) -> f32[1,1024] {
  %x = f32[32,1024] parameter(0)
  %i = s32[1] parameter(1)
  ROOT %y = f32[1,1024] gather(%x, %i), offset_dims={1}
}""")
        == 2 * ROW
    )


def test_a_scatter_in_a_fusion_touches_what_it_changes(moved):
    text = """
%f (p: f32[32,1024], i: s32[1], r: f32[1,1024]) -> f32[32,1024] {
  %p = f32[32,1024] parameter(0)
  %i = s32[1] parameter(1)
  %r = f32[1,1024] parameter(2)
  ROOT %s = f32[32,1024] scatter(%p, %i, %r), to_apply=%sum
}
%main (x: f32[32,1024], i: s32[1], r: f32[1,1024]) -> f32[32,1024] {
  %x = f32[32,1024] parameter(0)
  %i = s32[1] parameter(1)
  %r = f32[1,1024] parameter(2)
  ROOT %y = f32[32,1024] fusion(%x, %i, %r), kind=kInput, calls=%f
}"""
    assert moved(text) == pytest.approx(3 * ROW, abs=4)  # reads the row and what is added, writes the row


def test_a_compacted_operand_is_one_leaf_of_its_tuple():
    # jax 0.12 writes %pair#1 for get-tuple-element(%pair), index=1
    text = """HloModule m, is_scheduled=true

ENTRY %main (pair: (f32[1024,1024], f32[4])) -> f32[4] {
  %pair = (f32[1024,1024]{1,0}, f32[4]{0}) parameter(0)
  ROOT %copy = f32[4]{0} copy(%pair#1)
}
"""
    program = parse_program(text)
    assert bytes_by_memory(program, program.entry, program.entry.root).total() == 4 * 4 + 4 * 4


GB = 10**9


def gather(groups, size, kind="all-gather", payload=GB, axes=("data",)):
    times = {"all-reduce": 2}.get(kind, 1)
    wire = payload if kind == "collective-permute" else times * payload * (size - 1) // size
    return Message(
        kind=kind, axes=axes, group_size=size, payload_bytes=payload, wire_bytes=wire, groups=groups
    )


def on(fleet):
    fleet = Fleet.parse(fleet)
    return machine_of(fleet, None), fleet.num_devices


def seconds(fleet, message):
    machine, num_devices = on(fleet)
    return transfer_of(machine, message, num_devices).seconds


def test_a_gather_in_a_host_runs_at_the_measured_bus_bandwidth():
    found = transfer_of(on("16xH100")[0], gather("[2,8]<=[16]", 8), 16)
    assert (found.name, found.link) == ("all-gather[data]", "inside")
    # the public table: 335 GB/s at 512 MiB, rising
    assert 0.875 * GB / found.seconds == pytest.approx(345e9, rel=0.05)


def test_a_group_of_one_device_per_host_has_each_network_link_to_itself():
    # devices 0 and 8: one per host, so half of the array over 50 GB/s at 0.85
    found = transfer_of(on("16xH100")[0], gather("[8,2]<=[2,8]T(1,0)", 2), 16)
    assert found.link == "between"
    assert found.seconds == pytest.approx(GB / 2 / 42.5e9, rel=0.01)


def test_a_group_over_whole_hosts_uses_all_their_links():
    # rings of sixteen, one for each of a host's eight links
    found = transfer_of(on("16xA100-80GB")[0], gather("{}", 16), 16)
    assert found.link == "between"
    assert found.seconds == pytest.approx(15 / 16 * GB / 8 / (0.85 * 25e9), rel=0.01)


def test_an_all_reduce_over_more_than_two_hosts_runs_in_rings():
    found = transfer_of(on("32xA100-80GB")[0], gather("{}", 32, kind="all-reduce"), 32)
    assert found.seconds == pytest.approx(2 * 31 / 32 * GB / 8 / (0.85 * 25e9), rel=0.01)


def test_an_all_reduce_between_two_hosts_runs_in_trees_that_send_the_array_once():
    slow = dataclasses.replace(on("16xA100-80GB")[0], between_bytes_per_second=5e9)
    found = transfer_of(slow, gather("{}", 16, kind="all-reduce"), 16)
    assert found.seconds == pytest.approx(GB / 8 / (0.85 * 5e9), rel=0.01)


def test_a_rack_is_one_domain_though_it_has_many_hosts():
    assert transfer_of(on("72xGB200")[0], gather("{}", 72), 72).link == "inside"
    assert transfer_of(on("144xGB200")[0], gather("{}", 144), 144).link == "between"


def test_an_all_to_all_sends_the_other_domains_part_over_the_network():
    assert seconds("16xH100", gather("{}", 16, "all-to-all")) == pytest.approx(GB / 2 / 42.5e9, rel=0.01)


def test_one_crossing_pair_makes_a_permute_cross():
    inside = gather("{{0,1},{1,0}}", 2, "collective-permute")
    crossing = gather("{{0,1},{7,8}}", 2, "collective-permute")
    assert seconds("16xH100", crossing) == pytest.approx(GB / 42.5e9, rel=0.01)
    assert seconds("16xH100", inside) < seconds("16xH100", crossing)


def test_a_message_over_no_block_of_the_mesh_is_named_by_its_size():
    found = transfer_of(on("16xH100")[0], gather("{{0,1,2,5}}", 4, axes=None), 16)
    assert found.name == "all-gather[groups of 4]"


@pytest.mark.parametrize("fleet", ["16xH100", "8xH100", "v5e-8", "2xv5e-4"])
def test_a_ragged_exchange_takes_the_time_of_one_of_equal_parts(fleet):
    machine, num_devices = on(fleet)
    groups = f"[1,{num_devices}]<=[{num_devices}]"
    seconds = [
        transfer_of(machine, gather(groups, num_devices, kind), num_devices).seconds
        for kind in ("ragged-all-to-all", "all-to-all")
    ]
    assert seconds[0] == seconds[1] > 0


@pytest.mark.parametrize(
    "kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
)
@pytest.mark.parametrize("groups", ["[2,8]<=[16]", "[8,2]<=[2,8]T(1,0)", "[1,16]<=[16]"])
def test_half_the_bandwidth_is_slower_by_at_most_two(kind, groups):
    machine, num_devices = on("16xH100")
    if kind == "collective-permute":
        groups = "{{0,1}}" if groups == "[2,8]<=[16]" else "{{0,8}}"
    message = gather(groups, 8, kind)
    half = dataclasses.replace(
        machine,
        inside_bytes_per_second=machine.inside_bytes_per_second / 2,
        between_bytes_per_second=machine.between_bytes_per_second / 2,
    )
    whole_seconds = transfer_of(machine, message, num_devices).seconds
    assert whole_seconds < transfer_of(half, message, num_devices).seconds <= 2 * whole_seconds


@pytest.mark.parametrize(
    ("kind", "groups", "size", "rate"),
    [
        ("all-gather", "[8,2]<=[16]", 2, 25e9),
        ("all-reduce", "[4,4]<=[16]", 4, 100e9),
        ("reduce-scatter", "[2,8]<=[16]", 8, 150e9),
        ("all-gather", "{{0,1,8,9},{2,3,10,11},{4,5,12,13},{6,7,14,15}}", 4, 25e9),  # pairs in two hosts
        ("collective-permute", "{{0,1},{1,2},{2,3},{3,0}}", 4, 25e9),
    ],
)
def test_a_message_takes_the_link_of_its_members_in_one_host(kind, groups, size, rate):
    machine, num_devices = on("16xV100")
    machine = dataclasses.replace(machine, between_bytes_per_second=1e15)
    alike = dataclasses.replace(machine, inside_by_group={}, inside_bytes_per_second=rate)
    message = gather(groups, size, kind)
    found = transfer_of(machine, message, num_devices).seconds
    assert found == pytest.approx(transfer_of(alike, message, num_devices).seconds)
    assert found > 0.9 * message.wire_bytes / rate


@pytest.mark.parametrize(
    ("groups", "size", "links"), [("[4,2]<=[8]", 2, 1), ("[2,4]<=[8]", 4, 4), ("{}", 8, 6)]
)
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_rings_over_single_links_reach_about_what_nccl_takes_for_one(kind, groups, size, links):
    message = gather(groups, size, kind)
    # NCCL's src/graph/topo.h: 20 GB/s for an NVLink of Volta, of the 25 of its wire
    assert message.wire_bytes / seconds("8xV100", message) == pytest.approx(links * 20e9, rel=0.15)


@pytest.mark.parametrize(
    ("field", "groups", "where"),
    [
        ("inside_bytes_per_second", "[2,8]<=[16]", "inside a domain"),
        ("between_bytes_per_second", "{}", "between domains"),
    ],
)
def test_a_link_without_a_figure_is_refused(field, groups, where):
    machine, num_devices = on("16xH100")
    unknown = dataclasses.replace(machine, **{field: None})
    with pytest.raises(InputError, match=f"no figure for the link {where} of H100") as caught:
        transfer_of(unknown, gather(groups, 8), num_devices)
    assert "one fast domain" in caught.value.hint


ROWS, INPUTS, OUTPUTS = 65_536, 4096, 14_336  # of Mixtral's eight experts
PRODUCT_OF_EXPERTS = ("bf16[65536,4096]", "bf16[65536,14336]")
GATHERED, STORED = (
    "[4096,8,14336]",
    "[8,4096,14336]",
)  # as a gather over `fsdp` leaves matrices, and as they rest


def seconds_of_experts(program_of, name, shapes, result, fleet="8xH100"):
    """The seconds of one of our kernels of grouped products."""
    program = program_of(call("kernel", "metadata={}", ["s32[520]", *shapes], result))
    root = program.entry.root
    operands = tuple((a.dtype, a.dims) for a in program.entry.operand_arrays(root))
    results = tuple((a.dtype, a.dims) for a in root.arrays)
    facts = {"recompute_flops": 0, "kind": "matmul", "format": "bf16", "source": "its cost_estimate"}
    flops = 2 * ROWS * INPUTS * OUTPUTS
    mark_kernels(program, [NamedKernel(name=name, operands=operands, results=results, flops=flops, **facts)])
    return kernel_of(machine_of(Fleet.parse(fleet), None), program, program.entry, root)


def test_experts_are_wide_by_their_matrices_however_these_lie(program_of):
    x, y = PRODUCT_OF_EXPERTS
    for name, of, result in (("experts_by_matrix", x, y), ("experts_by_transpose", y, x)):
        gathered, stored = (
            seconds_of_experts(program_of, name, [of, f"bf16{m}"], result) for m in (GATHERED, STORED)
        )
        assert gathered.seconds == stored.seconds
        assert not gathered.unpriced
    gathered, stored = (
        seconds_of_experts(program_of, "experts_of_matrices", [x, y], f"f32{m}") for m in (GATHERED, STORED)
    )
    assert gathered.seconds == stored.seconds
    # 0.80 of the 637 TFLOP/s that products of a fleet's H100 sustain
    by_matrix = seconds_of_experts(program_of, "experts_by_matrix", [x, f"bf16{STORED}"], y)
    assert 2 * ROWS * INPUTS * OUTPUTS / by_matrix.seconds == pytest.approx(0.80 * 637.44e12, rel=0.01)


def test_experts_on_a_chip_that_measured_none_have_no_upper_end(program_of):
    x, y = PRODUCT_OF_EXPERTS
    found = seconds_of_experts(program_of, "experts_by_matrix", [x, f"bf16{STORED}"], y, "8xB200")
    assert "no rate of it is known on B200 in bf16" in found.unpriced[0]
