"""Counts by hand of the programs in `fixtures/programs.py`, and small modules."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from meshwright.ledger import (
    Unnamed,
    executed_flops,
    executions_of,
    first_runs,
    homes_of,
    instruction_work,
    shared_out,
    work_of,
)

# fixtures/programs.py: layers, batch, sequence, embed, mlp, vocabulary
L, B, S, E, M, V = 4, 16, 256, 512, 1024, 2048
WEIGHTS = 4 * E * E + 2 * E * M
SCORES = 2 * B * S * S * E  # one of attention's matmuls, over all heads
HEAD = 2 * B * S * E * V


@pytest.mark.parametrize("name", ["cruncher-8xH100", "cruncher-8xCPU"])
def test_cruncher_is_2bp_forward_and_4bp_backward_less_the_input_gradient(samples, name):
    batch, width = 4096, 1024
    parameters = 2 * width * width + width
    by_phase = executed_flops(executions_of(samples.program(name))).by_phase
    assert 8 * by_phase["forward"] == 2 * batch * parameters
    assert 8 * by_phase["backward"] == 4 * batch * parameters - 2 * batch * width * width
    assert set(by_phase) == {"forward", "backward"}


def test_a_tpu_runs_the_outer_product_of_crunchers_head_in_two_fusions(samples):
    batch, width = 4096, 1024
    parameters = 2 * width * width + width
    by_phase = executed_flops(executions_of(samples.program("cruncher-v5e-8"))).by_phase
    assert 8 * by_phase["forward"] == 2 * batch * parameters
    assert 8 * by_phase["backward"] == 4 * batch * parameters - 2 * batch * width * width + 2 * batch * width


@pytest.mark.parametrize(
    "name", ["transformer-8xH100", "transformer-8xH100-jax-0.12", "transformer-8xCPU", "transformer-v5e-8"]
)
def test_a_rematerialised_transformer_counts_as_by_hand(samples, name):
    executed = executed_flops(executions_of(samples.program(name)))
    layer = 2 * B * S * WEIGHTS + 2 * SCORES
    forward = L * layer + HEAD
    assert 8 * executed.by_phase["forward"] == forward
    assert 8 * executed.by_phase["backward"] == 2 * forward
    # The layer runs again but for its last matmul, whose result no gradient needs.
    assert 8 * executed.by_phase["recompute"] == L * (layer - 2 * B * S * E * M)
    assert not executed.unpriced
    assert set(executed.by_format) == ({"fp32"} if name == "transformer-8xCPU" else {"bf16"})


def test_causal_flash_attention_counts_by_half_and_repeats_its_scores(samples):
    executions = executions_of(samples.program("transformer-cudnn-16xH100"))
    executed = executed_flops(executions)
    layer = 2 * B * S * WEIGHTS + SCORES
    assert 16 * executed.by_phase["forward"] == L * layer + HEAD
    assert 16 * executed.by_phase["backward"] == 2 * (L * layer + HEAD)
    again = layer - 2 * B * S * E * M + SCORES // 2
    assert 16 * executed.by_phase["recompute"] == L * again
    calls = [(e.times, work_of(e.computation, e.instruction)) for e in executions]
    attention = sum(times * work.flops for times, work in calls if work and work.kind == "attention")
    assert 16 * attention == L * (SCORES * 2 + SCORES * 5 // 2)


def real_taps(size, window, low, high, stride):
    ones = np.pad(np.ones(size, int), (low, high))
    return sum(int(ones[s : s + window].sum()) for s in range(0, size + low + high - window + 1, stride))


def test_a_strided_and_a_grouped_convolution_count_as_by_hand(samples):
    executed = executed_flops(executions_of(samples.program("convolution-8xCPU")))
    strided = 2 * 2 * real_taps(32, 3, 0, 1, 2) ** 2 * 16 * 32  # two images a device
    # The partitioner gathers the batch before the grouped one: each device convolves all sixteen images,
    # or, for the filter's gradient, its own two.
    grouped = 2 * real_taps(16, 5, 2, 2, 1) ** 2 * 8 * 64
    assert executed.by_phase["forward"] == strided + 16 * grouped
    assert executed.by_phase["backward"] == 2 * strided + 16 * grouped + 2 * grouped


def test_cudnn_convolves_the_padding_that_was_written_out_before_it(samples):
    executed = executed_flops(executions_of(samples.program("convolution-8xH100")))
    strided = 2 * 2 * (16 * 3) ** 2 * 16 * 32  # into 33 x 33, all of it read
    grouped = 2 * real_taps(16, 5, 2, 2, 1) ** 2 * 8 * 64
    assert executed.by_phase["forward"] == strided + 16 * grouped
    assert executed.by_phase["backward"] == 2 * strided + 16 * grouped + 2 * grouped


DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
FIVE = '{"known_trip_count":{"n":"5"}}'
BODY = f"""%body (x: f32[4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0)
  ROOT %d = f32[4,4]{{1,0}} {DOT}
}}

%test (x: f32[4,4]) -> pred[] {{
  %x.1 = f32[4,4]{{1,0}} parameter(0)
  ROOT %c = pred[] custom-call(%x.1), custom_call_target="done"
}}

%outer (x: f32[4,4]) -> f32[4,4] {{
  %x.2 = f32[4,4]{{1,0}} parameter(0)
  ROOT %w = f32[4,4]{{1,0}} while(%x.2), condition=%test, body=%body, backend_config={FIVE}
}}

%nothing (x: f32[4,4]) -> f32[4,4] {{
  ROOT %x.3 = f32[4,4]{{1,0}} parameter(0)
}}
"""


def test_nested_loops_multiply_and_conditions_run_once_more(module):
    program = module(
        "%a = f32[4,4]{1,0} parameter(0)",
        "ROOT %v = f32[4,4]{1,0} while(%a), condition=%test, body=%outer, "
        'backend_config={"known_trip_count":{"n":"3"}}',
        before=BODY,
    )
    executed = executed_flops(executions_of(program))
    assert executed.total == 3 * 5 * 2 * 4**3
    assert executed.unpriced == {"done(f32[4,4]) -> pred[], from an unnamed operation": 3 * 6 + 4}


def test_a_loop_of_unknown_length_counts_once_and_is_named(module):
    program = module(
        "%a = f32[4,4]{1,0} parameter(0)",
        'ROOT %v = f32[4,4]{1,0} while(%a), condition=%test, body=%body, metadata={op_name="jit(f)/while"}',
        before=BODY,
    )
    executed = executed_flops(executions_of(program))
    assert executed.total == 2 * 4**3
    assert "while %v of unknown length, from jit(f)/while: body counted once" in executed.unpriced


def test_a_fusion_that_runs_again_is_recomputed_whatever_it_holds(module):
    named = 'metadata={op_name="jit(f)/jvp()/dot_general"}'
    program = module(
        "%a = f32[4,4]{1,0} parameter(0)",
        f"%g = f32[4,4]{{1,0}} fusion(%a), kind=kCustom, calls=%fused, {named}",
        f"ROOT %g.remat = f32[4,4]{{1,0}} fusion(%a), kind=kCustom, calls=%fused, {named}",
        before=f"%fused (x: f32[4,4]) -> f32[4,4] {{\n  %x = f32[4,4]{{1,0}} parameter(0)\n"
        f"  ROOT %d = f32[4,4]{{1,0}} {DOT}, {named}\n}}\n",
    )
    assert executed_flops(executions_of(program)).by_phase == {"forward": 2 * 4**3, "recompute": 2 * 4**3}


def test_a_conditional_costs_its_most_expensive_branch(module):
    program = module(
        "%i = s32[] parameter(0)",
        "%a = f32[4,4]{1,0} parameter(1)",
        "ROOT %c = f32[4,4]{1,0} conditional(%i, %a, %a, %a), branch_computations={%nothing, %outer, %body}",
        before=BODY,
    )
    executed = executed_flops(executions_of(program))
    assert executed.total == 5 * 2 * 4**3
    assert sum(executed.unpriced.values()) == 6
    assert executed.assumptions == {"conditional at %c: counted by its most expensive branch, 2 of 3": 1}


def test_what_a_scope_calls_busy_is_left_out_of_the_bubble(module):
    """A loop's body that is busy in four of five runs."""
    busy = 'metadata={op_name="jit(f)/busy_4_of_5/jvp(up)/dot_general"}'
    program = module(
        "%a = f32[4,4]{1,0} parameter(0)",
        f"ROOT %p = f32[4,4]{{1,0}} fusion(%a), kind=kCustom, calls=%layers, {busy}",
        before="%layers (x: f32[4,4]) -> f32[4,4] "
        f"{{\n  %x = f32[4,4]{{1,0}} parameter(0)\n  ROOT %d = f32[4,4]{{1,0}} {DOT}, {busy}\n}}\n",
    )
    executed = executed_flops(executions_of(program))
    assert executed.total == 128
    assert executed.bubble == Fraction(128, 5)
    assert executed.first_by_module == {"up": Fraction(4 * 128, 5)}


TWO_WAYS = """%cheap (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%x)
}

%dear (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  %e = f32[8]{0} exponential(%y)
  ROOT %t = f32[8]{0} tanh(%e)
}
"""


def test_among_branches_without_products_the_one_with_more_elementwise_work_counts(module):
    program = module(
        "%i = pred[] parameter(0)",
        "%a = f32[8]{0} parameter(1)",
        "ROOT %c = f32[8]{0} conditional(%i, %a, %a), true_computation=%cheap, false_computation=%dear,"
        ' metadata={op_name="jit(f)/cond" source_file="model.py" source_line=12}',
        before=TWO_WAYS,
    )
    executed = executed_flops(executions_of(program))
    assert executed.elementwise == {"transcendental": 16}
    assert executed.assumptions == {
        "conditional at model.py:12: counted by its most expensive branch, 2 of 2": 1
    }


def test_a_sort_is_named_with_its_shape_and_a_fourier_transform_is_counted(module):
    program = module(
        "%a = f32[8]{0} parameter(0)",
        "%s = f32[8]{0} sort(%a), dimensions={0}, to_apply=%before",
        "ROOT %f = c64[5]{0} fft(%s), fft_type=RFFT, fft_length={8}",
        before="""%before (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}
""",
    )
    executed = executed_flops(executions_of(program))
    assert list(executed.unpriced) == ["sort(f32[8]) -> f32[8], from an unnamed operation"]
    assert executed.total == 5 * 8 * 3 // 2  # 5 N log2 N, and half of it for real numbers
    assert not executed.elementwise


def test_a_fusions_work_is_the_work_of_what_it_holds(samples):
    program = samples.program("transformer-8xH100")
    fusions = [i for i in program.entry.instructions if i.name.startswith("gemm_fusion")]
    assert fusions
    for fusion in fusions:
        (work,) = instruction_work(program, program.entry, fusion)
        assert work.flops == 2 * B * S * E * V // 8


def test_loops_are_not_entered_by_an_instructions_own_work(samples):
    program = samples.program("transformer-8xH100")
    loop = next(i for i in program.entry.instructions if i.opcode == "while")
    assert instruction_work(program, program.entry, loop) == ()


QUERY, KEY, VALUE = ("layers/attention/" + name for name in ("query", "key", "value"))
FORWARD = "forward"


def named(module, primitive):
    return f'metadata={{op_name="jit(step)/jvp(layers)/while/body/closed_call/{module}/{primitive}"}}'


FUSED = """%joined (a: f32[8,4], b: f32[8,2]) -> f32[6,8] {{
  %a = f32[8,4]{{1,0}} parameter(0)
  %b = f32[8,2]{{1,0}} parameter(1)
  %c = f32[8,6]{{1,0}} concatenate(%a, %b), dimensions={{1}}, {0}
  ROOT %t = f32[6,8]{{0,1}} bitcast(%c)
}}

%product (w: f32[6,8], x: f32[8,5]) -> f32[6,5] {{
  %w = f32[6,8]{{0,1}} parameter(0)
  %x = f32[8,5]{{1,0}} parameter(1)
  ROOT %d = f32[6,5]{{1,0}} dot(%w, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {1}
}}
"""


@pytest.mark.parametrize(
    ("joined_by", "is_merged"),
    [
        (named("attention/query", "sharding_constraint"), True),
        ('metadata={op_name="concatenate.3"}', True),  # XLA's own name
        (named("attention", "concatenate"), False),  # the model's own: rotated halves of a head
    ],
)
def test_a_product_of_operands_joined_under_its_own_name_is_a_merged_one(module, joined_by, is_merged):
    product = named("attention/query", "dot_general")
    program = module(
        "%p = f32[8,4]{1,0} parameter(0)",
        "%q = f32[8,2]{1,0} parameter(1)",
        "%x.1 = f32[8,5]{1,0} parameter(2)",
        "%j = f32[6,8]{0,1} fusion(%p, %q), kind=kLoop, calls=%joined",
        f"ROOT %f = f32[6,5]{{1,0}} fusion(%j, %x.1), kind=kCustom, calls=%product, {product}",
        before=FUSED.format(joined_by, product),
    )
    executed = executed_flops(executions_of(program))
    whole = {(FORWARD, QUERY): 2 * 6 * 5 * 8}
    assert executed.by_phase_and_module == whole
    assert executed.merged == (whole if is_merged else {})


def test_a_merged_product_is_shared_by_what_each_module_needs_beside_its_own():
    """Backward: each has its weights' gradient by itself, and the inputs' gradients are one product."""
    counts = Counter({("backward", QUERY): 8, ("backward", KEY): 4 + 16, ("backward", VALUE): 4})
    counts["backward", "layers/attention/scores"] = 99  # computed whole: it needs nothing
    merged = Counter({("backward", KEY): 16})
    traced = {"backward": {QUERY: 16, KEY: 8, VALUE: 8, "layers/attention/scores": 50, "layers/mlp": 1000}}
    shared = shared_out(counts, merged, traced)
    assert [shared["backward", module] for module in (QUERY, KEY, VALUE)] == [16, 8, 8]
    assert shared.total() == counts.total()


@pytest.mark.parametrize("executed", [16, 33, 5])
def test_nothing_is_lost_where_more_or_less_is_executed_than_was_traced(executed):
    counts = Counter({(FORWARD, QUERY): executed})
    shared = shared_out(counts, counts, {FORWARD: {QUERY: 8, KEY: 4, VALUE: 4}})
    assert shared.total() == executed
    assert shared[FORWARD, QUERY] >= executed // 2


def test_a_merged_product_stays_where_it_is_if_no_module_is_known_to_lack_it():
    counts = Counter({(FORWARD, QUERY): 16, (FORWARD, KEY): 4})
    assert shared_out(counts, Counter({(FORWARD, QUERY): 16}), {}) == counts


def test_what_runs_only_under_the_name_of_a_repetition_is_a_first_run():
    traced = {FORWARD: {"layer": 10, "head": 10}, "recompute": {"head": 10}}
    counts = Counter({("recompute", "layer"): 10, (FORWARD, "head"): 10, ("recompute", "head"): 10})
    assert first_runs(counts, traced) == {"layer": 10}


def test_a_product_without_a_name_belongs_to_the_module_beside_it_that_lacks_as_much():
    traced = {FORWARD: {"a": 100, "b": 100, "c": 30}, "backward": {"a": 200}}
    counts = Counter({(FORWARD, "a"): 100, (FORWARD, ""): 130, ("backward", "a"): 100, ("backward", ""): 110})
    unnamed = [
        Unnamed(FORWARD, 30, near=("a",)),  # its neighbour lacks nothing: c lacks as many
        Unnamed(FORWARD, 90, near=("a", "b")),  # without its taps on padding
        Unnamed("backward", 110),  # more than any module lacks
        Unnamed("optimizer", 7),
    ]
    homes = homes_of(unnamed, counts, traced)
    assert homes == {(FORWARD, "b"): 90, (FORWARD, "c"): 30, ("backward", "a"): 110}


def test_products_of_equal_size_go_to_the_modules_beside_them():
    traced = {FORWARD: {"block1": 100, "block2": 100}}
    counts = Counter({(FORWARD, ""): 180})
    unnamed = [Unnamed(FORWARD, 90, near=("block2", "block1")), Unnamed(FORWARD, 90, near=("block1",))]
    assert homes_of(unnamed, counts, traced) == {(FORWARD, "block1"): 90, (FORWARD, "block2"): 90}
