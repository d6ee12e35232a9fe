"""Compare runs, weighings and plans: what differs in their settings, their figures, and their curves.

Settings and the figures of weighings are those of `meshwright diff`, which also finds the lines of code by
which two weighings differ. A figure that a side does not have is absent, never reckoned from another side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshwright.contrib.check import Difference, Figures, difference_of, figures_of
from meshwright.errors import InputError, MeshwrightError, printable
from meshwright.files import read_json, reason
from meshwright.kept_records import PLANS, WEIGHINGS
from meshwright.reportable import Reportable

from ._found_runs import found_runs
from ._kept_figures import KeptFigures, chosen, kept_figures
from ._metrics import Curve
from ._run_record import RunRecord, run_file, run_record

if TYPE_CHECKING:
    from meshwright.planned import Plan
    from meshwright.report import Document
    from meshwright.results import Run, Weighing

COMPARISON_SCHEMA = 1
MOST_SIDES = 12
CURVES = ("loss", "held_out_loss", "gradient_norm", "learning_rate", "seconds", "memory_in_use_bytes")
"""Metrics of a run that are drawn over one another."""
CLOSE = 1e-9  # of a predicted time, within which a weighing made again is the same


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSide:
    """One side of a comparison.

    `amounts`: its figures by name; one that it does not have is absent. `settings`: whatever may be the
    cause, by name. `curves`: its metrics by step. `figures`: those of its weighing, if they are known by
    line. `notes`: what is not known, and why.
    """

    label: str
    kind: str
    amounts: Mapping[str, float | str]
    settings: Mapping[str, str]
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    figures: Figures | None = None
    batch_unit: str = "tokens"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Reportable):
    """Runs, weighings and plans beside one another."""

    sides: tuple[ComparedSide, ...]

    @property
    def settings(self) -> dict[str, tuple[str, ...]]:
        """What differs in the settings: by name, the value of each side, "" where it has none.

        What the compiler was is compared where it is known of all sides.
        """
        names = dict.fromkeys(name for side in self.sides for name in side.settings)
        if any(side.figures is None for side in self.sides):
            names = [name for name in names if name.partition(".")[0] not in ("compiler", "option")]
        values = {name: tuple(side.settings.get(name, "") for side in self.sides) for name in sorted(names)}
        return {name: each for name, each in values.items() if len(set(each)) > 1}

    @property
    def difference(self) -> Difference | None:
        """What `diff` finds between two weighings, by module and line; None unless both are known so far."""
        if len(self.sides) != 2:
            return None
        before, after = (side.figures for side in self.sides)
        if before is None or after is None:
            return None
        return difference_of(
            replace(before, label=self.sides[0].label), replace(after, label=self.sides[1].label)
        )

    @property
    def line(self) -> str:
        """The sides, and how many settings differ."""
        count = len(self.settings)
        differs = "no setting differs" if not count else f"{count} setting{'s' if count > 1 else ''} differ"
        return f"{' | '.join(side.label for side in self.sides)}: {differs}"

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `compare --json` prints."""
        difference = self.difference
        return {
            "schema": COMPARISON_SCHEMA,
            "sides": [
                {
                    "label": side.label,
                    "kind": side.kind,
                    "figures": dict(side.amounts),
                    "curves": {
                        name: {"steps": list(curve.steps), "values": list(curve.means)}
                        for name, curve in side.curves.items()
                    },
                    "notes": list(side.notes),
                }
                for side in self.sides
            ],
            "settings": {name: list(values) for name, values in self.settings.items()},
            "difference": None if difference is None else difference.to_dict(),
        }

    def document(self) -> Document:
        """Return its report for a terminal."""
        from ._comparison_page import comparison_document

        return comparison_document(self)

    def page_document(self) -> Document:
        """Return its report with pictures."""
        from ._comparison_page import comparison_page

        return comparison_page(self)


def compare(
    *sides: Run | Weighing | Plan | RunRecord | KeptFigures | Path | str,
    places: Sequence[str | Path] | str | Path = (),
) -> Comparison:
    """Put runs, weighings and plans beside one another.

    Args:
        sides: each a `Run`, a `Weighing` or a `Plan`; what `mw.runs()` lists; or a text: the beginning of an
            id, a name or a tag, the folder of a run, or the file of a weighing (`weigh --json`).
        places: folders below which runs are looked for, beside those that are known.

    Raises:
        InputError: there are not two sides or too many, a text names nothing or several, or a file cannot be
            read.

    >>> import meshwright as mw
    >>> made = compare(mw.weigh("linear", on="8xH100"), mw.weigh("linear", on="4xH100"))
    >>> made.settings["fleet"]
    ('8xH100', '4xH100')
    """
    if not 2 <= len(sides) <= MOST_SIDES:
        what = f"{len(sides)} side{'s' if len(sides) != 1 else ''} cannot be compared"
        raise InputError(what, hint=f"name 2 to {MOST_SIDES}: meshwright compare runs/a runs/b")
    notes: list[str] = []
    known: list[RunRecord | KeptFigures] = []
    if any(isinstance(side, str) and not _is_path(side) for side in sides):
        named = places if isinstance(places, Sequence) and not isinstance(places, str) else [places]
        known = [*found_runs(*named).runs, *kept_figures(WEIGHINGS, notes), *kept_figures(PLANS, notes)]
    made = [_side(each, known) for each in sides]
    return Comparison(sides=tuple(_told_apart(made)))


def _told_apart(sides: Sequence[ComparedSide]) -> list[ComparedSide]:
    """Return sides no two of which have the same label."""
    labels = [side.label for side in sides]
    return [
        side if labels.count(side.label) == 1 else replace(side, label=f"{side.label} ({place})")
        for place, side in enumerate(sides, start=1)
    ]


def _is_path(text: str) -> bool:
    path = Path(text)
    try:
        return path.suffix == ".json" or (path.is_dir() and ("/" in text or run_file(path)[0] is not None))
    except (OSError, ValueError):
        return False


def _side(
    given: Run | Weighing | Plan | RunRecord | KeptFigures | Path | str,
    known: Sequence[RunRecord | KeptFigures],
) -> ComparedSide:
    from meshwright.planned import Plan
    from meshwright.results import Run, Weighing

    if isinstance(given, Run):
        given = given.folder
    if isinstance(given, Plan) and given.best is not None:
        made = _weighed_side(given.best.to_dict(), f"plan of {given.name}", "plan")
        return replace(
            made, settings={**made.settings, "best": "" if given.winner is None else given.winner.words}
        )
    if isinstance(given, Plan):
        raise InputError(f"nothing fits in the plan of {given.name}", hint="compare plans that have a best")
    if isinstance(given, Weighing):
        return _weighed_side(given.to_dict(), f"{given.name} on {given.fleet.name}", "weighing")
    if isinstance(given, str | Path):
        text = str(given)
        if text.endswith(".json") and Path(text).is_file():
            return _weighed_side(_read(Path(text)), text, "weighing")
        given = run_record(text) if isinstance(given, Path) or _is_path(text) else chosen(text, known)
    if not isinstance(given, RunRecord | KeptFigures):
        hint = "give a Run, a Weighing or a Plan, what mw.runs() lists, or the id, name or folder of one"
        raise InputError(f"{repr(given)[:80]} is nothing that can be compared", hint=hint)
    return _run_side(given) if isinstance(given, RunRecord) else _kept_side(given)


def _read(path: Path) -> Any:
    try:
        return read_json(path, strict=False)
    except (OSError, ValueError) as error:
        hint = "give a file that `meshwright weigh ... --json` wrote"
        raise InputError(f"{path} cannot be read: {reason(error)}", hint=hint) from error


def _run_side(run: RunRecord) -> ComparedSide:
    """Return the side of a run, from its folder; of one that is not here, from the store."""
    label = printable(run.folder.name) or run.name
    notes = [f"{label}: {note}" for note in run.notes]
    if run.state not in ("finished", "running") and run.words:
        notes.append(f"{label} {run.state}: {run.words}")
    figures = None
    try:
        figures = figures_of(read_json(run.folder / "weighing.json", strict=False), label)
    except FileNotFoundError:
        notes.append(f"{label} has no weighing.json: its settings are those of its config.json")
    except (OSError, ValueError, InputError) as error:
        words = error.message if isinstance(error, InputError) else reason(error)
        notes.append(f"{label}: weighing.json cannot be read: {words}")
    plain = {
        "config": run.name,
        "layout": run.layout,
        "fleet": {"name": run.fleet},
        "run_config": run.config(),
    }
    settings = figures_of(plain, label).settings if figures is None else figures.settings
    read = run.curves()
    curves = {name: read.curve(name) for name in CURVES if name in read.names}
    notes += [f"{label}: {read.why_not}"] if read.why_not else []
    if read.broken:
        notes.append(f"{label}: {read.broken:,} lines of metrics.jsonl hold no step and are left out")
    cost, price = _cost(run.device_hours, run.predicted.price_per_device_hour, run.fleet)
    predicted = run.predicted
    amounts: dict[str, float | str | None] = {
        "state": run.state,
        "steps": run.step,
        "tokens": run.tokens,
        "loss": run.loss,
        "held_out_loss": run.held_out_loss,
        "step_seconds": run.step_seconds,
        "predicted_seconds": predicted.expected,
        "predicted_low": predicted.low,
        "predicted_high": predicted.high,
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "needed_bytes": predicted.needed_bytes,
        "peak_bytes": run.peak_bytes,
        "seconds": run.seconds,
        "device_hours": run.device_hours,
        "cost": cost,
        "price": price,
    }
    return ComparedSide(
        label=label,
        kind="run",
        amounts=_known(amounts),
        settings=settings,
        curves=curves,
        figures=figures,
        batch_unit=run.batch_unit,
        notes=tuple(notes),
    )


def _weighed_side(tree: Any, label: str, kind: str) -> ComparedSide:
    """Return the side of a weighing from what `weigh --json` prints."""
    figures = figures_of(tree, label)
    fields = cast("dict[str, Any]", tree)
    memory = _of(_of(fields, "ledger"), "memory")
    predicted, total = _of(fields, "prediction"), _of(fields, "run_total")
    seconds = _of(predicted, "step_seconds")
    devices = _of(fields, "fleet").get("num_devices")
    rate = predicted.get("tokens_per_second_per_device")
    amounts = {
        "fits": _fits(figures.fits),
        "predicted_seconds": seconds.get("expected"),
        "predicted_low": seconds.get("low"),
        "predicted_high": seconds.get("high"),
        "tokens_per_second": rate * devices if rate and devices else None,
        "mfu": predicted.get("mfu"),
        "needed_bytes": figures.num_bytes or _of(fields, "refusal").get("needed_bytes"),
        "usable_bytes": memory.get("usable_bytes") or _of(fields, "refusal").get("usable_bytes"),
        "cost": _of(total, "cost").get("expected"),
    }
    return ComparedSide(
        label=label, kind=kind, amounts=_known(amounts), settings=figures.settings, figures=figures
    )


def _kept_side(kept: KeptFigures) -> ComparedSide:
    """Return the side of a weighing or plan of the store, with its lines if its program is still cached."""
    fields = kept.weighing
    label = f"{kept.id[:7]} {kept.name} on {kept.fields.get('fleet', '?')}"
    notes: list[str] = []
    if kept.kind == "plan" and not fields:
        notes.append(f"{label}: nothing fits")
    run_config = fields.get("run_config") or kept.fields.get("run_config")
    plain = {
        "config": kept.name,
        "layout": str(fields.get("layout", "")),
        "fleet": {"name": str(kept.fields.get("fleet", ""))},
        "run_config": run_config if isinstance(run_config, dict) else None,
    }
    figures, note = _weighed_again(kept, label)
    notes += [note] if note else []
    settings = dict(figures_of(plain, label).settings if figures is None else figures.settings)
    if kept.kind == "plan":
        settings["best"] = str(kept.fields.get("best") or "")
    seconds = _of(fields, "step_seconds")
    names = ("tokens_per_second", "mfu", "needed_bytes", "usable_bytes", "cost")
    amounts = {
        "fits": _fits(fields.get("fits")),
        "predicted_seconds": seconds.get("expected"),
        "predicted_low": seconds.get("low"),
        "predicted_high": seconds.get("high"),
        **{name: fields.get(name) for name in names},
    }
    return ComparedSide(
        label=label,
        kind=kept.kind,
        amounts=_known(amounts),
        settings=settings,
        figures=figures,
        notes=tuple(notes),
    )


def _weighed_again(kept: KeptFigures, label: str) -> tuple[Figures | None, str]:
    """Return the figures by line of a kept weighing whose program is in the cache, or why there are none."""
    from meshwright.api import weigh_unkept
    from meshwright.compiler import is_compiled
    from meshwright.config import RunConfig
    from meshwright.kept_records import weighing_figures

    fields = kept.weighing
    key, config = str(fields.get("program", "")), fields.get("run_config")
    if "/" in key or not key or not isinstance(config, dict) or not is_compiled(key):
        return None, f"{label}: its program is no longer in the cache, so that its lines are not compared"
    try:
        run = RunConfig.model_validate_json(json.dumps(config))
        simulated = kept.fields.get("simulated") is True
        made = weigh_unkept(run, str(fields.get("fleet")), simulate=simulated)
    except (MeshwrightError, ValueError) as refused:
        words = (
            refused.message
            if isinstance(refused, MeshwrightError)
            else "its configuration is of another release"
        )
        return None, f"{label} cannot be weighed again: {words}"
    again = weighing_figures(made)
    same = all(again[name] == fields.get(name) for name in ("program", "needed_bytes", "executed_flops"))
    was, now = _of(fields, "step_seconds").get("expected"), _of(again, "step_seconds").get("expected")
    if not same or (was is None) != (now is None) or (was and abs(now / was - 1) > CLOSE):
        return None, f"{label} weighs otherwise today, so that its lines are not compared"
    return figures_of(made.to_dict(), label), ""


def _cost(device_hours: float | None, price: float | None, fleet: str) -> tuple[float | None, str]:
    """Return the cost of device-hours, and by which price; None if no price is known."""
    from meshwright.contrib.prices import with_list_price
    from meshwright.hardware import Fleet

    if device_hours is None:
        return None, ""
    if price is not None:
        return device_hours * price, f"{price:g} a device-hour"
    try:
        priced, words = with_list_price(Fleet.parse(fleet))
    except MeshwrightError:
        return None, ""
    usd = priced.price_per_device_hour
    return (None, "") if usd is None else (device_hours * usd, words)


def _of(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = fields.get(name)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _fits(fits: object) -> str | None:
    return {True: "fits", False: "does not fit"}.get(fits) if isinstance(fits, bool) else None


def _known(amounts: Mapping[str, Any]) -> dict[str, float | str]:
    return {name: value for name, value in amounts.items() if value not in (None, "")}
