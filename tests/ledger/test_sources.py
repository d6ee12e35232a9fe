from meshwright.hlo import Sources


def source(program, name, index=(), computation=None):
    home = program.computations[computation] if computation else program.entry
    return Sources(program).argument_of(home, home.by_name[name], index)


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
