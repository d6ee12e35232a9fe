"""Compare the facts of the processes of a run, and name each difference with its values.

The first process compares; only its answer is sent to the others.

Used by: `trainer.launch`, by the entry point.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from meshwright.errors import InputError, MeshwrightError
from meshwright.trainer.launch import Facts, SingleProcess

T = TypeVar("T")

HINTS = {
    "launch": "give every process the same number of processes",
    "settings": "start every process with the same command, environment and configuration",
    "files": "put the files on a disk that all hosts share, or copy them again to each",
    "software": "install the same packages for every process",
}
ABSENT = "absent"
MOST_FACTS, MOST_NAMES, LONGEST = 4, 2, 80  # in one message


def agreed_among(
    peers: SingleProcess, what: str, make: Callable[[], T], facts_of: Callable[[T], Facts]
) -> tuple[T, str]:
    """Return what `make` returns, and a digest of its facts, as `trainer.launch.agreed` does.

    Raises:
        InputError, MeshwrightError: as there.
    """
    made: list[T] = []
    refused: MeshwrightError | None = None
    said: dict[str, Any] = {"name": peers.name.replace(f" of {peers.count}", "")}
    try:
        made.append(make())
        said["facts"] = {**facts_of(made[0]), "launch": {"the number of processes": peers.count}}
    except MeshwrightError as error:
        refused = error
        said["error"] = [error.message, error.hint]
    answer: list[str] = peers.combined(what, said, _compared)
    if answer:
        raise InputError(answer[0], hint=answer[1])
    if refused is not None:
        raise refused
    return made[0], hashlib.sha256(json.dumps(said["facts"], sort_keys=True).encode()).hexdigest()


def _compared(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the message and the hint of the error for all processes; nothing if each goes by itself.

    If every process was refused, each reports its own error.
    """
    refused = [each for each in said if "error" in each]
    if len(refused) == len(said):
        return []
    if refused:
        message, hint = refused[0]["error"]
        names = _names([each["name"] for each in refused])
        others = "process has" if len(said) - len(refused) == 1 else "processes have"
        return [f"{names} cannot train: {message}. The other {others} no such error", hint]
    sections = [name for name in HINTS if len({_text(each["facts"].get(name)) for each in said}) > 1]
    if not sections:
        return []
    differing = [words for section in sections for words in _differences(section, said)]
    more = len(differing) - MOST_FACTS
    differing[MOST_FACTS:] = [f"{more} more"] if more > 0 else []
    hint = "; ".join(HINTS[section] for section in sections)
    return [f"the processes of this run differ: {'; '.join(differing)}", hint]


def _differences(section: str, said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe each fact of a section that differs: "seed is 0 in process 0 of 2 on a, and 1 in ..."."""
    own = [each["facts"].get(section, {}) for each in said]
    names = list(dict.fromkeys(name for facts in own for name in facts))
    differing: list[str] = []
    for name in names:
        holders: dict[str, list[str]] = {}
        for each, facts in zip(said, own, strict=True):
            holders.setdefault(_text(facts[name]) if name in facts else ABSENT, []).append(each["name"])
        if len(holders) > 1:
            values = ", and ".join(f"{_cut(text)} in {_names(here)}" for text, here in holders.items())
            differing.append(f"{name} is {values}")
    return differing


def _names(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return " and ".join([*names[:MOST_NAMES], *([f"{more} more"] if more > 0 else [])])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 + 3 :]}"
