import dataclasses
import json

import pytest

from meshwright.errors import InputError
from meshwright.reconciliation import Measurement


def test_a_measurement_reads_back_as_it_was_written(measurement):
    assert Measurement.from_json(measurement.to_json()) == measurement
    untimed = dataclasses.replace(measurement, step_seconds=None, peak_bytes=None)
    assert Measurement.from_json(untimed.to_json()) == untimed


def test_tokens_per_second_are_those_of_the_median_step(measurement):
    assert measurement.tokens_per_second == 200.0
    assert json.loads(measurement.to_json())["tokens_per_second"] == 200.0
    assert dataclasses.replace(measurement, step_seconds=None).tokens_per_second is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 2, "tokens_per_second": 1}'])
def test_another_text_is_no_measurement(text):
    with pytest.raises(InputError, match="this is no measurement"):
        Measurement.from_json(text)


def test_another_schema_is_named(measurement):
    text = measurement.to_json().replace('"schema": 2', '"schema": 7')
    with pytest.raises(InputError, match="a measurement of schema 7; this version reads 2"):
        Measurement.from_json(text)
