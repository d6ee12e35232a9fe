"""Read a record from the JSON text that Meshwright wrote, and refuse any other text in words.

Imports: `errors`, and pydantic when a text is read. Used by: all packages whose records are kept in files.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import InputError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Record = TypeVar("Record")

EXACT: Any = {"extra": "forbid"}
"""The `__pydantic_config__` of a dataclass that refuses fields it does not know."""


def read_json(text: str | bytes) -> Any:
    """Parse JSON text that may be a stranger's: one that is nested too deep is an error like any other.

    Raises:
        ValueError: the text is not JSON, or cannot be read.
    """
    try:
        return json.loads(text)
    except RecursionError as deep:
        raise ValueError("it is nested too deep") from deep


def read_record(
    kind: type[Record],
    text: str,
    *,
    name: str,
    hint: str,
    schema: int | None = None,
    derived: Collection[str] = (),
) -> Record:
    """Read a dataclass from the JSON text of its fields; types are checked, and lists become tuples.

    Args:
        kind: the dataclass. It ignores unknown fields unless its `__pydantic_config__` is `EXACT`.
        name: what the text should be, with its article: "a measurement".
        hint: where such a text comes from, or how to make it again.
        schema: the number that the field `schema` must have; None if the text has no such field.
        derived: further fields of the text, which the record computes itself.

    Raises:
        InputError: the text is not such a JSON object, or has another schema; or the record refuses a value.

    >>> from meshwright.hardware import Link
    >>> read_record(Link, '{"name": "NVLink", "bytes_per_second": 4.5e11}', name="a link", hint="")
    Link(name='NVLink', bytes_per_second=450000000000.0, by_group={})
    """
    from pydantic import ValidationError

    try:
        fields: dict[str, Any] = read_json(text)
        if schema is not None and (given := fields.pop("schema")) != schema:
            what = f"this is {name} of schema {given}; this version of Meshwright reads schema {schema}"
            raise InputError(what, hint=f"{hint}; or read it with the version that wrote it")
        kept = {key: value for key, value in fields.items() if key not in derived}
        return _reader_of(kind).validate_python(kept)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole text"
        raise InputError(f"this is not {name}: {where}: {first['msg']}", hint=hint) from invalid
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as broken:
        raise InputError(f"this is not {name}: {broken!r}", hint=hint) from broken


@cache
def _reader_of(kind: type[Record]) -> TypeAdapter[Record]:
    """Return the reader of a dataclass, which takes longer to make than a short text takes to read."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
