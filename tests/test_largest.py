"""The largest value that fits is found between two compiled ends."""

import pytest

import meshwright as mw
from meshwright.contrib.changes import search


@pytest.mark.parametrize(
    ("start", "unit", "usable", "found"),
    [
        (8, 1, 405, (40, 41)),
        (4096, 128, 10 * 30_000 + 5, (29952, 30080)),
        (64, 1, 35, (3, 4)),  # from above
        (4, 1, 5, (None, 1)),  # not even the least
    ],
)
def test_the_ends_are_neighbours_where_memory_grows_in_proportion(start, unit, usable, found):
    asked: list[int] = []

    def needed_of(value):
        asked.append(value)
        return 10 * value + 5

    assert search(needed_of, usable, start, unit, 10**6, exact=True) == found
    assert len(asked) <= 8


def test_a_bend_of_the_line_does_not_mislead():
    low, high = search(lambda n: n * n, 10**6, 8, 1, 10**6, exact=True)
    assert (low, high) == (1000, 1001)


def test_what_cannot_be_had_ends_the_search_as_what_does_not_fit():
    low, high = search(lambda n: None if n > 1024 else n, 10**9, 256, 128, 10**6, exact=False)
    assert (low, high) == (1024, 1152)


def test_a_fleet_whose_memory_is_not_known_has_no_largest():
    with pytest.raises(mw.InputError, match="how much memory CPU has is not known"):
        mw.largest("bytes-nano", "batch", on="1xCPU")
    with pytest.raises(mw.InputError, match="linear has no sequences"):
        mw.largest("linear", "sequence_length", on="1xH100")


@pytest.mark.wide
def test_the_largest_batch_of_a_small_gpu_is_compiled_at_both_ends():
    sizes = {"model.num_layers": 2, "batch.sequence_length": 8192}
    found = mw.largest("bytes-nano", "batch", on="1xT4", overrides=sizes)
    assert found.value is not None
    assert found.above == found.value + 1
    assert found.weighing.fits
    assert found.above_bytes > found.weighing.ledger.memory.usable_bytes
    assert f"{found.value:,} sequences a replica and microbatch" in repr(found)
    assert found.to_dict()["weighing"]["fits"] is True
