"""Read a preset, a TOML file or a run's folder, apply overrides, and return a checked `RunConfig`.

What is wrong becomes one `InputError`. A room outside the core has its words, and is loaded only then.
"""

from __future__ import annotations

import itertools
import json
import numbers
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import InputError, nearest_name
from meshwright.files import parsed_toml, read_json, read_toml, reason

from ._run_config import RunConfig
from ._section import Section, is_table

Overrides = Sequence[str] | Mapping[str, Any]
"""Changes to a config: "section.key=value" each, or a dict of {"section.key": value}."""
_HERE = Path(__file__).parent
_PRESETS = _HERE / "presets"
_PATHS = {"path", "folder", "tokenizer"}  # keys of the section `data` that hold paths
RUN_FILE = "config.json"  # in the folder of a run
_ADAPTERS = "adapter_config.json"  # in the folder of PEFT's adapters
# The batch with adapters: 2 sequences, accumulated 8 times: torchtune's recipe llama3/8B_lora_single_device.
PRETRAINING_TOKENS = 2**20  # in a step, from which a batch is no fine-tuning's: a choice
FINE_TUNING = {"batch": {"sequences_per_replica": 16, "microbatch_sequences": 2}}
_ENDINGS = "a file's path ends in .toml"


class ModelRoom(Protocol):
    """Reads the models of others, as the core needs it: a room outside, which an entry point names."""

    def published_ids(self) -> list[str]:
        """Return the ids of the models that come with Meshwright."""
        ...

    def published_about(self, text: str) -> str | None:
        """Return the sources of a published model; None if the text names none."""
        ...

    def run_of_published(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """Return the name and the tree of the run of a published model; None if the text names none."""
        ...

    def cached_config(self, name: str) -> Path | None:
        """Return the `config.json` of "organisation/model" in a local cache, or None."""
        ...

    def run_of_file(self, tree: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
        """Return the name and the tree of the run that a model's `config.json` describes."""
        ...

    def family_of(self, tree: Mapping[str, Any]) -> str | None:
        """Return the family by which a file is read, or None."""
        ...

    def text_reading(self, text: str) -> str:
        """Return what of the model's file that a text names is read as another's, or left out."""
        ...

    def is_refused(self, text: str) -> bool:
        """Return whether a text names a model of others that our configuration has no words for."""
        ...


class RefusalWords(Protocol):
    """Says what is wrong with a configuration: a room outside, which an entry point names."""

    def refusal(self, name: str, details: Sequence[ErrorDetails]) -> InputError:
        """Return pydantic's errors of the run `name` as one error in words."""
        ...

    def near_presets(self, text: str) -> str:
        """Return the start of a hint: the presets that an unknown name may mean."""
        ...

    def file_hint(self, path: str) -> str:
        """Return what to do with a file of another kind."""
        ...

    def foreign_hint(self, tree: object) -> str:
        """Return a hint for JSON that is not a run's."""
        ...


def _words() -> RefusalWords:
    from meshwright.registry import room

    return room("config_words")


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def preset_about(name: str) -> str:
    """Return what stands at the top of a preset's file; of a published model, its sources; "" of others."""
    if name not in preset_names():
        return model_room().published_about(name) or ""
    lines = (_PRESETS / f"{name}.toml").read_text("utf-8").splitlines()
    return "\n".join(line[2:] for line in itertools.takewhile(lambda each: each.startswith("#"), lines))


def load_config(text: str, overrides: Overrides = ()) -> RunConfig:
    """Return the run that a preset, a file or the folder of an earlier run describes.

    If a file or an override chooses another `kind` (or `source`) of a section, the keys that only the old
    kind had are dropped.

    Args:
        text: a preset's name; a path ending in `.toml`, whose file may say `preset = "..."` to start from
            one; the folder of a run or of a Hugging Face model, or the `config.json` in it; or the id of a
            model in the local Hugging Face cache, or of a published one, of which the last part suffices. A
            file's `data.path`, `data.folder` or `data.tokenizer` is relative to the file.
        overrides: a sequence of "section.key=value", applied in order, whose value is TOML or else text; or a
            dict {"section.key": value}. A `data.path`, `data.folder` or `data.tokenizer` from an override or
            a preset is relative to the working directory.

    >>> load_config("llama3-8b", {"model.num_layers": 16}).model.num_layers
    16
    >>> load_config("qwen2.5-7b").model.num_parameters
    7615616512

    Raises:
        InputError: an unknown preset, file, section or key, or wrong values; one error lists all of them.
    """
    changes = _override_tree(overrides)
    try:
        name, tree = _read(text)
    except FileNotFoundError:  # the working directory is gone
        raise
    except OSError as refused:  # a name longer than the system takes, or a folder that may not be entered
        what = f"{text[:60]!r} is no preset, and no file or folder: {reason(refused)}"
        raise InputError(what, hint=f"`meshwright presets` lists them; {_ENDINGS}") from refused
    if is_table(lora := changes.get("lora")) and lora.get("rank") is not None and _is_pretraining(text, tree):
        tree = _for_fine_tuning(tree, changes)
    tree = _merged(tree, changes)
    if "name" in tree:
        raise InputError(f"{name}: a file cannot set name", hint=f"a run is named after its file: {name}")
    return _checked(name, tree)


def model_room() -> ModelRoom:
    """Return the room that reads the models of others, as a module.

    Raises:
        InputError: the installed package names none.
    """
    from meshwright.registry import room  # a preset needs none of the others

    return room("hub")


def text_reading(text: str) -> str:
    """Return what of a model's file is read as another's, or left out; "" if it is read as it stands.

    Args:
        text: as for `load_config`. What cannot be read is an error there.
    """
    return "" if is_own_configuration(text) else model_room().text_reading(text)


def is_own_configuration(text: str) -> bool:
    """Return whether a text names a preset or a TOML file, or a Python file: no model of others."""
    return text in preset_names() or Path(text).suffix in (".toml", ".py")


def is_huggingface(tree: object) -> bool:
    """Return whether a JSON object is the configuration of a Hugging Face model."""
    return is_table(tree) and isinstance(tree.get("model_type"), str)


def _for_fine_tuning(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of a run without length and schedule of pretraining, and with the batch of fine-tuning.

    The batch stays if `changes` set its sequences.
    """
    tree = {key: value for key, value in tree.items() if key not in ("steps", "schedule")}
    batch = changes.get("batch")
    is_set = is_table(batch) and batch.keys() & {"sequences", "sequences_per_replica"}
    return tree if is_set else _merged(tree, FINE_TUNING)


def _is_pretraining(text: str, tree: dict[str, Any]) -> bool:
    """Return whether the batch of what `text` names is that of pretraining, and no choice of the user's."""
    path = Path(text)
    if text not in preset_names() and path.suffix == ".toml":
        return False
    if text not in preset_names() and path.exists():
        file = path / RUN_FILE if path.is_dir() else path
        if not is_huggingface(read_json(file)):
            return False
    batch = tree["batch"]
    return batch.get("sequences", 0) * batch.get("sequence_length", 0) >= PRETRAINING_TOKENS


def trainable(config: RunConfig, steps: int | None = None) -> RunConfig:
    """Return `config` with a number of steps: its own, else `steps`.

    Raises:
        InputError: both are missing, or the schedule does not fit into the steps.
    """
    if config.steps is not None:
        return config
    if steps is None:
        what = f"{config.name}: steps is missing, and a run must know when it ends"
        raise InputError(what, hint="add --steps 1000, or steps = 1000 to the file above its first section")
    return overridden(config, [f"steps={steps}"])


def overridden(config: RunConfig, overrides: Overrides) -> RunConfig:
    """Return the same run with some keys changed; `overrides` are as for `load_config`.

    >>> overridden(load_config("bytes-nano"), ["optimizer.kind=sgd"]).optimizer.kind
    'sgd'

    Raises:
        InputError: an unknown section or key, or wrong values; one error lists all of them.
    """
    tree = config.model_dump(mode="json", exclude={"name"}, exclude_unset=True)  # a kind has its own defaults
    return _checked(config.name, _merged(tree, _override_tree(overrides)))


def _checked(name: str, tree: dict[str, Any]) -> RunConfig:
    try:
        return RunConfig.model_validate_json(json.dumps({"name": name, **tree}, default=_plain))
    except ValidationError as error:
        details = error.errors(include_url=False)
        if details[0]["type"] == "json_invalid":  # nested too deep for the parser, or half a character
            raise _unreadable(name, details[0]["msg"]) from None
        raise _words().refusal(name, details) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deeply nested tables
        raise _unreadable(name, str(error)) from None


def _plain(value: object) -> object:
    """Return a value that JSON has no form of as a number, if it is one of NumPy's; any other as its text."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


def _unreadable(name: str, why: str) -> InputError:
    hint = "use sections of plain numbers, words and lists"
    return InputError(f"{name}: its values cannot be read: {why}", hint=hint)


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the tree of the run that `text` names."""
    path = Path(text)
    if path.suffix == ".toml":
        return _read_file(path)
    if "/" in text and not path.exists() and (cached := model_room().cached_config(text)) is not None:
        return path.name, _read_json(cached)[1]
    if text not in preset_names() and path.is_dir():
        path = path / RUN_FILE
    if path.suffix == ".json":
        return _read_json(path)
    return _read_preset(text)


def _read_preset(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the tree of a preset, or of a published model."""
    if name not in preset_names():
        if (run := model_room().run_of_published(name)) is not None:
            return run
        if Path(name).is_file():
            raise InputError(f"{name} is no configuration: {_ENDINGS}", hint=_words().file_hint(name))
        where = "no preset or folder" if "/" in name else "no preset"
        raise InputError(f"{where} is named {name!r}", hint=f"{_words().near_presets(name)} ({_ENDINGS})")
    tree = tomllib.loads((_PRESETS / f"{name}.toml").read_text("utf-8"))
    _make_paths_absolute(tree, Path.cwd())
    return name, tree


def run_of_preset(name: str) -> RunConfig:
    """Return the run of a preset or of a published model, whatever files there are."""
    return _checked(name, _read_preset(name)[1])


def _make_paths_absolute(tree: dict[str, Any], folder: Path) -> None:
    """Make the data paths, which are relative to `folder`, absolute in place."""
    data = tree.get("data")
    if is_table(data):
        for key in _PATHS & data.keys():
            if isinstance(data[key], str):
                data[key] = _absolute(f"data.{key}", folder, data[key])


def _absolute(key: str, folder: Path, path: str) -> str:
    """Return `path`, which is relative to `folder`, as an absolute path; the tokenizer "bytes" is none.

    Raises:
        InputError: it is not a path: it holds a zero byte, or its links form a circle.
    """
    if key == "data.tokenizer" and path == "bytes":
        return path
    try:
        return str((folder / path).resolve()) if path else path
    except (ValueError, RuntimeError) as wrong:
        raise InputError(f"{key} = {path!r} is not a path: {wrong}", hint="name a file or a folder") from None


def _read_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the file's stem and its tree, merged over the preset that it names."""
    try:
        tree = read_toml(path)
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*.toml")]
        hint = f"in {path.parent}: {nearest_name(path.name, beside)}"
        raise InputError(f"no file {path}", hint=hint) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="name a readable TOML file") from None
    except ValueError as error:  # not UTF-8, not TOML, or beyond limits
        raise InputError(f"{path} is not TOML: {error}", hint="fix the line that it names") from None
    _make_paths_absolute(tree, path.parent)
    preset = tree.pop("preset", None)
    if preset is None:
        return path.stem, tree
    if not isinstance(preset, str):
        raise InputError(f"{path}: preset is not text", hint=f'write preset = "{preset_names()[0]}"')
    return path.stem, _merged(_read_preset(preset)[1], tree)


def _read_json(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the tree of a run, from the file that `train` writes or from Hugging Face's."""
    try:
        tree = read_json(path)
    except OSError as error:
        hint = f"name a preset, a file that ends in .toml, or a run's folder, which holds {RUN_FILE}"
        if (path.parent / _ADAPTERS).is_file():
            hint = f"the folder holds adapters: name that of the model below them, which {_ADAPTERS} names"
        raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except ValueError as error:
        hint = f"name the {RUN_FILE} of a run or of a Hugging Face model; if this is one, copy it again"
        raise InputError(f"{path} is not JSON: {error}", hint=hint) from None
    if is_huggingface(tree):
        return model_room().run_of_file(tree, path)
    if not is_table(tree) or not isinstance(tree.get("name"), str):
        raise InputError(f"{path} is not the configuration of a run", hint=_words().foreign_hint(tree))
    return tree.pop("name"), tree


def _override_tree(overrides: Overrides) -> dict[str, Any]:
    """Return the overrides as one tree; later ones replace earlier ones."""
    tree: dict[str, Any] = {}
    for dotted, value in override_pairs(overrides):
        keys = dotted.split(".")
        if len(keys) > 2:
            shown, key = f"{dotted}={value}", ".".join(keys[:2])
            what = f"override {shown!r}: {dotted} is nested too deeply: {key} has one value"
            raise InputError(what, hint=f"write {key}={value}")
        if keys[0] == "data" and keys[-1] in _PATHS and isinstance(value, str | Path):
            value = _absolute(dotted, Path.cwd(), str(value))
        branch: dict[str, Any] = {keys[-1]: value}
        tree = _merged(tree, {keys[0]: branch} if len(keys) == 2 else branch)
    return tree


def override_pairs(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each override, in order."""
    if isinstance(overrides, Mapping):
        for key, value in cast("Mapping[Any, Any]", overrides).items():
            if not isinstance(key, str) or not all(key.split(".")):
                what = f"override {key!r} is not section.key"
                raise InputError(what, hint='write it as in {"model.num_layers": 12}')
            if is_table(value) and "." not in key:
                yield from override_pairs({f"{key}.{inner}": each for inner, each in value.items()})
            else:
                yield key, value
        return
    for override in override_texts(overrides):
        dotted, equals, text = override.partition("=")
        if not equals or not all(dotted.strip().split(".")):
            what = f"override {override!r} is not section.key=value"
            raise InputError(what, hint="write it as in model.num_layers=12")
        yield dotted.strip(), _override_value(text.strip())


def override_texts(overrides: object) -> list[str]:
    """Return overrides that are texts as a list; one text alone is one override.

    Raises:
        InputError: they are no texts.
    """
    given = [overrides] if isinstance(overrides, str) else overrides
    several = list(cast("Iterable[object]", given)) if isinstance(given, Iterable) else [given]
    texts = [each for each in several if isinstance(each, str)]
    if len(texts) < len(several):
        what = f"overrides = {overrides!r} are neither a dict nor texts"
        raise InputError(what, hint='write them as {"model.num_layers": 12} or ["model.num_layers=12"]')
    return texts


def _override_value(text: str) -> Any:
    """Return `text` as a TOML value, or as text if it is none, such as `adamw` or `fsdp=2,tensor=2`."""
    try:
        tree = parsed_toml(f"value = {text}")
    except ValueError:
        return text
    return tree["value"] if tree.keys() == {"value"} else text


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `above` merged over `below`, key by key within sections."""
    result = dict(below)
    for section, value in above.items():
        old = below.get(section)
        if is_table(old) and is_table(value):
            result[section] = {**_kept(section, old, value), **value}
        else:
            result[section] = value
    return result


def _kept(section: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `old` that remain valid if `new` chooses another kind of the section."""
    if section not in RunConfig.model_fields:
        return old
    choice, records = variants(section)
    chosen = new.get(choice, old.get(choice))
    if not choice or chosen == old.get(choice) or not isinstance(chosen, str) or chosen not in records:
        return old
    still_known = known_keys(section, chosen)
    return {key: value for key, value in old.items() if key in still_known}


def variants(section: str) -> tuple[str, dict[str, type[Section]]]:
    """Return the key that chooses between the records of a section, and the records by its values.

    A section with one record has the key "" and that record under "". A key that is no section has no
    records.
    """
    field = RunConfig.model_fields[section]
    if isinstance(field.discriminator, str):
        key = field.discriminator
        return key, {get_args(r.model_fields[key].annotation)[0]: r for r in get_args(field.annotation)}
    kind: Any = field.annotation
    return "", {"": kind} if isinstance(kind, type) and issubclass(kind, Section) else {}


def known_keys(section: str, tag: str) -> list[str]:
    """Return the keys of one record of a section, or of the run itself if `section` is ""."""
    if not section:
        return ["preset", *(name for name in RunConfig.model_fields if name != "name")]
    return list(variants(section)[1][tag].model_fields)
