"""What a page says of a program's arithmetic and messages, from a weighing as `weigh --json` gives it."""

from __future__ import annotations

from typing import Any

from meshwright.units import format_rate

from ._html_parts import bar, colours_of, legend, paragraph, section, table
from ._rows import FLOP_CONVENTION, elementwise_words, link_words


def flops_section(weighing: dict[str, Any] | None) -> str:
    """FLOPs by phase as a picture, the counts, how they are counted, and what is in none of them."""
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
    """The executed FLOPs as one bar by phase."""
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
    """Every collective with its link."""
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
    """What the lint found, each with its line and how to mend it."""
    if weighing is None or not weighing["ledger"]["findings"]:
        return ""
    rows = [(found["what"], found["source_line"], found["mend"]) for found in weighing["ledger"]["findings"]]
    return section("What could be mended", table(("found", "line", "mend"), rows))
