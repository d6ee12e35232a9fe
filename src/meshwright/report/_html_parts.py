"""Build the elements of a page: tables, bars, and plots with axes as inline SVG.

The functions here escape the text that they are given. A category has the same colour in every picture and on
every page. Each plot is drawn twice, for a wide and for a narrow page, and the style sheet shows one of the
two: text in a scaled-down plot would be unreadable. matplotlib is imported when a plot is drawn. Used by:
`_html`, `_html_sections`, `_results`, `_sweep`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

INK, FAINT = "#1f2933", "#9aa5b1"
SMALLER, BESIDE = "smaller ones", "beside the program"
COLOURS = {
    # memory, by the ledger's categories
    "parameters": "#1f4e79",
    "gathered_parameters": "#5b9bd5",
    "gradients": "#b83227",
    "optimizer_state": "#7d4ea3",
    "optimizer_temporaries": "#c3a6dc",
    "model_state": "#3d3b8e",
    "saved_activations": "#e08e45",
    "recomputed_activations": "#f0c94d",
    "activation_gradients": "#e68a8a",
    "forward_temporaries": "#a9c95a",
    "logits_and_loss": "#3f7d3a",
    "collective_staging": "#1b9e9e",
    "workspaces": "#7a5a45",
    "batch": "#9c2c77",
    "keys": "#d869a8",
    "step": "#5c6b1f",
    "outputs": "#8fd3c7",
    "constants": "#c79f6b",
    "other": "#6f8191",
    "fragmentation": "#b4bec8",
    "idle_in_donated_arguments": "#d5c9b8",
    BESIDE: "#3b4754",
    SMALLER: "#e3d7ea",
    # the time of a step
    "matmul": "#2f6f8f",
    "attention": "#e6a23c",
    "convolution": "#4b8f4b",
    "memory-bound": "#9a6fb0",
    "host-transfer": "#94562f",
    "launch": "#c4ccd4",
    "all-gather": "#c8553d",
    "reduce-scatter": "#7e2f2a",
    "all-reduce": "#e9967a",
    "all-to-all": "#d4a72c",
    "collective-permute": "#a33b6d",
    # FLOPs by phase
    "forward": "#4c86c6",
    "backward": "#1d3f72",
    "recompute": "#f2d16b",
    "optimizer": "#8a63b3",
    # curves
    "training": "#2f6f8f",
    "held out": "#e08e45",
    "not finished": "#b3261e",
}
# For names that only a foreign program has: the arguments of its step.
SPARE = ("#00695c", "#ef6c00", "#5d4037", "#ad1457", "#283593", "#9e9d24", "#0097a7", "#f48fb1")
_FILE = re.compile(r"[\w.-]+\.(?:py|jsonl?|toml|html|txt|md|npy|npz|bin|safetensors|log)\b(?::\d+)?")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return `COLOURS` extended by a spare colour for each unknown name.

    No two names share a colour. Unknown names beyond the number of spare colours get none.
    """
    unknown = dict.fromkeys(name for name in names if name not in COLOURS)
    return {**COLOURS, **dict(zip(unknown, SPARE, strict=False))}


def text(words: str) -> str:
    """Return escaped text in which file names do not break and paths may break after a slash."""
    found = re.sub(r"(?<=[\w\]])/(?=[\w\[])", "/<wbr>", escape(words))
    return _FILE.sub(lambda name: f"<span class=file>{name[0]}</span>", found)


def page(title: str, *sections: str) -> str:
    """Return a whole HTML page. `title` is text; `sections` are HTML."""
    style = files("meshwright.report").joinpath("report.css").read_text("utf-8")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: Meshwright</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return HTML parts of the page below their title."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph of escaped text; `kind` is its class in the style sheet."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{text(words)}</p>\n"


MANY_COLUMNS = 5  # with this many or more, a narrow screen shows each row as a card


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """Return a table of escaped text; the columns with indices in `numbers` are right-aligned."""
    many = len(head) >= MANY_COLUMNS

    def cell(tag: str, place: int, words: str) -> str:
        number = " class=number" if place in numbers else ""
        named = f' data-head="{escape(head[place])}"' if many and tag == "td" else ""
        return f"<{tag}{number}{named}>{text(words)}</{tag}>"

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(cell(tag, place, words) for place, words in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    kind = " class=many" if many else ""
    return (
        f"<div class=scroll><table{kind}>\n<thead><tr>{cells('th', head)}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def bar(
    parts: Mapping[str, float],
    whole: float,
    colours: Mapping[str, str],
    label: str,
    mark: float | None = None,
) -> str:
    """Return one bar with a segment for each part.

    A segment's width is its share of `whole`. `mark` is the position of a line across the bar.
    """
    stretches = "".join(
        f'<i title="{escape(name.replace("_", " "))}" '
        f'style="width:{100 * size / whole:.3f}%;background:{colours[name]}"></i>'
        for name, size in parts.items()
    )
    line = "" if mark is None else f'<u style="left:{100 * mark / whole:.3f}%"></u>'
    return f'<div class=bar role=img aria-label="{escape(label)}">{stretches}{line}</div>\n'


def legend(
    items: Iterable[tuple[str, str]],
    lines: Iterable[tuple[str, str]] = (),
    shapes: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the legend of a picture: a colour and words for each item.

    `lines` are shown as dashes. `shapes` are characters in place of colours.
    """
    squares = "".join(f'<li><b style="background:{c}"></b>{text(words)}</li>' for c, words in items)
    dashes = "".join(f'<li><b class=dash style="color:{c}"></b>{text(words)}</li>' for c, words in lines)
    letters = "".join(f"<li>{text(f'{shape} {words}')}</li>" for shape, words in shapes)
    return f"<ul class=legend>{squares}{dashes}{letters}</ul>\n"


MOST_POINTS = 2000
MOST_LAYERS = 10  # of the timeline: smaller ones are summed
WIDE, NARROW = 8.6, 4.4  # inches


def loss_svg(
    training: tuple[Sequence[int], Sequence[float]],
    held_out: tuple[Sequence[int], Sequence[float]],
    unigram_entropy_nats: float | None,
) -> str:
    """Return a plot of training and held-out loss in nats by step.

    The entropy of single tokens is a horizontal line.
    """

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
    """Return a plot of another metric by step, in training and on the held-out data."""

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
    """Return every n-th point and the last one, so that the page of a long run stays small."""
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
    """Return a plot of the bytes alive through a step, stacked by category.

    An instant is the position of an instruction in the schedule.
    """
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
    """Set ticks at multiples of 1, 2 or 5 times a power of ten of a binary unit, at most six above zero."""
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
    """Return the plot that `draw` makes on matplotlib axes as two `<svg>` elements, `wide` and `narrow`.

    The elements reference nothing outside them. `height` is in inches.
    """
    return _svg(draw, WIDE, height, label, "wide") + _svg(draw, NARROW, height, label, "narrow")


def _svg(draw: Callable[[Any], None], width: float, height: float, label: str, kind: str) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",  # keeps text as text: small, sharp, searchable
        "svg.hashsalt": f"{label} {kind}",  # makes the bytes of the same run reproducible
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
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)  # inline SVG needs no namespaces
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)  # keep hundredths of a point: finer detail is invisible
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the ids would repeat among the plots of one page
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg class="{kind}" viewBox="\1" role="img" aria-label="{escape(label)}">',
        text,
    )
    return text
