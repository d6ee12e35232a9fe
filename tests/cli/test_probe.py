import json

from meshwright import measure
from meshwright.hardware import Calibration

MADE = Calibration(
    matmul_flops_per_second={"fp32": 1e11},
    memory_bytes_per_second=2e10,
    launch_seconds=3e-6,
    date="2026-11-21",
    source="a test",
)


def test_what_was_measured_is_shown_or_given_as_json(meshwright, monkeypatch):
    monkeypatch.setattr(measure, "probe", lambda: MADE)
    assert "large product in fp32" in meshwright("probe").output
    answer = meshwright("probe", "--json")
    assert Calibration.from_json(json.dumps(answer.json)) == MADE
