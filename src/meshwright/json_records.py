"""Read a record from the JSON text that Meshwright wrote, and explain why other text is refused.

Imports: `errors`, `files`, and pydantic when a text is read. Used by: all packages that keep records.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import InputError
from meshwright.files import parsed_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Record = TypeVar("Record")

EXACT: Any = {"extra": "forbid"}
"""The `__pydantic_config__` of a dataclass that refuses fields it does not know."""


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
        fields: dict[str, Any] = parsed_json(text)
        if schema is not None and (given := fields.pop("schema")) != schema:
            what = f"this is {name} of schema {given}; this version of Meshwright reads schema {schema}"
            raise InputError(what, hint=f"{hint}; or read it with the version that wrote it")
        kept = {key: value for key, value in fields.items() if key not in derived}
        return _reader_of(kind).validate_python(kept)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole text"
        raise InputError(f"this is not {name}: {where}: {first['msg']}", hint=hint) from invalid
    except (ValueError, KeyError, TypeError, AttributeError) as broken:
        raise InputError(f"this is not {name}: {broken!r}", hint=hint) from broken


@cache
def _reader_of(kind: type[Record]) -> TypeAdapter[Record]:
    """Return the reader of a dataclass, which takes longer to make than a short text takes to read."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
