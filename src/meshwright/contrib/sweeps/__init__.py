"""Train with every combination of some values, one run after another, and compare the runs.

Imports: all of the core. Used by: users, through `meshwright sweep` and `mw.sweep`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._sweep import sweep as sweep
    from ._sweep_records import Sweep as Sweep
    from ._sweep_records import SweepRun as SweepRun
    from ._sweep_records import SweepRunStarted as SweepRunStarted

__getattr__, __dir__ = names_on_first_use(__name__)
