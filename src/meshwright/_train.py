"""Training beside weighing: the run of a config on the devices that are there, set beside its prediction.

Imports: `api`, `training`, `reconcile`, `report`. Imported by: `_sweep`, `cli`, and users as `mw.train`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from .api import Weighing, config_of_run, fleet_of, weigh
from .config import Layout, RunConfig
from .errors import InputError, MeshwrightError
from .processes import Alone
from .reconcile import Measurement, Reconciliation, Row, first_steps, reconcile

if TYPE_CHECKING:
    from .training import Event, StepFlops

REPORT_SECONDS = 60.0  # a page is drawn within one: more often would cost more than a hundredth of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: its folder, what was weighed, what was measured, and the two side by side."""

    folder: Path
    weighing: Weighing
    measurement: Measurement
    reconciliation: Reconciliation


def train(
    config: str | RunConfig | None = None,
    *,
    on: str = "local",
    layout: str | None = None,
    overrides: Sequence[str] = (),
    steps: int | None = None,
    folder: Path | None = None,
    resume: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_first_steps: Callable[[tuple[Row, ...]], None] = lambda rows: None,
) -> Run:
    """Weigh a step, train with that same program, and set what was predicted beside what was measured.

    In several processes that `jax.distributed.initialize` has joined, each calls this alike: the first
    chooses the folder and writes to it, and every one returns what it measured itself.

    Args:
        config: as `weigh` takes it; of a run that is resumed, its own unless told.
        on: the attached devices ("local") or simulated ones ("8xCPU").
        steps: of the whole run; the config's own unless told.
        folder: for the run's files; runs/NAME-TIME unless told. The report is report.html in it.
        resume: go on from the folder's newest good checkpoint, on any layout; begin where there is none.
        on_event: told of each step, evaluation, checkpoint and sample.
        on_first_steps: given what the first steps took beside what was predicted, once they are done.

    Raises:
        InputError: as `weigh`; also a fleet that is not attached, a folder that cannot be written, or a
            checkpoint of another config.
        MeshwrightError: a step went wrong, as the config's `faults` say; see `run_training`.
    """
    from .processes import over, processes_of_this_run
    from .report import write_report
    from .training import devices_of

    peers, fleet = processes_of_this_run(), fleet_of(on)
    run = _config_to_train(config, overrides, layout, folder, resume)
    mesh = Layout.parse(run.layout).resolve(fleet.num_devices)
    devices_of(fleet, mesh)  # absent ones, and a folder of another run, are known before compiling
    folder = _prepared(peers, folder, run.name, resume)
    weighing: Weighing = peers.in_turns(lambda: weigh(run, on=fleet.name, on_phase=on_phase))
    try:
        measurement = _measured(weighing, mesh, folder, steps, resume, peers, on_event, on_first_steps)
    except MeshwrightError:
        if peers.is_first:
            over()  # the others have met the error too, and do not wait for a page
            write_report(folder)  # what there is until then
        raise
    return _ended(folder, weighing, measurement, peers)


def _measured(
    weighing: Weighing,
    mesh: Layout,
    folder: Path,
    steps: int | None,
    resume: bool,
    peers: Alone,
    on_event: Callable[[Event], None],
    on_first_steps: Callable[[tuple[Row, ...]], None],
) -> Measurement:
    """What was weighed, trained."""
    from .training import run_training

    settled = weighing.config  # its batch is fixed for the layout
    assert settled is not None, "a config was weighed"
    return run_training(
        settled,
        weighing.fleet,
        mesh,
        folder,
        steps=steps,
        resume=resume,
        work=_work(weighing),
        about={"ledger": weighing.ledger.to_dict()},
        documents=_documents(settled, weighing),
        on_event=_listener(folder, weighing, on_event, on_first_steps, writes=peers.is_first),
    )


def _prepared(peers: Alone, folder: Path | None, name: str, resume: bool) -> Path:
    """The run's folder, as the first process chooses it; every process must see it."""
    from .training import check_shared, prepare_folder

    def choose() -> str:
        chosen = folder or new_folder(f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        prepare_folder(chosen, resume=resume)
        return str(chosen)

    chosen = Path(peers.from_first("run folder", choose))
    check_shared(chosen, peers)
    return chosen


def _documents(run: RunConfig, weighing: Weighing) -> dict[str, str]:
    """What is trained and what is predicted of it, as the run's folder keeps them."""
    weighed = json.dumps(weighing.to_dict(), indent=1)
    return {"config.json": run.model_dump_json(indent=1), "weighing.json": weighed}


def _ended(folder: Path, weighing: Weighing, measurement: Measurement, peers: Alone) -> Run:
    """What is predicted beside what was measured, and all of it on the disk."""
    from .report import write_report
    from .training import write_document

    fingerprint = weighing.compiled.fingerprint
    reconciliation = reconcile(fingerprint, weighing.ledger, weighing.prediction, measurement)
    if peers.is_first:
        write_document(folder, "measurement.json", measurement.to_json())
        write_document(folder, "reconciliation.json", reconciliation.to_json())
        write_report(folder)
    peers.gathered("ended", None)  # jax gives processes that leave a time limit, which a page may take
    return Run(folder=folder, weighing=weighing, measurement=measurement, reconciliation=reconciliation)


def _config_to_train(
    config: str | RunConfig | None,
    overrides: Sequence[str],
    layout: str | None,
    folder: Path | None,
    resume: bool,
) -> RunConfig:
    """What is asked for, or what the run to be resumed was begun with."""
    if resume and folder is None:
        raise InputError("no run to resume is named", hint="name its folder: --folder runs/NAME --resume")
    if config is None:
        if not resume or folder is None:
            raise InputError(
                "no config is named", hint="name a preset or a TOML file; `meshwright presets` lists some"
            )
        from .training import config_of

        config = config_of(folder)
    run = config_of_run(config, overrides, layout)
    if run is None:
        raise InputError(
            f"{config} is a program of its own; `train` runs configs",
            hint="run it with your own loop, or write a config; `meshwright presets` lists some",
        )
    return run


def _work(weighing: Weighing) -> StepFlops | None:
    """For MFU; a CPU's peak is not in the catalog."""
    from .training import StepFlops

    prediction, flops = weighing.prediction, weighing.ledger.flops
    if prediction is None or weighing.fleet.chip.platform == "cpu" or not prediction.peak_flops_per_second:
        return None
    return StepFlops(
        model_flops=flops.model,
        executed_flops=flops.executed,
        peak_flops_per_second=prediction.peak_flops_per_second * weighing.fleet.num_devices,
    )


def _listener(
    folder: Path,
    weighing: Weighing,
    on_event: Callable[[Event], None],
    on_first_steps: Callable[[tuple[Row, ...]], None],
    *,
    writes: bool,
) -> Callable[[Event], None]:
    """`on_event`; and beside it the prediction set beside the first steps, and a report that grows."""
    from .report import write_report
    from .training import Evaluated, FirstStepsDone

    drawn = time.monotonic()

    def listen(event: Event) -> None:
        nonlocal drawn
        on_event(event)
        if isinstance(event, FirstStepsDone):
            measured = event.step_seconds, event.argument_bytes_per_device
            rows = first_steps(weighing.ledger, weighing.prediction, *measured, weighing.fleet)
            on_first_steps(rows)
        if writes and isinstance(event, Evaluated) and time.monotonic() - drawn > REPORT_SECONDS:
            write_report(folder)
            drawn = time.monotonic()

    return listen


def new_folder(name: str) -> Path:
    """A folder of that name below runs/ that is not there yet: two runs may begin in one second."""
    names = (name, *(f"{name}-{number}" for number in range(2, 100)))
    return next(path for each in names if not (path := Path("runs") / each).exists())
