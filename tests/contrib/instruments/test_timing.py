import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.contrib.instruments import Timing
from meshwright.measure import Percentiles, StepClock


def test_a_function_is_called_as_often_as_said_and_dispatch_is_within_execution():
    calls = []

    def work(x, *, scale):
        calls.append(scale)
        return x * scale

    timing = mw.clock(work, jnp.ones(100), scale=2, warm_up=3, repeats=5)
    assert calls == [2] * 8
    assert timing.num_repeats == timing.execution_seconds.num_steps == 5
    assert 0 < timing.dispatch_seconds.median <= timing.execution_seconds.median
    assert timing.execution_seconds.low <= timing.execution_seconds.median <= timing.execution_seconds.high
    assert timing.waited_for == "1 jax array on cpu:0"


def test_the_first_call_is_told_apart():
    assert mw.clock(jax.jit(lambda x: x @ x), jnp.ones((64, 64))).first_call_seconds > 0


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda: np.zeros(3), "nothing asynchronous: numpy"),
        (lambda: 3.0, "nothing asynchronous: a value of the host"),
        (lambda: {"a": jnp.ones(1), "b": [jnp.ones(2), 3]}, "2 jax arrays on cpu:0"),
    ],
)
def test_it_says_what_it_waited_for(fn, words):
    assert mw.clock(fn, warm_up=1, repeats=1).waited_for == words


class Unregistered:
    pass


@pytest.mark.parametrize("result", [3.0, np.ones(2), "text"])
def test_what_is_ready_when_the_call_returns_is_executed_when_it_is_dispatched(result):
    timing = mw.clock(lambda: result)
    assert timing.execution_seconds == timing.dispatch_seconds


def test_records_and_mappings_that_are_no_pytrees_are_looked_into():
    class Output(collections.OrderedDict):  # as Hugging Face's
        pass

    @dataclasses.dataclass
    class Record:
        loss: jax.Array
        outputs: Output

    made = lambda: Record(jnp.ones(2), Output(logits=jnp.ones(3), hidden=(jnp.ones(4), None)))  # noqa: E731
    assert mw.clock(made).waited_for == "3 jax arrays on cpu:0"


@pytest.mark.parametrize("result", [Unregistered(), (3.0, Unregistered())])
def test_a_number_does_not_hide_what_cannot_be_waited_for(result):
    with pytest.raises(mw.InputError, match=r"Unregistered.*: nothing to wait for"):
        mw.clock(lambda: result)


def test_a_deleted_result_is_never_ready():
    def deletes():
        array = jnp.ones(3)
        array.delete()
        return {"a": array}

    with pytest.raises(mw.InputError, match=r"result 0, a jax array of shape \[3\], is deleted"):
        mw.clock(deletes)


def test_work_queued_earlier_is_done_before_the_first_call():
    square = jnp.ones((1500, 1500))
    earlier = jax.jit(lambda a: a @ a @ a @ a)(square)
    ready = []
    mw.clock(lambda: ready.append(earlier.is_ready()) or 1.0, warm_up=1, repeats=1)
    assert ready == [True, True]


def test_earlier_work_that_failed_is_not_this_functions(monkeypatch):
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(jax, "live_arrays", lambda: [Failed()])
    assert mw.clock(lambda: jnp.ones(2)).waited_for == "1 jax array on cpu:0"


@pytest.mark.parametrize("result", [None, [], {}])
def test_what_returns_nothing_cannot_be_timed(result):
    with pytest.raises(
        mw.InputError, match=f"the function returned {type(result).__name__}: nothing to wait"
    ):
        mw.clock(lambda: result)


@pytest.mark.parametrize(
    ("arguments", "words"), [(dict(repeats=0), "repeats = 0"), (dict(warm_up=0), "warm_up = 0")]
)
def test_it_needs_a_call_to_warm_up_and_one_to_time(arguments, words):
    with pytest.raises(mw.InputError, match=words):
        mw.clock(lambda: 1, **arguments)


def test_a_result_is_not_a_function():
    with pytest.raises(mw.InputError, match="3 is not a function"):
        mw.clock(3)


def test_a_function_that_gives_up_its_argument_cannot_be_called_twice():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    with pytest.raises(mw.InputError, match=r"shape \[4\] is deleted after call 1: the function donates it"):
        mw.clock(donating, jnp.ones(4))


def test_a_traced_argument_has_no_time():
    with pytest.raises(mw.InputError, match="argument 0 is a traced value"):
        jax.jit(lambda x: mw.clock(jnp.sin, x))(jnp.ones(3))


def test_a_traced_value_inside_an_argument_is_named():
    with pytest.raises(mw.InputError, match=r"argument batch\['x'\] is a traced value"):
        jax.jit(lambda x: mw.clock(lambda batch: batch["x"], batch={"x": x}))(jnp.ones(3))


def test_a_leaked_value_inside_the_function_is_explained():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(jnp.ones(3))
    with pytest.raises(mw.InputError, match=r"a traced value \(float32\[3\]\) is used outside the function"):
        mw.clock(lambda: jnp.sin(kept[0]) + 1)


def test_what_the_function_itself_raises_passes():
    with pytest.raises(KeyError):
        mw.clock(lambda: {}["nothing"])


def test_a_condition_on_a_value_that_the_function_traces_keeps_jaxs_words():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        mw.clock(jax.jit(lambda x: 1 if x > 0 else 2), 1.0)


def test_arrays_on_several_devices_are_waited_for(mesh):
    split = jax.sharding.NamedSharding(mesh(data=8), jax.sharding.PartitionSpec("data"))
    spread = jax.jit(lambda: jnp.ones(16), out_shardings=split)
    assert mw.clock(spread, warm_up=1, repeats=1).waited_for == "1 jax array on 8 devices"


def test_arrays_of_two_devices_are_named_with_their_devices_and_the_mend(mesh):
    a, b = (jax.device_put(jnp.ones((4, 4)), device) for device in jax.devices()[:2])
    for step in (lambda a, b: a @ b, jax.jit(lambda a, b: a @ b)):
        with pytest.raises(mw.InputError) as refused:
            mw.clock(step, a, b)
        assert "argument a of" in refused.value.message
        assert "on device 0 (CPU)" in refused.value.message
        assert "on device 1 (CPU)" in refused.value.message
        assert "jax.device_put(y, x.sharding)" in refused.value.hint
        assert "()" not in refused.value.hint.replace("P()", "")  # there is no layout to name
    assert mw.clock(lambda a, b: a @ jax.device_put(b, a.sharding), a, b).num_repeats == 10


def test_tensors_of_two_devices_are_named_too():
    torch = pytest.importorskip("torch")
    with pytest.raises(mw.InputError, match="argument 0 on cpu, argument 1 on meta") as refused:
        mw.clock(lambda a, b: a + b, torch.ones(3), torch.ones(3, device="meta"))
    assert "y.to(x.device)" in refused.value.hint


def test_it_reads_as_a_table():
    timing = Timing(
        dispatch_seconds=Percentiles(median=1e-5, low=9e-6, high=2e-5, num_steps=10),
        execution_seconds=Percentiles(median=1e-3, low=9e-4, high=2e-3, num_steps=10),
        first_call_seconds=0.5,
        num_repeats=10,
        waited_for="2 jax arrays on cpu:0",
    )
    assert str(timing).splitlines() == [
        "            median      5 %     95 %",
        "dispatch   10.0 us  9.00 us  20.0 us",
        "execution  1.00 ms   900 us  2.00 ms",
        "of 10 calls; first call 500 ms; waited for 2 jax arrays on cpu:0",
    ]


def test_eight_threads_time_at_once(at_once):
    timings = at_once(lambda: mw.clock(jnp.sin, jnp.ones(10), repeats=2))
    assert [timing.num_repeats for timing in timings] == [2] * 8


def test_pytorch_on_a_cpu_does_not_run_ahead():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    assert mw.clock(lambda: torch.ones(3)).waited_for == "nothing asynchronous: torch on a CPU"


def test_pytorch_on_an_accelerator_is_waited_for(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu:1")

    fn = lambda: (torch.ones(3).as_subclass(Elsewhere), jnp.ones(2))  # noqa: E731
    timing = mw.clock(fn, warm_up=1, repeats=2)
    assert timing.waited_for == "1 jax array on cpu:0 and torch tensors on xpu:1"
    assert waited == ["xpu:1"] * 3


def test_what_pytorch_only_pretends_to_compute_cannot_be_timed():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(mw.InputError, match="the function returned Tensor: nothing to wait"):
        mw.clock(lambda: torch.ones(3, device="meta"))


def test_a_fake_tensor_cannot_be_timed():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(mw.InputError, match="the function returned FakeTensor: nothing"):
        mw.clock(lambda: torch.ones(3))


def clock_reading(*times: float) -> StepClock:
    readings = iter(times)
    return StepClock(lambda: next(readings))


def test_a_tick_is_the_time_since_the_one_before_and_start_leaves_a_gap_out():
    clock = clock_reading(0, 10, 11, 13, 100, 104)
    clock.start()
    assert [clock.tick(), clock.tick()] == [1, 2]
    clock.start()  # evaluation took from 13 to 100
    assert clock.tick() == 4
    assert clock.seconds == [1, 2, 4]


def test_the_spread_leaves_the_first_two_steps_out():
    clock = clock_reading(0, 50, 90, *(90 + t for t in (1, 2, 3, 4, 5)))
    for _ in range(7):
        clock.tick()
    spread = clock.spread()
    assert spread is not None
    assert (spread.median, spread.num_steps) == (1, 5)


def test_nine_in_ten_steps_lie_between_low_and_high():
    clock, now = clock_reading(0, 1, 2, *(2 + n * (n + 1) / 2 for n in range(1, 102))), 103
    for _ in range(now):
        clock.tick()  # two warm-up steps, then 1, 2, ... 101 seconds
    spread = clock.spread()
    assert spread is not None
    assert (spread.low, spread.median, spread.high) == pytest.approx((6, 51, 96))


def test_two_steps_give_no_spread():
    clock = clock_reading(0, 3, 5)
    clock.tick()
    clock.tick()
    assert clock.spread() is None
