"""Train a config on attached or simulated devices, and compare the run with its prediction.

Imports: `programs`, `trainer`, `measure`. Used by: `cli`, `contrib.sweeps`; by users as `mw.train`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.config import Overrides, RunConfig, holds_nothing, trainable
from meshwright.errors import DeviceMemoryError, InputError, MeshwrightError
from meshwright.extras import check_installed
from meshwright.files import read_text
from meshwright.kept_records import KeptRun
from meshwright.measure import Measurement, Reconciliation, doubt_calibration, first_steps, measured_runs_for
from meshwright.measure import reconcile as compared
from meshwright.programs import fleet_of, resolved, weigh_run
from meshwright.registry import registered, room
from meshwright.results import FirstStepsCompared, Phase, Run, Weighing, ignore
from meshwright.units import format_seconds

from ._history import add_to_history
from ._own_data import config_with_data, opened_data
from ._run_log import FolderLog
from ._trackers import check_trackers, reported

if TYPE_CHECKING:
    from meshwright.config import Layout
    from meshwright.hardware import Fleet
    from meshwright.trainer.launch import Facts, SingleProcess
    from meshwright.trainer.loop import Event, FirstParameters, RunFolder, RunRequest, StepFlops

REPORT, METRICS = "report.html", "metrics.jsonl"
NOTHING_TO_LEARN = "the tokens are random and hold nothing to learn: --data FILE trains on your own text"
PACKAGES = ("tensorstore", "tensorboardX")  # its report says in words that matplotlib is absent
NO_MEMORY = "RESOURCE_EXHAUSTED"  # XLA's word
WEIGHTS = "meshwright.weights"  # the group in which rooms outside the core register formats of weights
FIRST_PAGE_SECONDS = 5.0  # of steps before the first page: a run of seconds has only its last one
REPORT_SECONDS = 30.0  # between pages: drawing one takes up to a second, so they cost about 2 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One session of a run: whether it goes on, what it begins with, and what is recorded of it.

    Args:
        resume: continue from the folder's newest good checkpoint, on any layout; begin if it has none.
        discard_steps: with `resume`, repeat steps that no checkpoint was meant to hold, as those of a run
            with `checkpoint.every_steps = none`. Without it such a run is refused.
        begin_from: the folder of a Hugging Face model with safetensors files, whose parameters the run begins
            with instead of random ones. Without a config, the model's own is used.
        profile: a folder for a trace of steps 3 to 5 by jax.profiler, which `calibrate` reads.
        report_to: trackers that get the run's figures too: "trackio", "wandb", "mlflow", "tensorboard".
    """

    resume: bool = False
    discard_steps: bool = False
    begin_from: str | Path | None = None
    profile: str | Path | None = None
    report_to: str | Sequence[str] = ()

    @property
    def trackers(self) -> Sequence[str]:
        """The names of `report_to`, of which a text alone is one."""
        return [self.report_to] if isinstance(self.report_to, str) else self.report_to


def train(
    config: str | RunConfig | None = None,
    *,
    on: str = "local",
    overrides: Overrides = (),
    data: str | Path | None = None,
    steps: int | None = None,
    folder: Path | None = None,
    session: Session | None = None,
    on_event: Callable[[Event | Phase | FirstStepsCompared], None] = ignore,
) -> Run:
    """Weigh a step, train with that same program, and compare predicted with measured quantities.

    In several processes that `jax.distributed.initialize` has joined, each process makes this same call. They
    compare their configs, arguments, files and versions before anything is compiled, and their programs
    before the first step. The first process writes to the folder. Each returns its own measurements.

    A refused run leaves its folder as it was. A failed write outside the checkpoints does not end a run. It
    is reported as a notice, at most once an hour, and tried again; `not_written` names files that were never
    written.

    Args:
        config: as for `weigh`; a resumed run uses its own by default, and its folder may be named here.
        on: the attached devices ("local") or simulated ones ("8xCPU").
        data: what to train on: a text, `.jsonl` or `.parquet` file, token files, or a folder of one of these.
            Texts are tokenized first, and their tokens kept in the cache. Settings of the section `data` in
            `overrides` go before what is found. By default the config's own data.
        steps: of the whole run; the config's own by default.
        folder: for the run's files; runs/NAME-TIME by default. The report is report.html in it.
        session: whether the run is resumed, what it begins with, and what is recorded of it.
        on_event: called with each event of the run as it happens: phases of the weighing, steps, the
            comparison of the first steps with the prediction, evaluations, checkpoints, notices, samples.

    Raises:
        InputError: as for `weigh`; also packages of the extra `train` that are absent, a fleet that is not
            attached, a folder that cannot be written or that another process writes, a checkpoint of another
            config, steps that would be discarded, or processes that differ.
        MeshwrightError: a step failed and the config's `faults` end the run, all checkpoints are damaged, or
            jax was already used with other devices.

    >>> import tempfile
    >>> run = train("linear", on="1xCPU", steps=2, folder=Path(tempfile.mkdtemp(), "run"))
    >>> run.measurement.steps, sorted(run.measurement.losses)
    (2, [1, 2])
    """
    from meshwright.trainer.launch import agreed, processes_of_this_run
    from meshwright.trainer.loop import RunFolder, RunRequest

    session = session or Session()
    config, folder = named_run(config, folder, session.resume)
    asked = partial(_run_to_train, config, data, overrides, steps, folder, session)
    call = {"on": on, "folder": folder, "steps": steps}
    peers = processes_of_this_run()
    (run, notes), agreement = agreed(peers, "run", asked, lambda made: _facts_of(made[0], call, session))
    path = Path(peers.broadcast("run folder", lambda: str(folder or folder_for(run))))
    allowed = {"resume": session.resume, "discard_steps": session.discard_steps}
    with closing(RunFolder(path, peers=peers, **allowed)) as held:
        on_event = log = FolderLog(held, on_event)
        held.validate_resume(run)
        # jax is loaded only from here on: a folder is refused at once.
        from meshwright.trainer.loop import check_resumed_state, devices_of

        first = _first_weights(session, run)
        run, mesh = resolved(run, fleet := fleet_of(on))
        devices = devices_of(fleet, mesh)
        dataset = opened_data(peers, run, on_event)
        _say_of_data(notes, first, on_event)
        check_resumed_state(path, run, mesh, devices)
        log.begin()
        num_steps, times_kernels = steps or run.horizon_steps, _times_kernels(peers, run, fleet)
        with KeptRun(held, run, fleet.name, num_steps).ending() as kept, ExitStack() as stack:
            weighing = _weighing_of(peers, run, fleet, mesh, num_steps, on_event, times_kernels)
            _add_to_record(kept, weighing, on_event)
            live_finish = room("finishing").LiveFinish
            on_event = stack.enter_context(reported(session.trackers, weighing, kept.number, held, on_event))
            live = live_finish(weighing, kept, _listener(weighing, on_event))
            request = RunRequest(
                config=run,
                fleet=fleet,
                layout=mesh,
                devices=devices,
                folder=held,
                dataset=dataset,
                steps=num_steps,
                flops=_step_flops(weighing),
                about=_about(weighing, agreement),
                documents=_documents(run, weighing, first),
                on_event=live,
                first_weights=first,
                profile=None if session.profile is None else Path(session.profile),
                times_kernels=times_kernels,
                page=_LivePage(held, peers, live.estimate),
            )
            return _ended(request, weighing, _trained(request), kept)


def _about(weighing: Weighing, agreement: Any) -> dict[str, Any]:
    """Return what each checkpoint carries in addition to the configuration."""
    return {"ledger": weighing.ledger.to_dict(), **({"agreement": agreement} if agreement else {})}


def _first_weights(session: Session, run: RunConfig) -> FirstParameters | None:
    """Return the parameters that the run begins with; None for random ones."""
    if session.begin_from is None:
        return None
    return registered(WEIGHTS)["huggingface"](Path(session.begin_from), run)


def _run_to_train(
    config: str | RunConfig | None,
    data: str | Path | None,
    overrides: Overrides,
    steps: int | None,
    folder: Path | None,
    session: Session,
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the config to train with its steps and data, and what was decided about the data, in words.

    Raises:
        InputError: the call cannot be carried out.
    """
    _check_request(steps, session.profile)
    check_trackers(session.trackers)
    if session.begin_from is not None and not Path(session.begin_from).is_dir():
        hint = "name the folder of a Hugging Face model, with its config.json and .safetensors"
        hint += "; or leave --from out: a run with checkpoints has its weights" if session.resume else ""
        raise InputError(f"there is no folder of weights {session.begin_from}", hint=hint)
    named = _config_to_train(session.begin_from if config is None else config, folder, session.resume)
    run, notes = config_with_data("train", named, data, overrides, session.begin_from)
    return trainable(run, steps), (*notes, *([NOTHING_TO_LEARN] if holds_nothing(run) else ()))


def _facts_of(run: RunConfig, call: dict[str, Any], session: Session) -> Facts:
    """Return what all processes of a run must have in common: its config, the call's arguments, and files."""
    from meshwright.trainer.loop import facts_of_run

    shown = {name: str(value) if isinstance(value, Path) else value for name, value in call.items()}
    shown["steps to train"] = shown.pop("steps") or run.steps
    shown |= {"resume": session.resume, "discard_steps": session.discard_steps}
    return facts_of_run(run, shown, None if session.begin_from is None else Path(session.begin_from))


def _check_request(steps: int | None, profile: str | Path | None) -> None:
    """Check that what trains is installed, and the number of steps; make the folder of a trace.

    Raises:
        InputError: a package is absent, there are too few steps, or the folder cannot be made.
    """
    check_installed("train", PACKAGES, "training")
    if steps is not None and steps < 1:
        raise InputError(f"a run of {steps} steps", hint="use at least 1 step")
    if profile is None:
        return
    from meshwright.trainer.loop import LAST_TRACED

    if steps is not None and steps < LAST_TRACED:
        hint = f"train at least {LAST_TRACED} steps: the last three of these are traced"
        raise InputError(f"a run of {steps} steps is too short for a trace", hint=hint)
    try:
        Path(profile).mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        hint = "name a folder that can be made and written"
        raise InputError(f"cannot write a trace to {profile}: {refused.strerror}", hint=hint) from refused


def folder_for(run: RunConfig) -> Path:
    """Return an unused folder for a run that begins now."""
    return new_folder(f"{run.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")


def new_folder(name: str) -> Path:
    """Return an unused folder of that name below runs/: two runs may begin in the same second."""
    paths = (Path("runs") / name, *(Path("runs") / f"{name}-{number}" for number in range(2, 100)))
    return next(path for path in paths if not path.exists())


def named_run(
    config: str | RunConfig | None, folder: Path | None, resume: bool
) -> tuple[str | RunConfig | None, Path | None]:
    """Return what is to be trained and where; the folder of a run to resume may be named in place of both.

    >>> named_run("linear", None, True)
    ('linear', None)
    """
    if not resume or folder is not None or not isinstance(config, str):
        return config, folder
    path = Path(config)
    is_run = path.is_dir() and any(
        (path / name).exists() for name in (METRICS, "checkpoints", "weighing.json")
    )
    return (None, path) if is_run else (config, folder)


def _config_to_train(
    config: str | Path | RunConfig | None, folder: Path | None, resume: bool
) -> str | RunConfig:
    """Return the requested config, or the config of the run to resume."""
    if resume and folder is None:
        named = f"{config!r} is not the folder of a run" if isinstance(config, str) else "no run is named"
        raise InputError(f"nothing to resume: {named}", hint="name it: `meshwright train runs/NAME --resume`")
    if config is not None:
        return str(config) if isinstance(config, Path) else config
    if not resume or folder is None:
        raise InputError(
            "no config is named", hint="name a preset or a TOML file; `meshwright presets` lists some"
        )
    from meshwright.trainer.loop import config_of

    return config_of(folder)


def _documents(run: RunConfig, weighing: Weighing, first: FirstParameters | None) -> dict[str, str]:
    """Return the texts that a run's folder holds from its beginning, by name."""
    return {
        "config.json": run.model_dump_json(indent=1),
        "weighing.json": json.dumps(weighing.to_dict(), indent=1),
        **({} if first is None else first.documents),
    }


def _say_of_data(
    notes: Sequence[str], first: FirstParameters | None, on_event: Callable[[Event], None]
) -> None:
    """Report what was decided about a run's data, and which of the weights it begins with it leaves out."""
    from meshwright.trainer.loop import Noticed

    for words in (*notes, *(() if first is None else first.notes)):
        on_event(Noticed(step=0, kind="data", message=words, hint=""))


def _add_to_record(kept: KeptRun, weighing: Weighing, on_event: Callable[[Event], None]) -> None:
    """Add what was predicted to the run's record, and report that the list of runs will lack it if so."""
    from meshwright.trainer.loop import Noticed

    kept.weighed(weighing)
    if kept.refused:
        hint = "once there is room, name the run's folder: `meshwright runs --in FOLDER`"
        words = f"the run is not in the list of `meshwright runs`: {kept.refused}"
        on_event(Noticed(step=0, kind="disk", message=words, hint=hint))


def _times_kernels(peers: SingleProcess, run: RunConfig, fleet: Fleet) -> bool:
    """Return whether a run is to time its kernels and to write `autotune_results`, which does not exist yet.

    The first process decides for all: one that is late would find the file that the first has written.
    """
    path = run.autotune_results
    if fleet.chip.platform != "cuda" or path is None:
        return False
    is_first_run: bool = peers.broadcast("times kernels", lambda: not Path(path).exists())
    return is_first_run


def _weighing_of(
    peers: SingleProcess,
    run: RunConfig,
    fleet: Fleet,
    mesh: Layout,
    num_steps: int,
    on_event: Callable[[Phase], None],
    times_kernels: bool,
) -> Weighing:
    """Weigh a run's step in each of its processes, one after the other.

    If the run is to time its kernels, its step is weighed with products by cuBLAS.
    What draws the report is imported meanwhile: beside the steps it would be in the memory that they take.
    """
    loading_plots = room("pages").loading_plots
    if times_kernels:
        run = run.model_copy(update={"autotune_results": None})
    with loading_plots() if peers.is_first else nullcontext():
        return peers.run_sequentially(
            lambda: weigh_run(run, fleet, mesh, num_steps=num_steps, on_event=on_event)
        )


def _measured(request: RunRequest) -> Measurement:
    """Train the step that was weighed; a run that fails has its page all the same."""
    from meshwright.trainer.launch import over
    from meshwright.trainer.loop import run_training

    try:
        return run_training(request)[0]
    except InputError:
        raise  # the run was refused: the page of the previous run stays
    except MeshwrightError:
        if request.folder.peers.is_first:
            over()  # the other processes have met the error too, and do not wait for a page
            _draw(request.folder)
            _report_not_written(request, 0)
        raise


def _trained(request: RunRequest) -> Measurement:
    """Train, and put the runtime's words on a lack of memory in ours.

    Other processes may have memory left. They learn of this one's end from `leave`.
    """
    try:
        return _measured(request)
    except RuntimeError as failed:  # jax's own
        if NO_MEMORY not in str(failed):
            raise
        raise DeviceMemoryError(
            f"the memory of {request.devices[0].device_kind} is used up: {str(failed).splitlines()[0]}",
            hint="see whether another program holds memory of the device; else keep less: --set remat=full, "
            "or a smaller batch.microbatch_sequences",
        ) from failed


def _ended(request: RunRequest, weighing: Weighing, measurement: Measurement, kept: KeptRun) -> Run:
    """Compare predicted with measured quantities, and write all results."""
    held, fingerprint = request.folder, weighing.compiled.fingerprint
    measurement = _with_earlier_steps(held.path, measurement, fingerprint)
    reconciliation = compared(fingerprint, weighing.ledger, weighing.prediction, measurement)
    kept.ended(measurement)
    if held.peers.is_first:
        _doubt_rates(weighing, reconciliation)
        held.writes.documents(
            {"measurement.json": measurement.to_json(), "reconciliation.json": reconciliation.to_json()}
        )
        if weighing.prediction is not None:
            add_to_history(held.path, reconciliation, measurement, weighing.name, weighing.fleet.name)
        _draw(held)
        _report_not_written(request, measurement.steps)
    held.peers.gathered("ended", None)  # wait for the page: it may take longer than jax lets processes leave
    return Run(
        folder=held.path,
        weighing=weighing,
        measurement=measurement,
        reconciliation=reconciliation,
        not_written=dict(held.writes.refused),
    )


def _with_earlier_steps(folder: Path, made: Measurement, weighed: str) -> Measurement:
    """Return a measurement; where too few steps were left to time one, with the earlier ones of this program.

    Without them, whoever resumes a finished run would lose its measured time.

    Args:
        weighed: the fingerprint of the program that was weighed.
    """
    if made.step_seconds is not None:
        return made
    try:
        before = Measurement.from_json(read_text(folder / "measurement.json"))
    except (OSError, ValueError, MeshwrightError):
        return made  # there is none, or it is damaged
    if before.fingerprint not in (made.fingerprint, weighed) or before.device_kind != made.device_kind:
        return made
    known = ("step_seconds", "argument_bytes_per_device", "peak_bytes")
    names = [name for name in known if getattr(made, name) is None]
    why = {name: words for name, words in made.not_measured.items() if name not in names}
    why |= {name: words for name, words in before.not_measured.items() if name in names}
    return dataclasses.replace(made, **{name: getattr(before, name) for name in names}, not_measured=why)


class _LivePage:
    """Draw the page of a run that is under way: first after a few seconds of steps, then at intervals.

    Args:
        finish: returns events that say when the run will be finished.
    """

    def __init__(self, held: RunFolder, peers: SingleProcess, finish: Callable[[], Iterable[Event]]) -> None:
        self._held, self._peers, self._finish = held, peers, finish
        self._due: float | None = None

    def is_due(self) -> bool:
        """Return whether it is time to draw; the first call begins the time. One process draws."""
        if not self._peers.is_first:
            return False
        now = time.monotonic()
        if self._due is None:
            self._due = now + min(FIRST_PAGE_SECONDS, REPORT_SECONDS)
        return now >= self._due

    def draw(self, record: Callable[[Event], None]) -> None:
        """Draw it, with when the run will be finished, which `record` writes to the run's files."""
        for event in self._estimate():
            record(event)
        _draw(self._held, is_live=True)
        self._due = time.monotonic() + REPORT_SECONDS

    def _estimate(self) -> list[Event]:
        refused = self._held.writes.refused
        try:
            found = list(self._finish())
        except Exception as broken:  # a bug of it must not end a run of days
            refused["finish"] = f"it could not be estimated: {type(broken).__name__}: {broken}"
            return []
        refused.pop("finish", None)
        return found


def _draw(held: RunFolder, *, is_live: bool = False) -> None:
    """Draw the run's page; one that cannot be drawn is reported like one that cannot be written."""
    try:
        write_report = room("pages").write_report
        held.writes.attempt(REPORT, lambda: write_report(held.path, is_live=is_live))
    except Exception as broken:  # a bug in a plot must not end a run of days
        held.writes.refused[REPORT] = f"it could not be drawn: {type(broken).__name__}: {broken}"


def _report_not_written(request: RunRequest, step: int) -> None:
    """Report files that could not be written, when no further step will report them."""
    from meshwright.trainer.loop import not_written

    for why, names in request.folder.writes.unreported().items():
        request.on_event(not_written(step, why, names))


def _doubt_rates(weighing: Weighing, reconciliation: Reconciliation) -> None:
    """Have the machine's rates measured again if the step time was outside its predicted interval.

    Where steps were measured, the factors fitted to them are in doubt, not the rates: those are kept.
    """
    if measured_runs_for(weighing.fleet) is not None:
        return
    for row in reconciliation.rows:
        if row.quantity == "step seconds" and row.inside is False:
            took, predicted = format_seconds(row.measured), format_seconds(row.predicted)
            reason = f"a run of {weighing.name} took {took} a step where {predicted} was predicted"
            doubt_calibration(weighing.fleet.chip.name, reason)


def _step_flops(weighing: Weighing) -> StepFlops | None:
    """Return the FLOPs of a step for MFU; None without a known peak, as on a CPU."""
    from meshwright.trainer.loop import StepFlops

    prediction, flops = weighing.prediction, weighing.ledger.flops
    if prediction is None or weighing.fleet.chip.platform == "cpu" or not prediction.peak_flops_per_second:
        return None
    return StepFlops(
        model_flops=flops.model,
        executed_flops=flops.executed,
        peak_flops_per_second=prediction.peak_flops_per_second * weighing.fleet.num_devices,
    )


def _listener(
    weighing: Weighing, on_event: Callable[[Event | FirstStepsCompared], None]
) -> Callable[[Event], None]:
    """Return a callback that calls `on_event`, and compares the first steps."""
    from meshwright.trainer.loop import FirstStepsDone

    def listen(event: Event) -> None:
        on_event(event)
        if isinstance(event, FirstStepsDone):
            measured = event.step_seconds, event.argument_bytes_per_device
            rows = first_steps(weighing.ledger, weighing.prediction, *measured, weighing.fleet)
            on_event(FirstStepsCompared(rows=rows))

    return listen
