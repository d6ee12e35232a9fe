"""Read the published models that come with Meshwright: the values of their `config.json`, by their ids.

`published_models.toml` has for each id the keys that change parameters or arithmetic, the public pages from
which they were read, and the day. A key that it leaves out has the value that `transformers` takes for it.
Used by: `_named_models`, which makes a run of them.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "published_models.toml"
_BESIDE = ("sources", "day")  # keys of an entry that are not of its `config.json`


@functools.cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(_FILE.read_text("utf-8"))


def published_ids() -> list[str]:
    """Return the ids of all published models, sorted, whatever their case.

    >>> "Qwen/Qwen2.5-7B" in published_ids()
    True
    """
    return sorted(_entries(), key=str.lower)


def published_id(text: str) -> str | None:
    """Return the id that `text` is, or of whose last part it is, in any case; None if there is none.

    >>> published_id("qwen2.5-7b")
    'Qwen/Qwen2.5-7B'
    """
    names = {name.lower(): name for name in _entries()}
    names |= {name.lower().rpartition("/")[2]: name for name in _entries()}
    return names.get(text.lower())


def published_config(name: str) -> dict[str, Any]:
    """Return the `config.json` of a published model by its id.

    >>> published_config("Qwen/Qwen2.5-7B")["hidden_size"]
    3584
    """
    kept = {key: value for key, value in _entries()[name].items() if key not in _BESIDE}
    return {key: None if value == "none" else value for key, value in kept.items()}


def published_about(text: str) -> str | None:
    """Return the page of a published model, and from where and when its values were read; None without one.

    Args:
        text: as for `published_id`.
    """
    if (name := published_id(text)) is None:
        return None
    entry = _entries()[name]
    sources = "\n".join(entry["sources"])
    return f"https://huggingface.co/{name}\nValues read on {entry['day']} from\n{sources}"
