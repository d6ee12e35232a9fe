"""Export the module of a user's function in a process of its own, which the function may end or crash.

`python -m meshwright.contrib.torch_as_jax._export_process PARENT_PID FOLDER` is that process. It answers with
the program as JSON (`_exported_json`), which is checked as it is read: the user's code can change the answer.
torch is imported there alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.contrib.torch_eager import answer_apart, parts_of_function, require_torch, serve, text_in
from meshwright.subprocesses import end_after

from ._exported_json import ExportedFunction
from ._module_step import name_and_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Holds the name of a function, and its arguments as text."""

    function: str
    knobs: dict[str, str]
    search_path: tuple[str, ...]


def exported_named(
    function: str, *, name: str, knobs: Mapping[str, str], on_phase: Callable[[str], None]
) -> ExportedFunction:
    """Return the program of the module that a function returns, "package.module:function".

    Args:
        knobs: arguments of the function by name, as text.
        on_phase: called with the name of each part of the work.

    Raises:
        InputError: as `exported`; the function does not exist, fails, or ends its process; or its answer is
            no program.
    """
    from pydantic import TypeAdapter

    request = ExportRequest(function=function, knobs=dict(knobs), search_path=(os.getcwd(),))
    answer = answer_apart(__name__, TypeAdapter(ExportRequest).dump_json(request), name, on_phase)
    return ExportedFunction.from_json(text_in(answer, "exported"))


def _exported(request: ExportRequest, on_phase: Callable[[str], None]) -> dict[str, str]:
    on_phase("importing torch")
    require_torch()
    from ._export import exported

    on_phase("making the module")
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
    return {"exported": found.to_json()}


if __name__ == "__main__":
    end_after(lambda: serve(int(sys.argv[1]), Path(sys.argv[2]), ExportRequest, _exported))
