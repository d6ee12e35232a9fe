"""Report a run to TensorBoard: event files in the folder `tensorboard` of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.extras import check_installed

if TYPE_CHECKING:
    from ._reporting import TrackedRun


class TensorboardTracker:
    """The event file of one session; TensorBoard joins those of a folder."""

    _writer: Any

    def begin(self, run: TrackedRun) -> None:
        """Begin an event file; steps that a resumed run repeats replace the earlier ones.

        Raises:
            InputError: tensorboardX is not installed.
        """
        check_installed("train", ["tensorboardX"], "reporting to tensorboard")
        from tensorboardX import SummaryWriter

        purged = run.resumed_at + 1 if run.resumed_at else None
        folder = run.folder / "tensorboard"
        # Names have the second of their begin: a run that goes on at once would write over its first session.
        number = len(list(folder.glob("events.out.tfevents.*")))
        suffix = f".{number:06d}"
        self._writer = SummaryWriter(str(folder), purge_step=purged, filename_suffix=suffix)
        self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```")
        self._writer.add_text("tags", ", ".join(run.tags))
        for path in run.files:
            if path.exists():
                self._writer.add_text(path.name, f"```json\n{path.read_text(encoding='utf-8')}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep figures of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, state: str) -> None:
        """End the session."""
        self._writer.add_text("state", state)
        self._writer.close()
