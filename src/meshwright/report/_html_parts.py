"""The pieces that pages are made of, and the colours of everything that a picture shows.

Text is escaped here, and nowhere else. A category has the same colour in every picture and on every page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

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
# For names that only a program of the user's own has: the arguments of its step.
SPARE = ("#00695c", "#ef6c00", "#5d4037", "#ad1457", "#283593", "#9e9d24", "#0097a7", "#f48fb1")
_FILE = re.compile(r"[\w.-]+\.(?:py|jsonl?|toml|html|txt|md|npy|npz|bin|safetensors|log)\b(?::\d+)?")


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name, no two alike; of those unknown the first few, as many as are spare."""
    unknown = dict.fromkeys(name for name in names if name not in COLOURS)
    return {**COLOURS, **dict(zip(unknown, SPARE, strict=False))}


def text(words: str) -> str:
    """Return escaped text in which file names stay whole and paths may break after a slash."""
    found = re.sub(r"(?<=[\w\]])/(?=[\w\[])", "/<wbr>", escape(words))
    return _FILE.sub(lambda name: f"<span class=file>{name[0]}</span>", found)


def page(title: str, *sections: str) -> str:
    """Return a whole page of sections that are HTML already; the title is text."""
    style = files("meshwright.report").joinpath("report.css").read_text("utf-8")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: Meshwright</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return parts of the page below their title."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def paragraph(words: str, kind: str = "") -> str:
    """Return a paragraph of escaped text; `kind` is its class in the style sheet."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{text(words)}</p>\n"


MANY_COLUMNS = 5  # from here on a narrow screen shows each row as a card


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """Return a table of escaped text; columns in `numbers` are aligned right."""
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
    """Return one bar: a stretch for each part, as its share of `whole`; `mark` is a line across it."""
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
    """Return the words beside each colour of a picture; `lines` are drawn as dashes, `shapes` are letters."""
    squares = "".join(f'<li><b style="background:{c}"></b>{text(words)}</li>' for c, words in items)
    dashes = "".join(f'<li><b class=dash style="color:{c}"></b>{text(words)}</li>' for c, words in lines)
    letters = "".join(f"<li>{text(f'{shape} {words}')}</li>" for shape, words in shapes)
    return f"<ul class=legend>{squares}{dashes}{letters}</ul>\n"
