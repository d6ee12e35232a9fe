import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from meshwright.contrib.calibration import _probe
from meshwright.hardware import COLLECTIVE_KINDS, Calibration

MADE = Calibration(
    matmul_flops_per_second={"fp32": 1e11},
    memory_bytes_per_second=1e10,
    launch_seconds=1e-6,
    date="2026-11-21",
    source="made up by a test",
)


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    for name, value in {"SQUARE": 64, "ROWS": 64, "COLUMNS": 256, "LAUNCH_CHAINS": (2, 10)}.items():
        monkeypatch.setattr(_probe, name, value)


def timed(monkeypatch, *seconds: float) -> None:
    """Each measurement takes so long, one after the other."""
    left = iter(seconds)
    monkeypatch.setattr(_probe, "best_seconds", lambda *args, **kwargs: next(left))


def test_a_product_of_n_is_two_n_cubed_flops(monkeypatch):
    timed(monkeypatch, 0.5)
    assert _probe.matmul_flops_per_second(jnp.float32, 64) == 2 * 64**3 / 0.5


def test_fused_kernels_are_all_their_bytes_over_all_their_seconds(monkeypatch):
    timed(monkeypatch, 1, 2, 3, 4, 10)
    arrays = 2 + 3 + 2 + 2 + 7  # read and written: GELU, its gradient, softmax, RMSNorm, AdamW
    assert _probe.fused_bytes_per_second() == 64 * 256 * 4 * arrays / 20


def test_a_launch_is_what_a_longer_chain_takes_more(monkeypatch):
    timed(monkeypatch, 5.0, 1.0)
    assert _probe.launch_seconds() == 4.0 / 8


def test_launches_are_measured_on_several_simulated_devices_at_once():
    found = _probe.launch_seconds_by_devices()
    assert list(found) == [2, 4, 8]
    assert all(seconds > 0 for seconds in found.values())


def test_noise_that_makes_the_longer_chain_shorter_gives_no_negative_time(monkeypatch):
    timed(monkeypatch, 1.0, 1.1)
    assert _probe.launch_seconds() == _probe.LEAST_SECONDS  # the tick of the clock


def test_the_kernels_are_those_of_a_train_step():
    x = jax.random.normal(jax.random.key(0), (8, 16))
    gradient = jax.random.normal(jax.random.key(1), (8, 16))
    expected = jax.grad(lambda x: jnp.sum(gradient * jax.scipy.stats.norm.cdf(x) * x))(x)
    np.testing.assert_allclose(_probe.gelu_gradient(x, gradient), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.mean(np.square(_probe.rms_norm(x)), axis=-1), 1, rtol=1e-3)
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1)
    moments = jax.tree.map(lambda leaf: leaf, optimizer.init(x))
    # Late in a run, where optax has nothing left to correct: it divides by 1 - b ** count.
    adam = moments[0]._replace(count=jnp.int32(10**6))
    updates, after = optimizer.update(gradient, (adam, *moments[1:]), x)
    parameter, first, second = _probe.adamw(x, jnp.zeros_like(x), jnp.zeros_like(x), gradient)
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


def test_the_best_of_several_runs_is_taken(monkeypatch):
    readings = iter([0, 9, 10, 12, 20, 25])
    monkeypatch.setattr(_probe, "REPEATS", 3)
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    assert _probe.best_seconds(jnp.sin, (jnp.ones(3),)) == 2


def test_in_place_results_become_the_next_arguments():
    first, second = jnp.ones(4), jnp.ones(4)
    assert _probe.best_seconds(lambda a, b: (a + b,), (first, second), in_place=True) > 0
    assert first.is_deleted()
    assert not second.is_deleted()


@pytest.mark.parametrize(
    ("rounds", "better", "expected"),
    [
        ([10.0, 10.2], max, (10.2, 0.02)),  # the two best agree at once
        ([5.0, 10.0, 7.0, 9.8, 1.0], max, (10.0, 10 / 9.8 - 1)),  # a busy moment passes
        ([4.0, 2.0, 3.0, 2.05], min, (2.0, 0.025)),
        (
            [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
            max,
            (32.0, 1.0),
        ),  # never steady: six rounds, and its spread
    ],
)
def test_a_rate_is_measured_until_its_two_probe_rounds_agree(rounds, better, expected):
    left = iter(rounds)
    assert _probe.steady(lambda: next(left), better) == pytest.approx(expected)


def test_the_backward_kernel_is_what_the_gradient_takes_more(monkeypatch):
    left = iter([0.5, 1.5])
    monkeypatch.setattr(_probe, "best_seconds", lambda *_, **__: next(left))
    found = _probe.attention_rate(64, 32, 2, "xla")
    product = 2 * (2 * 8 * 32 * 32 * 64) / 2  # multiply-adds of 2 sequences x 8 heads, halved by the mask
    assert found.forward_flops_per_second == 2 * product / 0.5
    assert found.backward_flops_per_second == 5 * product / 1.0


def test_a_gradient_that_noise_made_shorter_gives_a_positive_rate(monkeypatch):
    left = iter([1.5, 0.5])
    monkeypatch.setattr(_probe, "best_seconds", lambda *_, **__: next(left))
    assert _probe.attention_rate(64, 32, 1, "xla").backward_flops_per_second > 0


def test_it_runs_where_there_is_no_fused_kernel():
    found = _probe.attention_rate(16, 32, 1, "xla")
    assert found.forward_flops_per_second > 0
    assert found.backward_flops_per_second > 0


def test_a_cpu_has_no_fused_kernel_to_measure():
    assert _probe.attention_rates() == ()


def test_a_gpu_is_measured_by_head_size_and_length(monkeypatch):
    gpu = type("Gpu", (), {"platform": "gpu"})()
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    asked = []
    plain = _probe.attention_rate

    def remember(head_size, length, sequences, implementation):
        asked.append((head_size, length, sequences, implementation))
        return plain(8, 16, 1, "xla")

    monkeypatch.setattr(_probe, "best_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(_probe, "attention_rate", remember)
    assert len(_probe.attention_rates()) == 6
    assert (128, 4096, 16, "cudnn") in asked


@pytest.mark.parametrize("length", _probe.LENGTHS)
def test_every_launch_has_as_many_tokens(length):
    assert _probe.TOKENS % length == 0


@pytest.fixture
def small_messages(monkeypatch):
    monkeypatch.setattr(_probe, "REPEATS", 1)
    for name, value in {"LARGE_BYTES": 2**13, "SMALL_BYTES": 2**10, "MESSAGE_CHAINS": (2, 3)}.items():
        monkeypatch.setattr(_probe, name, value)


@pytest.mark.usefixtures("small_messages")
def test_every_kind_and_group_of_eight_devices_is_measured():
    found = _probe.collective_rates()
    assert [(each.kind, each.group_size) for each in found] == [
        (kind, size) for kind in COLLECTIVE_KINDS for size in (2, 4, 8)
    ]
    assert all(each.bytes_per_second > 0 and each.latency_seconds > 0 for each in found)


def test_one_device_sends_nothing(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    assert _probe.collective_rates() == ()


@pytest.mark.usefixtures("small_messages")
def test_rates_are_what_a_large_message_and_a_longer_chain_take_more(monkeypatch):
    taken = {(2**13, 0): 3.0, (2**10, 0): 1.0, (2**10, 2): 5.0, (2**10, 3): 9.0}
    monkeypatch.setattr(_probe, "message_seconds", lambda kind, size, *at: taken[at])
    found = _probe.collective_rate("all-reduce", 4, 8)
    assert found.bytes_per_second == 8 * 2 * (2**13 - 2**10) * 3 / 4 / 2.0
    assert found.latency_seconds == 4.0


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_each_program_is_one_collective_of_its_kind_among_groups_of_that_size(monkeypatch, kind):
    made = []

    def compile_only(function, arguments):
        made.append(jax.jit(function).lower(*arguments).compile().as_text())
        return 1.0

    monkeypatch.setattr(_probe, "best_seconds", compile_only)
    _probe.message_seconds(kind, 4, 2**10, 0)
    _probe.message_seconds(kind, 4, 2**10, 3)
    single, chain = (text.count(f" {kind}(") for text in made)
    assert (single, chain) == (1, 3)
    groups = (
        "{{0,1,2,3},{4,5,6,7}}",
        "[2,4]<=[8]",
        "mesh['groups'=2,'members'=4] {'members'}",
    )  # jax 0.10 to 0.12
    assert any(f"replica_groups={form}" in made[0] for form in groups)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_a_link_of_the_chain_keeps_shape_and_mean(kind):
    collective, back, _ = _probe.KINDS[kind]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("groups", "members"))
    spread = jax.shard_map(
        lambda x: back(collective(x), 4),
        mesh=mesh,
        in_specs=_probe.SPLIT,
        out_specs=_probe.SPLIT,
    )
    ones = np.ones(512, np.float32)
    np.testing.assert_allclose(spread(ones), ones)


@pytest.fixture
def small_details(monkeypatch):
    monkeypatch.setattr(_probe, "CPU_SIZES", (16,))
    monkeypatch.setattr(_probe, "CPU_LENGTHS", (32,))
    monkeypatch.setattr(_probe, "COPIED_BYTES", 2**20)


@pytest.mark.usefixtures("small_details")
def test_each_rate_is_its_work_over_its_seconds(monkeypatch):
    seconds = iter([0.5, 0.5, 0.5, 1.0, 0.5])  # two products, attention and with its gradient, a copy
    monkeypatch.setattr(_probe, "best_seconds", lambda *_, **__: next(seconds))
    scores = 32 * 32 * 8 * 64  # length^2 x heads x width: one product, halved by the mask, times two
    assert _probe.details() == {
        "matmul fp32 16, FLOP/s": 2 * 16**3 / 0.5,
        "matmul bf16 16, FLOP/s": 2 * 16**3 / 0.5,
        "attention 32, FLOP/s": 2 * scores / 0.5,
        "gradient of attention 32, FLOP/s": 5 * scores / 0.5,
        "copy of 1 MiB, bytes/s": 2 * 2**20 / 0.5,
    }


@pytest.mark.usefixtures("small_details")
def test_everything_is_measured_on_this_machine():
    found = _probe.details()
    assert len(found) == 5
    assert all(rate > 0 for rate in found.values())


@pytest.mark.parametrize(("platform", "launched"), [("cpu", 10), ("gpu", 1 + 9 * 20)])
def test_an_accelerator_runs_many_launches_before_the_host_waits(monkeypatch, platform, launched):
    """By a clock that goes on by a millisecond in each launch."""
    launches = []
    compiled = SimpleNamespace(lower=lambda *_: SimpleNamespace(compile=lambda: launches.append))
    monkeypatch.setattr(_probe.jax, "jit", lambda *_, **__: compiled)
    monkeypatch.setattr(_probe.jax, "local_devices", lambda: [SimpleNamespace(platform=platform)])
    monkeypatch.setattr(_probe.time, "perf_counter", lambda: 1e-3 * len(launches))
    assert _probe.best_seconds(abs, (1,)) == pytest.approx(1e-3)
    assert len(launches) == launched
