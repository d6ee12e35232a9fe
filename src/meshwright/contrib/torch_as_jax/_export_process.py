"""Export the module of a user's function in a process of its own, which the function may end or crash.

`python -m meshwright.contrib.torch_as_jax._export_process PARENT_PID FOLDER` is that process. Its answer
holds the program as a pickle, which only this process and its parent have seen. torch is imported there
alone.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.contrib.torch_eager import answer_apart, parts_of_function, require_torch, serve
from meshwright.subprocesses import end_after

from ._module_program import ModuleProgram
from ._module_step import name_and_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Holds the name of a function, and its arguments as text."""

    function: str
    knobs: dict[str, str]
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFunction:
    """Holds a function's module as a program, its optimizer's name and options, and whether it has a plan."""

    program: ModuleProgram
    optimizer: tuple[str, Mapping[str, Any]]
    has_plan: bool


def exported_named(
    function: str, *, knobs: Mapping[str, str], on_phase: Callable[[str], None]
) -> ExportedFunction:
    """Return the program of the module that a function returns, "package.module:function".

    Args:
        knobs: arguments of the function by name, as text.
        on_phase: called with the name of each part of the work.

    Raises:
        InputError: as `exported`; or the function does not exist, fails, or ends its process.
    """
    from pydantic import TypeAdapter

    request = ExportRequest(function=function, knobs=dict(knobs), search_path=(os.getcwd(),))
    answer = answer_apart(__name__, TypeAdapter(ExportRequest).dump_json(request), function, on_phase)
    return pickle.loads(base64.b64decode(answer["exported"]))


def _exported(request: ExportRequest, on_phase: Callable[[str], None]) -> dict[str, str]:
    on_phase("importing torch")
    require_torch()
    from ._export import exported

    on_phase(f"calling {request.function}")
    parts = parts_of_function(request.function, request.search_path, request.knobs)
    optimizer = name_and_options(parts["optimizer"])
    on_phase("exporting the module")
    program = exported(
        parts["module"],
        parts["inputs"],
        parts["keyword_inputs"],
        loss=parts["loss"],
        compute=parts["autocast"],
    )
    found = ExportedFunction(program=program, optimizer=optimizer, has_plan=parts["parallelize"] is not None)
    return {"exported": base64.b64encode(pickle.dumps(found)).decode()}


if __name__ == "__main__":
    # The records are pickled under the package's name, not under that of the program that runs.
    from meshwright.contrib.torch_as_jax import _export_process as _apart

    end_after(lambda: serve(int(sys.argv[1]), Path(sys.argv[2]), _apart.ExportRequest, _apart._exported))
