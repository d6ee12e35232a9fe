"""The candidates of a function of the user's own: meshes of the fleet, values of its knobs, default first."""

import numpy as np
import pytest

from meshwright.contrib.function_plans import FUNCTION_PRIORS, function_space
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.planning import Search, SearchOutcome

FLEET = Fleet.parse("8xH100")
KNOBS = {"remat": ("False", "True"), "block": ("128", "256", "512")}


def test_every_mesh_is_there_once_with_every_value_of_every_knob():
    space = function_space(FLEET, ("data", "model"), KNOBS, {})
    found = {(str(space.layout(row)), *space.chosen(row).values()) for row in range(len(space))}
    meshes = [f"data={8 // n},model={n}" for n in (1, 2, 4, 8)]
    assert found == {
        (mesh, remat, block) for mesh in meshes for remat in KNOBS["remat"] for block in KNOBS["block"]
    }
    assert len(found) == len(space) == 24
    assert space.num_layouts == 4


def test_the_first_is_what_the_function_has_without_the_planner():
    space = function_space(FLEET, ("data", "model"), KNOBS, {})
    assert space.overrides(0) == {"layout": "data=8,model=1", "remat": "False", "block": "128"}
    assert space.words(0) == "remat False, block 128"


def test_three_axes_multiply_to_the_fleet():
    space = function_space(Fleet.parse("16xH100"), ("a", "b", "c"), {}, {})
    assert (space.sizes.prod(axis=1) == 16).all()
    assert len(space) == 15  # 2^4 over three axes: (4 + 2) choose 2


def test_what_is_fixed_is_kept_and_an_unknown_name_is_a_further_axis():
    space = function_space(FLEET, ("data",), KNOBS, {"remat": ("True",), "model": ("1", "2")})
    assert {str(space.layout(row)) for row in range(len(space))} == {"data=8,model=1", "data=4,model=2"}
    assert {space.chosen(row)["remat"] for row in range(len(space))} == {"True"}


@pytest.mark.parametrize(
    ("fixed", "words"),
    [({"remat": ("yes",)}, "none of its values"), ({"model": ("two",)}, "no size of a mesh axis")],
)
def test_a_value_that_nothing_has_is_refused(fixed, words):
    with pytest.raises(InputError, match=words):
        function_space(FLEET, ("data",), KNOBS, fixed)


def test_more_than_can_be_searched_is_refused_with_what_to_do():
    knobs = {f"knob{n}": tuple("0123456789") for n in range(5)}
    with pytest.raises(InputError, match="too many") as refused:
        function_space(FLEET, ("data",), knobs, {})
    assert "--fix" in refused.value.hint


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_search_learns_the_scale_and_finds_the_best_without_any_estimate(scale):
    """Times are a product of what each axis and knob costs: the effects that the search assumes."""
    space = function_space(Fleet.parse("64xH100"), ("data", "model", "seq"), KNOBS, {})
    of_knobs = np.array([1.0, 1.3])[space.places[:, 0]] * np.array([1.0, 0.9, 1.2])[space.places[:, 1]]
    seconds = scale * of_knobs * 1.1 ** np.log2(space.sizes[:, 1]) * 1.25 ** np.log2(space.sizes[:, 2])
    search = Search(space, space.estimates(), np.full(len(space), np.inf), FUNCTION_PRIORS)
    for _ in range(20):
        row = search.next()
        if row is None:
            break
        search.finish(row, SearchOutcome(seconds=float(seconds[row]), reserved_bytes=10**9))
    assert len(space) == 168
    assert seconds[search.best] == seconds.min()
