"""Draw SVG without matplotlib: scattered dots with tooltips, and the lanes of a step.

Used by: `_page`. A drawing is an `<svg>` element that needs nothing outside it. The words that appear when
the pointer rests on a part are the part's `<title>`, for which a browser needs no script.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from typing import Literal

from meshwright.report import FAINT, GRID, INK, Column, Lane, Scatter

DOT_COLOURS = {"best": "#3f8f4f", "fits": "#2f6f8f", "does not fit": "#c8372d"}
LANE_WIDTH, LANE_HEIGHT = 2000, 100  # units of a lane, which is as wide as the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The units of a drawing with its margins, and the most ticks for which an axis has room."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: int
    y_ticks: int


SIZES = {
    "wide": Size(width=700, height=320, left=62, right=26, top=10, bottom=30, x_ticks=7, y_ticks=6),
    "narrow": Size(width=360, height=280, left=62, right=26, top=10, bottom=28, x_ticks=4, y_ticks=5),
}


def scatter_svg(scatter: Scatter, kind: Literal["wide", "narrow"]) -> str:
    """Return the dots on axes of which y begins at zero, for pages of one width; the best is on top."""
    size = SIZES[kind]
    xs, ys = [dot.x for dot in scatter.dots], [dot.y for dot in scatter.dots]
    low, high = min(xs) * 0.97, max(xs) * 1.03
    most = max([*ys, *((scatter.limit[0],) if scatter.limit else ())]) * 1.05
    floor = size.height - size.bottom

    def across(x: float) -> float:
        return size.left + (size.width - size.left - size.right) * (x - low) / (high - low)

    def down(y: float) -> float:
        return floor - (floor - size.top) * y / most

    def level(y: float, style: str) -> str:
        ends = f'x1="{size.left}" x2="{size.width - size.right}"'
        return f'<line {ends} y1="{down(y):.1f}" y2="{down(y):.1f}" {style}/>'

    lines: list[str] = []
    for y, words in scatter.y_ticks(0, most, size.y_ticks):
        lines.append(level(y, f'stroke="{GRID}"'))
        lines.append(_text(size.left - 8, down(y) + 4, words, "end"))
    for x, words in scatter.x_ticks(low, high, size.x_ticks):
        lines.append(f'<path d="M{across(x):.1f} {floor}v4" stroke="{FAINT}"/>')
        lines.append(_text(across(x), floor + 18, words, "middle"))
    if scatter.limit is not None:
        lines.append(level(scatter.limit[0], f'stroke="{INK}" stroke-dasharray="5 4"'))
    front = sorted((dot.x, dot.y) for dot in scatter.dots if dot.joined)
    points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in front)
    dashed = 'stroke-width="1.5" stroke-dasharray="5 4"'
    lines.append(f'<polyline points="{points}" fill="none" stroke="{FAINT}" {dashed}/>')
    for dot in reversed(scatter.dots):
        place = f'cx="{across(dot.x):.1f}" cy="{down(dot.y):.1f}" r="{7 if dot.kind == "best" else 5}"'
        title = f"<title>{escape(dot.words)}</title>"
        lines.append(f'<circle {place} fill="{DOT_COLOURS[dot.kind]}" stroke="white">{title}</circle>')
    box = f'viewBox="0 0 {size.width} {size.height}"'
    head = f'<svg class="{kind}" {box} role="img" aria-label="{escape(scatter.label)}" font-size="12">'
    return "\n".join((head, *lines, "</svg>\n"))


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}">{escape(words)}</text>'


def lane_svg(lane: Lane, label: str) -> str:
    """Return a lane without words, so that it can be stretched to any width."""
    box = f'viewBox="0 0 {LANE_WIDTH} {LANE_HEIGHT}" preserveAspectRatio="none" shape-rendering="crispEdges"'
    head = f'<svg class="lane" {box} role="img" aria-label="{escape(f"{label}: {lane.name}")}">'
    return "\n".join((head, *map(_column, lane.columns), "</svg>\n"))


def _column(column: Column) -> str:
    """Return the parts of a column, the first at the bottom."""
    left, right = (round(LANE_WIDTH * end) for end in (column.begin, column.end))
    heights = pairwise(accumulate((share for _, share in column.parts), initial=0.0))
    levels = ((LANE_HEIGHT * (1 - low), LANE_HEIGHT * (1 - high)) for low, high in heights)
    parts = "".join(
        f'<path fill="{colour}" d="M{left} {floor:.1f}H{right}V{top:.1f}H{left}z"/>'
        for (colour, _), (floor, top) in zip(column.parts, levels, strict=True)
    )
    return f"<g><title>{escape(column.words)}</title>{parts}</g>"
