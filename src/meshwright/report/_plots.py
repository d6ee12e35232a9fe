"""The report's pictures as inline SVG: loss, memory, FLOPs. matplotlib loads when one is drawn."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from meshwright.units import format_bytes, format_rate

MOST_POINTS = 2000
MOST_LAYERS = 7  # of the timeline: more colours cannot be told apart
WIDE_NAME = 24  # letters: with longer names two columns of the legend fill its width
LEAST_FILLED = 0.1  # of what a device gives: with less, the bar shows the program alone
INK, FAINT = "#1f2933", "#9aa5b1"
COLOURS = ("#2f6f8f", "#e08e45", "#6a994e", "#8e5ea2", "#c8553d", "#4a5a6a", "#d4a72c", "#5fa8a8")


def loss_svg(
    training: tuple[Sequence[int], Sequence[float]],
    held_out: tuple[Sequence[int], Sequence[float]],
    unigram_entropy_nats: float | None,
) -> str:
    """Loss in nats by step, in training and on the held-out text; entropy of single tokens as a line."""

    def draw(axes: Any) -> None:
        _curves(axes, training, held_out, "loss, nats")
        if unigram_entropy_nats is not None:
            label = f"entropy of single held-out tokens, {unigram_entropy_nats:.3f}"
            axes.axhline(unigram_entropy_nats, color=INK, linewidth=1, linestyle=(0, (4, 3)), label=label)
        axes.legend(frameon=False, loc="upper right")

    return svg_of(draw, 8.6, 3.4, "loss by step")


def metric_svg(
    name: str,
    training: tuple[Sequence[int], Sequence[float]],
    held_out: tuple[Sequence[int], Sequence[float]],
) -> str:
    """Another metric by step, in training and on the held-out data."""

    def draw(axes: Any) -> None:
        _curves(axes, training, held_out, name)
        axes.legend(frameon=False, loc="lower right")

    return svg_of(draw, 8.6, 2.6, f"{name} by step")


def _curves(
    axes: Any,
    training: tuple[Sequence[int], Sequence[float]],
    held_out: tuple[Sequence[int], Sequence[float]],
    label: str,
) -> None:
    axes.plot(*thinned(*training), color=COLOURS[0], linewidth=1.1, label="training")
    if held_out[0]:
        axes.plot(*held_out, color=COLOURS[1], linewidth=1.6, marker="o", markersize=4, label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)


def memory_svg(parts: Mapping[str, int], usable_bytes: int | None) -> str:
    """One bar of a device's memory by category, against what it gives where that is known."""
    total = sum(parts.values())
    beyond = usable_bytes is not None and total < LEAST_FILLED * usable_bytes

    def draw(axes: Any) -> None:
        left = 0
        for place, (name, num_bytes) in enumerate(parts.items()):
            colour = COLOURS[place % len(COLOURS)]
            label = f"{name}, {format_bytes(num_bytes)}"
            axes.barh(0, num_bytes, left=left, color=colour, height=0.6, label=label, edgecolor="white")
            left += num_bytes
        if usable_bytes is not None:
            usable = f"usable, {format_bytes(usable_bytes)}"
            if beyond:
                axes.plot([], [], " ", label=f"{usable}: far to the right")
            else:
                axes.axvline(usable_bytes, color=INK, linewidth=1.5, label=usable)
        axes.set_xlim(0, 1.02 * max(total, 0 if beyond else usable_bytes or 0, 1))
        _byte_axis(axes)
        axes.set_yticks([])
        columns = 3 if all(len(name) < WIDE_NAME for name in parts) else 2
        axes.spines["left"].set_visible(False)
        axes.legend(frameon=False, ncols=columns, loc="upper left", bbox_to_anchor=(0, -0.35), fontsize=8.5)

    return svg_of(draw, 8.6, 1.0, "memory of one device by category")


def flops_svg(by_phase: Mapping[str, int]) -> str:
    """A bar for each phase of the executed FLOPs."""

    def draw(axes: Any) -> None:
        names = list(by_phase)
        axes.barh(names, list(by_phase.values()), color=COLOURS[0], height=0.6)
        largest = max(by_phase.values())
        for place, flops in enumerate(by_phase.values()):
            beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(format_rate(flops, "FLOP"), (flops, place), fontsize=8.5, **beside)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * largest)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)

    return svg_of(draw, 8.6, 0.35 + 0.38 * len(by_phase), "executed FLOPs by phase")


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Every n-th point, and the last, so that a long run's page stays small."""
    stride = max(1, math.ceil(len(steps) / MOST_POINTS))
    last = [] if not steps or (len(steps) - 1) % stride == 0 else [-1]
    return (
        [*steps[::stride], *(steps[i] for i in last)],
        [*values[::stride], *(values[i] for i in last)],
    )


def timeline_svg(instants: Sequence[int], by_category: Mapping[str, Sequence[int]], peak_instant: int) -> str:
    """Bytes alive through a step, stacked by category; an instant is a place in the schedule."""
    shown = list(by_category)[:MOST_LAYERS]
    layers = {name.replace("_", " "): by_category[name] for name in shown}
    rest = [name for name in by_category if name not in shown]
    if rest:
        layers["smaller ones"] = [sum(by_category[name][i] for name in rest) for i in range(len(instants))]

    def draw(axes: Any) -> None:
        colours = [COLOURS[place % len(COLOURS)] for place in range(len(layers))]
        axes.stackplot(instants, *layers.values(), labels=list(layers), colors=colours, step="post")
        axes.axvline(peak_instant, color=INK, linewidth=1, linestyle=(0, (4, 3)), label="peak")
        axes.set_xlim(instants[0], instants[-1])
        axes.set_xlabel("instruction of the schedule; a loop's body is passed once")
        _byte_axis(axes, "y")
        axes.legend(frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.2), fontsize=8.5)

    return svg_of(draw, 8.6, 3.0, "memory of one device through a step")


def _byte_axis(axes: Any, which: str = "x") -> None:
    """At most six ticks at 1, 2 or 5 times a power of two prefix, so that labels are short."""
    _, most = axes.get_xlim() if which == "x" else axes.get_ylim()
    unit = 1024 ** max(0, math.floor(math.log(max(most / 3, 1), 1024)))
    step = next(
        s for power in range(4) for s in (10**power, 2 * 10**power, 5 * 10**power) if s * 6 >= most / unit
    )
    ticks = [n * step * unit for n in range(int(most / (step * unit)) + 1)]
    names = {1: "B", 1024: "KiB", 1024**2: "MiB", 1024**3: "GiB", 1024**4: "TiB"}
    labels = [f"{tick // unit} {names[unit]}" if tick else "0" for tick in ticks]
    (axes.set_xticks if which == "x" else axes.set_yticks)(ticks, labels)


def svg_of(draw: Callable[[Any], None], width: float, height: float, label: str) -> str:
    """What `draw` puts on a matplotlib axes, as an `<svg>` element that refers to nothing outside it."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: small, sharp, searchable
        "svg.hashsalt": label,  # the same run gives the same bytes
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
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the pictures of one page would share these names
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{escape(label)}">',
        text,
    )
    return text
