"""How a run went, as parts of its page: what happened, what its time was spent on, other metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.reconcile import Measurement
from meshwright.units import format_seconds

from ._html_parts import paragraph, section, table
from ._run_files import RunFiles

MOST_NOTICES = 50
HELD_OUT = "held_out_"


def happened_section(notices: Sequence[dict[str, Any]]) -> str:
    """Resumed, bad steps, spikes, checkpoints that failed: newest last."""
    if not notices:
        return ""
    rows = [(str(each["step"]), str(each.get("kind", "")), str(each.get("message", ""))) for each in notices]
    left_out = len(rows) - MOST_NOTICES
    words = paragraph(f"The first {left_out} are left out; notices.jsonl has all.") if left_out > 0 else ""
    head = ("step", "what", "words")
    return section("What happened", words, table(head, rows[-MOST_NOTICES:], numbers=(0,)))


def seconds_section(measured: Measurement | None) -> str:
    """Seconds by phase and their shares; they add up to the time of the process."""
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
    """A curve for each metric beside the loss that the model tells of the held-out data, "accuracy"."""
    from ._plots import metric_svg

    names = {
        name.removeprefix(HELD_OUT) for line in run.metrics for name in line if name.startswith(HELD_OUT)
    }
    for name in sorted(names - {"loss"}):
        picture = metric_svg(name.replace("_", " "), run.series(name), run.series(HELD_OUT + name))
        yield f"<figure>{picture}</figure>\n"
