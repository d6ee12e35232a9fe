"""Make a run out of what a plan is asked for: its steps from tokens, its data named.

Imports: `_own_data`, `programs`. Used by: `cli`.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.config import Overrides, RunConfig, holds_nothing, overridden
from meshwright.errors import InputError
from meshwright.programs import changes_for_tokens

from ._own_data import config_with_data


def run_to_write(
    config: str, data: str | Path | None, overrides: Overrides, tokens: str | None, *, for_job: bool
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run that a plan is to write, checked before anything is compiled; and notes about its data.

    Raises:
        InputError: as `config_with_data`; or a job is to run it, and nothing says its steps or its data.
    """
    run, notes = config_with_data("plan", config, data, overrides)
    planned = overridden(run, changes_for_tokens(run, tokens)[0])
    if for_job and planned.steps is None:
        raise InputError(
            f"{run.name} has no steps: nothing says when the job ends",
            hint="add --tokens 15B, or --set steps=1000",
        )
    if for_job and data is None and holds_nothing(run):
        raise InputError(
            f"{run.name} reads random tokens, and the job would learn nothing",
            hint="name your data with --data PATH; of a path that only the hosts have, --set "
            "data.source=text --set data.path=PATH; or --data synthetic, to time steps alone",
        )
    return run, notes
