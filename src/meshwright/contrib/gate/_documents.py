"""Read the files of a launch as data: YAML, TOML, JSON and text, within limits of size and depth.

YAML is read by PyYAML's safe loader, and only after its events were counted: an alias counts as all that it
stands for. Nothing of a file is executed, and no template is filled in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.extras import check_installed
from meshwright.files import parsed_json, parsed_toml, read_text, reason

MOST_BYTES = 2**18  # of one file; the largest of those that were read has 25 KB
MOST_VALUES = 20_000  # of one YAML text, aliases counted as all that they stand for
DEEPEST = 40  # levels of a YAML text
MOST_DOCUMENTS = 32  # of one YAML file


def text_of(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except (OSError, ValueError) as wrong:
        hint = f"name a file of text of at most {MOST_BYTES // 1024} KiB"
        raise InputError(f"{path} cannot be read: {reason(wrong)}", hint=hint) from wrong
    if "\0" in text:
        raise InputError(f"{path} has a zero byte, and is no text", hint="name a file of text")
    return text


def tables_of(path: Path, text: str) -> dict[str, Any]:
    """Return the tables of a TOML or JSON text.

    Raises:
        InputError: it is not such a text, or has no keys.
    """
    kind, read = ("JSON", parsed_json) if path.suffix == ".json" else ("TOML", parsed_toml)
    try:
        tree: Any = read(text)
    except ValueError as wrong:
        raise InputError(f"{path} is not {kind}: {wrong}", hint="correct the file") from wrong
    if not (tree and isinstance(tree, dict)):
        raise InputError(f"{path} holds no keys", hint=f"name a file whose {kind} is a table of keys")
    return tree  # pyright: ignore[reportUnknownVariableType]


def documents_of(path: Path, text: str) -> list[dict[str, Any]]:
    """Return the mappings of a YAML text, one for each of its documents.

    Raises:
        InputError: PyYAML is not installed; or the text is not YAML, is too deep or too large with its
            aliases written out, names a key twice, or holds something else than mappings.
    """
    check_installed("jobs", ["yaml"], f"reading {path.name}")
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads the types of JSON, with texts as keys, and refuses a key that is given twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for name in names:
                if name != "<<" and names.count(name) > 1:
                    raise ValueError(f"line {node.start_mark.line + 1}: the key {name[:60]!r} is given twice")
            return {str(key): value for key, value in super().construct_mapping(node, deep=deep).items()}

    try:
        _check_size(yaml, text)
        found = list(yaml.load_all(text, Loader=Loader))
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as wrong:
        words = " ".join(str(wrong).split())[:300]
        raise InputError(f"{path} is not YAML that is read: {words}", hint="correct the file") from wrong
    made = [each for each in found if each is not None]
    if not made or not all(isinstance(each, dict) for each in made):
        raise InputError(f"{path} holds no keys", hint="name a YAML file that is a mapping")
    return made


def _check_size(yaml: Any, text: str) -> None:
    """Raise a `ValueError` for too many documents, levels or values, aliases written out."""
    values_of: dict[str, int] = {}  # by anchor
    open_: list[tuple[str | None, int]] = []
    total = documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        documents += isinstance(event, yaml.DocumentStartEvent)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in values_of:
                raise ValueError(f"the alias {event.anchor!r} stands for what it is a part of")
            total += values_of[event.anchor]
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            open_.append((event.anchor, total))
            total += 1
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionEndEvent)):
            anchor, before = open_.pop()
            values_of |= {anchor: total - before} if anchor else {}
        if total > MOST_VALUES or documents > MOST_DOCUMENTS or len(open_) > DEEPEST:
            most = f"{MOST_DOCUMENTS} documents, {MOST_VALUES:,} values or {DEEPEST} levels"
            raise ValueError(f"it has more than {most}")
