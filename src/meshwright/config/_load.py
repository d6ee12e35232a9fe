"""From a preset's name or a TOML file, and overrides, to a checked `RunConfig`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.errors import InputError, nearest_name

from ._base import is_table
from ._problems import input_error, known_keys, problems_of, variants
from ._run import RunConfig

_PRESETS = Path(__file__).parent / "presets"
_PATHS = {"path", "folder"}  # of the section `data`


def preset_names() -> list[str]:
    """Names of the presets, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def config_schema() -> dict[str, Any]:
    """JSON schema of a run's file, every section in it; `preset` may stand in for what it sets."""
    schema = RunConfig.model_json_schema()
    del schema["properties"]["name"]
    schema["properties"]["preset"] = {"enum": preset_names(), "type": "string"}
    required = [name for name in schema.pop("required") if name != "name"]
    schema["anyOf"] = [{"required": ["preset"]}, {"required": required}]
    return schema


def load_config(text: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a preset or a TOML file describes.

    Args:
        text: a preset's name, or a path ending in `.toml`, whose file may say `preset = "..."` to
            start from one. A file's `data.path` or `data.folder` is relative to the file.
        overrides: "section.key=value", applied in order; the value is TOML, or else text. A
            `data.path` or `data.folder` given here, or a preset's, is relative to the working directory.

    Where a file or an override chooses another `kind` (or `source`) of a section, the keys that only
    the old kind had go with it.

    Raises:
        InputError: an unknown preset, file, section or key, or values that are wrong, all at once.
    """
    name, tree = _read_file(Path(text)) if text.endswith(".toml") else (text, _read_preset(text))
    tree = _merged(tree, _override_tree(overrides))
    if "name" in tree:
        raise InputError(f"{name}: name is no key of a file", hint=f"the file's own name is used: {name}")
    return _checked(name, tree)


def overridden(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The same run with some keys changed; `overrides` as `load_config` takes them.

    Raises:
        InputError: an unknown section or key, or values that are wrong, all at once.
    """
    tree = config.model_dump(mode="json", exclude={"name"}, exclude_unset=True)  # a kind has its own defaults
    return _checked(config.name, _merged(tree, _override_tree(overrides)))


def _checked(name: str, tree: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate_json(json.dumps({"name": name, **tree}, default=str))
    except ValidationError as error:
        raise input_error(name, problems_of(error)) from None


def _read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise InputError(
            f"no preset is named {name!r}",
            hint=f"{nearest_name(name, preset_names())} (a file's path ends in .toml)",
        )
    tree = tomllib.loads((_PRESETS / f"{name}.toml").read_text("utf-8"))
    _make_paths_absolute(tree, Path.cwd())
    return tree


def _make_paths_absolute(tree: dict[str, Any], folder: Path) -> None:
    """Paths of the data, which are relative to `folder`, in place."""
    data = tree.get("data")
    if is_table(data):
        for key in _PATHS & data.keys():
            if isinstance(data[key], str):
                data[key] = str((folder / data[key]).resolve())


def _read_file(path: Path) -> tuple[str, dict[str, Any]]:
    """The file's stem and its tree, laid over the preset it names."""
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*.toml")]
        hint = f"in {path.parent}: {nearest_name(path.name, beside)}"
        raise InputError(f"no file {path}", hint=hint) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="name a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}", hint="mend the place it names") from None
    _make_paths_absolute(tree, path.parent)
    preset = tree.pop("preset", None)
    if preset is None:
        return path.stem, tree
    return path.stem, _merged(_read_preset(str(preset)), tree)


def _override_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as one tree, later ones over earlier ones."""
    tree: dict[str, Any] = {}
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise InputError(
                f"override {override!r} is not section.key=value", hint="as in model.num_layers=12"
            )
        if len(keys) > 2:
            raise InputError(
                f"override {override!r}: {dotted.strip()} is too deep; {'.'.join(keys[:2])} holds one value",
                hint=f"write {'.'.join(keys[:2])}={text.strip()}",
            )
        value = _override_value(text.strip())
        if keys[0] == "data" and keys[-1] in _PATHS and isinstance(value, str):
            value = str(Path(value).resolve())
        branch: dict[str, Any] = {keys[-1]: value}
        tree = _merged(tree, {keys[0]: branch} if len(keys) == 2 else branch)
    return tree


def _override_value(text: str) -> Any:
    """`text` as a TOML value; what is none, such as `adamw` or `fsdp=2,tensor=2`, is text."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tree["value"] if tree.keys() == {"value"} else text


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, key by key within sections."""
    result = dict(below)
    for section, value in above.items():
        old = below.get(section)
        if is_table(old) and is_table(value):
            result[section] = {**_kept(section, old, value), **value}
        else:
            result[section] = value
    return result


def _kept(section: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The keys of `old` that are still of use if `new` chooses another kind of the section."""
    if section not in RunConfig.model_fields:
        return old
    choice, records = variants(section)
    if not choice or new.get(choice, old.get(choice)) == old.get(choice) or str(new[choice]) not in records:
        return old
    still_known = known_keys(section, new[choice])
    return {key: value for key, value in old.items() if key in still_known}
