import pytest

from meshwright.measure import _probe_kernels as _probe_details


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_probe_details, "SIZES", {"cpu": (16,)})
    monkeypatch.setattr(_probe_details, "CPU_LENGTHS", (32,))
    monkeypatch.setattr(_probe_details, "COPIED_BYTES", 2**20)


def test_each_rate_is_its_work_over_its_seconds(monkeypatch):
    seconds = iter([0.5, 0.5, 0.5, 1.0, 0.5])  # two products, attention and with its gradient, a copy
    monkeypatch.setattr(_probe_details, "best_seconds", lambda *_, **__: next(seconds))
    scores = 32 * 32 * 8 * 64  # length^2 x heads x width: one product, halved by the mask, times two
    assert _probe_details.details() == {
        "matmul fp32 16, FLOP/s": 2 * 16**3 / 0.5,
        "matmul bf16 16, FLOP/s": 2 * 16**3 / 0.5,
        "attention 32, FLOP/s": 2 * scores / 0.5,
        "gradient of attention 32, FLOP/s": 5 * scores / 0.5,
        "copy of 1 MiB, bytes/s": 2 * 2**20 / 0.5,
    }


def test_everything_is_measured_on_this_machine():
    found = _probe_details.details()
    assert len(found) == 5
    assert all(rate > 0 for rate in found.values())
