"""The pictures of a page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from meshwright.contrib.pages import page_section
from meshwright.contrib.sweeps import Sweep, SweepRun
from meshwright.contrib.sweeps._sweep_report import _number, sweep_curves_plot, values_plot
from meshwright.ledger import Timeline
from meshwright.report._model import (
    COLOURS,
    CURVES,
    FAINT,
    MOST_LAYERS,
    MOST_POINTS,
    SPARE,
    Plot,
    colours_of,
    curves_plot,
    section,
    thinned,
    timeline_plot,
)

GIB = 2**30


def drawn_on_page(plot: Plot) -> str:
    (made,) = section("", plot)
    return page_section(made)


def loss_picture(training, held_out=((), ()), level=None) -> str:
    return drawn_on_page(curves_plot("loss", training, held_out, unit=", nats", level=level))


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
    points = longest_line(loss_picture((steps, [25.0 - step**1.1 for step in steps])))
    assert len(points) == 20
    assert [y for _, y in points] == sorted(y for _, y in points)  # SVG counts downwards
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_held_out_loss_and_entropy_are_named_in_the_picture():
    found = words(loss_picture(([1, 2], [5.0, 4.0]), ([2], [4.5]), (3.3125, "entropy, 3.312")))
    assert {"training", "held out", "entropy, 3.312", "step"} <= set(found)


def test_one_step_makes_a_picture():
    assert "training" in words(loss_picture(([1], [5.0])))


@pytest.mark.parametrize("num_bytes", [1, 999, 5000, 10**6, 10**9, 10**12, 5 * 10**14])
def test_every_size_has_a_few_ticks(timeline, num_bytes: int):
    ticks = [
        word
        for word in words(timeline({"a": [num_bytes, num_bytes]}))
        if re.fullmatch(r"0|\d+ [KMGT]?i?B", word) and not re.fullmatch(r"\d+", word[1:])
    ]
    assert 2 * 2 <= len(ticks) <= 2 * 8  # in both pictures; the axis of instants begins with 0 too


def test_a_picture_is_the_same_bytes_each_time_and_names_nothing_outside(timeline):
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


@pytest.fixture
def timeline(weighing):
    def make(layers):
        count = len(next(iter(layers.values())))
        line = Timeline(instants=tuple(range(count)), last_instant=count, peak_instant=0, by_category=layers)
        return drawn_on_page(timeline_plot(dataclasses.replace(weighing().ledger.memory, timeline=line)))

    return make


def test_the_timeline_names_its_categories_and_the_peak(timeline):
    found = words(timeline({"saved_activations": [0, 30 * GIB, 2 * GIB], "parameters": [GIB] * 3}))
    assert {"saved activations", "parameters", "peak", "30 GiB"} <= set(found)


def test_thin_layers_are_summed(timeline):
    names = list(colours_of(()))[:14]
    layers = {name: [n + 1, n + 2] for n, name in enumerate(names)}
    found = words(timeline(layers))
    assert "smaller ones" in found
    assert names[-1].replace("_", " ") in found
    assert names[0] not in found


def test_each_picture_is_drawn_for_a_wide_and_for_a_narrow_page(timeline):
    for picture in (
        loss_picture(([1, 2], [5.0, 4.0])),
        timeline({"parameters": [1, 2]}),
    ):
        kinds = [(each.get("class"), each.get("viewBox").split()) for each in parsed(picture).iter("svg")]
        assert [kind for kind, _ in kinds] == ["wide", "narrow"]
        (_, wide), (_, narrow) = kinds
        assert float(narrow[2]) < 0.6 * float(wide[2])  # so that its letters stay as large as the page's


def test_no_colour_of_the_timeline_is_used_twice(timeline):
    layers = {name: [n + 1, 20 - n] for n, name in enumerate(["params", "x", *list(colours_of(()))[:18]])}
    found = parsed(timeline(layers))
    shown = [each.get("style") for each in found.iter("b") if each.get("class") is None]
    assert len(shown) == len(set(shown)) == MOST_LAYERS + 1


def test_no_two_categories_share_a_colour():
    colours = colours_of([f"mine_{n}" for n in range(20)])
    assert len(colours) == len(COLOURS) + len(SPARE)
    named = {name: colour for name, colour in colours.items() if name not in ("training", "held out")}
    assert len(set(named.values())) == len(named)  # curves stand in pictures of their own
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in colours.values())


def test_a_category_has_its_colour_whatever_it_stands_beside():
    assert colours_of(["gradients"])["gradients"] == colours_of(["mine", "parameters"])["gradients"]


def a_run(loss, **values):
    return SweepRun(
        values=values,
        folder=Path(SweepRun.label_of(values)),
        steps=3,
        held_out_loss=loss,
        loss=loss,
        step_seconds=None,
        tokens_per_second=None,
        failed="" if loss else "diverged",
        earlier=False,
    )


def axes_of(plot: Plot):
    axes = Figure().add_subplot()
    plot.draw(axes)
    return axes


def a_sweep(*runs):
    keys = tuple(runs[0].values)
    return Sweep(name="x", fleet="y", folder=Path("here"), keys=keys, runs=runs, not_run=0, stopped=False)


def test_a_line_joins_the_runs_that_differ_in_one_key_alone_in_order_of_its_values():
    losses = {("1e-2", "8"): 3.0, ("1e-4", "8"): 2.0, ("1e-2", "16"): 5.0, ("1e-4", "16"): 4.0}
    sweep = a_sweep(*(a_run(loss, rate=rate, rows=rows) for (rate, rows), loss in losses.items()))
    plot = values_plot(sweep, "rate")
    axes = axes_of(plot)
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert lines == {"rows=8": ([1e-4, 1e-2], [2.0, 3.0]), "rows=16": ([1e-4, 1e-2], [4.0, 5.0])}
    assert axes.get_xscale() == "log"
    assert {text.get_text() for text in axes.get_xticklabels()} == {"1e-4", "1e-2"}
    assert plot.shapes == (("\u25cf", "rows=8"), ("\u25a0", "rows=16"))
    assert axes_of(values_plot(sweep, "rows")).get_xscale() == "linear"


def test_runs_that_failed_are_crosses_and_words_stand_side_by_side():
    runs = (a_run(3.0, kind="sgd"), a_run(None, kind="adamw"), a_run(2.0, kind="lion"))
    plot = values_plot(a_sweep(*runs), "kind")
    assert plot.shapes == (("\u00d7", "not finished"),)
    axes = axes_of(plot)
    line, crosses = axes.get_lines()
    assert list(line.get_xdata()) == [0, 2]
    assert list(crosses.get_xdata()) == [1]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["sgd", "adamw", "lion"]


def test_the_best_curves_are_coloured_and_the_others_grey():
    runs = [a_run(float(n), rate=str(n)) for n in range(9)]
    plot = sweep_curves_plot(a_sweep(*runs), [(run, ([1, 2], [5.0, run.loss])) for run in runs])
    by_end = {line.get_ydata()[-1]: line.get_color() for line in axes_of(plot).get_lines()}
    assert by_end[0.0] == CURVES[0]
    assert by_end[8.0] == FAINT
    assert len(set(by_end.values())) == len(CURVES) + 1
    assert [name for _, name in plot.colours] == [*(f"rate={n}" for n in range(7)), "2 others"]


def test_a_run_has_the_same_colour_in_every_picture():
    runs = [a_run(3.0, rate="1"), a_run(1.0, rate="2"), a_run(2.0, rate="3")]
    sweep = a_sweep(*runs)
    curves = axes_of(sweep_curves_plot(sweep, [(run, ([1, 2], [5.0, run.loss])) for run in runs]))
    by_loss = {line.get_ydata()[-1]: to_rgba(line.get_color()) for line in curves.get_lines()}
    (points,) = axes_of(values_plot(sweep, "rate")).collections
    at = {
        loss: tuple(colour)
        for (_, loss), colour in zip(points.get_offsets(), points.get_facecolors(), strict=True)
    }
    assert at == by_loss
    assert len(set(at.values())) == 3


def test_numbers_are_read_as_overrides_write_them():
    assert _number("1_000") == 1000
    assert _number("none") is None
    assert _number("inf") is None
