"""Pictures with axes as inline SVG: loss and metrics by step, memory through a step.

Each is drawn twice, for a wide page and for a narrow one, and the style sheet shows one of the two: text in a
picture that is only made smaller cannot be read. matplotlib loads when a picture is drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from ._html_parts import COLOURS, FAINT, INK, SMALLER, legend

MOST_POINTS = 2000
MOST_LAYERS = 10  # of the timeline: thinner ones are summed
WIDE, NARROW = 8.6, 4.4  # inches


def loss_svg(
    training: tuple[Sequence[int], Sequence[float]],
    held_out: tuple[Sequence[int], Sequence[float]],
    unigram_entropy_nats: float | None,
) -> str:
    """Loss in nats by step, in training and on the held-out text; entropy of single tokens as a line."""

    def draw(axes: Any) -> None:
        _curves(axes, training, held_out, "loss, nats")
        if unigram_entropy_nats is not None:
            axes.axhline(unigram_entropy_nats, color=INK, linewidth=1, linestyle=(0, (4, 3)))

    lines: list[tuple[str, str]] = []
    if unigram_entropy_nats is not None:
        lines.append((INK, f"entropy of single held-out tokens, {unigram_entropy_nats:.3f}"))
    return svg_of(draw, 3.2, "loss by step") + legend(_curve_names(held_out), lines)


def metric_svg(
    name: str,
    training: tuple[Sequence[int], Sequence[float]],
    held_out: tuple[Sequence[int], Sequence[float]],
) -> str:
    """Another metric by step, in training and on the held-out data."""

    def draw(axes: Any) -> None:
        _curves(axes, training, held_out, name)

    return svg_of(draw, 2.6, f"{name} by step") + legend(_curve_names(held_out))


def _curve_names(held_out: tuple[Sequence[int], Sequence[float]]) -> list[tuple[str, str]]:
    names = ("training", "held out") if held_out[0] else ("training",)
    return [(COLOURS[name], name) for name in names]


def _curves(
    axes: Any,
    training: tuple[Sequence[int], Sequence[float]],
    held_out: tuple[Sequence[int], Sequence[float]],
    label: str,
) -> None:
    axes.plot(*thinned(*training), color=COLOURS["training"], linewidth=1.1)
    if held_out[0]:
        axes.plot(*held_out, color=COLOURS["held out"], linewidth=1.6, marker="o", markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Every n-th point, and the last, so that a long run's page stays small."""
    stride = max(1, math.ceil(len(steps) / MOST_POINTS))
    last = [] if not steps or (len(steps) - 1) % stride == 0 else [-1]
    return (
        [*steps[::stride], *(steps[i] for i in last)],
        [*values[::stride], *(values[i] for i in last)],
    )


def timeline_svg(
    instants: Sequence[int],
    by_category: Mapping[str, Sequence[int]],
    peak_instant: int,
    colours: Mapping[str, str],
) -> str:
    """Bytes alive through a step, stacked by category; an instant is a place in the schedule."""
    largest = sorted((name for name in by_category if name in colours), key=lambda n: -max(by_category[n]))
    shown = [name for name in by_category if name in largest[:MOST_LAYERS]]
    layers = {name: by_category[name] for name in shown}
    if rest := [name for name in by_category if name not in shown]:
        layers[SMALLER] = [sum(by_category[name][i] for name in rest) for i in range(len(instants))]

    def draw(axes: Any) -> None:
        used = [colours[name] for name in layers]
        axes.stackplot(instants, *layers.values(), colors=used, step="post")
        axes.axvline(peak_instant, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xlim(instants[0], instants[-1])
        axes.set_xlabel("instruction of the schedule; loops once")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
        _byte_axis(axes)

    words = [(colours[name], name.replace("_", " ")) for name in layers]
    return svg_of(draw, 2.8, "memory of one device through a step") + legend(words, [(INK, "peak")])


def _byte_axis(axes: Any) -> None:
    """Put at most six ticks at 1, 2 or 5 times a power of two prefix, so that labels are short."""
    _, most = axes.get_ylim()
    unit = 1024 ** max(0, math.floor(math.log(max(most / 3, 1), 1024)))
    step = next(
        s for power in range(4) for s in (10**power, 2 * 10**power, 5 * 10**power) if s * 6 >= most / unit
    )
    ticks = [n * step * unit for n in range(int(most / (step * unit)) + 1)]
    names = {1: "B", 1024: "KiB", 1024**2: "MiB", 1024**3: "GiB", 1024**4: "TiB"}
    labels = [f"{tick // unit} {names[unit]}" if tick else "0" for tick in ticks]
    axes.set_yticks(ticks, labels)


def svg_of(draw: Callable[[Any], None], height: float, label: str) -> str:
    """Return what `draw` puts on a matplotlib axes as two `<svg>` elements, `wide` and `narrow`.

    They refer to nothing outside them. `height`: inches.
    """
    return _svg(draw, WIDE, height, label, "wide") + _svg(draw, NARROW, height, label, "narrow")


def _svg(draw: Callable[[Any], None], width: float, height: float, label: str, kind: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: small, sharp, searchable
        "svg.hashsalt": f"{label} {kind}",  # the same run gives the same bytes
        "font.family": "sans-serif",
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height))
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # an element of HTML needs none
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # hundredths of a point: finer cannot be seen
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the pictures of one page would share these names
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg class="{kind}" viewBox="\1" role="img" aria-label="{escape(label)}">',
        text,
    )
    return text
