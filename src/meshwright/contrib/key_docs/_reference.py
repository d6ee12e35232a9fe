"""Document every key from the text below it in its section, and comment a run's TOML with that."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from meshwright.config import (
    LARGEST,
    Choices,
    PositiveFloat,
    RunConfig,
    is_table,
    known_keys,
    policies_in_words,
    variants,
)

from ._key_texts import texts_of

_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_TYPES: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_TYPES[type(None)] = '`"none"`'
_TYPES[tuple[str, ...]] = "list of texts"
_TYPES[tuple[PositiveFloat, ...]] = "list of numbers above 0"
_COMMENT_FROM = 28  # the column of comments behind values that are short enough
_WIDTH = 114  # columns


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDoc:
    """The documentation of one key of one kind of a section.

    `section` is "" for a key of the run itself, and `kind` is "" if the section has one form. `values` lists
    the values in words. `default` is TOML, or words if it is computed, or "" if the key must be given. `unit`
    is "" if the key is not a number, and "none" for a number without a unit.
    """

    section: str
    kind: str
    key: str
    summary: str
    more: str
    effect: str
    unit: str
    values: str
    default: str

    @property
    def path(self) -> str:
        """Path of the key as `--set` takes it: `section.key`."""
        return f"{self.section}.{self.key}" if self.section else self.key


def key_docs() -> tuple[KeyDoc, ...]:
    """Return the documentation of every key of every kind of section, in the order of the records."""
    top = [name for name in known_keys("", "") if name in RunConfig.model_fields]
    texts = texts_of(RunConfig)
    found = [
        _doc("", "", name, RunConfig.model_fields[name], texts[name]) for name in top if not variants(name)[1]
    ]
    for section in top:
        for kind, record in variants(section)[1].items():
            texts, fields = texts_of(record), record.model_fields
            own_first = sorted(fields, key=lambda key: key not in record.__annotations__)
            found += [_doc(section, kind, key, fields[key], texts[key]) for key in own_first]
    return tuple(found)


def _doc(section: str, kind: str, key: str, field: FieldInfo, text: str) -> KeyDoc:
    text = re.sub(r"\s+", " ", text).replace("{policies}", policies_in_words())
    said, *labelled = re.split(r"\b(Effect|Unit|Default): ", text)
    labels = dict(zip(labelled[::2], map(str.strip, labelled[1::2]), strict=True))
    summary, _, more = said.strip().partition(". ")
    return KeyDoc(
        section=section,
        kind=kind,
        key=key,
        summary=summary.rstrip("."),
        more=more,
        effect=labels.get("Effect", ""),
        unit=labels.get("Unit", ""),
        values=_values(field),
        default=labels.get("Default") or ("" if field.is_required() else toml_value(field.default)),
    )


def _values(field: FieldInfo) -> str:
    """Return the values that a key may hold, in words: its choices, or its type and limits."""
    limits: list[str] = []
    words: list[str] = []
    for kind, metadata in _alternatives(field.annotation, tuple(field.metadata)):
        named = [choice for each in metadata if isinstance(each, Choices) for choice in each.words]
        if named or get_origin(kind) is Literal:
            words += [f"`{json.dumps(choice)}`" for choice in named or get_args(kind)]
        else:
            words.append(_TYPES[kind])
        for constraint in metadata:
            bounds = ((limit, getattr(constraint, name, None)) for name, limit in _LIMITS.items())
            limits += [f"{limit} {bound:.12g}" for limit, bound in bounds if bound not in (None, LARGEST)]
    if words[-1:] == [_TYPES[type(None)]]:
        return f"{', '.join([*words[:-1], *limits[-2:]])}, or {words[-1]}"
    return ", ".join([*words, *limits[-2:]])


def _alternatives(kind: Any, metadata: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield each plain type of an annotation with the constraints on it."""
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        fields = [m for each in more if isinstance(each, FieldInfo) for m in each.metadata]
        yield from _alternatives(inner, (*metadata, *fields))
    elif get_origin(kind) in (Union, types.UnionType):
        for each in get_args(kind):
            yield from _alternatives(each, metadata if each is not type(None) else ())
    else:
        yield kind, metadata


def toml_value(value: object) -> str:
    """Return a value as TOML; None becomes "none", the word that a file uses for it."""
    return '"none"' if value is None else json.dumps(value)


def commented_toml(config: RunConfig, *, about: str = "", changed_only: bool = False) -> str:
    """Return a run as a TOML file that `load_config` reads, with a comment on the meaning of each key.

    The keys of the run come first, then its sections, each with all its keys, whether set or default.

    Args:
        about: lines for the top of the file, without their "#".
        changed_only: leave out the keys that have their default, and the sections that then hold none.
    """
    tree = config.model_dump(mode="json", exclude={"name"}, exclude_unset=changed_only)
    docs = {(doc.section, doc.kind, doc.key): doc for doc in key_docs()}
    lines = [f"# {line}".rstrip() for line in about.splitlines()]

    def lines_of(section: str, kind: str, values: dict[str, Any]) -> list[str]:
        given = [(docs[section, kind, key], value) for key, value in values.items() if not is_table(value)]
        return [_line(doc, value) for doc, value in given if not changed_only or _is_changed(doc, value)]

    lines += lines_of("", "", tree)
    for section, values in tree.items():
        if is_table(values):
            kind = str(values.get(variants(section)[0], ""))
            if inner := lines_of(section, kind, values):
                lines += ["", f"[{section}]", *inner]
    return "\n".join(lines) + "\n"


def _is_changed(doc: KeyDoc, value: object) -> bool:
    """Return whether a value that was set is not the key's default; a computed default is not compared."""
    return doc.default.strip("`") != toml_value(value)


def _line(doc: KeyDoc, value: object) -> str:
    """Return one key with its value, and a comment behind or above it with its summary, unit and choices."""
    comment = doc.summary.partition(";")[0]
    if doc.unit not in ("", "none") and doc.unit not in comment.lower():
        comment += f" [{doc.unit}]"
    choices: list[str] = [json.loads(choice) for choice in re.findall(r"`([^`]*)`", doc.values)]
    if doc.section and doc.key == variants(doc.section)[0]:
        choices = list(variants(doc.section)[1])
    if choices and choices != ["none"]:
        comment += f" ({', '.join(choices)})"
    written = f"{doc.key} = {toml_value(value)}"
    line = f"{written:<{_COMMENT_FROM}}  # {comment}"
    return line if len(line) <= _WIDTH else f"# {comment}\n{written}"
