"""Find the trainer that a command starts, and read its recipe, from its file or its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

from ._accelerate import launched, options_of
from ._documents import documents_of, tables_of, text_of
from ._finetuning import (
    axolotl,
    is_axolotl,
    is_llama_factory,
    is_training_arguments,
    llama_factory,
    training_arguments,
)
from ._megatron import megatron
from ._recipe import Recipe
from ._shell import Command, is_known, shown
from ._torchtitan import is_torchtitan, torchtitan

READ = (
    "an sbatch script, a Kubernetes Job, JobSet or PyTorchJob, a SkyPilot task, a torchtitan TOML, an "
    "axolotl or LLaMA-Factory YAML, a JSON of TrainingArguments, or Megatron-LM's arguments"
)
_PRETRAIN = ("pretrain_gpt.py", "pretrain_mamba.py")
_OPTIONS = {"--set": "", "--steps": "steps=", "--lora": "lora.rank=", "--layout": "", "--tokens": ""}
_SETS = ("--set", "--steps", "--lora")  # options that set a key
_PASSED = ("--on", "--folder", "--price", "--html")  # with a value that says nothing of what is trained
_FLAGS = ("--check", "--json", "--verbose", "-v", "--resume")
NOT_TRAINING = frozenset(
    {"echo", "printf", "[", "[[", "test", "ls", "cat", "cp", "rm", "mkdir", "grep", "sed"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the caller says about a job beyond its file.

    `model`: what it trains, in place of what the recipe names. `ignore`: keys to weigh without. `program`:
    words of `weigh` for what it runs, in place of its command: a configuration with --set and --layout.
    `options`: of sbatch, by long names, which count more than the script's.
    """

    model: str = ""
    ignore: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A configuration of ours that a command or the caller names: what `weigh` takes."""

    name: str
    layout: str | None = None
    overrides: tuple[str, ...] = ()
    tokens: str | None = None

    @property
    def line(self) -> str:
        """Its words."""
        parts = [self.name, *(f"--set {each}" for each in self.overrides)]
        return " ".join([*parts, *([f"--layout {self.layout}"] if self.layout else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the files are that a command names: the job's folder, and what its launcher mounts."""

    folder: Path
    mounts: Mapping[str, str] = field(default_factory=dict[str, str])

    def find(self, name: str) -> Path | None:
        """Return the file of that name; None if it is not here, or its name is not known."""
        if not name or not is_known(name):
            return None
        places = [self.folder / name, Path(name)]
        for there, here in self.mounts.items():
            if name == there or name.startswith(there.rstrip("/") + "/"):
                rest = name.removeprefix(there).lstrip("/")
                places.insert(0, self.folder / here / rest if rest else self.folder / here)
        return next((each for each in places if os.path.isfile(each)), None)  # not if it is too long a name


def program_of(
    file: str, command: Command, places: Places, reading: Reading
) -> tuple[str, Callable[[], Recipe | Configured]] | None:
    """Return the words of the trainer that a command starts, and what reads it; None if it starts none."""
    words = command.words
    if words[0] in NOT_TRAINING:
        return None
    for place, word in enumerate(words):
        name, rest = Path(shown(word)).name, words[place + 1 :]
        following = rest[0] if rest else ""
        line = " ".join(words[place:])
        if name in _PRETRAIN:
            return line, lambda rest=rest: megatron(file, rest, reading.ignore, reading.model)
        if name == "meshwright" and following in ("train", "weigh"):
            return line, lambda rest=rest: configured(file, rest[1:])
        if word == "torchtitan.train" or (name == "train.py" and "torchtitan" in shown(word)):
            return line, lambda rest=rest: _titan(file, rest, places, reading)
        if name == "run_train.sh" and "CONFIG_FILE" in command.variables:
            config = ("--job.config_file", command.variables["CONFIG_FILE"], *rest)
            return " ".join(config), lambda config=config: _titan(file, config, places, reading)
        if (read := _on_hugging_face(file, words, place, places, reading)) is not None:
            options = options_of(words[:place])
            if options is None:
                return line, read
            return line, lambda read=read, options=options: launched(
                read(), options, places.find, reading.ignore
            )
    return None


def _on_hugging_face(
    file: str, words: Sequence[str], place: int, places: Places, reading: Reading
) -> Callable[[], Recipe] | None:
    """Return what reads the trainer on Hugging Face's `Trainer` that a word names; None if it names none."""
    word, rest = words[place], words[place + 1 :]
    name, following = Path(shown(word)).name, rest[0] if rest else ""
    if (name == "axolotl" and following == "train") or word == "axolotl.cli.train":
        return lambda: _by_file(file, rest[1:] if name == "axolotl" else rest, places, reading)
    if name in ("llamafactory-cli", "lmf") and following == "train":
        by_options = rest[1:] and rest[1].startswith("--")
        return lambda: (_by_options if by_options else _by_file)(file, rest[1:], places, reading)
    if not name.endswith(".py"):
        return None
    if name == "train.py" and following.endswith((".yaml", ".yml")):
        return lambda: _by_file(file, rest, places, reading)
    options = {each.partition("=")[0].replace("-", "_") for each in rest if each.startswith("--")}
    if options & {"__per_device_train_batch_size", "__gradient_accumulation_steps"}:
        return lambda: _by_options(file, rest, places, reading)
    if len(rest) == 1 and following.endswith(".json") and places.find(following) is not None:
        return lambda: _opened(file, following, (), places, reading)
    return None


def _by_options(file: str, words: Sequence[str], places: Places, reading: Reading) -> Recipe:
    """Return the recipe of options of `Trainer`'s arguments: `--max_steps 9 --bf16`.

    Raises:
        InputError: an option is not understood, or its value is not known.
    """
    tree: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            name = name.replace("-", "_")
            tree[name] = value if sign else True
        elif shown(word) in ("$@", "$*"):
            continue
        elif name:
            before = tree[name]
            tree[name] = (
                word if before is True else [*(before if isinstance(before, list) else [before]), word]
            )
    read = llama_factory if is_llama_factory(tree) else training_arguments
    return read(places.folder / Path(file).name, tree, reading.ignore, reading.model)


def _titan(file: str, words: Sequence[str], places: Places, reading: Reading) -> Recipe:
    """Return the recipe of torchtitan's command, with what its words override."""
    rest, name = list(words), ""
    for place, word in enumerate(rest):
        option, sign, value = word.partition("=")
        if option.replace("-", "_") == "__job.config_file":
            name = value if sign else (rest[place + 1] if place + 1 < len(rest) else "")
            del rest[place : place + (1 if sign else 2)]
            break
    rest = [word for word in rest if shown(word) not in ("$@", "$*")]
    if not name:
        what = f"{file} starts torchtitan without --job.config_file"
        raise InputError(what, hint="name its TOML file; configurations in Python cannot be read")
    return _opened(file, name, rest, places, reading)


def _by_file(file: str, words: Sequence[str], places: Places, reading: Reading) -> Recipe:
    """Return the recipe of the file that a command names first; launchers' own options are left out."""
    if not words or words[0].startswith("-"):
        raise InputError(
            f"{file} starts a trainer without its file", hint="name the file first, then options"
        )
    launcher = ("--launcher", "--num-processes", "--num_processes", "--num-machines", "--num_machines")
    rest = list(words[1:])
    kept: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if word.partition("=")[0] in launcher:
            rest = rest if "=" in word else rest[1:]
        else:
            kept.append(word)
    return _opened(file, words[0], kept, places, reading)


def _opened(file: str, name: str, words: Sequence[str], places: Places, reading: Reading) -> Recipe:
    """Read the recipe that a command names.

    Raises:
        InputError: it is not known, or no file here.
    """
    path = places.find(name)
    if path is None:
        what = f"{file} trains by {shown(name)[:150]}, which is no file here"
        raise InputError(
            what, hint="run from the folder that its path begins in, or gate that file with --on FLEET"
        )
    text = text_of(path)
    tree = documents_of(path, text)[0] if path.suffix in (".yaml", ".yml") else tables_of(path, text)
    return recipe_in(path, tree, words, reading)


def configured(file: str, words: Sequence[str]) -> Configured:
    """Read words of `weigh` or `train` that name a configuration.

    Raises:
        InputError: they name none, or have an option that is not read here.
    """
    name, rest = "", list(words)
    given: dict[str, list[str]] = {option: [] for option in (*_OPTIONS, *_PASSED)}
    while rest:
        word = rest.pop(0)
        option, sign, value = word.partition("=")
        if word in _FLAGS:
            continue
        if not word.startswith("-"):
            if name:
                raise InputError(
                    f"{file}: {shown(word)[:60]!r} after {name!r}", hint="name one configuration"
                )
            name = word
        elif option in given:
            given[option].append(value if sign else (rest.pop(0) if rest else ""))
        else:
            what = f"{file}: {shown(option)[:40]} is no option that is read before a launch"
            raise InputError(what, hint=f"use a configuration with {', '.join(_OPTIONS)}")
    overrides = [f"{_OPTIONS[option]}{value}" for option in _SETS for value in given[option]]
    layout, tokens = (next(iter(given[option][-1:]), None) for option in ("--layout", "--tokens"))
    if not name or not is_known(" ".join([name, *overrides, layout or "", tokens or ""])):
        what = f"{file}: {shown(' '.join(words))[:100]!r} names no configuration that is known without a run"
        raise InputError(what, hint="--program 'llama3-8b --set batch.sequences=64'")
    return Configured(name=name, layout=layout, overrides=tuple(overrides), tokens=tokens)


def recipe_in(path: Path, tree: Mapping[str, Any], words: Sequence[str], reading: Reading) -> Recipe:
    """Return the recipe of a file by its keys.

    Raises:
        InputError: its keys are those of no kind that is read.
    """
    ignore, model = reading.ignore, reading.model
    if path.suffix == ".toml" and is_torchtitan(tree):
        return torchtitan(str(path), tree, words, ignore, model)
    for is_its, read in (
        (is_axolotl, axolotl),
        (is_llama_factory, llama_factory),
        (is_training_arguments, training_arguments),
    ):
        if path.suffix != ".toml" and is_its(tree):
            if words:
                what = f"{path}: the command overrides keys by {shown(' '.join(words))[:100]}"
                raise InputError(what, hint="write them into the file, or add them as --set KEY=VALUE")
            return read(path, tree, ignore, model)
    some = ", ".join(sorted(map(str, tree))[:6])
    what = f"{path} is no job that is read; it has the keys {some[:200]}"
    raise InputError(what, hint=f"read are {READ}")
