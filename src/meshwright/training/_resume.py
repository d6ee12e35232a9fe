"""The comparison of a run with the checkpoint that it goes on from: the same run, and what has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint import Found
from ..config import Layout, RunConfig
from ..data import data_identity, identity_difference
from ..errors import InputError

# What the state and the data's position mean: with another value the checkpoint is of another run.
FIXED = ("model", "data", "optimizer.kind", "batch.sequences", "batch.sequence_length", "seed")
IDENTITY = {
    "name": str,
    "num_bytes": int,
    "hashed": str,
    "sha256": str,
}  # as `data_identity` gives it
UNTOLD = ("name", "layout", "steps", "evaluation", "checkpoint", "faults")  # change nothing that is trained
SHAPING = ("optimizer", "precision")  # may change which arrays the state has: a momentum, a loss scale


def about_of(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """Return what a checkpoint says of its run, as `changes_since` reads it.

    Raises:
        InputError: a file of its data cannot be read.
    """
    return {
        "config": config.model_dump(mode="json"),
        "layout": str(layout),
        "data": data_identity(config),
    }


def about_complaint(about: Mapping[str, Any]) -> str:
    """Return in words which of what `about_of` gives, with the data's position, is not as it gives it."""
    data = about.get("data")
    fits = {
        "config": isinstance(about.get("config"), dict),
        "layout": isinstance(about.get("layout"), str),
        "data_offset": isinstance(offset := about.get("data_offset"), int) and offset >= 0,
        "data": data is None
        or (
            isinstance(data, dict)
            and all(isinstance(data.get(name), kind) for name, kind in IDENTITY.items())
        ),
    }
    wrong = [name for name, is_right in fits.items() if not is_right]
    return f"manifest.json is not as a run writes it: about.{wrong[0]}" if wrong else ""


def check_same_run(found: Found, config: RunConfig) -> None:
    """Refuse to go on from a checkpoint of another run.

    Args:
        config: its batch need not be settled for a layout yet.

    Raises:
        InputError: names the first setting that is not the run's.
    """
    was, now = _flat(found.about.get("config", {})), _flat(config.model_dump(mode="json"))
    for key in _fixed_that_differ(was, now):
        raise InputError(
            f"{key} is {now.get(key)!r}, and the checkpoint of step {found.step} in {found.folder.parent} "
            f"is of a run with {was.get(key)!r}",
            hint=f"leave CONFIG and --set {key} out: the run's own settings are in its folder; or choose "
            "another folder with --folder",
        )


def is_same_run(saved: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether the config that a checkpoint holds is of the run of `config`."""
    return not _fixed_that_differ(_flat(saved), _flat(config.model_dump(mode="json")))


def changes_since(found: Found, config: RunConfig, layout: Layout) -> list[str]:
    """Return what differs from the run that saved the checkpoint, "layout: data=8 -> fsdp=8" each.

    Raises:
        InputError: the config is that of another run, or the files of data are not what they were.
    """
    check_same_run(found, config)
    was, now = _flat(found.about["config"]), _flat(config.model_dump(mode="json"))
    _check_data(found, config)
    differ = (key for key in _differ(was, now) if not _within(key, UNTOLD))
    changes = [f"{key}: {was.get(key)} -> {now.get(key)}" for key in differ]
    if found.about["layout"] != str(layout):
        changes.append(f"layout: {found.about['layout']} -> {layout}")
    return changes


def may_change_state(about: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether a setting differs on which the arrays of the state may depend."""
    was, now = _flat(about.get("config", {})), _flat(config.model_dump(mode="json"))
    return any(_within(key, SHAPING) for key in _differ(was, now))


def _fixed_that_differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that make another run; a batch that follows the layout is compared once it is settled."""
    unsettled = now.get("batch.sequences_per_replica") is not None
    fixed = [key for key in _differ(was, now) if _within(key, FIXED)] if was else []
    return [key for key in fixed if not (unsettled and key == "batch.sequences")]


def _differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]


def _check_data(found: Found, config: RunConfig) -> None:
    """Refuse files of data that are not those of the run: a position in them would mean something else."""
    was, now = found.about.get("data"), data_identity(config)
    if was is None or now is None:  # data of the seed, or a checkpoint of a release that kept none
        return
    if difference := identity_difference(was, now):
        raise InputError(
            f"{now['name']} is not what the checkpoint of step {found.step} in {found.folder.parent} was "
            f"trained on: {difference}",
            hint="bring it back as it was, or begin a new run with it in another folder",
        )


def _within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return found
