"""Write the accuracy page's section on intervals: how many hold by width, and which classes lie apart.

Used by: `accuracy_page`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from _published_blind import with_blind_errors
from _published_interval import with_left_out
from _row_kinds import counted

from meshwright.predict import widths

Row = Mapping[str, Any]
Groups = Sequence[tuple[str, Callable[[Row], str]]]
LEAST, MOST = 0.88, 0.95  # of a class's intervals: within these a share is as it should be
FEWEST = 15  # runs of such a class
DRAWS = 2000
HELD, LEFT_OUT = "holds", "holds_left_out"
HEAD = """## Intervals

A prediction has an interval that should hold nine measured times of ten. Its width is by what is known before
the run: chip and format, and whether there are experts. Waits for messages widen it, because the time of a
message is taken as known within a factor of 1.5 only. "Source left out": the width is taken by one rule from
all other sources, or, where these have fewer than 15 runs of it, from all their runs without experts. All
runs with experts but two are of one source, so none can be left out there."""
OF_CLASSES = """In {inside} of {count} classes of at least 15 runs (by source, chip, layout, fleet, stack and
width) {least:.0f} to {most:.0f} % of the intervals hold{how}. If each interval held with the
odds of all, it would be {low:.0f} to {high:.0f} classes, by chance alone."""
NONE = "Runs without an interval, for more than a fifth of our program is gaps between kernels: {count}."


def section_of_intervals(rows: Sequence[dict[str, Any]], groups: Groups) -> list[str]:
    """Return the lines of the section; none where no row says its width.

    Args:
        groups: the page's tables, each a name and the function that gives a row's class.
    """
    known = [row for row in with_left_out(with_blind_errors(rows)) if "width" in row]
    own = [row for row in known if HELD in row]
    if not own:
        return []
    names = ("width of", "kind", "runs", "sources", "without waits", "hold", "hold, source left out")
    lines = [*HEAD.splitlines(), "", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    by_width = _grouped(own, _width_of)
    for width in sorted(by_width, key=lambda width: -len(by_width[width])):
        lines.append(_line(width, _ends(width), by_width[width]))
    lines.append(_line("all", "", own))
    if len(own) < len(known):
        lines += ["", NONE.format(count=len(known) - len(own))]
    return [*lines, *_of_classes(own, [*groups, ("width", _width_of)])]


def _width_of(row: Row) -> str:
    return " and ".join(row["width"])


def _ends(width: str) -> str:
    applied = [widths()[name] for name in width.split(" and ")]
    low, high = min(each.low for each in applied), max(each.high for each in applied)
    return f"{100 * low - 100:+.0f} to {100 * high - 100:+.0f} %"


def _line(name: str, ends: str, rows: Sequence[Row]) -> str:
    sources = len({row["source"] for row in rows})
    cells = [name, " and ".join(counted(rows)), str(len(rows)), str(sources), ends]
    for key in (HELD, LEFT_OUT):
        held = [row[key] for row in rows if key in row]
        cells.append(f"{100 * np.mean(held):.0f} %" if held else "one source")
    return f"| {' | '.join(cells)} |"


def _of_classes(rows: Sequence[Row], groups: Groups) -> Iterator[str]:
    """Yield in words how many classes are as they should be, which are not, and what chance would do."""
    for field, how in ((HELD, ""), (LEFT_OUT, ", with the source left out")):
        known = [row for row in rows if field in row]
        classes = {
            f"{name} {label}": group
            for name, key in groups
            for label, group in _grouped(known, key).items()
            if len(group) >= FEWEST
        }
        if not classes:
            continue
        shares = {name: float(np.mean([row[field] for row in group])) for name, group in classes.items()}
        low, high = _by_chance(list(classes.values()), known, field)
        inside = sum(LEAST <= share <= MOST for share in shares.values())
        limits = {"least": 100 * LEAST, "most": 100 * MOST, "low": low, "high": high}
        words = OF_CLASSES.format(inside=inside, count=len(shares), how=how, **limits)
        yield from ("", *words.splitlines(), "")
        yield f"* Fewer hold: {_listed({name: share for name, share in shares.items() if share < LEAST})}."
        yield f"* More hold: {_listed({name: share for name, share in shares.items() if share > MOST})}."


def _by_chance(groups: Sequence[Sequence[Row]], rows: Sequence[Row], field: str) -> tuple[float, float]:
    """Return how many groups have such a share if all rows hold with one probability: nine times of ten."""
    place = {row["id"]: number for number, row in enumerate(rows)}
    held = np.random.default_rng(0).random((DRAWS, len(rows))) < np.mean([row[field] for row in rows])
    shares = np.stack([held[:, [place[row["id"]] for row in group]].mean(axis=1) for group in groups])
    low, high = np.quantile(((shares >= LEAST) & (shares <= MOST)).sum(axis=0), [0.05, 0.95])
    return float(low), float(high)


def _listed(shares: Mapping[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: item[1])
    return "; ".join(f"{name} {100 * share:.1f} %" for name, share in ordered) or "none"


def _grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)
