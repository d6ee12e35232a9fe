import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.hardware import Calibration
from meshwright.measure import _probe

MADE = Calibration(
    matmul_flops_per_second={"fp32": 1e11},
    memory_bytes_per_second=1e10,
    launch_seconds=1e-6,
    date="2026-11-21",
    source="made up by a test",
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"SQUARE": 64, "ROWS": 64, "COLUMNS": 256, "SHORT_CHAIN": 2, "LONG_CHAIN": 10}.items():
        monkeypatch.setattr(_probe, name, value)


def timed(monkeypatch, *seconds: float) -> None:
    """Each measurement takes so long, one after the other."""
    left = iter(seconds)
    monkeypatch.setattr(_probe, "best_seconds", lambda *args, **kwargs: next(left))


def test_a_product_of_n_is_two_n_cubed_flops(monkeypatch):
    timed(monkeypatch, 0.5)
    assert _probe._matmul_flops_per_second(jnp.float32) == 2 * 64**3 / 0.5


def test_fused_kernels_are_all_their_bytes_over_all_their_seconds(monkeypatch):
    timed(monkeypatch, 1, 2, 3, 4, 10)
    arrays = 2 + 3 + 2 + 2 + 7  # read and written: GELU, its gradient, softmax, RMSNorm, AdamW
    assert _probe._fused_bytes_per_second() == 64 * 256 * 4 * arrays / 20


def test_a_launch_is_what_a_longer_chain_takes_more(monkeypatch):
    timed(monkeypatch, 5.0, 1.0)
    assert _probe._launch_seconds() == 4.0 / 8


def test_launches_are_measured_on_several_simulated_devices_at_once():
    found = _probe._launch_seconds_among()
    assert list(found) == [2, 4, 8]
    assert all(seconds > 0 for seconds in found.values())


def test_noise_that_makes_the_longer_chain_shorter_gives_no_negative_time(monkeypatch):
    timed(monkeypatch, 1.0, 1.1)
    assert _probe._launch_seconds() == pytest.approx(1e-9 / 8)


def test_the_kernels_are_those_of_a_train_step():
    x = jax.random.normal(jax.random.key(0), (8, 16))
    gradient = jax.random.normal(jax.random.key(1), (8, 16))
    expected = jax.grad(lambda x: jnp.sum(gradient * jax.scipy.stats.norm.cdf(x) * x))(x)
    np.testing.assert_allclose(_probe._gelu_gradient(x, gradient), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.mean(np.square(_probe._rms_norm(x)), axis=-1), 1, rtol=1e-3)
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1)
    moments = jax.tree.map(lambda leaf: leaf, optimizer.init(x))
    # Late in a run, where optax has nothing left to correct: it divides by 1 - b ** count.
    adam = moments[0]._replace(count=jnp.int32(10**6))
    updates, after = optimizer.update(gradient, (adam, *moments[1:]), x)
    parameter, first, second = _probe._adamw(x, jnp.zeros_like(x), jnp.zeros_like(x), gradient)
    np.testing.assert_allclose(parameter, x + updates, rtol=1e-4)
    np.testing.assert_allclose(first, after[0].mu, rtol=1e-6)
    np.testing.assert_allclose(second, after[0].nu, rtol=1e-6)


def test_in_detail_a_cpu_is_eight_simulated_devices(monkeypatch, tmp_path):
    set_to = []
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.append((name, value)))
    monkeypatch.setattr(_probe, "probe", lambda *, detailed: calls.append(detailed) or MADE)
    calls: list[bool] = []
    _probe.main([str(tmp_path / "made.json"), "--detailed"])
    _probe.main([str(tmp_path / "made.json")])
    assert set_to == [("jax_num_cpu_devices", 8)]
    assert calls == [True, False]
    assert Calibration.from_json((tmp_path / "made.json").read_text()) == MADE


def test_devices_that_the_user_simulates_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(_probe, "probe", lambda *, detailed: MADE)
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("set"))
    _probe.main([str(tmp_path / "made.json"), "--detailed"])
