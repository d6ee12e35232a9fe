"""Turns everything pydantic found wrong into one `InputError` in words, with dotted paths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import InputError, nearest_name

from ._base import PROBLEMS, Problem, Section, is_table
from ._run import RunConfig

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "finite_number": "a finite number",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def variants(section: str) -> tuple[str, dict[str, type[Section]]]:
    """The key that chooses between the records of a section, and the records by its values.

    A section with one record has the key "" and that record under "".
    """
    field = RunConfig.model_fields[section]
    if isinstance(field.discriminator, str):
        key = field.discriminator
        records = get_args(field.annotation)
        return key, {get_args(r.model_fields[key].annotation)[0]: r for r in records}
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
        return "", {"": field.annotation}
    return "", {}


def known_keys(section: str, tag: str) -> list[str]:
    """Keys that one record of a section has; of the run itself where `section` is ""."""
    if not section:
        return ["preset", *(name for name in RunConfig.model_fields if name != "name")]
    return list(variants(section)[1][tag].model_fields)


def input_error(where: str, problems: Sequence[Problem]) -> InputError:
    """One error for all `problems` of `where`, a preset's or a file's name."""
    lines = [f"{path} {what}".strip() for path, what, _ in problems]
    if len(problems) == 1:
        return InputError(f"{where}: {lines[0]}", hint=problems[0][2])
    message = f"{where}: {len(problems)} things are wrong" + "".join(f"\n  {line}" for line in lines)
    return InputError(
        message, hint="; ".join(f"{path}: {hint}" if path else hint for path, _, hint in problems)
    )


def problems_of(error: ValidationError) -> list[Problem]:
    """What pydantic found, in words, in the order of the file's sections."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        problems += _problems_of_detail(detail)
    return problems


def _problems_of_detail(detail: ErrorDetails) -> list[Problem]:
    section, tag, key = _place(detail["loc"])
    path = ".".join(part for part in (section, key) if part)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == PROBLEMS:
        found: list[Problem] = context["problems"]
        return [(".".join(p for p in (path, below) if p), what, hint) for below, what, hint in found]
    if kind == "default_factory_not_called":
        return []  # a default that waits for a field which has its own problem
    if kind == "missing":
        return [(path, "is missing", f"set {path}")]
    if kind == "extra_forbidden":
        keys = known_keys(section if key else "", tag)
        owner = f"{section} ({tag})" if tag else section
        what = f"is no key of {owner}" if key else "is no section or key of a run"
        return [(path, what, nearest_name(key or section, keys))]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return [_tag_problem(section, value)]
    return [_value_problem(path, kind, value, context, detail["msg"])]


def _place(loc: tuple[int | str, ...]) -> tuple[str, str, str]:
    """Section, value of its choosing key, key; pydantic puts that value into the location."""
    parts = [str(part) for part in loc]
    if not parts:
        return "", "", ""
    section, below = parts[0], parts[1:]
    if section in RunConfig.model_fields and variants(section)[0] and below:
        return section, below[0], ".".join(below[1:])
    return section, "", ".".join(below)


def _tag_problem(section: str, value: Any) -> Problem:
    key, records = variants(section)
    path, known = f"{section}.{key}", ", ".join(sorted(records))
    assert is_table(value), f"pydantic looks for {path} only in a table, not in {value!r}"
    tag = value.get(key)
    if tag is None:
        return path, "is missing", f"set it to one of {known}"
    return path, f"= {_show(tag)}: expected one of {known}", nearest_name(str(tag), records)


def _value_problem(path: str, kind: str, value: Any, context: dict[str, Any], message: str) -> Problem:
    shown = f"= {_show(value)}"
    if kind == "literal_error":
        expected = str(context["expected"]).replace(" or ", ", ").replace("'", "")
        return path, f"{shown}: expected one of {expected}", nearest_name(str(value), expected.split(", "))
    if kind in _LIMITS:
        words, limit = _LIMITS[kind]
        return path, f"{shown}: expected {words} {context[limit]}", f"set it to {words} {context[limit]}"
    expected = _TYPES.get(kind, message)
    unquoted = str(value).replace("_", "")
    is_quoted_number = isinstance(value, str) and unquoted.replace(".", "", 1).isdecimal()
    hint = f"write {path} = {value} without quotes" if is_quoted_number else f"set it to {expected}"
    return path, f"{shown}: expected {expected}", hint


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
