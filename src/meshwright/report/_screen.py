"""Show a weighing on one screen: verdict, time of a step and of the run, memory, and the three main limits.

It computes only sums, shares and differences of recorded values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.compiler import SIMULATED
from meshwright.config import TransformerModel
from meshwright.hardware import Fleet
from meshwright.ledger import MemoryLedger
from meshwright.planning import suggestions
from meshwright.predict import Prediction
from meshwright.results import Weighing
from meshwright.units import format_bytes, format_count, format_rate, format_seconds

from ._terminal_parts import add_row, heading, indented, memory_bar, spaced
from ._wording import cost_words, interval_words, kind_of_slice, run_words

MOST_MATTERS = 3
LEAST_SHARE = 0.02  # share of the step: smaller losses do not limit it
MORE = "All of it: --verbose. Pictures: --html FILE. What would help: --explain."
WASTE = "work done twice"  # the lint's kind for FLOPs beyond the model's
# Classes of the step's time other than products, in words.
LOSSES = {
    "memory-bound": "kernels bound by memory, not by arithmetic",
    "idle": "gaps between kernels",
    "communication": "waiting for communication",
}


def screen_text(weighing: Weighing, more: str = MORE) -> RenderableType:
    """Return a weighing's account that fits one screen, for rich's consoles of 80 columns or more.

    Args:
        more: the last line, which says how to see the rest.
    """
    memory = weighing.ledger.memory
    return Group(
        *head_lines(weighing),
        Text(),
        heading("Memory of one device"),
        memory_bar(memory),
        Text(),
        heading("What matters most"),
        _matter_table(weighing),
        Text(),
        source_line(weighing),
        Text(more, style="dim"),
    )


def head_lines(weighing: Weighing) -> Iterator[Text]:
    """Yield the title, the verdict, the time of a step, and the time and cost of the whole run."""
    yield _title(weighing)
    if weighing.compiled.source == SIMULATED:
        yield Text("SIMULATED ON CPU: all figures are of the CPU compiler's program", style="bold yellow")
    style = {True: "bold green", False: "bold red", None: "bold"}[weighing.ledger.memory.fits]
    yield Text(verdict(weighing.ledger.memory, weighing.fleet), style=style)
    yield step_line(weighing)
    prediction = weighing.prediction
    if prediction is not None and prediction.interval_reasons:
        yield Text(f"  its interval: {'; '.join(prediction.interval_reasons)}", style="dim")
    total = weighing.run_total
    if total is not None:
        yield Text(f"RUN: {run_words(total)}")
        if words := cost_words(total):
            yield Text(f"COST: {words}")


def _title(weighing: Weighing) -> Text:
    compiled = weighing.compiled
    title = Text.assemble((weighing.name, "bold"), " on ", (weighing.fleet.name, "bold"))
    title.append(f", layout {weighing.layout}")
    if compiled.num_parameters is not None:
        title.append(f", {format_count(compiled.num_parameters)} parameters")
    if (active := active_parameters(weighing)) is not None:
        title.append(f" ({format_count(active)} active)")
    if compiled.tokens_per_step is not None:
        title.append(f", {compiled.tokens_per_step:,} tokens per step")
    return title


def active_parameters(weighing: Weighing) -> int | None:
    """Return the number of parameters that one token uses; None if it uses all, or the model is unknown."""
    model = None if weighing.config is None else weighing.config.model
    if not isinstance(model, TransformerModel) or model.num_experts is None:
        return None
    return model.num_active_parameters


def verdict(memory: MemoryLedger, fleet: Fleet) -> str:
    """Return one line that says whether the program fits, with the spare or the missing memory."""
    if memory.usable_bytes is None:
        if fleet.chip.platform == "cpu":
            return "NO VERDICT: a simulated CPU device has no memory of its own"
        return f"NO VERDICT: the catalog does not know how much memory {fleet.chip.name} has"
    needed = memory.reserved_bytes + memory.allowance_bytes
    spare = memory.usable_bytes - needed
    share = f"{100 * abs(spare) / memory.usable_bytes:.1f} %"
    gives = f"{format_bytes(needed)} of {format_bytes(memory.usable_bytes)} per device"
    if spare >= 0:
        return f"FITS: {gives}, {format_bytes(spare)} ({share}) to spare"
    return f"DOES NOT FIT: {gives}, {format_bytes(-spare)} ({share}) too much"


def step_line(weighing: Weighing) -> Text:
    """Return the predicted time of one step with its interval, rate and MFU, or why it is missing."""
    prediction = weighing.prediction
    if prediction is None:
        return Text(f"STEP: none: {weighing.no_prediction}")
    line = Text.assemble("STEP: ", (interval_words(prediction.step_seconds), "bold"))
    if prediction.tokens_per_second_per_device is not None:
        line.append(f", {format_count(prediction.tokens_per_second_per_device)} tokens/s per device")
    return line.append(f", MFU {100 * prediction.mfu:.1f} %")


def source_line(weighing: Weighing) -> Text:
    """Return the name of the compiler, with the compile time."""
    how = "from the cache" if weighing.cached else f"in {format_seconds(weighing.compiled.compile_seconds)}"
    target = weighing.fleet.chip.target
    is_rendered = weighing.compiled.source != SIMULATED and target is not None and target.rendered
    source = ", for a target made of published figures" if is_rendered else ""
    return Text(f"Compiled {how} by {weighing.compiled.compiler}{source}", style="dim")


def _matter_table(weighing: Weighing) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for what, words in matters(weighing)[:MOST_MATTERS]:
        add_row(table, what, words)
    return indented(table)


def matters(weighing: Weighing) -> list[tuple[str, str]]:
    """Return the limits of a step, the most pressing first.

    Each is a pair of its subject and a sentence with the values. The order: missing memory, work that no rule
    counts, assumptions, lint findings, losses of time or FLOPs from the largest down to 2 %, the largest use
    of memory, the largest use of time.
    """
    return [
        *_lacking(weighing),
        *_uncounted(weighing),
        *_found(weighing),
        *_losses(weighing),
        *_largest(weighing.ledger.memory),
        *_products(weighing.prediction),
    ]


def _lacking(weighing: Weighing) -> Iterator[tuple[str, str]]:
    memory = weighing.ledger.memory
    if memory.fits is not False:
        return
    largest = list(memory.by_category.items())[:2]
    words = " and ".join(f"{spaced(name)} ({format_bytes(size)})" for name, size in largest)
    helps = suggestions(weighing.config, weighing.layout, weighing.fleet, memory)
    # On a line of its own, so that it can be copied.
    then = f"\nSmaller with {helps[0].arguments}" if helps else ""
    others = "; --verbose has other changes" if len(helps) > 1 else ""
    yield "memory", f"most of it is {words}{then}{others}"


def unpriced(weighing: Weighing) -> list[str]:
    """Return each operation without a rule once: the prediction repeats the ledger's."""
    predicted = () if weighing.prediction is None else weighing.prediction.unpriced
    return list(dict.fromkeys((*weighing.ledger.unpriced, *predicted)))


def _uncounted(weighing: Weighing) -> Iterator[tuple[str, str]]:
    if found := unpriced(weighing):
        yield "unpriced", f"no rule counts {_first(found)}: FLOPs and time leave it out"
    if taken := weighing.ledger.assumptions:
        yield "assumed", _first(list(taken))


def _first(lines: list[str]) -> str:
    return lines[0] + (f", and {len(lines) - 1} more" if len(lines) > 1 else "")


def _found(weighing: Weighing) -> Iterator[tuple[str, str]]:
    findings = list(weighing.ledger.findings)
    if findings:
        others = f" (and {len(findings) - 1} more: --verbose)" if len(findings) > 1 else ""
        yield "finding", f"{findings[0].what}. To mend it, {findings[0].mend}{others}"


def _losses(weighing: Weighing) -> Iterator[tuple[str, str]]:
    """Yield time and FLOPs that a step spends on anything but its products, the largest share first."""
    losses: list[tuple[float, str, str]] = []
    flops, prediction = weighing.ledger.flops, weighing.prediction
    if prediction is not None:
        for kind, seconds in _seconds_by_loss(prediction).items():
            share = seconds / prediction.step_seconds.expected
            losses.append((share, "time", f"{_of_step(seconds, share)}: {LOSSES[kind]}"))
    told = any(finding.kind == WASTE for finding in weighing.ledger.findings)  # then that finding reports it
    wasted = 0 if told else sum(flops.waste_by_module.values())
    for count, words in (
        (flops.recomputed, "computed again in the backward pass (remat)"),
        (flops.bubble, "done by stages of the pipeline that have no microbatch"),
        (wasted, "done twice or on padding"),
    ):
        share = count / flops.executed if flops.executed else 0.0
        losses.append((share, "FLOPs", f"{100 * share:.1f} % of the executed, {_flop(count)}: {words}"))
    for share, what, words in sorted(losses, key=lambda loss: -loss[0]):
        if share >= LEAST_SHARE:
            yield what, words


def _seconds_by_loss(prediction: Prediction) -> Mapping[str, float]:
    """Return the exposed seconds of the step by the classes of `LOSSES`."""
    found = dict.fromkeys(LOSSES, 0.0)
    for each in prediction.slices:
        name = each.name if each.kind == "compute" else each.kind
        if name in found:
            found[name] += each.exposed_seconds
    return found


def _largest(memory: MemoryLedger) -> Iterator[tuple[str, str]]:
    for name, size in list(memory.by_category.items())[:1]:
        share = 100 * size / memory.reserved_bytes if memory.reserved_bytes else 0.0
        yield "memory", f"{format_bytes(size)}, {share:.1f} % of the program's: {spaced(name)}"


def _products(prediction: Prediction | None) -> Iterator[tuple[str, str]]:
    if prediction is not None and prediction.slices:
        most = max(prediction.slices, key=lambda each: each.exposed_seconds)
        share = most.exposed_seconds / prediction.step_seconds.expected
        yield "time", f"{_of_step(most.exposed_seconds, share)}: {kind_of_slice(most.name)}"


def _of_step(seconds: float, share: float) -> str:
    return f"{format_seconds(seconds)} of the step, {100 * share:.1f} %"


def _flop(count: float) -> str:
    return format_rate(count, "FLOP")
