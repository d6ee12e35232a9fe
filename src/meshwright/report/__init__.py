"""What people read: a weighing on the terminal, a run as one HTML file.
Imports: `eager`, `ledger`, `predict`, `reconcile`, `config`, `hardware`, `units`; rich, matplotlib.
No jax. Used by: `api`, which writes a run's report, and `cli`, which prints.
"""

from ._html import write_report as write_report
from ._html import write_weighing as write_weighing
from ._screen import Weighed as Weighed
from ._screen import screen_text as screen_text
from ._screen import verdict as verdict
from ._sweep import Sweep as Sweep
from ._sweep import SweepRun as SweepRun
from ._sweep import sweep_text as sweep_text
from ._sweep import write_sweep as write_sweep
from ._terminal import weighing_text as weighing_text
from ._texts import account_text as account_text
from ._texts import calibration_text as calibration_text
from ._texts import changes_text as changes_text
from ._texts import run_text as run_text
from ._wording import row_cells as row_cells
