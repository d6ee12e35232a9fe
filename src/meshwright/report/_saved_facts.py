"""Read what reports show of a weighing, from the object or from saved JSON, and of the folder of a run.

Used by: `_weighing`, `_costs`, `_results`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from meshwright.compiler import SIMULATED
from meshwright.config import Ticks, TransformerModel
from meshwright.eager import ModuleCount, RankCount, RankMessage
from meshwright.errors import InputError
from meshwright.files import MOST_RECORD_BYTES, parsed_json, read_text, reason
from meshwright.json_records import read_record
from meshwright.ledger import Ledger
from meshwright.measure._reconciliation import Measurement, Reconciliation
from meshwright.planning import HandSum, Suggestion, suggestions
from meshwright.predict import Prediction, RunFlops, RunTotal
from meshwright.results import Weighing

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The fleet's name, its chip's name in the catalog, what its fast domains are, and how many."""

    name: str
    chip: str
    domain: str = "host"
    num_domains: int = 1  # in weighings of earlier versions, where it is not needed


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """The compiler, its seconds, and the fingerprint of its program."""

    compiler: str
    fingerprint: str = ""
    seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The collectives of a PyTorch step by phase, what its ranks hold, and what its modules cost."""

    messages: tuple[RankMessage, ...]
    ranks: tuple[RankCount, ...]
    modules: tuple[ModuleCount, ...] = ()  # earlier versions had none
    by_inductor: bool = False  # of earlier versions never


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighingFacts:
    """The fields of a weighing that reports show, named as in `weigh --json`.

    JSON lacks the last five, and `pytorch` but for a PyTorch module. `rule_terms`: sign, FLOPs and reason of
    each term that leads from the 6ND rule to the model's FLOPs.
    """

    config: str
    layout: str
    fleet: FleetFacts
    source: str
    ledger: Ledger
    compile: CompileFacts
    num_parameters: int | None = None
    tokens_per_step: int | None = None
    batch_unit: str = "tokens"
    prediction: Prediction | None = None
    no_prediction: str = ""
    run_total: RunTotal | None = None
    run_flops: RunFlops | None = None
    hand_sum: HandSum | None = None
    pipeline: Ticks | None = None
    plan_command: str | None = None
    pytorch: TorchFacts | None = None
    warnings: tuple[str, ...] = ()
    idle_devices: int = 0
    num_active_parameters: int | None = None
    num_trained_parameters: int | None = None  # where others are frozen
    is_published_target: bool = False
    suggestions: tuple[Suggestion, ...] = ()
    rule_terms: tuple[tuple[str, int, str], ...] = ()


def facts_of(weighing: Weighing) -> WeighingFacts:
    """Return what reports show of a weighing."""
    if not weighing.is_compiled:
        return facts_from_json(weighing.to_dict())
    target, memory = weighing.fleet.chip.target, weighing.ledger.memory
    config = weighing.config
    model = None if config is None else config.model
    experts = model if isinstance(model, TransformerModel) and model.num_experts is not None else None
    trained = config.num_trained_parameters if config is not None and config.num_frozen_parameters else None
    is_simulated = weighing.compiled.source == SIMULATED
    return dataclasses.replace(
        facts_from_json(weighing.to_dict()),
        num_active_parameters=None if experts is None else experts.num_active_parameters,
        num_trained_parameters=trained,
        is_published_target=not is_simulated and target is not None and target.rendered,
        suggestions=suggestions(weighing.config, weighing.layout, weighing.fleet, memory),
        rule_terms=_rule_terms(weighing, has_experts=experts is not None),
    )


def facts_from_json(fields: dict[str, Any]) -> WeighingFacts:
    """Return what reports show of a weighing in the form of `weigh --json`, also of an earlier version.

    Raises:
        InputError: these are not the fields of a weighing.
    """
    prediction, memory = fields.get("prediction"), fields["ledger"]["memory"]
    # Earlier versions lack a buffer's format and a slice's kind, and had advice that was not walked.
    buffers = [{"format": buffer["shape"].partition("[")[0], **buffer} for buffer in memory["buffers"]]
    if prediction is not None:
        slices = [{"kind": "", **part} for part in prediction["slices"]]
        helps = [help_ for help_ in prediction.get("what_helps", ()) if "change" in help_]
        prediction = {**prediction, "slices": slices, "what_helps": helps}
    ledger = {**fields["ledger"], "memory": {**memory, "buffers": buffers}}
    text = json.dumps({**fields, "prediction": prediction, "ledger": ledger})
    return read_record(WeighingFacts, text, name="a weighing", hint="give the output of `weigh --json`")


def _rule_terms(weighing: Weighing, *, has_experts: bool) -> tuple[tuple[str, int, str], ...]:
    """Return the terms that lead exactly from the 6ND rule to the model's FLOPs: sign, count, reason."""
    flops, compiled = weighing.ledger.flops, weighing.compiled
    parameters, used = compiled.num_parameters, compiled.num_matmul_parameters
    if flops.rule_6nd is None or parameters is None or used is None or compiled.tokens_per_step is None:
        return ()
    idle = 6 * (parameters - used) * compiled.tokens_per_step
    attention = compiled.traced_flops.attention
    rest = flops.model - (flops.rule_6nd - idle + attention)
    nothing = "parameters that multiply nothing: embedding lookup, norms, biases"
    nothing += "; and experts that a token is not sent to" if has_experts else ""
    terms = (
        ("-", idle, nothing),
        ("+", attention, "attention's own products"),
        ("-", -rest, "products nobody asked for, as the gradient of the input"),
        ("+", rest, "other products"),
    )
    return tuple(term for term in terms if term[1] > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of a run's folder. A missing file is None or empty, and `notes` says why."""

    name: str
    weighing: WeighingFacts | None = None
    metrics: tuple[dict[str, Any], ...] = ()
    notices: tuple[dict[str, Any], ...] = ()
    measurement: Measurement | None = None
    reconciliation: Reconciliation | None = None
    notes: tuple[str, ...] = ()

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric in order of the steps; a repeated step has its last value."""
        values = {line["step"]: float(line[key]) for line in self.metrics if is_drawn(line.get(key))}
        steps = sorted(values)
        return steps, [values[step] for step in steps]


LARGEST_DRAWN = 1e100  # axes are computed with differences and squares


def is_drawn(value: object) -> bool:
    """Return whether a value of a file is a number that a curve can show."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_DRAWN


def read_run(folder: Path) -> RunFiles:
    """Return all readable contents of a run's folder: a missing or truncated file is noted, not fatal."""
    notes: list[str] = []

    def read(name: str, parse: Callable[[str], T]) -> T | None:
        try:
            return parse(read_text(folder / name, MOST_RECORD_BYTES))
        except FileNotFoundError:
            notes.append(f"{name} is not there: what it would show is left out.")
        except InputError as error:
            notes.append(f"{name} cannot be read: {error.message}")
        except (OSError, ValueError) as error:
            notes.append(f"{name} cannot be read: {reason(error)}")
        except (KeyError, TypeError, AttributeError) as error:
            notes.append(f"{name} cannot be read: {error!r}")
        return None

    def lines(name: str) -> tuple[dict[str, Any], ...]:
        return read(name, lambda text: _entries(name, text, notes)) or ()

    read("config.json", parsed_json)
    return RunFiles(
        name=folder.name,
        weighing=read("weighing.json", lambda text: facts_from_json(parsed_json(text))),
        metrics=lines("metrics.jsonl"),
        notices=lines("notices.jsonl") if (folder / "notices.jsonl").exists() else (),
        measurement=read("measurement.json", Measurement.from_json),
        reconciliation=read("reconciliation.json", Reconciliation.from_json),
        notes=tuple(notes),
    )


def _entries(name: str, text: str, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """Return one object for each line, and note broken lines: a killed run leaves its last line cut off."""
    entries: list[dict[str, Any]] = []
    broken: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = parsed_json(line)
            if type(entry["step"]) is not int or not is_drawn(entry["step"]):
                raise ValueError("its step is not the number of one")
            entries.append(entry)
        except (ValueError, KeyError, TypeError, OverflowError):
            broken.append(number)
    if broken:
        where = ", ".join(str(number) for number in broken[:5]) + (", ..." if len(broken) > 5 else "")
        notes.append(f"{name}: no whole entry on line {where}; the rest is shown.")
    return tuple(entries)
