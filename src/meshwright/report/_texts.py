"""Show smaller results on a terminal: accounts, calibrations, changes and finished runs.

An account is of a PyTorch module. A calibration holds the rates that a probe measured. Changes show the
savings and costs of each change to a step. A run shows its losses, a sample, and predicted next to measured
quantities.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.hardware import Calibration
from meshwright.reconciliation import Measurement, Reconciliation
from meshwright.results import Change
from meshwright.torch_account import Account, Table, flop_table, memory_table, module_table, unknown_table
from meshwright.units import format_bytes, format_count, format_rate, format_seconds

from ._terminal_parts import add_row, heading, indented, plain_table
from ._wording import comparison_rows, program_line


def account_text(account: Account) -> RenderableType:
    """Return the whole account of a PyTorch module, for rich's consoles of 80 columns or more."""
    title = Text.assemble((account.name, "bold"))
    title.append(f", {format_count(account.num_parameters)} parameters")
    parts: list[RenderableType] = [title, Text()]
    parts += _section("Memory of one training step", memory_table(account.memory))
    parts += _section("FLOPs of one training step", flop_table(account.flops))
    parts += _section("Modules that cost the most, their children included", module_table(account))
    parts += _section("Without a rule, in no sum", unknown_table(account))
    parts += [heading("Conventions"), *(indented(Text(words, style="dim")) for words in account.conventions)]
    parts += [Text(), Text(f"{account.source}; torch {account.torch_version}", style="dim")]
    return Group(*parts)


def _section(words: str, table: Table) -> list[RenderableType]:
    """Return a heading and a table; nothing if the table is empty."""
    header, rows, right = table
    if not rows:
        return []
    made = plain_table(*header, right=right)
    for row in rows:
        add_row(made, *row)
    return [heading(words), indented(made), Text()]


def calibration_text(calibration: Calibration) -> RenderableType:
    """Return the measured rates that predictions use, then the other measured rates."""
    used = plain_table("rate", "measured", right=("measured",))
    for name, rate in calibration.matmul_flops_per_second.items():
        add_row(used, f"large product in {name}", format_rate(rate, "FLOP/s"))
    add_row(used, "memory, of fused kernels", format_rate(calibration.memory_bytes_per_second, "B/s"))
    add_row(used, "launch of a kernel", format_seconds(calibration.launch_seconds))
    for count, seconds in calibration.launch_seconds_among.items():
        add_row(used, f"launch on each of {count} devices", format_seconds(seconds))
    for each in calibration.attention:
        rate = f"{format_rate(each.forward_flops_per_second, 'FLOP/s')}, "
        rate += f"{format_rate(each.backward_flops_per_second, 'FLOP/s')} backward"
        add_row(used, f"attention of {each.length}, heads of {each.head_size}", rate)
    by_host = " by the whole host" if calibration.chip == "CPU" else ""
    for each in calibration.collectives:
        rate = f"{format_rate(each.bytes_per_second, 'B/s')} after {format_seconds(each.latency_seconds)}"
        add_row(used, f"{each.kind} among {each.group_size}, sent{by_host}", rate)
    for name, share in calibration.spread.items():
        add_row(used, f"{name}: second best round from the best", f"{100 * share:.1f} %")
    if calibration.load is not None:
        add_row(used, "cores that others kept busy", f"{100 * calibration.load:.0f} %")
    parts: list[RenderableType] = [
        heading(f"{calibration.chip}: {calibration.source}, {calibration.date}"),
        Text("Predictions use"),
        indented(used),
    ]
    if calibration.details:
        shown = plain_table("also measured", "rate", right=("rate",))
        for name, rate in calibration.details.items():
            what, _, unit = name.rpartition(", ")
            add_row(shown, what, format_rate(rate, "FLOP/s" if unit == "FLOP/s" else "B/s"))
        parts += [Text("Shown, and not used"), indented(shown)]
    return Group(*parts)


def changes_text(changes: Sequence[Change]) -> RenderableType:
    """Return one row for each change with its effect on the step, then the changes that failed to compile."""
    if not changes:
        return Group(heading("What would help"), indented(Text("nothing that this config can change")))
    columns = ("reserved", "memory", "FLOPs", "step", "time")
    table = plain_table("change", "reserved", "memory", "fits", "FLOPs", "step", "time", right=columns)
    table.columns[0].no_wrap = True
    failed: list[Text] = []
    for change in changes:
        if change.reserved_bytes is None:
            failed.append(Text(f"{change.arguments}: {change.failed}"))
            continue
        assert change.saved_bytes is not None, "what is compiled has a difference"
        assert change.extra_executed_flops is not None, "what is compiled has FLOPs"
        add_row(
            table,
            change.arguments,
            format_bytes(change.reserved_bytes),
            _signed(format_bytes(abs(change.saved_bytes)), -change.saved_bytes),
            {True: "yes", False: "no", None: "?"}[change.fits],
            _signed(format_rate(abs(change.extra_executed_flops), "FLOP"), change.extra_executed_flops),
            "" if change.step_seconds is None else format_seconds(change.step_seconds),
            _seconds(change.extra_seconds),
        )
    parts: list[RenderableType] = [heading("What would help, each change compiled"), indented(table)]
    if failed:
        parts += [heading("Could not be compiled"), *(indented(line) for line in failed)]
    return Group(*parts)


def _signed(text: str, amount: float) -> str:
    return "0" if amount == 0 else f"{'+' if amount > 0 else '-'}{text}"


def _seconds(extra: float | None) -> str:
    if extra is None:
        return ""
    return _signed(format_seconds(abs(extra)), extra)


SAMPLE_LINES = 12


def run_text(measurement: Measurement, reconciliation: Reconciliation) -> RenderableType:
    """Return the account of a finished run, for rich's consoles of 80 columns or more."""
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
    """Return the first and last losses, and the held-out loss compared with the entropy of single tokens."""
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
    """Return the goodput, and the shares of all other phases, the largest first."""
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
    """Return how each quantity was measured, and why others were not."""
    table = plain_table("quantity", "measured by")
    for row in reconciliation.rows:
        add_row(table, row.quantity, row.how, style="dim")
    for quantity, why in reconciliation.not_compared.items():
        add_row(table, quantity, f"not compared: {why}", style="dim")
    return table


def _printable(text: str) -> str:
    """Replace control characters, which an untrained model may write and a terminal would obey."""
    spaced = text.replace("\t", "    ")
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in spaced
    )
