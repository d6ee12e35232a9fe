"""List the layouts, microbatches and settings that a run may have on a fleet, as candidates of a plan.

Imports: `_configured`, `planning`. Used by: `_configured`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.compiler import is_compiled
from meshwright.config import (
    Layout,
    RunConfig,
    TransformerModel,
    overridden,
    resolve_batch,
    schedule_problems,
)
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.measure import calibration_for, measured_runs_for
from meshwright.planning import Candidates as Table
from meshwright.planning import (
    Search,
    Space,
    estimate,
    inside_slices,
    knobs_of_run,
    parsed_knobs,
    room_of,
    simplest_rows,
    space_of,
)
from meshwright.predict import machine_of, steps_for
from meshwright.results import Weighing

from ._candidates import Candidates
from ._configured import resolved, weigh_run
from ._weighed import request_of

SECONDS_OF_A_LAYER = 0.6  # to compile it in a program without a loop; two cores, llama3-8b and 70b
REST = "rest"  # in a search: all knobs that are not named stay as the run has them
PARTS = 10  # of the steps; a phase of the schedule that does not fit into them gets one


def run_candidates(
    run: RunConfig, fleet: Fleet, search: Mapping[str, Sequence[str]], tokens: float | str | None
) -> Candidates:
    """Return what a plan of a run can choose from on a fleet.

    Args:
        search: values by knob; "rest" keeps the knobs that are not named.
        tokens: of the whole run; None for its own steps.

    Raises:
        InputError: no candidate is legal; or the run has autotuning results, which are of one step.
    """
    if run.autotune_results is not None:
        what = f"autotune_results = {run.autotune_results!r} is of one step, and a plan compares many"
        hint = "leave it out of the plan; let `train` time the kernels of what it chooses"
        raise InputError(what, hint=hint)
    changes, notes = changes_for_tokens(run, tokens)
    if run.batch.sequences_per_replica is not None:
        run = resolve_batch(run, Layout.parse(run.layout).resolve(fleet.num_devices))
    named = parsed_knobs({name: list(values) for name, values in search.items() if name != REST})
    knobs = {**(knobs_of_run(run, fleet, named) if REST in search else {}), **named}
    space = inside_slices(run, fleet, space_of(run, fleet, knobs), knobs)
    if not space.num_considered:
        raise _nothing_legal(run, fleet, space)
    machine = machine_of(fleet, calibration_for(fleet), measured=measured_runs_for(fleet))
    estimates = estimate(run, machine, space.candidates)
    steps = changes.get("steps", run.steps)
    promised = Search(space.candidates, estimates, room_of(fleet, space.candidates))
    return Candidates(
        programs=RunPrograms(config=run, fleet=fleet, candidates=space.candidates, num_steps=steps),
        search=promised,
        num_layouts=space.num_layouts,
        num_considered=space.num_considered,
        illegal=space.illegal,
        knobs=knobs,
        own=_own_row(run, fleet, space),
        simplest=simplest_rows(space.candidates, fleet, promised.promise()),
        changes=changes,
        notes=notes,
    )


def _own_row(run: RunConfig, fleet: Fleet, space: Space) -> int | None:
    """Return the candidate that the run is as it stands; None if it is none on this fleet."""
    try:
        layout = Layout.parse(run.layout).resolve(fleet.num_devices)
    except InputError:  # its layout is for another number of devices
        return None
    return space.row_of(resolve_batch(run, layout), layout)


def _nothing_legal(run: RunConfig, fleet: Fleet, space: Space) -> InputError:
    reasons = "; ".join(
        f"{rule} ({count:,})" for rule, count in sorted(space.illegal.items(), key=lambda r: -r[1])
    )
    reasons = reasons or "the sizes that are fixed do not multiply to its devices"
    hint = f"fix fewer knobs, or use a batch.sequences (now {run.batch.sequences}) that more sizes divide"
    if run.expert_domains is not None:
        hint += "; or leave expert_domains out, which the fleet and the layout then choose"
    return InputError(f"no layout of {run.name} on {fleet.name} is legal: {reasons}", hint=hint)


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


@dataclass(frozen=True, kw_only=True)
class RunPrograms:
    """The candidates of a run on a fleet.

    They are compiled with loops over layers, which takes seconds, also where the run has `layer_loop =
    "unroll"`. The plan's last compilation tries the best without.
    """

    config: RunConfig
    fleet: Fleet
    candidates: Table
    num_steps: int | None

    @property
    def are_alike(self) -> bool:
        """Return True: they share the run's model, data and optimizer."""
        return True

    def layout(self, row: int) -> Layout:
        """Return the mesh of a candidate."""
        return self.candidates.layout(row)

    def words(self, row: int) -> str:
        """Return everything but the layout in words."""
        return self.candidates.words(row)

    def overrides(self, row: int) -> dict[str, Any]:
        """Return the changes to the run that make it this candidate."""
        return self.candidates.overrides(row)

    def is_cached(self, row: int) -> bool:
        """Return whether the cache has this candidate."""
        return is_compiled(request_of(*self._resolved(row)).key())

    def weigh(self, row: int) -> Weighing:
        """Compile a candidate and account for it."""
        return weigh_run(*self._resolved(row), num_steps=self.num_steps)

    def unrolled(self, row: int) -> dict[str, Any] | None:
        """Return the overrides of a candidate without a loop over its layers; None if it has no such loop."""
        config, fleet, layout = self._resolved(row)
        model = config.model
        if not self.unrolling_seconds or layout.size("stage") > 1 or config.waits("parameters"):
            return None
        assert isinstance(model, TransformerModel), "only these have seconds of unrolling"
        if model.unrolls(
            config.layer_loop,
            remat=config.remat,
            platform=fleet.chip.platform,
            num_devices=fleet.num_devices,
            num_layers=model.num_layers,
        ):
            return None
        return {**self.overrides(row), "layer_loop": "unroll"}

    @property
    def unrolling_seconds(self) -> float:
        """About how long one program without its loop over layers compiles; 0 if there is none to try."""
        model, platform = self.config.model, self.fleet.chip.platform
        tries = platform == "cuda" and self.config.layer_loop != "keep"
        if not (tries and isinstance(model, TransformerModel)) or model.unroll:
            return 0.0
        return SECONDS_OF_A_LAYER * model.num_layers

    def weigh_with(self, overrides: Mapping[str, Any]) -> Weighing:
        """Compile the run with other overrides than a candidate's, and account for it."""
        config, layout = resolved(overridden(self.config, overrides), self.fleet)
        return weigh_run(config, self.fleet, layout, num_steps=self.num_steps)

    def _resolved(self, row: int) -> tuple[RunConfig, Fleet, Layout]:
        overrides = self.overrides(row)
        if self.config.layer_loop == "unroll":
            overrides = {**overrides, "layer_loop": "auto"}
        config, layout = resolved(overridden(self.config, overrides), self.fleet)
        return config, self.fleet, layout
