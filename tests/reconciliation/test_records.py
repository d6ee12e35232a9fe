import json

import pytest

from meshwright.errors import InputError
from meshwright.reconciliation import Reconciliation, Row


def row(predicted: float, measured: float, **interval: float) -> Row:
    return Row(
        quantity="steps", unit="seconds", predicted=predicted, measured=measured, how="by hand", **interval
    )


def test_an_error_is_how_far_the_prediction_lies_above_what_was_measured():
    assert row(3, 2).relative_error == 0.5
    assert row(1, 2).relative_error == -0.5
    assert row(1, 0).relative_error is None


def test_inside_is_asked_of_an_interval_only():
    assert row(3, 2).inside is None
    assert row(3, 2, low=2, high=4).inside is True
    assert row(3, 1.9, low=2, high=4).inside is False


def test_a_reconciliation_reads_back_as_it_was_written():
    written = Reconciliation(
        same_program=True,
        rows=(row(3, 2), row(3, 1.5, low=1, high=4)),
        not_compared={"MFU": "no peak is known"},
    )
    assert Reconciliation.from_json(written.to_json()) == written
    fields = json.loads(written.to_json())
    assert [each["relative_error"] for each in fields["rows"]] == [0.5, 1.0]
    assert [each["inside"] for each in fields["rows"]] == [None, True]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "rows": [{}]}'])
def test_another_text_is_no_reconciliation(text):
    with pytest.raises(InputError, match="this is no reconciliation"):
        Reconciliation.from_json(text)


def test_another_schema_is_named():
    with pytest.raises(InputError, match="a reconciliation of schema 7; this version reads 1"):
        Reconciliation.from_json('{"schema": 7}')
