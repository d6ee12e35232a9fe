"""Make a run out of what a plan is asked for: its steps from tokens, its data named.

Imports: `_own_data`, `config`, `predict`. Used by: `_plan`, `cli`.
"""

from __future__ import annotations

from pathlib import Path

from ..config import Overrides, RunConfig, holds_nothing, overridden, schedule_problems
from ..errors import InputError
from ..predict import steps_for
from ._own_data import config_with_data

PARTS = 10  # of the steps; a phase of the schedule that does not fit into them gets one


def changes_for_tokens(run: RunConfig, tokens: float | str | None) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the overrides with which a run reads a number of tokens, and notes on changes to its schedule.

    A warm-up or a decay that is longer than the steps becomes a tenth of them. None of it changes a byte or a
    FLOP of one step.

    >>> from meshwright.config import load_config
    >>> changes, notes = changes_for_tokens(load_config("llama3-8b"), "15B")
    >>> changes
    {'steps': 3577, 'schedule.warmup_steps': 357}
    >>> notes[0]
    'schedule.warmup_steps is 357, not 8,000: a tenth of the 3,577 steps of 15B tokens'
    """
    if tokens is None:
        return {}, ()
    steps = steps_for(tokens, run.batch.tokens_per_step)
    changes, notes = {"steps": steps}, list[str]()
    for key, least in (
        (("warmup_steps", 0), ("decay_steps", 1)) if schedule_problems(run.schedule, steps) else ()
    ):
        length = getattr(run.schedule, key, 0)
        fitting = max(steps // PARTS, least)
        if fitting < length:
            changes[f"schedule.{key}"] = fitting
            words = f"schedule.{key} is {fitting:,}, not {length:,}"
            notes.append(f"{words}: a tenth of the {steps:,} steps of {tokens} tokens")
    return changes, tuple(notes)


def run_to_write(
    config: str, data: str | Path | None, overrides: Overrides, tokens: str | None, *, for_job: bool
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run that a plan is to write, checked before anything is compiled; and notes about its data.

    Raises:
        InputError: as `config_with_data`; or a job is to run it, and nothing says its steps or its data.
    """
    run, notes = config_with_data("plan", config, data, overrides, None)
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
