"""Remember the best candidate of each plan, so that `weigh` can name it beside a slower layout.

A file in the cache keeps the settings of the fastest winner for each pair of a run without its knobs and a
fleet. None of its figures is reported: the winner is weighed again, from the cache of compiled programs. Used
by: `_plan`, `_weigh`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..compiler import cache_lock, cache_root, is_compiled, write_cached
from ..config import AXES, Overrides, RunConfig, load_config, overridden
from ..errors import InputError, MeshwrightError
from ..files import parsed_json
from ..hardware import Fleet
from ..measure import measured_runs_for
from ..planned import Plan

SEARCHED = (
    *("layout", "layer_loop", "remat", "zero1", "offload", "pipeline", "pipeline_chunks"),
    "batch.microbatch_sequences",
)
"""The keys of a run that every plan searches. Precision is searched if asked, and stays part of the run."""

PROGRAM = re.compile("[0-9a-f]{32}")  # the key of a compiled program


def remember(plan: Plan) -> None:
    """Keep the settings of a plan's winner in the cache, unless an earlier plan found a faster one.

    A cache that cannot be written is no error.
    """
    winner, best, run = plan.winner, plan.best, plan.config
    if winner is None or best is None or best.step_seconds is None or not isinstance(run, RunConfig):
        return
    if str(winner.overrides.get("precision", run.precision)) != run.precision:
        return  # not what a weighing of this run would compare with
    path = _file(run, plan.fleet)
    fields = {"overrides": winner.overrides, "seconds": best.step_seconds, "program": best.folder.name}
    with contextlib.suppress(MeshwrightError), cache_lock(path):
        known = _read(path)
        if known is None or known["seconds"] >= best.step_seconds or not is_compiled(known["program"]):
            write_cached(path, json.dumps(fields))


def remembered(run: RunConfig, fleet: Fleet) -> dict[str, Any] | None:
    """Return the settings with which an earlier plan's winner ran; None if there is none that can be read."""
    known = _read(_file(run, fleet))
    return None if known is None else known["overrides"]


def plan_command(config: str | RunConfig, fleet: Fleet, overrides: Overrides) -> str:
    """Return the command that plans what was weighed, without a layout and what else the planner chooses.

    Overrides that change nothing are left out.

    >>> plan_command("llama3-8b", Fleet.parse("64xH100"), ["remat=full", "model.num_layers=16"])
    'meshwright plan llama3-8b --on 64xH100 --set model.num_layers=16'
    """
    if isinstance(overrides, Mapping):
        given = [f"{key}={value}" for key, value in overrides.items()]
    else:
        given = [overrides] if isinstance(overrides, str) else list(overrides)
    run = load_config(config) if isinstance(config, str) else config
    named = [text for text in given if text.partition("=")[0].strip() not in SEARCHED]
    kept = [text for text in named if _changes(run, text)]
    config = config if isinstance(config, str) else config.name
    return " ".join([f"meshwright plan {config} --on {fleet.name}", *(f"--set {text}" for text in kept)])


def _changes(run: RunConfig, override: str) -> bool:
    try:
        return overridden(run, [override]) != run
    except InputError:  # it needs another override
        return True


def _read(path: Path) -> dict[str, Any] | None:
    """Return what `remember` wrote: overrides, seconds and the program's key; None if it is not whole."""
    with contextlib.suppress(OSError, ValueError):
        fields = parsed_json(path.read_text("utf-8"))
        match fields:
            case {"overrides": dict(overrides), "seconds": float(seconds), "program": str(program)}:
                known = all(key in (*SEARCHED, "precision") for key in overrides)
                plain = all(isinstance(value, str | int | None) for value in overrides.values())
                if known and plain and 0 < seconds < math.inf and PROGRAM.fullmatch(program):
                    return fields
            case _:
                pass
    return None


def _file(run: RunConfig, fleet: Fleet) -> Path:
    """Return the file for a run without what is searched, on a fleet with its figures and measured steps."""
    fields = run.model_dump(mode="json")
    batch = {key: value for key, value in fields["batch"].items() if key != "microbatch_sequences"}
    left_out = (*SEARCHED, "steps", "schedule")  # of the whole run: one step is the same
    kept = {key: value for key, value in fields.items() if key not in left_out} | {"batch": batch}
    measured = measured_runs_for(fleet)
    parts = [json.dumps(kept, sort_keys=True), repr((fleet.name, fleet.chip)), ",".join(AXES)]
    parts += [] if measured is None else [measured.to_json()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache_root() / "plans" / f"{digest}.json"
