"""Train one configuration with every combination of several keys' values, and rank the runs, best first.

Used by: `_sweep_command`, and users as `mw.sweep`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import Session, new_folder, train
from meshwright.compiler import warm_workers
from meshwright.config import RunConfig, trainable
from meshwright.errors import InputError, MeshwrightError
from meshwright.measure import Measurement
from meshwright.programs import fleet_of, resolved, run_named
from meshwright.results import FirstStepsCompared, Phase, ignore
from meshwright.units import format_count

from ._sweep_records import Sweep, SweepRun, SweepRunStarted

if TYPE_CHECKING:
    from meshwright.trainer.loop import Event

OPENING, CLOSING = "[{(", "]})"
MOST_RUNS = 1000
LONGEST_NAME = 80  # characters of the name of a run's folder
NUMBERED = re.compile(r"\d{4,9}-", re.ASCII)  # how the name of a run's folder begins
Values = dict[str, str]


@warm_workers()
def sweep(
    config: str | RunConfig,
    over: Sequence[str] | Mapping[str, Any],
    *,
    on: str = "local",
    layout: str | None = None,
    steps: int | None = None,
    folder: Path | None = None,
    on_event: Callable[[Event | Phase | FirstStepsCompared | SweepRunStarted], None] = ignore,
) -> Sweep:
    """Train every combination of values, each in its own folder, and write a page with a table and plots.

    A failed run is listed with its reason, and the other runs continue. Ctrl-C ends the sweep and returns the
    runs so far.

    Args:
        over: {"section.key": [value, ...]}, or a sequence of "section.key=value,value,...". A single value
            holds for all runs. A comma inside brackets or quotes does not separate values:
            'layout="fsdp=4,tensor=2","data=8"'.
        on, layout, steps: as for `train`.
        folder: of the sweep; runs/sweep-NAME-TIME by default. Finished runs in it are read and not run again.
            An unfinished run resumes from its newest checkpoint.
        on_event: called with `SweepRunStarted` before each run, and with the events of the run.

    Raises:
        InputError: no key has several values, there are more than 1000 combinations, a combination is not a
            valid configuration, or the folder cannot be used. All of this is checked before the first run.
            Also an `InputError` of the first run.
    """
    swept, fixed = _parsed(over)
    combinations = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    overrides = [[*fixed, *(f"{key}={value}" for key, value in values.items())] for values in combinations]
    configs = [run_named("sweep", config, given, layout) for given in overrides]
    name = configs[0].name
    if folder is None:
        folder = new_folder(f"sweep-{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    runs = list(zip(combinations, configs, _folders(folder, combinations), strict=True))
    earlier = [_finished(*run, on, steps, earlier=True) for run in runs]
    made = Sweep(
        name=name,
        fleet=on,
        folder=folder,
        keys=tuple(swept),
        runs=(),
        not_run=0,
        stopped=False,
        batch_unit=configs[0].batch_unit,
    )
    for number, run in enumerate(runs, start=1):
        on_event(SweepRunStarted(number=number, total=len(runs), values=run[0]))
        done, stopped = earlier[number - 1], False
        if done is None:
            done, stopped = _run(*run, number == 1, on=on, steps=steps, on_event=on_event)
        made = dataclasses.replace(made, runs=(*made.runs, done), not_run=len(runs) - number, stopped=stopped)
        with _writing(folder):  # after each run, so that a killed sweep has its page too
            (folder / "sweep.json").write_text(json.dumps(made.to_dict(), indent=1))
            (folder / "report.html").write_text(made.to_html(), "utf-8")
        if stopped:
            break
    return made


def _parsed(over: Sequence[str] | Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the keys with several values, and the overrides that hold for all runs."""
    swept: dict[str, list[str]] = {}
    fixed: list[str] = []
    for text, key, values in _entries(over):
        if len(values) == 1:
            fixed.append(text)  # any error in it is reported when it is applied
        elif key in swept:
            raise InputError(f"{key} is swept twice", hint=f"give all its values at once: {text}")
        else:
            _check_values(key, values)
            swept[key] = values
    if not swept:
        first = next(iter(over), "optimizer.learning_rate").partition("=")[0]
        raise InputError(
            "nothing to sweep: no key has several values",
            hint=f"separate them by commas, as in --set {first}=VALUE,VALUE",
        )
    count = math.prod(len(values) for values in swept.values())
    if count > MOST_RUNS:
        factors = " x ".join(str(len(values)) for values in swept.values())
        raise InputError(
            f"{factors[:80]} values are {format_count(count)} combinations; a sweep runs at most {MOST_RUNS}",
            hint="leave values out, or sweep some of the keys first",
        )
    return swept, fixed


def _entries(over: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each entry as the text of an override, its key, and its values as texts."""
    if not isinstance(over, Mapping):
        for text in over:
            key, _, values = text.partition("=")
            yield text, key.strip(), list(_values(values))
        return
    for key, given in over.items():
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        texts = [
            str(value).lower() if value is None or isinstance(value, bool) else str(value)
            for value in (given if is_list else [given])
        ]
        yield f"{key}={','.join(texts)}", key, texts


def _check_values(key: str, values: Sequence[str]) -> None:
    """Raise if a value is empty or given twice."""
    twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
    if "" in values or twice is not None or not values:
        what = "an empty value" if twice is None else f"{twice} twice"
        given, better = (f"{key}={','.join(v)}" for v in (values, dict.fromkeys(filter(None, values))))
        raise InputError(f"{given!r} has {what}", hint=f"write {better}")


def _values(text: str) -> Iterator[str]:
    """Yield the parts of `text` between commas that are outside brackets and quotes."""
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in OPENING:
            depth += 1
        elif letter in CLOSING:
            depth -= 1
        elif letter == "," and depth <= 0:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _folders(folder: Path, combinations: Sequence[Values]) -> list[Path]:
    """Return each combination's folder: the existing one for these values, else one with the next number."""
    there = sorted(path for path in folder.iterdir() if NUMBERED.match(path.name) and path.is_dir())
    by_name = {path.name.partition("-")[2]: path for path in there}
    number = max((int(path.name.partition("-")[0]) for path in there), default=0)
    found: list[Path] = []
    for name in _names(combinations):
        if name not in by_name:
            number += 1
        found.append(by_name.get(name, folder / f"{number:04d}-{name}"))
    return found


def _names(combinations: Sequence[Values]) -> list[str]:
    """Return the values as folder names.

    A name ends with a checksum if characters were changed, or if two keys differ only in their section.
    """
    names: list[str] = []
    for values in combinations:
        text = SweepRun.label_of(values).replace(", ", ",")
        name = re.sub(r"[^\w.=+,-]", "_", text)[:LONGEST_NAME]
        changed = name != text or len({key.rpartition(".")[2] for key in values}) < len(values)
        names.append(f"{name}-{zlib.crc32(json.dumps(values).encode()):08x}" if changed else name)
    return names


def _run(
    values: Values,
    config: RunConfig,
    folder: Path,
    is_first: bool,
    *,
    on: str,
    steps: int | None,
    on_event: Callable[[Event | Phase | FirstStepsCompared], None],
) -> tuple[SweepRun, bool]:
    """Run one combination; return its record, and whether the user stopped it.

    An earlier attempt resumes from its newest checkpoint; without one it begins again.
    """
    try:
        how = {"on": on, "steps": steps, "folder": folder, "on_event": on_event}
        measurement = train(config, session=Session(resume=True, discard_steps=True), **how).measurement
        if measurement.interrupted:
            return _failed(values, folder, f"stopped after {measurement.steps} steps"), True
        run = _finished(values, config, folder, on, steps, earlier=False)
        if run is None:  # a full disk ends no run
            raise MeshwrightError("it finished, and its files could not be written", hint="make room")
        return run, False
    except KeyboardInterrupt:
        return _failed(values, folder, "stopped before its first step"), True
    except MeshwrightError as failed:
        if is_first and isinstance(failed, InputError):
            raise
        why = failed.message
    except RuntimeError as failed:  # an error of jax, such as too little memory
        why = f"{type(failed).__name__}: {str(failed).splitlines()[0]}"
    return _failed(values, folder, why), False


def _finished(
    values: Values, config: RunConfig, folder: Path, on: str, steps: int | None, *, earlier: bool
) -> SweepRun | None:
    """Return the finished run that the folder holds, if any; raise if one has another configuration.

    One that has not finished would go on with settings that are not those of its first steps.
    """
    config, hint = trainable(config, steps), "name another folder, or repeat that sweep"
    try:
        was = json.loads((folder / "config.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):  # a broken one is made again
        return None
    if config.batch.sequences_per_replica is not None:  # a run's folder has the batch of its fleet
        config = resolved(config, fleet_of(on))[0]
    if was != config.model_dump(mode="json"):
        raise InputError(f"{folder} holds a run of another configuration", hint=hint)
    try:
        measured = Measurement.from_json((folder / "measurement.json").read_text("utf-8"))
    except (FileNotFoundError, InputError, ValueError, RecursionError):
        return None
    if measured.interrupted:
        return None
    wanted = config.steps if steps is None else steps
    if measured.steps != wanted:
        raise InputError(f"{folder} holds a run of {measured.steps} steps", hint=hint)
    held_out = measured.held_out_losses.get(measured.steps)  # only finite ones are kept, of any step
    return SweepRun(
        values=values,
        folder=folder,
        steps=measured.steps,
        held_out_loss=held_out,
        loss=measured.losses.get(measured.steps),
        step_seconds=measured.step_seconds.median if measured.step_seconds else None,
        tokens_per_second=measured.tokens_per_second,
        failed="" if held_out is not None else "the held-out loss after the last step is not finite",
        earlier=earlier,
    )


def _failed(values: Values, folder: Path, why: str) -> SweepRun:
    unknown = dict.fromkeys(("held_out_loss", "loss", "step_seconds", "tokens_per_second"))
    return SweepRun(values=values, folder=folder, steps=0, **unknown, failed=why, earlier=False)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as refused:
        raise InputError(
            f"cannot write a sweep to {folder}: {refused.strerror}",
            hint="choose a folder that can be written",
        ) from refused
