"""Plans of several fleets are compared; a plan finds the smallest fleet, or a larger one, that fits."""

import dataclasses
import json

import pytest

import meshwright as mw
from meshwright.errors import InputError
from meshwright.hardware import Fleet

RUN = {"model.num_layers": 1}  # compiles in two thirds of the time of its two layers
FIXED = ["offload=none", "pipeline=1f1b", "inner=tensor"]


@pytest.fixture(scope="module")
def compared(forked_workers):
    knobs = [*FIXED, "context=1", "stage=1", "remat=full", "tensor=1"]
    fleets = ["8xH100", "4xA100-80GB", "8xV100-32GB"]
    how = {"budget_seconds": 1, "overrides": RUN, "search": knobs, "run": mw.RunLength(tokens="50T")}
    return mw.plan_fleets("bytes-nano", on=fleets, **how)


@pytest.mark.once
def test_fleets_are_compared_by_time_and_price(compared):
    assert compared.fastest is compared.ranked[0]
    seconds = [plan.winner.step_seconds.expected for plan in compared.ranked]
    assert seconds == sorted(seconds)
    for plan in compared.plans:
        by_hand = plan.winner.step_seconds.expected * plan.fleet.num_devices / 3600
        assert plan.price_per_step == pytest.approx(by_hand * plan.fleet.price_per_device_hour)
    assert compared.cheapest.price_per_step == min(plan.price_per_step for plan in compared.plans)
    fields = json.loads(compared.to_json())
    assert fields["fastest"] == compared.fastest.fleet.name
    assert [plan["fleet"] for plan in fields["plans"]] == [plan.fleet.name for plan in compared.ranked]


@pytest.mark.once
def test_each_fleet_and_each_candidate_says_when_the_run_is_finished(compared):
    words = str(compared)
    for plan, fields in zip(compared.ranked, json.loads(compared.to_json())["plans"], strict=True):
        finish = plan.winner.finish
        assert finish.seconds == plan.best.finish.seconds  # the one of `weigh`
        assert fields["best"]["finish"]["useful_share"]["expected"] == finish.useful_share.expected
        assert fields["best"]["finish"]["finish_date"]["expected"] > "2026"
        assert f"{100 * finish.useful_share.expected:.1f} %" in words
        assert all(candidate.finish is not None for candidate in plan.fitting)
        assert " useful" in str(plan)
    assert words.count("FINISH: ") == len({compared.fastest.fleet.name, compared.cheapest.fleet.name})


@pytest.mark.once
def test_a_fleet_for_which_no_plan_can_be_made_is_listed_with_its_reason(compared):
    assert list(compared.refused) == ["8xV100-32GB"]
    text = " ".join(str(compared).split())
    assert compared.refused["8xV100-32GB"] in text
    assert "FASTEST: " in text
    assert "CHEAPEST: " in text
    assert "8xV100-32GB" in compared.to_html()


def test_a_batch_that_grows_with_the_fleet_is_not_compared():
    run = {"batch.sequences_per_replica": 1}
    with pytest.raises(InputError, match="its step is another one on each fleet"):
        mw.plan_fleets("bytes-nano", on=["2xH100", "4xH100"], overrides=run)
    with pytest.raises(InputError, match="its step is another one on each fleet"):
        mw.plan("bytes-nano", on="4xH100", overrides=run, smallest_fleet=True)


def test_fleets_that_cannot_be_compared_are_refused():
    with pytest.raises(InputError, match="name each fleet once"):
        mw.plan_fleets("linear", on=[])
    with pytest.raises(InputError, match="name each fleet once"):
        mw.plan_fleets("linear", on=["2xH100", "2xH100"])
    with pytest.raises(InputError, match="one price cannot"):
        mw.plan_fleets("linear", on=["2xH100"], run=mw.RunLength(price_per_device_hour=2))
    with pytest.raises(InputError, match="no layout of linear"):
        mw.plan_fleets("linear", on=["2xH100"], search=["tensor=2", "data=2"])


@pytest.mark.once
def test_the_smallest_fleet_is_the_first_on_which_a_candidate_fits(forked_workers):
    """124M parameters x 16 bytes of state and gradients do not fit 2.47 GB beside what the system takes."""
    fleet = Fleet.parse("8xH100")
    small = dataclasses.replace(fleet, chip=dataclasses.replace(fleet.chip, memory_bytes=2_470_000_000))
    knobs = [
        *FIXED,
        "context=1",
        "stage=1",
        "tensor=1",
        "remat=full",
        "microbatch=1",
        "zero1=false",
        "data=1",
    ]
    kept = {"layer_loop": "keep"}  # twelve layers written out take five times as long to compile
    made = mw.plan(
        "gpt2-124m", on=small, budget_seconds=60, smallest_fleet=True, search=knobs, overrides=kept
    )
    assert made.winner is not None
    assert 1 < made.fleet.num_devices < 8
    assert list(made.smaller) == [f"{n}xH100" for n in range(1, made.fleet.num_devices) if n != 5]
    assert made.best.ledger.memory.usable_bytes == 2_470_000_000
    text = " ".join(str(made).split())
    assert f"SMALLEST: {made.fleet.name}" in text
    assert all(why in text for why in made.smaller.values())


@pytest.mark.wide
def test_where_nothing_fits_it_names_a_larger_fleet_that_was_compiled_and_fits(forked_workers):
    fleet = Fleet.parse("1xH100")
    small = dataclasses.replace(fleet, chip=dataclasses.replace(fleet.chip, memory_bytes=2_050_000_000))
    knobs = [*FIXED, "context=1", "stage=1", "tensor=1", "remat=full", "microbatch=1", "zero1=false"]
    made = mw.plan("gpt2-124m", on=small, budget_seconds=20, search=knobs)
    assert made.winner is None
    assert made.best is None
    assert "NOTHING FITS" in str(made)
    grown = [change for change in made.suggestions if change.arguments.startswith("--on ")]
    assert grown
    assert grown[0].fits is True
    assert grown[0].reserved_bytes < 2_050_000_000
    with pytest.raises(InputError, match="no candidate"):
        made.to_toml()


@pytest.mark.parametrize(
    ("on", "words"),
    [(3, "on = 3 are no fleets"), ("8xB1000", "unknown chip 'B1000'"), ([3], "int 3 is no fleet")],
)
def test_fleets_that_are_no_list_of_fleets_are_refused_and_one_text_is_one_fleet(on, words):
    with pytest.raises(InputError, match=words):
        mw.plan_fleets("linear", on=on)
