"""Weigh the training step of a user's own script, which runs unchanged and without a device.

Used by: users as `mw.weigh_script`, and the command line as `meshwright weigh --on FLEET -- python train.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ..compiler import Candidate, ScriptRequest, run_script
from ..config import Layout
from ..errors import InputError
from ..hardware import Fleet
from ..results import Phase, Weighing, ignore
from ..units import format_rate
from ._requests import request_of
from ._torch_script import is_torch_script, launched_script, torch_script_error
from ._weigh import RunFacts, named_fleet, totals_of, weigh_lowered

PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
OVERRIDE = re.compile(r"[a-z][\w.]*=.*")
MOST_LISTED = 5


def weigh_script(
    command: Sequence[str],
    *,
    on: str | Fleet,
    all_calls: bool = False,
    auto_meshes: bool = False,
    simulate: bool = False,
    tokens: float | str | None = None,
    tokens_per_step: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> tuple[Weighing, ...]:
    """Run a script with `jax.devices()` answering as the fleet and arrays held as shapes; weigh its step.

    The script runs in a process of its own, until the jitted call with the most FLOPs that has a backward
    pass is called a second time. What it prints is not shown. What it writes to disk before that is written.

    Args:
        command: as for the shell: ["python", "train.py", "--lr", "3e-4"], ["train.py"], or ["-m", "package"].
        on: the fleet, as for `weigh`.
        all_calls: weigh each jitted call with matrix products, not only that one.
        auto_meshes: make the axes of `jax.make_mesh` without `axis_types` Auto, as scripts for JAX before 0.9
            expect; JAX makes them Explicit.
        simulate: let the CPU's compiler partition the program for the fleet; the script sees CPU devices.
        tokens, tokens_per_step, price_per_device_hour: as for `weigh`; they hold for each call.
        on_event: called with each `Phase`.

    Returns:
        One `Weighing`, or with `all_calls` one for each call, the chosen one first. Its ledger's
        `assumptions` list the values that the script read on the host, and the other calls.

    Raises:
        InputError: the script fails before its step, or has no jitted step; its last lines are quoted.
        CompileError: the compiler failed; the error quotes its message.
    """
    fleet = named_fleet(on, price_per_device_hour)
    script = _script_of(command, fleet.name)
    name = " ".join(script)
    known = totals_of(name, tokens_per_step, tokens, price_per_device_hour)
    request = _request(name, fleet, simulate, command=script, all_calls=all_calls)
    request = dataclasses.replace(request, auto_meshes=auto_meshes)
    on_event(Phase(name="running the script"))
    answer, texts = run_script(request)
    weighed = [(call, files) for call, files in zip(answer.candidates, texts, strict=True) if call.files]
    made: list[Weighing] = []
    for call, files in weighed:
        others = [each for each in answer.candidates if each is not call]
        made.append(
            weigh_lowered(
                f"{name}:{call.name}",
                fleet,
                num_devices=call.num_devices,
                mesh_axes=call.mesh_axes,
                digest=call.digest,
                files=files,
                simulate=simulate,
                on_event=on_event,
                says=(*answer.notes, *_others(call, others), *_without_backward(call)),
                **known,
            )
        )
    return tuple(made)


def weigh_function(
    name: str,
    fleet: Fleet,
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: RunFacts,
) -> Weighing:
    """Weigh the step that a function without a mesh returns. `name`: "module:function".

    It is called as a script runs: `jax.devices()` answers as the fleet, and arrays are shapes. `known`: its
    tokens per step and number of steps.
    """
    on_event(Phase(name="tracing"))
    answer, (files,) = run_script(_request(name, fleet, simulate, function=name))
    (step,) = answer.candidates
    return weigh_lowered(
        name,
        fleet,
        num_devices=step.num_devices,
        mesh_axes=step.mesh_axes,
        digest=step.digest,
        files=files,
        simulate=simulate,
        on_event=on_event,
        **known,
    )


def _request(
    name: str,
    fleet: Fleet,
    simulate: bool,
    *,
    command: tuple[str, ...] = (),
    function: str = "",
    all_calls: bool = False,
) -> ScriptRequest:
    target = request_of(name, fleet, Layout(axes=(("data", fleet.num_devices),)), simulate)
    return ScriptRequest(
        command=command,
        function=function,
        platform=target.platform,
        topology=target.topology,
        num_devices=fleet.num_devices,
        all_calls=all_calls,
    )


def _script_of(command: Sequence[str], fleet: str) -> tuple[str, ...]:
    """Return a script's file, or `-m` and its module, with the arguments.

    Raises:
        InputError: the command runs no Python script, or one of PyTorch, or the file does not exist.
    """
    words = list(command)
    launched = launched_script(command)
    if launched is not None and is_torch_script(Path(launched)):
        raise torch_script_error(Path(launched), fleet)
    if words and PYTHON.match(os.path.basename(words[0])):
        words = words[1:]
    shown = " ".join(command)
    if words and words[0] == "-m" and len(words) > 1:
        file = Path(*words[1].split(".")).with_suffix(".py")
        if is_torch_script(file):
            raise torch_script_error(file, fleet)
        return tuple(words)
    if not words or not words[0].endswith(".py"):
        hint = "meshwright weigh --on 8xH100 -- python train.py ARGS; without options of python, and "
        hint += "without a launcher: the script sees the whole fleet as process 0"
        overrides = [word for word in words[1:] if OVERRIDE.fullmatch(word)]
        if overrides and len(overrides) == len(words) - 1:
            hint = f"{words[0]} {' '.join(f'--set {shlex.quote(each)}' for each in overrides)}"
        raise InputError(f"{shown!r} runs no Python script", hint=hint)
    if not Path(words[0]).is_file():
        raise InputError(f"no file {words[0]}", hint=f"it is looked up in {os.getcwd()}")
    if is_torch_script(Path(words[0])):
        raise torch_script_error(Path(words[0]), fleet)
    return tuple(words)


def _others(call: Candidate, others: Sequence[Candidate]) -> tuple[str, ...]:
    """Return what else the script called, in words."""
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
