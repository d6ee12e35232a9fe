"""Turn a finished run into a document for a terminal. Used by: `_results`, and the pages of runs."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.measure import Measurement, Reconciliation
from meshwright.measure import Row as ComparedRow
from meshwright.results import Run
from meshwright.units import format_bytes, format_count, format_seconds

from ._model import (
    Document,
    ReportSection,
    ReportTable,
    TableRow,
    Words,
    flop_words,
    percent,
    plain_rows,
    section,
)

SAME_PROGRAM = "The program that ran is the one that was weighed: their fingerprints are equal."
OTHER_PROGRAM = (
    "NOT THE PROGRAM THAT WAS WEIGHED: the compiler made another one here, and their fingerprints differ."
)
PROGRAM_OF_A_TPU = (
    "Whether the program that ran is the one that was weighed is not known: on a TPU the compiler changes "
    "its text after a weighing has read it."
)
MOST_SAMPLE_LINES = 12  # on a terminal


def reconciliation_document(found: Reconciliation) -> Document:
    """Return predicted beside measured quantities of a run."""
    return Document(title="", sections=reconciliation_sections(found))


def run_document(run: Run) -> Document:
    """Return the account of a finished run for a terminal."""
    measurement = run.measurement
    words = f"on {measurement.num_devices} x {measurement.device_kind}"
    if measurement.step_seconds is not None:
        rate = measurement.tokens_per_second
        assert rate is not None, "a timed step has a rate"
        words += f", {format_seconds(measurement.step_seconds.median)} each"
        words += f", {format_count(rate)} {measurement.batch_unit}/s"
    return Document(
        title=steps_words(measurement),
        facts=words,
        sections=(
            *section("", *_loss_lines(measurement)),
            *sample_sections(measurement, most_lines=MOST_SAMPLE_LINES),
            *reconciliation_sections(run.reconciliation),
            *seconds_sections(measurement),
        ),
    )


def steps_words(measurement: Measurement) -> str:
    """Say how many steps a run made, and whether it was interrupted."""
    return f"{measurement.steps} steps{', interrupted' if measurement.interrupted else ''}"


def _loss_lines(measurement: Measurement) -> Iterator[Words]:
    """Yield the first and last losses, and the held-out loss compared with the entropy of single tokens."""
    for name, losses in (("training", measurement.losses), ("held-out", measurement.held_out_losses)):
        if losses:
            first, last = min(losses), max(losses)
            line = f"{name} loss {losses[first]:.3f} at step {first}"
            line += f", {losses[last]:.3f} at step {last}" if last != first else ""
            yield Words(text=line)
    metrics, entropy = measurement.held_out_metrics, measurement.unigram_entropy_nats
    for name in sorted({name for values in metrics.values() for name in values}):
        last = max(metrics)
        yield Words(text=f"held-out {name} {metrics[last][name]:.3f} at step {last}")
    if measurement.num_bad_steps:
        yield Words(text=f"{measurement.num_bad_steps} steps were bad and not applied: see notices.jsonl")
    if entropy is not None and measurement.held_out_losses:
        gain = entropy - measurement.held_out_losses[max(measurement.held_out_losses)]
        side = "below" if gain >= 0 else "above"
        words = f"the entropy of its single tokens ({entropy:.3f} nats)"
        yield Words(text=f"the held-out loss is {abs(gain):.3f} nats {side} {words}")


def sample_sections(measurement: Measurement, *, most_lines: int | None = None) -> tuple[ReportSection, ...]:
    """Return what the model writes after training."""
    if not measurement.sample:
        return ()
    words = Words(lead=measurement.sample_prompt, text=measurement.sample, sample=True)
    if most_lines is not None:
        lines = f"{measurement.sample_prompt}{measurement.sample}".rstrip().split("\n")
        kept = [*lines[:most_lines], "..."] if len(lines) > most_lines else lines
        words = Words(text="\n".join(kept), sample=True)
    return section("What it writes after training", words)


def reconciliation_sections(reconciliation: Reconciliation) -> tuple[ReportSection, ...]:
    """Return sections that compare predicted with measured quantities, and say how they were measured."""
    rows = [row_cells(row) for row in reconciliation.rows]
    ways = [(row.quantity, row.how) for row in reconciliation.rows]
    ways += [(name, f"not compared: {why}") for name, why in reconciliation.not_compared.items()]
    numbers = ("predicted", "measured", "error")
    compared = ReportTable(
        columns=("quantity", *numbers), rows=plain_rows(cells[:4] for cells in rows), numbers=numbers
    )
    how = ReportTable(
        columns=("quantity", "measured by"), rows=tuple(TableRow(cells=way, tone="faint") for way in ways)
    )
    program = PROGRAM_OF_A_TPU
    if reconciliation.same_program is not None:
        program = SAME_PROGRAM if reconciliation.same_program else OTHER_PROGRAM
    tables = (table for table in (compared, how) if table.rows)
    return section("Predicted beside measured", Words(text=program), *tables)


def row_cells(row: ComparedRow) -> tuple[str, str, str, str, str]:
    """Return quantity, prediction with interval, measurement, error, and method of measurement of a row."""
    error = "" if row.relative_error is None else f"{100 * row.relative_error:+.1f} %"
    predicted = _amount(row.predicted, row.unit)
    if row.low is not None and row.high is not None:
        low, high = (_amount(end, row.unit, like=row.predicted) for end in (row.low, row.high))
        predicted += f" ({low} to {high})"
    return row.quantity, predicted, _amount(row.measured, row.unit), error, row.how


def _amount(value: float, unit: str, like: float | None = None) -> str:
    """Return an amount with its unit; the ends of an interval have the unit of its amount, `like`."""
    match unit:
        case "bytes":
            return format_bytes(value)
        case "FLOP":
            return flop_words(value)
        case "seconds":
            return format_seconds(value, like=like)
        case "share":
            return percent(value, 1)
        case _:
            return f"{format_count(value)} {unit}"


def seconds_sections(measurement: Measurement | None) -> tuple[ReportSection, ...]:
    """Return the goodput, and the seconds of each phase, which sum to the time of the process."""
    if measurement is None:
        return ()
    whole = sum(measurement.seconds_by_phase.values())
    words = f"Goodput {percent(measurement.goodput, 1)}: the share of {format_seconds(whole)} spent in steps."
    phases = sorted(measurement.seconds_by_phase.items(), key=lambda item: -item[1])
    rows = plain_rows((name, format_seconds(part), percent(part, whole)) for name, part in phases)
    table = ReportTable(columns=("phase", "time", "share"), rows=rows, numbers=("time", "share"))
    return section("Where the time went", Words(text=words), table)
