"""The scripts that compare the planner with exhaustive compiling, with people, and with the clock."""

import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _record
import plan_best
import plan_people
from _plan_compiled import best_of, compiled_row, place_of, why_faster
from _published_rows import express
from plan_best import LARGE, PUBLISHED, REFERENCES, compared, overrides_of, reference, settings
from plan_order import EACH_END, ends, summary_of

from meshwright.config import Layout, check_layout, load_config, overridden
from meshwright.hardware import Fleet
from meshwright.planning import estimate, space_of
from meshwright.predict import machine_of
from tests.benchmarks.rows import LLAMA

PEOPLE = {
    "layout": "fsdp=8",
    "remat": "full",
    "zero1": False,
    "offload": "none",
    "pipeline": "1f1b",
    "batch.microbatch_sequences": 1,
    "failed": "",
    "fits": True,
    "reserved_gib": 20.0,
    "seconds": 10.0,
    "exposed_seconds": {"matmul": 8.0, "all-gather[fsdp]": 1.99, "launch": 0.01},
}
OURS = {
    **PEOPLE,
    "remat": "dots",
    "seconds": 8.0,
    "exposed_seconds": {"matmul": 6.0, "all-gather[fsdp]": 1.99, "launch": 0.01},
}


@pytest.fixture(scope="module")
def small():
    run, fleet = load_config("llama-1b"), Fleet.parse("16xH100")
    space = space_of(run, fleet)
    return space.candidates, estimate(run, machine_of(fleet, None), space.candidates)


# The references


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_has_as_many_different_candidates_as_asked(small, name):
    candidates, estimates = small
    places = reference(name, candidates, estimates, 80e9, 20)
    assert len(set(places)) == 20
    assert (estimates.memory_bound[places] <= 80e9).all()


def test_bounds_order_and_estimates_break_their_ties(small):
    candidates, estimates = small
    places = reference("bound", candidates, estimates, 80e9, 50)
    pairs = [(round(float(estimates.seconds_bound[p]), 6), float(estimates.seconds[p])) for p in places]
    assert pairs == sorted(pairs)
    assert reference("bound", candidates, estimates, 0.0, 5) == []


def test_families_do_not_repeat(small):
    candidates, estimates = small
    places = reference("family", candidates, estimates, 80e9, 30)
    kinds = {
        (tuple(candidates.sizes[p] > 1), candidates.settings["remat"][p], candidates.microbatch[p])
        for p in places
    }
    assert len(kinds) == 30


def test_the_choice_is_compared_with_the_fastest_that_fits():
    failed = {**PEOPLE, "failed": "no"}
    too_large = {**OURS, "seconds": 1.0, "fits": False}
    found = compared(PEOPLE, [failed, too_large, OURS])
    assert (found["compiled"], found["failed"], found["fitting"]) == (2, 1, 1)
    assert found["slower_by"] == pytest.approx(0.25)
    assert "slower_by" not in compared(PEOPLE, [too_large])


# The published layouts


def test_every_published_layout_covers_4096_devices_and_is_legal():
    for published in PUBLISHED:
        for overrides in overrides_of(published):
            run = load_config(LARGE[0], {"model.num_layers": published.num_layers, **overrides})
            layout = Layout.parse(run.layout)
            assert layout.resolve(4096) == layout
            check_layout(run, layout)
            assert layout.num_replicas * (run.batch.microbatch_sequences or 1) <= run.batch.sequences


def test_a_candidate_is_found_by_its_overrides(small):
    candidates, _ = small
    for place in (0, len(candidates) // 2, len(candidates) - 1):
        assert place_of(candidates, candidates.overrides(place)) == place
    assert place_of(candidates, {**candidates.overrides(0), "layout": "fsdp=5"}) is None


# People's rows


def test_the_first_row_of_each_model_chip_and_scale_is_taken():
    rows = [
        express({**LLAMA, "id": f"a-{n}", "n_devices": str(d), "fsdp": str(d)})
        for n, d in enumerate((64, 64, 8))
    ]
    models = {row.id: "Llama-3-8B" for row in rows}
    assert [row.id for row in plan_people.first_of_each(rows, models)] == ["a-0", "a-2"]
    models["a-1"] = "another"
    assert len(plan_people.first_of_each(rows, models)) == 3


def test_people_s_layout_is_among_the_planner_s_candidates():
    row = express(LLAMA)
    candidates = space_of(row.config, row.fleet).candidates
    assert place_of(candidates, plan_people._settings_of(row.config)) is not None


def test_the_reason_names_what_changed_and_what_the_step_waits_less_for():
    assert why_faster(OURS, PEOPLE) == "remat full -> dots: matmul -2 s"
    assert why_faster(PEOPLE, PEOPLE) == "the same candidate"


def test_the_summary_counts_rows_that_are_slower():
    row = {"id": "a", "failed": "", "people_legal": True, "people_fits": True, "faster_by": 0.1}
    rows = [
        {**row, "at_least_as_fast": True},
        {**row, "id": "b", "faster_by": -0.1, "at_least_as_fast": False},
        {"id": "c", "failed": "no"},
    ]
    found = plan_people.summary_of(rows)
    assert (found["rows"], found["at_least_as_fast"], found["slower"]) == (2, 1, ["b"])
    assert found["rows_that_failed"] == {"c": "no"}


# The order


def test_the_ends_are_the_fastest_and_the_slowest():
    rows = [{**PEOPLE, "seconds": float(n)} for n in range(10)]
    assert [row["seconds"] for row in ends(rows)] == [0.0, 1.0, 2.0, 7.0, 8.0, 9.0]
    with pytest.raises(SystemExit):
        ends(rows[: 2 * EACH_END - 1])


def test_the_order_holds_or_not():
    rows = [{"predicted_seconds": p, "measured_seconds": p * 1.2} for p in (1.0, 1.1, 1.2, 2.0, 2.1, 2.2)]
    found = summary_of(rows)
    assert found["rank_correlation"] == 1.0
    assert found["every_best_beats_every_worst"]
    assert found["measured_over_predicted"] == [1.2, 1.2]
    rows[0]["measured_seconds"] = 2.45
    found = summary_of(rows)
    assert not found["every_best_beats_every_worst"]
    assert (found["pairs_in_order"], found["pairs"]) == (8, 9)


# With a compiler


def test_a_candidate_is_compiled_and_recorded(tmp_path, monkeypatch):
    run, fleet = load_config("linear"), Fleet.parse("2xH100")
    candidates = space_of(run, fleet).candidates
    rows = [compiled_row(run, fleet, candidates.overrides(place)) for place in range(2)]
    assert all(row["seconds"] > 0 and row["fits"] for row in rows), rows
    assert best_of(rows) in rows
    refused = compiled_row(run, fleet, {**candidates.overrides(0), "layout": "fsdp=3"})
    assert "3" in refused["failed"]
    monkeypatch.setattr(_record, "RECORDS", tmp_path)
    told = [plan_best._short_row(row) for row in [*rows, refused]]
    path = _record.write_record("plan_best", "command", ("numpy",), {"linear": {}}, {"row": told})
    read = tomllib.loads(path.read_text())["row"]
    assert [each["settings"] for each in read] == [settings(row) for row in [*rows, refused]]
    assert overridden(run, candidates.overrides(0)).layout == rows[0]["layout"]
    assert np.isfinite(read[0]["seconds"])
