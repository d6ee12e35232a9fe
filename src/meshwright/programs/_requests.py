"""Make the request for a compile worker: the program of a configuration or function, on a fleet and layout.

No jax. Used by: `_weighed` and the kinds of program.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

from meshwright.compiler import SIMULATED, TARGET_COMPILER, Request, read_autotune_results, requested_options
from meshwright.config import Layout, RunConfig, check_slices, resolve_dispatch
from meshwright.errors import InputError
from meshwright.hardware import Fleet, check_compilable, gpu_description, memory_fraction, topology_arguments
from meshwright.ledger import allowance

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
