"""The caching allocator's rules, by hand from its source; a real device was not at hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.contrib.torch_eager import MIB, CachingAllocator, segments_expand


def reserved_after(*sizes, stream=0, expandable=False):
    allocator = CachingAllocator(expandable=expandable)
    for number, size in enumerate(sizes):
        allocator.allocate(number, size, stream)
    return allocator.reserved_bytes


def test_segments_are_of_2_and_20_mebibytes_and_above_10_of_steps_of_2():
    assert reserved_after(1) == reserved_after(MIB) == reserved_after(MIB, 1024 * 1024 - 512, 512) == 2 * MIB
    assert reserved_after(MIB + 1) == reserved_after(10 * MIB - 512, 9 * MIB) == 20 * MIB
    assert reserved_after(10 * MIB) == 10 * MIB
    assert reserved_after(10 * MIB + 1) == 12 * MIB
    assert reserved_after(21 * MIB) == 22 * MIB


def test_sizes_are_rounded_to_512_bytes():
    assert reserved_after(*[513] * 2048) == 2 * MIB
    assert reserved_after(*[513] * 2049) == 4 * MIB


def test_what_is_free_again_serves_the_next_that_fits_best():
    allocator = CachingAllocator()
    for number, size in enumerate((30 * MIB, 12 * MIB, 40 * MIB)):
        allocator.allocate(number, size, 0)
    for number in range(3):
        allocator.free(number)
    allocator.allocate(3, 11 * MIB, 0)  # in the place of 12
    allocator.allocate(4, 29 * MIB, 0)  # of 30
    allocator.allocate(5, 40 * MIB, 0)
    assert allocator.reserved_bytes == 82 * MIB
    allocator.allocate(6, 11 * MIB, 0)
    assert allocator.reserved_bytes == 94 * MIB


def test_a_large_block_is_split_only_if_more_than_one_mebibyte_is_left():
    allocator = CachingAllocator()
    allocator.allocate(0, 14 * MIB, 0)
    allocator.free(0)
    allocator.allocate(1, 13 * MIB, 0)  # one mebibyte is left and stays with it
    allocator.allocate(2, 2 * MIB, 0)
    assert allocator.reserved_bytes == (14 + 20) * MIB


def test_neighbours_are_merged_and_streams_share_nothing():
    allocator = CachingAllocator()
    for number in range(10):
        allocator.allocate(number, 2 * MIB, 0)
    assert allocator.reserved_bytes == 20 * MIB
    for number in (3, 5, 4, 0, 1, 2, 9, 8, 7, 6):
        allocator.free(number)
    allocator.allocate(10, 20 * MIB, 0)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(10)
    allocator.allocate(11, 20 * MIB, 1)
    assert allocator.reserved_bytes == 40 * MIB


def test_expandable_segments_grow_by_pages_of_2_and_20_mebibytes():
    assert reserved_after(1, expandable=True) == reserved_after(MIB, MIB, expandable=True) == 2 * MIB
    assert reserved_after(MIB, MIB, 1, expandable=True) == 4 * MIB
    assert reserved_after(30 * MIB, 10 * MIB, expandable=True) == 40 * MIB
    assert reserved_after(30 * MIB, 11 * MIB, expandable=True) == 60 * MIB


def test_an_expandable_segment_uses_its_free_end_and_its_holes_first():
    allocator = CachingAllocator(expandable=True)
    for number, size in enumerate((30 * MIB, 5 * MIB)):
        allocator.allocate(number, size, 0)
    allocator.free(0)
    allocator.allocate(2, 31 * MIB, 0)  # 5 MiB are free at the end, and 26 more need two pages
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate(
        3, 14 * MIB, 0
    )  # at the end exactly 14 are free, which count as more: it fills the hole
    allocator.allocate(4, 14 * MIB, 0)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate(5, 20 * MIB, 1)  # another stream has a segment of its own
    assert allocator.reserved_bytes == 100 * MIB


@pytest.mark.parametrize(
    ("name", "text", "expands"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512, expandable_segments: True", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_ALLOC_CONF", "", False),
    ],
)
def test_segments_expand_where_pytorchs_variable_says_so(name, text, expands, monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, text)
    assert segments_expand() is expands


@given(
    st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 2), st.booleans()), min_size=1, max_size=60),
    st.booleans(),
)
def test_reserved_is_never_less_than_what_is_alive_and_one_size_needs_nothing_new(history, expandable):
    allocator, alive = CachingAllocator(expandable=expandable), {}
    for number, (size, stream, frees) in enumerate(history):
        allocator.allocate(number, size, stream)
        alive[number] = size
        assert sum(alive.values()) <= allocator.reserved_bytes
        if frees:
            allocator.free(number)
            del alive[number]
    for number in alive:
        allocator.free(number)
    before = allocator.reserved_bytes
    allocator.allocate(-1, *history[0][:2])
    assert allocator.reserved_bytes == before
