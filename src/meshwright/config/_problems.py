"""Everything that pydantic found wrong, as one `InputError` in words, with dotted paths and near names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import InputError, near_names, nearest_name

from ._base import PROBLEMS, Problem, Section, is_table
from ._run import RunConfig
from ._synonyms import keys_meant, value_meant

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
        owner = f"{section} ({tag})" if tag else section
        what = f"is no key of {owner}" if key else "is no section or key of a run"
        return [(path, what, _key_hint(section, tag, key) if key else _section_hint(section, value))]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return [_tag_problem(section, value)]
    return [_value_problem(path, kind, value, context, detail["msg"])]


def _key_hint(section: str, tag: str, key: str) -> str:
    """Return a hint for an unknown `key` of a section: its name here, the kinds with it, or the nearest."""
    here = known_keys(section, tag)
    meant = [path for path in keys_meant(key) if _is_key_for(path, section, tag)]
    if meant:
        return _did_you_mean([path for path in meant if path.startswith(f"{section}.")] or meant)
    kinds = [kind for kind, record in variants(section)[1].items() if key in record.model_fields]
    if kinds:
        choice = f"{section}.{variants(section)[0]}"
        return f"it is a key of {choice} = {' or '.join(map(repr, kinds))}; choose that, or leave it out"
    near = near_names(key, here)
    elsewhere = [path for path in _paths() if path.rpartition(".")[2] == key]
    return nearest_name(key, near or here) if near or not elsewhere else _did_you_mean(elsewhere)


def _section_hint(name: str, value: Any) -> str:
    """Return a hint for an unknown section or key of a run; keys of a foreign section are looked up too."""
    known = known_keys("", "")
    if is_table(value):
        hints = [f"{name}.{key} is {' or '.join(meant)} here" for key in value if (meant := keys_meant(key))]
        return "; ".join(hints) if hints and not near_names(name, known) else nearest_name(name, known)
    meant = keys_meant(name) or [path for path in _paths() if path.rpartition(".")[2] == name]
    return _did_you_mean(meant) if meant else nearest_name(name, known)


def _did_you_mean(paths: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, paths))}?"


def _paths() -> list[str]:
    """Return every key of a run as `section.key`, whatever kind of its section has it."""
    sections = {name: variants(name)[1] for name in known_keys("", "") if name in RunConfig.model_fields}
    plain = [name for name, records in sections.items() if not records]
    below = {
        f"{name}.{key}": 0 for name, rs in sections.items() for r in rs.values() for key in r.model_fields
    }
    return [*plain, *below]


def _is_key_for(path: str, section: str, tag: str) -> bool:
    """Return whether `path` can be set while `section` is of the kind `tag`."""
    owner, _, key = path.rpartition(".")
    return owner != section or key in known_keys(section, tag)


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
    return path, f"= {_show(tag)}: expected one of {known}", _value_hint(path, str(tag), list(records))


def _value_problem(path: str, kind: str, value: Any, context: dict[str, Any], message: str) -> Problem:
    shown = f"= {_show(value)}"
    if kind == "literal_error":
        expected = str(context["expected"]).replace(" or ", ", ").replace("'", "")
        return (
            path,
            f"{shown}: expected one of {expected}",
            _value_hint(path, str(value), expected.split(", ")),
        )
    if kind in _LIMITS:
        words, limit = _LIMITS[kind]
        return path, f"{shown}: expected {words} {context[limit]}", f"set it to {words} {context[limit]}"
    expected = _TYPES.get(kind, message)
    unquoted = str(value).replace("_", "")
    is_quoted_number = isinstance(value, str) and unquoted.replace(".", "", 1).isdecimal()
    hint = f"write {path} = {value} without quotes" if is_quoted_number else f"set it to {expected}"
    return path, f"{shown}: expected {expected}", hint


def _value_hint(path: str, value: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown `value` of a key: the one that it stands for elsewhere, or the nearest."""
    meant = value_meant(path, value)
    return nearest_name(value, known) if meant is None else f"did you mean {meant!r}?"


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
