"""`meshwright export`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from ._console import JsonFlag, phases, print_json, show
from ._sample import RunFolder, StepOption

EXPORT_SCHEMA = 1


def export(
    run: RunFolder,
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="The safetensors file to make.", show_default=False)
    ],
    step: StepOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Parameters of a run's checkpoint as a safetensors file, each array under its path."""
    from meshwright.checkpoint import checkpoint_of, export_parameters
    from meshwright.units import format_count

    with phases(f"exporting {run}") as on_phase:
        on_phase("verifying the checkpoint")
        found = checkpoint_of(run, step)
        on_phase("writing")
        arrays = export_parameters(found, to)
    for each in found.rejected:
        print(f"warning: the checkpoint of step {each.step} is damaged: {each.why}", file=sys.stderr)
    if as_json:
        listed = {name: {"shape": list(array.shape), "dtype": array.dtype} for name, array in arrays.items()}
        rejected = [{"step": each.step, "why": each.why} for each in found.rejected]
        answer = {"file": str(to), "step": found.step, "arrays": listed, "rejected": rejected}
        print_json({"schema": EXPORT_SCHEMA, **answer})
    else:
        num_parameters = sum(math.prod(array.shape) for array in arrays.values())
        show(f"{to}: {format_count(num_parameters)} parameters in {len(arrays)} arrays, step {found.step}")
