"""Products that XLA merged (queries, keys and values) count under the modules that they belong to."""

from collections import Counter

import pytest

from meshwright.ledger import executions_of
from meshwright.ledger._flops import executed_flops, first_runs, shared_out

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
