"""Compare the plans of one run for several fleets: the best step of each, its time and its cost.

Used by: `_fleet_plans`.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planned import Plan
from meshwright.report import (
    COLUMNS,
    FINISH_COLUMNS,
    LISTED,
    NUMBERS,
    YOURS,
    Document,
    ReportTable,
    TableRow,
    Words,
    cost_words,
    finish_cells,
    finish_lines,
    finish_texts,
    percent,
    run_words,
    section,
    share_of_peak,
    unit_of,
)
from meshwright.units import format_bytes, format_price, format_seconds

from ._fleet_plans import FleetPlans


def fleets_document(made: FleetPlans, more: str = "") -> Document:
    """Return the comparison: a row for each fleet, then which is the fastest and which the cheapest.

    Args:
        more: the last line, which says what to do with it.
    """
    name = made.plans[0].name
    reasons = (Words(lead=f"{fleet}: ", text=why, tone="faint") for fleet, why in made.refused.items())
    prices = {plan.price for plan in made.plans if plan.price}
    listed = Words(text=f"List prices: {'; '.join(sorted(prices))}.", tone="faint") if prices else None
    compiled = sum(not candidate.failed for plan in made.plans for candidate in plan.candidates)
    considered = sum(plan.num_considered for plan in made.plans)
    seconds = sum(plan.seconds for plan in made.plans)
    searched = f"{considered:,} candidates in {format_seconds(seconds)}: {compiled} compiled."
    return Document(
        title=f"Plan of {name}",
        facts=f"on {len(made.plans)} fleets",
        sections=(
            *section("", *_verdict(made)),
            *section("Fleets", _table(made), *reasons, listed),
            *section("", Words(text=searched), Words(text=more, tone="faint") if more else None),
        ),
    )


def _verdict(made: FleetPlans) -> Iterator[Words]:
    """Yield the fastest and the cheapest fleet, with the whole run on each where its steps are known."""
    fastest, cheapest = made.fastest, made.cheapest
    if fastest is None:
        yield Words(text="NOTHING FITS on any of the fleets", tone="bad")
        return
    yield _line("FASTEST", fastest)
    if cheapest is not None:
        yield _line("CHEAPEST", cheapest)
    for plan in dict.fromkeys(p.fleet.name for p in (fastest, cheapest) if p is not None):
        chosen = next(each for each in made.plans if each.fleet.name == plan)
        total = None if chosen.best is None else chosen.best.run_total
        if total is not None:
            cost = cost_words(total, LISTED if chosen.price else YOURS)
            words = f"{run_words(total, unit_of(chosen))}{f'; {cost}' if cost else ''}"
            yield Words(lead=f"RUN on {chosen.fleet.name}: ", text=words)
        if chosen.best is not None:
            yield from finish_lines(finish_texts(chosen.best)[:1])


def _line(which: str, plan: Plan) -> Words:
    winner = plan.winner
    assert winner is not None, "the fastest and the cheapest have a winner"
    return Words(lead=f"{which}: ", text=f"{plan.fleet.name}, {winner.words}", tone="good")


def _table(made: FleetPlans) -> ReportTable:
    asked = any(plan.winner is not None and plan.winner.finish is not None for plan in made.plans)
    more = ("to spare", "price of a step", *(FINISH_COLUMNS if asked else ()))
    columns = ("fleet", *COLUMNS, *more)
    rows: list[TableRow] = []
    for plan in made.ranked:
        cells = _cells(plan)
        if asked:
            cells += ("-", "-") if plan.winner is None else finish_cells(plan.winner)
        rows.append(TableRow(cells=cells, tone="strong" if plan is made.fastest else ""))
    rows += [TableRow(cells=(name, *(["-"] * (len(columns) - 1))), tone="faint") for name in made.refused]
    return ReportTable(columns=columns, rows=tuple(rows), numbers=(*NUMBERS, *more), unbroken=1)


def _cells(plan: Plan) -> tuple[str, ...]:
    """Return a row: fleet, layout, settings, step, bytes, MFU, what is free, price."""
    winner = plan.winner
    if winner is None or winner.step_seconds is None or winner.prediction is None:
        return (plan.fleet.name, "nothing fits", "", "-", "-", "-", "-", "-")
    spare = "-"
    if winner.usable_bytes is not None and winner.needed_bytes is not None:
        spare = percent(winner.usable_bytes - winner.needed_bytes, winner.usable_bytes)
    return (
        plan.fleet.name,
        winner.layout,
        winner.settings,
        format_seconds(winner.step_seconds.expected),
        "-" if winner.needed_bytes is None else format_bytes(winner.needed_bytes),
        share_of_peak(winner.prediction.mfu),
        spare,
        _price_words(plan),
    )


def _price_words(plan: Plan) -> str:
    """Return the price of a step; a list price is in dollars, and another in its giver's currency."""
    price = plan.price_per_step
    if price is None:
        return "-"
    return f"${format_price(price)}" if plan.price else format_price(price)
