import dataclasses

import pytest

from meshwright.predict import Interval, Prediction, Slice


@pytest.mark.parametrize("record", [Interval, Slice, Prediction])
def test_a_record_is_frozen_and_takes_names_only(record):
    assert record.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(record))


def test_an_interval_does_not_change_once_made():
    interval = Interval(low=1.0, expected=2.0, high=3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        interval.low = 0.0
