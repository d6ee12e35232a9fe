"""Render results for readers: each result becomes sections, which a terminal or a page shows.

Imports: `results`, `planned`, the packages of the records it shows, `planning`, rich. No jax. Used
by: `reportable`; `cli`, which prints; `contrib`, whose pages show the same sections.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._costs import FLOP_CONVENTION as FLOP_CONVENTION
    from ._costs import cost_sections as cost_sections
    from ._costs import fault_sections as fault_sections
    from ._model import COLOURS as COLOURS
    from ._model import CURVES as CURVES
    from ._model import FAINT as FAINT
    from ._model import FREE as FREE
    from ._model import GAPS as GAPS
    from ._model import GRID as GRID
    from ._model import INK as INK
    from ._model import Bars as Bars
    from ._model import Block as Block
    from ._model import Cards as Cards
    from ._model import Column as Column
    from ._model import Document as Document
    from ._model import Lane as Lane
    from ._model import Lanes as Lanes
    from ._model import Plot as Plot
    from ._model import ReportSection as ReportSection
    from ._model import ReportTable as ReportTable
    from ._model import Scatter as Scatter
    from ._model import Series as Series
    from ._model import TableRow as TableRow
    from ._model import Tone as Tone
    from ._model import Words as Words
    from ._model import byte_ticks as byte_ticks
    from ._model import colours_of as colours_of
    from ._model import curves_plot as curves_plot
    from ._model import flop_words as flop_words
    from ._model import label_steps as label_steps
    from ._model import parts_of as parts_of
    from ._model import percent as percent
    from ._model import plain_rows as plain_rows
    from ._model import second_ticks as second_ticks
    from ._model import section as section
    from ._model import share_of_peak as share_of_peak
    from ._model import thinned as thinned
    from ._plan_report import COLUMNS as COLUMNS
    from ._plan_report import FINISH_COLUMNS as FINISH_COLUMNS
    from ._plan_report import NUMBERS as NUMBERS
    from ._plan_report import finish_cells as finish_cells
    from ._plan_report import plan_page as plan_page
    from ._plan_report import unit_of as unit_of
    from ._results import MakesDocument as MakesDocument
    from ._results import document_of as document_of
    from ._results import plan_renderable as plan_renderable
    from ._results import renderable as renderable
    from ._results import terminal as terminal
    from ._results import text_of as text_of
    from ._run_report import reconciliation_sections as reconciliation_sections
    from ._run_report import row_cells as row_cells
    from ._run_report import sample_sections as sample_sections
    from ._run_report import seconds_sections as seconds_sections
    from ._run_report import steps_words as steps_words
    from ._weighing import LISTED as LISTED
    from ._weighing import YOURS as YOURS
    from ._weighing import cost_words as cost_words
    from ._weighing import finish_lines as finish_lines
    from ._weighing import run_words as run_words
    from ._weighing import time_figures as time_figures
    from ._weighing import time_sections as time_sections
    from ._weighing import title_facts as title_facts
    from ._weighing import verdict as verdict
    from ._weighing_facts import WeighingFacts as WeighingFacts
    from ._weighing_facts import facts_of as facts_of
    from ._weighing_facts import finish_texts as finish_texts

__getattr__, __dir__ = names_on_first_use(__name__)
