import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict import Interval, checked_price, run_total, steps_for


def test_hours_and_cost_of_a_run_worked_out_by_hand():
    step = Interval(low=45.0, expected=60.0, high=90.0)
    found = run_total(step, steps=600, tokens_per_step=1000, num_devices=8, price_per_device_hour=2.5)
    assert (found.steps, found.tokens) == (600, 600_000)
    assert found.seconds == Interval(low=27_000.0, expected=36_000.0, high=54_000.0)
    assert found.device_hours.expected == pytest.approx(80.0)  # ten hours on eight devices
    assert (found.cost.low, found.cost.expected, found.cost.high) == pytest.approx((150.0, 200.0, 300.0))
    free = run_total(step, steps=600, tokens_per_step=1000, num_devices=8, price_per_device_hour=None)
    assert free.cost is None


@pytest.mark.parametrize(
    ("tokens", "per_step", "steps"),
    [("15B", 4_194_304, 3577), (15e9, 4_194_304, 3577), (1, 512, 1), (512, 512, 1), ("513", 512, 2)],
)
def test_steps_read_at_least_the_tokens_asked_for(tokens, per_step: int, steps: int):
    assert steps_for(tokens, per_step) == steps


@given(st.integers(1, 10**18), st.integers(1, 10**9))
def test_one_step_less_would_not_read_them_all(tokens: int, per_step: int):
    steps = steps_for(tokens, per_step)
    assert (steps - 1) * per_step < tokens <= steps * per_step


@pytest.mark.parametrize(
    "tokens", [0, -5, 10**400, 2e18, float("inf"), float("nan"), "0", "1e99", "-5", "abc"]
)
def test_tokens_that_are_no_run_are_refused_in_words(tokens):
    with pytest.raises(InputError, match=r"tokens of a run|as a count") as refused:
        steps_for(tokens, 512)
    assert "15" in refused.value.hint
    assert len(refused.value.message) < 100


def test_a_count_of_thousands_of_digits_is_refused_in_words():
    with pytest.raises(InputError, match=r"cannot read '9+\.\.\.' as a count"):
        steps_for("9" * 5000, 512)


@pytest.mark.parametrize(
    "price", [0, -1.8, float("nan"), float("inf"), 1e300, "", "$1.80", "free", "x" * 999]
)
def test_what_is_no_price_is_refused_in_words(price):
    with pytest.raises(InputError, match="is not a price of a device-hour") as refused:
        checked_price(price)
    assert "1.80" in refused.value.hint


def test_a_price_is_a_number_or_its_text():
    assert checked_price(2) == checked_price(" 2.0 ") == 2.0


def test_more_steps_than_any_run_has_are_refused_in_words():
    step = Interval(low=1.0, expected=1.0, high=1.0)
    with pytest.raises(InputError, match="1e18 steps"):
        run_total(step, steps=10**400, tokens_per_step=1, num_devices=1, price_per_device_hour=None)
