"""Turn pydantic's errors into sentences, and suggest what an unknown key, value, preset or file may mean.

A hint also names the key or value that another program's name stands for.

Used by: `config`, by the entry point.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from meshwright.config import (
    PROBLEMS,
    Problem,
    RunConfig,
    TransformerModel,
    input_error,
    is_table,
    known_keys,
    model_room,
    preset_names,
    run_of_preset,
    variants,
)
from meshwright.errors import InputError, near_names, nearest_name

from ._elsewhere import keys_meant, paths_ending_in, value_meant

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


def refusal(name: str, details: Sequence[ErrorDetails]) -> InputError:
    """Return pydantic's errors of the run `name` as one error in words, with dotted paths and near names."""
    return input_error(name, [problem for each in details for problem in _problems_of(each)])


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
    elsewhere = paths_ending_in(key)
    return nearest_name(key, near or here) if near or not elsewhere else _did_you_mean(elsewhere)


def _section_hint(name: str, value: Any) -> str:
    """Return a hint for an unknown section or key of a run, or for the keys of a foreign section."""
    known = known_keys("", "")
    if is_table(value):
        hints = [f"{name}.{key} is {' or '.join(meant)} here" for key in value if (meant := keys_meant(key))]
        return "; ".join(hints) if hints and not near_names(name, known) else nearest_name(name, known)
    meant = keys_meant(name) or paths_ending_in(name)
    return _did_you_mean(meant) if meant else nearest_name(name, known)


def _did_you_mean(paths: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, paths))}?"


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def near_presets(text: str) -> str:
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
    models = {name: run_of_preset(name).model for name in known}
    distance = {name: abs(math.log(model.num_parameters / max(wanted, 1))) for name, model in models.items()}
    if near := [name for name in near if distance[name] < math.log(4)]:
        return nearest_name(plain, near)
    transformers = [name for name, model in models.items() if isinstance(model, TransformerModel)]
    closest = sorted(transformers, key=distance.__getitem__)[:2]
    return f"the nearest in size are {' and '.join(closest)}; a file may start from one and change its sizes"


def file_hint(path: str) -> str:
    """Return what to do with a file that is no configuration: a notebook, a job, or any other.

    >>> file_hint("job.sbatch")
    'for a job of a cluster: meshwright gate job.sbatch; for a script: meshwright weigh --on FLEET -- COMMAND'
    """
    shown = shlex.quote(path)
    if path.endswith(".ipynb"):
        script = shlex.quote(path.removesuffix(".ipynb") + ".py")
        return (
            "weigh its step in it: mw.weigh(mw.jax_step(step, *arguments), on='8xH100'); or make it a "
            f"script: jupyter nbconvert --to script {shown}; meshwright weigh --on FLEET -- python {script}"
        )
    if path.endswith((".sh", ".sbatch", ".slurm", ".yaml", ".yml")):
        job = f"for a job of a cluster: meshwright gate {shown}"
        return f"{job}; for a script: meshwright weigh --on FLEET -- COMMAND"
    return "name a preset, a file that ends in .toml or .py, or a folder with a config.json"


def foreign_hint(tree: object) -> str:
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
