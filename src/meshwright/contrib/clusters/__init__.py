"""Run with several processes: join, compare and watch them, exchange messages, start and restart them.

Imports: `trainer.launch`, `subprocesses`, `errors`; jax when processes are joined. Used by: `trainer.launch`
and `cli`, by entry points, where a launcher or an option asks for it.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: who restarts a run joins no processes
    from ._connect import join as join
    from ._coordination import LEFT_LOOKS as LEFT_LOOKS
    from ._coordination import SILENT_SECONDS as SILENT_SECONDS
    from ._coordination import Heartbeat as Heartbeat
    from ._coordination import ProcessGroup as ProcessGroup
    from ._differences import agreed_among as agreed_among
    from ._launch import run_processes as run_processes
    from ._launch import run_with_restarts as run_with_restarts

__getattr__, __dir__ = names_on_first_use(__name__)
