"""Two hosts of eight H100 that are not there: what crosses between is hidden behind the backward pass."""

import pytest

import meshwright as mw

LAYERS = 32 * (4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 14_336)  # parameters of the matrices
TABLE = 128_256 * 4096


@pytest.fixture(scope="module")
def weighed():
    one_microbatch = ["batch.sequences=16", "batch.microbatch_sequences=none", "layer_loop=keep"]
    return mw.weigh("llama3-8b", on="16xH100", layout="data=2,fsdp=8", overrides=one_microbatch)


def sent(weighed, kind, axis):
    """Collectives of one kind along one axis; their wire bytes in the loops over layers, and in all."""
    found = [c for c in weighed.ledger.traffic if c.kind == kind and c.axes == (axis,)]
    return found, sum(c.wire_bytes for c in found if c.in_loop), sum(c.wire_bytes for c in found)


def test_gradients_are_scattered_inside_a_host_and_an_eighth_of_them_is_summed_between(weighed):
    """By hand: 2 bytes each, in a ring of 8 and in one of 2. The embedding's cross a host by columns."""
    inside, _, scattered = sent(weighed, "reduce-scatter", "fsdp")
    assert {c.link for c in inside} == {"inside"}
    assert scattered == pytest.approx(2 * (LAYERS + TABLE) * 7 / 8, rel=0.001)
    between, in_loop, summed = sent(weighed, "all-reduce", "data")
    assert {c.link for c in between} == {"between"}
    assert summed == pytest.approx(2 * (LAYERS + 2 * TABLE) / 8, rel=0.001)  # 2 x 1/2: all of it
    assert in_loop >= 0.9 * 2 * LAYERS / 8  # some are peeled off at the loop's ends


def test_the_sums_between_hosts_are_asynchronous_and_for_the_most_part_hidden(weighed):
    between, _, _ = sent(weighed, "all-reduce", "data")
    assert all(c.overlapped_count == c.count for c in between if c.in_loop)
    (waited,) = [s for s in weighed.prediction.slices if s.name == "all-reduce[data]"]
    assert waited.exposed_seconds <= 0.3 * waited.seconds
