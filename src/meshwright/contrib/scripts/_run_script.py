"""Run a user's script in a process of its own, and take the jitted calls that it lowered.

`_script_process` is that process. It answers with the script's calls in files; nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import last_lines
from meshwright.json_records import EXACT, read_record
from meshwright.sandbox import LAST_LINES, TIME_LIMIT_SECONDS, how_it_ended, start, wait
from meshwright.subprocesses import from_child, spoiled, working_folder

MODULE = "meshwright.contrib.scripts._script_process"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRequest:
    """A script to run, or a function that returns a step.

    `command`: the script's file, or `-m` with a module, and its arguments. `function`: "module:function",
    which is called without arguments and returns (step, args) or (step, args, kwargs); empty for a script.
    """

    __pydantic_config__ = EXACT
    command: tuple[str, ...] = ()
    function: str = ""
    platform: str  # the compiler's: cuda | tpu | cpu
    topology: dict[str, Any]  # the arguments of `get_topology_desc`; empty for the CPU
    num_devices: int
    all_calls: bool = False  # weigh each jitted call, not one
    auto_meshes: bool = False  # axes of jax.make_mesh without types are Auto, as before JAX 0.9

    def to_json(self) -> str:
        """Return the JSON text that the script's process reads."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ScriptRequest:
        """Read what `to_json` returned."""
        return read_record(ScriptRequest, text, name="a script's request", hint="report it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A jitted call of a script. One that is weighed has its lowered program.

    `place`: the line that called it. `model_flops`: before the compiler, without recomputation. `files`: the
    program's texts for a compile worker, by name; empty for a call that is not weighed. `digest`,
    `num_devices`, `mesh_axes`: of the program.
    """

    __pydantic_config__ = EXACT
    name: str
    place: str
    num_calls: int
    model_flops: int
    has_backward: bool
    files: tuple[str, ...] = ()
    digest: str = ""
    num_devices: int = 0
    mesh_axes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptAnswer:
    """Holds what a script called: the chosen call first, then the others by FLOPs; or an error with its hint.

    `notes`: values that the script read on the host, and what depended on them. `shows_output`: whether the
    last lines that it printed may say more than the error.
    """

    __pydantic_config__ = EXACT
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""
    shows_output: bool = True

    def to_json(self) -> str:
        """Return the JSON text that the script's process writes."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ScriptAnswer:
        """Read what `to_json` returned."""
        return read_record(ScriptAnswer, text, name="a script's answer", hint="report it")


def run_script(
    request: ScriptRequest, *, time_limit_seconds: float = TIME_LIMIT_SECONDS
) -> tuple[ScriptAnswer, list[dict[str, str]]]:
    """Run a script until its training step repeats.

    Returns:
        What it called, and for each of its candidates the texts of its program, by the names of the files.

    Raises:
        InputError: the script fails before it calls a jitted function with matrix products, has none, or does
            not come to its second training step within the time limit. The message ends with its last lines.
    """
    with working_folder("meshwright-script-") as folder:
        (folder / "script.json").write_text(request.to_json())
        said = folder / "output"
        status = wait(start(MODULE, folder, said=said), time_limit_seconds)
        answer_text = from_child(folder / "answer.json")
        last = "".join(f"\n    {line}" for line in last_lines(said, LAST_LINES))
        last = f". Its last lines:{last}" if last else ""
        script = " ".join(request.command) or request.function
        if status is None:
            raise InputError(
                f"{script} did not come to its second training step in {time_limit_seconds:.0f} s{last}",
                hint="make its set-up shorter, or weigh the step by itself: mw.jax_step(step, *args)",
            )
        if answer_text is None:
            raise InputError(
                f"the process of {script} {how_it_ended(status)} before it called its training step{last}",
                hint="take os._exit out of it, or run it by itself to see where it crashes",
            )
        answer = ScriptAnswer.from_json(answer_text)
        if answer.error:
            last = last if answer.shows_output else ""
            is_named = request.function and request.function in answer.error
            what = f"{answer.error if is_named else f'{script}: {answer.error}'}{last}"
            raise InputError(what, hint=answer.hint)
        return answer, [
            {Path(name).name: _text(folder, name) for name in each.files} for each in answer.candidates
        ]


def _text(folder: Path, name: str) -> str:
    """Return a program's text, from the folder of its call in the script's folder."""
    path = folder / name
    if path.parent.parent != folder or ".." in path.parts or path.parent.is_symlink():
        raise spoiled(path, "it is not in a call's folder")
    text = from_child(path)
    if text is None:
        raise spoiled(path, "it was deleted")
    return text
