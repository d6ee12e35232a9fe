"""Set predicted beside measured for the folder of a run of ours, and read and show the history of errors.

Used by: `_reconcile_verb`, `_reconcile_command`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshwright.api import add_to_history, history_path, row_in, weigh_unkept
from meshwright.errors import InputError
from meshwright.files import MOST_RECORD_BYTES, parsed_json, read_bytes, read_text, reason
from meshwright.measure import STEP_SECONDS, Measurement, PastRow, Reconciliation
from meshwright.measure import reconcile as compared
from meshwright.report import FAINT, Document, Plot, ReportTable, Words, plain_rows, section
from meshwright.reportable import Reportable
from meshwright.results import Phase, Run, ignore
from meshwright.units import format_seconds

SCHEMA = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class History(Reportable):
    """The history of errors, oldest first. `file`: where it is kept."""

    file: str
    rows: tuple[PastRow, ...]

    def document(self) -> Document:
        """Return its report for a terminal."""
        return history_document(self)

    def page_document(self) -> Document:
        """Return its page, which has a picture of the errors too."""
        return history_document(self, draws=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `reconcile --history --json` prints (docs/how-to/calibration.md)."""
        rows = [{**dataclasses.asdict(row), "relative_error": row.relative_error} for row in self.rows]
        return {"schema": SCHEMA, "file": self.file, "rows": rows}


def reconcile_run(run: Run | str | Path, *, on_event: Callable[[Phase], None] = ignore) -> Reconciliation:
    """Return the predicted quantities of a run next to the measured ones, each with its error.

    What a folder says is added to the history of errors. Where it has a measured step and no prediction, the
    step is weighed now, so that measured steps kept by `calibrate` take part.

    Args:
        run: the result of `train`, or the folder of a run.

    Raises:
        InputError: the folder holds neither a readable reconciliation nor a readable measurement with the
            config and the fleet of its run.
    """
    if isinstance(run, Run):
        return run.reconciliation
    return reconciled(Path(run), on_event)[0]


def reconciled(
    folder: Path, on_event: Callable[[Phase], None] = ignore
) -> tuple[Reconciliation, tuple[PastRow, ...]]:
    """Return the reconciliation of a folder, and the lines that it adds to the history of errors.

    Raises:
        InputError: as `reconcile_run`.
    """
    hint = "name the folder of a run that has finished or was stopped by a signal"
    path = folder / "reconciliation.json"
    measurement = _read(folder / "measurement.json", Measurement.from_json)
    found = _read(path, Reconciliation.from_json)
    if measurement is None:
        if found is None:
            raise InputError(f"{path} cannot be read: No such file or directory", hint=hint)
        return found, ()
    about = _read(folder / "weighing.json", parsed_json) or {}
    try:
        config, fleet = str(about["config"]), str(about["fleet"]["name"])
    except (KeyError, TypeError) as missing:
        raise InputError(
            f"{folder / 'weighing.json'} does not say what was run and where", hint=hint
        ) from missing
    is_timed = measurement.step_seconds is not None
    if found is None or (is_timed and all(row.quantity != STEP_SECONDS for row in found.rows)):
        weighing = weigh_unkept(str(folder), on=fleet, layout=about.get("layout"), on_event=on_event)
        found = compared(weighing.compiled.fingerprint, weighing.ledger, weighing.prediction, measurement)
    return found, add_to_history(folder, found, measurement, config, fleet)


def _read(path: Path, parse: Callable[[str], T]) -> T | None:
    """Return what a file holds; None if there is none."""
    try:
        return parse(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as refused:
        hint = "name the folder that `meshwright train` wrote"
        raise InputError(f"{path} cannot be read: {reason(refused)}", hint=hint) from refused


def history() -> History:
    """Return the history of errors, oldest first; a line that a crash cut off is left out.

    Raises:
        InputError: the file cannot be read.
    """
    path = history_path()
    try:
        lines = read_bytes(path, MOST_RECORD_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        lines = []
    except OSError as refused:
        hint = "give yourself permission to read it, or remove it"
        raise InputError(f"{path} cannot be read: {reason(refused)}", hint=hint) from refused
    rows = [row for line in lines if (row := row_in(line)) is not None]
    return History(file=str(path), rows=tuple({row.key: row for row in rows}.values()))


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
