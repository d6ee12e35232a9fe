"""Read a preset, a TOML file or a run's folder, apply overrides, and return a checked `RunConfig`.

Errors of pydantic become one `InputError` in words, with dotted paths and near names. A hint also names the
key or value that another program's name stands for (names_elsewhere.toml).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import InputError, near_names, nearest_name
from meshwright.files import parsed_toml, read_json, read_toml, reason

from ._remat import POLICIES
from ._run_config import RunConfig
from ._section import PROBLEMS, Problem, Section, input_error, is_table
from ._transformer import TransformerModel

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


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def preset_about(name: str) -> str:
    """Return the sources and remarks at the top of a preset's file; of a published model, its sources."""
    if name not in preset_names() and (about := model_room().published_about(name)) is not None:
        return about
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
        return RunConfig.model_validate_json(json.dumps({"name": name, **tree}, default=str))
    except ValidationError as error:
        details = error.errors(include_url=False)
        if details[0]["type"] == "json_invalid":  # nested too deep for the parser, or half a character
            raise _unreadable(name, details[0]["msg"]) from None
        raise input_error(name, [problem for each in details for problem in _problems_of(each)]) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deeply nested tables
        raise _unreadable(name, str(error)) from None


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
        where = "no preset or folder" if "/" in name else "no preset"
        raise InputError(f"{where} is named {name!r}", hint=f"{_near_presets(name)} ({_ENDINGS})")
    tree = tomllib.loads((_PRESETS / f"{name}.toml").read_text("utf-8"))
    _make_paths_absolute(tree, Path.cwd())
    return name, tree


def _near_presets(text: str) -> str:
    """Return the start of a hint: presets with a similar name, and a similar size if the name has one."""
    plain = text.lower().rpartition("/")[2]
    published = model_room().published_ids()
    known = [*preset_names(), *(each.lower().rpartition("/")[2] for each in published)]
    meant = value_meant("preset", plain)
    if meant is not None:
        return f"did you mean {meant!r}?"
    near = near_names(plain, known)
    sized = re.search(r"(?<!\d)(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z])", plain)
    if sized is None:
        return nearest_name(plain, near or known)
    wanted = int(sized[1] or 1) * float(sized[2]) * {"m": 1e6, "b": 1e9}[sized[3]]
    models = {name: _checked(name, _read_preset(name)[1]).model for name in known}
    distance = {name: abs(math.log(model.num_parameters / max(wanted, 1))) for name, model in models.items()}
    if near := [name for name in near if distance[name] < math.log(4)]:
        return nearest_name(plain, near)
    transformers = [name for name, model in models.items() if isinstance(model, TransformerModel)]
    closest = sorted(transformers, key=distance.__getitem__)[:2]
    return f"the nearest in size are {' and '.join(closest)}; a file may start from one and change its sizes"


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
        raise InputError(f"{path} is not the configuration of a run", hint=_foreign_hint(tree))
    return tree.pop("name"), tree


def _foreign_hint(tree: object) -> str:
    """Return a hint for JSON that is not a run's; it has the sizes of a foreign model under the keys here."""
    foreign = tree if is_table(tree) else {}
    sizes = {
        meant[0]: value
        for key, value in foreign.items()
        if isinstance(value, int | float) and len(meant := keys_meant(key) or [f"model.{key}"]) == 1
    }
    fields = TransformerModel.model_fields
    known = [f"{key} = {json.dumps(sizes[key])}" for key in sizes if key.removeprefix("model.") in fields]
    hint = "name one that `meshwright train` wrote, or begin a file of your own with `meshwright init`"
    if "architectures" in foreign or "hidden_size" in foreign or "model_type" in foreign:
        family = model_room().family_of(foreign)
        hint = f'if it is of a Hugging Face model, add its "model_type": "{family or "..."}"; or {hint}'
    return f"{hint}, with {', '.join(known)}" if known else hint


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
        for key, value in overrides.items():
            if not all(key.split(".")):
                what = f"override {key!r} is not section.key"
                raise InputError(what, hint='write it as in {"model.num_layers": 12}')
            if is_table(value) and "." not in key:
                yield from override_pairs({f"{key}.{inner}": each for inner, each in value.items()})
            else:
                yield key, value
        return
    for override in [overrides] if isinstance(overrides, str) else overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not all(dotted.strip().split(".")):
            what = f"override {override!r} is not section.key=value"
            raise InputError(what, hint="write it as in model.num_layers=12")
        yield dotted.strip(), _override_value(text.strip())


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


@functools.cache
def names_elsewhere() -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Return other programs' names for each key, and their names for its values."""
    tables = tomllib.loads((_HERE / "names_elsewhere.toml").read_text("utf-8"))
    tables["values"]["remat"] |= {name: policy.elsewhere for name, policy in POLICIES.items()}
    keys = {key: names.split() for key, names in tables["keys"].items()}
    values = {
        key: {name: value for value, names in of_key.items() for name in names.split()}
        for key, of_key in tables["values"].items()
    }
    optimizers = variants("optimizer")[1].items()
    values["optimizer.kind"] = {
        name: kind for kind, record in optimizers for name in str(getattr(record, "elsewhere", "")).split()
    }
    return keys, values


def keys_meant(name: str) -> list[str]:
    """Return the dotted keys that another program calls `name`, in the order of the table."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip("-")).lower().replace("-", "_")
    return [key for key, names in names_elsewhere()[0].items() if plain in names]


def keys_named(name: str) -> list[str]:
    """Return the dotted keys that a `name` means, another program's or the last part of a key of ours."""
    return keys_meant(name) or _paths_ending_in(name.replace("-", "_"))


def value_meant(key: str, value: str) -> str | None:
    """Return the value of `key` that another program writes as `value`, or None."""
    plain = value.lower().replace("_", "-").removeprefix("torch.").removeprefix("jnp.")
    return names_elsewhere()[1].get(key, {}).get(plain)


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


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "finite_number": "a finite number",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}
"""Name what pydantic expected, by the type of its error; braces hold values of the error's context."""


def _problems_of(detail: ErrorDetails) -> list[Problem]:
    """Return one of pydantic's errors in words."""
    section, tag, key = _place(detail["loc"])
    path = ".".join(part for part in (section, key) if part)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == PROBLEMS:
        found: list[Problem] = context["problems"]
        return [(".".join(p for p in (path, below) if p), what, hint) for below, what, hint in found]
    if kind == "default_factory_not_called":
        return []  # a default that depends on a field with a problem of its own
    if kind == "missing":
        return [(path, "is missing", f"set {path}")]
    if kind == "extra_forbidden" and key:
        owner = f"{section} ({tag})" if tag else section
        return [(path, f"is not a key of {owner}", _key_hint(section, tag, key))]
    if kind == "extra_forbidden":
        return [(path, "is not a section or a key of a run", _section_hint(section, value))]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        assert is_table(value), f"pydantic looks for the kind of {path} only in a table, not in {value!r}"
        choice, records = variants(section)
        path, value, choices = f"{section}.{choice}", value.get(choice), list(records)
        if value is None:
            return [(path, "is missing", f"set it to one of {', '.join(sorted(choices))}")]
        return [_choice_problem(path, value, choices, sorted(choices))]
    if kind == "literal_error":
        choices = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
        return [_choice_problem(path, value, choices, choices)]
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else detail["msg"]
    hint = f"set it to {expected}"
    if isinstance(value, str) and value.replace("_", "").replace(".", "", 1).isdecimal():
        hint = f"write {path} = {value} without quotes"
    return [(path, f"= {_show(value)}: expected {expected}", hint)]


def _choice_problem(path: str, value: Any, choices: list[str], shown: list[str]) -> Problem:
    """Return the problem of an unknown value; the hint is its meaning elsewhere, or the nearest choice."""
    meant = value_meant(path, str(value))
    hint = nearest_name(str(value), choices) if meant is None else f"did you mean {meant!r}?"
    if meant is not None and path == "optimizer.kind" and "8bit" in str(value):
        hint = f'use {path} = {meant!r} with state.moments = "8bit"'
    return path, f"= {_show(value)}: expected one of {', '.join(shown)}", hint


def _place(loc: tuple[int | str, ...]) -> tuple[str, str, str]:
    """Return the section, the value of its choosing key, and the key of a pydantic location.

    pydantic puts that value into the location.
    """
    section, *below = [str(part) for part in loc] or [""]
    if below and section in RunConfig.model_fields and variants(section)[0]:
        return section, below[0], ".".join(below[1:])
    return section, "", ".".join(below)


def _key_hint(section: str, tag: str, key: str) -> str:
    """Return a hint for an unknown key: its name here, the kinds of section that have it, or the nearest."""
    here = known_keys(section, tag)
    owners = ((path, *path.rpartition(".")[::2]) for path in keys_meant(key))
    meant = [path for path, owner, name in owners if owner != section or name in here]
    if meant:
        return _did_you_mean([path for path in meant if path.startswith(f"{section}.")] or meant)
    choice, records = variants(section)
    kinds = [repr(kind) for kind, record in records.items() if key in record.model_fields]
    if kinds:
        what = f"it is a key of {section}.{choice} = {' or '.join(kinds)}"
        return f"{what}; choose that, or leave it out"
    near = near_names(key, here)
    elsewhere = _paths_ending_in(key)
    return nearest_name(key, near or here) if near or not elsewhere else _did_you_mean(elsewhere)


def _section_hint(name: str, value: Any) -> str:
    """Return a hint for an unknown section or key of a run, or for the keys of a foreign section."""
    known = known_keys("", "")
    if is_table(value):
        hints = [f"{name}.{key} is {' or '.join(meant)} here" for key in value if (meant := keys_meant(key))]
        return "; ".join(hints) if hints and not near_names(name, known) else nearest_name(name, known)
    meant = keys_meant(name) or _paths_ending_in(name)
    return _did_you_mean(meant) if meant else nearest_name(name, known)


def _did_you_mean(paths: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, paths))}?"


def _paths_ending_in(key: str) -> list[str]:
    """Return the paths of `key` in a run and in all kinds of its sections."""
    records = {name: variants(name)[1] for name in RunConfig.model_fields if name != "name"}
    plain = [key] if key in records and not records[key] else []
    owners = (name for name, kinds in records.items() if any(key in r.model_fields for r in kinds.values()))
    return [*plain, *(f"{owner}.{key}" for owner in owners)]


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
