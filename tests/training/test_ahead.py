import threading

import pytest

from meshwright.training._loop import batches_ahead


def test_batches_come_in_order():
    assert list(batches_ahead(lambda step: step * step, range(5))) == [0, 1, 4, 9, 16]


def test_a_run_shorter_than_the_queue_ends():
    assert list(batches_ahead(lambda step: step, range(1))) == [0]


def test_two_batches_at_most_are_made_ahead_and_none_after_closing():
    made: list[int] = []
    batches = batches_ahead(lambda step: made.append(step) or step, range(100))
    assert next(batches) == 0
    batches.close()
    assert made == list(range(len(made)))
    assert len(made) <= 3


def test_batches_are_made_by_another_thread():
    names = list(batches_ahead(lambda step: threading.current_thread().name, range(3)))
    assert all(name.startswith("meshwright-batches") for name in names)


def test_what_the_thread_meets_is_raised_where_the_batch_is_taken():
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("no such step")
        return step

    batches = batches_ahead(make, range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="no such step"):
        next(batches)
