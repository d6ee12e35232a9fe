"""Render results for readers: each result becomes sections, which a terminal and an HTML page show.

Imports: `results`, the packages of the records it shows, `planning`, `training` (to write files), rich. No
jax. Used by: `api`, which writes the pages and passes the renderers to `results`, and `cli`, which prints.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._costs import FLOP_CONVENTION as FLOP_CONVENTION
    from ._model import COLOURS as COLOURS
    from ._model import CURVES as CURVES
    from ._model import FAINT as FAINT
    from ._model import GRID as GRID
    from ._model import Bars as Bars
    from ._model import Document as Document
    from ._model import Lanes as Lanes
    from ._model import Plot as Plot
    from ._model import ReportSection as ReportSection
    from ._model import ReportTable as ReportTable
    from ._model import Series as Series
    from ._model import TableRow as TableRow
    from ._model import Tone as Tone
    from ._model import Words as Words
    from ._model import byte_ticks as byte_ticks
    from ._model import colours_of as colours_of
    from ._model import label_steps as label_steps
    from ._model import parts_of as parts_of
    from ._model import percent as percent
    from ._model import plain_rows as plain_rows
    from ._model import section as section
    from ._model import thinned as thinned
    from ._render import loading_plots as loading_plots
    from ._render import page as page
    from ._results import page_of as page_of
    from ._results import plan_renderable as plan_renderable
    from ._results import renderable as renderable
    from ._results import text_of as text_of
    from ._run_files import read_run as read_run
    from ._run_report import row_cells as row_cells
    from ._run_report import run_page as run_page
    from ._run_report import write_report as write_report
    from ._schedule_lanes import lanes_of as lanes_of
    from ._schedule_lanes import schedule_of as schedule_of
    from ._weighing_facts import facts_of as facts_of

__getattr__, __dir__ = names_on_first_use(__name__)
