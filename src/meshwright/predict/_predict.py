"""Predict the time of a step: the walk's times against the fleet's peaks, with an interval and its reasons.

`interval_of` finds the interval in which the step time is expected, and the reasons why it is wide or lacks
an end. A width holds for the cases it was derived from: products in 16 bits or fp8, on a chip with known
published runs or kernel tables. Every width in `runs.toml` names its source. Where no source bounds the error
of a prediction, that end is None, and the reason is given with it.

`what_helps` estimates what would make the step faster, by walking its schedule with one difference at a time.
A *change* is proposed only where a walk covers its whole effect. Another order of the layout's axes is one:
it only moves devices, so the link of every collective is derived again. A *bound* leaves something out of the
walk and proposes no change: a change that reaches it has costs elsewhere, which only compiling shows
(`weigh --explain`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.compiler import Compiled
from meshwright.errors import InputError
from meshwright.formats import FORMATS
from meshwright.hardware import Calibration, Fleet
from meshwright.hlo import Computation, Executions, Instruction
from meshwright.ledger import Ledger, MemoryLedger
from meshwright.units import format_bytes, format_seconds

from ._busy import Busy, busy_of
from ._factors import TAIL, class_of
from ._kernel_prices import Order, head_size_of
from ._prediction_records import Interval, Prediction, Slice, Speedup, checked_seconds
from ._rate_files import provenance, runs
from ._rates import (
    CUDNN,
    TPU,
    Machine,
    Width,
    ends_with_waits,
    machine_of,
    peer_collectives,
    width_name,
    widths,
)
from ._walk import AS_IT_IS, LAUNCH, Prices, Schedule, Variation, Walked, trace_of, walk

if TYPE_CHECKING:
    from meshwright.hardware import MeasuredRuns

MOST_NAMED = 2
FP8 = "fp8"
FMHA = "__cudnn$fmha"  # the beginning of the names of cuDNN's attention calls
EXPERTS = "experts"  # the width of steps that send tokens to experts
LEAST_SHARE = 0.002  # of the step; a smaller saving would print as 0 %
LEAST_SHARE_OF_AN_ORDER = 0.01  # of the step; larger, because the walk keeps the present order's schedule
MOST_ORDERS = 24  # all orders of four axes; more take longer than the compilation


def interval_of(
    machine: Machine,
    walked: Walked,
    calibration: Calibration | None,
    unpriced: Sequence[str],
    cautions: Iterable[str] = (),
    peer_seconds: float | None = None,
    *,
    also: tuple[str, ...] = (),
    is_of_others: bool = False,
    no_lower_end: str = "",
) -> tuple[Interval, str, tuple[str, ...]]:
    """Return the interval of a walked step, its sources in words, and the reasons why it is no narrower.

    The widest of the widths that apply is used. The share of the step that waits for messages widens it, and
    so does the spread of a calibration's rounds. Factors
    fitted to measured steps have a width of their own, which takes the place of both. Unpriced work removes
    the upper end. Rates whose error no source bounds remove both ends.

    Args:
        unpriced: work that has no rule.
        cautions: doubts about `calibration`, which are added to the reasons.
        peer_seconds: the step with peer-to-peer transfers, where collectives pass the host's memory. It
            lowers the lower end.
        also: the names of further widths: "eager" where PyTorch launched the kernels one by one, "experts".
        is_of_others: whether the program is no transformer of ours, whose like the runs on TPUs trained.
        no_lower_end: why the step may take any less; "" if its lower end holds.
    """
    formats = _unpublished_formats(machine, walked)
    names = names_of_widths(machine, walked, calibration, is_of_others=is_of_others)
    applied = [widths()[name] for name in (*names, *also)]
    if calibration is None or machine.basis == "calibration":
        reasons = [width.reason for width in applied if width.reason]
    else:
        reasons = ["rates that were measured here: no run was compared with such a prediction"]
    low, high, of_waits = _ends_of(machine, walked, applied)
    if calibration is not None and calibration.spread:
        worst = max(calibration.spread.values())
        low, high = low / (1 + worst), high * (1 + worst)
        if worst > machine.shared.steady_spread:
            reasons.append(
                f"the measured rates differ by up to {100 * worst:.0f} % from one round to the next"
            )
    if machine.factors.runs:
        low, high, reasons = _factors_ends(machine, walked, names)
    if machine.factors.set_aside:
        reasons.append(_set_aside(machine.factors.set_aside))
    reasons += cautions
    seconds = walked.seconds
    if peer_seconds is not None and peer_seconds < seconds:
        low *= peer_seconds / seconds
        reasons.append(
            f"{machine.name} has no peer-to-peer transfers, and rates through the host's memory differ by "
            "host: expected as on a host of L40S, the lower end as with peer-to-peer transfers"
        )
    interval = Interval(low=seconds * low, expected=seconds, high=seconds * high)
    ends = f"Interval {100 * low - 100:+.0f} to {100 * high - 100:+.0f} %."
    if unbounded := [*_without_source(machine, walked, formats)]:
        interval, ends = replace(interval, low=None, high=None), "No interval."
        reasons = [*unbounded, *reasons]
    elif unpriced:
        interval = replace(interval, high=None)
        ends = f"Interval from {100 * low - 100:+.0f} %, without an upper end."
        reasons = [f"not priced: {_first_of(unpriced)}", *reasons]
    interval, ends, reasons = _without_lower_end(interval, ends, reasons, no_lower_end)
    words = "; ".join([_rates(machine, calibration, names), *_width_words(machine, applied), *of_waits])
    return interval, f"Estimate. {words[0].upper()}{words[1:]}. {ends}", tuple(reasons)


def _first_of(unpriced: Sequence[str]) -> str:
    more = len(unpriced) - MOST_NAMED
    return ", ".join(unpriced[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _without_lower_end(
    interval: Interval, ends: str, reasons: list[str], why: str
) -> tuple[Interval, str, list[str]]:
    """Return an interval without its lower end, its words, and its reasons; all unchanged without a `why`."""
    if not why:
        return interval, ends, reasons
    words = "No interval."
    if interval.high is not None:
        words = f"Interval to {100 * interval.high / interval.expected - 100:+.0f} %, without a lower end."
    return replace(interval, low=None), words, [why, *reasons]


def _factors_ends(machine: Machine, walked: Walked, names: Sequence[str]) -> tuple[float, float, list[str]]:
    """Return the interval of a step with factors, as shares of its time, and why it is no narrower.

    Steps in 16 bits do not tell the rate of products in fp8, whose width is kept.
    """
    spread = math.exp(TAIL * machine.factors.deviation(walked.exposed, sum(walked.recomputed.values())))
    low, high, reasons = 1 / spread, spread, [f"from {machine.factors.source()}"]
    for width in (widths()[name] for name in names if name.endswith(FP8)):
        reason = [width.reason] if width.reason else []
        low, high, reasons = min(low, width.low), max(high, width.high), [*reasons, *reason]
    if len(machine.factors.runs) == 1 and not machine.factors.runs[0].classes:
        reasons.append("one measured step does not tell the classes of its work apart")
    return low, high, reasons


def _set_aside(number: int) -> str:
    steps = "1 measured step was" if number == 1 else f"{number} measured steps were"
    return f"{steps} compared with other rates than today's, and set aside: calibrate again"


def _ends_of(
    machine: Machine, walked: Walked, applied: Sequence[Width]
) -> tuple[float, float, tuple[str, ...]]:
    """Return the ends by widths and by waits for messages, as shares of the time, and the waits in words.

    On TPUs the lower end waits for none, as the published runs. On CPUs messages were measured as all else.
    """
    low = min((width.low for width in applied), default=1.0)
    high = max((width.high for width in applied), default=1.0)
    waits = math.fsum(walked.exposed.get(name, 0.0) for name in walked.transfers)
    share = waits / walked.seconds if waits else 0.0
    if machine.is_tpu:
        return low * (1 - share), high, ()
    if machine.basis == "calibration" or machine.factors.runs:
        return low, high, ()
    words = f"and messages within a factor of {runs()['factors']['widths']['collective']:g}"
    is_large = share > machine.shared.unpublished_share
    ends = ends_with_waits(low, high, share)
    return *ends, (f"{words} ({100 * share:.0f} % of the step waits for them)",) if is_large else ()


def _width_words(machine: Machine, applied: Iterable[Width]) -> Iterable[str]:
    """Yield the source of the interval's width in words."""
    if not machine.factors.runs:
        yield from (width.words for width in applied)
        return
    noise = 100 * runs()["factors"]["between_programs"] * machine.factors.scale
    yield machine.factors.words()
    yield f"width: what the measured steps leave open of these factors, and {noise:.1f} % between programs"


def names_of_widths(
    machine: Machine, walked: Walked, calibration: Calibration | None, *, is_of_others: bool
) -> tuple[str, ...]:
    """Return the names of the widths in `runs.toml` that apply; none for the basis "roofline"."""
    basis = width_name(machine, calibration)
    if machine.is_tpu and is_of_others:
        basis = f"{basis}-program"
    if basis is None or basis == "calibration":
        return () if basis is None else (basis,)
    if not any(name.startswith(FP8) for name in walked.flops):
        return (basis,)
    if calibration is None:
        if f"{basis}-{FP8}" in widths():
            return (f"{basis}-{FP8}",)
        if of_chip := [name for name, width in widths().items() if machine.name in width.chips]:
            return tuple(of_chip)
    return (basis, FP8)


def _is_fp8(names: Sequence[str]) -> bool:
    """Return whether the interval is that of products in fp8 alone."""
    return bool(names) and all(name.endswith(FP8) for name in names)


def _without_source(machine: Machine, walked: Walked, formats: Sequence[str]) -> Iterable[str]:
    """Yield the reasons why neither a source nor a measured step bounds the error of the prediction."""
    factors = machine.factors
    if machine.basis == "calibration":
        large = walked.total.get("convolution", 0.0) > machine.shared.unpublished_share * walked.seconds
        if large and not factors.resolves("convolution"):
            yield "a CPU's convolutions were measured at four to eight times the predicted time"
        return
    if machine.basis == "roofline" and not factors.runs:
        yield f"no table of kernels and no published run for {machine.name}"
    if formats:
        words = f"products in {', '.join(formats)}: no published run and no table of kernels has them"
        peaks = machine.peak_flops_per_second
        if "fp32" in formats and "bf16" not in peaks and "fp16" in peaks:
            words += f"; {machine.name} has no bf16 and computes it in fp32, fp16 in its tensor cores: "
            words += "--set precision=fp16"
        yield words
    gaps = walked.total.get(LAUNCH, 0.0)
    if gaps > machine.shared.launch_bound_share * walked.seconds and not factors.resolves(LAUNCH):
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
        from ._sources import words_of  # most machines were not measured

        return words_of(calibration, f"tables ({provenance()})", simulated=simulated)
    attention = "attention as measured on cards of its silicon" if machine.measured_attention else ""
    if machine.alone:
        known = {"large products in 16 bits": not _is_fp8(names), "attention": machine.measured_attention}
        reached = " and ".join(name for name, is_known in known.items() if is_known)
        return f"{tables}, {reached} as on {machine.alone}" if reached else tables
    if _is_fp8(names):
        return f"{tables}, {attention}" if attention else tables
    if machine.is_tpu:
        whose = f"published runs on {machine.name}" if machine.basis == TPU else "those on other TPUs"
        share = 100 * (machine.sustained_share or 0.0)
        return (
            f"catalog figures of {machine.name}, products at the {share:.0f} % of peak that "
            f"{whose} sustain; attention and messages at the median efficiencies of nine NVIDIA GPUs "
            f"({provenance()})"
        )
    if machine.sustained_share is not None:
        return (
            f"{tables}, products at most at the {100 * machine.sustained_share:.0f} % of peak "
            "that such cards were measured to sustain" + (f", {attention}" if attention else "")
        )
    if machine.basis == "tables":
        return f"{tables}, {scaled}"
    if machine.basis in ("default", "products"):
        own = f"{machine.name}'s published peaks and bandwidth"
        if machine.basis == "products":
            own += f", large products as others measured them ({runs()['products_reached']['source']})"
        return f"no table for {machine.name}: {own}, medians over nine GPUs ({provenance()}), {scaled}"
    return f"catalog peaks of {machine.name} at the median efficiencies of nine NVIDIA GPUs, {scaled}"


def predict(
    executions: Executions,
    ledger: Ledger,
    compiled: Compiled,
    fleet: Fleet,
    calibration: Calibration | None = None,
    attention_kernel: str = CUDNN,
    cautions: Iterable[str] = (),
    measured: MeasuredRuns | None = None,
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
        measured: steps of runs on this chip, to which factors on the predicted seconds are fitted.

    Raises:
        InputError: a CPU fleet without a calibration, a link or chip without a known rate, or a
            program that the CPU's compiler made in place of the target's.
        ValueError: the program has replica groups of an unknown form.
    """
    _check_source(compiled, fleet)
    machine = machine_of(fleet, calibration, attention_kernel, measured)
    walks = _Walks(
        machine=machine, schedule=Schedule(executions, compiled.mesh_axes, compiled.routing), prices={}
    )
    walked = walks.walked()
    peer_seconds = _peer_seconds(walks) if walked.transfers else None
    found = prediction_of(
        machine,
        walked,
        ledger,
        num_devices=fleet.num_devices,
        tokens_per_step=compiled.tokens_per_step,
        calibration=calibration,
        cautions=(*cautions, *_wide_heads(machine, executions), *_several_slices(fleet)),
        peer_seconds=peer_seconds,
        also=(EXPERTS,) if compiled.routing is not None else (),
        is_of_others=compiled.sequence_length is None,  # a configuration of sequences has a length
    )
    helps = what_helps(
        machine, executions, compiled, fleet, ledger.memory, walked, walks.prices, walks.schedule
    )
    return replace(found, what_helps=helps)


def _several_slices(fleet: Fleet) -> Iterator[str]:
    """Yield what is known of runs on several TPU slices, and not priced.

    Source: benchmarks/records/2026-11-28_predict_tpus.toml, MaxText's runs on one and on several slices.
    """
    if fleet.domain == "slice" and fleet.num_domains > 1:
        yield (
            "14 published runs on 2 to 32 slices took 0 to 21 % longer than one slice of their model, 5 % at "
            "the median, which the bytes between slices do not explain: it is not in the expected time"
        )


def _wide_heads(machine: Machine, executions: Executions) -> Iterator[str]:
    """Yield a reason for each width of heads above all of which the rate of attention was measured."""
    widest = max({each.head_size for each in machine.measured_attention} or machine.rates.attention)
    calls = (each for each in executions if (each.instruction.custom_call_target or "").startswith(FMHA))
    for size in sorted({head_size_of(each.computation, each.instruction) for each in calls}):
        if size > widest:
            yield f"attention with heads of {size} has the rate of heads of {widest}: no wider was measured"


def prediction_of(
    machine: Machine,
    walked: Walked,
    ledger: Ledger,
    *,
    num_devices: int,
    tokens_per_step: int | None,
    calibration: Calibration | None = None,
    cautions: Iterable[str] = (),
    peer_seconds: float | None = None,
    also: tuple[str, ...] = (),
    is_of_others: bool = False,
    no_lower_end: str = "",
) -> Prediction:
    """Return the prediction of a walked step, without what would help.

    Args:
        ledger: the FLOPs of the fleet, and what is unpriced beside what the walk found.
        calibration, cautions, peer_seconds: as for `interval_of`.
        also, is_of_others, no_lower_end: as for `interval_of`.
    """
    seconds = checked_seconds(walked.seconds)
    peak = _peak(machine, walked)
    no_rate = (f"{what}, {n} times" if n > 1 else what for what, n in walked.unpriced.items())
    without_rule = (what for what in ledger.unpriced if not (machine.is_tpu and what.startswith("sort(")))
    unpriced = (*without_rule, *no_rate)
    available = seconds * num_devices * peak
    may_be_short = bool(unpriced or machine.factors.runs)
    mfu = _utilisation(ledger.flops.model, available, may_be_short)
    hfu = _utilisation(ledger.flops.executed, available, may_be_short)
    assert mfu is None or mfu <= 1, (
        f"an MFU of {mfu:.3f}: {ledger.flops.model} model FLOPs in {seconds} s at {peak} FLOP/s"
    )
    interval, basis, reasons = interval_of(
        machine,
        walked,
        calibration,
        unpriced,
        cautions,
        peer_seconds,
        also=also,
        is_of_others=is_of_others,
        no_lower_end=no_lower_end,
    )
    return Prediction(
        step_seconds=interval,
        tokens_per_second_per_device=tokens_per_step / seconds / num_devices if tokens_per_step else None,
        mfu=mfu,
        hfu=hfu,
        peak_flops_per_second=peak,
        slices=_slices(walked),
        basis=basis,
        interval_reasons=reasons,
        unpriced=unpriced,
    )


def predicted_trace(
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    calibration: Calibration | None = None,
    measured: MeasuredRuns | None = None,
) -> dict[str, Any]:
    """Return the predicted step of one device as a trace that ui.perfetto.dev opens, in JSON types.

    Raises:
        InputError: as `predict`.
        ValueError: as `predict`.
    """
    walked = _walked(executions, compiled, fleet, calibration, measured)
    return trace_of(walked.events, f"{compiled.name} on {fleet.name}")


def classes_of_instructions(
    executions: Executions, compiled: Compiled, fleet: Fleet, calibration: Calibration | None = None
) -> dict[str, str]:
    """Return the class of work of each kernel and message that a step runs, by the instruction's name.

    Raises:
        InputError: as `predict`.
        ValueError: as `predict`.
    """
    walked = _walked(executions, compiled, fleet, calibration, None)
    return {event.operation: class_of(event.name) for event in walked.events if event.operation}


def predicted_busy(
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    calibration: Calibration | None = None,
    measured: MeasuredRuns | None = None,
    *,
    num_spans: int,
) -> Busy:
    """Return how busy each stream of one device is in equal spans of the predicted step.

    Raises:
        InputError: as `predict`.
        ValueError: as `predict`.
    """
    walked = _walked(executions, compiled, fleet, calibration, measured)
    return busy_of(walked.events, walked.seconds, num_spans)


def _walked(
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    calibration: Calibration | None,
    measured: MeasuredRuns | None,
) -> Walked:
    _check_source(compiled, fleet)
    machine = machine_of(fleet, calibration, measured=measured)
    return walk(machine, executions, compiled.mesh_axes, routing=compiled.routing)


def _check_source(compiled: Compiled, fleet: Fleet) -> None:
    if compiled.source == "simulated on CPU":
        raise InputError(
            f"no time is predicted for {fleet.name} from a program simulated on CPU: that compiler widens "
            "bf16 matmuls to fp32, overlaps no communication and fuses otherwise",
            hint="weigh on a fleet whose compiler can be installed (`meshwright doctor`)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walks:
    """Walks over one program with one difference each. `prices`: of its kernels on this machine."""

    machine: Machine
    schedule: Schedule
    prices: Prices

    def walked(self, variation: Variation = AS_IT_IS) -> Walked:
        """Return the walk with a variation; prices of kernels stay the same."""
        return self._walk(self.machine, variation, self.prices)

    def seconds_on(self, machine: Machine, prices: Prices | None = None) -> float:
        """Return the seconds on another machine."""
        return self._walk(machine, AS_IT_IS, prices).seconds

    def _walk(self, machine: Machine, variation: Variation, prices: Prices | None) -> Walked:
        its = self.schedule
        return walk(machine, its.executions, its.mesh_axes, variation, prices, schedule=its, draws=False)


def _peer_seconds(walks: _Walks) -> float | None:
    """Return the seconds of a step as if devices had peer-to-peer transfers; None if they need none."""
    machine = walks.machine
    if not machine.through_host:
        return None
    rates = replace(machine.rates, collectives=peer_collectives())
    return walks.seconds_on(replace(machine, rates=rates))


def _peak(machine: Machine, walked: Walked) -> float:
    """Return the dense peak of the format in which most FLOPs run; 0 for a program without products."""
    if not walked.flops:
        return 0.0
    return machine.peak_flops_per_second[max(walked.flops, key=lambda name: walked.flops[name])]


def _utilisation(flops: int, available: float, may_be_short: bool) -> float | None:
    """Return FLOPs as a share of those available at the peak; None where that is not known.

    `may_be_short`: unpriced work or measured factors may leave the step shorter than its FLOPs take at the
    peak: then it is not known.
    """
    if not available:
        return None
    share = flops / available
    return None if share > 1 and may_be_short else share


def _slices(walked: Walked) -> tuple[Slice, ...]:
    def kind(name: str) -> str:
        if name in walked.transfers:
            return "communication"
        return "idle" if name == LAUNCH else "compute"

    return tuple(
        Slice(
            kind=kind(name),
            name=name,
            seconds=seconds,
            exposed_seconds=walked.exposed.get(name, 0.0),
            recomputed_seconds=walked.recomputed.get(name, 0.0),
        )
        for name, seconds in sorted(walked.total.items(), key=lambda item: -item[1])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """Repeated walks over one program. `walked` is the walk without changes."""

    walks: _Walks
    walked: Walked

    def saving(self, variation: Variation) -> float:
        """Return the seconds that a variation saves."""
        return self.walked.seconds - self.walks.walked(variation).seconds

    def saving_on(self, machine: Machine, prices: Prices | None = None) -> float:
        """Return the seconds that another machine saves."""
        return self.walked.seconds - self.walks.seconds_on(machine, prices)


def what_helps(
    machine: Machine,
    executions: Executions,
    compiled: Compiled,
    fleet: Fleet,
    memory: MemoryLedger,
    walked: Walked,
    prices: Prices,
    schedule: Schedule | None = None,
) -> tuple[Speedup, ...]:
    """Return the changes, then the bounds, the largest saving of each first.

    Args:
        walked, prices: the walk over the program as it is, and the prices of its kernels.
        schedule: that of the executions, if the caller has walked it.
    """
    schedule = Schedule(executions, compiled.mesh_axes, compiled.routing) if schedule is None else schedule
    walks = _Walks(machine=machine, schedule=schedule, prices=prices)
    again = _Again(walks=walks, walked=walked)
    bounds = [
        *_hidden(again),
        *_sent_once(again),
        *_kept(again, memory),
        *_narrowed(again),
        *_without_gaps(again),
    ]
    least = LEAST_SHARE * walked.seconds
    large = [help_ for help_ in bounds if help_.saving_seconds > least]
    return (*_order(again, fleet), *sorted(large, key=lambda help_: -help_.saving_seconds))


def _hidden(again: _Again) -> Iterator[Speedup]:
    walked = again.walked
    exposed = {axes for name, axes in walked.transfers.items() if walked.exposed.get(name)}
    for axes in sorted(exposed):
        yield Speedup(
            what=f"no waiting for collectives over {axes}",
            saving_seconds=again.saving(Variation(hidden=axes)),
            certainty="bound: all of them hidden behind computation, or gone",
        )


def _sent_once(again: _Again) -> Iterator[Speedup]:
    """Yield the bound of sending a token once to each domain and device, for rows that are sent by choice."""
    routing = again.walks.schedule.routing
    exchanges = any(name.startswith("all-to-all[") for name in again.walked.transfers)
    if routing is None or routing.domains > 1 or not exchanges:
        return
    yield Speedup(
        what="tokens sent once to each host and device that has any of their experts",
        saving_seconds=again.saving(Variation(sends_once=True)),
        certainty="bound: for uniform choices, as DeepEP and HybridEP send them; our own step sends a row "
        "once to each host (expert_domains) where links make that quicker, and not once to a device",
    )


def _order(again: _Again, fleet: Fleet) -> Iterator[Speedup]:
    """Yield the fastest order of the layout's axes, if it is not the present one."""
    axes = [(name, size) for name, size in again.walks.schedule.mesh_axes if size > 1]
    if fleet.num_domains == 1 or fleet.domain == "slice":
        return  # no order crosses a slower link; or XLA has divided the messages between slices by this order
    sizes = tuple(size for _, size in axes)
    best, least = None, LEAST_SHARE_OF_AN_ORDER * again.walked.seconds
    for places in itertools.islice(itertools.permutations(range(len(axes))), 1, MOST_ORDERS):
        try:
            saving = again.saving(Variation(order=Order(sizes=sizes, axes=places)))
        except InputError:
            continue  # this order crosses a link whose rate is not known
        if saving > least:
            best, least = places, saving
    if best is None:
        return
    layout = ",".join(f"{axes[place][0]}={axes[place][1]}" for place in best)
    yield Speedup(
        what=f"the order of the axes {layout}",
        saving_seconds=least,
        change=f"--layout {layout}",
        certainty="walked whole: every collective on the links that this order gives it; the compiler may "
        "schedule it otherwise",
    )


def _kept(again: _Again, memory: MemoryLedger) -> Iterator[Speedup]:
    """Yield the bound without recomputation."""
    schedule = again.walks.schedule

    def skips(computation: Computation, instruction: Instruction) -> bool:
        runs = instruction.opcode in ("while", "conditional", "call")  # bodies are checked on their own
        return not runs and schedule.phase(computation, instruction) == "recompute"

    if memory.fits is None or memory.usable_bytes is None:
        room = "how much memory is free is not known"
    else:
        free = memory.usable_bytes - memory.reserved_bytes - memory.allowance_bytes
        room = f"{format_bytes(free)} are free" if free > 0 else "no memory is free"
    yield Speedup(
        what="nothing computed again in the backward pass",
        saving_seconds=again.saving(Variation(skips=skips)),
        certainty=f"bound: writing and reading the values kept instead is not counted; {room}",
    )


def _narrowed(again: _Again) -> Iterator[Speedup]:
    if "bf16" not in again.walks.machine.peak_flops_per_second:
        return
    narrow, wide = replace(again.walks.machine, narrow_products=True), again.walks.schedule.multiplies_in
    prices = {key: price for key, price in again.walks.prices.items() if not wide(key, "fp32")}
    yield Speedup(
        what="products of float32 in bf16",
        saving_seconds=again.saving_on(narrow, prices),
        certainty="bound: operands and results of half the bytes, casts not counted",
    )


def _without_gaps(again: _Again) -> Iterator[Speedup]:
    yield Speedup(
        what="no gaps between kernels",
        saving_seconds=again.saving_on(replace(again.walks.machine, launch_seconds=0.0), again.walks.prices),
        certainty="bound: fewer and larger kernels still have gaps",
    )
