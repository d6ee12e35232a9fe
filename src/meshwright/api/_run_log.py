"""Keep a log of a run in its folder: the lines that a pipe would show, also of a run on a terminal.

Imports: `run_lines`, `trainer.loop`. Used by: `_train`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.run_lines import LOG_EVERY, RunLog

if TYPE_CHECKING:
    from meshwright.results import FirstStepsCompared, Phase
    from meshwright.trainer.loop import Event as TrainingEvent
    from meshwright.trainer.loop import RunFolder

    Event = TrainingEvent | Phase | FirstStepsCompared

LOG = "log.txt"


class FolderLog:
    """A listener that writes each event to the run's log, and passes it on.

    Lines wait until the folder is made: a run that is refused leaves it as it was. Of several processes the
    first writes.
    """

    def __init__(self, held: RunFolder, on_event: Callable[[Event], None]) -> None:
        self._held, self._on_event = held, on_event
        self._waiting: list[str] = []
        self._is_made = False
        self._log = RunLog(LOG_EVERY, self._write)

    def __call__(self, event: Event) -> None:
        """Log an event, and pass it on."""
        if self._held.peers.is_first:
            self._log.event(event)
        self._on_event(event)

    def begin(self) -> None:
        """Make the folder, and write what has waited.

        Raises:
            InputError: as `RunFolder.create`.
        """
        self._held.create()
        self._is_made = True
        self._flush()

    def _write(self, line: str) -> None:
        self._waiting.append(line)
        if self._is_made:
            self._flush()

    def _flush(self) -> None:
        """Append the lines to the file; those that the disk refuses wait for the next."""
        if self._waiting and self._held.writes.attempt(LOG, self._append):
            self._waiting.clear()

    def _append(self) -> None:
        with (self._held.path / LOG).open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self._waiting)
