"""Read the weighings and plans that the store keeps, and the tags of all that it keeps."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from meshwright.compiler import write_cached
from meshwright.errors import InputError, printable
from meshwright.kept_records import PLANS, RUN_FILE, WEIGHINGS, store_folder
from meshwright.reportable import OneLine

from ._found_runs import read_entries
from ._run_record import TAG, TAGS, RunRecord, tags_of

LETTERS = {WEIGHINGS: "w", PLANS: "p"}
MOST_TAGS = 50


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KeptFigures(OneLine):
    """A weighing or a plan as the store keeps it: `fields` are those of its record.

    `when`: it was last made, UTC in ISO 8601.
    """

    id: str
    kind: Literal["weighing", "plan"]
    name: str
    when: str
    fields: dict[str, Any]
    tags: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Kind, name and fleet."""
        return f"{self.id} {self.kind} of {self.name} on {self.fields.get('fleet', 'an unknown fleet')}"

    @property
    def weighing(self) -> dict[str, Any]:
        """The figures of the weighing, of a plan those of its best; empty if nothing fits."""
        found = self.fields if self.kind == "weighing" else self.fields.get("best_weighing")
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def to_dict(self) -> dict[str, Any]:
        """Return the record in JSON's types."""
        return {**self.fields, "kind": self.kind, "tags": list(self.tags)}


Named = TypeVar("Named", bound=RunRecord | KeptFigures)


def kept_figures(kind: str, notes: list[str]) -> list[KeptFigures]:
    """Return the weighings or the plans of the store, the newest first; `notes` gets what was amiss."""
    found = [
        KeptFigures(
            id=entry.id,
            kind="weighing" if kind == WEIGHINGS else "plan",
            name=printable(str(entry.fields.get("name", ""))[:1000]),
            when=str(entry.fields.get("when", ""))[:40],
            fields=entry.fields,
            tags=tags_of(_tags_in_store(entry.id)),
        )
        for entry in read_entries(kind, LETTERS[kind], notes)
    ]
    return sorted(found, key=lambda each: (each.when, each.id), reverse=True)


def _tags_in_store(number: str) -> Path:
    return store_folder() / "tags" / f"{number}.json"


def change_tags(record: RunRecord | KeptFigures, add: Iterable[str], remove: Iterable[str] = ()) -> list[str]:
    """Give tags to a run, a weighing or a plan, or take them; return those that it has then.

    The tags of a run are in its folder, and move with it; those of a weighing or a plan are in the store.

    Raises:
        InputError: a tag is no word, there are too many, or the folder is not here or cannot be written.
    """
    add, remove = list(add), list(remove)
    for tag in add:
        if not TAG.fullmatch(tag):
            hint = "use up to 40 letters, digits and . : / + - _"
            raise InputError(f"{tag[:60]!r} is no tag", hint=hint)
    if isinstance(record, RunRecord) and record.state == "gone":
        raise InputError(f"{record.id} is not here: {record.words}", hint="name its folder with --in")
    file = record.folder / TAGS if isinstance(record, RunRecord) else _tags_in_store(record.id)
    with _changing(file):
        tags = sorted(({*tags_of(file)} - {*remove}) | {*add})
        if len(tags) > MOST_TAGS:
            raise InputError(f"{record.id} would have {len(tags)} tags", hint=f"keep at most {MOST_TAGS}")
        _write_tags(file, tags)
    return tags


def _write_tags(file: Path, tags: list[str]) -> None:
    import json

    from meshwright.trainer.loop import write_whole

    text = json.dumps({"tags": tags})
    if file.parent.parent == store_folder():
        write_cached(file, text)
    else:
        write_whole(file, text)


@contextmanager
def _changing(file: Path) -> Iterator[None]:
    """Hold a lock next to a file of tags: two who tag at once lose nothing."""
    lock: int | None = None
    try:
        with suppress(FileExistsError):
            if file.parent.parent == store_folder():
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(file.with_name(f".{file.name}.lock"), flags, 0o666)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    except OSError as refused:
        hint = "give yourself permission to write there, or make room"
        raise InputError(f"{file} cannot be written: {refused.strerror}", hint=hint) from refused
    finally:
        if lock is not None:
            os.close(lock)


def chosen(text: str, records: Iterable[RunRecord | KeptFigures]) -> RunRecord | KeptFigures:
    """Return the record that a text names: the beginning of its id, its folder, its name or its only tag.

    Raises:
        InputError: none is named so, or several are.
    """
    found = all_named(text, records)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(each.id or str(cast("RunRecord", each).folder) for each in found[:5])
        more = "" if len(found) <= 5 else f" and {len(found) - 5} more"
        raise InputError(f"{text!r} names {len(found)} records", hint=f"name one: {names}{more}")
    hint = "`meshwright runs --kind all` lists them; name an id, a folder, a name or a tag"
    raise InputError(f"no run, weighing or plan is named {text!r}", hint=hint)


def all_named(text: str, records: Iterable[Named]) -> list[Named]:
    """Return the records that a text names, by the first of these that any has: id, folder, name, tag."""
    known = list(records)
    path = Path(text)
    tests = (
        lambda each: each.id == text,
        lambda each: isinstance(each, RunRecord) and _is_same(path, each.folder),
        lambda each: len(text) >= 3 and each.id.startswith(text),
        lambda each: isinstance(each, RunRecord) and each.folder.name == text,
        lambda each: each.name == text,
        lambda each: text in each.tags,
    )
    tried = ([each for each in known if test(each)] for test in tests)
    return next(filter(None, tried), [])


def _is_same(path: Path, folder: Path) -> bool:
    with suppress(OSError, ValueError):
        return (path / RUN_FILE).exists() and os.path.samefile(path, folder)
    return False
