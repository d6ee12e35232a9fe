"""Show the rates of a machine. Used by: `report`, by the entry point."""

from __future__ import annotations

from meshwright.hardware import Calibration
from meshwright.report import Block, Document, ReportTable, Words, percent, plain_rows, section
from meshwright.units import format_rate, format_seconds


def calibration_document(calibration: Calibration) -> Document:
    """Return the measured rates that predictions use, then the other measured rates."""
    rows: list[tuple[str, str]] = [
        *(
            (f"large product in {name}", format_rate(rate, "FLOP/s"))
            for name, rate in calibration.matmul_flops_per_second.items()
        ),
        ("memory, of fused kernels", format_rate(calibration.memory_bytes_per_second, "B/s")),
        ("launch of a kernel", format_seconds(calibration.launch_seconds)),
        *(
            (f"launch on each of {count} devices", format_seconds(seconds))
            for count, seconds in calibration.launch_seconds_among.items()
        ),
    ]
    for item in calibration.attention:
        rate = f"{format_rate(item.forward_flops_per_second, 'FLOP/s')}, "
        rate += f"{format_rate(item.backward_flops_per_second, 'FLOP/s')} backward"
        rows.append((f"attention of {item.length}, heads of {item.head_size}", rate))
    by_host = " by the whole host" if calibration.chip == "CPU" else ""
    for item in calibration.collectives:
        rate = f"{format_rate(item.bytes_per_second, 'B/s')} after {format_seconds(item.latency_seconds)}"
        rows.append((f"{item.kind} among {item.group_size}, sent{by_host}", rate))
    for name, share in calibration.spread.items():
        rows.append((f"{name}: second best round from the best", percent(share, 1)))
    if calibration.load is not None:
        rows.append(("cores that others kept busy", f"{100 * calibration.load:.0f} %"))
    details: list[tuple[str, str]] = []
    for name, rate in calibration.details.items():
        what, _, unit = name.rpartition(", ")
        details.append((what, format_rate(rate, "FLOP/s" if unit == "FLOP/s" else "B/s")))
    blocks: list[Block] = [Words(text="Predictions use"), _rates(("rate", "measured"), rows)]
    if details:
        blocks += [Words(text="Shown, and not used"), _rates(("also measured", "rate"), details)]
    title = f"{calibration.chip}: {calibration.source}, {calibration.date}"
    return Document(title=calibration.chip, sections=section(title, *blocks))


def _rates(columns: tuple[str, str], rows: list[tuple[str, str]]) -> ReportTable:
    return ReportTable(columns=columns, rows=plain_rows(rows), numbers=columns[1:])
