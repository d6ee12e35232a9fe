"""Say when a run is finished: its steps, evaluations, checkpoints, start, and the faults that stop it.

Imports: `predict`, `compiler` (its record only), `config`, `hardware`, `errors`, `units`. No jax; a clock and
`trainer.loop` only in `_live_finish`. Used by: `programs` and `api`, by entry points. failures.toml has what
is published of faults.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most weighings ask for no day
    from ._failures import failures as failures
    from ._finish import Finish as Finish
    from ._finish import Operations as Operations
    from ._finish import Range as Range
    from ._finish import Workload as Workload
    from ._finish import best_period as best_period
    from ._finish import finish_of as finish_of
    from ._live_finish import LiveFinish as LiveFinish
    from ._own_history import OwnHistory as OwnHistory
    from ._workload import workload_of as workload_of

__getattr__, __dir__ = names_on_first_use(__name__)
