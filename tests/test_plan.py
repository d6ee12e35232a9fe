"""`plan` compiles the most promising candidates, and recommends only what it has compiled."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import CompileError, InputError
from meshwright.hardware import Fleet
from meshwright.results import PlanProgress

FIXED = ["offload=none", "pipeline=1f1b", "inner=tensor"]


@pytest.fixture(scope="module")
def made(forked_workers):
    return mw.plan(
        "bytes-nano",
        on="8xH100",
        fix=[*FIXED, "context=1"],
        budget_seconds=4,
        tokens="1B",
        price_per_device_hour=2,
    )


def test_the_winner_is_the_fastest_compiled_candidate_that_fits(made):
    assert made.winner is not None
    assert made.best is not None
    assert made.winner.fits is True
    assert len(made.candidates) >= 2
    assert made.winner.step_seconds.expected == min(
        c.step_seconds.expected for c in made.candidates if c.fits
    )
    weighed = mw.weigh("bytes-nano", on="8xH100", overrides=made.winner.overrides)
    assert weighed.compiled.fingerprint == made.best.compiled.fingerprint
    assert weighed.step_seconds == made.winner.step_seconds.expected
    assert weighed.ledger.memory.reserved_bytes == made.winner.reserved_bytes


def test_every_candidate_is_counted_once(made):
    assert made.num_considered > len(made.candidates)
    too_large = made.removed.get("state and block inputs alone do not fit", 0)
    assert made.num_open + too_large + len(made.candidates) == made.num_considered


def test_its_toml_is_a_run_that_weighs_to_the_same_program(made, tmp_path):
    file = tmp_path / "planned.toml"
    file.write_text(made.to_toml())
    assert tomllib.loads(file.read_text())["layout"] == made.winner.layout
    again = mw.weigh(str(file), on="8xH100")
    assert again.compiled.fingerprint == made.best.compiled.fingerprint


def test_its_text_names_the_winner_the_cost_and_how_much_was_searched(made):
    text = str(made)
    assert f"BEST: {made.winner.layout}, {made.winner.settings}" in text
    assert "1B tokens" in text.replace("1.00B", "1B")
    assert "device-hours" in text
    assert f"{made.num_considered:,} candidates of {made.num_layouts:,} layouts" in " ".join(text.split())
    assert made.ended in " ".join(text.split())


def test_its_json_has_every_candidate_in_order(made):
    fields = json.loads(made.to_json())
    assert fields["best"]["layout"] == made.winner.layout
    assert fields["num_compiled"] == len([c for c in made.candidates if not c.failed])
    times = [c["prediction"]["step_seconds"]["expected"] for c in fields["candidates"] if c["fits"]]
    assert times == sorted(times)


def test_every_field_of_its_json_is_documented_and_every_documented_field_is_there(made):
    page = (Path(__file__).parents[1] / "docs/planning.md").read_text().partition("## JSON")[2]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    fields = made.to_dict()
    assert {name for name in documented if name[0] != "." and "[]" not in name} == set(fields) - {
        "candidates"
    }
    each = {name.rpartition(".")[2] for name in documented if name[0] == "." or "[]" in name}
    assert each == set(fields["candidates"][0])


def test_the_front_has_no_candidate_that_another_beats_in_both(made):
    points = [(c.step_seconds.expected, c.reserved_bytes) for c in made.candidates if not c.failed]
    front = [(c.step_seconds.expected, c.reserved_bytes) for c in made.front]
    assert front
    assert not any(x < seconds and y < size for seconds, size in front for x, y in points)


def test_its_page_has_a_dot_for_each_candidate_and_shows_all_without_a_script(made):
    page = made.to_html()
    wide = page.partition('<svg class="wide"')[2].partition("</svg>")[0]
    assert wide.count("<circle") == len([c for c in made.candidates if not c.failed])
    assert made.winner.layout in page
    body = page.partition("<script>")[0]
    assert all(candidate.layout in body for candidate in made.candidates)
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_second_call_goes_on_from_what_the_first_compiled(made, forked_workers):
    again = mw.plan("bytes-nano", on="8xH100", fix=[*FIXED, "context=1"], budget_seconds=4)
    assert [candidate.cached for candidate in again.candidates].count(True) >= len(made.candidates) / 2
    assert again.winner.step_seconds.expected <= made.winner.step_seconds.expected


def test_a_candidate_whose_compilation_fails_is_reported_and_the_others_go_on(monkeypatch, forked_workers):
    from meshwright.api import _plan

    real, calls = _plan.weigh_resolved, []

    def weigh(*args, **keywords):
        calls.append(args)
        if len(calls) == 2:
            raise CompileError("the worker died", hint="none")
        return real(*args, **keywords)

    monkeypatch.setattr(_plan, "weigh_resolved", weigh)
    made = mw.plan("linear", on="2xH100", budget_seconds=5, num_workers=1)
    assert [c.failed for c in made.candidates if c.failed] == ["the worker died"]
    assert made.winner is not None
    assert "the worker died" in str(made)


def test_progress_tells_the_best_so_far(forked_workers):
    events = []
    made = mw.plan("linear", on="2xH100", budget_seconds=1, num_workers=1, on_event=events.append)
    assert all(isinstance(event, PlanProgress) for event in events)
    assert events[0].best is None
    assert events[-1].num_considered == made.num_considered


def test_ctrl_c_returns_what_was_compiled_so_far(forked_workers):
    def stop(event):
        if event.num_compiled:
            raise KeyboardInterrupt

    made = mw.plan("linear", on="2xH100", budget_seconds=60, num_workers=1, on_event=stop)
    assert made.interrupted
    assert made.winner is not None


def test_a_list_price_is_used_with_its_provider_and_date(made, forked_workers):
    listed = mw.plan("bytes-nano", on="8xH100", fix=[*FIXED, "context=1"], budget_seconds=0.1, tokens="1B")
    assert listed.fleet.price_per_device_hour
    assert "20" in listed.price
    assert listed.price in " ".join(str(listed).split())
    assert made.price == ""


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"budget_seconds": 0}, "cannot be spent"),
        ({"fix": ["tensor=3"]}, "no layout of bytes-nano on 8xH100 is legal"),
        ({"fix": ["data=8"], "vary": ["data=4,8"]}, "data is fixed and varied"),
        ({"fix": ["width=3"]}, "nothing that the planner chooses"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_compiling(keywords, words):
    with pytest.raises(InputError, match=words):
        mw.plan("bytes-nano", on="8xH100", **keywords)


def test_a_foreign_program_is_refused_in_words():
    with pytest.raises(InputError, match="is not a configuration"):
        mw.plan("json:dumps", on="8xH100")


@pytest.mark.wide
def test_where_nothing_fits_it_names_a_larger_fleet_that_was_compiled_and_fits(forked_workers):
    fleet = Fleet.parse("1xH100")
    small = dataclasses.replace(fleet, chip=dataclasses.replace(fleet.chip, memory_bytes=2_050_000_000))
    knobs = [*FIXED, "context=1", "stage=1", "tensor=1", "remat=full", "microbatch=1", "zero1=false"]
    made = mw.plan("gpt2-124m", on=small, fix=knobs, budget_seconds=20)
    assert made.winner is None
    assert made.best is None
    assert "NOTHING FITS" in str(made)
    grown = [change for change in made.suggestions if change.arguments.startswith("--on ")]
    assert grown
    assert grown[0].fits is True
    assert grown[0].reserved_bytes < 2_050_000_000
    with pytest.raises(InputError, match="no candidate"):
        made.to_toml()
