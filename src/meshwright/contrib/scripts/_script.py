"""Weigh the training step of a user's own script in JAX, which runs unchanged and without a device.

Used by: users as `mw.script`, and the command line as `meshwright weigh --on FLEET -- python train.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from meshwright.config import Layout
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.programs import (
    Program,
    Settings,
    program_named,
    request_of,
    weigh_lowered,
    without_interpreter,
)
from meshwright.results import Phase, Weighing
from meshwright.units import format_rate

from ._run_script import Candidate, ScriptRequest, run_script

OVERRIDE = re.compile(r"[a-z][\w.]*=.*")
MOST_LISTED = 5


def script(*command: str | os.PathLike[str], all_calls: bool = False, auto_meshes: bool = False) -> Program:
    """Return a training script as a program to weigh.

    It runs in a process of its own, in which `jax.devices()` answers as the fleet and arrays are shapes,
    until the jitted call with the most FLOPs that has a backward pass comes a second time. What it prints is
    not shown. What it writes to disk before that is written. The ledger's `assumptions` list the values that
    the script read on the host, and the other calls.

    Args:
        command: as for the shell: "train.py", "--lr", "3e-4"; or "-m", "package".
        all_calls: weigh each jitted call with matrix products; the others are `other_calls` of the weighing.
        auto_meshes: make the axes of `jax.make_mesh` without `axis_types` Auto, as scripts for JAX before 0.9
            expect; JAX makes them Explicit.

    Raises:
        InputError: the command runs no Python script, or the file does not exist.
    """
    words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in command]
    if not words or not all(isinstance(word, str) for word in words) or not is_command(words):
        raise InputError(
            f"{' '.join(map(str, command))!r} runs no Python script: give its file and its arguments as text",
            hint="mw.script('train.py', '--lr', '3e-4')",
        )
    return program_named(words, {"all_calls": all_calls, "auto_meshes": auto_meshes})


def is_command(words: Sequence[str]) -> bool:
    """Return whether words are the command of a script: several, or a Python file."""
    return len(words) > 1 or words[0].endswith(".py")


def make(words: Sequence[str], *, all_calls: bool = False, auto_meshes: bool = False) -> Program:
    """Return the script that a command runs.

    Raises:
        InputError: the command runs no Python script, or the file does not exist.
    """
    return Script(command=_script_of(words), all_calls=all_calls, auto_meshes=auto_meshes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script(Program):
    """A script's file, or `-m` and a module, with its arguments."""

    is_command: ClassVar[bool] = True
    command: tuple[str, ...]
    all_calls: bool = False
    auto_meshes: bool = False

    @property
    def name(self) -> str:
        """The command, without the interpreter."""
        return " ".join(self.command)

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Run the script until its training step is known, and compile that.

        Raises:
            InputError: the script fails before its step, or has no jitted step; its last lines are quoted.
        """
        hint = "change it in the script or its arguments"
        settings.refuse("a script", "layout", "overrides", hint=hint)
        facts = settings.run.facts(self.name)
        how = {"command": self.command, "all_calls": self.all_calls, "auto_meshes": self.auto_meshes}
        settings.on_event(Phase(name="running the script"))
        first, *others = _weighed(self.name, fleet, settings, facts, **how)
        return dataclasses.replace(first, other_calls=tuple(others))


def weigh_function(name: str, fleet: Fleet, settings: Settings, facts: Any) -> Weighing:
    """Weigh the step that a function without a mesh returns, which is called as on the fleet.

    Raises:
        InputError: the function does not exist, or fails, or returns something else.
    """
    settings.on_event(Phase(name="tracing"))
    (weighing,) = _weighed(name, fleet, settings, facts, function=name)
    return weighing


def _weighed(name: str, fleet: Fleet, settings: Settings, facts: Any, **what: Any) -> list[Weighing]:
    """Run a script or a function as on the fleet, and weigh its calls. `what`: fields of the request."""
    target = request_of(name, fleet, Layout(axes=(("data", fleet.num_devices),)), settings.simulate)
    on = {"platform": target.platform, "topology": target.topology, "num_devices": fleet.num_devices}
    request = ScriptRequest(**what, **on)
    answer, texts = run_script(request)
    return [
        weigh_lowered(
            f"{name}:{call.name}" if request.command else name,
            fleet,
            num_devices=call.num_devices,
            mesh_axes=call.mesh_axes,
            digest=call.digest,
            files=files,
            facts=facts,
            simulate=settings.simulate,
            on_event=settings.on_event,
            says=(*answer.notes, *_others(call, answer.candidates), *_without_backward(call))
            if request.command
            else (),
        )
        for call, files in zip(answer.candidates, texts, strict=True)
        if call.files
    ]


def _script_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return a script's file, or `-m` and its module, with the arguments.

    Raises:
        InputError: the command runs no Python script, or the file does not exist.
    """
    words = without_interpreter(command)
    shown = " ".join(command)
    if words and words[0] == "-m" and len(words) > 1:
        return tuple(words)
    if not words or not words[0].endswith(".py"):
        hint = "meshwright weigh --on 8xH100 -- python train.py ARGS; without options of python, and "
        hint += "without a launcher: the script sees the whole fleet as process 0"
        if notebooks := [word for word in words if word.endswith(".ipynb")]:
            hint = (
                f"make the notebook a script: jupyter nbconvert --to script {shlex.quote(notebooks[0])}; or "
            )
            hint += "weigh its step in it: mw.weigh(mw.jax_step(step, *arguments), on='8xH100')"
        overrides = [word for word in words[1:] if OVERRIDE.fullmatch(word)]
        if overrides and len(overrides) == len(words) - 1:
            hint = f"{words[0]} {' '.join(f'--set {shlex.quote(each)}' for each in overrides)}"
        raise InputError(f"{shown!r} runs no Python script", hint=hint)
    if not Path(words[0]).is_file():
        raise InputError(f"no file {words[0]}", hint=f"it is looked up in {os.getcwd()}")
    return tuple(words)


def _others(call: Candidate, calls: Sequence[Candidate]) -> tuple[str, ...]:
    """Return what else the script called, in words."""
    others = [each for each in calls if each is not call]
    if not others:
        return ()
    listed = [
        f"{each.name} at {each.place} ({format_rate(each.model_flops, 'FLOP')}, "
        f"{'with' if each.has_backward else 'without'} a backward pass, called {_times(each.num_calls)})"
        for each in others[:MOST_LISTED]
    ]
    if len(others) > MOST_LISTED:
        listed.append(f"{len(others) - MOST_LISTED} more")
    rest = "; ".join(listed)
    return (f"the step is {call.name}, called at {call.place}; also jitted: {rest} (--all weighs each)",)


def _without_backward(call: Candidate) -> tuple[str, ...]:
    if call.has_backward:
        return ()
    return (
        f"no call with a backward pass came before the script ended, or in a minute: {call.name} is taken",
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
