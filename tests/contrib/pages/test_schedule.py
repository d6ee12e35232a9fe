"""Lanes of a step: what the device does, what it waits for, and how busy its links are."""

import dataclasses
import re

import pytest

from meshwright.contrib.pages import lane_svg, lanes_of, page_of, schedule_lanes
from meshwright.predict import Busy
from meshwright.report import COLOURS, GAPS, Column, Lane, byte_ticks, second_ticks, text_of

GIB = 2**30


def busy(seconds=8.0, **streams):
    return Busy(seconds=seconds, shares=streams)


@pytest.fixture
def lanes():
    step = busy(
        compute={"matmul": (0.5, 0.5, 0.51, 1.0), "memory-bound": (0.25, 0.25, 0.24, 0.0)},
        wait={"all-gather[fsdp]": (0.1, 0.1, 0.1, 0.0), "all-gather[data]": (0.1, 0.1, 0.1, 0.0)},
        inside={"all-gather[fsdp]": (0.2, 0.2, 0.2, 0.0), "all-gather[data]": (0.2, 0.2, 0.2, 0.0)},
    )
    made = lanes_of({"": step})
    assert made is not None
    return made


def test_spans_that_hardly_differ_are_one_column_of_their_mean(lanes):
    device, _ = lanes.lanes
    assert [(column.begin, column.end) for column in device.columns] == [(0.0, 0.75), (0.75, 1.0)]
    shares = dict(device.columns[0].parts)
    assert shares[COLOURS["matmul"]] == pytest.approx((0.5 + 0.5 + 0.51) / 3)
    assert sum(shares.values()) == pytest.approx(1)


def test_the_device_computes_waits_or_has_gaps_the_largest_class_at_the_bottom(lanes):
    words = lanes.lanes[0].columns[0].words
    assert words == (
        "0 to 6.00 s: matmul 50 %, memory-bound 25 %, waiting for all-gather 20 %, gaps between kernels 5 %"
    )
    assert lanes.lanes[0].columns[1].words == "6.00 s to 8.00 s: matmul 100 %"


def test_a_link_has_a_lane_only_where_it_is_used_and_columns_only_while_it_is(lanes):
    device, link = lanes.lanes
    assert (device.name, link.name) == (
        "computing, or waiting for messages",
        "links inside the fast domain",
    )
    assert [(column.begin, column.end, column.words) for column in link.columns] == [
        (0.0, 0.75, "0 to 6.00 s: all-gather 40 %")
    ]


def test_every_colour_is_explained_and_the_axis_ends_with_the_step(lanes):
    used = {colour for lane in lanes.lanes for column in lane.columns for colour, _ in column.parts}
    explained = dict(lanes.colours)
    assert used <= set(explained)
    assert [explained[COLOURS[name]] for name in ("matmul", GAPS)] == ["matmul", GAPS]
    assert lanes.ticks == ((0.0, "0"), (0.25, "2.00 s"), (0.5, "4.00 s"), (0.75, "6.00 s"), (1.0, "8.00 s"))


def test_a_step_without_work_has_no_lanes():
    assert lanes_of({"": busy()}) is None
    assert lanes_of({"predicted": busy(compute={"matmul": (1.0,)}), "measured": busy()}) is None


def test_two_schedules_share_the_axis_of_the_longer_one():
    predicted = busy(seconds=4.0, compute={"matmul": (1.0, 0.0)})
    measured = busy(compute={"matmul": (1.0, 0.0)}, messages={"all-reduce": (0.0, 0.5)})
    made = lanes_of({"predicted": predicted, "measured": measured})
    assert made is not None
    assert [lane.name for lane in made.lanes] == [
        "predicted, 4.00 s: computing, or waiting for messages",
        "measured, 8.00 s: computing, or waiting for messages",
        "measured, 8.00 s: messages",
    ]
    ends = [[(column.begin, column.end) for column in lane.columns] for lane in made.lanes]
    assert ends == [[(0.0, 0.25), (0.25, 0.5)], [(0.0, 0.5), (0.5, 1.0)], [(0.5, 1.0)]]
    assert made.lanes[0].columns[0].words == "0 to 2.00 s: matmul 100 %"
    assert made.ticks[-1] == (1.0, "8.00 s")


def test_a_long_step_has_few_rectangles(weighing, program_folder):
    lanes = schedule_lanes(weighing(folder=program_folder))
    assert sum(len(column.parts) for lane in lanes.lanes for column in lane.columns) < 700


def test_without_a_prediction_or_the_compiled_program_there_are_no_lanes(weighing, tmp_path, program_folder):
    assert schedule_lanes(weighing(folder=tmp_path)) is None
    assert schedule_lanes(weighing(folder=program_folder, prediction=None)) is None
    assert 'class="lane"' not in page_of(weighing(folder=tmp_path))


def test_the_pages_of_a_weighing_and_of_a_plan_have_the_lanes(weighing, plan, program_folder):
    for result in (weighing(folder=program_folder), plan):
        page = page_of(result)
        assert page.count('<svg class="lane"') == 2
        assert "waiting for all-gather" in page
        assert "links inside the fast domain" in page


def test_a_plan_of_which_nothing_fits_has_a_page_without_them(plan):
    candidates = [c for c in plan.candidates if c.fits is False or c.failed]
    page = page_of(dataclasses.replace(plan, best=None, candidates=tuple(candidates)))
    assert "NOTHING FITS" in page
    assert 'class="lane"' not in page


def test_the_page_of_a_plan_shows_the_memory_at_the_peak(plan):
    words = " ".join(re.sub(r"<[^>]*>", " ", page_of(plan)).split())
    assert "Memory of the best at its peak saved activations, 36.0 GiB" in words
    assert "2.00 GiB bf16[32,1,8192,4096] saved activations layers transformer.py:25" in words


def test_a_terminal_leaves_the_lanes_out(plan):
    assert "links inside" not in text_of(plan)


def test_a_table_of_candidates_has_remarks_only_where_there_are_any(plan):
    assert "does not fit</td>" in page_of(plan)
    fitting = tuple(c for c in plan.candidates if c.fits)
    page = page_of(dataclasses.replace(plan, candidates=fitting))
    assert '<th class="number">estimated</th></tr>' in page


def test_a_column_is_drawn_from_the_bottom_up_with_its_words():
    column = Column(begin=0.25, end=0.5, parts=(("#111111", 0.75), ("#222222", 0.25)), words="a < b")
    svg = lane_svg(Lane(name="computing", columns=(column,)), "one step")
    assert '<path fill="#111111" d="M500 100.0H1000V25.0H500z"/>' in svg
    assert '<path fill="#222222" d="M500 25.0H1000V0.0H500z"/>' in svg
    assert "<title>a &lt; b</title>" in svg
    assert 'aria-label="one step: computing"' in svg


def test_ticks_are_round_and_few():
    assert [words for _, words in second_ticks(6.12, 6.8, 7)] == [
        "6.20 s", "6.30 s", "6.40 s", "6.50 s", "6.60 s", "6.70 s", "6.80 s",
    ]  # fmt: skip
    assert [words for _, words in second_ticks(0, 0.0031, 5)] == ["0", "1.00 ms", "2.00 ms", "3.00 ms"]
    assert [words for _, words in byte_ticks(0, 82 * GIB, 6)] == ["0", "20 GiB", "40 GiB", "60 GiB", "80 GiB"]
