"""What each change to a step would save and cost, as a person reads it on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.units import format_bytes, format_rate, format_seconds

from ._layout import add_row, heading, indented, plain_table


class Changed(Protocol):
    """What is read of a change; `meshwright.Change` is one."""

    @property
    def arguments(self) -> str: ...
    @property
    def reserved_bytes(self) -> int | None: ...
    @property
    def saved_bytes(self) -> int | None: ...
    @property
    def fits(self) -> bool | None: ...
    @property
    def extra_executed_flops(self) -> int | None: ...
    @property
    def step_seconds(self) -> float | None: ...
    @property
    def extra_seconds(self) -> float | None: ...
    @property
    def failed(self) -> str: ...


def changes_text(changes: Sequence[Changed]) -> RenderableType:
    """One row for each change with its difference to the step; those that could not be compiled with why."""
    if not changes:
        return Group(heading("What would help"), indented(Text("nothing that this config can change")))
    columns = ("reserved", "memory", "FLOPs", "step", "time")
    table = plain_table("change", "reserved", "memory", "fits", "FLOPs", "step", "time", right=columns)
    table.columns[0].no_wrap = True
    failed: list[Text] = []
    for change in changes:
        if change.reserved_bytes is None:
            failed.append(Text(f"{change.arguments}: {change.failed}"))
            continue
        assert change.saved_bytes is not None, "what is compiled has a difference"
        assert change.extra_executed_flops is not None, "what is compiled has FLOPs"
        add_row(
            table,
            change.arguments,
            format_bytes(change.reserved_bytes),
            _signed(format_bytes(abs(change.saved_bytes)), -change.saved_bytes),
            {True: "yes", False: "no", None: "?"}[change.fits],
            _signed(format_rate(abs(change.extra_executed_flops), "FLOP"), change.extra_executed_flops),
            "" if change.step_seconds is None else format_seconds(change.step_seconds),
            _seconds(change.extra_seconds),
        )
    parts: list[RenderableType] = [heading("What would help, each change compiled"), indented(table)]
    if failed:
        parts += [heading("Could not be compiled"), *(indented(line) for line in failed)]
    return Group(*parts)


def _signed(text: str, amount: float) -> str:
    return "0" if amount == 0 else f"{'+' if amount > 0 else '-'}{text}"


def _seconds(extra: float | None) -> str:
    if extra is None:
        return ""
    return _signed(format_seconds(abs(extra)), extra)
