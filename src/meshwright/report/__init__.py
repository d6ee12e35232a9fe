"""Render results for readers: each result becomes sections, which a terminal and an HTML page show.

Imports: `results`, the packages of the records it shows, `planning`, `training` (to write files), rich. No
jax. Used by: `api`, which writes the pages and passes the renderers to `results`, and `cli`, which prints.
"""

from ._render import loading_plots as loading_plots
from ._results import page_of as page_of
from ._results import plan_renderable as plan_renderable
from ._results import renderable as renderable
from ._results import row_cells as row_cells
from ._results import text_of as text_of
from ._results import write_report as write_report
from ._results import write_sweep as write_sweep
