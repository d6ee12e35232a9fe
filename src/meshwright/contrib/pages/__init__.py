"""Show results as HTML pages with pictures: a weighing, a plan, the folder of a run.

Imports: `report`, `results`, `trainer.loop` (to write files); matplotlib when a plot is drawn. Used by: the
core, by entry points, where a page is asked for; `contrib.causes`, `contrib.sweeps`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: a run imports what draws beside its weighing
    from ._drawings import lane_svg as lane_svg
    from ._page import loading_plots as loading_plots
    from ._page import page_section as page_section
    from ._results_pages import page_of as page_of
    from ._run_files import read_run as read_run
    from ._run_page import run_page as run_page
    from ._run_page import write_report as write_report
    from ._schedule_lanes import lanes_of as lanes_of
    from ._schedule_lanes import schedule_lanes as schedule_lanes
    from ._schedule_lanes import schedule_of as schedule_of

__getattr__, __dir__ = names_on_first_use(__name__)
