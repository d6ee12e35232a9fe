"""Describe a plan: the winner in one screen, the ranked candidates, why the first beats the next, the front.

Every figure in the tables is of a compiled program. The closed form's estimates appear only on the page,
beside what compiling found.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from meshwright.planned import Plan, Planned
from meshwright.units import format_bytes, format_count, format_seconds

from ._costs import buffer_table, memory_bars
from ._model import (
    Cards,
    Document,
    Dot,
    Lanes,
    ReportSection,
    ReportTable,
    Scatter,
    TableRow,
    Tone,
    Words,
    byte_ticks,
    flop_words,
    percent,
    second_ticks,
    section,
    share_of_peak,
    timeline_plot,
)
from ._weighing import (
    LISTED,
    YOURS,
    cost_words,
    finish_lines,
    fitting_words,
    interval_words,
    run_words,
    schedule_blocks,
    time_bars,
    time_figures,
)
from ._weighing_facts import WeighingFacts, facts_of, finish_texts

MOST_ROWS = 8  # of the ranked table on a terminal, unless told
ALIKE = 0.01  # share of the step below which two candidates are practically the same
LEAST_NAMED = 0.005  # share of the step; smaller differences are not named
COLUMNS = ("layout", "settings", "step", "memory", "MFU")
FINISH_COLUMNS = ("finish", "useful")  # if the tokens of the run are known
NUMBERS = ("step", "memory", "MFU", "finish", "useful")


def plan_document(plan: Plan, *, most_rows: int | None = MOST_ROWS, more: str = "") -> Document:
    """Return a plan as a document for a terminal.

    Args:
        most_rows: of the ranked table; all if None.
        more: the last line, which says how to see and use the rest.
    """
    return Document(
        title=f"Plan of {plan.name}",
        facts=_title_facts(plan),
        sections=(
            *section("", *_verdict(plan)),
            *section(
                "Ranked", _ranked_table(plan, most_rows), _rest(plan, most_rows), _ties(plan), _work(plan)
            ),
            *section("Why", *_why(plan)),
            *section("Searched", *_searched(plan), Words(text=more, tone="faint") if more else None),
        ),
    )


def plan_page(plan: Plan, lanes: Lanes | None) -> Document:
    """Return the page of a plan, with pictures. `lanes`: the schedule of the best."""
    facts = None if plan.best is None else facts_of(plan.best)
    cards = None if facts is None else Cards(items=tuple(time_figures(facts)))
    return Document(
        title=f"Plan of {plan.name}",
        facts=_title_facts(plan),
        sections=(
            *section("", *_verdict(plan), cards),
            *section("Why", *_why(plan)),
            *section("Memory against time, of every compiled candidate", _scatter(plan), _front_words(plan)),
            *section("Ranked", _page_table(plan), _ties(plan), _work(plan)),
            *(() if facts is None else _best_sections(facts, lanes)),
            *section("Searched", *_searched(plan)),
        ),
    )


def _best_sections(facts: WeighingFacts, lanes: Lanes | None) -> tuple[ReportSection, ...]:
    """Return the time and the memory of the best through its step, and what fills the memory at its peak."""
    memory, prediction = facts.ledger.memory, facts.prediction
    bars = None if prediction is None else time_bars(prediction)
    return (
        *section("Time of the best through its step", bars, *schedule_blocks(lanes)),
        *section(
            "Memory of the best through its step",
            timeline_plot(memory),
        ),
        *section(
            "Memory of the best at its peak",
            memory_bars(memory, on_page=True),
            Words(text="Largest buffers at the peak:"),
            buffer_table(memory, on_page=True),
        ),
    )


def _title_facts(plan: Plan) -> str:
    if isinstance(plan.config, str):
        return f"on {plan.fleet.name}"
    return f"on {plan.fleet.name}, {plan.config.batch.tokens_per_step:,} {unit_of(plan)} per step"


def unit_of(plan: Plan) -> str:
    """Name what a step of the plan's run reads: tokens, images or rows."""
    return "tokens" if isinstance(plan.config, str) else plan.config.batch_unit


def _verdict(plan: Plan) -> Iterator[Words]:
    """Yield the winner with its figures, or that nothing fits with what would."""
    best = plan.winner
    yield _compiled_words(plan)
    if best is None or plan.best is None or best.step_seconds is None or best.prediction is None:
        yield from _nothing_fits(plan)
        return
    if plan.smaller:
        yield Words(lead="SMALLEST: ", text=f"{plan.fleet.name} of those tried", tone="good")
    yield Words(text=f"BEST: {best.words}", tone="good")
    if best.needed_bytes is not None and best.usable_bytes is not None:
        yield Words(lead="FITS: ", text=fitting_words(best.needed_bytes, best.usable_bytes))
    prediction = best.prediction
    rate = prediction.tokens_per_second_per_device
    per_device = "" if rate is None else f", {format_count(rate)} {unit_of(plan)}/s per device"
    yield Words(
        lead=f"STEP: {interval_words(best.step_seconds)}",
        text=f"{per_device}, MFU {share_of_peak(prediction.mfu)}",
    )
    if plan.simplest is not None:
        yield Words(lead="SIMPLEST: ", text=_simplest_words(plan, best, plan.simplest))
    total = plan.best.run_total
    if total is not None:
        yield Words(lead="RUN: ", text=run_words(total, unit_of(plan)))
        if words := cost_words(total, LISTED if plan.price else YOURS):
            yield Words(lead="COST: ", text=words)
        if plan.price:
            yield Words(text=f"  at a list price: {plan.price}", tone="faint")
        yield from finish_lines(finish_texts(plan.best))


def _compiled_words(plan: Plan) -> Words:
    """Say of how many candidates the plan knows more than an estimate."""
    compiled = sum(not candidate.failed for candidate in plan.candidates) - _num_again(plan)
    others = "" if compiled >= plan.num_considered else "; of the others only estimates are known"
    return Words(
        lead=f"COMPILED: {compiled} of {plan.num_considered:,} candidates",
        text=f" in {format_seconds(plan.seconds)}{others}",
    )


def _num_again(plan: Plan) -> int:
    """Return how many candidates were compiled once more without their loop over layers."""
    return sum(candidate.overrides.get("layer_loop") == "unroll" for candidate in plan.candidates)


def _simplest_words(plan: Plan, best: Planned, simplest: Planned) -> str:
    """Name the simplest candidate whose interval overlaps the best one's, and its extra time."""
    assert best.step_seconds is not None, "the winner has a time"
    assert simplest.step_seconds is not None, "only candidates with a time are in the interval"
    if simplest is best:
        return "the best itself"
    step = simplest.step_seconds.expected
    slower = percent(step - best.step_seconds.expected, best.step_seconds.expected)
    return f"{simplest.words}: {format_seconds(step)}, {slower} longer, within the interval of the best"


def _nothing_fits(plan: Plan) -> Iterator[Words]:
    if not plan.candidates and not plan.num_open:
        reserve = plan.fleet.reserve_bytes
        with_it = f", with {format_bytes(reserve)} of each device reserved" if reserve else ""
        least = f"the least that each of {plan.num_considered:,} candidates needs is more than a device has"
        yield Words(text=f"NOTHING FITS: {least}{with_it}", tone="bad")
    elif all(candidate.failed for candidate in plan.candidates):
        why = "their compilations failed or were cut off: a larger --budget lets them end"
        yield Words(text=f"NONE COMPILED: {why}", tone="open")
    else:
        others = f"{plan.num_open:,} others were not tried"
        yield Words(text=f"NOTHING FITS of what was compiled; {others}", tone="bad")
    for change in plan.suggestions:
        if change.fits:
            yield Words(lead="FITS WITH: ", text=f"{change.arguments}: {change.effect}")


def _figures(candidate: Planned) -> tuple[str, str, str, str]:
    """Return a candidate's step, reserved bytes, MFU, and a remark."""
    if candidate.failed:
        return "-", "-", "-", "failed"
    seconds, prediction = candidate.step_seconds, candidate.prediction
    return (
        "-" if seconds is None else format_seconds(seconds.expected),
        "-" if candidate.needed_bytes is None else format_bytes(candidate.needed_bytes),
        "-" if prediction is None else share_of_peak(prediction.mfu),
        "does not fit" if candidate.fits is False else "",
    )


def _ranked_table(plan: Plan, most_rows: int | None) -> ReportTable:
    front, rows = plan.front, list[TableRow]()
    asked = any(candidate.finish is not None for candidate in plan.ranked)
    for candidate in plan.ranked[:most_rows]:
        *figures, remark = _figures(candidate)
        remark = remark or ("front" if candidate in front else "")
        finish = finish_cells(candidate) if asked else ()
        cells = (candidate.layout, candidate.settings, *figures, *finish, remark)
        rows.append(TableRow(cells=cells, tone=_tone(plan, candidate)))
    columns = (*COLUMNS, *(FINISH_COLUMNS if asked else ()), "")
    return ReportTable(columns=columns, rows=tuple(rows), numbers=NUMBERS, unbroken=1)


def finish_cells(candidate: Planned) -> tuple[str, str]:
    """Return when half of all runs of a candidate are finished, and the useful share of their time."""
    if candidate.finish is None or candidate.fits is False:
        return "-", "-"
    return candidate.finish.short_texts(datetime.now())


def _tone(plan: Plan, candidate: Planned) -> Tone:
    if candidate is plan.winner:
        return "strong"
    return "faint" if candidate.failed or candidate.fits is False else ""


def _rest(plan: Plan, most_rows: int | None) -> Words | None:
    """Say how many rows are left out, and what the word `front` means."""
    more = len(plan.ranked) - (most_rows or len(plan.ranked))
    words = [f"{more} more that were compiled: --top {len(plan.ranked)}."] if more > 0 else []
    words += ["front: no other is both faster and smaller."] if len(plan.front) > 1 else []
    return Words(text=" ".join(words), tone="faint") if words else None


def _ties(plan: Plan) -> Words | None:
    """Say how many candidates' intervals overlap the winner's."""
    ties = sum(plan.is_tie(candidate) for candidate in plan.fitting)
    if not ties:
        return None
    which = "One other's interval overlaps" if ties == 1 else f"The intervals of {ties} others overlap"
    return Words(
        text=f"{which} that of the best: by them alone it is a tie. One model priced them all, so that their "
        "order is surer than their seconds.",
        tone="faint",
    )


def _work(plan: Plan) -> Words | None:
    """Say so if a function's candidates do not all do the same work in a step."""
    counts = [candidate.model_flops for candidate in plan.candidates if candidate.model_flops is not None]
    if not isinstance(plan.config, str) or not counts or max(counts) <= (1 + ALIKE) * min(counts):
        return None
    least, most = flop_words(min(counts)), flop_words(max(counts))
    return Words(
        text=f"NOT THE SAME WORK: as written, the candidates' steps have {least} to {most}. A shorter step "
        "that does less is not better.",
        tone="warning",
    )


def _why(plan: Plan) -> Iterator[Words]:
    """Yield why the best beats the next, and what limits it now."""
    best = plan.winner
    if best is None or best.prediction is None or best.step_seconds is None:
        return
    others = [
        c for c in plan.ranked if c is not best and not c.failed and c.fits is not False and c.step_seconds
    ]
    step = best.step_seconds.expected
    for other in others:
        assert other.step_seconds is not None, "others without a time were left out"
        slower = other.step_seconds.expected / step - 1
        if slower < ALIKE:
            continue
        alike = others.index(other)
        before = f"{alike} within {100 * ALIKE:.0f} % of it; " if alike else ""
        longer = f"{100 * slower:.1f} % longer, {difference(best, other)}"
        text = f"{before}{other.words}: {longer}"
        yield Words(lead="Against the next: ", text=text)
        break
    parts = sorted(best.prediction.slices, key=lambda part: -part.exposed_seconds)
    shares = [f"{part.name} {percent(part.exposed_seconds, step)}" for part in parts if part.exposed_seconds][
        :4
    ]
    yield Words(lead="The step now: ", text=", ".join(shares))
    for help_ in best.prediction.what_helps[:2]:
        how = f" ({help_.change})" if help_.change else ""
        yield Words(
            lead="Would save: ",
            text=f"{help_.what}{how}: {format_seconds(help_.saving_seconds)}; {help_.certainty}",
        )


def difference(best: Planned, other: Planned) -> str:
    """Return in words where another candidate loses and gains time against the best."""
    assert best.prediction is not None, "the best has a prediction"
    assert other.prediction is not None, "only candidates with a prediction are compared"
    mine = {part.name: part.exposed_seconds for part in best.prediction.slices}
    theirs = {part.name: part.exposed_seconds for part in other.prediction.slices}
    changes = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {*mine, *theirs}}
    least = LEAST_NAMED * best.prediction.step_seconds.expected
    loses = sorted(((s, name) for name, s in changes.items() if s > least), reverse=True)[:3]
    gains = sorted((s, name) for name, s in changes.items() if s < -least)[:2]
    words = [f"{format_seconds(seconds)} more {name}" for seconds, name in loses]
    words += [f"{format_seconds(-seconds)} less {name}" for seconds, name in gains]
    return ", ".join(words) or "many small differences"


def _searched(plan: Plan) -> Iterator[Words]:
    compiled = sum(not candidate.failed for candidate in plan.candidates)
    failed = len(plan.candidates) - compiled
    cached = sum(candidate.cached for candidate in plan.candidates)
    from_cache = f" ({cached} from the cache)" if cached else ""
    again = _num_again(plan)
    in_two_ways = f", {again} of them once more without the loop over layers" if again else ""
    considered = f"{plan.num_considered:,} candidates of {plan.num_layouts:,} layouts"
    yield Words(
        text=f"{considered} in {format_seconds(plan.seconds)}: {compiled} compiled{from_cache}"
        f"{in_two_ways}, {failed} failed, {plan.num_open:,} not tried: {plan.ended}."
    )
    for note in plan.notes:
        yield Words(text=f"In the run that --toml writes, {note}.", tone="faint")
    if plan.removed:
        listed = sorted(plan.removed.items(), key=lambda item: -item[1])
        yield Words(
            text=f"Left out: {'; '.join(f'{rule}, {count:,}' for rule, count in listed)}.", tone="faint"
        )
    for fleet, why in plan.smaller.items():
        yield Words(text=f"{fleet}: {why}.", tone="faint")
    for candidate in plan.candidates:
        if candidate.failed:
            yield Words(text=f"{candidate.words}: {candidate.failed}", tone="faint")


def _page_table(plan: Plan) -> ReportTable:
    chosen = [_settings_by_column(plan, candidate) for candidate in plan.ranked]
    settings = tuple(dict.fromkeys(name for each in chosen for name in each))
    estimated = ("estimated",) if any(c.estimated_seconds is not None for c in plan.ranked) else ()
    remarks = ("",) if any(_figures(candidate)[-1] for candidate in plan.ranked) else ()
    columns = ("layout", *settings, "step", "memory", "MFU", *estimated, *remarks)
    rows: list[TableRow] = []
    for candidate, given in zip(plan.ranked, chosen, strict=True):
        *figures, remark = _figures(candidate)
        seconds = candidate.estimated_seconds
        cells = [candidate.layout, *(given[name] for name in settings), *figures]
        cells += ["-" if seconds is None else format_seconds(seconds)] if estimated else []
        cells += [remark] if remarks else []
        expected = None if candidate.step_seconds is None else candidate.step_seconds.expected
        mfu_share = None if candidate.prediction is None else candidate.prediction.mfu
        sizes = (expected, candidate.needed_bytes, mfu_share, *([seconds] if estimated else []))
        values = (None, *(None for _ in settings), *sizes, *(None for _ in remarks))
        rows.append(TableRow(cells=tuple(cells), tone=_tone(plan, candidate), values=values))
    numbers = ("microbatch", "step", "memory", "MFU", "estimated")
    return ReportTable(columns=columns, rows=tuple(rows), numbers=numbers, unbroken=1, sorts=True)


def _settings_by_column(plan: Plan, candidate: Planned) -> dict[str, str]:
    """Return what the page's table says of a candidate's settings; of a function, each of its knobs."""
    given = candidate.overrides
    if isinstance(plan.config, str):
        return {name: value for name, value in given.items() if name != "layout"}
    others = ["zero1"] if given["zero1"] else []
    others += [f"offload {given['offload']}"] if given["offload"] != "none" else []
    others += [given["pipeline"]] if "stage=" in candidate.layout else []
    others += [f"{given['pipeline_chunks']} chunks"] if given.get("pipeline_chunks", 1) > 1 else []
    others += [given["precision"]] if given["precision"] != plan.config.precision else []
    return {
        "microbatch": str(given["batch.microbatch_sequences"]),
        "remat": given["remat"],
        "others": ", ".join(others),
    }


def _scatter(plan: Plan) -> Scatter | None:
    """Return memory against time, a dot for each compiled candidate, joined along the front."""
    dots: list[Dot] = []
    front = plan.front
    for candidate in plan.ranked:
        seconds, needed = candidate.step_seconds, candidate.needed_bytes
        if candidate.failed or seconds is None or needed is None:
            continue
        figures = f"{format_seconds(seconds.expected)}, {format_bytes(needed)}"
        words = f"{candidate.words}: {figures}"
        kind = "best" if candidate is plan.winner else "does not fit" if candidate.fits is False else "fits"
        dots.append(Dot(x=seconds.expected, y=needed, words=words, kind=kind, joined=candidate in front))
    if not dots:
        return None
    usable = next((c.usable_bytes for c in plan.ranked if c.usable_bytes is not None), None)
    return Scatter(
        label="bytes that one device needs against seconds of a step",
        dots=tuple(dots),
        x_ticks=second_ticks,
        y_ticks=byte_ticks,
        limit=None if usable is None else (usable, f"usable, {format_bytes(usable)}"),
    )


def _front_words(plan: Plan) -> Words | None:
    front = plan.front
    if len(front) < 2:
        return None
    listed = "; ".join(candidate.words for candidate in front)
    return Words(
        text=f"The front, the fastest first: {listed}. No other is both faster and smaller.", tone="faint"
    )
