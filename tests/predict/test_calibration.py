import json

import pytest

from meshwright.errors import InputError
from meshwright.predict import Calibration

FIELDS = {
    "matmul_flops_per_second": {"fp32": 2.5e11},
    "memory_bytes_per_second": 2e10,
    "launch_seconds": 2e-6,
    "date": "2026-11-21",
    "source": "probe",
}


def test_a_calibration_survives_its_json():
    calibration = Calibration(**FIELDS)
    assert Calibration.from_json(calibration.to_json()) == calibration


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        json.dumps({**FIELDS, "extra": 1}),
        json.dumps({**FIELDS, "memory_bytes_per_second": "fast"}),
        json.dumps({**FIELDS, "matmul_flops_per_second": [1]}),
        json.dumps({name: value for name, value in FIELDS.items() if name != "date"}),
    ],
)
def test_text_that_is_no_calibration_is_the_users_mistake(text):
    with pytest.raises(InputError, match="cannot be read") as caught:
        Calibration.from_json(text)
    assert "`meshwright probe`" in caught.value.hint


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_positive_number_is_named(rate):
    with pytest.raises(InputError, match=r"launch_seconds = .* is no positive number"):
        Calibration(**{**FIELDS, "launch_seconds": rate})


def test_an_unknown_format_and_no_format_are_refused():
    with pytest.raises(InputError, match=r"unknown formats \['fp31'\]"):
        Calibration(**{**FIELDS, "matmul_flops_per_second": {"fp31": 1e9}})
    with pytest.raises(InputError, match="no format at all"):
        Calibration(**{**FIELDS, "matmul_flops_per_second": {}})
