"""Compile a program for a fleet, and account for it: the road that all compiled programs take.

It begins with the request for a compile worker (`request_of`): the program of a configuration or function, on
a fleet and layout. Neither importing it nor weighing imports jax: a worker process compiles. Used by: the
kinds of program.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright import compiler
from meshwright.compiler import (
    SIMULATED,
    TARGET_COMPILER,
    Compiled,
    Request,
    Routing,
    compile_program,
    read_autotune_results,
    requested_options,
)
from meshwright.config import Layout, RunConfig, TransformerModel, check_slices, resolve_dispatch
from meshwright.errors import InputError
from meshwright.hardware import Fleet, check_compilable, gpu_description, memory_fraction, topology_arguments
from meshwright.ledger import allowance
from meshwright.measure import known_rates
from meshwright.results import Compilation, Phase, Weighing, ignore

from ._program import RunFacts
from ._reckoned import reckoned

NO_BACKWARD = "No backward pass was found: these are the figures of a forward pass, not of a training step"
# What the step's builder does not read: the step of another load of the experts is the same program.
BESIDE_THE_STEP: Any = {
    **dict.fromkeys(("evaluation", "checkpoint", "faults", "autotune_results"), True),
    "model": {"expert_load"},
}
# By platform: the extra that installs its compiler, and its packages.
COMPILER_PACKAGES = {"cuda": ("nvidia", "jax-cuda13-pjrt", "jax-cuda13-plugin"), "tpu": ("tpu", "libtpu")}


def request_of(
    config: str | RunConfig,
    fleet: Fleet,
    layout: Layout,
    simulate: bool = False,
    knobs: Mapping[str, str] | None = None,
) -> Request:
    """Return what a compile worker is asked for: the program of a config and layout from `resolved`.

    `knobs`: keyword arguments of a foreign program's function.

    Raises:
        InputError: the layout straddles TPU slices, or no compiler is at hand for the fleet.
    """
    check_slices(fleet, layout)
    platform = fleet.chip.platform
    simulated = simulate and platform != "cpu"
    topology: dict[str, Any] = {}
    if simulated:
        platform = "cpu"
    elif platform != "cpu":
        check_compilable(fleet.chip)
        _check_compiler_package(fleet)
        beside = sum(allowance(fleet, layout.axes).values())
        share = memory_fraction(fleet.chip, beside) if platform == "cuda" else 1.0
        topology = topology_arguments(fleet, share)
    ours = isinstance(config, RunConfig)
    target = fleet.chip.target
    described = "" if target is None else gpu_description(target)
    results = read_autotune_results(config.autotune_results, platform, described) if ours else ""
    name = config.name if ours else config
    if knobs:
        name += f"({', '.join(f'{knob}={value}' for knob, value in knobs.items())})"
    return Request(
        name=name,
        fleet=fleet.name,
        platform=platform,
        source=SIMULATED if simulated else TARGET_COMPILER,
        topology=topology,
        num_devices=fleet.num_devices,
        mesh_axes=layout.axes,
        options=requested_options(
            platform,
            layout.axes,
            deterministic=ours and config.deterministic,
            eight_bits=ours and config.precision == "fp8",
            autotuning="load" if results else "off",
        ),
        autotune_results=results,
        config=_dumped(config, layout, fleet) if ours else None,
        function=None if ours else config,
        search_path=() if ours else (os.getcwd(),),
        knobs=dict(knobs or {}),
    )


def _dumped(config: RunConfig, layout: Layout, fleet: Fleet) -> dict[str, Any]:
    """Return what the step's builder reads of a run, with the domains of its experts on the fleet."""
    return resolve_dispatch(config, layout, fleet).model_dump(mode="json", exclude=BESIDE_THE_STEP)


def _check_compiler_package(fleet: Fleet) -> None:
    """Raise if the fleet's compiler is not installed; the hint names the extra that installs it."""
    platform = fleet.chip.platform
    extra, *packages = COMPILER_PACKAGES[platform]
    try:
        for package in packages:
            importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as missing:
        from meshwright.extras import how_to_install

        raise InputError(
            f"the compiler for {fleet.chip.name} is not installed: package {missing.name} is missing",
            hint=f"{how_to_install(extra)}, or add --simulate to let the CPU's compiler stand in",
        ) from missing


def weigh_request(
    request: Request,
    fleet: Fleet,
    layout: Layout | None,
    *,
    run: RunConfig | None = None,
    facts: RunFacts,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing:
    """Compile what a request asks for, and account for it.

    Args:
        layout: its mesh; None for the one that its arguments lie on.
        run: its configuration, if it has one.
        facts: the steps of the whole run; and the tokens of a step of a program without a configuration.
    """
    try:
        compiled, folder, cached = compile_program(request, on_phase=lambda name: on_event(Phase(name=name)))
    except compiler.RefusedForMemory as refused:
        return _without_program(request.name, run, fleet, layout, refused.refusal, facts)
    on_event(Phase(name="reckoning"))
    if facts["tokens_per_step"] is not None:
        compiled = dataclasses.replace(compiled, tokens_per_step=facts["tokens_per_step"])
    mesh = Layout(axes=compiled.mesh_axes) if layout is None else layout
    compiled = dataclasses.replace(compiled, routing=_routing(run, mesh, fleet))
    made = _accounted(request.name, run, fleet, mesh, compiled, folder, cached)
    return dataclasses.replace(made, num_steps=facts["num_steps"])


def weigh_lowered(
    name: str,
    fleet: Fleet,
    *,
    num_devices: int,
    mesh_axes: Sequence[tuple[str, int]],
    digest: str,
    files: Mapping[str, str],
    facts: RunFacts,
    answers: Callable[[str], str] | None = None,
    simulate: bool = False,
    on_event: Callable[[Phase], None] = ignore,
    says: Sequence[str] = (),
) -> Weighing:
    """Compile a program that is lowered already, and account for it.

    Args:
        num_devices, mesh_axes: of the mesh that its arguments lie on.
        digest: of the program and all else that the compiler reads.
        files: the program's texts by name, as a compile worker reads them.
        facts: the tokens of its step, and the steps of the whole run.
        answers: as for `compile_program`.
        says: assumptions to list with it.

    Raises:
        InputError: its mesh has another number of devices than the fleet.
    """
    alone, idle, warnings = num_devices == 1 and fleet.num_devices > 1, 0, tuple[str, ...]()
    if not alone and num_devices != fleet.num_devices:
        raise InputError(
            f"the arguments lie on a mesh of {num_devices} devices, and {fleet.name} has {fleet.num_devices}",
            hint="make a mesh of as many devices: jax.sharding.AbstractMesh needs none of them",
        )
    if alone:
        idle = fleet.num_devices - 1
        others = "the other one stands" if idle == 1 else f"{idle} stand"
        warnings = (f"One device of {fleet.name} works, and {others} idle: no argument lies on a mesh",)
        fleet = dataclasses.replace(fleet, num_hosts=1, chips_per_host=1, chips_per_domain=1)
    mesh = Layout(axes=tuple(mesh_axes) or (("data", 1),))
    request = request_of(name, fleet, mesh, simulate)
    request = dataclasses.replace(request, function=None, search_path=(), digest=digest)
    try:
        compiled, folder, cached = compile_program(
            request, files=files, on_phase=lambda name: on_event(Phase(name=name)), answers=answers
        )
    except compiler.RefusedForMemory as refused:
        made = _without_program(name, None, fleet, mesh, refused.refusal, facts)
        return dataclasses.replace(made, warnings=warnings, idle_devices=idle)
    compiled = dataclasses.replace(compiled, tokens_per_step=facts["tokens_per_step"])
    made = _accounted(name, None, fleet, mesh, compiled, folder, cached)
    return dataclasses.replace(
        made,
        figures=dataclasses.replace(made.ledger, assumptions=(*says, *made.ledger.assumptions)),
        num_steps=facts["num_steps"],
        warnings=(*warnings, *made.warnings),
        idle_devices=idle,
    )


def _without_program(
    name: str,
    run: RunConfig | None,
    fleet: Fleet,
    layout: Layout | None,
    refusal: compiler.Refusal,
    facts: RunFacts,
) -> Weighing:
    """Return the weighing of a program that the compiler refused, since it does not fit."""
    return Weighing(
        name=name,
        config=run,
        fleet=fleet,
        layout=Layout(axes=refusal.mesh_axes) if layout is None else layout,
        made_by=refusal,
        figures=None,
        prediction=None,
        no_prediction="the compiler refused the program: it does not fit",
        tokens_per_step=facts["tokens_per_step"] or refusal.tokens_per_step,
        num_steps=facts["num_steps"],
    )


def _accounted(
    name: str,
    run: RunConfig | None,
    fleet: Fleet,
    layout: Layout,
    compiled: Compiled,
    folder: Path,
    cached: bool,
) -> Weighing:
    """Return the account of a compiled program and its predicted time."""
    rates = known_rates(fleet)
    figures = reckoned(folder, compiled, fleet, rates)
    return Weighing(
        name=name,
        config=run,
        fleet=fleet,
        layout=layout,
        made_by=Compilation(compiled=compiled, folder=folder, cached=cached, rates=rates),
        figures=figures.ledger,
        prediction=figures.prediction,
        no_prediction=figures.no_prediction,
        tokens_per_step=compiled.tokens_per_step,
        warnings=() if run is not None or _has_backward(compiled) else (NO_BACKWARD,),
    )


def _routing(run: RunConfig | None, layout: Layout, fleet: Fleet) -> Routing | None:
    """Return how a run sends tokens to experts; None if it has none."""
    if run is None or not isinstance(run.model, TransformerModel):
        return None
    model = run.model
    if model.num_experts is None:
        return None
    assert model.experts_per_token is not None, "a checked model says how many experts a token is sent to"
    folded = ("tensor", "context") if run.fold_experts == "both" else (run.fold_experts,)
    ways = math.prod(layout.size(axis) for axis in {"expert", *folded} - {"none"})
    is_capped = model.capacity_factor is not None
    return Routing(
        num_experts=model.num_experts,
        num_chosen=model.experts_per_token,
        load=1.0 if is_capped else min(model.expert_load, ways),
        ways=ways,
        is_capped=is_capped,
        domains=resolve_dispatch(run, layout, fleet).expert_domains or 1,
    )


def _has_backward(compiled: Compiled) -> bool:
    """Return whether a program computes gradients, or has no products at all."""
    flops = compiled.traced_flops.by_phase
    return flops.get("backward", 0) > 0 or not any(flops.values())
