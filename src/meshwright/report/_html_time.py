"""The predicted time of a step on a page: the interval, where it goes, what would make it faster."""

from __future__ import annotations

from typing import Any

from meshwright.units import format_seconds

from ._html_parts import paragraph, section, table
from ._rows import HELP_NOTE, help_rows, kind_words

NUM_SLICES = 8
TITLE = "Predicted time of one step"


def time_section(weighing: dict[str, Any] | None) -> str:
    """The section, "" where nothing was weighed; `weighing` as `weigh --json` gives it."""
    if weighing is None:
        return ""
    prediction = weighing["prediction"]
    if prediction is None:
        return section(TITLE, paragraph(f"None: {weighing['no_prediction']}"))
    seconds = prediction["step_seconds"]
    line = (
        f"{format_seconds(seconds['expected'])}, between {format_seconds(seconds['low'])} and "
        f"{format_seconds(seconds['high'])}; MFU {100 * prediction['mfu']:.1f} %, "
        f"HFU {100 * prediction['hfu']:.1f} %"
    )
    rows = [
        (
            part["name"],
            format_seconds(part["seconds"]),
            format_seconds(part["exposed_seconds"]),
            f"{100 * part['exposed_seconds'] / seconds['expected']:.1f} %",
        )
        for part in prediction["slices"][:NUM_SLICES]
    ]
    slices = table(("where it goes", "busy", "waited for", "of the step"), rows, numbers=(1, 2, 3))
    basis = paragraph(prediction["basis"], "facts")
    return section(TITLE, paragraph(line), _kinds(prediction), slices, basis, _helps(prediction))


def _kinds(prediction: dict[str, Any]) -> str:
    """Compute, exposed communication and idle; a run weighed by an earlier version does not say."""
    found: dict[str, float] = {}
    for part in prediction["slices"]:
        if "kind" not in part:
            return ""
        found[part["kind"]] = found.get(part["kind"], 0.0) + part["exposed_seconds"]
    return paragraph(f"{kind_words(found)}.") if found else ""


def _helps(prediction: dict[str, Any]) -> str:
    """The largest first; a run weighed by an earlier version has none."""
    helps = prediction.get("what_helps")
    if not helps:
        return ""
    rows = help_rows(
        ((each["what"], each["saving_seconds"], each["how"]) for each in helps),
        prediction["step_seconds"]["expected"],
    )
    shown = table(("what", "saves at most", "of the step", "how"), rows, numbers=(1, 2))
    return f"<h3>What would make it faster</h3>\n{shown}{paragraph(HELP_NOTE, 'facts')}"
