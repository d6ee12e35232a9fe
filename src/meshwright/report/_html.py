"""Write a run's folder as one self-contained HTML file.

The page shows the verdict, the predicted time, loss, notices, measurements, reconciliation, memory, FLOPs,
traffic, lint findings and the environment. All text from files is escaped. The page has no script, no link
and no external font.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from meshwright.reconciliation import Reconciliation
from meshwright.training import write_whole
from meshwright.units import format_bytes, format_count, format_seconds

from ._html_parts import BESIDE, INK, SMALLER, bar, colours_of, legend, page, paragraph, section, table, text
from ._html_sections import (
    findings_section,
    flops_section,
    happened_section,
    metrics_figures,
    seconds_section,
    time_figures,
    time_section,
    traffic_section,
)
from ._run_files import RunFiles, read_run
from ._wording import comparison_rows, program_line

NUM_BUFFERS = 12
LEAST_SHARE = 0.002  # share of the memory bar: thinner segments are invisible, so they are summed
LEAST_FILLED = 0.1  # share of usable memory: below it, the bar shows the program alone


def write_report(folder: Path) -> Path:
    """Write report.html into a run's folder from the files it holds, and return its path.

    The page names files that are missing or truncated.

    Raises:
        OSError: the page cannot be written; the previous page stays as it was.
    """
    path = folder / "report.html"
    write_whole(path, run_page(folder))
    return path


def run_page(folder: Path) -> str:
    """Return a run's folder as one HTML page."""
    return _page(read_run(folder))


def weighing_page(weighing: Mapping[str, Any]) -> str:
    """Return one weighing, in the form of `weigh --json`, as an HTML page."""
    return _page(
        RunFiles(
            name=weighing["config"],
            config=weighing["run_config"],
            weighing=dict(weighing),
            metrics=(),
            notices=(),
            measurement=None,
            reconciliation=None,
            notes=(),
        )
    )


def _page(run: RunFiles) -> str:
    return page(
        run.weighing["config"] if run.weighing else run.name,
        _head(run),
        _notes(run),
        _figures(run),
        time_section(run.weighing, _timeline(run)),
        _loss(run),
        happened_section(run.notices),
        seconds_section(run.measurement),
        _reconciliation(run),
        _memory(run),
        _hand_sum(run),
        flops_section(run.weighing),
        traffic_section(run.weighing),
        findings_section(run.weighing),
        _sample(run),
        _environment(run),
    )


def _head(run: RunFiles) -> str:
    weighing, measured = run.weighing, run.measurement
    if weighing is None:
        return f"<header>\n<h1>{escape(run.name)}</h1>\n</header>\n"
    facts = [f"on {weighing['fleet']['name']}", f"layout {weighing['layout']}"]
    if weighing["num_parameters"] is not None:
        facts.append(f"{format_count(weighing['num_parameters'])} parameters")
    if weighing["tokens_per_step"] is not None:
        facts.append(f"{weighing['tokens_per_step']:,} tokens per step")
    if measured is not None:
        facts.append(f"{measured.steps} steps{', interrupted' if measured.interrupted else ''}")
        facts.append(f"{measured.date[:16].replace('T', ' ')} UTC")
    return (
        f"<header>\n<h1>{escape(weighing['config'])}</h1>\n{paragraph(', '.join(facts), 'facts')}"
        f"{_verdict(weighing)}</header>\n"
    )


def _verdict(weighing: dict[str, Any]) -> str:
    memory = weighing["ledger"]["memory"]
    if weighing["fits"] is None:
        words, kind = f"{format_bytes(memory['reserved_bytes'])} reserved per device", "open"
        words += "; no verdict: " + (
            "a simulated CPU device has no memory of its own"
            if weighing["fleet"]["chip"] == "CPU"
            else "the catalog does not know how much the device has"
        )
    else:
        spare = memory["usable_bytes"] - memory["reserved_bytes"] - memory["allowance_bytes"]
        share = f"{100 * abs(spare) / memory['usable_bytes']:.1f} %"
        kind = "fits" if spare >= 0 else "lacks"
        words = f"Fits, {format_bytes(spare)} ({share}) to spare" if spare >= 0 else ""
        words = words or f"Does not fit, {format_bytes(-spare)} ({share}) too much"
    marked = "" if weighing["source"] == "target compiler" else paragraph(weighing["source"], "verdict open")
    return paragraph(words, f"verdict {kind}") + marked


def _notes(run: RunFiles) -> str:
    if not run.notes:
        return ""
    items = "".join(f"<li>{text(note)}</li>\n" for note in run.notes)
    return f'<section class="notes">\n<h2>Not whole</h2>\n<ul>\n{items}</ul>\n</section>\n'


def _figures(run: RunFiles) -> str:
    """Return cards with the few most important numbers, the time of a step first."""
    found: list[tuple[str, str]] = []
    measured = run.measurement
    if measured is not None and measured.step_seconds is not None:
        found.append((format_seconds(measured.step_seconds.median), "step, measured median"))
        rate = measured.tokens_per_second
        assert rate is not None, "a timed step has a rate"
        found.append((format_count(rate), "tokens per second"))
    elif measured is None:
        found += time_figures(run.weighing)
    _, losses = run.series("loss")
    if losses:
        found.append((f"{losses[0]:.3f} → {losses[-1]:.3f}", "training loss, nats"))
    _, held_out = run.series("held_out_loss")
    if held_out:
        beside = ""
        if measured is not None and measured.unigram_entropy_nats is not None:
            beside = f"; single tokens have {measured.unigram_entropy_nats:.3f}"
        found.append((f"{held_out[-1]:.3f}", f"held-out loss, nats{beside}"))
    if not found:
        return ""
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>\n" for value, what in found
    )
    return f'<section class="cards">\n{cards}</section>\n'


def _loss(run: RunFiles) -> str:
    from ._html_parts import loss_svg

    training, held_out = run.series("loss"), run.series("held_out_loss")
    if not training[0]:
        return ""
    entropy = run.measurement.unigram_entropy_nats if run.measurement else None
    figure = f"<figure>{loss_svg(training, held_out, entropy)}</figure>\n"
    return section("Loss", figure, *metrics_figures(run))


def _reconciliation(run: RunFiles) -> str:
    if run.reconciliation is None:
        return ""
    return section("Predicted beside measured", _compared(run.reconciliation))


def _compared(reconciliation: Reconciliation) -> str:
    rows = comparison_rows(reconciliation)
    head = ("quantity", "predicted", "measured", "error", "how it was measured")
    parts = [table(head, rows, numbers=(1, 2, 3))] if rows else []
    if reconciliation.not_compared:
        parts.append(table(("not compared", "why"), list(reconciliation.not_compared.items())))
    return "".join([paragraph(program_line(reconciliation)), *parts])


def _memory(run: RunFiles) -> str:
    """Return the memory section: a bar, then every category and allowance with its bytes."""
    if run.weighing is None:
        return ""
    memory = run.weighing["ledger"]["memory"]
    parts = {_words(name): size for name, size in memory["by_category"].items()}
    parts |= {f"allowance: {name}": size for name, size in memory["allowance"].items()}
    rows = [(name, format_bytes(size), f"{size:,}") for name, size in parts.items()]
    rows.append(("reserved", format_bytes(memory["reserved_bytes"]), f"{memory['reserved_bytes']:,}"))
    if memory["usable_bytes"] is not None:
        rows.append(("usable", format_bytes(memory["usable_bytes"]), f"{memory['usable_bytes']:,}"))
    return section(
        "Memory of one device, predicted",
        _memory_bar(memory),
        table(("category", "size", "bytes"), rows, numbers=(1, 2)),
        _formats(memory),
        _buffers(memory["buffers"]),
    )


def _memory_bar(memory: dict[str, Any]) -> str:
    """Return a bar of the memory categories, scaled to usable memory.

    The bar of a small program is scaled to the program alone.
    """
    colours = _memory_colours(memory)
    total = memory["reserved_bytes"] + memory["allowance_bytes"]
    usable = memory["usable_bytes"]
    near = usable is not None and total >= LEAST_FILLED * usable
    whole = max(total, usable if near else 0, 1)
    parts = {name: size for name, size in memory["by_category"].items() if name in colours}
    parts = {name: size for name, size in parts.items() if size >= LEAST_SHARE * whole}
    if rest := memory["reserved_bytes"] - sum(parts.values()):
        parts[SMALLER] = rest
    if memory["allowance_bytes"]:
        parts[BESIDE] = memory["allowance_bytes"]
    items = [(colours[name], f"{_words(name)}, {format_bytes(size)}") for name, size in parts.items()]
    lines: list[tuple[str, str]] = []
    if usable is not None:
        beyond = "" if near else ": far to the right"
        lines.append((INK, f"usable, {format_bytes(usable)}{beyond}"))
    drawn = bar(parts, whole, colours, "memory of one device by category", usable if near else None)
    return f"<figure>{drawn}{legend(items, lines)}</figure>\n"


def _memory_colours(memory: dict[str, Any]) -> dict[str, str]:
    """Return the colours that the bar and the timeline share."""
    return colours_of([*memory["by_category"], *memory["timeline"]["by_category"]])


def _hand_sum(run: RunFiles) -> str:
    """Return the hand-computed sum next to the compiled sizes; "" for weighings by an earlier version."""
    found = (run.weighing or {}).get("hand_sum")
    if not found:
        return ""
    rows = [
        (
            row["quantity"],
            format_bytes(row["whole_bytes"]),
            format_bytes(row["device_bytes"]),
            format_bytes(row["compiled_bytes"]),
            row["why"],
        )
        for row in found["rows"]
    ]
    rule = f"4 x (parameters + activations + gradients + optimizer state); activations: {found['rule']}"
    head = ("quantity", "by hand", "/ devices", "compiled", "why")
    return section("The sum by hand", paragraph(rule), table(head, rows, numbers=(1, 2, 3)))


def _formats(memory: dict[str, Any]) -> str:
    """Return bytes by category and number format; "" for weighings by an earlier version."""
    columns = list(memory.get("by_format", ()))
    if not columns:
        return ""
    rows = [
        (_words(category), *(format_bytes(found[name]) if name in found else "" for name in columns))
        for category, found in memory["by_category_and_format"].items()
    ]
    rows.append(("reserved", *(format_bytes(size) for size in memory["by_format"].values())))
    numbers = tuple(range(1, len(columns) + 1))
    return f"<h3>Number formats at the peak</h3>\n{table(('category', *columns), rows, numbers=numbers)}"


def _timeline(run: RunFiles) -> str:
    """Return the plot of memory through the step, which the page shows with the step's time."""
    from ._html_parts import timeline_svg

    if run.weighing is None:
        return ""
    memory = run.weighing["ledger"]["memory"]
    line = memory["timeline"]
    if not line["instants"]:
        return ""
    colours = _memory_colours(memory)
    picture = timeline_svg(line["instants"], line["by_category"], line["peak_instant"], colours)
    return f"<h3>Memory through the step</h3>\n<figure>{picture}</figure>\n"


def _buffers(buffers: list[dict[str, Any]]) -> str:
    """Return the largest buffers, each with the module that makes it and the rule that classifies it."""
    if not buffers:
        return ""
    rows = [
        (
            format_bytes(buffer["num_bytes"]),
            buffer["shape"],
            _words(buffer["category"]),
            buffer["module"] or buffer["operation"],
            buffer["source_line"],
            f"{buffer['rule']} ({buffer['certainty']})",
        )
        for buffer in buffers[:NUM_BUFFERS]
    ]
    head = ("size", "shape", "what", "of", "line", "filed by")
    return f"<h3>Largest at the peak</h3>\n{table(head, rows, numbers=(0,))}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _sample(run: RunFiles) -> str:
    measured = run.measurement
    if measured is None or not measured.sample:
        return ""
    text = f"<pre><b>{escape(measured.sample_prompt)}</b>{escape(measured.sample)}</pre>\n"
    return section("What it writes after training", text)


def _environment(run: RunFiles) -> str:
    rows: list[tuple[str, str]] = []
    if (measured := run.measurement) is not None:
        rows += [
            ("devices", f"{measured.num_devices} x {measured.device_kind} ({measured.platform})"),
            ("host", measured.host),
            ("date", measured.date),
            ("train step compiled in", format_seconds(measured.compile_seconds)),
            ("program that ran", measured.fingerprint),
        ]
    if run.weighing is not None:
        compiled = run.weighing["compile"]
        rows += [("program weighed", compiled["fingerprint"]), ("compiler", compiled["compiler"])]
    if measured is not None:
        rows += list(measured.versions.items())
    return section("Environment", table(("", ""), rows)) if rows else ""
