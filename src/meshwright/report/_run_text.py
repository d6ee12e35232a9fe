"""A finished run as a person reads it on a terminal: losses, a sample, predicted beside measured."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.reconcile import Measurement, Reconciliation
from meshwright.units import format_count, format_seconds

from ._layout import add_row, heading, indented, plain_table
from ._rows import comparison_rows, program_line

SAMPLE_LINES = 12


def run_text(measurement: Measurement, reconciliation: Reconciliation) -> RenderableType:
    """The account of a run that is over, for rich's consoles of 80 columns or more."""
    parts: list[RenderableType] = [_title(measurement), *_loss_lines(measurement), Text()]
    if measurement.sample:
        lines = _printable(f"{measurement.sample_prompt}{measurement.sample}").rstrip().split("\n")
        cut = [*lines[:SAMPLE_LINES], "..."] if len(lines) > SAMPLE_LINES else lines
        parts += [heading("What it writes after training"), indented(Text("\n".join(cut))), Text()]
    parts += [heading("Predicted beside measured"), indented(_comparison(reconciliation)), Text()]
    parts += [indented(_how_measured(reconciliation)), Text()]
    parts += [Text(_time_line(measurement)), Text()]
    parts += [Text(program_line(reconciliation)), Text()]
    return Group(*parts)


def _title(measurement: Measurement) -> Text:
    stopped = ", interrupted" if measurement.interrupted else ""
    title = Text.assemble((f"{measurement.steps} steps{stopped}", "bold"))
    title.append(f" on {measurement.num_devices} x {measurement.device_kind}")
    if measurement.step_seconds is not None:
        rate = measurement.tokens_per_second
        assert rate is not None, "a timed step has a rate"
        title.append(
            f", {format_seconds(measurement.step_seconds.median)} each, {format_count(rate)} tokens/s"
        )
    return title


def _loss_lines(measurement: Measurement) -> list[Text]:
    """First and last loss, and the held-out one beside the entropy of single tokens."""
    lines: list[Text] = []
    for name, losses in (("training", measurement.losses), ("held-out", measurement.held_out_losses)):
        if losses:
            first, last = min(losses), max(losses)
            line = f"{name} loss {losses[first]:.3f} at step {first}"
            if last != first:
                line += f", {losses[last]:.3f} at step {last}"
            lines.append(Text(line))
    for name in sorted({name for values in measurement.held_out_metrics.values() for name in values}):
        last = max(measurement.held_out_metrics)
        lines.append(Text(f"held-out {name} {measurement.held_out_metrics[last][name]:.3f} at step {last}"))
    if measurement.num_bad_steps:
        lines.append(Text(f"{measurement.num_bad_steps} steps were bad and not applied: see notices.jsonl"))
    if measurement.unigram_entropy_nats is not None and measurement.held_out_losses:
        gain = (
            measurement.unigram_entropy_nats - measurement.held_out_losses[max(measurement.held_out_losses)]
        )
        side = "below" if gain >= 0 else "above"
        entropy = f"the entropy of its single tokens ({measurement.unigram_entropy_nats:.3f} nats)"
        lines.append(Text(f"the held-out loss is {abs(gain):.3f} nats {side} {entropy}"))
    return lines


def _time_line(measurement: Measurement) -> str:
    """Goodput, and what the rest of the time was spent on, most first."""
    whole = sum(measurement.seconds_by_phase.values())
    others = sorted(measurement.seconds_by_phase.items(), key=lambda item: -item[1])
    shares = (f"{name} {100 * seconds / whole:.1f} %" for name, seconds in others if name != "step")
    return f"goodput {100 * measurement.goodput:.1f} % of {format_seconds(whole)}; {', '.join(shares)}"


def _comparison(reconciliation: Reconciliation) -> RenderableType:
    numbers = ("predicted", "measured", "error")
    table = plain_table("quantity", *numbers, right=numbers)
    for quantity, predicted, measured, error, _ in comparison_rows(reconciliation):
        add_row(table, quantity, predicted, measured, error)
    return table


def _how_measured(reconciliation: Reconciliation) -> RenderableType:
    """How each quantity was measured, and why others were not."""
    table = plain_table("quantity", "measured by")
    for row in reconciliation.rows:
        add_row(table, row.quantity, row.how, style="dim")
    for quantity, why in reconciliation.not_compared.items():
        add_row(table, quantity, f"not compared: {why}", style="dim")
    return table


def _printable(text: str) -> str:
    """What an untrained model writes may hold control characters, which a terminal would obey."""
    spaced = text.replace("\t", "    ")
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in spaced
    )
