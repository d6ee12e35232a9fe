import re
from pathlib import Path

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from meshwright.report import _sweep as _sweep_plots
from meshwright.report._sweep import curves_svg, values_svg
from meshwright.results import Sweep, SweepRun


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


@pytest.fixture
def drawn(monkeypatch):
    """The axes of each picture, which is then left out of the page."""
    found = []

    def svg_of(draw, *_):
        found.append(Figure().add_subplot())
        draw(found[-1])
        return ""

    monkeypatch.setattr(_sweep_plots, "svg_of", svg_of)
    return found


def a_sweep(*runs):
    keys = tuple(runs[0].values)
    return Sweep(name="x", fleet="y", folder=Path("here"), keys=keys, runs=runs, not_run=0, stopped=False)


def test_a_line_joins_the_runs_that_differ_in_one_key_alone_in_order_of_its_values(drawn):
    losses = {("1e-2", "8"): 3.0, ("1e-4", "8"): 2.0, ("1e-2", "16"): 5.0, ("1e-4", "16"): 4.0}
    sweep = a_sweep(*(a_run(loss, rate=rate, rows=rows) for (rate, rows), loss in losses.items()))
    legend = values_svg(sweep, "rate")
    axes = drawn[-1]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert lines == {"rows=8": ([1e-4, 1e-2], [2.0, 3.0]), "rows=16": ([1e-4, 1e-2], [4.0, 5.0])}
    assert axes.get_xscale() == "log"
    assert {text.get_text() for text in axes.get_xticklabels()} == {"1e-4", "1e-2"}
    assert "\u25cf rows=8" in legend
    assert "\u25a0 rows=16" in legend
    values_svg(sweep, "rows")
    assert drawn[-1].get_xscale() == "linear"


def test_runs_that_failed_are_crosses_and_words_stand_side_by_side(drawn):
    legend = values_svg(
        a_sweep(a_run(3.0, kind="sgd"), a_run(None, kind="adamw"), a_run(2.0, kind="lion")), "kind"
    )
    assert "not finished" in legend
    (axes,) = drawn
    line, crosses = axes.get_lines()
    assert list(line.get_xdata()) == [0, 2]
    assert list(crosses.get_xdata()) == [1]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["sgd", "adamw", "lion"]


def test_the_best_curves_are_coloured_and_the_others_grey(drawn):
    runs = [a_run(float(n), rate=str(n)) for n in range(9)]
    legend = curves_svg(a_sweep(*runs), [(run, ([1, 2], [5.0, run.loss])) for run in runs])
    by_end = {line.get_ydata()[-1]: line.get_color() for line in drawn[0].get_lines()}
    assert by_end[0.0] == _sweep_plots.CURVES[0]
    assert by_end[8.0] == _sweep_plots.FAINT
    assert len(set(by_end.values())) == len(_sweep_plots.CURVES) + 1
    names = [f"rate={n}" for n in range(7)]
    assert [name for name in re.findall(r"</b>([^<]*)</li>", legend)] == [*names, "2 others"]


def test_a_run_has_the_same_colour_in_every_picture(drawn):
    runs = [a_run(3.0, rate="1"), a_run(1.0, rate="2"), a_run(2.0, rate="3")]
    sweep = a_sweep(*runs)
    curves_svg(sweep, [(run, ([1, 2], [5.0, run.loss])) for run in runs])
    values_svg(sweep, "rate")
    curves, values = drawn
    by_loss = {line.get_ydata()[-1]: to_rgba(line.get_color()) for line in curves.get_lines()}
    (points,) = values.collections
    at = {
        loss: tuple(colour)
        for (_, loss), colour in zip(points.get_offsets(), points.get_facecolors(), strict=True)
    }
    assert at == by_loss
    assert len(set(at.values())) == 3


def test_numbers_are_read_as_overrides_write_them():
    assert _sweep_plots._number("1_000") == 1000
    assert _sweep_plots._number("none") is None
    assert _sweep_plots._number("inf") is None
