"""List runs, weighings and plans: filter and sort them, and lay them out on one screen.

A filter is one text: a field, a sign and a value, "loss<3" or "optimizer.learning_rate=0.001". A field with a
dot is a key of the configuration.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshwright.errors import InputError, nearest_name, printable
from meshwright.kept_records import PLANS, WEIGHINGS
from meshwright.reportable import Reportable
from meshwright.units import format_bytes, format_count, format_seconds

from ._found_runs import found_runs
from ._kept_figures import KeptFigures, kept_figures
from ._run_record import RunRecord, moment

if TYPE_CHECKING:
    from meshwright.report import Document, ReportSection, ReportTable, TableRow, Tone

RUNS_SCHEMA = 1
KINDS = ("runs", "weighings", "plans", "all")
FIELDS = (
    "id", "name", "folder", "state", "began", "when", "host", "fleet", "layout", "step", "steps", "tokens",
    "loss", "held_out_loss", "step_seconds", "step_error", "tokens_per_second", "mfu", "peak_bytes",
    "num_parameters", "num_devices", "seconds", "device_hours", "needed_bytes", "fits", "cost", "tag",
    "sweep",
)  # fmt: skip
STATES = ("running", "dead", "failed", "unknown", "stopped", "finished", "gone")
FILTER = re.compile(r"\s*([\w.]+)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip
SHORTEST_ID = 7  # letters of an id that are shown
MOST_WORDS = 6  # sentences about runs below the table
LONGEST_NAME = 18
AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "m"), (0.0, "s"))
DATED = re.compile(r"-\d{8}-\d{6}$")
TONES: dict[str, Tone] = {"running": "strong", "failed": "bad", "dead": "bad", "gone": "faint"}
Listed = RunRecord | KeptFigures


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Runs(Reportable):
    """The runs, weighings and plans that were asked for; `notes`: what should be known of the search.

    `most`: the rows of a kind that are shown; None shows all. `num_others`: how many the filters leave out.
    """

    records: tuple[Listed, ...]
    notes: tuple[str, ...] = ()
    most: int | None = None
    num_others: int = 0

    def __iter__(self) -> Any:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, place: int) -> Listed:
        return self.records[place]

    @property
    def line(self) -> str:
        """How many runs there are in each state, and how many weighings and plans."""
        runs = [each for each in self.records if isinstance(each, RunRecord)]
        counts = Counter(run.state for run in runs)
        states = {state: counts[state] for state in STATES if counts[state]}
        kinds = [each.kind for each in self.records if isinstance(each, KeptFigures)]
        parts = [f"{count} {state}" for state, count in states.items()]
        words = [f"{len(runs)} run{'s' if len(runs) != 1 else ''}: {', '.join(parts)}"] if runs else []
        for kind in ("weighing", "plan"):
            if count := kinds.count(kind):
                words.append(f"{count} {kind}{'s' if count != 1 else ''}")
        if not words and self.num_others:
            return f"the filters leave none of {self.num_others:,}"
        return "; ".join(words) or "nothing was run or weighed here yet"

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `runs --json` prints."""
        listed = [
            {"kind": "run", **each.to_dict()} if isinstance(each, RunRecord) else each.to_dict()
            for each in self.records
        ]
        return {"schema": RUNS_SCHEMA, "records": listed, "notes": list(self.notes)}

    def document(self) -> Document:
        """Return a table for each kind, and what should be known of what is dead or has failed."""
        from meshwright.report import Document, Words, section

        runs = [each for each in self.records if isinstance(each, RunRecord)]
        short = _shortest([each.id for each in self.records])
        shown = runs[: self.most]
        sentences = [
            Words(text=f"{_id(run, short)} {run.state}: {run.words}")
            for run in shown
            if run.words and run.state not in ("running", "finished", "stopped")
        ]
        more = len(sentences) - MOST_WORDS
        left = f"{more} more: --json has the words of all" if more > 0 else ""
        return Document(
            title="Runs",
            sections=(
                *section("", Words(text=self.line, tone="strong"), _runs_table(shown, short)),
                *self._kept_sections(short),
                *section(
                    "",
                    *([Words(text=_rest(len(runs) - len(shown)), tone="faint")] * (len(runs) > len(shown))),
                ),
                *section("", *sentences[:MOST_WORDS], *([Words(text=left, tone="faint")] if left else [])),
                *section("To know", *(Words(text=note) for note in self.notes), tone="warning"),
            ),
        )

    def _kept_sections(self, short: int) -> Iterable[ReportSection]:
        from meshwright.report import Words, section

        for kind, title, table in (("weighing", "Weighings", _weighings), ("plan", "Plans", _plans)):
            kept = [each for each in self.records if isinstance(each, KeptFigures) and each.kind == kind]
            rest = len(kept) - len(kept[: self.most])
            if kept:
                words = Words(text=_rest(rest), tone="faint") if rest else None
                yield from section(title, table(kept[: self.most], short), words)


def runs(
    *places: str | Path,
    kind: str = "runs",
    where: str | Sequence[str] = (),
    sort: str = "",
    most: int | None = None,
) -> Runs:
    """List the runs, weighings and plans that were made here.

    Args:
        places: folders below which runs are looked for, beside those that are known.
        kind: "runs", "weighings", "plans" or "all".
        where: filters, all of which must hold: "state=dead", "loss<3", "name~llama", "tag=baseline",
            "optimizer.learning_rate=0.001".
        sort: a field, "loss", or with a minus before it for the largest first; the newest first by default.
        most: how many of a kind are shown as text; all by default.

    Raises:
        InputError: a place, a filter or a field is wrong.

    >>> made = runs(kind="weighings", where=["fleet=8xH100"], most=3)
    >>> all(each.fields["fleet"] == "8xH100" for each in made)
    True
    """
    filters = [where] if isinstance(where, str) else where
    if not isinstance(filters, Sequence) or not all(isinstance(each, str) for each in (kind, sort, *filters)):
        what = f"kind={kind!r}, where={where!r}, sort={sort!r}"
        raise InputError(f"{what[:200]}: one is no text", hint='write mw.runs(where=["loss<3"], sort="loss")')
    if most is not None and (type(most) is not int or most < 0):
        raise InputError(f"most={most!r} rows cannot be shown", hint="give a whole number, as in most=25")
    if kind not in KINDS:
        raise InputError(f"{kind!r} is no kind of record", hint=nearest_name(kind, KINDS))
    notes: list[str] = []
    records: list[Listed] = []
    if kind in ("runs", "all"):
        found = found_runs(*places)
        records, notes = [*found.runs], [*found.notes]
    for each in (WEIGHINGS, PLANS):
        if kind in (each, "all"):
            records += kept_figures(each, notes)
    tests = [_filter(text) for text in filters]
    kept = [record for record in records if all(test(record) for test in tests)]
    if sort:
        kept = _sorted(kept, sort)
    others = len(records) - len(kept)
    return Runs(records=tuple(kept), notes=tuple(dict.fromkeys(notes)), most=most, num_others=others)


def value_of(record: Listed, field: str) -> Any:
    """Return a field of a record; with a dot, a key of its configuration; None if it has none."""
    if "." in field:
        found: Any = record.config() if isinstance(record, RunRecord) else record.weighing.get("run_config")
        for part in field.split("."):
            found = cast("dict[str, Any]", found).get(part) if isinstance(found, dict) else None
        return found
    if isinstance(record, RunRecord):
        named = {
            "when": record.began,
            "needed_bytes": record.predicted.needed_bytes,
            "folder": str(record.folder),
        }
        return named[field] if field in named else getattr(record, field, None)
    if field in ("id", "name", "when"):
        return getattr(record, field)
    if field == "began":
        return record.when
    found = record.weighing.get(field)
    return cast("dict[str, Any]", found).get("expected") if isinstance(found, dict) else found


def _filter(text: str) -> Callable[[Listed], bool]:
    """Return the test that a filter describes.

    Raises:
        InputError: it is no filter, or no record has that field.
    """
    matched = FILTER.fullmatch(text)
    if matched is None:
        raise InputError(f"{text[:80]!r} is no filter", hint='write "state=dead", "loss<3" or "name~llama"')
    field, sign, given = matched.groups()
    _check_field(field)
    number = _number(given)

    def test(record: Listed) -> bool:
        if field == "tag":
            return (given in record.tags) == (sign != "!=")
        value = value_of(record, field)
        if sign == "~":
            return given.lower() in str(value).lower()
        if sign == "!=":
            return not _equal(value, given)
        if value is None:
            return False
        if sign == "=":
            return _equal(value, given)
        if isinstance(value, int | float):
            if number is None or isnan(number):
                raise InputError(f"{given[:80]!r} is no number", hint=f"{field} is one: {field}{sign}3")
            return SIGNS[sign](value, number)
        return isinstance(value, str) and SIGNS[sign](value, given)

    return test


def _equal(value: Any, given: str) -> bool:
    number = _number(given)
    if number is not None and isinstance(value, int | float) and not isinstance(value, bool):
        return value == number
    return str(value).lower() == given.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return None


def _check_field(field: str) -> None:
    if "." not in field and field not in FIELDS:
        raise InputError(f"runs have no field {field!r}", hint=nearest_name(field, FIELDS))


def _sorted(records: list[Listed], by: str) -> list[Listed]:
    """Return records by a field, those without it last.

    Raises:
        InputError: no record has that field.
    """
    field = by.removeprefix("-")
    _check_field(field)
    values = {id(each): value_of(each, field) for each in records}
    known = [each for each in records if values[id(each)] not in (None, "")]
    is_text = any(isinstance(values[id(each)], str) for each in known)

    def key(each: Listed) -> Any:
        return str(values[id(each)]).lower() if is_text else values[id(each)]

    rest = [each for each in records if values[id(each)] in (None, "")]
    return [*sorted(known, key=key, reverse=by.startswith("-")), *rest]


def _shortest(ids: Sequence[str]) -> int:
    """Return how many letters of the ids are needed to tell them apart."""
    full = {number for number in ids if number}
    for length in range(SHORTEST_ID, 20):
        if len({number[:length] for number in full}) == len(full):
            return length
    return 20


def _id(run: Listed, short: int) -> str:
    return run.id if "-" in run.id else run.id[:short] or "no id"


def _rest(count: int) -> str:
    return f"and {count:,} more: --all shows them"


def _named(record: Listed) -> str:
    name = record.name
    if isinstance(record, RunRecord) and record.folder.name:
        # It tells the runs of one configuration apart; its time is in a column of its own.
        name = DATED.sub("", printable(record.folder.name))
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _age(text: str) -> str:
    """Return how long ago something was: "3h"."""
    began = moment(text)
    if began is None:
        return "?"
    seconds = max(0.0, time.time() - began)
    unit, name = next((unit, name) for unit, name in AGES if seconds >= unit)
    return f"{seconds / (unit or 1):.0f}{name}"


def _with_tags(
    columns: tuple[str, ...], kept: Sequence[Listed], row: Callable[[Any], TableRow], numbers: tuple[str, ...]
) -> ReportTable:
    """Return a table of records, with a column for tags where one has any."""
    from meshwright.report import ReportTable

    rows = [row(each) for each in kept]
    if any(each.tags for each in kept):
        columns = (*columns, "tags")
        pairs = zip(rows, kept, strict=True)
        rows = [replace(made, cells=(*made.cells, " ".join(each.tags))) for made, each in pairs]
    return ReportTable(columns=columns, rows=tuple(rows), numbers=numbers, unbroken=1, sorts=True)


def _runs_table(shown: Sequence[RunRecord], short: int) -> ReportTable | None:
    from meshwright.report import TableRow

    def row(run: RunRecord) -> TableRow:
        reached = "" if run.step is None else f" {_steps(run.step)}"
        if run.steps is not None and run.step != run.steps and reached:
            reached += f"/{_steps(run.steps)}"
        return TableRow(
            cells=(
                _id(run, short),
                _named(run),
                _age(run.began),
                run.fleet,
                f"{run.state}{reached}",
                "" if run.tokens is None else format_count(run.tokens),
                "" if run.loss is None else f"{run.loss:.4g}" if abs(run.loss) >= 1e-3 else f"{run.loss:.1e}",
                "" if run.step_seconds is None else format_seconds(run.step_seconds),
                _error(run),
            ),
            tone=TONES.get(run.state, ""),
        )

    if not shown:
        return None
    numbers = ("tokens", "loss", "a step", "vs pred.")
    columns = ("id", "run", "age", "on", "state, step", *numbers)
    return _with_tags(columns, shown, row, numbers)


def _steps(count: int) -> str:
    return f"{count:,}" if count < 100_000 else format_count(count)


def _error(run: RunRecord) -> str:
    """Return how a measured step differs from the predicted one: "+3.1 %", or "690 us more" if it is far off.

    A step of microseconds is mostly what the host takes to begin it, so that a multiple says little.
    """
    share, seconds = run.step_error, run.step_seconds
    if share is None or seconds is None:
        return ""
    if share >= 10:
        return f"{format_seconds(seconds - seconds / (1 + share))} more"
    return f"{100 * share:+.1f} %" if abs(share) < 0.1 else f"{100 * share:+.0f} %"


def _weighings(kept: Sequence[KeptFigures], short: int) -> ReportTable:
    from meshwright.report import TableRow

    def row(each: KeptFigures) -> TableRow:
        fields = each.fields
        fits = {True: "fits", False: "does not fit", None: ""}[cast("bool | None", fields.get("fits"))]
        needed, mfu = value_of(each, "needed_bytes"), fields.get("mfu")
        cells = (
            _id(each, short),
            _named(each),
            _age(each.when),
            printable(str(fields.get("fleet", ""))),
            printable(str(fields.get("layout", ""))),
            fits,
            format_bytes(needed) if needed else "",
            _seconds(value_of(each, "step_seconds")),
            f"{100 * mfu:.1f} %" if mfu else "",
        )
        return TableRow(cells=cells, tone="bad" if fields.get("fits") is False else "")

    numbers = ("needs", "a step", "MFU")
    columns = ("id", "name", "age", "on", "layout", "fits", *numbers)
    return _with_tags(columns, kept, row, numbers)


def _plans(kept: Sequence[KeptFigures], short: int) -> ReportTable:
    from meshwright.report import TableRow

    def row(each: KeptFigures) -> TableRow:
        compiled = f"{each.fields.get('num_compiled', '?')} of {each.fields.get('num_considered', '?')}"
        best = printable(str(each.fields.get("best") or "nothing fits"))
        seconds = _seconds(value_of(each, "step_seconds"))
        fleet = printable(str(each.fields.get("fleet", "")))
        cells = (_id(each, short), _named(each), _age(each.when), fleet, best, seconds, compiled)
        return TableRow(cells=cells)

    numbers = ("a step", "compiled")
    columns = ("id", "name", "age", "on", "best", *numbers)
    return _with_tags(columns, kept, row, numbers)


def _seconds(value: Any) -> str:
    return format_seconds(value) if isinstance(value, int | float) else ""
