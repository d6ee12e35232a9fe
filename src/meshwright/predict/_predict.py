"""`predict`: the walk's times, set against the fleet's peaks, with an interval and its reason."""

from __future__ import annotations

from meshwright.compiler import Compiled
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import Ledger
from meshwright.ledger.hlo import Program

from ._calibration import Calibration
from ._machine import PUBLISHED_RUNS_FACTOR, Machine, machine_of
from ._rates import efficiency_spread, provenance
from ._records import Interval, Prediction, Slice
from ._walk import LAUNCH, Walked, walk

# 20 published runs held out from every choice: median error 6.4 %, p90 21.6 % (bf16, dense, up to 512
# GPUs). 11 fp8 rows, none held out: p90 28 %.
_BF16_ERROR, _FP8_ERROR = 0.22, 0.30
# No prediction of these kinds has been set beside a measurement yet; the widths are judgement.
_CALIBRATED_ERROR, _ROOFLINE_ERROR, _LAUNCH_BOUND_ERROR = 0.40, 0.50, 0.50
_LAUNCH_BOUND_SHARE = 0.2  # of the step: published runs do not have that much


def predict(
    program: Program,
    ledger: Ledger,
    compiled: Compiled,
    fleet: Fleet,
    calibration: Calibration | None = None,
) -> Prediction:
    """Step time of a compiled program on a fleet.

    Counted: every scheduled kernel, the gaps between them, collectives not hidden behind computation.
    Not counted: the host's dispatch and data loading, stragglers, checkpoints, compilation.

    Args:
        calibration: of the host whose simulated devices the fleet is; other fleets need none.

    Raises:
        InputError: a CPU fleet without a calibration, a link or chip without a known rate, or a
            program that the CPU's compiler made in the place of the target's.
        ValueError: the program has replica groups of an unknown form.
    """
    if compiled.source == "simulated on CPU":
        raise InputError(
            f"no time is predicted for {fleet.name} from a program simulated on CPU: that compiler widens "
            "bf16 matmuls to fp32, overlaps no communication and fuses otherwise",
            hint="weigh on a fleet whose compiler can be installed (`meshwright doctor`)",
        )
    machine = machine_of(fleet, calibration)
    walked = walk(machine, program, compiled.mesh_axes)
    seconds = walked.seconds
    assert seconds > 0, f"{compiled.name} takes no time"
    peak = _peak(machine, walked)
    available = seconds * fleet.num_devices * peak
    mfu = ledger.flops.model / available if peak else 0.0
    hfu = ledger.flops.executed / available if peak else 0.0
    assert mfu <= 1, f"an MFU of {mfu:.3f}: {ledger.flops.model} model FLOPs in {seconds} s at {peak} FLOP/s"
    error, basis = _interval(machine, walked, compiled, calibration)
    tokens = compiled.tokens_per_step
    return Prediction(
        step_seconds=Interval(low=seconds * (1 - error), expected=seconds, high=seconds * (1 + error)),
        tokens_per_second_per_device=tokens / seconds / fleet.num_devices if tokens else None,
        mfu=mfu,
        hfu=hfu,
        peak_flops_per_second=peak,
        slices=_slices(walked),
        basis=basis,
        unpriced=(*ledger.unpriced, *(f"{what}, {n} times" for what, n in walked.unpriced.items())),
    )


def _peak(machine: Machine, walked: Walked) -> float:
    """The dense peak of the format in which most FLOPs run; 0 where nothing is multiplied."""
    if not walked.flops:
        return 0.0
    return machine.peak_flops_per_second[max(walked.flops, key=lambda name: walked.flops[name])]


def _slices(walked: Walked) -> tuple[Slice, ...]:
    names = sorted(walked.total, key=lambda name: -walked.total[name])
    return tuple(
        Slice(name=name, seconds=walked.total[name], exposed_seconds=walked.exposed.get(name, 0.0))
        for name in names
    )


def _interval(
    machine: Machine, walked: Walked, compiled: Compiled, calibration: Calibration | None
) -> tuple[float, str]:
    """Half the interval's width as a share of the step, and in words where rates and width come from."""
    dominant = max(walked.flops, key=lambda name: walked.flops[name], default="")
    scaled = f"GEMM rates x {PUBLISHED_RUNS_FACTOR} as published bf16 runs ask for"
    if calibration is not None and machine.basis == "calibration":
        error = _CALIBRATED_ERROR
        words = f"rates measured on {calibration.date} ({calibration.source}); width not yet measured"
    elif machine.basis == "tables" and dominant.startswith("fp8"):
        error = _FP8_ERROR
        words = f"{machine.name} tables ({provenance()}); width from 11 published fp8 runs, p90 28 %"
    elif machine.basis == "tables":
        error = _BF16_ERROR
        words = f"{machine.name} tables ({provenance()}), {scaled}; width: p90 over 20 held-out runs"
    elif machine.basis == "default":
        error = _BF16_ERROR + efficiency_spread()
        words = (
            f"no table for {machine.name}: medians over nine GPUs ({provenance()}), {scaled}; "
            f"width: that of measured chips and the spread of their GEMM rates"
        )
    else:
        error = _ROOFLINE_ERROR
        words = (
            f"catalog peaks of {machine.name} at the median efficiencies of nine NVIDIA GPUs; not calibrated"
        )
    if (
        machine.basis != "calibration"
        and walked.total.get(LAUNCH, 0.0) > _LAUNCH_BOUND_SHARE * walked.seconds
    ):
        error = max(error, _LAUNCH_BOUND_ERROR)
        words += "; widened: mostly kernel launches, which no published run resolves"
    return error, f"Estimate. {words[0].upper()}{words[1:]}. Interval +-{100 * error:.0f} %."
