import pytest

from meshwright.hlo import parse_program
from meshwright.predict._kernels import bytes_of

STACK = 32 * 1024 * 4  # f32[32,1024]
ROW = 1024 * 4


@pytest.fixture
def moved(program_of):
    """Bytes that the entry's root moves."""

    def make(text):
        program = program_of(text)
        return bytes_of(program, program.entry, program.entry.root)

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
    assert bytes_of(program, program.entry, program.entry.root) == 4 * 4 + 4 * 4
