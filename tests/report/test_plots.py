from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from meshwright.report._html_parts import (
    MOST_LAYERS,
    MOST_POINTS,
    colours_of,
    loss_svg,
    metric_svg,
    thinned,
    timeline_svg,
)

GIB = 2**30


def parsed(svg: str) -> ElementTree.Element:
    """As XML; in HTML the prefix of links needs no declaration, attributes no quotes, and lists no end."""
    svg = re.sub(r"class=(\w+)", r'class="\1"', svg)
    return ElementTree.fromstring(f'<figure xmlns:xlink="x">{svg}</figure>')


def words(svg: str) -> list[str]:
    shown = [each for each in parsed(svg).iter() if each.tag in ("text", "li")]
    return [text for each in shown if (text := "".join(each.itertext()).strip())]


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


@pytest.mark.parametrize("num_bytes", [1, 999, 5000, 10**6, 10**9, 10**12, 5 * 10**14])
def test_every_size_has_a_few_ticks(num_bytes: int):
    ticks = [
        word
        for word in words(timeline({"a": [num_bytes, num_bytes]}))
        if re.fullmatch(r"0|\d+ [KMGT]?i?B", word) and not re.fullmatch(r"\d+", word[1:])
    ]
    assert 2 * 2 <= len(ticks) <= 2 * 8  # in both pictures; the axis of instants begins with 0 too


def test_a_picture_is_the_same_bytes_each_time_and_names_nothing_outside():
    first, second = (timeline({"parameters": [1, 2]}) for _ in range(2))
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


def timeline(layers):
    return timeline_svg(range(len(next(iter(layers.values())))), layers, 0, colours_of(layers))


def test_the_timeline_names_its_categories_and_the_peak():
    found = words(timeline({"saved_activations": [0, 30 * GIB, 2 * GIB], "parameters": [GIB] * 3}))
    assert {"saved activations", "parameters", "peak", "30 GiB"} <= set(found)


def test_thin_layers_are_summed():
    names = list(colours_of(()))[:14]
    layers = {name: [n + 1, n + 2] for n, name in enumerate(names)}
    found = words(timeline(layers))
    assert "smaller ones" in found
    assert names[-1].replace("_", " ") in found
    assert names[0] not in found


def test_each_picture_is_drawn_for_a_wide_and_for_a_narrow_page():
    for picture in (
        loss_svg(([1, 2], [5.0, 4.0]), ([], []), None),
        metric_svg("accuracy", ([1, 2], [5.0, 4.0]), ([], [])),
        timeline({"parameters": [1, 2]}),
    ):
        kinds = [(each.get("class"), each.get("viewBox").split()) for each in parsed(picture).iter("svg")]
        assert [kind for kind, _ in kinds] == ["wide", "narrow"]
        (_, wide), (_, narrow) = kinds
        assert float(narrow[2]) < 0.6 * float(wide[2])  # so that its letters stay as large as the page's


def test_no_colour_of_the_timeline_is_used_twice():
    layers = {name: [n + 1, 20 - n] for n, name in enumerate(["params", "x", *list(colours_of(()))[:18]])}
    found = parsed(timeline(layers))
    shown = [each.get("style") for each in found.iter("b") if each.get("class") is None]
    assert len(shown) == len(set(shown)) == MOST_LAYERS + 1
