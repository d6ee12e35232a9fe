"""The table of layouts that the benchmark compiles, and how its traffic is added up."""

import sys
from pathlib import Path

import pytest

from meshwright.config import AXES, Layout
from meshwright.ledger import Collective

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from layouts import CASES, FLEETS, TPU_FLEETS, Case, sent


def test_every_axis_is_in_some_case():
    named = {axis for case in CASES for axis in (*case.sizes, case.rest)}
    assert named == set(AXES)
    assert len({(case.preset, case.layout(64)) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("num_devices", [*FLEETS.values(), *TPU_FLEETS.values()])
def test_every_case_covers_its_fleet_in_the_default_order(num_devices):
    for case in CASES:
        layout = Layout.parse(case.layout(num_devices)).resolve(num_devices)
        names = [name for name, size in layout.axes if size > 1]
        assert names == [axis for axis in AXES if axis in names]
        assert case.name == " x ".join(names)


def test_a_case_is_written_as_the_command_line_takes_it():
    case = Case(preset="llama3-8b", sizes={"tensor": 8, "stage": 2}, rest="data")
    assert case.layout(64) == "stage=2,data=4,tensor=8"
    assert case.name == "stage x data x tensor"


def test_what_is_sent_is_added_up_by_axes_and_link():
    def collective(axes, wire_bytes, link):
        return Collective(
            kind="all-gather", axes=axes, group_size=8, count=3, payload_bytes=2 * wire_bytes,
            wire_bytes=wire_bytes, crossing_bytes=0, overlapped_count=0, in_loop=True,
            link=link, link_name="NVLink",
        )  # fmt: skip

    found = sent(
        [
            collective(("fsdp",), 100, "inside"),
            collective(("tensor",), 500, "inside"),
            collective(("fsdp",), 30, "between"),
            collective(("fsdp",), 7, "inside"),
            collective(("data", "fsdp"), 0, "inside"),
        ]
    )
    assert found == {"tensor, inside": 500, "fsdp, inside": 107, "fsdp, between": 30}
    assert list(found) == ["tensor, inside", "fsdp, inside", "fsdp, between"]
