"""A value is followed back to the operation that computes it, and to the argument that it copies."""

import pytest

from meshwright.hlo import Dataflow

STACKING = """%fused (stack: f32[4,2], new: f32[2], i: s32[]) -> f32[4,2] {
  %stack = f32[4,2]{1,0} parameter(0)
  %new = f32[2]{0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,2]{1,0} bitcast(%new), metadata={op_name="jit(f)/while/body/dynamic_update_slice"}
  ROOT %dus = f32[4,2]{1,0} dynamic-update-slice(%stack, %row, %at, %zero), metadata={op_name="jit(f)/while"}
}

%body (q: (s32[], f32[2], f32[4,2], f32[3])) -> (s32[], f32[2], f32[4,2], f32[3]) {
  %q = (s32[], f32[2], f32[4,2], f32[3]) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %x = f32[2]{0} get-tuple-element(%q), index=1
  %s = f32[4,2]{1,0} get-tuple-element(%q), index=2
  %kept = f32[3]{0} get-tuple-element(%q), index=3
  %act = f32[2]{0} tanh(%x), metadata={op_name="jit(f)/jvp(mlp)/tanh" source_file="/m.py" source_line=25}
  %put = f32[4,2]{1,0} fusion(%s, %act, %i), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[2], f32[4,2], f32[3]) tuple(%i, %act, %put, %kept)
}

%test (p: (s32[], f32[2], f32[4,2], f32[3])) -> pred[] {
  %p = (s32[], f32[2], f32[4,2], f32[3]) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""


def origin(program, name, index="{}"):
    """The path and the source line of the last named step of a value's trail."""
    trail = Dataflow(program).trail(name, index)
    named = [instruction for _, instruction, _ in trail if instruction.op_name]
    return (named[-1].op_name, program.source_line(named[-1])) if named else ("", "")


def looped(module):
    return module(
        "%zero = s32[] constant(0)",
        "%a = f32[2]{0} parameter(0)",
        "%b = f32[4,2]{1,0} parameter(1)",
        '%c = f32[3]{0} negate(%c0), metadata={op_name="jit(f)/neg" source_file="/m/x.py" source_line=3}',
        "%c0 = f32[3]{0} parameter(2)",
        "%in = (s32[], f32[2], f32[4,2], f32[3]) tuple(%zero, %a, %b, %c)",
        "%w = (s32[], f32[2], f32[4,2], f32[3]) while(%in), condition=%test, body=%body, "
        'metadata={op_name="jit(f)/while"}',
        "%out = f32[4,2]{1,0} get-tuple-element(%w), index=2",
        "ROOT %copied = f32[4,2]{1,0} copy(%out)",
        before=STACKING,
    )


def test_a_stack_is_named_by_what_is_stacked(module):
    program = looped(module)
    made = ("jit(f)/jvp(mlp)/tanh", "m.py:25")
    for name, index in (("w", "{2}"), ("q", "{2}"), ("out", "{}"), ("copied", "{}"), ("put", "{}")):
        assert origin(program, name, index) == made


def test_loop_state_is_named_by_what_hands_it_on(module):
    assert origin(looped(module), "w", "{1}") == ("jit(f)/jvp(mlp)/tanh", "m.py:25")


def test_what_a_loop_only_reads_is_named_by_what_went_in(module):
    assert origin(looped(module), "q", "{3}") == ("jit(f)/neg", "x.py:3")


def test_a_condition_sees_the_state_that_the_body_makes(module):
    program = looped(module)
    assert origin(program, "p", "{2}") == ("jit(f)/jvp(mlp)/tanh", "m.py:25")
    assert origin(program, "p", "{3}") == ("jit(f)/neg", "x.py:3")


def test_what_is_not_in_the_program_has_no_origin(module):
    assert origin(looped(module), "nowhere", "{}") == ("", "")


def test_what_nobody_named_has_no_origin(module):
    assert origin(looped(module), "a", "{}") == ("", "")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_every_value_of_every_sample_has_an_answer(samples, every):
    for name in samples.names[::every]:
        program = samples.program(name)
        for _, instruction in program.instructions():
            operation, line = origin(program, instruction.name)
            assert operation or not line


def source(program, name, index=(), computation=None):
    home = program.computations[computation] if computation else program.entry
    return Dataflow(program).argument_of((home, home.by_name[name], index))


def test_a_cast_and_gathered_argument_is_still_the_argument(module):
    program = module(
        "%w = f32[4,8]{1,0} parameter(0)",
        "%cast = bf16[4,8]{1,0} convert(%w)",
        "%start = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%cast), dimensions={0}",
        "%done = bf16[32,8]{1,0} all-gather-done(%start)",
        "%turned = bf16[8,32]{1,0} transpose(%done), dimensions={1,0}",
        "%sum = bf16[8,32]{1,0} add(%turned, %turned)",
        "ROOT %out = f32[] constant(0)",
    )
    assert source(program, "turned") == 0
    assert source(program, "start", (1,)) == 0
    assert source(program, "sum") is None


def test_of_a_combined_gather_each_result_has_its_own_argument(module):
    program = module(
        "%a = f32[4]{0} parameter(0)",
        "%b = f32[2]{0} parameter(1)",
        "%start = ((f32[4]{0}, f32[2]{0}), (f32[8]{0}, f32[4]{0})) all-gather-start(%a, %b), dimensions={0}",
        "ROOT %out = f32[] constant(0)",
    )
    assert [source(program, "start", (1, place)) for place in (0, 1)] == [0, 1]


def test_a_fusion_that_only_moves_is_seen_through_and_one_that_computes_is_not(module):
    program = module(
        "%w = f32[4,8]{1,0} parameter(0)",
        "%moved = bf16[8,4]{1,0} fusion(%w), kind=kLoop, calls=%moving",
        "%made = f32[4,8]{1,0} fusion(%w), kind=kLoop, calls=%making",
        "ROOT %out = f32[] constant(0)",
        before="""%moving (p: f32[4,8]) -> bf16[8,4] {
  %p = f32[4,8]{1,0} parameter(0)
  %t = f32[8,4]{1,0} transpose(%p), dimensions={1,0}
  ROOT %c = bf16[8,4]{1,0} convert(%t)
}

%making (q: f32[4,8]) -> f32[4,8] {
  %q = f32[4,8]{1,0} parameter(0)
  ROOT %n = f32[4,8]{1,0} negate(%q)
}
""",
    )
    assert source(program, "moved") == 0
    assert source(program, "made") is None


LOOP = """%body (state: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %state = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %kept = f32[4]{0} get-tuple-element(%state), index=1
  %old = f32[4]{0} get-tuple-element(%state), index=2
  %new = f32[4]{0} add(%old, %kept)
  ROOT %next = (s32[], f32[4]{0}, f32[4]{0}) tuple(%i, %kept, %new)
}

%condition (s: (s32[], f32[4], f32[4])) -> pred[] {
  %s = (s32[], f32[4]{0}, f32[4]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}
"""


def test_loop_state_that_is_handed_on_unchanged_is_what_the_loop_was_given(module):
    program = module(
        "%zero = s32[] constant(0)",
        "%w = f32[4]{0} parameter(0)",
        "%x = f32[4]{0} parameter(1)",
        "%init = (s32[], f32[4]{0}, f32[4]{0}) tuple(%zero, %w, %x)",
        "%loop = (s32[], f32[4]{0}, f32[4]{0}) while(%init), condition=%condition, body=%body",
        "ROOT %out = f32[] constant(0)",
        before=LOOP,
    )
    assert source(program, "loop", (1,)) == 0
    assert source(program, "kept", (), "body") == 0
    assert source(program, "loop", (2,)) is None  # made anew each round
    assert source(program, "state", (2,), "body") is None


def test_an_argument_is_itself(module):
    program = module("%w = f32[4]{0} parameter(3)", "ROOT %out = f32[] constant(0)")
    assert source(program, "w") == 3
