"""Weigh a training step for a fleet that need not exist.

Used by: the other verbs, and users as `mw.weigh`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.config import Overrides, RunConfig
from meshwright.hardware import Fleet
from meshwright.kept_records import keep_weighing
from meshwright.programs import Program, RunLength, Settings, fleet_of, program_of, run_length_of
from meshwright.results import Phase, Weighing, ignore


def weigh(
    program: Program | RunConfig | str | Path,
    *,
    on: str | Fleet,
    layout: str | None = None,
    overrides: Overrides = (),
    run: RunLength | None = None,
    simulate: bool = False,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing:
    """Compile a training step for a fleet, or run it on fake tensors, and account for it.

    Args:
        program: a preset, a TOML file, the folder of a model or a run, or a `RunConfig`;
            "package.module:function"; or what `jax_step`, `torch_step` or `script` returns.
        on: the fleet in the syntax of `Fleet.parse`: "8xH100", "v5p-512", "8xCPU"; or "local". Or a `Fleet`,
            whose links, memory or peaks may differ from the catalog's: `dataclasses.replace` makes one.
        layout: mesh axes, "fsdp=64,tensor=8"; the program's own if not given.
        overrides: {"section.key": value}, or a sequence of "section.key=value"; of a function by its name,
            its arguments.
        run: the tokens and the price of the whole run, and how it is operated: when it is finished.
        simulate: let the CPU's compiler partition the program for the fleet; every figure is marked.
        on_event: called with each `Phase` of the weighing as it begins.

    Raises:
        InputError: the program, fleet, layout, tokens or price is wrong, or means nothing for this kind of
            program; the target's compiler is not installed; or a PyTorch module cannot run on fake tensors.
        CompileError: the compiler failed; the error quotes its message.

    >>> weighing = weigh("linear", on="8xH100")
    >>> weighing.fits, weighing.ledger.flops.executed >= weighing.ledger.flops.model
    (True, True)
    """
    settings = {"layout": layout, "overrides": overrides, "simulate": simulate, "on_event": on_event}
    made = weigh_unkept(program, on, run=run_length_of(run), **settings)
    return keep_weighing(made, simulated=simulate)


def weigh_unkept(program: Program | RunConfig | str | Path, on: str | Fleet, **settings: Any) -> Weighing:
    """Weigh as `weigh` does, for a verb that keeps a record of its own or none."""
    asked = Settings(**settings)
    made = program_of(program).weigh(asked.run.priced(fleet_of(on)), asked)
    return asked.run.operated(made)
