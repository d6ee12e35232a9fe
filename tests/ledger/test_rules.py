"""Counts beside XLA's own cost analysis, which enters a loop once, and beside counts by hand."""

import itertools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from meshwright.errors import InputError
from meshwright.hlo import parse_program
from meshwright.ledger import MultiplyAdds, executed_flops, executions_of, register_call, work_of
from meshwright.ledger import _work_rules as _rules
from meshwright.ledger._work_rules import CLASSES, unpriced_work


def root_work(program):
    return work_of(program.entry, program.entry.root)


def test_a_dot_costs_two_per_multiply_add(module):
    program = module(
        "%a = bf16[3,5,7]{2,1,0} parameter(0)",
        "%b = bf16[3,7,11]{2,1,0} parameter(1)",
        "ROOT %d = bf16[3,5,11]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}",
    )
    work = root_work(program)
    assert (work.kind, work.flops, work.format) == ("matmul", 2 * 3 * 5 * 7 * 11, "bf16")


def test_a_multiply_add_of_complex_numbers_is_eight(module):
    numbers = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    program = module("%a = c64[4,4]{1,0} parameter(0)", f"ROOT %d = c64[4,4]{{1,0}} dot(%a, %a), {numbers}")
    assert root_work(program).flops == 8 * 4**3


def test_a_dot_over_two_dimensions_multiplies_both(module):
    program = module(
        "%a = f8e4m3fn[4,5,7]{2,1,0} parameter(0)",
        "ROOT %d = f32[7,7]{1,0} dot(%a, %a), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}",
    )
    assert (root_work(program).flops, root_work(program).format) == (2 * 7 * 7 * 20, "fp8-e4m3")


def test_an_outer_product_contracts_nothing(module):
    program = module(
        "%a = f64[4]{0} parameter(0)", "%b = f64[6]{0} parameter(1)", "ROOT %d = f64[4,6]{1,0} dot(%a, %b)"
    )
    assert (root_work(program).flops, root_work(program).format) == (2 * 24, "fp64")


@pytest.mark.parametrize("sides", [("f8e4m3fn", "f8e5m2"), ("f8e5m2", "f8e4m3fn")])
def test_a_dot_of_both_eight_bit_formats_is_the_gradients_whichever_side_it_is_on(module, sides):
    program = module(
        f"%a = {sides[0]}[4,5]{{1,0}} parameter(0)",
        f"%b = {sides[1]}[5,6]{{1,0}} parameter(1)",
        "ROOT %d = f32[4,6]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    assert root_work(program).format == "fp8-e5m2"


def test_a_ragged_dot_meets_each_row_with_one_group_only(module):
    program = module(
        "%a = bf16[96,16]{1,0} parameter(0)",
        "%b = bf16[8,16,32]{2,1,0} parameter(1)",
        "%s = s32[8]{0} parameter(2)",
        "ROOT %d = bf16[96,32]{1,0} ragged-dot(%a, %b, %s), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}",
    )
    assert root_work(program).flops == 2 * 96 * 16 * 32


def ragged_on_a_tpu(tiling):
    """96 rows of 8 groups, as libtpu 0.0.42 compiles them: the lists of tiles, then both factors."""
    says = f'{{mosaic_fusion_entry_point="true",ragged_dot_tiling="{tiling}"}}'
    return (
        "%n = s32[1]{0} parameter(0)",
        "%offsets = s32[9]{0} parameter(1)",
        "%tiles = s32[13]{0} parameter(2)",
        "%a = bf16[96,16]{1,0} parameter(3)",
        "%b = bf16[8,16,32]{2,1,0} parameter(4)",
        "ROOT %d = bf16[96,32]{1,0} custom-call(%n, %offsets, %tiles, %tiles, %n, %a, %b), "
        f'custom_call_target="tpu_custom_call", frontend_attributes={says}, '
        'metadata={op_name="ragged-dot-none"}, backend_config={"custom_call_config":{"body":"bW9k"}}',
    )


def test_a_ragged_dot_of_a_tpu_computes_whole_tiles(module):
    """Thirteen tiles of 16 rows, at most: six, and seven once more for the group that ends there."""
    work = root_work(module(*ragged_on_a_tpu("16,16,32")))
    assert (work.kind, work.format) == ("matmul", "bf16")
    assert work.flops == 2 * (13 * 16) * 16 * 32
    in_parts = root_work(module(*ragged_on_a_tpu("16,16,24")))
    assert in_parts.flops == 2 * (13 * 16) * 16 * (2 * 24)  # 32 columns are two tiles of 24


def test_the_gradient_of_a_ragged_dots_matrices_has_the_same_tiles(module):
    """As libtpu 0.0.50 compiles it; 0.0.42 multiplies each group by all rows, masked."""
    lines = list(ragged_on_a_tpu("16,16,32"))
    lines[4] = "%b = bf16[96,32]{1,0} parameter(4)"
    lines[5] = lines[5].replace("bf16[96,32]{1,0} custom-call", "bf16[8,16,32]{2,1,0} custom-call")
    assert root_work(module(*lines)).flops == 2 * (13 * 16) * 16 * 32


def test_the_lists_of_a_ragged_dots_tiles_are_no_unpriced_work(module):
    program = module(
        "%sizes = s32[8]{0} parameter(0)",
        "ROOT %m = (s32[9]{0}, s32[11]{0}) custom-call(%sizes), "
        'custom_call_target="tpu_custom_call", metadata={op_name="ragged-dot-metadata"}',
    )
    assert unpriced_work(program.entry, program.entry.root) is None


GEMM = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_a_cublas_call_costs_what_its_dot_did(module, target):
    program = module(
        "%a = f8e5m2[512,64]{1,0} parameter(0)",
        "%b = f8e4m3fn[512,32]{1,0} parameter(1)",
        f"ROOT %d = (bf16[64,32]{{1,0}}, s8[4096]{{0}}) custom-call(%a, %b), "
        f'custom_call_target="{target}", {GEMM}',
    )
    assert (root_work(program).flops, root_work(program).format) == (2 * 64 * 32 * 512, "fp8-e5m2")


def attention(module, target, mask):
    config = (
        f'backend_config={{"cudnn_fmha_backend_config":{{"mask_type":"{mask}",'
        '"intermediate_tensor_shape":{"dimensions":["2","8","128","256"]}}}'
    )
    return module(
        "%q = bf16[2,128,8,64]{3,2,1,0} parameter(0)",
        "%k = bf16[2,256,2,64]{3,2,1,0} parameter(1)",
        f"ROOT %o = (bf16[2,128,8,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), "
        f'custom_call_target="{target}", {config}',
    )


def test_attention_is_two_matmuls_forward_and_five_backward_of_which_one_repeats(module):
    one = 2 * 2 * 8 * 128 * 256 * 64
    forward = root_work(attention(module, "__cudnn$fmhaSoftmax", "NO_MASK"))
    assert (forward.kind, forward.flops, forward.recompute_flops) == ("attention", 2 * one, 0)
    backward = root_work(attention(module, "__cudnn$fmhaSoftmaxBackward", "NO_MASK"))
    assert (backward.flops, backward.recompute_flops) == (5 * one, one)


@pytest.mark.parametrize("mask", ["CAUSAL", "PADDING_CAUSAL"])
def test_causal_attention_counts_by_the_needed_half(module, mask):
    assert root_work(attention(module, "__cudnn$fmhaSoftmax", mask)).flops == 2 * 8 * 128 * 256 * 64 * 2


def multiply_adds(size, window, stride, low, high, base, dilation):
    """One dimension by brute force on an array: a one for each element, a nought for holes and padding."""
    holed = np.zeros((size - 1) * base + 1, int)
    holed[::base] = 1
    padded = np.pad(holed[max(0, -low) : len(holed) - max(0, -high)], (max(0, low), max(0, high)))
    reach = (window - 1) * dilation + 1
    starts = range(0, len(padded) - reach + 1, stride)
    return len(starts), sum(int(padded[s : s + reach : dilation].sum()) for s in starts)


@given(
    size=st.integers(1, 9),
    window=st.integers(1, 4),
    stride=st.integers(1, 3),
    pads=st.tuples(st.integers(-1, 3), st.integers(-1, 3)),
    base=st.integers(1, 3),
    dilation=st.integers(1, 3),
)
def test_a_convolution_counts_what_meets_neither_padding_nor_holes(
    module, size, window, stride, pads, base, dilation
):
    if size * base <= 3:  # nothing would be left to crop
        pads = (max(0, pads[0]), max(0, pads[1]))
    outputs, pairs = multiply_adds(size, window, stride, *pads, base, dilation)
    program = module(
        f"%x = f32[2,{size},5,6]{{3,2,1,0}} parameter(0)",
        f"%w = f32[{window},1,3,8]{{3,2,1,0}} parameter(1)",
        f"ROOT %y = f32[2,{outputs},5,8]{{3,2,1,0}} convolution(%x, %w), window={{size={window}x1 "
        f"stride={stride}x1 pad={pads[0]}_{pads[1]}x0_0 lhs_dilate={base}x1 rhs_dilate={dilation}x1}}, "
        "dim_labels=b01f_01io->b01f, feature_group_count=2",
    )
    assert root_work(program).flops == 2 * 2 * pairs * 5 * 3 * 8


def test_a_batch_group_meets_its_own_part_of_the_batch(module):
    program = module(
        "%x = f32[12,8]{1,0} parameter(0)",
        "%w = f32[8,6]{1,0} parameter(1)",
        "ROOT %y = f32[4,6]{1,0} convolution(%x, %w), dim_labels=bf_io->bf, batch_group_count=3",
    )
    assert root_work(program).flops == 2 * (12 // 3) * 8 * 6


def test_a_tpu_matmul_is_a_convolution_without_a_window(module):
    program = module(
        "%x = bf16[12,8]{1,0} parameter(0)",
        "%w = bf16[6,8]{1,0} parameter(1)",
        "ROOT %y = f32[12,6]{1,0} convolution(%x, %w), dim_labels=bf_oi->bf",
    )
    assert root_work(program).flops == 2 * 12 * 8 * 6


def strided(module, target, inputs, output):
    names = {"x": "f32[4,9,9,3]", "w": "f32[8,3,3,3]", "y": "f32[4,4,4,8]"}
    first, second = inputs
    return module(
        f"%a = {names[first]}{{3,2,1,0}} parameter(0)",
        f"%b = {names[second]}{{3,2,1,0}} parameter(1)",
        f"ROOT %c = ({names[output]}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), "
        f'window={{size=3x3 stride=2x2}}, dim_labels=b01f_o01i->b01f, custom_call_target="{target}"',
    )


def test_a_strided_convolution_and_its_two_gradients_count_alike(module):
    by_hand = 2 * 4 * (4 * 4) * (3 * 3) * 3 * 8
    for target, inputs, output in [
        ("__cudnn$convForward", "xw", "y"),
        ("__cudnn$convBiasActivationForward", "xw", "y"),
        ("__cudnn$convBackwardFilter", "xy", "w"),
        ("__cudnn$convBackwardInput", "yw", "x"),
    ]:
        assert root_work(strided(module, target, inputs, output)).flops == by_hand


def product(module, name, dtype="f32", user=""):
    return module(
        f"%a = {dtype}[5,7]{{1,0}} parameter(0)",
        f'%m = {dtype}[5,7]{{1,0}} multiply(%a, %a), metadata={{op_name="{name}"}}',
        f"%z = {dtype}[] constant(0)",
        f'ROOT %r = {dtype}[5]{{0}} reduce(%m, %z), dimensions={{1}}, metadata={{op_name="{user}"}}',
    )


@pytest.mark.parametrize(
    ("name", "dtype", "user", "flops"),
    [
        ("jit(f)/jvp()/dot_general", "f32", "", 70),  # a dot with a dimension of one
        ("jit(f)/jvp()/mul", "f32", "jit(f)/jvp()/dot_general", None),  # the program's own product
        ("multiply.3", "f32", "jit(f)/jvp()/dot_general", 70),  # a TPU names only the sum
        ("multiply.3", "f32", "jit(f)/jvp()/reduce_sum", None),
        ("jit(f)/jvp()/dot_general", "s32", "", None),  # offsets
    ],
)
def test_a_product_counts_where_it_was_a_dot(module, name, dtype, user, flops):
    program = product(module, name, dtype, user)
    work = work_of(program.entry, program.entry.by_name["m"])
    assert (work.flops if work else None) == flops


def test_a_product_of_tuples_is_nothing(module):
    program = module(
        "%a = (f32[2]{0}, f32[2]{0}) parameter(0)", "ROOT %m = (f32[2]{0}, f32[2]{0}) multiply(%a)"
    )
    assert root_work(program) is None


def test_what_could_multiply_and_has_no_rule_is_named_with_its_shapes(module):
    program = module(
        "%a = f32[5,7]{1,0} parameter(0)",
        'ROOT %c = (f32[5,5]{1,0}, s32[]) custom-call(%a, %a), custom_call_target="mystery", '
        'metadata={op_name="jit(f)/mystery"}',
    )
    assert root_work(program) is None
    text = unpriced_work(program.entry, program.entry.root)
    assert text == "mystery(f32[5,7], f32[5,7]) -> f32[5,5], s32[], from jit(f)/mystery"


def test_a_sort_is_named_and_an_addition_is_not(module):
    program = module(
        "%a = f32[5,5]{1,0} parameter(0)",
        "%b = f32[5,5]{1,0} add(%a, %a)",
        "ROOT %c = f32[5,5]{1,0} sort(%b)",
    )
    texts = [unpriced_work(program.entry, i) for i in program.entry.instructions]
    assert texts == [None, None, "sort(f32[5,5]) -> f32[5,5], from an unnamed operation"]


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        ("f32[2,30,30]{2,1,0} cholesky(%a)", 2 * 9_000),
        ("f32[2,30,30]{2,1,0} triangular-solve(%a, %a)", 2 * 27_000),
        ("c64[2,30,16]{2,1,0} fft(%a), fft_type=RFFT, fft_length={30}", int(2.5 * 60 * 30 * np.log2(30))),
        ('f32[2,30,30]{2,1,0} custom-call(%a, %a), custom_call_target="__cublas$triangularSolve"', 54_000),
        ('f32[2,30,30]{2,1,0} custom-call(%a), custom_call_target="__cusolver$cholesky"', 18_000),
        ('f32[2,30,30]{2,1,0} custom-call(%a), custom_call_target="lapack_dgetrf_ffi"', 2 * 18_000),
        (
            'f32[2,30]{1,0} custom-call(%a), custom_call_target="cusolver_geev_ffi", '
            "backend_config={left = false, right = false}",
            2 * 270_000,
        ),
    ],
)
def test_a_decomposition_and_a_transform_count_by_the_textbook(module, call, flops):
    program = module("%a = f32[2,30,30]{2,1,0} parameter(0)", f"ROOT %c = {call}")
    assert root_work(program).flops == flops
    assert unpriced_work(program.entry, program.entry.root) is None


def test_a_block_scaled_product_contracts_the_last_dimension_of_both(module):
    program = module(
        "%a = f8e4m3fn[3,16,64]{2,1,0} parameter(0)",
        "%b = f8e4m3fn[3,8,64]{2,1,0} parameter(1)",
        "%c = f8e8m0fnu[3,16,2]{2,1,0} parameter(2)",
        "%d = f8e8m0fnu[3,8,2]{2,1,0} parameter(3)",
        "ROOT %e = (f32[3,16,8]{2,1,0}, u8[0]{0}) custom-call(%a, %b, %c, %d), "
        'custom_call_target="__cudnn$blockScaledDot"',
    )
    work = root_work(program)
    assert (work.flops, work.format, work.kind) == (2 * 3 * 16 * 8 * 64, "fp8-e4m3", "matmul")
    assert unpriced_work(program.entry, program.entry.root) is None


@pytest.mark.parametrize("target", ["cusolver_cholesky_update_ffi", "lapack_snew_ffi", "my_potrf_ffi"])
def test_a_routine_without_a_formula_is_unpriced(module, target):
    program = module(
        "%a = f32[5,5]{1,0} parameter(0)",
        f'ROOT %c = f32[5,5]{{1,0}} custom-call(%a), custom_call_target="{target}"',
    )
    assert unpriced_work(program.entry, program.entry.root) is not None


@pytest.mark.parametrize("target", ["Sharding", "cu_threefry2x32", "__cublas$gemm", "__cudnn$fmhaSoftmax"])
def test_calls_that_have_a_rule_or_multiply_nothing_are_not_unpriced(module, target):
    program = module(
        "%a = f32[5]{0} parameter(0)", f'ROOT %c = f32[5]{{0}} custom-call(%a), custom_call_target="{target}"'
    )
    assert unpriced_work(program.entry, program.entry.root) is None


@pytest.mark.parametrize("target", ["TopK", "__gpu$TopK", "__cub$DeviceRadixSort"])
def test_sorting_calls_are_unpriced(module, target):
    program = module(
        "%a = f32[5]{0} parameter(0)", f'ROOT %c = f32[5]{{0}} custom-call(%a), custom_call_target="{target}"'
    )
    text = unpriced_work(program.entry, program.entry.root)
    assert text == f"{target}(f32[5]) -> f32[5], from an unnamed operation"


def test_every_kind_of_work_in_the_samples_is_known(samples):
    kinds = set(
        itertools.chain.from_iterable(
            {w.kind for c, i in samples.program(name).instructions() if (w := work_of(c, i))}
            for name in samples.names
        )
    )
    assert kinds == {"matmul", "attention", "convolution"}


@pytest.fixture
def without_rules(monkeypatch):
    monkeypatch.setattr(_rules, "_REGISTERED", {})


@pytest.fixture
def my_call(module, without_rules):
    return module(
        "%a = bf16[4,8]{1,0} parameter(0)",
        "%b = bf16[8,2]{1,0} parameter(1)",
        '%c = (bf16[4,2]{1,0}, u8[64]{0}) custom-call(%a, %b), custom_call_target="my_kernel_v2"',
        "ROOT %r = f32[] constant(0)",
    )


def matmul(call):
    (_, (rows, inner)), (_, (_, columns)) = call.operands
    assert call.results[0] == ("bf16", (rows, columns))
    return MultiplyAdds(kind="matmul", flops=2 * rows * inner * columns, format="bf16")


def test_a_call_without_a_rule_is_unpriced_and_with_one_counted(my_call):
    assert list(executed_flops(executions_of(my_call)).unpriced) == [
        "my_kernel_v2(bf16[4,8], bf16[8,2]) -> bf16[4,2], u8[64], from an unnamed operation"
    ]
    register_call("my_kernel", matmul)
    found = executed_flops(executions_of(my_call))
    assert (found.total, dict(found.by_format), dict(found.unpriced)) == (128, {"bf16": 128}, {})


def test_the_longest_beginning_decides(my_call):
    register_call("my_kernel", matmul)
    register_call("my_kernel_v2", lambda call: MultiplyAdds(kind="matmul", flops=7, format="bf16"))
    assert executed_flops(executions_of(my_call)).total == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("", matmul), "has no target"), (("k", 3), "the rule for 'k' is not a function: 3")],
)
def test_a_rule_needs_a_name_and_a_function(without_rules, arguments, words):
    with pytest.raises(InputError, match=words):
        register_call(*arguments)


ROWS, COLUMNS = 64, 128
WHOLE = ROWS * COLUMNS


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def counted(function, *arguments):
    """What the CPU's program executes by our count, and what XLA's cost analysis says of it."""
    with tempfile.TemporaryDirectory() as dump:
        options = {"xla_dump_to": dump, "xla_dump_hlo_pass_re": "NONE", "xla_dump_hlo_as_text": True}
        compiled = jax.jit(function).lower(*arguments).compile(compiler_options=options)
        text = next(Path(dump).glob("*after_optimizations.txt")).read_text()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    return executed_flops(executions_of(parse_program(text))), analysis


def root_mean_square(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def largest(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")


X = array(ROWS, COLUMNS)
PROGRAMS = {
    "softmax": (jax.nn.softmax, X),
    "gelu": (jax.nn.gelu, X),
    "norm": (root_mean_square, X),
    "pooling": (largest, X),
    "gradient of pooling": (jax.grad(lambda x: largest(x).sum()), X),
    "argmax": (lambda x: jnp.argmax(x, -1), X),
    "scatter": (lambda x, i, u: x.at[i].add(u), X, array(7, dtype=jnp.int32), array(7, COLUMNS)),
    "network": (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), array(32, 48), array(16, 32)),
    "casts": (lambda x: (x.astype(jnp.bfloat16) + 1).astype(jnp.float32), X),
}


@pytest.mark.program
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_classes_together_are_what_xlas_cost_analysis_says(name):
    executed, said = counted(*PROGRAMS[name])
    transcendental = executed.elementwise.pop("transcendental", 0)
    assert executed.total + executed.elementwise.total() == said["flops"]
    assert transcendental == said.get("transcendentals", 0)
    assert set(executed.elementwise) <= set(CLASSES)


@pytest.mark.program
def test_a_softmax_counts_as_by_hand():
    executed, _ = counted(jax.nn.softmax, X)
    # A maximum and a sum over each row; x - max, exp, division; the row's maximum once more beside -inf.
    assert executed.elementwise["reduction"] == 2 * ROWS * (COLUMNS - 1)
    assert executed.elementwise["transcendental"] == WHOLE
    assert executed.elementwise["arithmetic"] == 2 * WHOLE + ROWS
    assert executed.total == 0


@pytest.mark.program
def test_a_selection_is_a_comparison_and_its_result():
    executed, _ = counted(lambda x: jnp.where(x > 0, x, 2 * x), X)
    assert executed.elementwise == {"comparison": 2 * WHOLE, "arithmetic": WHOLE}


@pytest.mark.program
def test_integers_have_a_class_of_their_own():
    executed, _ = counted(lambda x: (x * 3) ^ 5, array(ROWS, dtype=jnp.int32))
    assert executed.elementwise == {"integer": 2 * ROWS}


@pytest.mark.program
def test_a_loop_counts_as_often_as_it_runs():
    def once(x, _):
        return jnp.tanh(x) * 2, None

    looped, said = counted(lambda x: lax.scan(once, x, None, length=10)[0], X)
    written_out, _ = counted(lambda x: lax.scan(once, x, None, length=10, unroll=10)[0], X)
    assert looped.elementwise["transcendental"] == 10 * WHOLE
    assert looped.elementwise["arithmetic"] == written_out.elementwise["arithmetic"] == 10 * WHOLE
    assert said["transcendentals"] <= looped.elementwise["transcendental"]


def test_elementwise_work_is_no_part_of_what_is_executed(samples):
    for name in samples.names:
        flops = samples.ledger(name).flops
        assert flops.executed == sum(flops.by_phase.values())
        assert sum(flops.elementwise_by_class.values()) > 0


@pytest.mark.parametrize("name", ["cruncher-8xH100", "cruncher-8xCPU"])
def test_crunchers_elementwise_work_is_its_loss_and_its_update(samples, name):
    rows, width = 4096, 1024
    parameters = 2 * width * width + width
    found = samples.ledger(name).flops.elementwise_by_class
    assert found["arithmetic"] >= 8 * 2 * parameters + 3 * rows  # p - 0.1 x g on every device; the error's
    assert found["arithmetic"] < 8 * 2 * parameters + 8 * rows  # square and its gradient
    assert "transcendental" not in found


def test_a_map_applies_its_computation_to_every_element(module):
    program = module(
        "%a = f32[8]{0} parameter(0)",
        "ROOT %m = f32[8]{0} map(%a), dimensions={0}, to_apply=%twice",
        before="""%twice (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] multiply(%x, %x)
  ROOT %z = f32[] add(%y, %x)
}
""",
    )
    assert executed_flops(executions_of(program)).elementwise == {"arithmetic": 16}


def test_a_reduction_that_a_tpu_broadcasts_again_is_formed_once(module):
    """XLA for TPUs writes sums over rows as windows that meet the whole row wherever they lie."""
    program = module(
        "%x = f32[3,16]{1,0} parameter(0)",
        "%z = f32[] constant(0)",
        "ROOT %w = f32[3,16]{1,0} reduce-window(%x, %z), window={size=1x31 pad=0_0x15_15}, to_apply=%sum",
        before="%sum (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
        "  ROOT %s = f32[] add(%a, %b)\n}",
    )
    assert executed_flops(executions_of(program)).elementwise["reduction"] == 3 * (16 - 1)
