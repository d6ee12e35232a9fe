"""The Python face: `weigh`, `train`, `sweep` and `explain`, re-exported by `meshwright`.

Importing it lets results print as their reports. Imports: everything but `cli`. Used by: `meshwright` and the
command line.
"""

from ..report import page_of, text_of
from ..results import render_with

render_with(text=text_of, page=page_of)
