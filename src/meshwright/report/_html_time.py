"""The predicted time of a step on a page: the interval, where it goes, what would make it faster."""

from __future__ import annotations

from typing import Any

from meshwright.predict import Interval, RunTotal
from meshwright.units import format_count, format_seconds

from ._html_parts import INK, SMALLER, bar, colours_of, legend, paragraph, section, table
from ._rows import (
    HELP_COLUMNS,
    HELP_NOTE,
    cost_words,
    ends_words,
    help_rows,
    interval_words,
    kind_words,
    run_words,
)

NUM_SLICES = 8
TITLE = "Predicted time of one step"
LEAST_SHARE = 0.002  # of the bar: what is thinner cannot be seen, and is summed


def time_section(weighing: dict[str, Any] | None, timeline: str = "") -> str:
    """Return the section, "" where nothing was weighed; `weighing` as `weigh --json` gives it.

    `timeline`: of the step's memory, which stands below the picture of its time.
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
    """Return the numbers that are looked for first, each with its words: step, rate, whole run, cost."""
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
    """The whole run; None where it is not known, or an earlier version weighed it."""
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
    """The step as one bar by class of work, and below it the interval, on the same scale."""
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
    if seconds.low is None or seconds.high is None:  # half a range drawn would look like a whole one
        return f"<figure>{drawn}{legend(items)}</figure>\n"
    low, width = 100 * seconds.low / whole, 100 * (seconds.high - seconds.low) / whole
    interval = f'<div class=range><i style="left:{low:.3f}%;width:{width:.3f}%"></i></div>\n'
    return f"<figure>{drawn}{interval}{legend(items, [(INK, ends_words(seconds))])}</figure>\n"


def _kinds(prediction: dict[str, Any]) -> str:
    """Compute, exposed communication and idle; a run weighed by an earlier version does not say."""
    found: dict[str, float] = {}
    for part in prediction["slices"]:
        if "kind" not in part:
            return ""
        found[part["kind"]] = found.get(part["kind"], 0.0) + part["exposed_seconds"]
    return paragraph(f"{kind_words(found)}.") if found else ""


def _helps(prediction: dict[str, Any]) -> str:
    """Changes, then bounds. Those of an earlier version are left out: they were not walked whole."""
    helps = [each for each in prediction.get("what_helps", ()) if "change" in each]
    if not helps:
        return ""
    rows = help_rows(
        ((h["what"], h["saving_seconds"], h["change"], h["certainty"]) for h in helps),
        prediction["step_seconds"]["expected"],
    )
    shown = table(HELP_COLUMNS, rows, numbers=(1, 2))
    return f"<h3>What would make it faster</h3>\n{shown}{paragraph(HELP_NOTE, 'facts')}"
