import re

import pytest

from meshwright.ledger._memory import parse_assignment, parse_live_ranges


def test_every_allocation_and_value_of_every_sample_is_read(samples):
    for name in samples.names:
        text = samples.text(name, "buffer-assignment.txt")
        allocations = parse_assignment(text)
        assert sum(a.num_bytes for a in allocations) == sum(
            int(size) for size in re.findall(r"^allocation \d+: size (\d+)", text, re.M)
        )
        assert sum(len(a.values) for a in allocations) == text.count(" value: <")
        assert all(v.offset_bytes + v.num_bytes <= a.num_bytes for a in allocations for v in a.values)


def test_every_value_outside_thread_local_scratch_has_a_live_range(samples):
    for name in samples.names:
        ranges = parse_live_ranges(samples.text(name, "live-range.txt"))
        allocations = parse_assignment(samples.text(name, "buffer-assignment.txt"))
        held = [a for a in allocations if a.kind != "thread-local"]
        assert {(v.name, v.index) for a in held for v in a.values} <= set(ranges)


TEXT = """BufferAssignment:
allocation 0: size 64, parameter 3, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 16, output shape is |(f32[16], f32[])|, maybe-live-out:
 value: <2 t{} @0> (size=16,offset=0): (f32[16]{0}, f32[])
allocation 2: size 4, thread-local:
allocation 3: size 8, constant:
allocation 4: size 96, page 0, color 5, preallocated-temp:
 value: <3 w{1,2} (phi) @5> (size=32,offset=64): f32[8]{0}
"""


def test_kinds_colors_places_and_indices_are_read():
    allocations = parse_assignment(TEXT)
    assert [a.kind for a in allocations] == ["parameter", "output", "thread-local", "constant", "temporary"]
    assert [a.color for a in allocations] == [0, 0, 0, 0, 5]
    assert allocations[0].parameter == 3
    (value,) = allocations[4].values
    assert (value.name, value.index, value.num_bytes, value.offset_bytes) == ("w", "{1,2}", 32, 64)
    assert [v.is_tuple_table for a in allocations for v in a.values] == [False, True, False]


def test_an_unknown_line_of_the_assignment_raises():
    with pytest.raises(ValueError, match="buffer assignment, line 2 is not understood: allocation x"):
        parse_assignment("BufferAssignment:\nallocation x\n")


RANGES = """HloLiveRange (max 2):
  BufferLiveRange:
    a{{}}:0-2
    b{{0,1}}:1-1
{}  Live ranges at 1 (peak):
"""


def test_live_ranges_are_read_by_instruction_and_index():
    ranges = parse_live_ranges(RANGES.format(""))
    assert {key: (r.first, r.last) for key, r in ranges.items()} == {
        ("a", "{}"): (0, 2),
        ("b", "{0,1}"): (1, 1),
    }


def test_an_unknown_live_range_raises():
    with pytest.raises(ValueError, match="live range is not understood:     c: always"):
        parse_live_ranges(RANGES.format("    c: always\n"))


def test_missing_live_ranges_raise():
    with pytest.raises(ValueError, match="live ranges have no section of that name: 'HloLiveRange'"):
        parse_live_ranges("HloLiveRange")
