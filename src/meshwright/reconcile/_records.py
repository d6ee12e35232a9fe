"""`Reconciliation`: each predicted quantity beside the same quantity as measured."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity, predicted and measured in `unit` (FLOP, bytes, seconds, share, tokens per second).

    `inside`: whether the measured value lies in the predicted interval [`low`, `high`]; None where
    the prediction is a single number. `how`: how it was measured.
    """

    quantity: str
    unit: str
    predicted: float
    measured: float
    how: str
    low: float | None = None
    high: float | None = None

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured, less one: 0.1 is a tenth too high. None where zero was measured."""
        return None if self.measured == 0 else self.predicted / self.measured - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measured value lies in the predicted interval; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """All rows, and by quantity why nothing stands beside the others.

    `same_program`: whether the program that ran has the fingerprint of the one that was weighed.
    """

    same_program: bool
    rows: tuple[Row, ...]
    not_compared: dict[str, str]

    def to_json(self) -> str:
        """As `from_json` reads it; errors and `inside` are written beside the fields."""
        rows = [
            {**dataclasses.asdict(row), "relative_error": row.relative_error, "inside": row.inside}
            for row in self.rows
        ]
        fields = {"schema": SCHEMA, "same_program": self.same_program, "rows": rows}
        return json.dumps({**fields, "not_compared": self.not_compared}, indent=1)

    @staticmethod
    def from_json(text: str) -> Reconciliation:
        """The inverse of `to_json`.

        Raises:
            InputError: the text is no such JSON object.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise InputError(
                    f"a reconciliation of schema {fields['schema']}; this version reads {SCHEMA}",
                    hint="make it again with this version, or read it with the one that wrote it",
                )
            known = {field.name for field in dataclasses.fields(Row)}
            rows = (Row(**{name: row[name] for name in known}) for row in fields["rows"])
            return Reconciliation(
                same_program=fields["same_program"],
                rows=tuple(rows),
                not_compared=dict(fields["not_compared"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as broken:
            raise InputError(
                f"this is no reconciliation: {broken!r}", hint="`train` writes one as reconciliation.json"
            ) from broken
