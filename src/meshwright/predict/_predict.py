"""Predict the time of a step: the walk's times against the fleet's peaks, with an interval and its reasons.

`interval_of` finds the interval in which the step time is expected, and the reasons why it is wide or lacks
an end. A width holds for the cases it was derived from: products in 16 bits or fp8, on a chip with known
published runs or kernel tables. Every width in `runs.toml` names its source. Where no source bounds the error
of a prediction, that end is None, and the reason is given with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.compiler import Compiled
from meshwright.errors import InputError
from meshwright.formats import FORMATS
from meshwright.hardware import Fleet
from meshwright.hlo import Executions
from meshwright.ledger import Ledger
from meshwright.units import format_seconds

from ..hardware import Calibration
from ._machine import Machine, machine_of, words_of
from ._rates import CUDNN, provenance, widths
from ._records import Interval, Prediction, Slice
from ._speedups import what_helps
from ._walk import LAUNCH, Prices, Walked, trace_of, walk

MOST_NAMED = 2
ROOFLINE_RUNS = "two of MaxText's on v5e-256 (16B and 32B) took 0.61 and 0.60 of what was predicted for them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Founded:
    """The interval of a step, the sources of its rates and width in words, and why it is no narrower."""

    seconds: Interval
    basis: str
    reasons: tuple[str, ...]


def interval_of(
    machine: Machine,
    walked: Walked,
    calibration: Calibration | None,
    unpriced: Sequence[str],
    cautions: Iterable[str] = (),
) -> Founded:
    """Return the interval of a walked step.

    The widest of the widths that apply is used, and the spread of a calibration's rounds widens it. Unpriced
    work removes the upper end. Rates whose error no source bounds remove both ends.

    Args:
        unpriced: work that has no rule.
        cautions: doubts about `calibration`, which are added to the reasons.
    """
    formats = _unpublished_formats(machine, walked)
    names = _widths(machine, walked, calibration)
    if calibration is None or machine.basis == "calibration":
        reasons = [widths()[name].reason for name in names if widths()[name].reason]
    else:
        reasons = ["rates that were measured here: no run was compared with such a prediction"]
    refused = [*_without_source(machine, walked, formats)]
    low = min((widths()[name].low for name in names), default=1.0)
    high = max((widths()[name].high for name in names), default=1.0)
    if calibration is not None and calibration.spread:
        worst = max(calibration.spread.values())
        low, high = low / (1 + worst), high * (1 + worst)
        if worst > machine.shared.steady_spread:
            reasons.append(
                f"the measured rates differ by up to {100 * worst:.0f} % from one round to the next"
            )
    reasons += cautions
    words = "; ".join([_rates(machine, calibration, names), *(widths()[name].words for name in names)])
    seconds = walked.seconds
    if refused:
        found = Interval(low=None, expected=seconds, high=None)
        return Founded(seconds=found, basis=_sentences(words, "No interval."), reasons=(*refused, *reasons))
    if unpriced:
        more = len(unpriced) - MOST_NAMED
        named = ", ".join(unpriced[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        found = Interval(low=seconds * low, expected=seconds, high=None)
        least = f"Interval from {100 * low - 100:+.0f} %, without an upper end."
        return Founded(
            seconds=found, basis=_sentences(words, least), reasons=(f"not priced: {named}", *reasons)
        )
    found = Interval(low=seconds * low, expected=seconds, high=seconds * high)
    ends = f"Interval {100 * low - 100:+.0f} to {100 * high - 100:+.0f} %."
    return Founded(seconds=found, basis=_sentences(words, ends), reasons=tuple(reasons))


def _sentences(words: str, interval: str) -> str:
    return f"Estimate. {words[0].upper()}{words[1:]}. {interval}"


def _widths(machine: Machine, walked: Walked, calibration: Calibration | None) -> tuple[str, ...]:
    """Return the names of the widths in `runs.toml` that apply; none for the basis "roofline"."""
    if machine.basis == "calibration":
        return ("calibration",)
    if machine.basis == "roofline":
        return ()
    fp8 = any(name.startswith("fp8") for name in walked.flops)
    published = machine.sustained_share is not None and calibration is None
    basis = "sustained" if published else machine.basis
    if fp8 and published:
        return ("fp8",)
    return (basis, "fp8") if fp8 else (basis,)


def _without_source(machine: Machine, walked: Walked, formats: Sequence[str]) -> Iterable[str]:
    """Yield the reasons why no source bounds the error of the prediction."""
    if machine.basis == "calibration":
        if walked.total.get("convolution", 0.0) > machine.shared.unpublished_share * walked.seconds:
            yield "a CPU's convolutions were measured at four to eight times the predicted time"
        return
    if machine.basis == "roofline":
        yield f"no table of kernels and too few published runs for {machine.name}: {ROOFLINE_RUNS}"
    if formats:
        yield f"products in {', '.join(formats)}: no published run and no table of kernels has them"
    gaps = walked.total.get(LAUNCH, 0.0)
    if gaps > machine.shared.launch_bound_share * walked.seconds:
        share = 100 * gaps / walked.seconds
        yield (
            f"{share:.0f} % of the step are gaps between kernels ({format_seconds(gaps)}), "
            "which no published run resolves"
        )


def _unpublished_formats(machine: Machine, walked: Walked) -> list[str]:
    """Return the formats of products that no run and no table has, if their share of the step matters."""
    at_peak = {name: flops / machine.peak_flops_per_second[name] for name, flops in walked.flops.items()}
    known = {n for n in at_peak if n.startswith("fp8") or FORMATS[n].bits == FORMATS["bf16"].bits}
    unknown = sorted(set(at_peak) - known)
    share = sum(at_peak[name] for name in unknown) / walked.seconds
    return unknown if share > machine.shared.unpublished_share else []


def _rates(machine: Machine, calibration: Calibration | None, names: Sequence[str]) -> str:
    """Return the sources of the rates in words."""
    scaled = f"16-bit products x {machine.gemm_factor:g} as published runs of other chips ask for"
    tables = f"{machine.name} tables ({provenance()})"
    if calibration is not None:
        simulated = machine.basis == "calibration"
        return words_of(calibration, f"tables ({provenance()})", simulated=simulated)
    if names == ("fp8",):
        return tables
    if machine.sustained_share is not None:
        return (
            f"{tables}, products at most at the {100 * machine.sustained_share:.0f} % of peak "
            "that published bf16 runs sustain"
        )
    if machine.basis == "tables":
        return f"{tables}, {scaled}"
    if machine.basis == "default":
        return f"no table for {machine.name}: medians over nine GPUs ({provenance()}), {scaled}"
    return f"catalog peaks of {machine.name} at the median efficiencies of nine NVIDIA GPUs, {scaled}"


def predict(
    executions: Executions,
    ledger: Ledger,
    compiled: Compiled,
    fleet: Fleet,
    calibration: Calibration | None = None,
    attention_kernel: str = CUDNN,
    cautions: Iterable[str] = (),
) -> Prediction:
    """Return the step time of a compiled program on a fleet.

    Counted: every scheduled kernel, the gaps between them, collectives not hidden behind computation.
    Not counted: the host's dispatch and data loading, stragglers, checkpoints, compilation.

    Args:
        executions: the executions of the compiled program, from `ledger.executions_in`.
        calibration: the rates of the host whose simulated devices form the fleet; or of an accelerator, where
            one of its kind was measured.
        attention_kernel: "cudnn", or "flash-2" to price the program as if it used that library's kernel.
        cautions: doubts about the calibration, which become reasons of the interval.

    Raises:
        InputError: a CPU fleet without a calibration, a link or chip without a known rate, or a
            program that the CPU's compiler made in place of the target's.
        ValueError: the program has replica groups of an unknown form.
    """
    prices: Prices = {}
    machine, walked = _walked(executions, compiled, fleet, calibration, attention_kernel, prices)
    seconds = walked.seconds
    assert seconds > 0, f"{compiled.name} takes no time"
    peak = _peak(machine, walked)
    available = seconds * fleet.num_devices * peak
    mfu = ledger.flops.model / available if peak else 0.0
    hfu = ledger.flops.executed / available if peak else 0.0
    assert mfu <= 1, f"an MFU of {mfu:.3f}: {ledger.flops.model} model FLOPs in {seconds} s at {peak} FLOP/s"
    unpriced = (*ledger.unpriced, *(f"{what}, {n} times" for what, n in walked.unpriced.items()))
    interval = interval_of(machine, walked, calibration, unpriced, cautions)
    tokens = compiled.tokens_per_step
    return Prediction(
        step_seconds=interval.seconds,
        tokens_per_second_per_device=tokens / seconds / fleet.num_devices if tokens else None,
        mfu=mfu,
        hfu=hfu,
        peak_flops_per_second=peak,
        slices=_slices(walked),
        basis=interval.basis,
        interval_reasons=interval.reasons,
        what_helps=what_helps(machine, executions, compiled, fleet, ledger.memory, walked, prices),
        unpriced=unpriced,
    )


def predicted_trace(
    executions: Executions, compiled: Compiled, fleet: Fleet, calibration: Calibration | None = None
) -> dict[str, Any]:
    """Return the predicted step of one device as a trace that ui.perfetto.dev opens, in JSON types.

    Raises:
        InputError: as `predict`.
        ValueError: as `predict`.
    """
    _, walked = _walked(executions, compiled, fleet, calibration, CUDNN)
    return trace_of(walked.events, f"{compiled.name} on {fleet.name}")


def _walked(
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    calibration: Calibration | None,
    attention_kernel: str,
    prices: Prices | None = None,
) -> tuple[Machine, Walked]:
    if compiled.source == "simulated on CPU":
        raise InputError(
            f"no time is predicted for {fleet.name} from a program simulated on CPU: that compiler widens "
            "bf16 matmuls to fp32, overlaps no communication and fuses otherwise",
            hint="weigh on a fleet whose compiler can be installed (`meshwright doctor`)",
        )
    machine = machine_of(fleet, calibration, attention_kernel)
    return machine, walk(machine, executions, compiled.mesh_axes, prices=prices)


def _peak(machine: Machine, walked: Walked) -> float:
    """Return the dense peak of the format in which most FLOPs run; 0 for a program without products."""
    if not walked.flops:
        return 0.0
    return machine.peak_flops_per_second[max(walked.flops, key=lambda name: walked.flops[name])]


def _slices(walked: Walked) -> tuple[Slice, ...]:
    names = sorted(walked.total, key=lambda name: -walked.total[name])
    return tuple(
        Slice(
            kind=_kind(walked, name),
            name=name,
            seconds=walked.total[name],
            exposed_seconds=walked.exposed.get(name, 0.0),
        )
        for name in names
    )


def _kind(walked: Walked, name: str) -> str:
    if name in walked.transfers:
        return "communication"
    return "idle" if name == LAUNCH else "compute"
