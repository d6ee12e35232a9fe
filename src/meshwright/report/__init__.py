"""Render results for readers: a weighing on the terminal, a run as one HTML file.

Imports: `results`, the packages of the records it shows, `planning`, `training` (to write files), rich. No
jax. Used by: `api`, which writes a run's report and passes the renderers to `results`, and `cli`, which
prints.
"""

from ._html import write_report as write_report
from ._results import page_of as page_of
from ._results import text_of as text_of
from ._screen import screen_text as screen_text
from ._screen import verdict as verdict
from ._sweep import sweep_text as sweep_text
from ._sweep import write_sweep as write_sweep
from ._terminal import weighing_text as weighing_text
from ._texts import account_text as account_text
from ._texts import calibration_text as calibration_text
from ._texts import changes_text as changes_text
from ._texts import run_text as run_text
from ._wording import row_cells as row_cells
