import jax
import pytest

from meshwright.measure import _probe_details


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_probe_details, "SIZES", {"cpu": (16,)})
    monkeypatch.setattr(_probe_details, "LENGTHS", {"cpu": (32,)})
    monkeypatch.setattr(_probe_details, "COPIED_BYTES", 2**12)
    monkeypatch.setattr(_probe_details, "MESSAGE_BYTES", 2**12)


def test_each_rate_is_its_work_over_its_seconds(monkeypatch):
    monkeypatch.setattr(_probe_details, "best_seconds", lambda *_, **__: 0.5)
    scores = 32 * 32 * 8 * 64  # length^2 x heads x width: one product, halved by the mask, times two
    assert _probe_details.details() == {
        "matmul fp32 16, FLOP/s": 2 * 16**3 / 0.5,
        "matmul bf16 16, FLOP/s": 2 * 16**3 / 0.5,
        "attention 32, FLOP/s": 2 * scores / 0.5,
        "attention and gradient 32, FLOP/s": 7 * scores / 0.5,
        "copy of 64 MiB, bytes/s": 2 * 2**12 / 0.5,
        "all-reduce of 16 MiB over 8, bytes/s sent by one": 2 * 2**12 * 7 / 8 / 0.5,
        "all-gather of 16 MiB over 8, bytes/s sent by one": 2**12 * 7 / 0.5,
    }


def test_everything_is_measured_on_this_machine():
    found = _probe_details.details()
    assert len(found) == 7
    assert all(rate > 0 for rate in found.values())


def test_one_device_sends_nothing(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    assert not [name for name in _probe_details.details() if "over" in name]
