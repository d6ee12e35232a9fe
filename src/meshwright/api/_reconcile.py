"""Read the reconciliation of a finished run: predicted next to measured quantities."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..reconciliation import Reconciliation
from ..results import Run


def reconcile(run: Run | str | Path) -> Reconciliation:
    """Return the predicted quantities of a run next to the measured ones, each with its error.

    Args:
        run: the result of `train`, or the folder of a finished run.

    Raises:
        InputError: the folder holds no readable reconciliation.
    """
    if isinstance(run, Run):
        return run.reconciliation
    path = Path(run) / "reconciliation.json"
    try:
        return Reconciliation.from_json(path.read_text("utf-8"))
    except OSError as missing:
        raise InputError(
            f"{path} cannot be read: {missing.strerror}",
            hint="name the folder of a run that has ended; one that is stopped writes it too",
        ) from missing
