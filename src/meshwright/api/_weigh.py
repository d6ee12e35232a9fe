"""The Python face: `weigh` a step for machines that may not be there, and `train` it on those that are.

Importing this module, and weighing, import no jax: a worker process compiles.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compiler import Compiled, Request, compile_program, requested_options
from ..config import (
    Layout,
    RunConfig,
    Ticks,
    check_layout,
    check_precision,
    load_config,
    overridden,
    settled,
    ticks_of,
)
from ..errors import InputError
from ..hardware import Calibration, Fleet, Link, check_compilable, memory_fraction, topology_arguments
from ..hlo import Executions
from ..ledger import Ledger, allowance, executions_in, ledger_of
from ..measure import calibration_of_chip, calibration_of_this_machine, cautions
from ..plan import HandSum, hand_sum
from ..predict import Prediction, RunTotal, checked_price, predict, predicted_trace, run_total, steps_for

SCHEMA = 4
BESIDE_THE_STEP = {"evaluation", "checkpoint", "faults"}  # sections of a config that the program does not see
TARGET_COMPILER, SIMULATED = "target compiler", "simulated on CPU"
# What each platform's compiler comes in: the package that shows it is there, and the extra that brings it.
COMPILER_PACKAGES = {"cuda": ("jax-cuda13-pjrt", "nvidia"), "tpu": ("libtpu", "tpu")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """One step weighed for one fleet: the program, its ledger, and what it is predicted to take.

    `config` is None for a foreign program. `prediction` is None where the fleet's rates are not
    known; `no_prediction` then says why. `folder` holds the compiled program. `num_steps`: of the whole run;
    None where neither the config nor the caller says how long it is.
    """

    name: str
    config: RunConfig | None
    fleet: Fleet
    layout: Layout
    compiled: Compiled
    folder: Path
    cached: bool
    ledger: Ledger
    prediction: Prediction | None
    no_prediction: str
    num_steps: int | None = None

    @property
    def run_total(self) -> RunTotal | None:
        """Hours, device-hours and cost of the whole run; None where its steps or their time are not known."""
        tokens_per_step = self.compiled.tokens_per_step
        if self.prediction is None or self.num_steps is None or tokens_per_step is None:
            return None
        return run_total(
            self.prediction.step_seconds,
            steps=self.num_steps,
            tokens_per_step=tokens_per_step,
            num_devices=self.fleet.num_devices,
            price_per_device_hour=self.fleet.price_per_device_hour,
        )

    @property
    def fits(self) -> bool | None:
        """Whether reserved and allowance bytes are within the usable; None where those are not known."""
        return self.ledger.memory.fits

    @property
    def hand_sum(self) -> HandSum | None:
        """4 x (parameters + activations + gradients + optimizer state) beside the compiled program's bytes;
        None for a foreign program, whose layers are not known."""
        if self.config is None:
            return None
        return hand_sum(self.config, self.compiled, self.ledger.memory)

    @property
    def pipeline(self) -> Ticks | None:
        """What the stages do when; None where the layout has one stage, or the program is foreign."""
        return None if self.config is None else ticks_of(self.config, self.layout)

    def trace(self) -> dict[str, Any]:
        """The predicted step of one device, which ui.perfetto.dev opens once it is written as JSON.

        Raises:
            InputError: no time is predicted; the reason is `no_prediction`'s.
        """
        return predicted_trace(
            executions_in(self.folder), self.compiled, self.fleet, _calibration(self.fleet)
        )

    def to_dict(self) -> dict[str, Any]:
        """As `weigh --json` prints it; docs/how-weighing-works.md says what each name means."""
        compiled, by_hand, total = self.compiled, self.hand_sum, self.run_total
        target = self.fleet.chip.target
        return {
            "schema": SCHEMA,
            "config": self.name,
            "run_config": None if self.config is None else self.config.model_dump(mode="json"),
            "layout": str(self.layout),
            "sequence_length": compiled.sequence_length,
            "tokens_per_step": compiled.tokens_per_step,
            "num_parameters": compiled.num_parameters,
            "fleet": {
                "name": self.fleet.name,
                "chip": self.fleet.chip.name,
                "num_devices": self.fleet.num_devices,
                "inside_bytes_per_second": _rate(self.fleet.inside),
                "between_bytes_per_second": _rate(self.fleet.between),
            },
            "source": compiled.source,
            "fits": self.fits,
            "pipeline": None if self.pipeline is None else self.pipeline.to_dict(),
            "ledger": self.ledger.to_dict(),
            "hand_sum": None if by_hand is None else by_hand.to_dict(),
            "prediction": _prediction_dict(self.prediction),
            "no_prediction": self.no_prediction,
            "run_total": None if total is None else dataclasses.asdict(total),
            "compile": {
                "seconds": compiled.compile_seconds,
                "cached": self.cached,
                "compiler": compiled.compiler,
                "options": compiled.options,
                "target": target.origin if target and compiled.source == TARGET_COMPILER else None,
                "fingerprint": compiled.fingerprint,
            },
        }


def _rate(link: Link | None) -> float | None:
    return None if link is None else link.bytes_per_second


def _prediction_dict(prediction: Prediction | None) -> dict[str, Any] | None:
    return None if prediction is None else dataclasses.asdict(prediction)


def weigh(
    config: str | RunConfig,
    *,
    on: str | Fleet,
    layout: str | None = None,
    overrides: Sequence[str] = (),
    simulate: bool = False,
    tokens: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Weighing:
    """Compile a train step for a fleet, and account for it.

    Args:
        config: a preset, a TOML file, a `RunConfig`, or "package.module:function".
        on: the fleet, as `Fleet.parse` reads it: "8xH100", "v5p-512", "8xCPU"; or "local". Or a `Fleet`,
            whose links, memory or peaks may differ from the catalog's: `dataclasses.replace` makes one.
        layout: mesh axes, "fsdp=64,tensor=8"; the config's own unless told.
        overrides: "section.key=value" each.
        simulate: let the CPU's compiler partition the program for the fleet; every figure is marked.
        tokens: of the whole run, 15e9 or "15B"; the config's `steps` unless told.
        price_per_device_hour: in your currency; the fleet's own unless told.
        on_phase: told what is being done.

    Raises:
        InputError: the config, fleet, layout, tokens or price is wrong, or the target's compiler is not
            installed.
        CompileError: the compiler failed; its own words are in the message.
    """
    fleet = _priced(on if isinstance(on, Fleet) else fleet_of(on), price_per_device_hour)
    run = config_of_run(config, overrides, layout)
    if run is None:
        assert isinstance(config, str)
        _refuse_a_run(config, tokens, price_per_device_hour)
        mesh = Layout.parse(layout or "data=-1", free_names=True).resolve(fleet.num_devices)
    else:
        mesh = Layout.parse(run.layout).resolve(fleet.num_devices)
        run = settled(run, mesh)
        check_layout(run, mesh)
        check_precision(run, fleet.chip)
    num_steps = _steps_of_run(run, tokens)
    request = _request(config if run is None else run, fleet, mesh, simulate)
    compiled, folder, cached = compile_program(request, on_phase=on_phase)
    on_phase("reckoning")
    executions = executions_in(folder)
    ledger = ledger_of(folder, compiled, fleet, executions)
    prediction, why_not = _prediction(compiled, executions, ledger, fleet)
    return Weighing(
        name=request.name,
        config=run,
        fleet=fleet,
        layout=mesh,
        compiled=compiled,
        folder=folder,
        cached=cached,
        ledger=ledger,
        prediction=prediction,
        no_prediction=why_not,
        num_steps=num_steps,
    )


def _priced(fleet: Fleet, price: float | str | None) -> Fleet:
    """Return the fleet with the price of a device-hour that is given, or its own."""
    return fleet if price is None else dataclasses.replace(fleet, price_per_device_hour=checked_price(price))


def _steps_of_run(run: RunConfig | None, tokens: float | str | None) -> int | None:
    """Return the steps that read `tokens`, else the config's own; None for a foreign program."""
    if run is None:
        return None
    return run.steps if tokens is None else steps_for(tokens, run.batch.tokens_per_step)


def _refuse_a_run(name: str, tokens: float | str | None, price: float | str | None) -> None:
    """A foreign program says nothing of tokens or steps, so that neither hours nor cost of a run follow."""
    for what, given in (("tokens", tokens), ("a price", price)):
        if given is not None:
            raise InputError(
                f"{name} is a program of its own, and how many tokens its step reads is not known: "
                f"{what} of {given} cannot be turned into the cost of a run",
                hint="leave it out, and multiply the time of a step by the number of your steps",
            )


def fleet_of(text: str) -> Fleet:
    """The fleet of that name; "local" is what is attached."""
    if text != "local":
        return Fleet.parse(text)
    from ..training import local_fleet  # looks at the attached devices: imports jax

    return local_fleet()


def config_of_run(config: str | RunConfig, overrides: Sequence[str], layout: str | None) -> RunConfig | None:
    """The config with its overrides and layout; None for a foreign program, which takes none."""
    if isinstance(config, str) and ":" in config and not os.path.exists(config):
        if overrides:
            raise InputError(
                f"{config} is a program of its own: {overrides[0]!r} sets nothing in it",
                hint="change the program, or leave --set out",
            )
        return None
    chosen = list(overrides) if layout is None else [*overrides, f"layout={layout}"]
    return load_config(config, chosen) if isinstance(config, str) else overridden(config, chosen)


def _request(config: str | RunConfig, fleet: Fleet, layout: Layout, simulate: bool) -> Request:
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
    return Request(
        name=config.name if ours else config,
        fleet=fleet.name,
        platform=platform,
        source=SIMULATED if simulated else TARGET_COMPILER,
        topology=topology,
        num_devices=fleet.num_devices,
        mesh_axes=layout.axes,
        options=requested_options(platform, fleet.num_devices, ours and config.deterministic),
        config=config.model_dump(mode="json", exclude=BESIDE_THE_STEP) if ours else None,
        function=None if ours else config,
        search_path=() if ours else (os.getcwd(),),
    )


def _check_compiler_package(fleet: Fleet) -> None:
    """Refuse a fleet whose compiler is not installed, and name the extra that brings it."""
    platform = fleet.chip.platform
    package, extra = COMPILER_PACKAGES[platform]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as missing:
        raise InputError(
            f"the compiler for {fleet.chip.name} is not installed: package {package} is missing",
            hint=f"pip install 'meshwright[{extra}]', or add --simulate to let the CPU's compiler stand in",
        ) from missing


def _calibration(fleet: Fleet) -> Calibration | None:
    """What was measured: of a CPU always, of an accelerator where `probe` ran on one of its kind."""
    if fleet.chip.platform == "cpu":
        return calibration_of_this_machine()
    return calibration_of_chip(fleet.chip.name)


def _prediction(
    compiled: Compiled, executions: Executions, ledger: Ledger, fleet: Fleet
) -> tuple[Prediction | None, str]:
    """The prediction, or why there is none. A CPU's rates are measured once on this machine."""
    calibration = _calibration(fleet)
    try:
        doubts = () if calibration is None else cautions(calibration)
        return predict(executions, ledger, compiled, fleet, calibration, cautions=doubts), ""
    except InputError as unknown:
        return None, f"{unknown.message}; {unknown.hint}"
