"""Document every key from the text below it in its section: as a page, and as comments in TOML."""

from __future__ import annotations

import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ._base import LARGEST, Section, is_table
from ._problems import KEYS_ELSEWHERE, known_keys, variants
from ._run import RunConfig

_LABELS = ("Effect", "Unit", "Default")
_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_NUMBERS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
_COMMENT_FROM = 28  # the column of comments behind values that are short enough
_WIDTH = 114  # columns
_INTRO = """\
# Configuration

A run is a TOML file that states what differs from the defaults. It may start from a preset, and `--set`
changes single keys on the command line:

```toml
# file: wider.toml
preset = "bytes-nano"
[model]
embed_dim = 128
```

```sh
meshwright weigh wider.toml --on 8xCPU --set batch.sequences=16
```

`meshwright init` writes a file with every key and its meaning, and `meshwright presets NAME` prints a preset
that way. The word `"none"` stands for "not set". Weighing needs the sections `model`, `data`, `optimizer` and
`batch` alone; `train` needs `steps` as well, in the file or as `--steps`.

Whole numbers are at most 2,147,483,647.

This page is made from the text below each key in `src/meshwright/config`.
"""


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
    found = [_doc("", "", name, RunConfig.model_fields[name]) for name in top if not variants(name)[1]]
    for section in top:
        for kind, record in variants(section)[1].items():
            found += [_doc(section, kind, key, field) for key, field in record.model_fields.items()]
    return tuple(found)


def _doc(section: str, kind: str, key: str, field: FieldInfo) -> KeyDoc:
    said: dict[str, str] = {"": ""}
    label = ""
    for line in (field.description or "").splitlines():
        found = re.match(rf"({'|'.join(_LABELS)}): ", line)
        if found:
            label, line = found[1], line[found.end() :]
        said[label] = f"{said.get(label, '')} {line.strip()}".strip()
    summary, _, more = re.sub(r"\s+", " ", said[""]).partition(". ")
    return KeyDoc(
        section=section,
        kind=kind,
        key=key,
        summary=summary.rstrip("."),
        more=more,
        effect=said.get("Effect", ""),
        unit=said.get("Unit", ""),
        values=_values(field),
        default=said.get("Default") or ("" if field.is_required() else toml_value(field.default)),
    )


def _values(field: FieldInfo) -> str:
    """Return the values that a key may hold, in words: its choices, or its type and limits."""
    limits: list[str] = []
    types_found: list[str] = []
    for kind, metadata in _alternatives(field.annotation, tuple(field.metadata)):
        if get_origin(kind) is Literal:
            types_found += [f"`{json.dumps(each)}`" for each in get_args(kind)]
        elif kind is type(None):
            types_found.append('`"none"`')
        else:
            types_found.append(_NUMBERS[kind])
        for each in metadata:
            limits += [
                f"{words} {bound:.12g}"
                for name, words in _WORDS.items()
                if (bound := getattr(each, name, None)) is not None and bound != LARGEST
            ]
    if types_found[-1:] == ['`"none"`']:
        return f"{_with_limits(types_found[:-1], limits)}, or {types_found[-1]}"
    return _with_limits(types_found, limits)


def _with_limits(types_found: list[str], limits: list[str]) -> str:
    return ", ".join([*types_found, *limits[-2:]])


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


def commented_toml(config: RunConfig, *, about: str = "") -> str:
    """Return a run as a TOML file that `load_config` reads, with a comment on the meaning of each key.

    The keys of the run come first, then its sections, each with all its keys, whether set or default.

    Args:
        about: lines for the top of the file, without their "#".
    """
    tree = config.model_dump(mode="json", exclude={"name"})
    docs = {(doc.section, doc.kind, doc.key): doc for doc in key_docs()}
    lines = [f"# {line}".rstrip() for line in about.splitlines()]
    lines += [_line(docs["", "", key], value) for key, value in tree.items() if not is_table(value)]
    for section, values in tree.items():
        if is_table(values):
            kind = str(values.get(variants(section)[0], ""))
            lines += ["", f"[{section}]"]
            lines += [_line(docs[section, kind, key], value) for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _line(doc: KeyDoc, value: object) -> str:
    """Return one key with its value, and a comment behind or above it with its summary, unit and choices."""
    said = doc.summary.partition(";")[0]
    said += f" [{doc.unit}]" if doc.unit not in ("", "none") and doc.unit not in said.lower() else ""
    choices = _choices(doc)
    said += f" ({', '.join(choices)})" if choices else ""
    written = f"{doc.key} = {toml_value(value)}"
    line = f"{written:<{_COMMENT_FROM}}  # {said}"
    return line if len(line) <= _WIDTH else f"# {said}\n{written}"


def _choices(doc: KeyDoc) -> list[str]:
    if doc.section and doc.key == variants(doc.section)[0]:
        return list(variants(doc.section)[1])
    words = [json.loads(each) for each in re.findall(r"`([^`]*)`", doc.values)]
    return [] if words == ["none"] else words


def reference_page() -> str:
    """Return docs/configuration.md: every key in tables, and the names that other programs use."""
    docs = key_docs()
    top = _table([doc for doc in docs if not doc.section])
    parts = [_INTRO.strip(), "## Keys of the run", "They stand above the first section of a file.", top]
    for section in dict.fromkeys(doc.section for doc in docs if doc.section):
        parts += [f"## `[{section}]`", _sentences(RunConfig.model_fields[section])]
        for kind, record in variants(section)[1].items():
            if kind:
                parts += [f"### `{section}.{variants(section)[0]} = {json.dumps(kind)}`", _about(record)]
            parts.append(_table([doc for doc in docs if (doc.section, doc.kind) == (section, kind)]))
    rows = [f"| `{key}` | {', '.join(f'`{n}`' for n in names)} |" for key, names in KEYS_ELSEWHERE.items()]
    parts += [
        "## Names elsewhere",
        textwrap.fill(
            "A key that no section has is refused. Where Hugging Face transformers, Megatron-LM, nanoGPT, "
            "torchtitan, PyTorch or common use have such a name, the message says which key is meant. A name "
            "may mean something slightly different there.",
            width=_WIDTH,
        ),
        "\n".join(["| key | names elsewhere |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def _sentences(field: FieldInfo) -> str:
    return textwrap.fill(re.sub(r"\s+", " ", field.description or ""), width=_WIDTH, break_long_words=False)


def _about(record: type[Section]) -> str:
    """Return a record's own docstring as one or several paragraphs."""
    paragraphs = textwrap.dedent("    " + (record.__doc__ or "")).strip().split("\n\n")
    return "\n\n".join(textwrap.fill(re.sub(r"\s+", " ", each), width=_WIDTH) for each in paragraphs)


def _table(docs: list[KeyDoc]) -> str:
    rows = ["| key | values | default | unit | meaning and effect |", "|---|---|---|---|---|"]
    for doc in docs:
        default = doc.default and (doc.default if "`" in doc.default else f"`{doc.default}`")
        meaning = f"{doc.summary}. {doc.more}".strip()
        cells: Mapping[str, str] = {
            "key": f"`{doc.key}`",
            "values": doc.values,
            "default": default or "must be given",
            "unit": doc.unit if doc.unit != "none" else "",
            "meaning": f"{meaning} *Effect:* {doc.effect}" if doc.effect else meaning,
        }
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells.values())} |")
    return "\n".join(rows)
