"""Hold what job files of all kinds share: the checked order, its limits, and the command of a process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.hardware import Fleet

PORT = 7717  # of process 0, on its own host
ATTEMPTS = 4  # of a job that broke off, before it needs a person
SAVE_SECONDS = 300  # from SIGTERM on: for one step and a checkpoint
_LONGEST_NAME = 50  # a pod's name is a label of at most 63 characters: ours, a hyphen and the index


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked order: `name` is a DNS label, and `mount` the folder above `folder` that all hosts share.

    `image`: None where nobody has named one, as none of Meshwright is published.
    """

    config_file: str
    fleet: Fleet
    name: str
    steps: int | None
    folder: str
    hours: int
    image: str | None
    volume: str

    def command(self, config_file: str) -> list[str]:
        """Return the words of the command that each process runs."""
        steps = [] if self.steps is None else ["--steps", str(self.steps)]
        return ["meshwright", "train", config_file, "--folder", self.folder, "--resume", *steps]

    @property
    def mount(self) -> str:
        """The folder that holds the run's folder."""
        return str(PurePosixPath(self.folder).parent)


def check_path(what: str, text: str) -> None:
    """Raise unless a path can stand in a command line, a comment and YAML."""
    if not text or not text.isprintable():
        raise InputError(f"the path of the {what} is {text!r}", hint="use a path of printable characters")
    if text.startswith("-"):
        raise InputError(f"the path of the {what}, {text!r}, reads as an option", hint=f"write ./{text}")


def check_word(what: str, word: str) -> None:
    """Raise unless a word can be the name of an image or a volume."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", word, re.ASCII):
        hint = "use letters, digits and . _ - / : @"
        raise InputError(f"{word!r} cannot be the name of the {what}", hint=hint)


def label(name: str) -> str:
    """Return a name as a DNS label that starts with a letter (RFC 1035): all schedulers accept it."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower(), flags=re.ASCII).strip("-")
    label = label if label[:1].isalpha() or not label else f"run-{label}"
    if not label:
        hint = "use a name with a letter from a to z or a digit"
        raise InputError(f"nothing in the name {name!r} is allowed in a job's name", hint=hint)
    return label[:_LONGEST_NAME].rstrip("-")


def check_shared_folder(job: Job, kind: str) -> None:
    """Raise unless a volume can be mounted where the run's folder lies."""
    path = PurePosixPath(job.folder)
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 3:
        raise InputError(
            f"the run's folder {job.folder!r} does not lie in a folder on which a volume can be mounted",
            hint=f"for {kind} write it as /runs/{job.name}: the volume {job.volume!r} is mounted on /runs",
        )


def comments(*lines: str) -> list[str]:
    """Return lines of text as comments, which shells and YAML write alike."""
    return [f"# {line}" for line in lines]


def attempt_numbers() -> str:
    """Return the arguments of a shell's `for` loop over attempts."""
    return " ".join(map(str, range(1, ATTEMPTS + 1)))
