"""Weigh a run configuration: a preset, a TOML file, the folder of a model or of a run, or a `RunConfig`.

Imports: `_weighed`, `config`. Used by: `_kinds`, `_configured_plan`, and the verbs that run
configurations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.compiler import Request
from meshwright.config import (
    Layout,
    Overrides,
    RunConfig,
    check_layout,
    check_precision,
    load_config,
    on_nearest_layout,
    overridden,
    override_pairs,
    preset_names,
    resolve_batch,
)
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.predict import steps_for
from meshwright.results import Phase, Weighing, ignore

from ._program import Program, RunFacts, RunLength, Settings
from ._weighed import request_of, weigh_request

if TYPE_CHECKING:
    from ._candidates import Candidates

SEARCHED = (
    *("layout", "layer_loop", "remat", "zero1", "offload", "pipeline", "pipeline_chunks"),
    "batch.microbatch_sequences",
)
"""The keys of a run that every plan searches. Precision is searched if asked, and stays part of the run."""


@dataclass(frozen=True, slots=True)
class Configured(Program):
    """The training step of a run configuration.

    Args:
        config: a preset, a TOML file, a folder, or a `RunConfig`.
    """

    config: str | RunConfig

    @property
    def name(self) -> str:
        """The name of the preset or file."""
        return self.config if isinstance(self.config, str) else self.config.name

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Compile the run's step for a fleet, on its own layout or the nearest legal one."""
        self._check(settings.run)
        overrides = settings.overrides
        run = configured(self.config, overrides, settings.layout)
        is_given = settings.layout is not None or "layout" in _keys_of(overrides)
        run, mesh, warnings = _on_some_layout(run, fleet, is_given=is_given)
        num_steps = _steps_of(run, settings.run.tokens, is_own=not self._is_another_batch(overrides))
        how = {"simulate": settings.simulate, "on_event": settings.on_event}
        made = weigh_run(run, fleet, mesh, num_steps=num_steps, **how)
        is_planned = fleet.num_devices > 1 and not settings.simulate
        is_planned &= made.prediction is not None or made.refusal is not None
        command = plan_command(self.config, fleet, overrides) if is_planned else None
        return replace(made, warnings=warnings, plan_command=command)

    def candidates(self, fleet: Fleet, search: Mapping[str, Sequence[str]], settings: Settings) -> Candidates:
        """Return the layouts, microbatches and settings that the run may have on a fleet."""
        from ._configured_plan import run_candidates  # imports numpy

        self._check(settings.run)
        run = configured(self.config, settings.overrides, settings.layout)
        return run_candidates(run, fleet, search, settings.run.tokens)

    def check_same_step(self, sizes: Collection[int], overrides: Overrides) -> None:
        """Raise if the batch grows with the fleet."""
        run = load(self.config, overrides)
        if run.batch.sequences_per_replica is not None:
            raise InputError(
                f"{run.name} has batch.sequences_per_replica: its step is another one on each fleet",
                hint="set the global batch, batch.sequences=..., and leave sequences_per_replica out",
            )

    def _check(self, run: RunLength) -> None:
        if run.tokens_per_step is not None:
            raise InputError("a configuration takes no tokens_per_step", hint="leave tokens_per_step out")

    def _is_another_batch(self, overrides: Overrides) -> bool:
        """Return whether a preset's batch is overridden and its steps are not: they are of its own batch."""
        keys = _keys_of(overrides)
        is_preset = isinstance(self.config, str) and self.config in preset_names()
        return is_preset and "steps" not in keys and any(key.partition(".")[0] == "batch" for key in keys)


def is_configuration(text: str) -> bool:
    """Return whether a text names a configuration, and not a function: "package.module:function"."""
    return ":" not in text or os.path.exists(text)


def load(config: str | Path | RunConfig, overrides: Overrides = ()) -> RunConfig:
    """Return a run's configuration, checked.

    Args:
        config: a preset, a TOML file, the folder of an earlier run, or a `RunConfig`.
        overrides: {"section.key": value}, or a sequence of "section.key=value".

    Raises:
        InputError: an unknown preset, file, section or key, or wrong values; one error lists all of them.

    >>> load("bytes-nano", {"batch.sequences": 16, "model.num_layers": 2}).batch.sequences
    16
    """
    if isinstance(config, RunConfig):
        return overridden(config, overrides)
    if not isinstance(config, str | Path):
        what = f"{type(config).__name__} {config!r} is no configuration"
        raise InputError(what, hint="give a preset, a TOML file, the folder of a run, or a RunConfig")
    return load_config(str(config), overrides)


def configured(config: str | Path | RunConfig, overrides: Overrides, layout: str | None) -> RunConfig:
    """Return a run's configuration with its overrides and a layout; None leaves its own."""
    if layout is None:
        return load(config, overrides)
    if isinstance(overrides, Mapping):
        return load(config, {**overrides, "layout": layout})
    given = [overrides] if isinstance(overrides, str) else overrides
    return load(config, [*given, f"layout={layout}"])


def run_named(
    verb: str, config: str | Path | RunConfig, overrides: Overrides, layout: str | None = None
) -> RunConfig:
    """Return the configuration that a verb runs.

    Raises:
        InputError: it is a function, which `train` and `sweep` do not run; or as `load`.
    """
    if isinstance(config, str) and not is_configuration(config):
        raise InputError(
            f"{config} is not a configuration; `{verb}` runs only configurations",
            hint="run it with your own loop, or write a config; `meshwright presets` lists some",
        )
    return configured(config, overrides, layout)


def resolved(run: RunConfig, fleet: Fleet) -> tuple[RunConfig, Layout]:
    """Return a run with the batch that it has on a fleet, and its layout there.

    Raises:
        InputError: the layout does not cover the fleet, or the run or its precision does not suit it.
    """
    layout = Layout.parse(run.layout).resolve(fleet.num_devices)
    run = resolve_batch(run, layout)
    check_layout(run, layout)
    check_precision(run, fleet.chip)
    return run, layout


def weigh_run(
    run: RunConfig,
    fleet: Fleet,
    layout: Layout,
    *,
    num_steps: int | None,
    simulate: bool = False,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing:
    """Compile a run and layout that `resolved` returned, and account for the program."""
    request: Request = request_of(run, fleet, layout, simulate)
    facts: RunFacts = {"tokens_per_step": None, "num_steps": num_steps}
    return weigh_request(request, fleet, layout, run=run, facts=facts, on_event=on_event)


def plan_command(config: str | RunConfig, fleet: Fleet, overrides: Overrides) -> str:
    """Return the command that plans a run, without a layout and what else the planner chooses.

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
    return " ".join([f"meshwright plan {config} {fleet.options}", *(f"--set {text}" for text in kept)])


def _changes(run: RunConfig, override: str) -> bool:
    try:
        return overridden(run, [override]) != run
    except InputError:  # it needs another override
        return True


def _keys_of(overrides: Overrides) -> set[str]:
    """Return the keys that overrides set."""
    return {key for key, _ in override_pairs(overrides)}


def _steps_of(run: RunConfig, tokens: float | str | None, *, is_own: bool) -> int | None:
    """Return the steps of a whole run: from its tokens, else its own if `is_own`; None if unknown."""
    if tokens is not None:
        return steps_for(tokens, run.batch.tokens_per_step)
    return run.steps if is_own else None


def _on_some_layout(
    run: RunConfig, fleet: Fleet, *, is_given: bool
) -> tuple[RunConfig, Layout, tuple[str, ...]]:
    """Return the run and its layout on a fleet, and a warning if the layout is not the run's own.

    The run's own layout may not suit the fleet. Unless the user gave it, the nearest legal one is taken.

    Raises:
        InputError: as for `resolved`; of the run's own layout.
    """
    try:
        return *resolved(run, fleet), ()
    except InputError as refused:
        near = None if is_given else on_nearest_layout(run, fleet.num_devices)
        if near is None:
            raise
        chunks = "" if near.pipeline_chunks == run.pipeline_chunks else " and pipeline_chunks=1"
        words = f"Weighed with layout {near.layout}{chunks}, the nearest for {fleet.num_devices} devices"
        try:
            return *resolved(near, fleet), (f"{words}: {run.layout} of {run.name} does not",)
        except InputError:
            raise refused from None
