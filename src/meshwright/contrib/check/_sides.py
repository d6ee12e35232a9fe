"""Weigh what a text names: a saved weighing, a run, a command, a commit, or a set of packages.

A side of a comparison is one text. "llama3-8b --on 8xH100" is what `meshwright weigh` takes. "@main" before
the words weighs in a clean copy of a commit, and "--with jax==0.12.0" among them weighs in an environment of
its own with that package. Each is weighed by a process of its own, without a shell.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, printable
from meshwright.extras import how_to_install
from meshwright.files import parsed_json, read_json, reason
from meshwright.subprocesses import own_python, working_folder

from ._figures import Figures, figures_of

SECONDS = 1800.0  # for one weighing
TAIL = 12  # lines of what a weighing that failed has said
PREFIX = "meshwright-side-"
NOT_FITTING = (0, 3)  # statuses of `weigh` with an answer
_INSTALLING = threading.Lock()  # two sides with the same packages share one environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side of a comparison is: words of `weigh`, at a commit, with packages; or a file.

    `has_program`: whether the words name what to weigh, and not only how.
    """

    text: str
    words: tuple[str, ...] = ()
    revision: str = ""
    packages: tuple[str, ...] = ()
    file: Path | None = None
    has_program: bool = True


def side_of(text: str, common: Sequence[str] = ()) -> Side:
    """Read one side.

    Args:
        common: words that every side of words has too, such as --on 8xH100.

    Raises:
        InputError: it names nothing, or its quotes are not closed.
    """
    path = Path(text)
    if os.path.isfile(path / "weighing.json"):  # of words too, which are longer than a name may be
        return Side(text=text, file=path / "weighing.json")
    if path.suffix == ".json" and (os.path.isfile(path) or not any(map(str.isspace, text))):
        return Side(text=text, file=path)  # and else the words of a script that takes such a file
    try:
        words = shlex.split(text)
    except ValueError as wrong:
        raise InputError(f"cannot read {text[:80]!r}: {wrong}", hint="close its quotes") from wrong
    revision, packages, kept = "", list[str](), list[str]()
    rest = iter(words)
    for word in rest:
        if word.startswith("@") and not kept and not revision:
            revision = word[1:] or "HEAD"
        elif word == "--with":
            packages.append(next(rest, ""))
        elif word.startswith("--with="):
            packages.append(word.removeprefix("--with="))
        else:
            kept.append(word)
    if "" in packages or any(each.startswith("-") for each in (revision, *packages)):
        hint = "write them as @main and --with jax==0.12.0"
        raise InputError(f"{text[:80]!r} names no commit or no package after its sign", hint=hint)
    if not (kept or revision or packages):
        raise InputError("one side of the comparison is empty", hint='name one: "llama3-8b --on 8xH100"')
    has_program = bool(kept) and ("--" in kept or not kept[0].startswith("-"))
    return Side(
        text=text,
        words=(*(common if has_program else ()), *kept),  # its own words come later, and so they count
        revision=revision,
        packages=tuple(packages),
        has_program=has_program,
    )


def completed(one: Side, other: Side) -> tuple[Side, Side]:
    """Return both sides, one without a program with the words of the other before its own.

    Raises:
        InputError: neither names a program.
    """
    pair: list[Side] = []
    for mine, its in ((one, other), (other, one)):
        if mine.file is None and not mine.has_program:
            if its.file is not None or not its.has_program:
                what = f"{mine.text!r} names no program, and the other side has none that could be weighed"
                raise InputError(what, hint='name one: "@main llama3-8b --on 8xH100"')
            place = its.words.index("--") if "--" in its.words else len(its.words)
            words = (*its.words[:place], *mine.words, *its.words[place:])
            mine = Side(text=mine.text, words=words, revision=mine.revision, packages=mine.packages)
        pair.append(mine)
    return pair[0], pair[1]


def weighed(side: Side, on_event: Callable[[str], object] = lambda words: None) -> Figures:
    """Return the figures of a side; it is weighed if it is no file.

    Raises:
        InputError: the file, the commit or the packages are not there; or it could not be weighed.
    """
    if side.file is not None:
        return figures_of(_read(side.file), side.text)
    with _tree_of(side) as (folder, path):
        on_event(f"weighing {side.text}")
        python = _environment(side.packages, on_event) if side.packages else ()
        tree = weigh_in(folder, side.words, path=path, python=python)
    return figures_of(tree, side.text)


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        hint = "give a file that `meshwright weigh ... --json` wrote"
        raise InputError(f"{path} cannot be read: {reason(error)}", hint=hint) from error


def weigh_in(
    folder: Path, words: Sequence[str], *, path: Sequence[str] = (), python: Sequence[str] = ()
) -> Any:
    """Weigh by a process in a folder, and return what `weigh --json` prints.

    Args:
        path: folders that come first on its module path.
        python: the command of another Python; this one if empty.

    Raises:
        InputError: the process failed; the error has the end of what it said.
    """
    variables = dict(os.environ)
    if path:
        before = variables.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = os.pathsep.join((*path, *([before] if before else ())))
    # Before the words: after a `--` among them it would be the script's.
    command = [*(python or own_python()), "-m", "meshwright", "weigh", "--json", *words]
    shown = shlex.join(("meshwright", "weigh", *words))
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as over:
        hint = "weigh it by itself to see what takes so long"
        raise InputError(f"{shown} was not done after {SECONDS:.0f} s", hint=hint) from over
    if done.returncode not in NOT_FITTING:
        said = "\n".join(printable(line) for line in done.stderr.strip().splitlines()[-TAIL:])
        what = f"{shown} could not be weighed (status {done.returncode}):\n{said}"
        raise InputError(what, hint="mend what it says; the same command alone prints all of it")
    try:
        return parsed_json(done.stdout)
    except ValueError as wrong:
        what = f"{shown} printed something else than its answer: {wrong}"
        raise InputError(what, hint="let the program print to stderr") from wrong


@contextmanager
def _tree_of(side: Side) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folder to weigh in, and the folders of a commit that replace ours on the module path."""
    here = Path.cwd()
    if not side.revision:
        yield here, ()
        return
    top = Path(_git(here, "rev-parse", "--show-toplevel").decode().strip())
    commit = _git(here, "rev-parse", "--verify", "--quiet", f"{side.revision}^{{commit}}").decode().strip()
    packed = _git(top, "archive", "--format=tar", commit)
    with working_folder(PREFIX) as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter=_with_links)
        inside = folder / here.resolve().relative_to(top.resolve())
        if not inside.is_dir():
            what = f"{here.name} is no folder of {side.revision}"
            raise InputError(what, hint="compare from a folder that both commits have")
        ours = (Path(entry).resolve() for entry in sys.path if entry)
        theirs = (
            folder / each.relative_to(top.resolve()) for each in ours if each.is_relative_to(top.resolve())
        )
        yield inside, tuple(str(each) for each in theirs if each.is_dir())


def _with_links(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """Return a member as it is extracted: a link to an absolute path stays, one out of the tree does not.

    Both are refused by the filter of the standard library, which would end the whole comparison. A file that
    lies beyond such a link is still refused.
    """
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.AbsoluteLinkError:
        return member if member.issym() else None
    except tarfile.LinkOutsideDestinationError:
        return None


def _git(folder: Path, *words: str) -> bytes:
    """Return what git prints.

    Raises:
        InputError: git is not installed, or refuses.
    """
    if shutil.which("git") is None:
        raise InputError("git is not installed, and a commit is to be weighed", hint="install git")
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        what = (
            f"git {words[0]} {words[-1][:80]} failed: {printable(said[-1]) if said else 'it names nothing'}"
        )
        raise InputError(what, hint="name a commit, a branch or a tag of this repository: @main")
    return done.stdout


def _environment(packages: Sequence[str], on_event: Callable[[str], object]) -> tuple[str, ...]:
    """Return the command of a Python that has Meshwright and the packages, in an environment that uv makes.

    It is kept in the cache. A release of jax brings the plugin for NVIDIA of the same release, and
    "python==3.13" another interpreter.

    Raises:
        InputError: uv is not installed, or finds no such packages.
    """
    from platformdirs import user_cache_path

    uv = shutil.which("uv")
    if uv is None:
        raise InputError("--with needs uv, which is not installed", hint="pip install uv")
    source = _own_source()
    wanted = [f"{source}[nvidia]" if "://" not in source else source, *packages]
    interpreter = sys.executable
    for package in packages:
        name, sign, version = package.partition("==")
        if name == "python" and sign:
            interpreter = version
            wanted.remove(package)
        elif name == "jax" and sign:
            wanted += [f"jaxlib=={version}", f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
    key = hashlib.sha256(json.dumps([wanted, interpreter, sys.version]).encode()).hexdigest()[:16]
    folder = (
        Path(os.environ.get("MESHWRIGHT_CACHE_DIR") or user_cache_path("meshwright")) / "environments" / key
    )
    python = folder / "bin" / "python"
    done = folder / ".complete"
    with _INSTALLING:
        if not done.exists():
            on_event(f"installing {' '.join(packages)}")
            for command in (
                [uv, "venv", "--clear", "--python", interpreter, str(folder)],
                [uv, "pip", "install", "--python", str(python), *wanted],
            ):
                made = subprocess.run(
                    command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
                )
                if made.returncode:
                    said = "\n".join(printable(line) for line in made.stderr.strip().splitlines()[-TAIL:])
                    raise InputError(
                        f"uv could not install {' '.join(packages)}:\n{said}",
                        hint="choose versions that agree",
                    )
            done.touch()
    return str(python), "-P"


def _own_source() -> str:
    """Return what a Python package of this Meshwright is installed from: the folder of its clone.

    Raises:
        InputError: it was not installed from a clone.
    """
    from importlib.metadata import distribution

    text = distribution("meshwright").read_text("direct_url.json")
    url = "" if text is None else str(json.loads(text).get("url", ""))
    if not url.startswith("file://"):
        what = "--with installs this version of Meshwright again, and it was not installed from a clone"
        raise InputError(what, hint=how_to_install("nvidia"))
    from urllib.parse import unquote, urlparse

    return unquote(urlparse(url).path)
