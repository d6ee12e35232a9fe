"""Build the sections of a page: predicted time, FLOPs, traffic, lint findings, and a run's history.

A weighing has the form of `weigh --json`. Weighings by earlier versions lack some entries, and the page
leaves those out. A run's history is its notices, its seconds by phase, and its metrics. Used by: `_html`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.predict import Interval, RunTotal
from meshwright.reconciliation import Measurement
from meshwright.units import format_count, format_rate, format_seconds

from ._html_parts import INK, SMALLER, bar, colours_of, legend, paragraph, section, table
from ._run_files import RunFiles
from ._wording import (
    FLOP_CONVENTION,
    HELP_COLUMNS,
    HELP_NOTE,
    cost_words,
    elementwise_words,
    ends_words,
    help_rows,
    interval_words,
    kind_words,
    link_words,
    run_words,
)

NUM_SLICES = 8
TITLE = "Predicted time of one step"
LEAST_SHARE = 0.002  # share of the bar: thinner segments are invisible, so they are summed


def time_section(weighing: dict[str, Any] | None, timeline: str = "") -> str:
    """Return the section of the predicted time; "" if nothing was weighed.

    Args:
        weighing: in the form of `weigh --json`.
        timeline: HTML of the memory timeline, placed below the bar of the step's time.
    """
    if weighing is None:
        return ""
    prediction = weighing["prediction"]
    if prediction is None:
        return section(TITLE, paragraph(f"None: {weighing['no_prediction']}"), timeline)
    seconds = Interval(**prediction["step_seconds"])
    line = (
        f"{interval_words(seconds, prediction.get('interval_reasons', ()))}; "
        f"MFU {100 * prediction['mfu']:.1f} %, HFU {100 * prediction['hfu']:.1f} %"
    )
    rows = [
        (
            part["name"],
            format_seconds(part["seconds"]),
            format_seconds(part["exposed_seconds"]),
            f"{100 * part['exposed_seconds'] / seconds.expected:.1f} %",
        )
        for part in prediction["slices"][:NUM_SLICES]
    ]
    slices = table(("where it goes", "busy", "waited for", "of the step"), rows, numbers=(1, 2, 3))
    basis = paragraph(prediction["basis"], "facts")
    return section(
        TITLE,
        paragraph(line),
        _kinds(prediction),
        _time_bar(prediction, seconds),
        *_run_paragraphs(weighing),
        timeline,
        slices,
        basis,
        _helps(prediction),
    )


def time_figures(weighing: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the key numbers with their labels: step time, rate, MFU, whole run, cost."""
    if weighing is None or weighing["prediction"] is None:
        return []
    prediction = weighing["prediction"]
    seconds = Interval(**prediction["step_seconds"])
    found = [(format_seconds(seconds.expected), f"predicted step, {ends_words(seconds)}")]
    if (rate := prediction["tokens_per_second_per_device"]) is not None:
        found.append((format_count(rate), "tokens/s per device"))
    found.append((f"{100 * prediction['mfu']:.1f} %", "MFU"))
    if (total := _run_total(weighing)) is not None:
        words = f"{format_count(total.tokens)} tokens in {total.steps:,} steps, {ends_words(total.seconds)}"
        found.append((format_seconds(total.seconds.expected), words))
        if total.cost is not None:
            amount, _, beside = cost_words(total).partition(" ")
            found.append((amount, f"cost {beside}"))
    return found


def _run_total(weighing: dict[str, Any]) -> RunTotal | None:
    """Return the totals of the whole run; None if unknown, or if an earlier version weighed it."""
    found = weighing.get("run_total")
    if found is None:
        return None
    intervals = {
        name: None if found[name] is None else Interval(**found[name])
        for name in ("seconds", "device_hours", "cost")
    }
    return RunTotal(**{**found, **intervals})


def _run_paragraphs(weighing: dict[str, Any]) -> list[str]:
    total = _run_total(weighing)
    if total is None:
        return []
    lines = [f"The whole run: {run_words(total)}."]
    if words := cost_words(total):
        lines.append(f"Cost: {words}.")
    return [paragraph(line) for line in lines]


def _time_bar(prediction: dict[str, Any], seconds: Interval) -> str:
    """Return the step's time as one bar by class of work, with the interval below on the same scale."""
    found: dict[str, float] = {}
    for part in prediction["slices"]:
        name = part["name"].partition("[")[0]
        found[name] = found.get(name, 0.0) + part["exposed_seconds"]
    colours = colours_of(found)
    high = seconds.expected if seconds.high is None else seconds.high
    shown = {name: s for name, s in found.items() if name in colours and s >= LEAST_SHARE * high}
    if rest := sum(found.values()) - sum(shown.values()):
        shown[SMALLER] = rest
    whole = max(high, sum(shown.values()))
    items = [
        (
            colours[name],
            f"{'gaps between kernels' if name == 'launch' else name}, {format_seconds(s)}, "
            f"{100 * s / seconds.expected:.1f} %",
        )
        for name, s in shown.items()
    ]
    drawn = bar(shown, whole, colours, "time of one step by class of work")
    if seconds.low is None or seconds.high is None:  # an interval without one end would look complete
        return f"<figure>{drawn}{legend(items)}</figure>\n"
    low, width = 100 * seconds.low / whole, 100 * (seconds.high - seconds.low) / whole
    interval = f'<div class=range><i style="left:{low:.3f}%;width:{width:.3f}%"></i></div>\n'
    return f"<figure>{drawn}{interval}{legend(items, [(INK, ends_words(seconds))])}</figure>\n"


def _kinds(prediction: dict[str, Any]) -> str:
    """Return shares of compute, exposed communication and idle; "" for weighings by an earlier version."""
    found: dict[str, float] = {}
    for part in prediction["slices"]:
        if "kind" not in part:
            return ""
        found[part["kind"]] = found.get(part["kind"], 0.0) + part["exposed_seconds"]
    return paragraph(f"{kind_words(found)}.") if found else ""


def _helps(prediction: dict[str, Any]) -> str:
    """Return the table of changes, then bounds, that would make the step faster.

    Entries by an earlier version are left out: they did not come from a walk over the whole schedule.
    """
    helps = [each for each in prediction.get("what_helps", ()) if "change" in each]
    if not helps:
        return ""
    rows = help_rows(
        ((h["what"], h["saving_seconds"], h["change"], h["certainty"]) for h in helps),
        prediction["step_seconds"]["expected"],
    )
    shown = table(HELP_COLUMNS, rows, numbers=(1, 2))
    return f"<h3>What would make it faster</h3>\n{shown}{paragraph(HELP_NOTE, 'facts')}"


def flops_section(weighing: dict[str, Any] | None) -> str:
    """Return the section of FLOPs: a bar by phase, the counts, their convention, and work they leave out."""
    if weighing is None:
        return ""
    ledger = weighing["ledger"]
    flops = ledger["flops"]
    rows = [(name, format_rate(flops[name], "FLOP")) for name in ("model", "executed", "recomputed")]
    if bubble := flops.get("bubble"):  # runs of an earlier version have none
        rows.append(("in the bubble of the pipeline", format_rate(bubble, "FLOP")))
    if flops["rule_6nd"] is not None:
        rows.append(("6 x parameters x tokens", format_rate(flops["rule_6nd"], "FLOP")))
    return section(
        "FLOPs of one step, all devices",
        _phase_bar(flops["by_phase"]),
        table(("count", "FLOPs"), rows, numbers=(1,)),
        paragraph(FLOP_CONVENTION, "facts"),
        _elementwise(flops.get("elementwise_by_class", {})),  # runs of an earlier version have none
        _by_module(flops),
        *_notes("Unpriced: no rule counts these", ledger["unpriced"]),
        *_notes("Taken for granted in the counts", ledger.get("assumptions", [])),
    )


def _phase_bar(by_phase: dict[str, int]) -> str:
    """Return the executed FLOPs as one bar by phase."""
    whole = sum(by_phase.values())
    if not whole:
        return ""
    colours = colours_of(by_phase)
    items = [
        (colours[name], f"{name}, {format_rate(count, 'FLOP')}, {100 * count / whole:.1f} %")
        for name, count in by_phase.items()
    ]
    return f"<figure>{bar(by_phase, whole, colours, 'executed FLOPs by phase')}{legend(items)}</figure>\n"


def _elementwise(by_class: dict[str, int]) -> str:
    words = elementwise_words(by_class)
    return paragraph(f"Elementwise operations, in none of these counts: {words}.", "facts") if words else ""


def _by_module(flops: dict[str, Any]) -> str:
    names = sorted(
        {*flops["by_module"], *flops["model_by_module"]}, key=lambda n: -flops["by_module"].get(n, 0)
    )
    rows = [
        (
            name or "outside any scope",
            format_rate(flops["by_module"].get(name, 0), "FLOP"),
            format_rate(flops["model_by_module"].get(name, 0), "FLOP"),
        )
        for name in names
    ]
    return table(("module", "executed", "model"), rows, numbers=(1, 2)) if rows else ""


def _notes(title: str, lines: list[str]) -> list[str]:
    return [table((title,), [(line,) for line in lines])] if lines else []


def traffic_section(weighing: dict[str, Any] | None) -> str:
    """Return the section of traffic: every collective with its link."""
    if weighing is None or not weighing["ledger"]["traffic"]:
        return ""
    rows = [
        (
            item["kind"],
            f"{'+'.join(item['axes'])} ({item['group_size']})",
            str(item["count"]),
            format_rate(item["payload_bytes"], "B"),
            format_rate(item["wire_bytes"], "B"),
            link_words(item["link_name"] or item["link"], item.get("dimensions", ())),
            f"{item['overlapped_count']} of {item['count']}",
        )
        for item in weighing["ledger"]["traffic"]
    ]
    head = ("collective", "axes", "count", "payload", "wire", "link", "may overlap")
    return section("Traffic of one device and step", table(head, rows, numbers=(2, 3, 4)))


def findings_section(weighing: dict[str, Any] | None) -> str:
    """Return the lint findings, each with its source line and its fix."""
    if weighing is None or not weighing["ledger"]["findings"]:
        return ""
    rows = [(found["what"], found["source_line"], found["mend"]) for found in weighing["ledger"]["findings"]]
    return section("What could be mended", table(("found", "line", "mend"), rows))


MOST_NOTICES = 50
HELD_OUT = "held_out_"


def happened_section(notices: Sequence[dict[str, Any]]) -> str:
    """Return a run's notices, newest last: resumptions, bad steps, spikes, failed checkpoints."""
    if not notices:
        return ""
    rows = [(str(each["step"]), str(each.get("kind", "")), str(each.get("message", ""))) for each in notices]
    left_out = len(rows) - MOST_NOTICES
    words = paragraph(f"The first {left_out} are left out; notices.jsonl has all.") if left_out > 0 else ""
    head = ("step", "what", "words")
    return section("What happened", words, table(head, rows[-MOST_NOTICES:], numbers=(0,)))


def seconds_section(measured: Measurement | None) -> str:
    """Return the seconds and shares by phase, which sum to the time of the process."""
    if measured is None:
        return ""
    whole = sum(measured.seconds_by_phase.values())
    rows = [
        (name, format_seconds(seconds), f"{100 * seconds / whole:.1f} %")
        for name, seconds in measured.seconds_by_phase.items()
    ]
    words = f"Goodput {100 * measured.goodput:.1f} %: the share of {format_seconds(whole)} spent in steps."
    return section(
        "Where the time went", paragraph(words), table(("phase", "time", "share"), rows, numbers=(1, 2))
    )


def metrics_figures(run: RunFiles) -> Iterator[str]:
    """Yield a plot for each held-out metric that the model reports besides the loss, such as "accuracy"."""
    from ._html_parts import metric_svg

    names = {
        name.removeprefix(HELD_OUT) for line in run.metrics for name in line if name.startswith(HELD_OUT)
    }
    for name in sorted(names - {"loss"}):
        picture = metric_svg(name.replace("_", " "), run.series(name), run.series(HELD_OUT + name))
        yield f"<figure>{picture}</figure>\n"
