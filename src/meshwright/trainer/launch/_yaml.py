"""Write YAML of mappings, lists, texts and numbers: what job files need, without a library at run time.

A text is written plain only if no reader of YAML can take it for anything else. Any other text is written
in double quotes, as JSON writes it, which YAML reads the same way. A text of several lines is a literal
block where YAML allows one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

# A letter or slash first, then what has no meaning in YAML. Words that YAML 1.1 reads as something else are
# excluded below.
_PLAIN = re.compile(r"[A-Za-z/~][A-Za-z0-9_./-]*", re.ASCII)
_RESERVED = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "~"}
_PAIR = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")  # JSON's halves of one character
_INDENT = "  "


def yaml_text(value: object) -> str:
    r"""Return a value as a YAML document, with a final newline.

    >>> print(yaml_text({"name": "x", "args": ["a b", 1], "script": "one\ntwo\n"}), end="")
    name: x
    args:
      - "a b"
      - 1
    script: |
      one
      two
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in _entry(f"{_scalar(key)}:", inner)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for inner in value for line in _item(inner)]
    return [_scalar(value)]


def _entry(head: str, value: object) -> list[str]:
    """Return the lines of one key and its value."""
    if isinstance(value, str) and _is_block(value):
        return [f"{head} |", *(f"{_INDENT}{line}".rstrip(" ") for line in value[:-1].split("\n"))]
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str) and value:
        return [head, *(_INDENT + line for line in _lines(value))]
    return [f"{head} {_scalar(value)}"]


def _item(value: object) -> list[str]:
    """Return the lines of one element of a list."""
    if isinstance(value, str) and _is_block(value):
        return _entry("-", value)
    first, *rest = _lines(value)
    return [f"- {first}", *(_INDENT + line for line in rest)]


def _is_block(text: str) -> bool:
    """Return whether a literal block holds exactly this text: it ends with one newline, and is printable."""
    lines = text.split("\n")
    return (
        len(lines) > 2
        and lines[-1] == ""
        and lines[-2] != ""
        and not lines[0].startswith((" ", "\t"))
        and lines[0] != ""
        and all(line.replace("\t", " ").isprintable() and line == line.rstrip(" \t") for line in lines)
    )


def _scalar(value: object) -> str:
    """Return one value on one line."""
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _RESERVED
        return value if plain else _PAIR.sub(_character, json.dumps(value))
    assert isinstance(value, bool | int | float | Mapping | Sequence), f"{value!r} in a job file"
    return json.dumps(value)


def _character(halves: re.Match[str]) -> str:
    """Return a character outside the basic plane as YAML escapes it."""
    high, low = int(halves[1], 16), int(halves[2], 16)
    return f"\\U{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):08x}"
