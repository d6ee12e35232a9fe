"""Compare two weighings: what moved, by how much, and where; every table's differences add up to the totals'.

What moved to another line or module and kept its size is no difference: a comment above a function moves all
lines below it, and a renamed function is the same program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from meshwright.reportable import Reportable
from meshwright.units import format_bytes, format_rate, format_seconds

from ._figures import ROUNDING, Figures, Place

if TYPE_CHECKING:
    from meshwright.report import Document

SCHEMA = 1
LEAST = 0.001
"""The share of a total up to which a change of it is not named."""
MANY_TIMES = 11  # from which a growth is said in times, and not in percent
LINES_OF_MEMORY = "Memory by source line"
LINES_OF_FLOPS = "FLOPs by source line"
LINES_OF_TRAFFIC = "Bytes sent by source line"
BYTES, FLOPS, SECONDS, COUNT = "bytes", "FLOPs", "seconds", "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row: an amount before and after; `place` is its source line and module, "" where unknown."""

    name: str
    place: str
    before: float
    after: float

    @property
    def by(self) -> float:
        """After less before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeTable:
    """Amounts of one quantity that changed, the largest change first.

    `before`, `after`: the totals, whose difference is the sum of the rows'. `unit`: bytes | FLOPs | seconds.
    """

    title: str
    unit: str
    before: float
    after: float
    rows: tuple[Change, ...]

    @property
    def by(self) -> float:
        """After less before, of the total."""
        return self.after - self.before

    @property
    def moved(self) -> bool:
        """Return whether the total, or a part of it, changed by more than `LEAST` of the total."""
        least = LEAST * max(abs(self.before), abs(self.after))
        return any(abs(change) > least for change in (self.by, *(row.by for row in self.rows)))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Reportable):
    """Return what differs between two weighings.

    `tables`: of the quantities that moved, by parts and then by source line. `settings`: what differs in
    configuration, layout, fleet and compiler, by name: before, after.
    """

    before: Figures
    after: Figures
    tables: tuple[ChangeTable, ...]
    settings: dict[str, tuple[str, str]]

    @property
    def is_nothing(self) -> bool:
        """Return whether no quantity moved by more than `LEAST` of its total, and the verdict is the same."""
        return not self.tables and self.before.fits == self.after.fits

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return what moved in words, the most important first."""
        return tuple(_sentences(self))

    @property
    def line(self) -> str:
        """The first of the sentences."""
        return self.sentences[0]

    def document(self) -> Document:
        """Return its report."""
        from ._difference_report import difference_document

        return difference_document(self)

    def page_document(self) -> Document:
        """Return its report with pictures."""
        from ._difference_report import difference_page

        return difference_page(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `diff --json` prints."""
        return {
            "schema": SCHEMA,
            "before": self.before.label,
            "after": self.after.label,
            "is_nothing": self.is_nothing,
            "sentences": list(self.sentences),
            "settings": {name: list(values) for name, values in self.settings.items()},
            "tables": [
                {**asdict(table), "rows": [{**asdict(row), "by": row.by} for row in table.rows]}
                for table in self.tables
            ],
        }


def difference_of(before: Figures, after: Figures) -> Difference:
    """Return what differs between two weighings."""
    settings = {
        name: (before.settings.get(name, ""), after.settings.get(name, ""))
        for name in sorted(before.settings.keys() | after.settings.keys())
        if before.settings.get(name, "") != after.settings.get(name, "")
    }
    return Difference(before=before, after=after, tables=tuple(_tables(before, after)), settings=settings)


def _tables(before: Figures, after: Figures) -> Iterator[ChangeTable]:
    """Yield the tables of each quantity that moved."""
    if before.refused or after.refused:
        return  # the compiler made no program, so that there is nothing to compare
    memory = _table("Memory of a device by category", BYTES, before.memory, after.memory)
    if memory.moved:
        yield memory
        if before.by_place and after.by_place:
            yield _table_of_places(LINES_OF_MEMORY, BYTES, before.by_place, after.by_place)
    flops = _table("FLOPs of a step by format", FLOPS, before.flops_by_format, after.flops_by_format)
    if flops.moved:
        yield flops
        if before.flops_by_place and after.flops_by_place:
            lines = before.flops_by_place, after.flops_by_place
            yield _table_of_places(LINES_OF_FLOPS, FLOPS, *lines)
        yield _table("FLOPs by module", FLOPS, before.flops, after.flops)
    traffic = _table("Bytes that a device sends", BYTES, before.traffic, after.traffic)
    counts = _table("Messages of a device", COUNT, before.messages, after.messages)
    if traffic.moved or counts.moved:
        yield traffic
        yield counts
        if before.traffic_by_place and after.traffic_by_place:
            lines = before.traffic_by_place, after.traffic_by_place
            yield _table_of_places(LINES_OF_TRAFFIC, BYTES, *lines)
    if before.seconds and after.seconds:
        time = _table("Predicted seconds of a step by class", SECONDS, before.seconds, after.seconds)
        if time.moved:
            yield time


def _table(title: str, unit: str, before: Mapping[str, float], after: Mapping[str, float]) -> ChangeTable:
    names = dict.fromkeys((*after, *before))
    rows = (
        Change(name=name, place="", before=before.get(name, 0), after=after.get(name, 0)) for name in names
    )
    return _made(title, unit, rows, sum(before.values()), sum(after.values()))


def _made(title: str, unit: str, rows: Iterable[Change], before: float, after: float) -> ChangeTable:
    least = ROUNDING * max(abs(before), abs(after)) if unit == SECONDS else 0  # all others are whole
    kept = sorted((row for row in rows if abs(row.by) > least), key=lambda row: -abs(row.by))
    return ChangeTable(title=title, unit=unit, before=before, after=after, rows=tuple(kept))


def _table_of_places(
    title: str, unit: str, before: Mapping[Place, float], after: Mapping[Place, float]
) -> ChangeTable:
    rows = tuple(_rows_of_places(before, after))
    return _made(title, unit, rows, sum(before.values()), sum(after.values()))


def _rows_of_places(before: Mapping[Place, float], after: Mapping[Place, float]) -> Iterator[Change]:
    """Yield what changed in each place, without what only moved to another line or module."""
    left, right = list(before.items()), list(after.items())
    same: tuple[Callable[[Place], Hashable], ...] = (
        lambda place: place,
        lambda place: (_file(place), place[1], place[2]),
        lambda place: (_file(place), place[1]),
        lambda place: place[1],
    )
    for key in same:
        left, right = _without_equals(left, right, key)
    groups: defaultdict[Hashable, defaultdict[Place, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0.0, 0.0])
    )
    for side, items in enumerate((left, right)):
        for place, amount in items:
            groups[_file(place), place[1], place[2]][place][side] += amount
    for places in groups.values():
        by = {place: now - was for place, (was, now) in places.items()}
        if min(by.values()) < 0 < max(by.values()):  # some moved: one row, by the line that changed most
            most = max(places, key=lambda place: (abs(by[place]), places[place][1]))
            was, now = (sum(amounts[side] for amounts in places.values()) for side in (0, 1))
            places = {most: [was, now]}
        for (line, what, module), (was, now) in places.items():
            yield Change(name=what, place=" ".join(filter(None, (line, module))), before=was, after=now)


def _without_equals(
    left: list[tuple[Place, float]], right: list[tuple[Place, float]], key: Callable[[Place], Hashable]
) -> tuple[list[tuple[Place, float]], list[tuple[Place, float]]]:
    """Return both sides without pairs of the same key and the same amount."""
    there = Counter((key(place), amount) for place, amount in right)
    here = Counter((key(place), amount) for place, amount in left)
    common = there & here

    def rest(items: list[tuple[Place, float]]) -> list[tuple[Place, float]]:
        paired = Counter(common)
        kept: list[tuple[Place, float]] = []
        for place, amount in items:
            if paired[key(place), amount]:
                paired[key(place), amount] -= 1
            else:
                kept.append((place, amount))
        return kept

    return rest(left), rest(right)


def _file(place: Place) -> str:
    return place[0].partition(":")[0]


def amount_words(amount: float, unit: str) -> str:
    """Return an amount with its unit: "5.20 GiB"."""
    if unit == BYTES:
        return format_bytes(amount)
    if unit == SECONDS:
        return format_seconds(amount)
    return f"{amount:,.0f}" if unit == COUNT else format_rate(amount, "FLOP")


def change_words(by: float, unit: str) -> str:
    """Return a change with its sign: "+5.20 GiB"."""
    return "0" if not by else f"{'+' if by > 0 else '-'}{amount_words(abs(by), unit)}"


def percent_words(before: float, after: float) -> str:
    """Return a change in percent of what was before: "+3.1 %"; "new" if nothing was."""
    if not before:
        return "new" if after else "0 %"
    if after > MANY_TIMES * before:
        return f"{after / before:.3g} times"
    share = 100 * (after - before) / before
    return f"{share:+.1f} %" if abs(share) >= 0.05 else f"{share:+.2g} %"


def _sentences(made: Difference) -> Iterator[str]:
    before, after = made.before, made.after
    for side in (before, after):
        if side.refused:
            yield f"{side.label} does not fit: the compiler refused it ({side.refused})"
    if before.fits is not after.fits and not (before.refused or after.refused):
        words = {True: "fits", False: "does not fit", None: "has no verdict"}
        yield f"{before.label} {words[before.fits]}, {after.label} {words[after.fits]}"
    by_title = {table.title: table for table in made.tables}
    if table := by_title.get("Memory of a device by category"):
        yield _sentence("per device", table, by_title.get(LINES_OF_MEMORY))
    if table := by_title.get("Predicted seconds of a step by class"):
        yield _sentence("in a predicted step", table, None)
    if table := by_title.get("FLOPs of a step by format"):
        words = _sentence("executed in a step", table, by_title.get(LINES_OF_FLOPS))
        again = after.recomputed - before.recomputed
        yield words + (f"; {change_words(again, FLOPS)} of it recomputed" if again else "")
    if table := by_title.get("Bytes that a device sends"):
        counts = by_title["Messages of a device"]
        words = _sentence("sent by a device in a step", table, by_title.get(LINES_OF_TRAFFIC))
        yield words + (f"; {counts.by:+,.0f} messages" if counts.by else "")
    if made.is_nothing:
        yield f"nothing moved by more than {100 * LEAST:g} %: {after.label} weighs what {before.label} does"


def _sentence(what: str, table: ChangeTable, places: ChangeTable | None) -> str:
    """Return a change of a total in words, with its largest part and where that is."""
    was, now = amount_words(table.before, table.unit), amount_words(table.after, table.unit)
    share = percent_words(table.before, table.after)
    total = f"{change_words(table.by, table.unit)} {what} ({was} to {now}, {share})"
    if abs(table.by) <= LEAST * abs(table.before):
        total = f"as much as before {what} ({now}), but not of the same parts"
    if not table.rows:
        return total
    top = table.rows[0]
    words = f"{total}: {change_words(top.by, table.unit)} {top.name.replace('_', ' ')}"
    here = [row for row in (places.rows if places else ()) if row.name == top.name and row.place]
    here = [row for row in here if (row.by > 0) == (top.by > 0)]
    return f"{words}, {change_words(here[0].by, table.unit)} of it at {here[0].place}" if here else words
