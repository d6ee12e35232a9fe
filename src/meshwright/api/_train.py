"""Train a config on attached or simulated devices, and compare the run with its prediction.

Imports: `_weigh`, `training`, `launch`, `measure`, `reconciliation`, `report`. Used by: `_sweep`, `cli`, and
users as `mw.train`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Layout, Overrides, RunConfig, resolve_batch, trainable
from ..errors import InputError, MeshwrightError
from ..hardware import Fleet
from ..launch import Alone
from ..measure import doubt_calibration
from ..reconciliation import Measurement, Reconciliation, first_steps, reconcile
from ..results import FirstStepsCompared, Phase, Run, Weighing, ignore
from ..units import format_seconds
from ._weigh import config_of_run, fleet_of, weigh

if TYPE_CHECKING:
    from ..training import Event, RunFolder, StepFlops

REPORT = "report.html"
REPORT_SECONDS = 60.0  # between pages: drawing one takes up to a second, so they cost about 1 %


def train(
    config: str | RunConfig | None = None,
    *,
    on: str = "local",
    layout: str | None = None,
    overrides: Overrides = (),
    steps: int | None = None,
    folder: Path | None = None,
    resume: bool = False,
    discard_steps: bool = False,
    on_event: Callable[[Event | Phase | FirstStepsCompared], None] = ignore,
) -> Run:
    """Weigh a step, train with that same program, and compare predicted with measured quantities.

    In several processes that `jax.distributed.initialize` has joined, each process makes this same call. The
    first chooses the folder and writes to it. Each process returns its own measurements.

    A refused run leaves its folder as it was. A failed write outside the checkpoints does not end a run. It
    is reported as a notice, at most once an hour, and tried again; `not_written` names files that were never
    written.

    Args:
        config: as for `weigh`; a resumed run uses its own config by default.
        on: the attached devices ("local") or simulated ones ("8xCPU").
        steps: of the whole run; the config's own by default.
        folder: for the run's files; runs/NAME-TIME by default. The report is report.html in it.
        resume: continue from the folder's newest good checkpoint, on any layout; begin if it has none.
        discard_steps: with `resume`, repeat steps that no checkpoint was meant to hold, as those of a run
            with `checkpoint.every_steps = none`. Without it such a run is refused.
        on_event: called with each event of the run as it happens: phases of the weighing, steps, the
            comparison of the first steps with the prediction, evaluations, checkpoints, notices, samples.

    Raises:
        InputError: as for `weigh`; also a fleet that is not attached, a folder that cannot be written or that
            another process writes, a checkpoint of another config, or steps that would be discarded.
        MeshwrightError: a step failed and the config's `faults` end the run; see `run_training`.
    """
    from ..launch import processes_of_this_run
    from ..training import RunFolder

    peers = processes_of_this_run()
    run = trainable(_config_to_train(config, overrides, layout, folder, resume), steps)
    path = _chosen(peers, folder, run.name)
    with closing(RunFolder(path, resume=resume, discard_steps=discard_steps, peers=peers)) as held:
        held.look(run)  # refuses another run's folder before jax is loaded
        fleet = fleet_of(on)
        mesh = Layout.parse(run.layout).resolve(fleet.num_devices)
        _check_devices(run, fleet, mesh, path, resume)
        held.make()
        weighing: Weighing = peers.in_turns(lambda: weigh(run, on=fleet.name, on_event=on_event))
        if steps is not None:  # the run's hours are computed from its actual steps
            weighing = dataclasses.replace(weighing, num_steps=steps)
        listen = _listener(held, weighing, on_event, writes=peers.is_first)
        measurement = _measured(weighing, mesh, held, steps, peers, listen)
        return _ended(held, weighing, measurement, peers, on_event)


def _check_devices(run: RunConfig, fleet: Fleet, mesh: Layout, folder: Path, resume: bool) -> None:
    """Raise, before compiling, if devices are missing or the checkpoint holds another state."""
    from ..training import check_resumed_state, devices_of

    devices_of(fleet, mesh)
    if resume:
        check_resumed_state(folder, resolve_batch(run, mesh), fleet, mesh)


def _measured(
    weighing: Weighing,
    mesh: Layout,
    held: RunFolder,
    steps: int | None,
    peers: Alone,
    listen: Callable[[Event], None],
) -> Measurement:
    """Train the step that was weighed; a run that fails has its page all the same."""
    from ..launch import over
    from ..training import run_training

    config = weighing.config  # its batch is already resolved for the layout
    assert config is not None, "a config was weighed"
    try:
        return run_training(
            config,
            weighing.fleet,
            mesh,
            held,
            steps=steps,
            work=_work(weighing),
            about={"ledger": weighing.ledger.to_dict()},
            documents=_documents(config, weighing),
            on_event=listen,
        )
    except InputError:
        raise  # the run was refused: the page of the previous run stays
    except MeshwrightError:
        if peers.is_first:
            over()  # the other processes have met the error too, and do not wait for a page
            _draw(held)
            _report_refused(held, 0, listen)
        raise


def _chosen(peers: Alone, folder: Path | None, name: str) -> Path:
    """Return the run's folder, which the first process chooses."""

    def choose() -> str:
        return str(folder or new_folder(f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"))

    return Path(peers.from_first("run folder", choose))


def _documents(run: RunConfig, weighing: Weighing) -> dict[str, str]:
    """Return the trained config and its weighing as stored in the run's folder."""
    weighed = json.dumps(weighing.to_dict(), indent=1)
    return {"config.json": run.model_dump_json(indent=1), "weighing.json": weighed}


def _ended(
    held: RunFolder,
    weighing: Weighing,
    measurement: Measurement,
    peers: Alone,
    on_event: Callable[[Event], None],
) -> Run:
    """Compare predicted with measured quantities, and write all results."""
    fingerprint = weighing.compiled.fingerprint
    reconciliation = reconcile(fingerprint, weighing.ledger, weighing.prediction, measurement)
    if peers.is_first:
        _doubt_rates(weighing, reconciliation)
        held.writes.documents(
            {"measurement.json": measurement.to_json(), "reconciliation.json": reconciliation.to_json()}
        )
        held.writes.retry()
        _draw(held)
        _report_refused(held, measurement.steps, on_event)
    peers.gathered("ended", None)  # wait for the page: it may take longer than jax allows processes to leave
    return Run(
        folder=held.path,
        weighing=weighing,
        measurement=measurement,
        reconciliation=reconciliation,
        not_written=dict(held.writes.refused),
    )


def _draw(held: RunFolder) -> None:
    """Draw the run's page.

    A page that cannot be drawn is reported like one that cannot be written.
    """
    from ..report import write_report

    try:
        held.writes.attempt(REPORT, lambda: write_report(held.path))
    except Exception as broken:  # a bug in a plot must not end a run of days
        held.writes.refused[REPORT] = f"it could not be drawn: {type(broken).__name__}: {broken}"


def _report_refused(held: RunFolder, step: int, on_event: Callable[[Event], None]) -> None:
    """Report files that could not be written, when no further step will report them."""
    from ..training import not_written

    for why, names in held.writes.untold().items():
        on_event(not_written(step, why, names))


def _doubt_rates(weighing: Weighing, reconciliation: Reconciliation) -> None:
    """Have the machine's rates measured again if the step time was outside its predicted interval."""
    for row in reconciliation.rows:
        if row.quantity == "step seconds" and row.inside is False:
            took, predicted = format_seconds(row.measured), format_seconds(row.predicted)
            reason = f"a run of {weighing.name} took {took} a step where {predicted} was predicted"
            doubt_calibration(weighing.fleet.chip.name, reason)


def _config_to_train(
    config: str | RunConfig | None,
    overrides: Overrides,
    layout: str | None,
    folder: Path | None,
    resume: bool,
) -> RunConfig:
    """Return the requested config, or the config of the run to resume."""
    if resume and folder is None:
        raise InputError("no run to resume is named", hint="name its folder: --folder runs/NAME --resume")
    if config is None:
        if not resume or folder is None:
            raise InputError(
                "no config is named", hint="name a preset or a TOML file; `meshwright presets` lists some"
            )
        from ..training import config_of

        config = config_of(folder)
    run = config_of_run(config, overrides, layout)
    if run is None:
        raise InputError(
            f"{config} is a program of its own; `train` runs configs",
            hint="run it with your own loop, or write a config; `meshwright presets` lists some",
        )
    return run


def _work(weighing: Weighing) -> StepFlops | None:
    """Return the FLOPs of a step for MFU; None without a known peak, as on a CPU."""
    from ..training import StepFlops

    prediction, flops = weighing.prediction, weighing.ledger.flops
    if prediction is None or weighing.fleet.chip.platform == "cpu" or not prediction.peak_flops_per_second:
        return None
    return StepFlops(
        model_flops=flops.model,
        executed_flops=flops.executed,
        peak_flops_per_second=prediction.peak_flops_per_second * weighing.fleet.num_devices,
    )


def _listener(
    held: RunFolder,
    weighing: Weighing,
    on_event: Callable[[Event | FirstStepsCompared], None],
    *,
    writes: bool,
) -> Callable[[Event], None]:
    """Return a callback that calls `on_event`, compares the first steps, and keeps the page up to date."""
    from ..training import Evaluated, FirstStepsDone

    drawn = time.monotonic()

    def listen(event: Event) -> None:
        nonlocal drawn
        on_event(event)
        if isinstance(event, FirstStepsDone):
            measured = event.step_seconds, event.argument_bytes_per_device
            rows = first_steps(weighing.ledger, weighing.prediction, *measured, weighing.fleet)
            on_event(FirstStepsCompared(rows=rows))
        if writes and isinstance(event, Evaluated) and time.monotonic() - drawn > REPORT_SECONDS:
            _draw(held)
            drawn = time.monotonic()

    return listen


def new_folder(name: str) -> Path:
    """Return an unused folder of that name below runs/: two runs may begin in the same second."""
    names = (name, *(f"{name}-{number}" for number in range(2, 100)))
    return next(path for each in names if not (path := Path("runs") / each).exists())
