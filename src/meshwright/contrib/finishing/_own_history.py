"""Read from a run's record what has happened to it: faults, restarts, and how long it ran.

Counted as a fault: a session that made steps and ended dead, failed, or by SIGTERM, as a scheduler ends one
that it takes the machine from; and a rollback. Not counted: Ctrl-C, the end of all steps, and sessions that
ended before their first step, whose time is a part of the restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

FAULTS = ("dead", "failed")  # states of a session that a fault ended
TAKEN = "SIGTERM"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHistory:
    """Hold what has happened to a run so far.

    `faults`: that stopped it, and rollbacks. `up_seconds`: for which it ran. `restart_seconds`: of each
    fault, until steps were made again.
    """

    faults: int = 0
    up_seconds: float = 0.0
    restart_seconds: tuple[float, ...] = ()

    @classmethod
    def of_sessions(cls, sessions: Sequence[Mapping[str, Any]], now: datetime) -> OwnHistory:
        """Return the history of a run.

        Args:
            sessions: of its run.json, of which the last one is under way.
            now: in UTC.

        >>> died = {"began": "2026-12-01T00:00:00+00:00", "first_step": "2026-12-01T00:01:00+00:00",
        ...         "ended": "2026-12-02T00:00:00+00:00", "state": "dead"}
        >>> again = {"began": "2026-12-02T00:04:00+00:00", "first_step": "2026-12-02T00:05:00+00:00"}
        >>> found = OwnHistory.of_sessions([died, again], datetime(2026, 12, 2, 1, tzinfo=UTC))
        >>> found.faults, found.restart_seconds, found.up_seconds
        (1, (300.0,), 89760.0)
        """
        with_steps = [each for each in sessions if moment(each.get("first_step")) is not None]
        faults, waits, up = 0, list[float](), timedelta()
        before: Mapping[str, Any] | None = None
        for session in with_steps:
            begins = moment(session["first_step"]) or now
            if before is not None and _is_fault(before) and (since := moment(before.get("ended"))):
                faults += 1
                waits.append(max(0.0, (begins - since).total_seconds()))
            began = moment(session.get("began")) or begins
            ended = moment(session.get("ended")) or (now if session is with_steps[-1] else began)
            up += max(ended - began, timedelta())
            back = [
                float(each) for each in session.get("rollback_seconds", ()) if isinstance(each, int | float)
            ]
            faults, waits, before = faults + len(back), [*waits, *back], session
        return cls(faults=faults, up_seconds=up.total_seconds(), restart_seconds=tuple(waits))


def moment(text: Any) -> datetime | None:
    """Return a time of a record; None if there is none. One without a zone is in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _is_fault(session: Mapping[str, Any]) -> bool:
    taken = session.get("state") == "stopped" and TAKEN in str(session.get("words", ""))
    return taken or session.get("state") in FAULTS
