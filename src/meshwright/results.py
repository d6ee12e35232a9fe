"""Define the results that `weigh` and `train` return, and the events that they emit.

`Weighing` and `Run` hold records of lower packages and print as their reports (`reportable`).

Imports: `compiler`, `config`, `hardware`, `ledger`, `predict`, `planning`, `measure`, `eager`,
`reportable`. Used by: `planned`, `programs`, `report`, `api` and the command line.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from . import ledger, predict  # what they reckon with is imported on first use
from .compiler import TARGET_COMPILER, Compiled, Refusal
from .config import Layout, RunConfig, Ticks, ticks_of
from .errors import InputError
from .hardware import Fleet, Link
from .ledger import Ledger
from .measure import KnownRates
from .predict import Prediction, RunFlops, RunTotal, run_flops, whole_run
from .reportable import Reportable, write_result
from .units import format_bytes, format_seconds

if TYPE_CHECKING:
    from .eager import EagerAccount
    from .measure import Measurement, Reconciliation, Row
    from .planning import RuleOfThumb, Suggestion

WEIGHING_SCHEMA = 8
RUN_SCHEMA = 2


EAGER = "PyTorch, eager, on fake tensors"
"""The `source` of a weighing that no compiler made."""
BY_INDUCTOR = "PyTorch, as Inductor compiles it (a model), on fake tensors"
"""The `source` of a weighing of modules that `torch.compile` compiles."""


class Finishes(Protocol):
    """Say when a run is finished, in words and in JSON's types."""

    def texts(self, now: datetime) -> tuple[str, ...]:
        """Return when it is finished, then what the time goes to, and what would narrow it."""
        ...

    def short_texts(self, now: datetime) -> tuple[str, str]:
        """Return the day by which half of all runs end, and the useful share."""
        ...

    def to_dict(self, now: datetime) -> dict[str, Any]:
        """Return the estimate in JSON's types, with its days."""
        ...


class Operated(Protocol):
    """Estimate when a run is finished, by the way in which it is operated."""

    def finish_of(self, weighing: Weighing) -> Finishes | None:
        """Return when the run of a weighing is finished; None if its steps or their time are not known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """The program that a compiler made of a step.

    `folder` holds it in the cache; `cached`: it was there before. `rates`: the measured ones that the
    prediction is by.
    """

    compiled: Compiled
    folder: Path
    cached: bool
    rates: KnownRates = field(default_factory=KnownRates)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Weighing(Reportable):
    """One step weighed for one fleet: its ledger, its predicted time, and what they were made from.

    Args:
        name: of the program.
        config: the run's configuration; None for a program that has none.
        fleet, layout: the devices, and the mesh on them.
        figures: the ledger: memory, FLOPs and traffic. Of a PyTorch step: memory and traffic of the rank that
            needs the most memory, and FLOPs of the fleet. None where the compiler refused the program.
        prediction: None if no time is predicted; `no_prediction` then says why.
        made_by: the compiled program; what each rank holds and sends, of a step that PyTorch runs eagerly; or
            why the compiler refused a program that does not fit.
        num_steps: length of the whole run; None if neither the config nor the caller states it.
        plan_command: the command that searches other layouts; None for one device, for a program that is not
            planned by its name, and where no time is predicted although the program is compiled.
        warnings: why the figures may not be of what was meant, or are not kept, printed before the verdict.
        idle_devices: devices of the named fleet that a step without a mesh leaves idle; `fleet` is without
            them.
        other_calls: of a script, the other jitted calls, if they were asked for.
        operations: how the run is operated, if it is asked when it is finished.
    """

    name: str
    config: RunConfig | None = None
    fleet: Fleet
    layout: Layout
    figures: Ledger | None
    prediction: Prediction | None
    no_prediction: str
    made_by: Compilation | EagerAccount | Refusal
    tokens_per_step: int | None = None
    num_steps: int | None = None
    plan_command: str | None = None
    warnings: tuple[str, ...] = ()
    idle_devices: int = 0
    other_calls: tuple[Weighing, ...] = ()
    operations: Operated | None = None

    @property
    def ledger(self) -> Ledger:
        """Memory, FLOPs and traffic of the step.

        Raises:
            InputError: the compiler refused the program, since a device has too little memory for it.
        """
        if self.figures is None:
            raise self._not_compiled()
        return self.figures

    @property
    def refusal(self) -> Refusal | None:
        """Figures of the compiler that refused the program, since it does not fit; None if it did not."""
        return self.made_by if isinstance(self.made_by, Refusal) else None

    @property
    def _refused(self) -> Refusal:
        assert isinstance(self.made_by, Refusal), "a weighing without a ledger was refused"
        return self.made_by

    def _not_compiled(self) -> InputError:
        """Return the error for what only a compiled program has, where the compiler refused it."""
        what = f"{self.name} does not fit on {self.fleet.name}: it needs {self._refused.line}"
        return InputError(f"{what}. The compiler made no program", hint="weigh a smaller step")

    @property
    def fits(self) -> bool | None:
        """True if reserved + allowance bytes are at most the usable bytes; None if those are unknown.

        False if the compiler refused the program, since a device has too little memory for it.
        """
        return False if self.figures is None else self.figures.memory.fits

    @property
    def step_seconds(self) -> float | None:
        """Expected seconds of one step; None if no time is predicted."""
        return None if self.prediction is None else self.prediction.step_seconds.expected

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of a step as a share of the fleet's dense peak in the step's time; None if unknown."""
        return None if self.prediction is None else self.prediction.mfu

    @property
    def tokens_per_second(self) -> float | None:
        """Expected tokens per second of the whole fleet, or images or rows; None if unknown."""
        rate = None if self.prediction is None else self.prediction.tokens_per_second_per_device
        return None if rate is None else rate * self.fleet.num_devices

    @property
    def cost(self) -> float | None:
        """Expected cost of the whole run in the currency of the price; None without steps or a price."""
        total = self.run_total
        return None if total is None or total.cost is None else total.cost.expected

    @property
    def run_flops(self) -> RunFlops | None:
        """FLOPs of the whole run, and their share of the reporting threshold; None without its steps."""
        return run_flops(self.ledger.flops, self.num_steps)

    @property
    def traffic_by_axes(self) -> tuple[predict.AxisTraffic, ...]:
        """Return what one device sends in a step by mesh axes: beyond its host, within it, and hidden."""
        return predict.traffic_by_axes(self.ledger.traffic, self.prediction)

    @property
    def line(self) -> str:
        """The name, the fleet and the layout; whether it fits, and the expected time of a step."""
        if self.figures is None:
            where = f"{self.name} on {self.fleet.name}, layout {self.layout}"
            return f"{where}: does not fit, {self._refused.line}"
        memory, prediction = self.ledger.memory, self.prediction
        verdict = {True: "fits", False: "does not fit", None: "no verdict"}[memory.fits]
        needed = format_bytes(memory.reserved_bytes + memory.allowance_bytes)
        usable = "" if memory.usable_bytes is None else f" of {format_bytes(memory.usable_bytes)}"
        step = "" if prediction is None else f", step {format_seconds(prediction.step_seconds.expected)}"
        where = f"{self.name} on {self.fleet.name}, layout {self.layout}"
        return f"{where}: {verdict}, {needed}{usable} per device{step}"

    @property
    def is_compiled(self) -> bool:
        """True if a compiler made the program; not if it refused to, or if PyTorch runs the step eagerly."""
        return isinstance(self.made_by, Compilation)

    @property
    def compiled(self) -> Compiled:
        """The record of the compiled program.

        Raises:
            InputError: PyTorch runs the step eagerly, or the compiler refused it: no program is compiled.
        """
        return self._compilation.compiled

    @property
    def folder(self) -> Path:
        """The folder of the compiled program in the cache.

        Raises:
            InputError: as `compiled`.
        """
        return self._compilation.folder

    @property
    def cached(self) -> bool:
        """Return whether the program was compiled before."""
        return isinstance(self.made_by, Compilation) and self.made_by.cached

    @property
    def account(self) -> EagerAccount:
        """Return what each rank of a PyTorch step holds, sends and computes.

        Raises:
            InputError: the program is compiled, or was to be.
        """
        if isinstance(self.made_by, (Compilation, Refusal)):
            hint = "its figures are in `ledger` and `compiled`"
            raise InputError(f"{self.name} is a compiled program, and no ranks were run", hint=hint)
        return self.made_by

    @property
    def _compilation(self) -> Compilation:
        if isinstance(self.made_by, Compilation):
            return self.made_by
        if isinstance(self.made_by, Refusal):
            raise self._not_compiled()
        what = f"{self.name} runs as PyTorch runs it: there is no compiled program"
        raise InputError(what, hint="its figures are in `ledger` and `account`; or weigh it `.as_jax()`")

    @property
    def source(self) -> str:
        """Return what made the figures: the target's compiler, a simulation on the CPU, or PyTorch."""
        if isinstance(self.made_by, Compilation):
            return self.made_by.compiled.source
        if isinstance(self.made_by, Refusal):
            return TARGET_COMPILER
        return BY_INDUCTOR if self.made_by.by_inductor else EAGER

    @property
    def run_total(self) -> RunTotal | None:
        """Hours, device-hours and cost of the whole run; None if its steps or their time are unknown."""
        return whole_run(self.prediction, self.num_steps, self.tokens_per_step, self.fleet)

    @property
    def finish(self) -> Finishes | None:
        """When the run is finished; None if that was not asked, or its steps or their time are unknown."""
        return None if self.operations is None else self.operations.finish_of(self)

    @property
    def rule_of_thumb(self) -> RuleOfThumb | None:
        """The rule 4 x (parameters + activations + gradients + optimizer state), next to the compiled bytes.

        None for a program without a configuration, whose layers are unknown.
        """
        if self.config is None:
            return None
        from .registry import room  # most screens show none of it

        rule: Any = room("rule_of_thumb").rule_of_thumb
        return rule(self.config, self.compiled, self.ledger.memory)

    @property
    def pipeline(self) -> Ticks | None:
        """Schedule of the pipeline's stages; None without stages, or without a configuration."""
        return None if self.config is None else ticks_of(self.config, self.layout)

    def trace(self) -> dict[str, Any]:
        """Return the predicted step of one device as Chrome trace events, in JSON's types.

        It takes the time that is printed, also if other rates were measured since.

        Raises:
            InputError: no time is predicted, for the reason in `no_prediction`; or as `compiled`.
        """
        made = self._compilation
        executions = ledger.executions_in(made.folder, made.compiled)
        known = made.rates.calibration, made.rates.measured
        return predict.predicted_trace(executions, made.compiled, self.fleet, *known)

    def to_perfetto(self, path: str | Path) -> None:
        """Write the predicted step of one device as a file that ui.perfetto.dev opens.

        Raises:
            InputError: as `trace`; or the file cannot be written.
        """
        write_result(Path(path), json.dumps(self.trace()))

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `weigh --json` prints; docs/reference/json.md explains its fields.

        A PyTorch step lacks the fields that only a compiled program has, and has `pytorch`. A program that
        the compiler refused lacks all that is made of a compiled one, and has `refusal`.
        """
        if self.figures is None:
            return self._refused_fields()
        total, flops, finish = self.run_total, self.run_flops, self.finish
        return {
            **self._named_fields(),
            "ledger": self.ledger.to_dict(),
            "prediction": None if self.prediction is None else dataclasses.asdict(self.prediction),
            "no_prediction": self.no_prediction,
            "run_total": None if total is None else dataclasses.asdict(total),
            "run_flops": None if flops is None else dataclasses.asdict(flops),
            "traffic_by_axes": [dataclasses.asdict(part) for part in self.traffic_by_axes],
            **(self._compiled_fields() if self.is_compiled else self._eager_fields()),
            **({} if finish is None else {"finish": finish.to_dict(datetime.now())}),
        }

    def _named_fields(self) -> dict[str, Any]:
        """Return the fields that every weighing has."""
        return {
            "schema": WEIGHING_SCHEMA,
            "config": self.name,
            "layout": str(self.layout),
            "tokens_per_step": self.tokens_per_step,
            "batch_unit": "tokens" if self.config is None else self.config.batch_unit,
            "fleet": _fleet_fields(self.fleet),
            "source": self.source,
            "warnings": list(self.warnings),
            "idle_devices": self.idle_devices,
            "fits": self.fits,
        }

    def _refused_fields(self) -> dict[str, Any]:
        """Return all fields of a program that the compiler refused, since it does not fit."""
        refusal = self._refused
        figures = {
            "needed_bytes": refusal.needed_bytes,
            "usable_bytes": refusal.usable_bytes,
            "exceeded_bytes": refusal.needed_bytes - refusal.usable_bytes,
            "words": refusal.words,
            "argument_bytes_by_role": refusal.argument_bytes_by_role,
        }
        return {
            **self._named_fields(),
            "refusal": figures,
            "suggestions": [
                {"arguments": each.arguments, "effect": each.effect} for each in self.suggestions
            ],
            **({} if self.config is None else {"run_config": self.config.model_dump(mode="json")}),
            **({} if refusal.num_parameters is None else {"num_parameters": refusal.num_parameters}),
            **({} if self.plan_command is None else {"plan_command": self.plan_command}),
            "compile": {"seconds": refusal.seconds, "compiler": refusal.compiler},
        }

    @property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """Changes to a configuration that make its memory smaller; none if it fits."""
        if self.fits is not False:
            return ()
        memory = self.refusal or self.ledger.memory
        from .registry import room  # most screens show none

        find: Any = room("changes").suggestions
        return find(self.config, self.layout, self.fleet, memory)

    def _compiled_fields(self) -> dict[str, Any]:
        """Return the fields that only a compiled program has."""
        made, compiled, by_hand = self._compilation, self.compiled, self.rule_of_thumb
        target = self.fleet.chip.target
        return {
            "run_config": None if self.config is None else self.config.model_dump(mode="json"),
            "sequence_length": compiled.sequence_length,
            "num_parameters": compiled.num_parameters,
            "pipeline": None if self.pipeline is None else self.pipeline.to_dict(),
            "rule_of_thumb": None if by_hand is None else by_hand.to_dict(),
            "plan_command": self.plan_command,
            "compile": {
                "seconds": compiled.compile_seconds,
                "cached": made.cached,
                "compiler": compiled.compiler,
                "options": compiled.options,
                "target": target.origin if target and compiled.source == TARGET_COMPILER else None,
                "fingerprint": compiled.fingerprint,
            },
        }

    def _eager_fields(self) -> dict[str, Any]:
        """Return the fields that only a PyTorch step has; docs/how-to/pytorch.md explains `pytorch`."""
        account = self.account
        return {
            "num_parameters": account.num_parameters,
            "compile": {"seconds": account.seconds, "compiler": f"PyTorch {account.torch_version}"},
            "pytorch": account.fields(),
        }


def _rate(link: Link | None) -> float | None:
    return None if link is None else link.bytes_per_second


def _fleet_fields(fleet: Fleet) -> dict[str, Any]:
    return {
        "name": fleet.name,
        "chip": fleet.chip.name,
        "num_devices": fleet.num_devices,
        "inside_bytes_per_second": _rate(fleet.inside),
        "between_bytes_per_second": _rate(fleet.between),
        "domain": fleet.domain,
        "num_domains": fleet.num_domains,
    }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run(Reportable):
    """One training run: its folder, its weighing, its measurement, and the reconciliation of the two.

    `not_written`: files of the folder that could never be written, by name, each with the reason.
    """

    folder: Path
    weighing: Weighing
    measurement: Measurement
    reconciliation: Reconciliation
    not_written: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `train --json` prints."""
        return {
            "schema": RUN_SCHEMA,
            "folder": str(self.folder),
            "not_written": self.not_written,
            "weighing": self.weighing.to_dict(),
            "measurement": json.loads(self.measurement.to_json()),
            "reconciliation": json.loads(self.reconciliation.to_json()),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change to a step, compiled: the bytes that one device then reserves, and the step's new cost.

    `saved_bytes` and `extra_...` are differences from the explained step; `saved_bytes` is positive for a
    saving. `failed` says why the change could not be compiled, or does not fit, else it is "". Seconds are
    None if no time is predicted; differences also if the explained step itself was refused.
    """

    arguments: str  # as `meshwright weigh` takes them
    effect: str
    reserved_bytes: int | None
    saved_bytes: int | None
    fits: bool | None
    extra_executed_flops: int | None
    step_seconds: float | None
    extra_seconds: float | None
    failed: str

    def to_dict(self) -> dict[str, Any]:
        """Return the change in JSON's types."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The event that a weighing, or the preparation of a run, began a phase: "tracing", "compiling".

    `of`: what is prepared.
    """

    name: str
    of: str = "weighing"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepsCompared:
    """The event that compares a run's first steps with the prediction: time and memory."""

    rows: tuple[Row, ...]


def ignore(event: object) -> None:
    """Take an event and do nothing: the default listener."""
