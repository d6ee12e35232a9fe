import dataclasses

import pytest

from meshwright.report._html_sections import findings_section, flops_section, traffic_section
from meshwright.report._wording import FLOP_CONVENTION


@pytest.fixture
def page(weighing):
    """The sections of a weighing whose ledger has the given fields."""

    def make(**changes):
        ledger = dataclasses.replace(weighing().ledger, **changes).to_dict()
        found = {"ledger": ledger}
        return flops_section(found) + traffic_section(found) + findings_section(found)

    return make


def test_the_convention_stands_beside_the_flops(page):
    assert FLOP_CONVENTION in page()


def test_elementwise_work_is_shown_by_class_where_it_is_known(page, weighing):
    flops = dataclasses.replace(weighing().ledger.flops, elementwise_by_class={"arithmetic": 12 * 10**11})
    assert "Elementwise operations, in none of these counts: arithmetic 1.2T." in page(flops=flops)
    assert "Elementwise operations" not in page()


def test_the_bubbles_flops_are_shown_where_there_is_a_pipeline(page, weighing):
    flops = dataclasses.replace(weighing().ledger.flops, bubble=12 * 10**15)
    assert "<td>in the bubble of the pipeline</td>" in page(flops=flops)
    assert "12.0 PFLOP" in page(flops=flops)
    assert "bubble" not in page()


def test_what_is_unpriced_or_taken_for_granted_is_listed(page):
    text = page(unpriced=("sort(f32[8])",), assumptions=("conditional at model.py:12: dearest",))
    assert "<th>Unpriced: no rule counts these</th>" in text
    assert "<td>sort(f32[8])</td>" in text
    assert "<td>conditional at <span class=file>model.py:12</span>: dearest</td>" in text
    assert "Unpriced" not in page()


def test_a_torus_dimensions_stand_beside_the_link(page, weighing):
    first, *_ = weighing().ledger.traffic
    placed = dataclasses.replace(first, link_name="ICI 3D torus", dimensions=("x", "z"))
    assert ">ICI 3D torus x+z</td>" in page(traffic=(placed,))
    assert ">NVLink 4</td>" in page(traffic=(first,))


def test_a_weighing_of_an_earlier_version_can_be_shown(weighing):
    ledger = weighing().ledger.to_dict()
    del ledger["assumptions"], ledger["flops"]["elementwise_by_class"]
    ledger["traffic"] = [
        {name: value for name, value in item.items() if name != "dimensions"} for item in ledger["traffic"]
    ]
    assert "NVLink 4" in traffic_section({"ledger": ledger})
    assert FLOP_CONVENTION in flops_section({"ledger": ledger})


def test_without_a_weighing_there_is_nothing():
    assert flops_section(None) == traffic_section(None) == findings_section(None) == ""
