"""Show the rates of a machine and the history of errors. Used by: `_results`."""

from __future__ import annotations

from typing import Any

from meshwright.hardware import Calibration
from meshwright.measure import STEP_SECONDS, History, PastRow
from meshwright.units import format_rate, format_seconds

from ._model import FAINT, Block, Document, Plot, ReportTable, Words, percent, plain_rows, section

INSIDE, OUTSIDE = "#2f6f8f", "#c8372d"


def _steps(number: int) -> str:
    return "1 measured step" if number == 1 else f"{number} measured steps"


def history_document(history: History, *, draws: bool = False) -> Document:
    """Return every run with its predicted and measured step; if it `draws`, with a picture of the errors."""
    rows = [row for row in history.rows if row.quantity == STEP_SECONDS]
    columns = ("run", "predicted", "measured", "error", "in the interval")
    cells = [_history_cells(row) for row in rows]
    table = ReportTable(columns=columns, rows=plain_rows(cells), numbers=columns[1:4])
    held = [row.inside for row in rows if row.inside is not None]
    words = f"{sum(held)} of {len(held)} measured steps lie in their intervals." if held else "No step yet."
    plot = _plot(rows) if draws else None
    return Document(
        title="History of errors",
        facts=f"of {_steps(len(rows))}",
        sections=(
            *section("", Words(text=words)),
            *(section("Error of the step's time", plot) if plot else ()),
            *section("Runs", table),
            *section("", Words(text=f"Kept in {history.file}, with every other quantity.", tone="faint")),
        ),
    )


def _history_cells(row: PastRow) -> tuple[str, ...]:
    error = "" if row.relative_error is None else f"{100 * row.relative_error:+.1f} %"
    inside = {True: "yes", False: "no", None: "none given"}[row.inside]
    name = f"{row.config} on {row.fleet}, {row.date[:10]}"
    return name, format_seconds(row.predicted), format_seconds(row.measured), error, inside


def _plot(rows: list[PastRow]) -> Plot | None:
    """Return a plot of the errors in the order of the runs, those outside their intervals in red."""
    known = [(number, row) for number, row in enumerate(rows, 1) if row.relative_error is not None]
    if not known:
        return None

    def draw(axes: Any) -> None:
        places = [number for number, _ in known]
        errors = [100 * (row.relative_error or 0.0) for _, row in known]
        colours = [OUTSIDE if row.inside is False else INSIDE for _, row in known]
        axes.axhline(0, color=FAINT, linewidth=1)
        axes.scatter(places, errors, c=colours, s=30)
        axes.set_xlabel("run")
        axes.set_ylabel("predicted / measured - 1, %")
        axes.set_xlim(0.5, len(rows) + 0.5)

    colours = ((INSIDE, "in its interval, or none given"), (OUTSIDE, "outside its interval"))
    return Plot(label="error of the predicted step by run", height=2.6, draw=draw, colours=colours)


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
