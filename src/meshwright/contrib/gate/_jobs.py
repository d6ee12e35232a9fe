"""Say what a job is, and find what it trains: a launcher's fleet, and the recipe of its command.

A launcher's command is searched for the trainers that are known here. Scripts of the job that a command names
are read too, and no program is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError

from ._documents import documents_of, tables_of, text_of
from ._kubernetes import is_kubernetes, kubernetes
from ._launch_lines import Launch
from ._megatron import megatron
from ._recipe import Recipe
from ._shell import Command, commands_of, is_known, shown
from ._skypilot import is_skypilot, skypilot
from ._slurm import is_sbatch, sbatch
from ._trainers import NOT_TRAINING, Configured, Places, Reading, configured, program_of, recipe_in

_SHELLS = ("bash", "sh", "zsh", "dash")
DEEPEST = 4  # scripts that name scripts


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
            program = recipe_in(path, documents[0], (), reading)
    elif path.suffix in (".toml", ".json"):
        program = recipe_in(path, tables_of(path, text), (), reading)
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
        program = _trained(str(path), commands_of(str(path), text), Places(folder=path.parent), reading, {})
    return job_of(str(path), launch, program, path.parent, reading)


def job_of(
    file: str, launch: Launch | None, program: Recipe | Configured | None, folder: Path, reading: Reading
) -> Job:
    """Return a job whose program the caller names, or else its command."""
    if reading.program:
        program = configured(file, reading.program)
    elif program is None:
        assert launch is not None, "what is no launcher has a recipe"
        places = Places(folder=folder / launch.folder, mounts=launch.mounts)
        program = _trained(file, launch.commands, places, reading, launch.variables)
    return Job(file=file, launch=launch, program=program)


def _trained(
    file: str, commands: Sequence[Command], places: Places, reading: Reading, given: Mapping[str, str]
) -> Recipe | Configured:
    """Return what the commands train.

    Raises:
        InputError: nothing that is known here, or several things.
    """
    if reading.program:
        return configured(file, reading.program)
    found: list[tuple[str, Callable[[], Recipe | Configured]]] = []
    for command in _unfolded(file, commands, places, given):
        made = program_of(file, command, places, reading)
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
    file: str, commands: Sequence[Command], places: Places, given: Mapping[str, str], depth: int = 0
) -> Iterator[Command]:
    """Yield the commands, and those of the texts and scripts that they hand to a shell."""
    given = {name: value for name, value in given.items() if not name.isdigit()}  # those of the outer script
    for command in commands:
        words = command.words
        yield command
        if depth >= DEEPEST or words[0] in NOT_TRAINING:
            continue
        for place, word in enumerate(words):
            name, rest = Path(shown(word)).name, words[place + 1 :]
            if name in _SHELLS:
                flags = [each for each in rest if each.startswith("-")]
                target = next((each for each in rest if not each.startswith("-")), "")
                is_text = any("c" in flag.lstrip("-") for flag in flags if not flag.startswith("--"))
                inner = (
                    commands_of(file, target, given, command.inherited)
                    if is_text
                    else _script(
                        places, target, given, command, rest[rest.index(target) + 1 :] if target else []
                    )
                )
                yield from _unfolded(file, inner, places, given, depth + 1)
                break
            if name == "eval":
                yield from _unfolded(
                    file,
                    commands_of(file, " ".join(rest), given, command.inherited),
                    places,
                    given,
                    depth + 1,
                )
                break
            if name.endswith(".sh") and name != "run_train.sh":
                yield from _unfolded(
                    file, _script(places, word, given, command, rest), places, given, depth + 1
                )
                break


def _script(
    places: Places, name: str, given: Mapping[str, str], command: Command, words: Sequence[str]
) -> list[Command]:
    """Return the commands of a script that is called with words."""
    path = places.find(name)
    if path is None or path.suffix != ".sh":
        return []
    known = all(map(is_known, words))
    numbered = enumerate(words, 1) if known else ((number, f"\0${number}\0") for number in range(1, 10))
    arguments = {str(place): word for place, word in numbered}
    return commands_of(str(path), text_of(path), {**given, **arguments}, command.inherited)
