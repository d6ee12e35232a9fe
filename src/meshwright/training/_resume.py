"""Whether a checkpoint may be gone on from, and what has changed since it was made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint import Found
from ..config import Layout, RunConfig
from ..errors import InputError

# What the state and the data's position mean: with another value the checkpoint is of another run.
FIXED = ("model", "data", "optimizer.kind", "batch.sequences", "batch.sequence_length", "seed")
UNTOLD = ("name", "layout", "steps", "evaluation", "checkpoint", "faults")  # change nothing that is trained


def about_of(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """What a checkpoint says of its run, as `changes_since` reads it."""
    return {"config": config.model_dump(mode="json"), "layout": str(layout)}


def changes_since(found: Found, config: RunConfig, layout: Layout) -> list[str]:
    """What differs from the run that saved the checkpoint, "layout: data=8 -> fsdp=8" each.

    Raises:
        InputError: the config is that of another run.
    """
    was, now = _flat(found.about["config"]), _flat(config.model_dump(mode="json"))
    differ = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
    for key in differ:
        if _within(key, FIXED):
            raise InputError(
                f"{key} is {now.get(key)!r}, and the checkpoint of step {found.step} in "
                f"{found.folder.parent} is of a run with {was.get(key)!r}",
                hint="resume with the config the run was begun with (leave CONFIG out), or begin a new run",
            )
    changes = [f"{key}: {was.get(key)} -> {now.get(key)}" for key in differ if not _within(key, UNTOLD)]
    if found.about["layout"] != str(layout):
        changes.append(f"layout: {found.about['layout']} -> {layout}")
    return changes


def _within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return found
