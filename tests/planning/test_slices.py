import numpy as np
import pytest

from meshwright.config import AXES, check_slices, load_config
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.planning import estimate, inside_slices, parsed_knobs, simplest_rows, space_of
from meshwright.predict import machine_of

TENSOR, DATA = AXES.index("tensor"), AXES.index("data")
SMALL = ("remat=full", "offload=none", "pipeline=1f1b", "zero1=false", "microbatch=1")


def plan_space(run, fleet, *knobs):
    """The space that a plan searches, and the one before its rules on slices."""
    fixed = parsed_knobs([*SMALL, *knobs])
    whole = space_of(run, fleet, fixed)
    return inside_slices(run, fleet, whole, fixed), whole


def crosses(candidates, fleet):
    """Whether each candidate's groups of tensor, context and expert lie in several slices."""
    names = ("tensor", "context", "expert")
    places = [AXES.index(name) for name in names]
    reach = candidates.strides() * candidates.sizes
    return ((reach > fleet.chips_per_domain) & (candidates.sizes > 1))[:, places].any(axis=1)


def test_messages_of_every_block_stay_inside_slices():
    fleet = Fleet.parse("2xv5e-16")
    space, whole = plan_space(load_config("llama3-8b"), fleet)
    assert crosses(whole.candidates, fleet).any()
    assert not crosses(space.candidates, fleet).any()
    assert space.illegal["context, expert or tensor lie between slices"] > 0
    layouts = {str(space.candidates.layout(row)) for row in range(len(space.candidates))}
    assert {"data=2,fsdp=16", "fsdp=32", "stage=2,fsdp=16", "data=2,fsdp=2,tensor=8"} <= layouts


def test_they_cross_where_the_user_says_so():
    fleet = Fleet.parse("2xv5e-4")
    space, _ = plan_space(load_config("llama3-8b"), fleet, "tensor=8")
    assert {str(space.candidates.layout(row)) for row in range(len(space.candidates))} == {"tensor=8"}


def test_they_cross_where_nothing_else_divides():
    """One sequence a step: nothing but the axes of each block splits it."""
    fleet = Fleet.parse("2xv5e-4")
    run = load_config("llama3-8b", ["batch.sequences=1", "model.num_layers=1"])
    space, _ = plan_space(run, fleet)
    assert space.num_considered
    assert crosses(space.candidates, fleet).all()


@pytest.mark.parametrize("fleet", ["3xv5e-16", "2xv5e-16", "6xv5e-4"])
def test_the_plan_and_the_check_of_layouts_agree_on_what_straddles(fleet):
    fleet = Fleet.parse(fleet)
    run = load_config("bytes-nano", ["batch.sequences=96", "model.embed_dim=96", "model.mlp_dim=384"])
    space, whole = plan_space(run, fleet, f"tensor={','.join(str(n) for n in range(1, 97))}")
    kept = {str(space.candidates.layout(row)) for row in range(len(space.candidates))}
    legal = set()
    for row in range(len(whole.candidates)):
        layout = whole.candidates.layout(row)
        try:
            check_slices(fleet, layout)
        except InputError:
            continue
        legal.add(str(layout))
    assert kept == legal
    assert fleet.name == "2xv5e-16" or len(legal) < whole.num_considered


def test_a_person_tries_data_over_the_slices_first():
    run, fleet = load_config("llama3-8b"), Fleet.parse("4xv5e-16")
    candidates = inside_slices(run, fleet, space_of(run, fleet), {}).candidates
    rows = simplest_rows(candidates, fleet, -candidates.sizes[:, TENSOR].astype(float))
    assert {str(candidates.layout(row)) for row in rows} == {"data=4,fsdp=16", "data=4,fsdp=8,tensor=2"}


def test_estimates_prefer_the_layout_that_sends_least_between_slices():
    """Of a gather over fsdp=32 halves cross the network in each block, and of tensor every message."""
    run, fleet = load_config("llama3-8b"), Fleet.parse("2xv5e-16")
    knobs = parsed_knobs([*SMALL, "stage=1", "context=1", "inner=tensor", "tensor=1,32"])
    candidates = space_of(run, fleet, knobs).candidates
    seconds = estimate(run, machine_of(fleet, None), candidates).seconds_fitting
    by_layout = {str(candidates.layout(row)): seconds[row] for row in range(len(candidates))}
    assert min(by_layout, key=lambda layout: by_layout[layout]) == "data=2,fsdp=16"
    assert np.isfinite(seconds).all()


@pytest.mark.parametrize("fleet", ["v5e-16", "16xH100"])
def test_other_fleets_keep_their_layouts(fleet):
    fleet, run = Fleet.parse(fleet), load_config("llama3-8b")
    space, whole = plan_space(run, fleet)
    assert space is whole
