"""Report a run to Trackio, which keeps it in a local SQLite file, or in a Space (TRACKIO_SPACE_ID)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.extras import check_installed

if TYPE_CHECKING:
    from ._reporting import TrackedRun


def _say(*words: object, **how: Any) -> None:
    sys.stderr.write(f"{' '.join(map(str, words))}\n")


class TrackioTracker:
    """One run of Trackio; a resumed run continues it by its name and number."""

    _run: Any

    def begin(self, run: TrackedRun) -> None:
        """Begin or continue a run, with its configuration and prediction.

        Raises:
            InputError: it is not installed.
        """
        check_installed("trackio", ["trackio"], "reporting to trackio")
        trackio: Any = import_module("trackio")
        for name, module in tuple(sys.modules.items()):
            if name.partition(".")[0] == "trackio":  # its words would stand in the output of `--json`
                vars(module)["print"] = _say
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "meshwright"),
            name=f"{run.name}-{run.number}",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config={**run.config, "tags": list(run.tags)},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # its own figures of devices take a thread, and a library of NVIDIA's
            auto_log_cpu=False,
        )
        for path in run.files:
            if path.exists():
                self._run.log_artifact(str(path), name=f"{path.stem}-{run.number}", type=path.stem)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep figures of a step."""
        self._run.log(dict(values), step=step)

    def end(self, state: str) -> None:
        """End the session."""
        self._run.finish()
