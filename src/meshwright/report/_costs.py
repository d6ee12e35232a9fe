"""Turn the ledger of a weighing into sections: memory, FLOPs, traffic, and what could be fixed.

`on_page`: whether every row and column is shown; a terminal sums small rows. Figures are recorded values, or
sums and shares of them. Used by: `_weighing`, `_refused`, `_plan_report`, and the
page of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from meshwright import predict  # a step inside one host has no use for it
from meshwright.config import Ticks
from meshwright.ledger import RESERVED, MemoryLedger
from meshwright.units import format_bytes, format_count, format_rate

from ._model import (
    BESIDE,
    FREE,
    INK,
    BarPart,
    Bars,
    ReportSection,
    ReportTable,
    TableRow,
    Tone,
    Words,
    colours_of,
    flop_words,
    memory_colours,
    parts_of,
    percent,
    plain_rows,
    section,
    spaced,
)
from ._weighing_facts import EagerFacts, WeighingFacts

if TYPE_CHECKING:
    from meshwright.eager import EagerAccount, ModuleCount
    from meshwright.planning import RuleOfThumb, Suggestion

FLOP_CONVENTION = (
    "A multiply-add is two. Model: matrix products, convolutions and attention as written, nothing "
    "recomputed, causal attention by the half that is needed. Executed: those of the compiled program, as "
    "often as they run. Elementwise work is in neither."
)
EAGER_CONVENTION = (
    "A multiply-add is two. Model: matrix products, convolutions and attention, nothing recomputed, causal "
    "attention by the half that is needed. Executed: all of them that run. Elementwise work is in neither."
)
LEAST_ROW = 0.0005  # share of the reserved bytes: smaller rows would print as 0.0 %
LEAST_SEGMENT = 0.002  # share of a page's bar: thinner segments are invisible
LEAST_SENT = 0.01  # share of what is sent: axes with less are not listed in a line
LEAST_FILLED = 0.1  # share of usable memory: below it, a page's bar shows the program alone
BAR = "bar"  # in place of a note
ELSEWHERE = ("not of the device", "not reserved", "of its own memory")  # notes of other memories
MOST_BARS, MOST_MODULES, MOST_BUFFERS, MOST_BUFFERS_ON_PAGE = 6, 6, 5, 12


def cost_sections(facts: WeighingFacts, *, on_page: bool) -> tuple[ReportSection, ...]:
    """Return the sections on costs: savings if it does not fit, then memory, FLOPs and traffic."""
    return (
        *_smaller_sections(facts),
        *_memory_sections(facts, on_page=on_page),
        *_flop_sections(facts, on_page=on_page),
        *_traffic_sections(facts, on_page=on_page),
        *_rank_sections(facts, on_page=on_page),
    )


def _smaller_sections(facts: WeighingFacts) -> tuple[ReportSection, ...]:
    """Return the largest categories, then the command-line changes that save memory, if it does not fit."""
    if facts.ledger.memory.fits is not False:
        return ()
    table = suggestion_table(facts.suggestions)
    words = Words(text=f"Most of it: {largest_words(facts.ledger.memory)}.")
    return section("What would make it smaller", words, table)


def suggestion_table(suggestions: Iterable[Suggestion]) -> ReportTable | None:
    """Return changes on the command line with their effects; None without any."""
    rows = plain_rows((suggestion.arguments, suggestion.effect) for suggestion in suggestions)
    return ReportTable(columns=("weigh again with", "what it does"), rows=rows, unbroken=1) if rows else None


def largest_words(memory: MemoryLedger) -> str:
    """Return the two largest categories: "saved activations (86.0 GiB) and parameters (4.00 GiB)"."""
    largest = list(memory.by_category.items())[:2]
    return " and ".join(f"{spaced(name)} ({format_bytes(size)})" for name, size in largest)


def _memory_sections(facts: WeighingFacts, *, on_page: bool) -> tuple[ReportSection, ...]:
    """Return one device's memory: by category, by the rule of thumb, by number format, by buffer."""
    memory = facts.ledger.memory
    bars = memory_bars(memory, on_page=True) if on_page else None
    notes = (Words(text=f"{note[0].upper()}{note[1:]}.", tone="faint") for note in memory.notes)
    return (
        *section("Memory of one device", bars, _memory_table(memory, on_page=on_page), *notes),
        *_rule_of_thumb_sections(facts.rule_of_thumb),
        *section("Number formats at the peak", _format_table(memory, on_page=on_page)),
        *section("Largest buffers at the peak", buffer_table(memory, on_page=on_page)),
    )


def memory_bars(memory: MemoryLedger, *, on_page: bool) -> Bars:
    """Return the categories as bars, scaled to the usable memory, or to the needed memory if that is more.

    A page scales the bar of a small program to the program alone.
    """
    usable, needed = memory.usable_bytes, memory.reserved_bytes + memory.allowance_bytes
    near = usable is not None and not (on_page and needed < LEAST_FILLED * usable)
    whole = max(needed, usable if usable is not None and near else 0, 1)
    least, most = (LEAST_SEGMENT * whole, None) if on_page else (0, MOST_BARS)
    colours = memory_colours(memory)

    def part(name: str, size: int, colour: str) -> BarPart:
        return BarPart(name=name, size=size, amount=format_bytes(size), colour=colour)

    return Bars(
        label="memory of one device by category",
        parts=(
            *parts_of(memory.by_category, colours, format_bytes, least=least, most=most),
            *((part(BESIDE, memory.allowance_bytes, colours[BESIDE]),) if memory.allowance_bytes else ()),
        ),
        whole=whole,
        base=usable if usable is not None and near else whole,
        limit=None if usable is None else part("usable", usable, INK),
        free=part("free", usable - needed, FREE) if usable is not None and near and memory.fits else None,
    )


def _memory_table(memory: MemoryLedger, *, on_page: bool) -> ReportTable:
    """Return the categories with bars, scaled to usable memory, or to reserved memory if that is unknown."""
    whole = memory.usable_bytes or memory.reserved_bytes
    least = 0 if on_page else LEAST_ROW * memory.reserved_bytes

    def row(name: str, size: int, note: str, tone: Tone) -> TableRow:
        exact = (f"{size:,}",) if on_page else ()
        share = "" if note in ELSEWHERE else percent(size, whole)
        bar = size / max(whole, 1) if note == BAR else None
        cells = (name.strip(), format_bytes(size), *exact, share, "" if note == BAR else note)
        return TableRow(cells=cells, tone=tone, is_part=name.startswith(" "), bar=bar)

    rows = tuple(row(*entry) for entry in (*_category_rows(memory, least), *_total_rows(memory)))
    numbers = ("size", "bytes", "share") if on_page else ("size", "share")
    columns = ("category", *numbers, "note")
    return ReportTable(columns=columns, rows=rows, numbers=numbers, unbroken=len(columns) - 1, head=False)


def _total_rows(memory: MemoryLedger) -> Iterator[tuple[str, int, str, Tone]]:
    yield "= reserved", memory.reserved_bytes, BAR, "strong"
    for name, size in memory.allowance.items():
        note = "the fleet's reserve" if name == RESERVED else "allowance: no compiler counts it"
        yield f"+ {name}", size, note, "faint"
    if memory.usable_bytes is not None:
        yield "usable", memory.usable_bytes, "", ""
    if memory.peak_bytes is not None:
        yield "alive at the peak", memory.peak_bytes, "", ""
    in_host, on_chip, of_host = ELSEWHERE
    if memory.host_bytes:
        yield "in host memory", memory.host_bytes, in_host, ""
    if memory.on_chip_bytes:
        yield "on the chip (VMEM)", memory.on_chip_bytes, on_chip, ""
    for name, size in memory.host_needs.items():
        yield f"each host: {name}", size, of_host, "faint"


def _category_rows(memory: MemoryLedger, least: float) -> Iterator[tuple[str, int, str, Tone]]:
    """Yield the categories, the moments below the optimizer state, and the sum of what is below `least`."""
    small = [size for size in memory.by_category.values() if size < least]
    for name, size in memory.by_category.items():
        if size >= least:
            yield spaced(name), size, BAR, ""
        if name == "optimizer_state":
            for moment, part in memory.optimizer_state_by_moment.items():
                if least <= part < size:
                    yield f" {moment}", part, "", "faint"
    if small:
        yield f"{len(small)} smaller ones", sum(small), BAR, ""


def _rule_of_thumb_sections(by_hand: RuleOfThumb | None) -> tuple[ReportSection, ...]:
    """Return one row for each quantity: by hand on the whole fleet, on one device, and compiled."""
    if by_hand is None:
        return ()
    rows = tuple(
        TableRow(
            cells=(
                f"{'= ' * (row.quantity == 'total')}{row.quantity}",
                format_bytes(row.whole_bytes),
                format_bytes(row.device_bytes),
                format_bytes(row.compiled_bytes),
                row.why,
            ),
            tone="strong" if row.quantity == "total" else "",
        )
        for row in by_hand.rows
    )
    numbers = ("by hand", "/ devices", "compiled")
    rule = f"4 x (parameters + activations + gradients + optimizer state); activations: {by_hand.rule}"
    table = ReportTable(columns=("quantity", *numbers, "why"), rows=rows, numbers=numbers, unbroken=1)
    return section("The sum by hand", Words(text=rule, tone="faint"), table)


def _format_table(memory: MemoryLedger, *, on_page: bool) -> ReportTable:
    """Return the reserved bytes at the peak by number format, each with its categories, largest first."""
    least = 0 if on_page else LEAST_ROW * memory.reserved_bytes
    small = {name: size for name, size in memory.by_format.items() if size < least}
    rows: list[tuple[str, ...]] = []
    for name, num_bytes in memory.by_format.items():
        if name not in small:
            sizes = {c: formats.get(name, 0) for c, formats in memory.by_category_and_format.items()}
            shown = {category: size for category, size in sizes.items() if size >= max(least, 1)}
            whose = sorted(shown.items(), key=lambda item: -item[1])
            words = ", ".join(f"{spaced(category)} {format_bytes(size)}" for category, size in whose)
            rows.append((name, format_bytes(num_bytes), words))
    if small:
        rows.append((", ".join(small), format_bytes(sum(small.values())), ""))
    columns = ("format", "size", "whose")
    return ReportTable(columns=columns, rows=plain_rows(rows), numbers=("size",), unbroken=1)


def buffer_table(memory: MemoryLedger, *, on_page: bool) -> ReportTable | Words:
    """Return the largest values alive at the peak, each with the module and source line that make it."""
    if not memory.buffers:
        return Words(text="none")
    rows: list[tuple[str, ...]] = []
    for buffer in memory.buffers[: MOST_BUFFERS_ON_PAGE if on_page else MOST_BUFFERS]:
        maker = buffer.module or (buffer.operation if on_page else "")
        place = " ".join(filter(None, (maker, buffer.source_line))) or buffer.operation
        if not maker and "[" not in place:  # of an operation's path, the end says most
            place = "/".join(place.split("/")[-2:])
        cells = (format_bytes(buffer.num_bytes), buffer.shape, spaced(buffer.category), place)
        rows.append((*cells, f"{buffer.rule} ({buffer.certainty})") if on_page else cells)
    columns = ("size", "shape", "what", "made by", *(("filed by",) if on_page else ()))
    return ReportTable(columns=columns, rows=plain_rows(rows), numbers=("size",), unbroken=2)


def _flop_sections(facts: WeighingFacts, *, on_page: bool) -> tuple[ReportSection, ...]:
    """Return the counts of FLOPs, their convention, and the elementwise work that they leave out."""
    flops = facts.ledger.flops
    bars = None
    if on_page and (whole := sum(flops.by_phase.values())):
        parts = parts_of(flops.by_phase, colours_of(flops.by_phase), flop_words)
        bars = Bars(label="executed FLOPs by phase", parts=parts, whole=whole, base=whole)
    classes = ", ".join(f"{name} {format_count(n)}" for name, n in flops.elementwise_by_class.items())
    convention = (FLOP_CONVENTION if not isinstance(facts, EagerFacts) else EAGER_CONVENTION) + (
        f" Elementwise operations: {classes}." if classes else ""
    )
    table = _flop_table(facts, on_page=on_page)
    return section("FLOPs of one step, all devices", bars, table, Words(text=convention, tone="faint"))


def _flop_table(facts: WeighingFacts, *, on_page: bool) -> ReportTable:
    flops, rows = facts.ledger.flops, list[TableRow]()

    def add(name: str, count: float | None, words: str, *, model: str = "", **more: Any) -> None:
        amount = "" if count is None else flop_words(count)
        rows.append(TableRow(cells=(name, amount, *((model,) if on_page else ()), words), **more))

    def share(count: int) -> str:
        return f"{percent(count, flops.executed)} of executed" if flops.executed else ""

    add("model", flops.model, "the program as written, nothing recomputed", tone="strong")
    program = "the compiled program" if not isinstance(facts, EagerFacts) else "what runs"
    ratio = f"{program}, {flops.executed / flops.model:.3f} x model" if flops.model else ""
    add("executed", flops.executed, ratio, tone="strong")
    for phase, count in flops.by_phase.items():
        add(phase, count, share(count), is_part=True)
    if facts.pipeline or flops.bubble:
        why = f": {_bubble_words(facts.pipeline)}" if facts.pipeline else ""
        add("in the bubble", flops.bubble, f"{share(flops.bubble)}{why}", is_part=True)
    if flops.by_format:
        formats = ", ".join(f"{name} {flop_words(count)}" for name, count in flops.by_format.items())
        add("in formats", None, formats, is_part=True)
    modules = sorted({**flops.by_module, **flops.model_by_module}, key=lambda m: -flops.by_module.get(m, 0))
    for module in modules if on_page else list(flops.by_module)[:MOST_MODULES]:
        count = flops.by_module.get(module, 0)
        beyond = flops.waste_by_module.get(module.rpartition("/")[0] or module, 0)
        words = share(count) + (f", {flop_words(beyond)} beyond the model's around it" if beyond else "")
        model = flop_words(flops.model_by_module.get(module, 0))
        add(module or "outside any scope", count, words, model=model, is_part=True)
    if flops.rule_6nd is not None:
        off = f"{100 * (flops.rule_6nd / flops.model - 1):+.2f} % of model" if flops.model else ""
        add("6ND rule", flops.rule_6nd, f"6 x parameters x tokens: {off}")
        for sign, count, why in facts.rule_terms:
            add(sign, count, why, tone="faint", is_part=True)
    numbers = ("FLOPs", *(("in the model",) if on_page else ()))
    columns = ("count", *numbers, "note")
    return ReportTable(columns=columns, rows=tuple(rows), numbers=numbers, unbroken=1, head=False)


def _bubble_words(ticks: Ticks) -> str:
    """Return the number of a stage's passes that have no microbatch, with the counts that cause it."""
    idle, padding = ticks.num_passes - ticks.num_needed, ticks.num_padded_layers - ticks.num_layers
    few = ", fewer microbatches than stages" if ticks.num_microbatches < ticks.num_stages else ""
    chunks = f" of {ticks.num_chunks} chunks" if ticks.num_chunks > 1 else ""
    padded = f", and {padding} of {ticks.num_padded_layers} layers are padding" if padding else ""
    return (
        f"{idle} of a stage's {ticks.num_passes} passes have none of the {ticks.num_microbatches} "
        f"microbatches ({ticks.num_stages} stages{chunks}, {ticks.schedule}){few}{padded}"
    )


def _traffic_sections(facts: WeighingFacts, *, on_page: bool) -> tuple[ReportSection, ...]:
    """Return one row for each kind, axes and link; a page separates loops and names the links.

    The column "may overlap" counts messages.
    """
    title, traffic = "Traffic of one device and step", facts.ledger.traffic
    if not traffic:
        return section(title, Words(text="none: nothing is sent"))
    crossing = traffic_words(facts)
    merged: dict[tuple[str, ...], list[int]] = {}
    for item in traffic:
        link = " ".join(filter(None, (item.link, "+".join(item.dimensions))))
        key = (item.kind, f"{'+'.join(item.axes) or 'none'} ({item.group_size})", link)
        if on_page:
            key = (*key, item.link_name, "in a loop" if item.in_loop else "once")
        counts = (item.count, item.payload_bytes, item.wire_bytes, item.overlapped_count)
        merged[key] = [a + b for a, b in zip(merged.get(key, (0, 0, 0, 0)), counts, strict=True)]
    ordered = sorted(merged.items(), key=lambda entry: -entry[1][2])
    rows = plain_rows(
        (*key, str(count), format_rate(payload, "B"), format_rate(wire, "B"), f"{overlapped} of {count}")
        for key, (count, payload, wire, overlapped) in ordered
    )
    wire = format_rate(sum(item.wire_bytes for item in traffic), "B")
    names = ("collective", "axes", "link", *(("its name", "where") if on_page else ()))
    total = TableRow(cells=("= sent by one device", *[""] * (len(names) + 1), wire, ""), tone="strong")
    numbers = ("count", "payload", "wire", "may overlap")
    table = ReportTable(columns=(*names, *numbers), rows=(*rows, total), numbers=numbers)
    return section(title, Words(text=f"{crossing}.") if crossing else None, table)


def traffic_words(facts: WeighingFacts) -> str:
    """Return what one device sends out of its fast domain and inside, by axes, and what of it is hidden.

    For example: "1.20 GB leave the host, 87 % hidden (data); 103 GB stay inside, 4 % hidden (tensor 100 GB,
    0 %; data 3.00 GB, 87 %)". "" where nothing is sent.
    """
    parts, domain = predict.traffic_by_axes(facts.ledger.traffic, facts.prediction), facts.fleet.domain
    if not parts:
        return ""
    leaving = [(part, part.crossing_bytes) for part in parts if part.crossing_bytes]
    inside = sorted(((part, part.inside_bytes) for part in parts if part.inside_bytes), key=lambda p: -p[1])
    first = _sent_words(leaving, f"leave the {domain}") if leaving else f"nothing leaves the {domain}"
    return f"{first}; {_sent_words(inside, 'stay inside')}" if inside else first


def _sent_words(parts: Sequence[tuple[predict.AxisTraffic, int]], where: str) -> str:
    """Return the sum of bytes with its hidden share, then those of the axes with at least 1 % of it."""

    def hidden(share: float | None, word: str = "") -> str:
        return "" if share is None else f", {percent(share, 1)}{word}"

    total = sum(size for _, size in parts)
    axes = [
        ("+".join(part.axes), size, part.hidden_share) for part, size in parts if size >= LEAST_SENT * total
    ]
    whole = hidden(predict.hidden_share(part for part, _ in parts), " hidden")
    names = [f"{name} {format_rate(size, 'B')}{hidden(share)}" for name, size, share in axes]
    listed = axes[0][0] if len(axes) == 1 else "; ".join(names)
    return f"{format_rate(total, 'B')} {where}{whole} ({listed})"


def _rank_sections(facts: WeighingFacts, *, on_page: bool) -> tuple[ReportSection, ...]:
    """Return the collectives of a PyTorch step by phase, and the ranks that were run."""
    if not isinstance(facts, EagerFacts):
        return ()
    rows = plain_rows(
        (
            message.kind,
            f"{'+'.join(message.axes)} ({message.group_size})",
            message.phase,
            str(message.count),
            format_bytes(message.array_bytes),
            format_bytes(message.wire_bytes),
        )
        for message in facts.account.messages
    )
    numbers = ("count", "whole arrays", "sent")
    by_phase = ReportTable(columns=("collective", "axes", "phase", *numbers), rows=rows, numbers=numbers)
    ranks = plain_rows(
        (
            str(rank.rank),
            format_bytes(rank.parameters_bytes),
            format_bytes(rank.gradients_bytes),
            format_bytes(rank.optimizer_state_bytes),
            format_bytes(rank.saved_activation_bytes),
            format_bytes(rank.peak_bytes),
            flop_words(sum(rank.flops_by_phase.values())),
        )
        for rank in facts.account.ranks
    )
    columns = ("rank", "parameters", "gradients", "optimizer", "saved", "peak", "FLOPs")
    return (
        *section("Collectives of one rank by phase", by_phase if rows else None),
        *section("Ranks that were run", ReportTable(columns=columns, rows=ranks, numbers=columns)),
        *section("Modules of one rank, with all inside them", _module_table(facts.account, on_page=on_page)),
    )


def _module_table(account: EagerAccount, *, on_page: bool) -> ReportTable | None:
    """Return the modules that cost anything, the most expensive first; a terminal shows some."""

    def cost(module: ModuleCount) -> tuple[int, int]:
        return sum(module.flops_by_phase.values()), module.saved_activation_bytes

    costly = sorted((each for each in account.modules if any(cost(each))), key=cost, reverse=True)
    rows = plain_rows(
        (
            each.scope or "the module itself",
            each.kind,
            format_count(each.num_parameters),
            flop_words(each.flops_by_phase.get("forward", 0)),
            flop_words(each.flops_by_phase.get("backward", 0)),
            flop_words(each.flops_by_phase.get("recomputed", 0)),
            format_bytes(each.saved_activation_bytes),
        )
        for each in costly[: None if on_page else MOST_MODULES]
    )
    numbers = ("parameters", "forward", "backward", "recomputed", "saved")
    columns = ("module", "class", *numbers)
    return ReportTable(columns=columns, rows=rows, numbers=numbers) if rows else None


def fault_sections(facts: WeighingFacts) -> tuple[ReportSection, ...]:
    """Return the lint findings with their fixes, operations without a rule or a rate, and assumptions."""
    findings = (
        Words(
            lead=item.what, text=f"{f' ({item.source_line})' if item.source_line else ''}. Fix: {item.fix}."
        )
        for item in facts.ledger.findings
    )
    without_rule = (Words(text=line) for line in facts.ledger.unpriced)
    no_rate = (Words(text=line) for line in without_rate(facts))
    assumed = (Words(text=line) for line in facts.ledger.assumptions)
    return (
        *section("What could be fixed", *findings, tone="warning"),
        *section("Unpriced: no rule counts these", *without_rule, tone="warning"),
        *section("Unpriced in time: no rate of these is known", *no_rate, tone="warning"),
        *section("Assumptions in the counts", *assumed, tone="warning"),
    )


def without_rate(facts: WeighingFacts) -> tuple[str, ...]:
    """Return each operation that has FLOPs and no rate; those without a rule are in the ledger."""
    predicted = () if facts.prediction is None else facts.prediction.unpriced
    return tuple(line for line in dict.fromkeys(predicted) if line not in facts.ledger.unpriced)
