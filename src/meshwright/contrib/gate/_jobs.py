"""Say what a job is, and find what it trains: a launcher's fleet, and the recipe of its command.

A launcher's command is searched for the trainers that are known here. Scripts of the job that a command names
are read too, and no program is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import InputError

from ._documents import documents_of, tables_of, text_of
from ._finetuning import (
    axolotl,
    is_axolotl,
    is_llama_factory,
    is_training_arguments,
    llama_factory,
    training_arguments,
)
from ._kubernetes import is_kubernetes, kubernetes
from ._launch import Launch
from ._megatron import megatron
from ._recipe import Recipe
from ._shell import Command, commands_of, is_known, shown
from ._skypilot import is_skypilot, skypilot
from ._slurm import is_sbatch, sbatch
from ._torchtitan import is_torchtitan, torchtitan

READ = (
    "an sbatch script, a Kubernetes Job or JobSet, a SkyPilot task, a torchtitan TOML, an axolotl or "
    "LLaMA-Factory YAML, a JSON of TrainingArguments, or Megatron-LM's arguments"
)
DEEPEST = 4  # scripts that name scripts
_PRETRAIN = ("pretrain_gpt.py", "pretrain_mamba.py")
_SHELLS = ("bash", "sh", "zsh", "dash")
_OPTIONS = {"--set": "", "--steps": "steps=", "--lora": "lora.rank=", "--layout": "", "--tokens": ""}
_SETS = ("--set", "--steps", "--lora")  # options that set a key
_PASSED = ("--on", "--folder", "--price", "--html")  # with a value that says nothing of what is trained
_FLAGS = ("--check", "--json", "--verbose", "-v", "--resume")
_NOT_TRAINING = frozenset(
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
class Job:
    """A job: its launcher, if it has one, and what it trains."""

    file: str
    launch: Launch | None
    program: Recipe | Configured


def read_job(path: Path, reading: Reading) -> Job:
    """Read a launcher with what it trains, or a recipe alone.

    Raises:
        InputError: the file is none of the kinds that are read, is not understood, or names nothing that is.
    """
    text = text_of(path)
    launch, program = None, None
    if path.suffix in (".yaml", ".yml"):
        documents = documents_of(path, text)
        if is_kubernetes(documents):
            launch = kubernetes(str(path), documents, reading.ignore)
        elif any(is_skypilot(each) for each in documents):
            launch = skypilot(str(path), documents, reading.ignore)
        else:
            program = _recipe_in(path, documents[0], (), reading)
    elif path.suffix in (".toml", ".json"):
        program = _recipe_in(path, tables_of(path, text), (), reading)
    elif is_sbatch(text):
        launch = sbatch(str(path), text, reading.ignore, reading.options)
    elif text.lstrip().startswith("--"):
        words = [
            word
            for command in commands_of(str(path), "run " + " ".join(text.split()))
            for word in command.words
        ]
        program = megatron(str(path), words[1:], reading.ignore, reading.model)
    else:
        program = _trained(str(path), commands_of(str(path), text), _Places(folder=path.parent), reading, {})
    return job_of(str(path), launch, program, path.parent, reading)


def job_of(
    file: str, launch: Launch | None, program: Recipe | Configured | None, folder: Path, reading: Reading
) -> Job:
    """Return a job whose program the caller names, or else its command."""
    if reading.program:
        program = configured(file, reading.program)
    elif program is None:
        assert launch is not None, "what is no launcher has a recipe"
        places = _Places(folder=folder / launch.folder, mounts=launch.mounts)
        program = _trained(file, launch.commands, places, reading, launch.variables)
    return Job(file=file, launch=launch, program=program)


def _recipe_in(path: Path, tree: Mapping[str, Any], words: Sequence[str], reading: Reading) -> Recipe:
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


def _trained(
    file: str, commands: Sequence[Command], places: _Places, reading: Reading, given: Mapping[str, str]
) -> Recipe | Configured:
    """Return what the commands train.

    Raises:
        InputError: nothing that is known here, or several things.
    """
    if reading.program:
        return configured(file, reading.program)
    found: list[tuple[str, Callable[[], Recipe | Configured]]] = []
    for command in _unfolded(file, commands, places, given):
        made = _program(file, command, places, reading)
        if made is not None and made[0] not in [words for words, _ in found]:
            found.append(made)
    if len(found) != 1:
        names = "; ".join(shown(words)[:80] for words, _ in found)
        what = f"{file} starts {len(found)} programs: {names}" if found else (
            f"{file} starts nothing that is read here: torchtitan, axolotl, LLaMA-Factory, Megatron-LM, or "
            "meshwright train with a configuration"
        )  # fmt: skip
        hint = "say what it trains: --program 'llama3-8b --set batch.sequences=64'"
        raise InputError(what, hint=hint)
    return found[0][1]()


def _unfolded(
    file: str, commands: Sequence[Command], places: _Places, given: Mapping[str, str], depth: int = 0
) -> Iterator[Command]:
    """Yield the commands, and those of the texts and scripts that they hand to a shell."""
    for command in commands:
        words = command.words
        yield command
        if depth >= DEEPEST or words[0] in _NOT_TRAINING:
            continue
        for place, word in enumerate(words):
            name, rest = Path(shown(word)).name, words[place + 1 :]
            if name in _SHELLS:
                flags = [each for each in rest if each.startswith("-")]
                target = next((each for each in rest if not each.startswith("-")), "")
                is_text = any("c" in flag.lstrip("-") for flag in flags if not flag.startswith("--"))
                inner = commands_of(file, target, given) if is_text else _script(places, target, given)
                yield from _unfolded(file, inner, places, given, depth + 1)
                break
            if name.endswith(".sh") and name != "run_train.sh":
                yield from _unfolded(file, _script(places, word, given), places, given, depth + 1)
                break


def _script(places: _Places, name: str, given: Mapping[str, str]) -> list[Command]:
    path = places.find(name)
    return commands_of(str(path), text_of(path), given) if path is not None and path.suffix == ".sh" else []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
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
        return next((each for each in places if each.is_file()), None)


def _program(
    file: str, command: Command, places: _Places, reading: Reading
) -> tuple[str, Callable[[], Recipe | Configured]] | None:
    """Return the words of the trainer that a command starts, and what reads it; None if it starts none."""
    words = command.words
    if words[0] in _NOT_TRAINING:
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
        if (name == "axolotl" and following == "train") or word == "axolotl.cli.train":
            rest = rest[1:] if name == "axolotl" else rest
            return line, lambda rest=rest: _by_file(file, rest, places, reading)
        if name in ("llamafactory-cli", "lmf") and following == "train":
            return line, lambda rest=rest: _by_file(file, rest[1:], places, reading)
        if name == "train.py" and following.endswith((".yaml", ".yml")):
            return line, lambda rest=rest: _by_file(file, rest, places, reading)
    return None


def _titan(file: str, words: Sequence[str], places: _Places, reading: Reading) -> Recipe:
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


def _by_file(file: str, words: Sequence[str], places: _Places, reading: Reading) -> Recipe:
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


def _opened(file: str, name: str, words: Sequence[str], places: _Places, reading: Reading) -> Recipe:
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
    return _recipe_in(path, tree, words, reading)


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
