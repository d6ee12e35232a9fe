"""Sum up what one device sends in a step: what leaves its fast domain, what stays, what is hidden.

A fast domain is a host, a rack whose chips share one fabric, or a TPU slice. Hidden: the part of the seconds
predicted of a collective during which the device computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.ledger import Collective

from ._prediction_records import Prediction, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTraffic:
    """What one device sends in a step in the collectives over the same mesh axes.

    `seconds` and `exposed_seconds`: of these collectives, predicted; None where no time is.
    """

    axes: tuple[str, ...]
    crossing_bytes: int
    inside_bytes: int
    seconds: float | None
    exposed_seconds: float | None

    @property
    def hidden_share(self) -> float | None:
        """The part of the seconds that computation hides; None if no time is predicted."""
        return hidden_share([self])


def hidden_share(parts: Iterable[AxisTraffic]) -> float | None:
    """Return the part of the collectives' seconds that computation hides; None if no time is predicted."""
    seconds = exposed = 0.0
    for part in parts:
        if part.seconds is None or part.exposed_seconds is None:
            return None
        seconds, exposed = seconds + part.seconds, exposed + part.exposed_seconds
    return max(0.0, 1 - exposed / seconds) if seconds else None


def traffic_by_axes(traffic: Sequence[Collective], prediction: Prediction | None) -> tuple[AxisTraffic, ...]:
    """Return the traffic by mesh axes, most crossing bytes first, then most inside."""
    by_axes: dict[tuple[str, ...], list[Collective]] = {}
    for item in traffic:
        by_axes.setdefault(item.axes, []).append(item)
    found: list[AxisTraffic] = []
    for axes, items in by_axes.items():
        crossing = sum(item.crossing_bytes for item in items)
        slices = None if prediction is None else _slices_of(axes, items, prediction.slices)
        found.append(
            AxisTraffic(
                axes=axes,
                crossing_bytes=crossing,
                inside_bytes=max(0, sum(item.wire_bytes for item in items) - crossing),
                seconds=None if slices is None else math.fsum(part.seconds for part in slices),
                exposed_seconds=None
                if slices is None
                else math.fsum(part.exposed_seconds for part in slices),
            )
        )
    return tuple(sorted(found, key=lambda part: (-part.crossing_bytes, -part.inside_bytes)))


def _slices_of(axes: tuple[str, ...], items: Sequence[Collective], slices: Sequence[Slice]) -> list[Slice]:
    """Return the slices of a prediction that are collectives over `axes`."""
    names = {f"{item.kind}[{','.join(axes)}]" for item in items}
    return [part for part in slices if part.name in names]
