"""Provide the Python interface: `weigh`, `train`, `sweep` and `explain`, which `meshwright` re-exports.

Importing it lets results print as their reports. Imports: everything but `cli` and `tools`. Used by:
`meshwright` and `cli`.
"""

from meshwright.report import page_of, text_of
from meshwright.shown import render_with

render_with(text=text_of, page=page_of)
