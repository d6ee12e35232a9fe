from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from meshwright.report._plots import MOST_POINTS, flops_svg, loss_svg, memory_svg, thinned, timeline_svg

GIB = 2**30


def parsed(svg: str) -> ElementTree.Element:
    """As XML; in HTML the prefix of links needs no declaration."""
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1))


def words(svg: str) -> list[str]:
    return [text for each in parsed(svg).iter("text") if (text := "".join(each.itertext()).strip())]


def longest_line(svg: str) -> list[tuple[float, float]]:
    """The points of the path with most of them."""
    paths = [re.findall(r"[ML] (\S+) (\S+)", each.get("d", "")) for each in parsed(svg).iter("path")]
    return [(float(x), float(y)) for x, y in max(paths, key=len)]


def test_a_falling_loss_is_a_falling_line():
    steps = list(range(1, 21))
    points = longest_line(loss_svg((steps, [25.0 - step**1.1 for step in steps]), ([], []), None))
    assert len(points) == 20
    assert [y for _, y in points] == sorted(y for _, y in points)  # SVG counts downwards
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_held_out_loss_and_entropy_are_named_in_the_picture():
    found = words(loss_svg(([1, 2], [5.0, 4.0]), ([2], [4.5]), 3.3125))
    assert {"training", "held out", "entropy of single held-out tokens, 3.312", "step"} <= set(found)


def test_one_step_makes_a_picture():
    assert "training" in words(loss_svg(([1], [5.0]), ([], []), None))


def test_the_memory_bar_reaches_as_far_as_its_bytes():
    svg = memory_svg({"temporaries": 30 * GIB, "parameters": 10 * GIB}, 80 * GIB)
    boxes = [
        [float(x) for x in re.findall(r"[ML] (\S+) \S+", each.get("d", ""))]
        for each in parsed(svg).iter("path")
        if re.search(r"fill: #(2f6f8f|e08e45)", each.get("style", ""))
    ]
    widths = sorted((max(box) - min(box) for box in boxes), reverse=True)[:2]
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-3)
    assert {"temporaries, 30.0 GiB", "usable, 80.0 GiB", "0", "80 GiB"} <= set(words(svg))


def test_a_program_much_smaller_than_the_device_is_shown_alone():
    found = words(memory_svg({"temporaries": 2**20}, 80 * GIB))
    assert "usable, 80.0 GiB: far to the right" in found
    assert "1000 KiB" in found


@pytest.mark.parametrize("num_bytes", [1, 999, 5000, 10**6, 10**9, 10**12, 5 * 10**14])
def test_every_size_has_a_few_ticks(num_bytes: int):
    ticks = [
        word for word in words(memory_svg({"a": num_bytes}, None)) if re.fullmatch(r"0|\d+ [KMGT]?i?B", word)
    ]
    assert 2 <= len(ticks) <= 7


def test_phases_are_bars_with_their_flops():
    assert {"forward", "backward", "2.00 GFLOP"} <= set(
        words(flops_svg({"forward": 10**9, "backward": 2 * 10**9}))
    )


def test_a_picture_is_the_same_bytes_each_time_and_names_nothing_outside():
    first, second = (flops_svg({"forward": 10**9}) for _ in range(2))
    assert first == second
    assert "http" not in first
    assert "<metadata" not in first


@pytest.mark.parametrize("count", [0, 1, 2, MOST_POINTS, MOST_POINTS + 1, 3 * MOST_POINTS + 7])
def test_thinning_keeps_both_ends_and_a_bounded_number(count: int):
    steps, values = thinned(range(count), [float(n) for n in range(count)])
    assert len(steps) <= MOST_POINTS + 1
    assert steps[:1] == list(range(count))[:1]
    assert steps[-1:] == list(range(count))[-1:]
    assert values == steps


def test_the_timeline_names_its_categories_and_the_peak():
    layers = {"saved_activations": [0, 30 * GIB, 2 * GIB], "parameters": [GIB] * 3}
    found = words(timeline_svg([0, 5, 9], layers, 5))
    assert {"saved activations", "parameters", "peak", "30 GiB"} <= set(found)


def test_more_categories_than_colours_are_summed():
    layers = {f"c{n}": [n + 1, n + 2] for n in range(12)}
    found = words(timeline_svg([0, 1], layers, 0))
    assert "smaller ones" in found
    assert "c7" not in found
