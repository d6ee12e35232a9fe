from meshwright.hlo import Origins

LOOP = """%fused (stack: f32[4,2], new: f32[2], i: s32[]) -> f32[4,2] {
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


def origins(module):
    return Origins(
        module(
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
            before=LOOP,
        )
    )


def test_a_stack_is_named_by_what_is_stacked(module):
    found = origins(module)
    made = ("jit(f)/jvp(mlp)/tanh", "m.py:25")
    for name, index in (("w", "{2}"), ("q", "{2}"), ("out", "{}"), ("copied", "{}"), ("put", "{}")):
        assert found.of(name, index) == made


def test_loop_state_is_named_by_what_hands_it_on(module):
    assert origins(module).of("w", "{1}") == ("jit(f)/jvp(mlp)/tanh", "m.py:25")


def test_what_a_loop_only_reads_is_named_by_what_went_in(module):
    assert origins(module).of("q", "{3}") == ("jit(f)/neg", "x.py:3")


def test_a_condition_sees_the_state_that_the_body_makes(module):
    found = origins(module)
    assert found.of("p", "{2}") == ("jit(f)/jvp(mlp)/tanh", "m.py:25")
    assert found.of("p", "{3}") == ("jit(f)/neg", "x.py:3")


def test_what_is_not_in_the_program_has_no_origin(module):
    assert origins(module).of("nowhere", "{}") == ("", "")


def test_what_nobody_named_has_no_origin(module):
    assert origins(module).of("a", "{}") == ("", "")


def test_every_value_of_every_sample_has_an_answer(samples):
    for name in samples.names:
        program = samples.program(name)
        found = Origins(program)
        for _, instruction in program.instructions():
            operation, line = found.of(instruction.name, "{}")
            assert operation or not line
