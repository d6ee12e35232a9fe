"""Draw docs/dev/rooms.svg: the packages as rooms, floor by floor, from the import contracts.

Run: python docs/site/rooms.py. The contracts are those of pyproject.toml; a room's words are the first
sentence of its docstring. Needs nothing but Python.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/dev/rooms.svg"
WIDTH, MARGIN, GAP = 900, 44, 8
FLOOR, ROOM, TITLE = 66, 54, 44  # heights
PER_CHARACTER = 6.6  # of the small text
COLOURS = {"": ("#eef2f8", "#5b6f8f"), "without jax": ("#e3f3e6", "#4a8a5b")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A package or module of the root package: its name, first sentence, and what a contract says of it."""

    name: str
    words: str
    imports_no_jax: bool
    outside: bool
    """No contract lets the others import it."""


House = dict[str, list[list[Room]]]
"""For each package whose imports a contract orders, its floors, the highest first."""


def house(root: Path = ROOT) -> House:
    """Return the rooms of each floor; a floor may import those below it."""
    linter = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    package = linter["root_package"]
    forbidden = [each for each in linter["contracts"] if each["type"] == "forbidden"]
    inside = {
        name
        for contract in forbidden
        if "jax" in contract["forbidden_modules"]
        for name in contract["source_modules"]
    }
    outside = {name for each in forbidden for name in each["forbidden_modules"] if name.startswith(package)}

    def room(container: str, name: str) -> Room:
        path, full = root / "src" / container.replace(".", "/"), f"{container}.{name}"
        words = sentence_of(path, name)
        return Room(name=name, words=words, imports_no_jax=full in inside, outside=full in outside)

    found: House = {}
    for contract in linter["contracts"]:
        for container in contract["containers"] if contract["type"] == "layers" else ():
            names = [[name.strip(" ()") for name in re.split(r"[|:]", layer)] for layer in contract["layers"]]
            found[container] = [[room(container, name) for name in floor] for floor in names]
    known = {
        f"{container}.{each.name}"
        for container, floors in found.items()
        for floor in floors
        for each in floor
    }
    alone = sorted(name.rpartition(".")[2] for name in outside - known)
    if alone:
        found[package].insert(0, [room(package, name) for name in alone])
    return found


def sentence_of(package: Path, name: str) -> str:
    """Return the first sentence of a package's or module's docstring, as far as its colon."""
    file = package / name / "__init__.py"
    text = ast.get_docstring(ast.parse((file if file.exists() else package / f"{name}.py").read_text())) or ""
    return re.split(r"[.:](?:\s|$)", re.sub(r"\s+", " ", text))[0].replace("`", "")


def picture(rooms: House) -> str:
    """Return the picture as SVG: the floors of the whole, and below them those of its parts."""
    parts: list[str] = []
    y = 10
    for number, (container, floors) in enumerate(rooms.items()):
        if number:
            y += TITLE
            parts.append(
                f'<text x="{MARGIN}" y="{y - 12}" font-size="16" font-weight="600">inside '
                f"{container.partition('.')[2]}</text>"
            )
        parts += _arrow(y, y + FLOOR * len(floors) - (FLOOR - ROOM))
        for floor in floors:
            width = (WIDTH - MARGIN - GAP * len(floor)) / len(floor)
            for place, room in enumerate(floor):
                parts += _box(room, MARGIN + place * (width + GAP), y, width)
            y += FLOOR
    height = y + 40
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" role="img">',
        "<title>The packages of Meshwright, floor by floor: imports point down</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<defs><marker id="tip" markerWidth="10" markerHeight="10" refX="5" refY="5" orient="auto">'
        '<path d="M0 0 L10 5 L0 10 z" fill="#888"/></marker></defs>',
    ]
    return "\n".join([*head, *parts, *_key(y + 10), "</svg>"]) + "\n"


def _arrow(top: float, bottom: float) -> list[str]:
    middle = (top + bottom) / 2
    words = "may import what is below, never what is above or beside" if bottom - top > 700 else "imports"
    return [
        f'<line x1="28" y1="{top}" x2="28" y2="{bottom - 8}" stroke="#888" stroke-width="2" '
        'marker-end="url(#tip)"/>',
        f'<text x="20" y="{middle}" font-size="12" fill="#666" text-anchor="middle" '
        f'transform="rotate(-90 20 {middle})">{words}</text>',
    ]


def _box(room: Room, x: float, y: float, width: float) -> list[str]:
    fill, edge = COLOURS["without jax" if room.imports_no_jax else ""]
    dashes = ' stroke-dasharray="6 4"' if room.outside else ""
    centre = x + width / 2
    lines = textwrap.wrap(room.words, int((width - 12) / PER_CHARACTER), max_lines=2, placeholder=" ...")
    first = y + (21 if len(lines) == 2 else 24)
    return [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROOM}" rx="6" fill="{fill}" stroke="{edge}"'
        f"{dashes}/>",
        f'<text x="{centre:.1f}" y="{first - 3}" font-size="16" font-weight="600" text-anchor="middle">'
        f"{room.name}</text>",
        *(
            f'<text x="{centre:.1f}" y="{first + 12 + 13 * row}" font-size="12" fill="#444" '
            f'text-anchor="middle">{escape(line)}</text>'
            for row, line in enumerate(lines)
        ),
    ]


def _key(y: float) -> list[str]:
    parts: list[str] = []
    words = {"": "no contract on jax", "without jax": "imports no jax, not even indirectly"}
    for place, (kind, (fill, edge)) in enumerate(COLOURS.items()):
        x = MARGIN + 240 * place
        parts += [
            f'<rect x="{x}" y="{y}" width="22" height="16" rx="3" fill="{fill}" stroke="{edge}"/>',
            f'<text x="{x + 30}" y="{y + 13}" font-size="12" fill="#444">{words[kind]}</text>',
        ]
    return parts


if __name__ == "__main__":
    PICTURE.write_text(picture(house()))
