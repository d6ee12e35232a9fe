"""Compare a run with the checkpoint from which it resumes.

The checkpoint of another run is refused. For the same run, changed settings are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint import Found
from ..config import Layout, RunConfig
from ..data import data_identity, identity_difference
from ..errors import InputError

# These define the state and the position in the data. If one differs, the checkpoint belongs to another run.
FIXED = ("model", "data", "optimizer.kind", "batch.sequences", "batch.sequence_length", "seed")
IDENTITY = {
    "name": str,
    "num_bytes": int,
    "hashed": str,
    "sha256": str,
}  # as `data_identity` returns it
# Not listed as changes: they do not affect what is trained.
UNTOLD = ("name", "layout", "steps", "evaluation", "checkpoint", "faults")
SHAPING = ("optimizer", "precision")  # may add or remove arrays of the state: momentum, loss scale


def about_of(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """Return what a checkpoint records about its run, as `changes_since` reads it.

    Raises:
        InputError: a file of its data cannot be read.
    """
    return {
        "config": config.model_dump(mode="json"),
        "layout": str(layout),
        "data": data_identity(config),
    }


def about_complaint(about: Mapping[str, Any]) -> str:
    """Describe the first invalid entry of a checkpoint's `about`; return "" if all are valid.

    The entries are those of `about_of`, and `data_offset`, the number of batches that rollbacks left out.
    """
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
    """Raise if a checkpoint belongs to another run.

    Args:
        config: its batch need not be resolved for a layout yet.

    Raises:
        InputError: a setting that defines the run differs; the message names the first.
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
    """Return whether the config that a checkpoint holds belongs to the run of `config`."""
    return not _fixed_that_differ(_flat(saved), _flat(config.model_dump(mode="json")))


def changes_since(found: Found, config: RunConfig, layout: Layout) -> list[str]:
    """Return the differences from the run that saved the checkpoint, each as in "layout: data=8 -> fsdp=8".

    Raises:
        InputError: the config belongs to another run, or the data files have changed.
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
    """Return whether a setting has changed on which the arrays of the state may depend."""
    was, now = _flat(about.get("config", {})), _flat(config.model_dump(mode="json"))
    return any(_within(key, SHAPING) for key in _differ(was, now))


def _fixed_that_differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings whose difference makes it another run.

    A batch size that follows from the layout is compared once it is resolved.
    """
    unresolved = now.get("batch.sequences_per_replica") is not None
    fixed = [key for key in _differ(was, now) if _within(key, FIXED)] if was else []
    return [key for key in fixed if not (unresolved and key == "batch.sequences")]


def _differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]


def _check_data(found: Found, config: RunConfig) -> None:
    """Raise if the data files are not those of the run: a position in them would mean something else."""
    was, now = found.about.get("data"), data_identity(config)
    if was is None or now is None:  # data from the seed, or a checkpoint of a release that kept no identity
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
