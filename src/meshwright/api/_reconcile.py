"""Read what was predicted beside what was measured in a run that is over."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..reconciliation import Reconciliation
from ..results import Run


def reconcile(run: Run | str | Path) -> Reconciliation:
    """Return the predicted quantities of a run beside the measured ones, each with its error.

    Args:
        run: what `train` returned, or the folder of a run that has ended.

    Raises:
        InputError: the folder holds no reconciliation that can be read.
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
