"""Turn a weighing into documents: the one screen, the full account of a terminal, and a page's head and time.

Figures are recorded values, or sums, shares and differences of them. `on_page`: whether every row is shown.
Used by: `_results`, which chooses the document of a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from meshwright.compiler import SIMULATED
from meshwright.ledger import RESERVED
from meshwright.predict import Interval, Prediction, RunFlops, RunTotal
from meshwright.units import format_bytes, format_count, format_power_of_ten, format_rate, format_seconds

from ._costs import (
    LEAST_SEGMENT,
    cost_sections,
    fault_sections,
    largest_words,
    memory_bars,
    traffic_words,
    without_rate,
)
from ._model import (
    ALWAYS_SHOWN,
    GAPS,
    Bars,
    Block,
    Document,
    Lanes,
    ReportSection,
    ReportTable,
    Words,
    colours_of,
    flop_words,
    parts_of,
    percent,
    plain_rows,
    section,
    share_of_peak,
    spaced,
    timeline_plot,
)
from ._weighing_facts import EagerFacts, WeighingFacts

SIMULATED_NOTE = (
    "The CPU's compiler stood in for the target's. It makes no reduce-scatter and schedules for no memory "
    "limit: for a step of llama3-405b on 512xH100 it took 107.7 GB of temporaries per device, the H100's "
    "compiler 51.2 GB. Memory, executed FLOPs and traffic below are those of the CPU's program."
)
HELP_NOTE = (
    "By walking the same schedule again; savings do not add up. A bound names no change: `--explain` "
    "compiles the changes that may reach it, and says what each really saves."
)
SCHEDULE_NOTE = (
    "The same step from its beginning to its end. The height of a colour is its share of the time there. A "
    "message for which the device waits is exposed; one beside which it computes is hidden."
)
WASTE = "work done twice"  # the lint's kind for FLOPs beyond the model's
LEAST_LOSS = 0.02  # share of the step: smaller losses do not limit it
LEAST_PERCENT = 0.01  # of the threshold for reports: smaller shares print as under it
LEAST_DEVICE_HOURS = 0.1  # below it, device-hours add nothing to the seconds
MOST_MATTERS, MOST_SLICES = 3, 8
# Classes of the step's time other than products, in words.
LOSSES = {
    "memory-bound": "kernels bound by memory, not by arithmetic",
    "idle": GAPS,
    "communication": "waiting for communication",
}
KINDS = {"compute": "compute", "communication": "exposed communication", "idle": "idle between kernels"}
CLASSES = {"matmul": "matrix products", "memory-bound": "kernels bound by memory", "launch": GAPS}


def screen_document(facts: WeighingFacts, more: str) -> Document:
    """Return the account that fits one screen; `more` is the last line, which says how to see the rest."""
    shown = _matters(facts)[:MOST_MATTERS]
    unclear = [("memory", words) for words in _unclear_memory(facts)]
    rows = plain_rows([*shown, *(pair for pair in unclear if pair not in shown)])
    matters = ReportTable(columns=("", ""), rows=rows, unbroken=1, head=False)
    return Document(
        title=facts.config,
        facts=title_facts(facts),
        sections=(
            *section("", *verdict(facts), *_step_lines(facts)),
            *section("Memory of one device", memory_bars(facts.ledger.memory, on_page=False)),
            *section("What matters most", matters),
            *section("", _compiler_line(facts), Words(text=more, tone="faint")),
        ),
    )


def full_document(facts: WeighingFacts) -> Document:
    """Return the whole account for a terminal."""
    is_simulated = facts.source == SIMULATED
    note = Words(text=SIMULATED_NOTE) if is_simulated else None
    return Document(
        title=facts.config,
        facts=title_facts(facts),
        sections=(
            *section("", *verdict(facts), *_step_lines(facts), note),
            *cost_sections(facts, on_page=False),
            *time_sections(facts, on_page=False),
            *fault_sections(facts),
            *section("", _compiler_line(facts, "SIMULATED ON CPU" if is_simulated else facts.source)),
        ),
    )


def title_facts(facts: WeighingFacts) -> str:
    """Return what follows the name in a title: fleet, layout, parameters, and what a step reads."""
    idle = f" ({facts.idle_devices} of the {facts.idle_devices + 1} devices named stand idle)"
    words = f"on {facts.fleet.name}{idle if facts.idle_devices else ''}, layout {facts.layout}"
    if facts.num_parameters is not None:
        words += f", {format_count(facts.num_parameters)} parameters"
    if facts.num_active_parameters is not None:
        words += f" ({format_count(facts.num_active_parameters)} active)"
    if facts.num_trained_parameters is not None:
        words += f" ({format_count(facts.num_trained_parameters)} trained)"
    if facts.tokens_per_step is not None:
        words += f", {facts.tokens_per_step:,} {facts.batch_unit} per step"
    return words


def verdict(facts: WeighingFacts) -> list[Words]:
    """Return a line that says whether the program fits, after a warning if the bytes are of another one."""
    memory, lines = facts.ledger.memory, [Words(text=each, tone="warning") for each in facts.warnings]
    if facts.source == SIMULATED:
        warning = "SIMULATED ON CPU: all figures are of the CPU compiler's program"
        lines.append(Words(text=warning, tone="warning"))
    if memory.basis:
        lines.append(Words(text=f"{memory.basis[0].upper()}{memory.basis[1:]}", tone="warning"))
    if memory.usable_bytes is None:
        why = f"the catalog does not know how much memory {facts.fleet.chip} has"
        if facts.fleet.chip == "CPU":
            why = "a simulated CPU device has no memory of its own"
        return [*lines, Words(text=f"NO VERDICT: {why}", tone="open")]
    needed = memory.reserved_bytes + memory.allowance_bytes
    spare = memory.usable_bytes - needed
    gives = f"{format_bytes(needed)} of {format_bytes(memory.usable_bytes)} per device"
    reserved = memory.allowance.get(RESERVED, 0)
    whose = f"; {format_bytes(reserved)} of it {RESERVED}" if reserved else ""
    rest = f"{format_bytes(abs(spare))} ({percent(abs(spare), memory.usable_bytes)})"
    if spare >= 0:
        tone = "open" if facts.warnings else "good"
        words = f"FITS: {fitting_words(needed, memory.usable_bytes)}{whose}"
        return [*lines, Words(text=words, tone=tone)]
    if memory.is_upper_bound:
        return [
            *lines,
            Words(text=f"MAY NOT FIT: at most {gives}, {rest} too much if it is all{whose}", tone="open"),
        ]
    return [*lines, Words(text=f"DOES NOT FIT: {gives}, {rest} too much{whose}", tone="bad")]


def fitting_words(needed_bytes: int, usable_bytes: int) -> str:
    """Return what a device needs of what it has, and what it has to spare, as `weigh` and `plan` say it."""
    spare = usable_bytes - needed_bytes
    gives = f"{format_bytes(needed_bytes)} of {format_bytes(usable_bytes)} per device"
    return f"{gives}, {format_bytes(spare)} ({percent(spare, usable_bytes)}) to spare"


def _step_lines(facts: WeighingFacts) -> Iterator[Words]:
    """Yield the predicted time of a step, with rate and MFU, then the time and cost of the whole run."""
    prediction, total = facts.prediction, facts.run_total
    if prediction is None:
        yield Words(text=f"STEP: none: {facts.no_prediction}")
    else:
        line = f"{_rate_words(prediction, facts.batch_unit)}, MFU {share_of_peak(prediction.mfu)}"
        yield Words(lead=f"STEP: {interval_words(prediction.step_seconds)}", text=line)
        if prediction.interval_reasons:
            yield Words(text=f"  its interval: {'; '.join(prediction.interval_reasons)}", tone="faint")
    if facts.fleet.num_domains > 1 and (words := traffic_words(facts)):
        yield Words(text=f"TRAFFIC: {words}")
    if total is not None:
        yield Words(text=f"RUN: {run_words(total, facts.batch_unit)}")
        if words := cost_words(total):
            yield Words(text=f"COST: {words}")
    yield from finish_lines(facts.finish)
    if facts.run_flops is not None:
        yield Words(text=f"RUN FLOPs: {run_flops_words(facts.run_flops)}")
    if facts.plan_command is not None:
        yield Words(text=f"PLAN: `{facts.plan_command}` searches other layouts")


def finish_lines(texts: Sequence[str]) -> Iterator[Words]:
    """Yield when a run is finished, then what would narrow it."""
    for place, text in enumerate(texts):
        yield Words(text=f"  {text}", tone="faint") if place else Words(lead="FINISH: ", text=text)


def _rate_words(prediction: Prediction, unit: str) -> str:
    rate = prediction.tokens_per_second_per_device
    return "" if rate is None else f", {format_count(rate)} {unit}/s per device"


def _compiler_line(facts: WeighingFacts, source: str = "") -> Words:
    """Return the name of the compiler, with the compile time."""
    if isinstance(facts, EagerFacts):
        how = f"in {format_seconds(facts.compile.seconds)} of one processor"
        kind = "with a model of Inductor" if facts.account.by_inductor else "eager"
        return Words(text=f"Run on fake tensors {how} by {facts.compile.compiler}, {kind}", tone="faint")
    how = "from the cache" if facts.compile.cached else f"in {format_seconds(facts.compile.seconds)}"
    target = ", for a target made of published figures" if facts.is_published_target else ""
    source = f" ({source})" if source else ""
    return Words(text=f"Compiled {how} by {facts.compile.compiler}{target}{source}", tone="faint")


def time_figures(facts: WeighingFacts) -> list[tuple[str, str]]:
    """Return the key figures, each with its meaning: step, rate, MFU; time, cost and FLOPs of the run."""
    prediction, total, items = facts.prediction, facts.run_total, list[tuple[str, str]]()
    if (flops := facts.run_flops) is not None:
        items.append((format_power_of_ten(flops.model), f"FLOPs of the run, {_threshold_words(flops)}"))
    if prediction is None:
        return items
    seconds = prediction.step_seconds
    timed = [(format_seconds(seconds.expected), f"predicted step, {ends_words(seconds)}")]
    if (rate := prediction.tokens_per_second_per_device) is not None:
        timed.append((format_count(rate), f"{facts.batch_unit}/s per device"))
    timed.append((share_of_peak(prediction.mfu), "MFU"))
    if total is not None:
        read = f"{format_count(total.tokens)} {facts.batch_unit} in {total.steps:,} steps"
        timed.append((format_seconds(total.seconds.expected), f"{read}, {ends_words(total.seconds)}"))
        if total.cost is not None:
            amount, _, words = cost_words(total).partition(" ")
            timed.append((amount, f"cost {words}"))
    return timed + items


def _matters(facts: WeighingFacts) -> list[tuple[str, str]]:
    """Return the limits of a step, the most pressing first: pairs of a subject and a sentence.

    The order: missing memory, work that no rule counts or no rate prices, assumptions, lint findings, losses
    of time or FLOPs from the largest down to 2 %, the largest use of memory, the largest use of time.
    """
    memory, findings, pairs = facts.ledger.memory, facts.ledger.findings, list[tuple[str, str]]()
    if memory.fits is False:
        # Arguments are on a line of their own, so that they can be copied.
        first = facts.suggestions[0] if facts.suggestions else None
        verb = "Fits" if first is not None and first.is_enough else "Smaller"
        words = "" if first is None else f"\n{verb} with {first.arguments}"
        words += "; --verbose has other changes" if len(facts.suggestions) > 1 else ""
        pairs.append(("memory", f"most of it is {largest_words(memory)}{words}"))
    no_rule, no_rate = facts.ledger.unpriced, without_rate(facts)
    words = [f"no rule counts {_first(no_rule)}: FLOPs and time leave it out"] if no_rule else []
    words += [f"time of {_first(no_rate)}"] if no_rate else []
    if words:
        pairs.append(("unpriced", "; ".join(words)))
    if facts.ledger.assumptions:
        pairs.append(("assumed", _first(facts.ledger.assumptions)))
    if findings:
        first, *others = findings
        more = f" (and {len(others)} more: --verbose)" if others else ""
        pairs.append(("finding", f"{first.what}. To fix it, {first.fix}{more}"))
    losses = sorted(_losses(facts), key=lambda loss: -loss[0])
    pairs += [(subject, words) for share, subject, words in losses if share >= LEAST_LOSS]
    pairs += [("memory", words) for words in _unclear_memory(facts)]
    for name, size in list(memory.by_category.items())[:1]:
        share = percent(size, memory.reserved_bytes) or "0.0 %"
        pairs.append(("memory", f"{format_bytes(size)}, {share} of the program's: {spaced(name)}"))
    if facts.prediction is not None and facts.prediction.slices:
        most = max(facts.prediction.slices, key=lambda part: part.exposed_seconds)
        words = _of_step(most.exposed_seconds, facts.prediction)
        pairs.append(("time", f"{words}: {CLASSES.get(most.name, most.name)}"))
    return pairs


def _unclear_memory(facts: WeighingFacts) -> Iterator[str]:
    """Yield an explanation of each category that is 5 % of the memory and that its name does not explain."""
    memory = facts.ledger.memory
    for name in ("fragmentation", "other"):
        size = memory.by_category.get(name, 0)
        if size < ALWAYS_SHOWN * memory.reserved_bytes:
            continue
        share = f"{format_bytes(size)}, {percent(size, memory.reserved_bytes)} of the program's"
        if name == "fragmentation" and isinstance(facts, EagerFacts):
            yield (
                f"{share}: fragmentation, blocks that PyTorch's allocator keeps and no tensor fills; "
                "PYTORCH_ALLOC_CONF=expandable_segments:True may avoid it"
            )
        elif name == "fragmentation":
            yield f"{share}: fragmentation, gaps between arrays that the compiler's plan leaves at the peak"
        else:
            largest = max(
                (b for b in memory.buffers if b.category == name), key=lambda b: b.num_bytes, default=None
            )
            where = "" if largest is None else f"; the largest is {largest.shape} of {largest.source_line}"
            yield f"{share}: of no phase that its names show{where}"


def _losses(facts: WeighingFacts) -> Iterator[tuple[float, str, str]]:
    """Yield shares of time and FLOPs that a step spends on anything but its products, with words."""
    flops, prediction = facts.ledger.flops, facts.prediction
    if prediction is not None:
        seconds_by_loss = dict.fromkeys(LOSSES, 0.0)
        for part in prediction.slices:
            name = part.name if part.kind == "compute" else part.kind
            if name in seconds_by_loss:
                seconds_by_loss[name] += part.exposed_seconds
        for name, seconds in seconds_by_loss.items():
            share = seconds / prediction.step_seconds.expected
            yield share, "time", f"{_of_step(seconds, prediction)}: {LOSSES[name]}"
    is_reported = any(finding.kind == WASTE for finding in facts.ledger.findings)
    for count, words in (
        (flops.recomputed, "computed again in the backward pass (remat)"),
        (flops.bubble, "done by stages of the pipeline that have no microbatch"),
        (0 if is_reported else sum(flops.waste_by_module.values()), "done twice or on padding"),
    ):
        if flops.executed:
            share = percent(count, flops.executed)
            yield count / flops.executed, "FLOPs", f"{share} of the executed, {flop_words(count)}: {words}"


def _of_step(seconds: float, prediction: Prediction) -> str:
    share = percent(seconds, prediction.step_seconds.expected)
    return f"{format_seconds(seconds)} of the step, {share}"


def _first(lines: tuple[str, ...]) -> str:
    return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")


def time_sections(
    facts: WeighingFacts, *, on_page: bool, lanes: Lanes | None = None
) -> tuple[ReportSection, ...]:
    """Return the predicted time by class of work, and what would make the step faster.

    A page has the timeline of the memory between them. `lanes`: the step's schedule, if a page shows it.
    """
    middle = section("Memory through the step", timeline_plot(facts.ledger.memory) if on_page else None)
    title, prediction = "Predicted time of one step", facts.prediction
    if prediction is None:
        return (*section(title, Words(text=f"none: {facts.no_prediction}")), *middle)
    seconds, slices = prediction.step_seconds, prediction.slices
    of_peak = ""
    if prediction.peak_flops_per_second:
        of_peak = f" of {format_rate(prediction.peak_flops_per_second, 'FLOP/s')}"
    mfu, hfu = share_of_peak(prediction.mfu), share_of_peak(prediction.hfu)
    line = f"{_rate_words(prediction, facts.batch_unit)}, MFU {mfu}, HFU {hfu}"
    blocks: list[Block | None] = [
        Words(lead=interval_words(seconds, prediction.interval_reasons), text=line + of_peak)
    ]
    if slices:
        by_kind = prediction.seconds_by_kind
        whole = math.fsum(by_kind.values())
        shares = (f"{KINDS[kind]} {percent(part, whole)}" for kind, part in by_kind.items())
        blocks.append(Words(text=f"{', '.join(shares)} of the step."))
    if on_page:
        blocks += [time_bars(prediction), *schedule_blocks(lanes)]
        if facts.run_total is not None:
            blocks.append(Words(text=f"The whole run: {run_words(facts.run_total, facts.batch_unit)}."))
            cost = cost_words(facts.run_total)
            blocks.append(Words(text=f"Cost: {cost}.") if cost else None)
    blocks += [_slice_table(prediction), Words(text=prediction.basis, tone="faint")]
    return (*section(title, *blocks), *middle, *_faster_sections(prediction))


def schedule_blocks(lanes: Lanes | None) -> tuple[Block, ...]:
    """Return the lanes of a step, below words that say how to read them."""
    return () if lanes is None else (Words(text=SCHEDULE_NOTE, tone="faint"), lanes)


def _slice_table(prediction: Prediction) -> ReportTable | None:
    slices = prediction.slices
    rows = [(part.name, part.seconds, part.exposed_seconds) for part in slices[:MOST_SLICES]]
    if rest := slices[MOST_SLICES:]:
        sums = (sum(part.seconds for part in rest), sum(part.exposed_seconds for part in rest))
        rows.append((f"{len(rest)} smaller ones", *sums))
    whole, numbers = prediction.step_seconds.expected, ("busy", "waited for", "of the step")
    cells = (
        (name, format_seconds(busy), format_seconds(waited) if waited else "0", percent(waited, whole))
        for name, busy, waited in rows
    )
    columns = ("where it goes", *numbers)
    return ReportTable(columns=columns, rows=plain_rows(cells), numbers=numbers) if rows else None


def time_bars(prediction: Prediction) -> Bars:
    """Return the step's time by class of work, with its interval on the same scale."""
    seconds, classes = prediction.step_seconds, dict[str, float]()
    for part in prediction.slices:
        name = GAPS if part.name == "launch" else part.name.partition("[")[0]
        classes[name] = classes.get(name, 0.0) + part.exposed_seconds
    high = seconds.expected if seconds.high is None else seconds.high
    parts = parts_of(classes, colours_of(classes), format_seconds, least=LEAST_SEGMENT * high)
    interval = None
    if seconds.low is not None and seconds.high is not None:  # with one end it would look complete
        interval = (seconds.low, seconds.high, ends_words(seconds))
    whole = max(high, sum(classes.values()))
    label = "time of one step by class of work"
    return Bars(label=label, parts=parts, whole=whole, base=seconds.expected, interval=interval)


def _faster_sections(prediction: Prediction) -> tuple[ReportSection, ...]:
    """Return the changes, then bounds, that would make the step faster, the largest saving of each first."""
    if not prediction.what_helps:
        return ()
    rows = plain_rows(
        (
            item.change or item.what,
            f"{'' if item.change else 'at most '}{format_seconds(item.saving_seconds)}",
            percent(item.saving_seconds, prediction.step_seconds.expected),
            item.certainty,
        )
        for item in prediction.what_helps
    )
    columns = ("what", "saves", "of the step", "how certain")
    table = ReportTable(columns=columns, rows=rows, numbers=columns[1:3])
    return section("What would make it faster", table, Words(text=HELP_NOTE, tone="faint"))


def ends_words(seconds: Interval, reasons: Sequence[str] = ()) -> str:
    """Return a step's interval, "between 1.0 s and 1.4 s", and the reasons if it is wide or lacks an end.

    Both ends have the unit of the expected time.
    """
    shown = partial(format_seconds, like=seconds.expected)
    if seconds.low is None:
        high = seconds.high
        ends = "no interval" if high is None else f"at most {shown(high)}, no lower end"
    elif seconds.high is None:
        ends = f"at least {shown(seconds.low)}, no upper end"
    else:
        ends = f"between {shown(seconds.low)} and {shown(seconds.high)}"
    return f"{ends}: {'; '.join(reasons)}" if reasons else ends


def interval_words(seconds: Interval, reasons: Sequence[str] = ()) -> str:
    """Return "62.3 s (between 49.6 s and 74.5 s)"."""
    return f"{format_seconds(seconds.expected)} ({ends_words(seconds, reasons)})"


def run_words(total: RunTotal, unit: str) -> str:
    """Return "15B tokens in 3,577 steps take 2.58 days (between 2.05 days and 3.09 days)"."""
    read = f"{format_count(total.tokens)} {unit} in {total.steps:,} steps"
    return f"{read} take {interval_words(total.seconds)}"


def run_flops_words(flops: RunFlops) -> str:
    """Return "3.19e23 (6ND 3.14e23), 0.32 % of the reporting threshold 1e26"."""
    rule = "" if flops.rule_6nd is None else f" (6ND {format_power_of_ten(flops.rule_6nd)})"
    return f"{format_power_of_ten(flops.model)}{rule}, {_threshold_words(flops)}"


def _threshold_words(flops: RunFlops) -> str:
    share = 100 * flops.share_of_threshold
    of = f"{share:.2g} %" if share < 10 else f"{share:,.0f} %"
    return f"{of if share >= LEAST_PERCENT else 'under 0.01 %'} of the reporting threshold 1e26"


YOURS, LISTED = "in your currency", "US dollars"


def cost_words(total: RunTotal, currency: str = YOURS) -> str:
    """Return "891 in your currency (709 to 1.07K): 495 device-hours (394 to 592) at 1.80".

    Without a price the line has only the hours; it is "" if they are few.

    Args:
        currency: that of the price; list prices are `LISTED`.
    """
    hours = total.device_hours
    if total.cost is None and hours.expected < LEAST_DEVICE_HOURS:
        return ""
    words = _with_ends(hours, _three_digits, " device-hours")
    if total.cost is None or total.price_per_device_hour is None:
        return words
    return (
        f"{_with_ends(total.cost, _money, f' {currency}')}: {words} at {_money(total.price_per_device_hour)}"
    )


def _with_ends(amounts: Interval, shown: Callable[[float], str], unit: str = "") -> str:
    words = f"{shown(amounts.expected)}{unit}"
    if amounts.low is None:
        return (
            f"{words} (no interval)" if amounts.high is None else f"{words} (at most {shown(amounts.high)})"
        )
    if amounts.high is None:
        return f"{words} (at least {shown(amounts.low)})"
    return f"{words} ({shown(amounts.low)} to {shown(amounts.high)})"


def _three_digits(amount: float) -> str:
    return format_count(amount) if amount >= 999.5 else f"{amount:.3g}"


def _money(amount: float) -> str:
    return f"{amount:.2f}" if 0.995 <= amount < 99.5 else _three_digits(amount)
