"""Reconcile a run with its prediction in Python: the folder of a run of ours, or anybody's step by its trace.

Used by: the command `reconcile`, and users as `mw.reconcile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from meshwright.api._weigh import weigh
from meshwright.config import Overrides, RunConfig
from meshwright.contrib.calibration import ChromeTrace, is_xplane
from meshwright.errors import InputError
from meshwright.files import read_json
from meshwright.hardware import LONGEST_STEP_SECONDS, Fleet
from meshwright.measure import Reconciliation
from meshwright.programs import Program, program_of
from meshwright.results import Phase, Run, Weighing, ignore
from meshwright.units import parse_count, parse_seconds

from ._cause import Asked, Gap
from ._gap import gap_of, gap_of_seconds
from ._own_runs import reconcile_run
from ._recorded import Recorded

Traced = str | Path
MOST_LOOKED_AT = 1000  # events of a file, to tell its profiler
NEEDS = "give a trace (--trace FOLDER), the seconds of a step (--measured 9.6s), or --tokens-per-second 12e3"


@overload
def reconcile(run: Run | str | Path, *, on_event: Callable[[Phase], None] = ignore) -> Reconciliation: ...
@overload
def reconcile(
    run: Program | RunConfig | str | Path,
    *,
    on: str | Fleet,
    layout: str | None = None,
    overrides: Overrides = (),
    trace: Traced | Sequence[Traced] | None = None,
    measured: float | str | None = None,
    tokens_per_second: float | str | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> Gap: ...
@overload
def reconcile(
    run: Run | str | Path,
    *,
    trace: Traced | Sequence[Traced],
    on_event: Callable[[Phase], None] = ignore,
) -> Gap: ...
def reconcile(
    run: Program | RunConfig | Run | str | Path,
    *,
    on: str | Fleet | None = None,
    layout: str | None = None,
    overrides: Overrides = (),
    trace: Traced | Sequence[Traced] | None = None,
    measured: float | str | None = None,
    tokens_per_second: float | str | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> Reconciliation:
    """Return predicted quantities next to measured ones; with a trace or a time, why the step is slow.

    Args:
        run: the result of `train` or the folder of a run, whose own measurement is taken; or any program that
            `weigh` takes, with what was measured of it.
        on: the fleet on which it ran; of a run's folder its own.
        layout, overrides: as for `weigh`.
        trace: XPlane files or the folder of jax.profiler, its JSON, or JSON of torch.profiler; several files
            are those of several hosts or ranks.
        measured: the seconds of one step, 9.6 or "9600ms", if there is no trace.
        tokens_per_second: of the whole fleet, if there is neither.

    Returns:
        A `Gap` if there is a trace or a time: a reconciliation of the step's seconds, with the causes.

    Raises:
        InputError: as `weigh`; also nothing is measured, or the trace cannot be read or is of another
            program.

    >>> gap = reconcile("linear", on="8xH100", measured="1s")
    >>> gap.causes, round(gap.gap_seconds - gap.unexplained_seconds, 9)
    ((), 0.0)
    """
    took = Took(trace=trace, measured=measured, tokens_per_second=tokens_per_second)
    if not took.given:
        if isinstance(run, Run) or (on is None and isinstance(run, str | Path)):
            return reconcile_run(run, on_event=on_event)
        raise nothing_measured(run)
    if isinstance(run, Run):
        run = str(run.folder)
    return gap_with(run, took, on=on, layout=layout, overrides=overrides, on_event=on_event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """Hold how long a step took: a trace, the seconds of a step, or tokens a second of the whole fleet."""

    trace: Traced | Sequence[Traced] | None = None
    measured: float | str | None = None
    tokens_per_second: float | str | None = None

    @property
    def given(self) -> int:
        """How many of the three are given."""
        return sum(each is not None for each in (self.trace, self.measured, self.tokens_per_second))


def gap_with(
    program: Program | RunConfig | str | Path,
    took: Took,
    *,
    on: str | Fleet | None,
    layout: str | None,
    overrides: Overrides,
    on_event: Callable[[Phase], None],
) -> Gap:
    """Return the gap between what a step took and what the program should take.

    Raises:
        InputError: as `reconcile`.
    """
    if not took.given:
        raise nothing_measured(program)
    if took.given > 1:
        raise InputError("a step's time is given twice", hint=NEEDS)
    recorded = None
    if took.trace is not None:  # before the weighing, which may take minutes
        on_event(Phase(name="reading the trace"))
        recorded = read_trace(took.trace)
    fleet = on if on is not None else _fleet_of_run(program)
    asked = program_of(program)
    weighing = weigh(asked, on=fleet, layout=layout, overrides=overrides, on_event=on_event)
    if recorded is not None:
        on_event(Phase(name="comparing"))
        gap = gap_of(recorded, weighing)
    else:
        gap = _of_a_time(weighing, took.measured, took.tokens_per_second)
    return replace(gap, asked=Asked(weighing=weighing, program=asked, overrides=overrides))


def nothing_measured(program: Program | RunConfig | Run | str | Path) -> InputError:
    """Return the refusal of a program of which nothing is measured; the folder of a run says it itself."""
    folder = Path(program) if isinstance(program, str | Path) else None
    if folder is None or not (folder / "measurement.json").is_file():
        return InputError("nothing is measured of the program", hint=NEEDS)
    return InputError(
        f"{folder} is the folder of a run, which says itself on which fleet it ran and what was measured",
        hint=f"leave --on out: meshwright reconcile {folder}; or {NEEDS}",
    )


def read_trace(trace: Traced | Sequence[Traced]) -> Recorded:
    """Return what the files of one trace say, by whichever profiler they are.

    Raises:
        InputError: a file cannot be read, or is no trace.
    """
    given: list[object] = (
        list(trace) if isinstance(trace, Iterable) and not isinstance(trace, str) else [trace]
    )
    if not given:
        raise InputError("no file of a trace is named", hint=NEEDS)
    paths: list[Path] = []
    for each in given:
        if not isinstance(each, str | Path):
            raise InputError(f"{repr(each)[:80]} is not the name of a trace", hint=NEEDS)
        paths.append(Path(each))
    of_jax = {path: is_xplane(path) or _is_json_of_jax(path) for path in paths}
    if len(set(of_jax.values())) > 1:
        raise InputError("the files are of two profilers", hint="give those of one trace of one run")
    if of_jax[paths[0]]:
        from ._jax_trace import jax_trace

        return jax_trace(paths)
    from ._kineto_trace import kineto_trace

    return kineto_trace(paths)


def _is_json_of_jax(path: Path) -> bool:
    """Return whether Chrome's events are of jax's profiler, which names processes by XPlane's planes."""
    for place, event in enumerate(ChromeTrace(path)):
        if event.text("name") == "process_name":
            return str(event.args.get("name", "")).startswith(("/host:", "/device:"))
        if "hlo_op" in event.args or place > MOST_LOOKED_AT:
            return "hlo_op" in event.args
    return False


def _fleet_of_run(run: Program | RunConfig | str | Path) -> str:
    path = Path(run) / "weighing.json" if isinstance(run, str | Path) else None
    if path is None or not path.is_file():
        raise InputError("no fleet is named", hint="name the one on which it ran: --on 64xH100")
    try:
        return str(read_json(path, strict=False)["fleet"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as missing:
        hint = "name the one on which it ran: --on 64xH100"
        raise InputError(f"{path} does not say on which fleet it ran", hint=hint) from missing


def _of_a_time(
    weighing: Weighing, measured: float | str | None, tokens_per_second: float | str | None
) -> Gap:
    if measured is not None:
        seconds = parse_seconds(measured) if isinstance(measured, str) else _number(measured, "a step's time")
        return gap_of_seconds(_checked(seconds), weighing, "as it was given")
    assert tokens_per_second is not None, "one of the two is given"
    text = isinstance(tokens_per_second, str)
    rate = parse_count(tokens_per_second) if text else _number(tokens_per_second, "a number of tokens")
    if weighing.tokens_per_step is None:
        raise InputError(
            f"{weighing.name} does not say how many tokens a step has",
            hint="give the seconds of a step: --measured 9.6s",
        )
    if not rate > 0 or not math.isfinite(rate):
        raise InputError(f"{rate:g} tokens a second is no rate", hint="give those of the whole fleet: 12e3")
    return gap_of_seconds(_checked(weighing.tokens_per_step / rate), weighing, f"{rate:.4g} tokens a second")


def _number(value: object, what: str) -> float:
    try:
        return float(value)  # pyright: ignore[reportArgumentType]  numbers of numpy and jax too
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{repr(value)[:80]} is not {what}", hint=NEEDS) from None


def _checked(seconds: float) -> float:
    if not 0 < seconds <= LONGEST_STEP_SECONDS:
        raise InputError(
            f"a step of {seconds:.4g} s was not measured: none takes more than {LONGEST_STEP_SECONDS:g} s",
            hint="give the seconds of one step: --measured 9.6s, 9600ms",
        )
    return seconds
