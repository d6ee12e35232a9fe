"""A sweep as one HTML file that needs nothing else: table, loss against the values, loss by step."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ._html_parts import page, paragraph, section, table, text
from ._run_files import read_run
from ._sweep import COLUMNS, Sweep, cells, number_of, sweep_title
from ._sweep_plots import curves_svg, values_svg


def write_sweep(sweep: Sweep) -> Path:
    """Write report.html into the sweep's folder, from its runs' folders, and return its path."""
    path = sweep.folder / "report.html"
    path.write_text(_page(sweep), "utf-8")
    return path


def _page(sweep: Sweep) -> str:
    title, best = f"Sweep of {sweep.name}", sweep.best
    head = f"<header>\n<h1>{escape(title)}</h1>\n{paragraph(sweep_title(sweep), 'facts')}"
    if best is not None:
        head += paragraph(f"Best: {best.label}, held-out loss {best.held_out_loss:.4f}", "verdict open")
    return page(title, head + "</header>\n", _runs(sweep), _pictures(sweep), _failures(sweep))


def _runs(sweep: Sweep) -> str:
    rows = [(number_of(run), *run.values.values(), *cells(run)) for run in sweep.ranked]
    figures = range(1, 1 + len(sweep.keys) + len(COLUMNS))
    return section("Runs", table(("run", *sweep.keys, *COLUMNS), rows, numbers=figures))


def _pictures(sweep: Sweep) -> str:
    if sweep.best is None:
        return ""
    words = paragraph("A point has the colour of its run's curve below.", "facts")
    parts = [f"<figure>\n{values_svg(sweep, key)}</figure>\n" for key in sweep.keys]
    curves = [(run, read_run(run.folder).series("loss")) for run in sweep.ranked]
    curves = [(run, series) for run, series in curves if series[0]]
    by_step = f"<figure>\n{curves_svg(sweep, curves)}</figure>\n"
    return section("Held-out loss by value", words, *parts) + section("Training loss by step", by_step)


def _failures(sweep: Sweep) -> str:
    failed = [run for run in sweep.runs if run.failed]
    items = "".join(f"<li>{text(f'{run.label}: {run.failed}')}</li>\n" for run in failed)
    return (
        f'<section class="notes">\n<h2>Not finished</h2>\n<ul>\n{items}</ul>\n</section>\n' if items else ""
    )
