"""Find a knob less or a larger fleet with which something fits, where a plan found nothing.

Used by: `api`, by the entry point.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.planned import Planned
from meshwright.results import Change

from ._fleet_sizes import fleet_times

MOST_DOUBLINGS = 6  # of a fleet on which nothing fits

Knobs = Mapping[str, Sequence[str]]


def what_would_fit(
    fleet: Fleet,
    knobs: Knobs,
    check_sizes: Callable[[set[int]], None],
    first_fit: Callable[[Fleet, Knobs, str], Planned | None],
) -> tuple[Change, ...]:
    """Return the first knob that need not be fixed, and the smallest larger fleet, with which something fits.

    Each is compiled, and fits. Fleets are doubled, up to `MOST_DOUBLINGS` times. All that is tried takes what
    is left of the plan's time, and no longer; Ctrl-C ends it too.

    Args:
        knobs: those of the plan, by name.
        check_sizes: raises if the step is another one on fleets of these numbers of devices.
        first_fit: compiles candidates on a fleet with knobs, and returns the first that fits; the text says
            what is tried.
    """
    released = [
        (f"--fix {name}=... left out", fleet, {k: v for k, v in knobs.items() if k != name}) for name in knobs
    ]
    larger = [fleet_times(fleet, 2**power) for power in range(1, MOST_DOUBLINGS + 1)]
    try:
        check_sizes({each.num_devices for each in (fleet, *larger) if each})
    except InputError:  # on another number of devices it would be another step
        larger = []
    grown = [(each.options, each, knobs) for each in larger if each]
    found: list[Change] = []
    with contextlib.suppress(KeyboardInterrupt):
        for options in (released, grown):
            tried = (_change(arguments, first_fit(on, of, arguments)) for arguments, on, of in options)
            found += [change for change in itertools.islice(filter(None, tried), 1)]
    return tuple(found)


def _change(arguments: str, best: Planned | None) -> Change | None:
    """Return a change of fleet or knobs with the candidate that then fits; None if none was found."""
    if best is None or best.step_seconds is None:
        return None
    return Change(
        arguments=arguments,
        effect=f"{best.layout}, {best.settings} then fits",
        reserved_bytes=best.reserved_bytes,
        saved_bytes=None,
        fits=True,
        extra_executed_flops=None,
        step_seconds=best.step_seconds.expected,
        extra_seconds=None,
        failed="",
    )
