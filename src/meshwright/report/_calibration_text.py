"""What a probe measured, on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.predict import Calibration
from meshwright.units import format_rate, format_seconds

from ._layout import add_row, heading, indented, plain_table


def calibration_text(calibration: Calibration) -> RenderableType:
    """The rates that predictions use, then what else was measured."""
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
