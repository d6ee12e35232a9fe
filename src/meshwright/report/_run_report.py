"""Turn runs and sweeps into documents: the short one of a terminal, and the page of a folder.

The page of a weighing is that of a run's folder that holds nothing else. Used by: `_results`, the loop that
trains, which writes pages, and `cli`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from meshwright.measure import Measurement, Reconciliation
from meshwright.measure import Row as ComparedRow
from meshwright.results import Run, Sweep, SweepRun, Weighing
from meshwright.units import format_bytes, format_count, format_seconds

from ._costs import cost_sections, fault_sections
from ._model import (
    Cards,
    Document,
    Lanes,
    ReportSection,
    ReportTable,
    Series,
    TableRow,
    Words,
    curves_plot,
    flop_words,
    percent,
    plain_rows,
    section,
    sweep_curves_plot,
    values_plot,
)
from ._render import page
from ._run_files import RunFiles, read_run
from ._schedule_lanes import schedule_lanes
from ._weighing import time_figures, time_sections, title_facts, verdict
from ._weighing_facts import facts_of

FILES_OF_THE_END = ("measurement.json", "reconciliation.json")
RELOAD_SECONDS = 15  # of a page of a run that is under way
SWEEP_FIGURES = ("held-out loss", "training loss", "step", "{}/s")  # of the unit of a batch
SAME_PROGRAM = "The program that ran is the one that was weighed: their fingerprints are equal."
OTHER_PROGRAM = (
    "NOT THE PROGRAM THAT WAS WEIGHED: the compiler made another one here, and their fingerprints differ."
)
PROGRAM_OF_A_TPU = (
    "Whether the program that ran is the one that was weighed is not known: on a TPU the compiler changes "
    "its text after a weighing has read it."
)
HELD_OUT = "held_out_"
MOST_SAMPLE_LINES = 12  # on a terminal
MOST_NOTICES = 50


def run_page(folder: Path, *, is_live: bool = False) -> str:
    """Return the folder of a run as one HTML page, which names files that are missing or truncated.

    The page of a run that `is_live` does not miss the files of its end, and loads itself again.
    """
    files = read_run(folder)
    if not is_live:
        return page(_run_page(files))
    early = tuple(note for note in files.notes if not note.startswith(FILES_OF_THE_END))
    made = _run_page(dataclasses.replace(files, notes=early))
    steps = files.series("loss")[0]
    so_far = f"under way, {steps[-1]:,} steps so far" if steps else "under way"
    facts = ", ".join(filter(None, (made.facts, so_far)))
    finish = section("", *([Words(lead="FINISH: ", text=files.finish)] if files.finish else []))
    sections = (*finish, *made.sections)
    return page(dataclasses.replace(made, facts=facts, sections=sections, reload_seconds=RELOAD_SECONDS))


def write_report(folder: Path, *, is_live: bool = False) -> Path:
    """Write report.html into a run's folder from the files it holds, and return its path.

    Args:
        is_live: whether the run is under way: its page then loads itself again.

    Raises:
        OSError: the page cannot be written; the previous page stays as it was.
    """
    from meshwright.trainer.loop import write_whole  # a run's folder knows its data

    path = folder / "report.html"
    write_whole(path, run_page(folder, is_live=is_live))
    return path


def write_sweep(sweep: Sweep) -> Path:
    """Write report.html into the sweep's folder, from its runs' folders, and return its path."""
    path = sweep.folder / "report.html"
    path.write_text(page(sweep_page(sweep)), "utf-8")
    return path


def page_of_run(run: Run) -> Document:
    """Return the page of a finished run, from the files of its folder."""
    return _run_page(read_run(run.folder))


def weighing_page(weighing: Weighing) -> Document:
    """Return the page of a weighing, with the schedule of its step."""
    return _run_page(RunFiles(name=weighing.name, weighing=facts_of(weighing)), schedule_lanes(weighing))


def sweep_document(sweep: Sweep) -> Document:
    """Return what a terminal shows of a sweep: its runs, the best first."""
    runs, failures = _sweep_sections(sweep, shortens=True)
    return Document(title=f"Sweep of {sweep.name}", sections=(*runs, *failures))


def reconciliation_document(found: Reconciliation) -> Document:
    """Return predicted beside measured quantities of a run."""
    return Document(title="", sections=_reconciliation_sections(found))


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
        title=_steps_words(measurement),
        facts=words,
        sections=(
            *section("", *_loss_lines(measurement)),
            *_sample_sections(measurement, most_lines=MOST_SAMPLE_LINES),
            *_reconciliation_sections(run.reconciliation),
            *_seconds_sections(measurement),
        ),
    )


def _steps_words(measurement: Measurement) -> str:
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


def _sample_sections(measurement: Measurement, *, most_lines: int | None = None) -> tuple[ReportSection, ...]:
    if not measurement.sample:
        return ()
    words = Words(lead=measurement.sample_prompt, text=measurement.sample, sample=True)
    if most_lines is not None:
        lines = f"{measurement.sample_prompt}{measurement.sample}".rstrip().split("\n")
        kept = [*lines[:most_lines], "..."] if len(lines) > most_lines else lines
        words = Words(text="\n".join(kept), sample=True)
    return section("What it writes after training", words)


def _reconciliation_sections(reconciliation: Reconciliation) -> tuple[ReportSection, ...]:
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


def _seconds_sections(measurement: Measurement | None) -> tuple[ReportSection, ...]:
    """Return the goodput, and the seconds of each phase, which sum to the time of the process."""
    if measurement is None:
        return ()
    whole = sum(measurement.seconds_by_phase.values())
    words = f"Goodput {percent(measurement.goodput, 1)}: the share of {format_seconds(whole)} spent in steps."
    phases = sorted(measurement.seconds_by_phase.items(), key=lambda item: -item[1])
    rows = plain_rows((name, format_seconds(part), percent(part, whole)) for name, part in phases)
    table = ReportTable(columns=("phase", "time", "share"), rows=rows, numbers=("time", "share"))
    return section("Where the time went", Words(text=words), table)


def _run_page(run: RunFiles, lanes: Lanes | None = None) -> Document:
    """Return the page of a run's folder, or of a weighing alone, as far as the files go.

    `lanes`: the schedule of the step, for which the files do not suffice.
    """
    weighing, measured = run.weighing, run.measurement
    # A run on simulated devices is there to be trained: its curve comes first, and that no verdict is last.
    has_curve = bool(run.series("loss")[1])
    is_simulated = has_curve and weighing is not None and weighing.ledger.memory.usable_bytes is None
    facts = [] if weighing is None else [title_facts(weighing)]
    if measured is not None:
        facts += [_steps_words(measured), f"{measured.date[:16].replace('T', ' ')} UTC"]
    return Document(
        title=run.name if weighing is None else weighing.config,
        facts=", ".join(facts),
        sections=(
            *section("", *(() if weighing is None or is_simulated else verdict(weighing))),
            *section("Not whole", *(Words(text=note) for note in run.notes), tone="warning"),
            *section("", _cards(run)),
            *(_loss_sections(run) if is_simulated else ()),
            *(() if weighing is None else time_sections(weighing, on_page=True, lanes=lanes)),
            *(() if is_simulated else _loss_sections(run)),
            *_notice_sections(run),
            *_seconds_sections(measured),
            *(() if run.reconciliation is None else _reconciliation_sections(run.reconciliation)),
            *section("", *(verdict(weighing) if weighing is not None and is_simulated else ())),
            *(() if weighing is None else cost_sections(weighing, on_page=True)),
            *(() if weighing is None else fault_sections(weighing)),
            *(() if measured is None else _sample_sections(measured)),
            *_environment_sections(run),
        ),
    )


def _cards(run: RunFiles) -> Cards | None:
    """Return the few most important figures, the time of a step first."""
    measured, items = run.measurement, list[tuple[str, str]]()
    if measured is not None and measured.step_seconds is not None:
        items.append((format_seconds(measured.step_seconds.median), "step, measured median"))
        rate = measured.tokens_per_second
        assert rate is not None, "a timed step has a rate"
        items.append((format_count(rate), f"{measured.batch_unit} per second"))
    elif measured is None and run.weighing is not None:
        items += time_figures(run.weighing)
    _, losses = run.series("loss")
    if losses:
        items.append((f"{losses[0]:.3f} → {losses[-1]:.3f}", "training loss, nats"))
    _, held_out = run.series("held_out_loss")
    if held_out:
        entropy = None if measured is None else measured.unigram_entropy_nats
        words = "" if entropy is None else f"; single tokens have {entropy:.3f}"
        items.append((f"{held_out[-1]:.3f}", f"held-out loss, nats{words}"))
    return Cards(items=tuple(items)) if items else None


def _loss_sections(run: RunFiles) -> tuple[ReportSection, ...]:
    """Return plots of the loss and of each held-out metric that the model reports besides, "accuracy"."""
    training = run.series("loss")
    if not training[0]:
        return ()
    entropy = None if run.measurement is None else run.measurement.unigram_entropy_nats
    level = None if entropy is None else (entropy, f"entropy of single held-out tokens, {entropy:.3f}")
    held_out = run.series("held_out_loss")
    plots = [curves_plot("loss", training, held_out, unit=", nats", height=3.2, level=level)]
    keys = {key for line in run.metrics for key in line if key.startswith(HELD_OUT)} - {"held_out_loss"}
    for key in sorted(keys):
        name = key.removeprefix(HELD_OUT)
        plots.append(curves_plot(name.replace("_", " "), run.series(name), run.series(key)))
    return section("Loss", *plots)


def _notice_sections(run: RunFiles) -> tuple[ReportSection, ...]:
    """Return a run's notices, newest last: resumptions, bad steps, spikes, failed checkpoints."""
    rows = plain_rows(
        (str(line["step"]), str(line.get("kind", "")), str(line.get("message", ""))) for line in run.notices
    )
    if not rows:
        return ()
    words = None
    if (left_out := len(rows) - MOST_NOTICES) > 0:
        words = Words(text=f"The first {left_out} are left out; notices.jsonl has all.")
    table = ReportTable(columns=("step", "what", "words"), rows=rows[-MOST_NOTICES:], numbers=("step",))
    return section("What happened", words, table)


def _environment_sections(run: RunFiles) -> tuple[ReportSection, ...]:
    rows, measured = list[tuple[str, str]](), run.measurement
    if measured is not None:
        rows += [
            ("devices", f"{measured.num_devices} x {measured.device_kind} ({measured.platform})"),
            ("host", measured.host),
            ("date", measured.date),
            ("train step compiled in", format_seconds(measured.compile_seconds)),
            ("program that ran", measured.fingerprint),
        ]
    if run.weighing is not None:
        compiled = run.weighing.compile
        rows += [("program weighed", compiled.fingerprint), ("compiler", compiled.compiler)]
    if measured is not None:
        rows += measured.versions.items()
    return section("Environment", ReportTable(columns=("", ""), rows=plain_rows(rows))) if rows else ()


def _sweep_sections(
    sweep: Sweep, *, shortens: bool
) -> tuple[tuple[ReportSection, ...], tuple[ReportSection, ...]]:
    """Return a table with a row for each run, the best first, then the reasons of the failed runs.

    `shortens`: whether keys are named without their section, where that is unique.
    """
    finished = sum(run.held_out_loss is not None for run in sweep.runs)
    failed = len(sweep.runs) - finished
    title = f"{finished} finished run{'s' if finished != 1 else ''} of {sweep.name} on {sweep.fleet}"
    title += f", {failed} not finished" if failed else ""
    title += f", {sweep.not_run} not begun" if sweep.not_run else ""
    short = tuple(key.rpartition(".")[2] for key in sweep.keys)
    names = short if shortens and len(set(short)) == len(short) else sweep.keys
    rows = tuple(
        TableRow(
            cells=(run.folder.name.partition("-")[0], *run.values.values(), *_sweep_figures(run)),
            tone="strong" if run is sweep.best else "" if run.held_out_loss is not None else "faint",
        )
        for run in sweep.ranked
    )
    numbers = (*names, *(name.format(sweep.batch_unit) for name in SWEEP_FIGURES))
    table = ReportTable(columns=("run", *numbers), rows=rows, numbers=numbers, unbroken=1 + len(names))
    reasons = (Words(text=f"{run.label}: {run.failed}") for run in sweep.ranked if run.failed)
    return section(title, table), section("Not finished", *reasons, tone="warning")


def _sweep_figures(run: SweepRun) -> tuple[str, str, str, str]:
    """Return a run's figures as text, in the order of `SWEEP_FIGURES`."""
    return (
        "-" if run.held_out_loss is None else f"{run.held_out_loss:.4f}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.step_seconds is None else format_seconds(run.step_seconds),
        "-" if run.tokens_per_second is None else format_count(run.tokens_per_second),
    )


def sweep_page(sweep: Sweep) -> Document:
    """Return the page of a sweep: its table, and plots from its runs' folders."""
    runs, failures = _sweep_sections(sweep, shortens=False)
    best, pictures = (), ()
    if sweep.best is not None:
        words = f"Best: {sweep.best.label}, held-out loss {sweep.best.held_out_loss:.4f}"
        best = section("", Words(text=words, tone="open"))
        note = Words(text="A point has the colour of its run's curve below.", tone="faint")
        series = [(run, read_run(run.folder).series("loss")) for run in sweep.ranked]
        curves: list[tuple[SweepRun, Series]] = [(run, points) for run, points in series if points[0]]
        pictures = (
            *section("Held-out loss by value", note, *(values_plot(sweep, key) for key in sweep.keys)),
            *section("Training loss by step", sweep_curves_plot(sweep, curves)),
        )
    return Document(title=f"Sweep of {sweep.name}", sections=(*best, *runs, *pictures, *failures))
