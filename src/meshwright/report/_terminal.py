"""Show a weighing in full on a terminal: the head of the one screen, then memory, FLOPs, traffic, time.

It computes only sums, shares and differences of recorded values.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.compiler import SIMULATED
from meshwright.config import ticks_of
from meshwright.ledger import Collective, Finding
from meshwright.planning import HandSum, hand_sum, suggestions
from meshwright.predict import Prediction
from meshwright.results import Weighing
from meshwright.units import format_bytes, format_count, format_rate, format_seconds

from ._screen import active_parameters, head_lines, source_line, unpriced
from ._terminal_parts import (
    add_row,
    buffer_table,
    format_table,
    heading,
    indented,
    memory_table,
    plain_table,
    spaced,
)
from ._wording import (
    FLOP_CONVENTION,
    HELP_COLUMNS,
    HELP_NOTE,
    bubble_words,
    elementwise_words,
    help_rows,
    interval_words,
    kind_words,
    link_words,
)

NUM_SLICES = 8
NUM_MODULES = 6
SIMULATED_NOTE = (
    "The CPU's compiler stood in for the target's. It makes no reduce-scatter and schedules for no memory "
    "limit: for a step of llama3-405b on 512xH100 it took 107.7 GB of temporaries per device, the H100's "
    "compiler 51.2 GB. Memory, executed FLOPs and traffic below are those of the CPU's program."
)


def weighing_text(weighing: Weighing) -> RenderableType:
    """Return the whole account of a weighing, for rich's consoles of 80 columns or more."""
    ledger, compiled = weighing.ledger, weighing.compiled
    parts: list[RenderableType] = [*head_lines(weighing)]
    if compiled.source == SIMULATED:
        parts += [indented(Text(SIMULATED_NOTE))]
    parts += [Text()]
    if ledger.memory.fits is False:
        parts += [*_what_would_shrink_it(weighing), Text()]
    parts += [heading("Memory of one device"), memory_table(ledger.memory), Text()]
    if weighing.config is not None:
        found = hand_sum(weighing.config, compiled, ledger.memory)
        title = f"The sum by hand: 4 x (parameters + activations + gradients + optimizer state), {found.rule}"
        parts += [heading(title), hand_sum_table(found), Text()]
    parts += [heading("Number formats at the peak"), format_table(ledger.memory), Text()]
    parts += [heading("Largest buffers at the peak"), buffer_table(ledger.memory), Text()]
    parts += [heading("FLOPs of one step, all devices"), *_flop_parts(weighing), Text()]
    parts += [heading("Traffic of one device and step"), _traffic_table(ledger.traffic), Text()]
    parts += [heading("Predicted time of one step"), *_prediction_parts(weighing), Text()]
    parts += [*_finding_parts(ledger.findings), *_unpriced_parts(weighing)]
    source = "SIMULATED ON CPU" if compiled.source == SIMULATED else compiled.source
    parts.append(source_line(weighing).append(f" ({source})"))
    return Group(*parts)


def _what_would_shrink_it(weighing: Weighing) -> list[RenderableType]:
    """Return the largest categories in a sentence, then a table of command-line changes that save memory."""
    memory = weighing.ledger.memory
    largest = list(memory.by_category.items())[:2]
    words = " and ".join(f"{spaced(name)} ({format_bytes(size)})" for name, size in largest)
    found = suggestions(weighing.config, weighing.layout, weighing.fleet, memory)
    parts: list[RenderableType] = [Text(f"Most of it: {words}.")]
    if found:
        table = plain_table("weigh again with", "what it does")
        table.columns[0].no_wrap = True
        for suggestion in found:
            add_row(table, suggestion.arguments, suggestion.effect)
        parts.append(indented(table))
    return parts


def _flop_parts(weighing: Weighing) -> list[RenderableType]:
    """Return the counts, their convention, and the elementwise work that they leave out."""
    flops = weighing.ledger.flops
    words = elementwise_words(flops.elementwise_by_class)
    beside = f" Elementwise operations: {words}." if words else ""
    return [_flop_table(weighing), indented(Text(FLOP_CONVENTION + beside, style="dim"))]


def _flop_table(weighing: Weighing) -> RenderableType:
    flops = weighing.ledger.flops
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    add_row(table, "model", _flop(flops.model), "the program as written, nothing recomputed", style="bold")
    more = f"{flops.executed / flops.model:.3f} x model" if flops.model else ""
    add_row(
        table,
        "executed",
        _flop(flops.executed),
        f"the compiled program, {more}" if more else "",
        style="bold",
    )
    for phase, count in flops.by_phase.items():
        share = f"{100 * count / flops.executed:.1f} % of executed" if flops.executed else ""
        add_row(table, f"  {phase}", _flop(count), share)
    if weighing.config is not None and (ticks := ticks_of(weighing.config, weighing.layout)):
        share = f"{100 * flops.bubble / flops.executed:.1f} % of executed"
        add_row(table, "  in the bubble", _flop(flops.bubble), f"{share}: {bubble_words(ticks)}")
    if flops.by_format:
        formats = ", ".join(f"{name} {_flop(count)}" for name, count in flops.by_format.items())
        add_row(table, "  in formats", "", formats)
    for module, count in list(flops.by_module.items())[:NUM_MODULES]:
        beyond = flops.waste_by_module.get(module.rpartition("/")[0] or module, 0)
        words = f"{100 * count / flops.executed:.1f} % of executed" if flops.executed else ""
        if beyond:
            words += f", {_flop(beyond)} beyond the model's around it"
        add_row(table, f"  {module or 'outside any scope'}", _flop(count), words)
    if flops.rule_6nd is not None:
        off = f"{100 * (flops.rule_6nd / flops.model - 1):+.2f} % of model" if flops.model else ""
        add_row(table, "6ND rule", _flop(flops.rule_6nd), f"6 x parameters x tokens: {off}")
        for sign, count, why in _rule_differences(weighing):
            add_row(table, f"  {sign}", _flop(count), why, style="dim")
    return indented(table)


def _rule_differences(weighing: Weighing) -> list[tuple[str, int, str]]:
    """Return the terms that lead exactly from the 6ND rule to the model's FLOPs: sign, count, reason."""
    flops, compiled = weighing.ledger.flops, weighing.compiled
    assert flops.rule_6nd is not None
    parameters, used, tokens = (
        compiled.num_parameters,
        compiled.num_matmul_parameters,
        compiled.tokens_per_step,
    )
    if parameters is None or used is None or tokens is None:
        return []
    idle, attention = 6 * (parameters - used) * tokens, compiled.traced_flops.attention
    rest = flops.model - (flops.rule_6nd - idle + attention)
    nothing = "parameters that multiply nothing: embedding lookup, norms, biases"
    nothing += "" if active_parameters(weighing) is None else "; and experts that a token is not sent to"
    steps = [
        ("-", idle, nothing),
        ("+", attention, "attention's own products"),
        ("-", -rest, "products nobody asked for, as the gradient of the input"),
        ("+", rest, "other products"),
    ]
    return [step for step in steps if step[1] > 0]


def _flop(count: float) -> str:
    return format_rate(count, "FLOP")


def _traffic_table(traffic: tuple[Collective, ...]) -> RenderableType:
    """Return one row for each kind, axes and link, summed over messages inside and outside loops.

    The column "may overlap" counts messages.
    """
    if not traffic:
        return indented(Text("none: nothing is sent"))
    numbers = ("count", "payload", "wire", "may overlap")
    table = plain_table("collective", "axes", "link", *numbers, right=numbers)
    merged: dict[tuple[str, tuple[str, ...], int, str], list[int]] = {}
    for item in traffic:
        link = link_words(item.link, item.dimensions)
        row = merged.setdefault((item.kind, item.axes, item.group_size, link), [0, 0, 0, 0])
        counts = (item.count, item.payload_bytes, item.wire_bytes, item.overlapped_count)
        for place, number in enumerate(counts):
            row[place] += number
    for (kind, axes, size, link), (count, payload, wire, overlapped) in sorted(
        merged.items(), key=lambda entry: -entry[1][2]
    ):
        where = f"{'+'.join(axes) or 'none'} ({size})"
        sizes = (format_rate(payload, "B"), format_rate(wire, "B"))
        add_row(table, kind, where, link, str(count), *sizes, f"{overlapped} of {count}")
    wire = sum(item.wire_bytes for item in traffic)
    add_row(table, "= sent by one device", "", "", "", "", format_rate(wire, "B"), "", style="bold")
    return indented(table)


def _prediction_parts(weighing: Weighing) -> list[RenderableType]:
    prediction = weighing.prediction
    if prediction is None:
        return [indented(Text(f"none: {weighing.no_prediction}"))]
    seconds = prediction.step_seconds
    line = Text.assemble((interval_words(seconds, prediction.interval_reasons), "bold"))
    if prediction.tokens_per_second_per_device is not None:
        line.append(f", {format_count(prediction.tokens_per_second_per_device)} tokens/s per device")
    line.append(f", MFU {100 * prediction.mfu:.1f} %, HFU {100 * prediction.hfu:.1f} %")
    if prediction.peak_flops_per_second:
        line.append(f" of {format_rate(prediction.peak_flops_per_second, 'FLOP/s')}")
    table = plain_table(
        "where it goes", "busy", "waited for", "of the step", right=("busy", "waited for", "of the step")
    )
    for part in prediction.slices[:NUM_SLICES]:
        share = f"{100 * part.exposed_seconds / seconds.expected:.1f} %"
        add_row(table, part.name, format_seconds(part.seconds), _or_zero(part.exposed_seconds), share)
    if rest := prediction.slices[NUM_SLICES:]:
        exposed = sum(part.exposed_seconds for part in rest)
        busy = format_seconds(sum(part.seconds for part in rest))
        share = f"{100 * exposed / seconds.expected:.1f} %"
        add_row(table, f"{len(rest)} smaller ones", busy, format_seconds(exposed), share)
    kinds = indented(Text(f"{kind_words(prediction.seconds_by_kind)}." if prediction.slices else ""))
    basis = indented(Text(prediction.basis, style="dim"))
    return [indented(line), kinds, indented(table), basis, *_help_parts(prediction)]


def _help_parts(prediction: Prediction) -> list[RenderableType]:
    """Return the changes, then bounds, that would make the step faster, the largest saving of each first."""
    if not prediction.what_helps:
        return []
    table = plain_table(*HELP_COLUMNS, right=HELP_COLUMNS[1:3])
    helps = ((h.what, h.saving_seconds, h.change, h.certainty) for h in prediction.what_helps)
    for row in help_rows(helps, prediction.step_seconds.expected):
        add_row(table, *row)
    return [
        Text(),
        heading("What would make it faster"),
        indented(table),
        indented(Text(HELP_NOTE, style="dim")),
    ]


def _or_zero(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0"


def _unpriced_parts(weighing: Weighing) -> list[RenderableType]:
    """Return each operation without a rule, and each assumption of the counts."""
    found = (
        ("Unpriced: no rule counts these", unpriced(weighing)),
        ("Taken for granted", weighing.ledger.assumptions),
    )
    parts: list[RenderableType] = []
    for title, lines in found:
        if lines:
            parts += [Text(title, style="bold yellow"), indented(Text("\n".join(lines))), Text()]
    return parts


def _finding_parts(findings: tuple[Finding, ...]) -> list[RenderableType]:
    """Return the lint findings, each with its source line and its fix."""
    if not findings:
        return []
    lines = [
        Text.assemble(
            found.what,
            (f" ({found.source_line})" if found.source_line else "", "dim"),
            f". Mend: {found.mend}.",
        )
        for found in findings
    ]
    return [Text("What could be mended", style="bold yellow"), *map(indented, lines), Text()]


def hand_sum_table(found: HandSum) -> RenderableType:
    """Return one row for each quantity: hand-computed on the whole fleet, on one device, and compiled."""
    table = plain_table(
        "quantity", "by hand", "/ devices", "compiled", "why", right=("by hand", "/ devices", "compiled")
    )
    for row in found.rows:
        add_row(
            table,
            f"{'= ' * (row.quantity == 'total')}{row.quantity}",
            format_bytes(row.whole_bytes),
            format_bytes(row.device_bytes),
            format_bytes(row.compiled_bytes),
            row.why,
            style="bold" if row.quantity == "total" else "",
        )
    for column in table.columns[:4]:
        column.no_wrap = True
    return indented(table)
