"""Calibrate predictions by measured steps: keep the steps, fit factors to all of them, and say what changed.

Used by: `cli`, and users as `mw.calibrate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.api import weigh_unkept
from meshwright.config import Overrides, RunConfig
from meshwright.errors import InputError
from meshwright.files import read_json, read_text, read_toml, reason
from meshwright.hardware import (
    LONGEST_STEP_SECONDS,
    SHORTEST_STEP_SECONDS,
    STEP_TIME,
    TRACE,
    Fleet,
    MeasuredClass,
    MeasuredRun,
    MeasuredRuns,
)
from meshwright.hlo import FREE, Executions
from meshwright.ledger import executions_in
from meshwright.measure import (
    Measurement,
    calibration_for,
    describe_host,
    forget_measured_runs,
    keep_measured_run,
    measured_runs_path,
)
from meshwright.predict import (
    RECOMPUTED,
    Prediction,
    class_of,
    classes_of_instructions,
    machine_of,
    predict,
    rates_digest,
)
from meshwright.programs import fleet_of
from meshwright.results import Phase, Weighing, ignore
from meshwright.units import format_seconds, parse_seconds

from ._calibrated import Calibrated, CalibratedClass, CalibratedStep
from ._trace_files import is_xplane, xplane_events
from ._traces import TracedStep, kineto_step, traced_step

CONTAINERS = ("while", "conditional", "call")
ALL_EXPOSED = 0.999  # of a class; less is not rounding
RUN_KEYS = ("config", "on", "measured", "trace", "layout", "set")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One measured step as a user names it: the run, the fleet, and the seconds, a trace, or a run's folder.

    `config`: as for `weigh`; the folder of a run without `measured` and `trace` is that run's measurement.
    `measured`: the seconds of a step, 1.31 or "1310ms". `trace`: an XPlane file, a folder of jax.profiler, or
    a JSON file of torch.profiler.
    """

    config: str | RunConfig
    on: str | Fleet | None = None
    measured: float | str | None = None
    trace: str | Path | None = None
    layout: str | None = None
    overrides: Overrides = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A measured step with its program: the weighing, and its prediction with all factors at 1."""

    weighing: Weighing
    plain: Prediction
    run: MeasuredRun
    traced: TracedStep | None
    notes: tuple[str, ...]


def calibrate(
    config: str | RunConfig | Sequence[MeasuredStep],
    *,
    on: str | Fleet | None = None,
    measured: float | str | None = None,
    trace: str | Path | None = None,
    layout: str | None = None,
    overrides: Overrides = (),
    on_event: Callable[[Phase], None] = ignore,
) -> Calibrated:
    """Fit factors on predicted seconds to measured steps; later predictions for that chip use them.

    The steps are kept in the cache, and each call fits all of them again. A step of the same program on the
    same fleet takes the place of an earlier one.

    Args:
        config: as for `weigh`; or the folder of a run of `train`, whose measurement is taken; or several
            `MeasuredStep`s.
        on: the fleet on which it was measured; of a run's folder its own.
        measured: the seconds of one step, 1.31 or "1310ms".
        trace: an `.xplane.pb` file or the folder of jax.profiler, or a JSON file of torch.profiler.

    Raises:
        InputError: as for `weigh`; also no measurement, one that is shorter than the chip's peak allows, a
            trace that cannot be read or does not match the program, steps of several chips, or kept steps
            that cannot be read.
    """
    if isinstance(config, str | RunConfig):
        step = MeasuredStep(
            config=config, on=on, measured=measured, trace=trace, layout=layout, overrides=overrides
        )
        steps: Sequence[MeasuredStep] = (step,)
    else:
        steps = config
    if not steps:
        raise InputError("no measured step is given", hint="give a run, and the seconds of a step or a trace")
    known = [_known(step, on_event) for step in steps]
    fleets = {each.weighing.fleet.chip.name: each.weighing.fleet for each in known}
    if len(fleets) > 1:
        raise InputError(f"steps of {' and '.join(sorted(fleets))}", hint="calibrate one chip at a time")
    fleet = known[0].weighing.fleet
    runs: MeasuredRuns | None = None
    for each in known:
        runs = keep_measured_run(fleet, each.run)
    assert runs is not None, "there is a step"
    return _calibrated(fleet, runs, known)


def measured_steps_in(file: Path) -> tuple[MeasuredStep, ...]:
    """Return the [[run]] tables of a TOML file: config, on, measured or trace, layout, and set.

    Raises:
        InputError: the file cannot be read, or a table has other keys or values.
    """
    hint = '[[run]] with config = "llama3-8b", on = "64xH100", measured = "1.31s", set = ["layout=fsdp=64"]'
    try:
        tables = read_toml(file).get("run", [])
    except (OSError, ValueError) as broken:
        raise InputError(f"{file} cannot be read: {reason(broken)}", hint=hint) from broken
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{file} has no [[run]]", hint=hint)
    return tuple(_step_of(table, f"{file}, run {place}", hint) for place, table in enumerate(tables, 1))


def _step_of(table: Mapping[str, Any], where: str, hint: str) -> MeasuredStep:
    unknown = sorted(set(table) - set(RUN_KEYS))
    overrides = table.get("set", [])
    config = table.get("config", "")
    texts = {"config": config, **{key: table.get(key) for key in ("on", "trace", "layout")}}
    wrong = [key for key, value in texts.items() if not isinstance(value, str | None)]
    wrong += [] if isinstance(table.get("measured"), str | int | float | None) else ["measured"]
    wrong += [] if isinstance(overrides, list) and all(isinstance(o, str) for o in overrides) else ["set"]
    if unknown or wrong or "config" not in table:
        problem = (
            f"unknown keys {unknown}" if unknown else f"wrong values of {wrong}" if wrong else "no config"
        )
        raise InputError(f"{where} has {problem}", hint=hint)
    where_and_how = {key: table.get(key) for key in ("on", "measured", "trace", "layout")}
    return MeasuredStep(config=config, overrides=overrides, **where_and_how)


def forget(on: str) -> int | None:
    """Remove the measured steps of a fleet's chip; return their number, or None if the file was damaged.

    Raises:
        InputError: the fleet cannot be read, or the file cannot be removed.
    """
    return forget_measured_runs(fleet_of(on))


def _known(step: MeasuredStep, on_event: Callable[[Phase], None]) -> _Known:
    """Weigh a step's program, and set its measurement beside the prediction with all factors at 1."""
    on, seconds = step.on, step.measured
    if seconds is None and step.trace is None:
        measurement, own_fleet = _measurement_of(step.config)
        assert measurement.step_seconds is not None, "a run without timed steps is refused"
        on, seconds = on or own_fleet, measurement.step_seconds.median
    if seconds is not None:
        seconds = parse_seconds(seconds) if isinstance(seconds, str) else float(seconds)
        _check_a_step(seconds)
    if on is None:
        raise InputError("no fleet is named", hint="name the one on which it was measured: --on 64xH100")
    weighing = weigh_unkept(
        step.config, on=on, layout=step.layout, overrides=step.overrides, on_event=on_event
    )
    if weighing.prediction is None:
        raise InputError(
            f"no time is predicted for {weighing.name}: {weighing.no_prediction}",
            hint="factors need a prediction to correct: `meshwright probe` measures rates of a device",
        )
    fleet, calibration = weighing.fleet, calibration_for(weighing.fleet)
    executions = executions_in(weighing.folder, weighing.compiled)
    plain = predict(executions, weighing.ledger, weighing.compiled, fleet, calibration)
    traced = None
    if step.trace is not None:
        on_event(Phase(name="reading the trace"))
        traced = _traced(Path(step.trace), weighing, executions)
    measured = traced.seconds if traced is not None else 0.0
    if seconds is not None:
        measured = seconds
    _check_possible(measured, weighing, plain)
    classes, notes = ({}, ()) if traced is None else _classes(traced, plain)
    run = MeasuredRun(
        what=STEP_TIME if traced is None else TRACE,
        program=f"{weighing.name}, {weighing.layout}",
        fleet=fleet.name,
        fingerprint=weighing.compiled.fingerprint,
        rates=rates_digest(fleet, calibration),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        measured_seconds=measured,
        predicted_seconds=plain.step_seconds.expected,
        exposed_seconds=_seconds_by_class(plain)[1],
        recomputed_seconds=_recomputed_by_class(plain),
        classes=classes,
    )
    return _Known(weighing=weighing, plain=plain, run=run, traced=traced, notes=notes)


def _measurement_of(config: str | RunConfig) -> tuple[Measurement, str]:
    """Return the measurement of a run's folder, and the name of its fleet.

    Raises:
        InputError: it is no such folder, no step was timed, or a CPU of another host ran it.
    """
    hint = "give the seconds of a step (--measured 1.31s), a trace (--trace FOLDER), or the folder of a run"
    if not isinstance(config, str) or not Path(config).is_dir():
        name = config if isinstance(config, str) else config.name
        raise InputError(f"nothing was measured: {name} is not the folder of a run", hint=hint)
    folder = Path(config)
    try:
        measurement = Measurement.from_json(read_text(folder / "measurement.json"))
        fleet = str(read_json(folder / "weighing.json", strict=False)["fleet"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as missing:
        raise InputError(f"{folder} is not the folder of a finished run: {missing}", hint=hint) from missing
    if measurement.step_seconds is None:
        raise InputError(f"{folder}: no step was timed", hint="train at least 3 steps")
    if measurement.platform == "cpu" and measurement.host != describe_host():
        raise InputError(
            f"{folder} was run on {measurement.host}, and this is {describe_host()}",
            hint="calibrate on the machine that ran it: a CPU's rates are those of one host",
        )
    return measurement, fleet


def _traced(path: Path, weighing: Weighing, executions: Executions) -> TracedStep:
    """Return the step of a trace; an XPlane's events are matched with the program's instructions."""
    if not is_xplane(path):
        return kineto_step(path)
    fleet = weighing.fleet
    classes = classes_of_instructions(executions, weighing.compiled, fleet, calibration_for(fleet))
    program = executions.program
    others = {
        instruction.name
        for _, instruction in program.instructions()
        if instruction.opcode in FREE
        or instruction.opcode in CONTAINERS
        or instruction.opcode.endswith(("-done", "-update"))
    }
    once = [instruction.name for instruction in program.entry.instructions if instruction.name in classes]
    return traced_step(xplane_events(path), classes, others, once)


def _check_a_step(measured: float) -> None:
    """Raise if no step of any program takes that many seconds."""
    if not 0 < measured <= LONGEST_STEP_SECONDS:
        raise InputError(
            f"a step of {measured:.4g} s was not measured: none takes more than {LONGEST_STEP_SECONDS:g} s",
            hint="give the seconds of one step: --measured 1.31s, 1310ms or 850us",
        )


def _check_possible(measured: float, weighing: Weighing, plain: Prediction) -> None:
    """Raise if the step could not be done in that time: by an accelerator, its products at its peak."""
    _check_a_step(measured)
    peak = plain.peak_flops_per_second * weighing.fleet.num_devices
    has_peak = weighing.fleet.chip.platform != "cpu" and peak
    least = weighing.ledger.flops.executed / peak if has_peak else SHORTEST_STEP_SECONDS
    if measured < least:
        raise InputError(
            f"{format_seconds(measured)} for a step of {weighing.name}: its products take at least "
            f"{format_seconds(least)}" + (f" at the peak of {weighing.fleet.name}" if has_peak else ""),
            hint="give the seconds of a whole step with all its microbatches, and the fleet that ran it",
        )


def _classes(traced: TracedStep, plain: Prediction) -> tuple[dict[str, MeasuredClass], tuple[str, ...]]:
    """Return the classes that trace and program share, and what the trace has besides, in words."""
    whole, exposed = _seconds_by_class(plain)
    classes: dict[str, MeasuredClass] = {}
    for name in traced.seconds_by_class:
        if whole.get(name, 0.0) == 0:
            continue
        # Where the program hides nothing of a class, what hides it in the trace is no part of its time.
        hides = exposed[name] < ALL_EXPOSED * whole[name]
        measured = traced.seconds_by_class[name] if hides else traced.exposed_by_class.get(name, 0.0)
        if measured > 0:
            classes[name] = MeasuredClass(measured_seconds=measured, predicted_seconds=whole[name])
    notes = [
        f"{name}: {format_seconds(seconds)} of the trace, which the program does not have"
        for name, seconds in traced.seconds_by_class.items()
        if whole.get(name, 0.0) == 0
    ]
    if traced.unmatched:
        named = ", ".join(name[:60] for name in traced.unmatched)
        notes.append(f"largest events whose names tell no class: {named}")
    return classes, tuple(notes)


def _seconds_by_class(prediction: Prediction) -> tuple[dict[str, float], dict[str, float]]:
    """Return all seconds and the exposed seconds of a prediction by class of work."""
    whole: defaultdict[str, float] = defaultdict(float)
    exposed: defaultdict[str, float] = defaultdict(float)
    for each in prediction.slices:
        whole[class_of(each.name)] += each.seconds
        exposed[class_of(each.name)] += each.exposed_seconds
    return dict(whole), dict(exposed)


def _recomputed_by_class(prediction: Prediction) -> dict[str, float]:
    return {each.name: each.recomputed_seconds for each in prediction.slices if each.recomputed_seconds > 0}


def _calibrated(fleet: Fleet, runs: MeasuredRuns, known: Sequence[_Known]) -> Calibrated:
    """Return the factors of all kept runs, and the steps predicted with them."""
    calibration = calibration_for(fleet)
    factors = machine_of(fleet, calibration, measured=runs).factors
    last = known[-1]
    predicted, _ = _seconds_by_class(last.plain)
    predicted[RECOMPUTED] = sum(_recomputed_by_class(last.plain).values())
    timed = {name: each.measured_seconds for name, each in last.run.classes.items()}
    classes = [
        CalibratedClass(
            name=name,
            predicted_seconds=predicted.get(name, 0.0),
            measured_seconds=timed.get(name),
            factor=factor.value,
            low=factor.low,
            high=factor.high,
            before=factor.before,
            num_runs=factor.num_runs,
        )
        for name, factor in factors.by_class.items()
    ]
    return Calibrated(
        chip=fleet.chip.name,
        file=str(measured_runs_path(fleet)),
        num_runs=len(factors.runs),
        set_aside=factors.set_aside,
        steps=tuple(_step(each, runs) for each in known),
        classes=tuple(sorted(classes, key=lambda each: -each.predicted_seconds)),
    )


def _step(known: _Known, runs: MeasuredRuns) -> CalibratedStep:
    weighing = known.weighing
    before = weighing.prediction
    assert before is not None, "a step without a prediction is refused"
    executions = executions_in(weighing.folder, weighing.compiled)
    calibration = calibration_for(weighing.fleet)
    after = predict(
        executions, weighing.ledger, weighing.compiled, weighing.fleet, calibration, measured=runs
    )
    return CalibratedStep(
        program=known.run.program,
        fleet=known.run.fleet,
        what=known.run.what,
        measured_seconds=known.run.measured_seconds,
        before=before.step_seconds,
        after=after.step_seconds,
        matched=None if known.traced is None else known.traced.matched,
        notes=known.notes,
    )
