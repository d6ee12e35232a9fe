import jax
import pytest

from meshwright.measure import _probe_kernels as _probe_attention


def test_the_backward_kernel_is_what_the_gradient_takes_more(monkeypatch):
    left = iter([0.5, 1.5])
    monkeypatch.setattr(_probe_attention, "best_seconds", lambda *_, **__: next(left))
    found = _probe_attention.measured(64, 32, 2, "xla")
    product = 2 * (2 * 8 * 32 * 32 * 64) / 2  # multiply-adds of 2 sequences x 8 heads, halved by the mask
    assert found.forward_flops_per_second == 2 * product / 0.5
    assert found.backward_flops_per_second == 5 * product / 1.0


def test_a_gradient_that_noise_made_shorter_gives_a_positive_rate(monkeypatch):
    left = iter([1.5, 0.5])
    monkeypatch.setattr(_probe_attention, "best_seconds", lambda *_, **__: next(left))
    assert _probe_attention.measured(64, 32, 1, "xla").backward_flops_per_second > 0


def test_it_runs_where_there_is_no_fused_kernel():
    found = _probe_attention.measured(16, 32, 1, "xla")
    assert found.forward_flops_per_second > 0
    assert found.backward_flops_per_second > 0


def test_a_cpu_has_no_fused_kernel_to_measure():
    assert _probe_attention.attention_rates() == ()


def test_a_gpu_is_measured_by_head_size_and_length(monkeypatch):
    gpu = type("Gpu", (), {"platform": "gpu"})()
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    asked = []
    plain = _probe_attention.measured

    def remember(head_size, length, sequences, implementation):
        asked.append((head_size, length, sequences, implementation))
        return plain(8, 16, 1, "xla")

    monkeypatch.setattr(_probe_attention, "best_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(_probe_attention, "measured", remember)
    assert len(_probe_attention.attention_rates()) == 6
    assert (128, 4096, 4, "cudnn") in asked


@pytest.mark.parametrize("length", _probe_attention.LENGTHS)
def test_every_launch_has_as_many_tokens(length):
    assert _probe_attention.TOKENS % length == 0
