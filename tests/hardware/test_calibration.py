import json

import pytest

from meshwright.errors import InputError
from meshwright.hardware import Calibration

FIELDS = {
    "launch_seconds_among": {2: 3e-6},
    "matmul_flops_per_second": {"fp32": 2.5e11},
    "memory_bytes_per_second": 2e10,
    "launch_seconds": 2e-6,
    "date": "2026-11-21",
    "source": "probe",
}


ATTENTION = {
    "head_size": 64,
    "length": 1024,
    "forward_flops_per_second": 3e14,
    "backward_flops_per_second": 2e14,
}
GATHER = {"kind": "all-gather", "group_size": 8, "bytes_per_second": 2e11, "latency_seconds": 2e-5}


@pytest.mark.parametrize("parts", [{}, {"attention": [ATTENTION], "collectives": [GATHER]}])
def test_a_calibration_survives_its_json(parts):
    calibration = Calibration.from_json(json.dumps({**FIELDS, **parts}))
    assert len(calibration.attention) == len(calibration.collectives) == len(parts) / 2
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
        json.dumps({**FIELDS, "attention": [{"head_size": 64}]}),
        json.dumps({**FIELDS, "collectives": ["all-gather"]}),
        json.dumps({**FIELDS, "collectives": [{**GATHER, "wire": 1}]}),
        json.dumps({**FIELDS, "matmul_flops_per_second": [1]}),
        json.dumps({name: value for name, value in FIELDS.items() if name != "date"}),
    ],
)
def test_text_that_is_no_calibration_is_the_users_mistake(text):
    with pytest.raises(InputError, match="this is not a calibration") as caught:
        Calibration.from_json(text)
    assert "`meshwright probe`" in caught.value.hint


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_positive_number_is_named(rate):
    with pytest.raises(InputError, match=r"launch_seconds = .* is not a positive number"):
        Calibration(**{**FIELDS, "launch_seconds": rate})


def test_an_unknown_format_and_no_format_are_refused():
    with pytest.raises(InputError, match=r"unknown formats \['fp31'\]"):
        Calibration(**{**FIELDS, "matmul_flops_per_second": {"fp31": 1e9}})
    with pytest.raises(InputError, match="no format at all"):
        Calibration(**{**FIELDS, "matmul_flops_per_second": {}})


def test_an_unknown_collective_and_a_rate_of_none_are_named():
    with pytest.raises(InputError, match="no collective is called 'all-gathr'") as caught:
        Calibration.from_json(json.dumps({**FIELDS, "collectives": [{**GATHER, "kind": "all-gathr"}]}))
    assert caught.value.hint == "did you mean 'all-gather'?"
    with pytest.raises(InputError, match=r"collectives\[0\].latency_seconds = 0.0 is not a positive number"):
        Calibration.from_json(json.dumps({**FIELDS, "collectives": [{**GATHER, "latency_seconds": 0}]}))
    with pytest.raises(InputError, match=r"attention\[0\].forward_flops_per_second = -1.0 is not a positive"):
        Calibration.from_json(
            json.dumps({**FIELDS, "attention": [{**ATTENTION, "forward_flops_per_second": -1}]})
        )


def test_a_launch_among_several_that_takes_no_time_is_named():
    with pytest.raises(InputError, match=r"launch_seconds_among.8 = 0.0 is not a positive number"):
        Calibration(**{**FIELDS, "launch_seconds_among": {8: 0.0}})
