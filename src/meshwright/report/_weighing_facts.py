"""Hold what reports show of a weighing: `facts_of` takes it from the object, `contrib.pages` from a file.

Used by: all documents with a weighing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from meshwright import planning  # its records, and what they import, are loaded where there is one
from meshwright.compiler import SIMULATED
from meshwright.config import Ticks, TransformerModel
from meshwright.ledger import Ledger
from meshwright.predict import Prediction, RunFlops, RunTotal
from meshwright.results import Compilation, Weighing

if TYPE_CHECKING:
    from meshwright.eager import EagerAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """The fleet's name, its chip's name in the catalog, what its fast domains are, and how many."""

    name: str
    chip: str
    domain: str
    num_domains: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """The compiler and its seconds; the fingerprint of its program, and whether it was in the cache."""

    compiler: str
    seconds: float
    fingerprint: str = ""
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighingFacts:
    """The fields of a weighing that reports show, named as in `weigh --json`.

    JSON lacks the last six. `finish`: when the run is finished, then what would narrow it, a line each.
    `rule_terms`: sign, FLOPs and reason of each term that leads from the 6ND rule to the model's FLOPs.
    """

    config: str
    layout: str
    fleet: FleetFacts
    source: str
    ledger: Ledger
    compile: CompileFacts
    tokens_per_step: int | None
    batch_unit: str
    prediction: Prediction | None
    no_prediction: str
    run_total: RunTotal | None
    run_flops: RunFlops | None
    warnings: tuple[str, ...]
    idle_devices: int
    num_parameters: int | None
    rule_of_thumb: planning.RuleOfThumb | None = None
    pipeline: Ticks | None = None
    plan_command: str | None = None
    num_active_parameters: int | None = None
    num_trained_parameters: int | None = None  # where others are frozen
    is_published_target: bool = False
    suggestions: tuple[planning.Suggestion, ...] = ()  # if it does not fit
    rule_terms: tuple[tuple[str, int, str], ...] = ()
    finish: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerFacts(WeighingFacts):
    """The facts of a step that PyTorch runs eagerly, with what each rank holds and sends."""

    account: EagerAccount


def facts_of(weighing: Weighing, *, in_full: bool = True) -> WeighingFacts:
    """Return what reports show of a weighing; one screen needs no sum by hand."""
    made, of_all = weighing.made_by, _facts_of_all(weighing)
    if isinstance(made, Compilation):
        return WeighingFacts(**of_all, **_compiled_facts(weighing, in_full))
    account = weighing.account
    compiler = CompileFacts(compiler=f"PyTorch {account.torch_version}", seconds=account.seconds)
    return EagerFacts(**of_all, compile=compiler, num_parameters=account.num_parameters, account=account)


def _facts_of_all(weighing: Weighing) -> dict[str, Any]:
    """Return the facts that every weighing has, by field."""
    fleet, config = weighing.fleet, weighing.config
    names = {"name": fleet.name, "chip": fleet.chip.name, "domain": fleet.domain}
    return {
        "config": weighing.name,
        "layout": str(weighing.layout),
        "fleet": FleetFacts(**names, num_domains=fleet.num_domains),
        "source": weighing.source,
        "ledger": weighing.ledger,
        "tokens_per_step": weighing.tokens_per_step,
        "batch_unit": "tokens" if config is None else config.batch_unit,
        "prediction": weighing.prediction,
        "no_prediction": weighing.no_prediction,
        "run_total": weighing.run_total,
        "run_flops": weighing.run_flops,
        "finish": finish_texts(weighing),
        "warnings": weighing.warnings,
        "idle_devices": weighing.idle_devices,
    }


def finish_texts(weighing: Weighing) -> tuple[str, ...]:
    """Return when the run of a weighing is finished, and what would narrow it; nothing if not asked."""
    finish = weighing.finish
    return () if finish is None else finish.texts(datetime.now())


def _compiled_facts(weighing: Weighing, in_full: bool) -> dict[str, Any]:
    """Return the facts of a compiled program, by field."""
    compiled, config, target = weighing.compiled, weighing.config, weighing.fleet.chip.target
    model = None if config is None else config.model
    experts = model if isinstance(model, TransformerModel) and model.num_experts is not None else None
    trained = config.num_trained_parameters if config is not None and config.num_frozen_parameters else None
    return {
        "compile": CompileFacts(
            compiler=compiled.compiler,
            seconds=compiled.compile_seconds,
            fingerprint=compiled.fingerprint,
            cached=weighing.cached,
        ),
        "num_parameters": compiled.num_parameters,
        "rule_of_thumb": weighing.rule_of_thumb if in_full else None,
        "pipeline": weighing.pipeline,
        "plan_command": weighing.plan_command,
        "num_active_parameters": None if experts is None else experts.num_active_parameters,
        "num_trained_parameters": trained,
        "is_published_target": compiled.source != SIMULATED and target is not None and target.rendered,
        "suggestions": weighing.suggestions,
        "rule_terms": _rule_terms(weighing, has_experts=experts is not None),
    }


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
