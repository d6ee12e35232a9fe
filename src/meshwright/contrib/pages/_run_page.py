"""Turn the folder of a run, or a weighing alone, into a page.

The page of a weighing is that of a run's folder that holds nothing else. Used by: `_results_pages`, and the
loop that trains, which writes pages.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from meshwright.report import (
    Cards,
    Document,
    Lanes,
    ReportSection,
    ReportTable,
    Words,
    cost_sections,
    curves_plot,
    facts_of,
    fault_sections,
    plain_rows,
    reconciliation_sections,
    sample_sections,
    seconds_sections,
    section,
    steps_words,
    time_figures,
    time_sections,
    title_facts,
    verdict,
)
from meshwright.results import Run, Weighing
from meshwright.units import format_count, format_seconds

from ._page import page
from ._run_files import RunFiles, read_run
from ._schedule_lanes import schedule_lanes

FILES_OF_THE_END = ("measurement.json", "reconciliation.json")
RELOAD_SECONDS = 15  # of a page of a run that is under way
HELD_OUT = "held_out_"
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


def page_of_run(run: Run) -> Document:
    """Return the page of a finished run, from the files of its folder."""
    return _run_page(read_run(run.folder))


def weighing_page(weighing: Weighing) -> Document:
    """Return the page of a weighing, with the schedule of its step."""
    return _run_page(RunFiles(name=weighing.name, weighing=facts_of(weighing)), schedule_lanes(weighing))


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
        facts += [steps_words(measured), f"{measured.date[:16].replace('T', ' ')} UTC"]
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
            *seconds_sections(measured),
            *(() if run.reconciliation is None else reconciliation_sections(run.reconciliation)),
            *section("", *(verdict(weighing) if weighing is not None and is_simulated else ())),
            *(() if weighing is None else cost_sections(weighing, on_page=True)),
            *(() if weighing is None else fault_sections(weighing)),
            *(() if measured is None else sample_sections(measured)),
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
