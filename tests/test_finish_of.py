"""When a run is finished: what faults, checkpoints and restarts take, and what is not known."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from datetime import date, datetime

import pytest

from meshwright.contrib.finishing import Operations, OwnHistory, Workload, best_period, failures, finish_of
from meshwright.contrib.finishing._failures import FaultRate, LogNormal, faults_by_chance, work_again
from meshwright.errors import InputError
from meshwright.predict import Interval

DAY = 86400
KNOWN = Interval(low=10.0, expected=10.0, high=10.0)
WORK = Workload(step_seconds=KNOWN, steps=30 * 8640, hosts=128, chips_per_host=8)  # 30 days of steps
SURE = Operations(
    start="2026-12-01",
    restart="automatic",
    restart_seconds=600,
    checkpoint_seconds=30,
    failures="5000000 in 1000000000 node-days",
)


def test_a_run_without_surprises_takes_what_a_hand_reckons():
    made = finish_of(WORK, SURE)
    between = DAY / (128 * 5 / 1000)  # 37.5 h between faults of the run
    period = math.sqrt(2 * 30 * between)  # Young's rule
    assert made.save_every_seconds == pytest.approx(period, rel=0.02)
    lost_of_steps = 30 / period + period / 2 / between + 600 / between
    beside = made.shares["checkpoints"] + made.shares["lost"] + made.shares["restarts"]
    people = made.shares["restarts"] - 600 / between * made.shares["steps"]  # incidents that need a person
    assert (beside - people) / made.shares["steps"] == pytest.approx(lost_of_steps, rel=0.05)
    assert made.seconds.low < 30 * DAY * (1 + lost_of_steps) * 1.03
    assert made.interruptions.expected == pytest.approx(30 * DAY / between, rel=0.25)


def test_the_best_period_is_where_a_simulation_of_faults_loses_least():
    def lost(period: float) -> float:  # by chance, fault by fault
        chance, done, spent = random.Random(3), 0.0, 0.0
        left = chance.expovariate(1 / 7200)
        while done < 4e6:
            if left < period + 60:
                spent, left = spent + left, chance.expovariate(1 / 7200)
            else:
                spent, left, done = spent + period + 60, left - period - 60, done + period
        return spent / done

    best = best_period(60, 7200)
    assert lost(best) < min(lost(best / 2.5), lost(best * 2.5))
    assert best_period(60, 20) == 20  # faults come faster than checkpoints are made


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"restart": "automatic"}, {"restart": "manual"}),
        ({"checkpoint_seconds": 1}, {"checkpoint_seconds": 100}),
        ({"restart_seconds": 60}, {"restart_seconds": 7200}),
        ({"spares": 8}, {"spares": 0}),
        ({"failures": "1 in 9000 node-days"}, {"failures": "900 in 9000 node-days"}),
        ({}, {"spot_hours": 200}),
    ],
)
def test_each_answer_moves_the_day(better, worse):
    first, last = (finish_of(WORK, Operations(**answer)) for answer in (better, worse))
    assert first.seconds.expected < last.seconds.expected
    assert first.useful_share.expected > last.useful_share.expected


def test_an_answer_that_is_missing_is_asked_for_and_widens_the_interval():
    asked, answered = finish_of(WORK, Operations()), finish_of(WORK, SURE)
    for option in (
        "--restart automatic or manual",
        "--checkpoint-seconds S",
        '--failures "N in M node-days"',
    ):
        assert sum(option in question for question in asked.questions) == 1
    assert asked.save_every_seconds is None  # of unknown seconds, no number is made up
    assert not answered.questions
    width = [each.seconds.high - each.seconds.low for each in (asked, answered)]
    assert width[0] > 3 * width[1]


def test_ones_own_history_replaces_the_published_rates():
    prior = FaultRate.of_published()
    rates = [row["value"] for row in failures()["rate"]]
    assert min(rates) < prior.mean < max(rates)
    little, much = prior.updated(20, 1000), prior.updated(20_000, 1_000_000)
    assert prior.mean < little.mean < much.mean == pytest.approx(20, rel=0.01)
    draws = [prior.draw(random.Random(seed)) * 1000 for seed in range(2000)]
    within = sum(min(rates) <= draw <= max(rates) for draw in draws) / len(draws)
    assert 0.6 < within < 0.95  # six clusters, with one further than the others


def test_counts_come_in_bursts_as_in_the_published_trace():
    chance = random.Random(1)
    counts = [faults_by_chance(60.0, chance) for _ in range(3000)]
    assert statistics.fmean(counts) == pytest.approx(60, rel=0.03)
    assert statistics.variance(counts) / 60 == pytest.approx(1.76**2, rel=0.1)


def test_a_source_can_be_left_out_and_every_figure_has_one():
    groups = ("rate", "automatic", "manual", "incident", "checkpoint")
    for group in groups:
        for row in failures()[group]:
            assert row["source"]
            assert row["basis"] in ("computed", "stated")
    assert LogNormal.of("manual", ["opt"]).median == pytest.approx(38_100)
    with_all, without = finish_of(WORK, Operations()), finish_of(WORK, Operations(), without=["opt"])
    assert without.interruptions.expected < with_all.interruptions.expected


def test_days_are_said_as_people_write_them():
    now = datetime(2026, 11, 28, 12)
    (line, *_) = finish_of(WORK, SURE).texts(now)
    assert line.startswith(("31 Dec (80 %: 31 Dec", "1 Jan 2027 (80 %: 31 Dec"))
    assert "checkpoint every" in line
    short = finish_of(replace(WORK, steps=60, start_seconds=100.0), Operations(restart="automatic"))
    assert short.texts(now)[0].startswith("12:11 (80 %: ")  # ten minutes of steps, and the start
    assert not short.never
    open_end = replace(WORK, step_seconds=Interval(low=9.0, expected=10.0, high=None))
    assert "no upper end" in finish_of(open_end, SURE).texts(now)[0]
    assert finish_of(open_end, SURE).to_dict(datetime(2026, 12, 1))["finish_date"]["high"] is None


def test_a_run_that_makes_no_progress_is_said_to_end_never():
    hopeless = replace(SURE, checkpoint_seconds=7200, spot_hours=1.0)
    made = finish_of(WORK, hopeless)
    assert made.never
    assert made.texts(datetime(2026, 12, 1))[0].startswith("never: ")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"start": "tomorrow"}, "is no date"),
        ({"restart": "maybe"}, "restart 'maybe'"),
        ({"failures": "many"}, "as a history of failures"),
        ({"failures": "3 in 0 node-days"}, "as a history of failures"),
        ({"spares": -1}, "spares of -1"),
        ({"restart_seconds": math.nan}, "restart seconds of nan"),
        ({"spot_hours": 0}, "spot hours of 0"),
        ({"spot_hours": "3"}, "spot hours of '3'"),
        ({"spares": 1.5}, "spares of 1.5"),
        ({"start": 5}, "start 5 is no date"),
    ],
)
def test_an_answer_that_is_none_is_refused_in_words(answer, words):
    with pytest.raises(InputError, match=words) as refused:
        Operations(**answer)
    assert refused.value.hint


@pytest.mark.parametrize("name", ["restart_seconds", "checkpoint_seconds", "spares", "spot_hours"])
@pytest.mark.parametrize("wrong", [-1, 1e12, math.nan])
def test_what_lies_outside_of_a_range_is_refused_with_the_range(name, wrong):
    with pytest.raises(InputError) as refused:
        Operations(**{name: wrong})
    assert refused.value.hint.endswith(" to 1e+09")


def test_more_spares_than_hosts_wait_for_none():
    work = replace(WORK, hosts=2)
    assert finish_of(work, replace(SURE, spares=10**9)).shares["waiting"] == pytest.approx(0)


def test_a_run_that_begins_in_the_evening_ends_by_its_own_hours():
    finish = finish_of(replace(WORK, steps=20 * 360), replace(SURE, start=None))  # 20 h of steps, and more
    late, early = datetime(2026, 12, 1, 23), datetime(2026, 12, 1, 0, 30)
    day = finish.seconds.expected / DAY
    assert 0.8 < day < 0.98
    assert finish.day(finish.seconds.expected, early) == early.date()
    assert finish.day(finish.seconds.expected, late) == date(2026, 12, 2)


def test_a_day_beyond_the_calendar_is_not_named():
    finish = finish_of(replace(WORK, steps=10**13), SURE)
    assert finish.texts(datetime(2026, 12, 1))[0].startswith("after the year 9999, ")


def simulated_share(gap, period: float, saving: float, restart: float, faults: int) -> tuple[float, float]:
    """The useful share of a run that is simulated fault by fault, and its standard error.

    Args:
        gap: a function that returns the time until the next fault, while the run is up.
    """
    useful, spent = [], []
    for _ in range(faults):
        up = gap()
        useful.append(period * (up // (period + saving)))  # what has no checkpoint is lost
        spent.append(up + restart)
    share = sum(useful) / sum(spent)
    errors = [a - share * b for a, b in zip(useful, spent, strict=True)]
    return share, statistics.pstdev(errors) * math.sqrt(faults) / sum(spent)


def bursts(mean: float, chance: random.Random):
    """Gaps that vary as those of the published trace: short and long ones, with half of the time each."""
    lean = math.sqrt((1.76**2 - 1) / (1.76**2 + 1))

    def gap() -> float:
        side = lean if chance.random() < (1 + lean) / 2 else -lean
        return chance.expovariate((1 + side) / mean)

    gaps = [gap() for _ in range(200_000)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1.76, rel=0.02)
    return gap


@pytest.mark.parametrize(("saving", "restart"), [(30.0, 600.0), (600.0, 0.0), (5400.0, 7200.0)])
def test_the_useful_share_is_that_of_a_simulation_whose_faults_come_in_bursts(saving, restart):
    between = DAY / (128 * 5 / 1000)
    period = best_period(saving, between)
    seen, error = simulated_share(bursts(between, random.Random(2)), period, saving, restart, 200_000)
    span = (period + saving) / between
    reckoned = period / (period + saving) / work_again(span) / (1 + restart / between)
    assert error < 0.002
    assert abs(reckoned - seen) < 3 * error

    known = replace(SURE, checkpoint_seconds=saving, restart_seconds=restart)
    shares = finish_of(replace(WORK, steps=10**8), known).shares  # so long that chance evens out
    up = shares["steps"] + shares["checkpoints"] + shares["lost"]
    assert shares["steps"] / up / (1 + restart / between) == pytest.approx(seen, rel=0.005)


def test_the_best_period_of_faults_one_by_one_is_near_the_best_of_bursts():
    between = DAY / (128 * 5 / 1000)

    def share(period: float) -> float:
        return period / (period + 30) / work_again((period + 30) / between)

    named = best_period(30, between)
    best = max(share(named * factor) for factor in (0.5, 0.7, 0.85, 1, 1.15, 1.3, 1.6, 2))
    assert share(named) == pytest.approx(best, rel=1e-3)


def test_a_run_that_is_shorter_than_its_period_of_checkpoints_names_none():
    made = finish_of(replace(WORK, steps=60), SURE)  # ten minutes of steps
    assert made.save_every_seconds is None
    assert made.save_every_steps is None
    assert "checkpoint every" not in " ".join(made.texts(datetime(2026, 12, 1)))
    assert finish_of(WORK, SURE).save_every_seconds is not None


def test_a_run_that_saves_too_rarely_is_estimated_so_and_told_the_better_period():
    rare = replace(WORK, save_every=8640)  # a day
    made = finish_of(rare, SURE, period_seconds=86400.0)
    assert made.useful_share.expected < finish_of(rare, SURE).useful_share.expected - 0.05
    (note,) = made.notes
    assert f"--set checkpoint.every_steps={made.save_every_steps}" in note
    assert note in finish_of(rare, SURE).notes


def test_what_happened_to_a_run_updates_what_was_published():
    month = 30 * DAY
    quiet, bad = OwnHistory(up_seconds=month), OwnHistory(faults=300, up_seconds=month)
    before, better, worse = (finish_of(WORK, Operations(), own=own) for own in (OwnHistory(), quiet, bad))
    expected = [made.interruptions.expected for made in (better, before, worse)]
    assert expected == sorted(expected)
    assert expected[2] > 5 * expected[0]
    assert better.seconds.expected < before.seconds.expected < worse.seconds.expected

    quick = finish_of(WORK, Operations(), own=replace(bad, restart_seconds=(120.0,) * 300))
    slow = finish_of(WORK, Operations(), own=replace(bad, restart_seconds=(36_000.0,) * 300))
    assert quick.seconds.expected < slow.seconds.expected
    for made in (quick, slow):  # its own restarts say who restarts it
        assert not any("--restart automatic or manual" in question for question in made.questions)
    assert any("--restart automatic or manual" in question for question in before.questions)


def test_ones_own_waits_replace_the_published_ones():
    prior = LogNormal.of("automatic")
    few, many = prior.updated([60.0] * 3), prior.updated([60.0] * 3000)
    assert prior.median > few.median > many.median == pytest.approx(60, rel=0.05)
    assert prior.log_sd > few.log_sd > many.log_sd
    assert LogNormal.known(5.0).updated([60.0]) == LogNormal.known(5.0)  # an answer stays
