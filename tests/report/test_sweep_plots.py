from pathlib import Path

import pytest
from matplotlib.figure import Figure

from meshwright.report import Sweep, SweepRun, _sweep_plots
from meshwright.report._sweep_plots import curves_svg, values_svg


def a_run(loss, **values):
    return SweepRun(
        values=values,
        folder=Path("here"),
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
    """What is drawn on the axes, in place of its SVG."""

    def svg_of(draw, *_):
        axes = Figure().add_subplot()
        draw(axes)
        return axes

    monkeypatch.setattr(_sweep_plots, "svg_of", svg_of)


def a_sweep(*runs):
    keys = tuple(runs[0].values)
    return Sweep(name="x", fleet="y", folder=Path("here"), keys=keys, runs=runs, not_run=0, stopped=False)


def test_a_line_joins_the_runs_that_differ_in_one_key_alone_in_order_of_its_values(drawn):
    losses = {("1e-2", "8"): 3.0, ("1e-4", "8"): 2.0, ("1e-2", "16"): 5.0, ("1e-4", "16"): 4.0}
    sweep = a_sweep(*(a_run(loss, rate=rate, rows=rows) for (rate, rows), loss in losses.items()))
    axes = values_svg(sweep, "rate")
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert lines == {"rows=8": ([1e-4, 1e-2], [2.0, 3.0]), "rows=16": ([1e-4, 1e-2], [4.0, 5.0])}
    assert axes.get_xscale() == "log"
    assert {text.get_text() for text in axes.get_xticklabels()} == {"1e-4", "1e-2"}
    assert values_svg(sweep, "rows").get_xscale() == "linear"


def test_runs_that_failed_are_crosses_and_words_stand_side_by_side(drawn):
    axes = values_svg(
        a_sweep(a_run(3.0, kind="sgd"), a_run(None, kind="adamw"), a_run(2.0, kind="lion")), "kind"
    )
    line, crosses = axes.get_lines()
    assert list(line.get_xdata()) == [0, 2]
    assert list(crosses.get_xdata()) == [1]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["sgd", "adamw", "lion"]


def test_the_best_curves_are_coloured_and_the_others_grey(drawn):
    curves = [(a_run(float(n), rate=str(n)), ([1, 2], [5.0, float(n)])) for n in range(9)]
    axes = curves_svg(curves)
    by_end = {line.get_ydata()[-1]: line for line in axes.get_lines()}
    assert by_end[0.0].get_color() == _sweep_plots.COLOURS[0]
    assert by_end[8.0].get_color() == _sweep_plots.FAINT
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"rate={n}" for n in range(7)]


def test_numbers_are_read_as_overrides_write_them():
    assert _sweep_plots._number("1_000") == 1000
    assert _sweep_plots._number("none") is None
    assert _sweep_plots._number("inf") is None
