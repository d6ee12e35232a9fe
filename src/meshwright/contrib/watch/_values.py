"""Take texts and numbers out of what a run wrote, so that a page and a terminal may show them.

Imports: `errors`. Used by: the other modules of this package.
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.errors import printable

LONGEST_TEXT = 4000  # characters of one text on the page
LARGEST = 1e100  # axes are computed with differences
_MARKS = re.compile("[\u061c\u200e\u200f\u2028\u2029]")


def clean(value: object) -> str:
    """Return a text of a run as a page and a terminal may show it: nothing in it moves a cursor or a line."""
    text = str(value)
    text = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ..."
    return _MARKS.sub(lambda match: f"\\u{ord(match[0]):04x}", printable(text))


def number_at(fields: Any, *path: str) -> float | None:
    """Return a number deep in JSON's objects; None if it is not there, or no number that can be drawn."""
    for name in path:
        fields = fields.get(name) if isinstance(fields, dict) else None
    is_number = type(fields) in (int, float) and abs(fields) <= LARGEST
    return float(fields) if is_number else None


def text_at(fields: Any, name: str) -> str:
    """Return a text of a JSON object, cleaned; "" if it is not there."""
    value = fields.get(name) if isinstance(fields, dict) else None
    return clean(value) if isinstance(value, str) else ""
