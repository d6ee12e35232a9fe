"""`predict`: the walk's times, set against the fleet's peaks, with an interval and its reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.compiler import Compiled
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import Ledger
from meshwright.ledger.hlo import Program

from ._calibration import Calibration
from ._interval import interval_of
from ._machine import Machine, machine_of
from ._rates import CUDNN
from ._records import Prediction, Slice
from ._trace import trace_of
from ._walk import LAUNCH, Prices, Walked, walk
from ._what_helps import what_helps


def predict(
    program: Program,
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
        calibration: of the host whose simulated devices the fleet is; of an accelerator, where one of its
            kind was measured.
        attention_kernel: "cudnn", or "flash-2" to price the program as if that library attended.
        cautions: what is doubtful about the calibration; told beside the interval.

    Raises:
        InputError: a CPU fleet without a calibration, a link or chip without a known rate, or a
            program that the CPU's compiler made in the place of the target's.
        ValueError: the program has replica groups of an unknown form.
    """
    prices: Prices = {}
    machine, walked = _walked(program, compiled, fleet, calibration, attention_kernel, prices)
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
        what_helps=what_helps(machine, program, compiled, fleet, ledger.memory, walked, prices),
        unpriced=unpriced,
    )


def predicted_trace(
    program: Program, compiled: Compiled, fleet: Fleet, calibration: Calibration | None = None
) -> dict[str, Any]:
    """The predicted step of one device as a trace that ui.perfetto.dev opens, as JSON's types.

    Raises:
        InputError: as `predict`.
        ValueError: as `predict`.
    """
    _, walked = _walked(program, compiled, fleet, calibration, CUDNN)
    return trace_of(walked.events, f"{compiled.name} on {fleet.name}")


def _walked(
    program: Program,
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
    return machine, walk(machine, program, compiled.mesh_axes, prices=prices)


def _peak(machine: Machine, walked: Walked) -> float:
    """The dense peak of the format in which most FLOPs run; 0 where nothing is multiplied."""
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
