"""Keep a record of each run, weighing and plan, from which `meshwright runs` lists them.

A run's folder is its record: run.json says which run it is, and what each of its sessions began and ended
with. The store, a folder of the cache, has a small file for each run, with its place and a copy of run.json;
for each weighing and each plan; and for each folder that runs were made in. Each is written whole or not at
all, and no two writers need the same one (ADR 0026).

The order of writes keeps a run from being lost, wherever its process is killed: first its place, then
run.json, then the copy of that. A place at which no run.json was ever written is not a run.
Imports: `compiler` (the cache). No jax. Used by: `api`, which writes, and `contrib.runs`, which reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compiler import cache_root, write_cached
from .errors import MeshwrightError
from .files import read_json

if TYPE_CHECKING:
    from .config import RunConfig
    from .measure import Measurement
    from .planned import Plan
    from .results import Weighing
    from .trainer.loop import RunFolder

RECORD_SCHEMA = 1
RUN_FILE = "run.json"
RUNS, WEIGHINGS, PLANS, PLACES = "runs", "weighings", "plans", "places"
MOST_RECORD = 2**24  # bytes of one record
MOST_CANDIDATES = 50  # of a plan that are kept
MOST_ROLLBACKS = 1000  # of a session that are kept
Fields = dict[str, Any]


def store_folder() -> Path:
    """Return the folder of the store, which may not exist.

    Raises:
        InputError: there is no folder for the cache, or everybody may write to it.
    """
    return cache_root() / "store"


def record_path(kind: str, number: str) -> Path:
    """Return the file of a record in the store."""
    return store_folder() / kind / f"{number}.json"


def now() -> str:
    """Return the time in UTC, fine enough to tell which of two runs began first."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_entry(kind: str, number: str, fields: Mapping[str, Any]) -> None:
    """Write a record of the store, whole or not at all.

    Raises:
        MeshwrightError: the store cannot be written.
    """
    text = json.dumps(finite({**fields, "schema": RECORD_SCHEMA, "id": number}))
    write_cached(record_path(kind, number), text)


def known_record(path: Path) -> Fields | None:
    """Return a record that this release wrote; None if it is missing, damaged, or of a newer release."""
    try:
        found = read_json(path, MOST_RECORD, strict=False)
    except (OSError, ValueError):
        return None
    is_known = isinstance(found, dict) and found.get("schema") == RECORD_SCHEMA
    return found if is_known and isinstance(found.get("id"), str) else None


def keep_weighing(weighing: Weighing, *, simulated: bool = False) -> Weighing:
    """Keep the figures of a weighing; the same weighing again is the same record, with a later date.

    Returns:
        The weighing; with a warning if the store cannot be written, which then keeps nothing.
    """
    fields = {**weighing_figures(weighing), "simulated": simulated}
    refused = _keep(WEIGHINGS, "w", fields)
    return dataclasses.replace(weighing, warnings=(*weighing.warnings, *refused)) if refused else weighing


def keep_plan(plan: Plan) -> Plan:
    """Keep the candidates of a plan, as `keep_weighing` keeps a weighing; a note says if it is not kept."""
    best = plan.winner
    fields: Fields = {
        "name": plan.name,
        "fleet": plan.fleet.name,
        "num_devices": plan.fleet.num_devices,
        "num_considered": plan.num_considered,
        "num_compiled": len(plan.candidates),
        "ended": plan.ended,
        "price_per_device_hour": plan.fleet.price_per_device_hour,
        "price": plan.price,
        "best": None if best is None else best.words,
        "best_weighing": None if plan.best is None else weighing_figures(plan.best),
        "run_config": None if isinstance(plan.config, str) else plan.config.model_dump(mode="json"),
        "candidates": [
            {
                "words": each.words,
                "step_seconds": None if each.step_seconds is None else dataclasses.asdict(each.step_seconds),
                "needed_bytes": each.needed_bytes,
                "fits": each.fits,
                "failed": each.failed,
            }
            for each in plan.ranked[:MOST_CANDIDATES]
        ],
    }
    refused = _keep(PLANS, "p", fields)
    return dataclasses.replace(plan, notes=(*plan.notes, *refused)) if refused else plan


def _keep(kind: str, letter: str, fields: Fields) -> tuple[str, ...]:
    """Write a record whose id follows from its fields; return why not, if the store cannot be written."""
    text = json.dumps(fields, sort_keys=True, default=str)
    number = letter + hashlib.sha256(text.encode()).hexdigest()[:12]
    try:
        write_entry(kind, number, {"when": now(), **json.loads(text)})
    except (MeshwrightError, OSError, ValueError) as refused:
        why = refused.message if isinstance(refused, MeshwrightError) else str(refused)
        return (f"not in the list of `meshwright runs --kind {kind}`: {why}",)
    return ()


def weighing_figures(weighing: Weighing) -> Fields:
    """Return the figures of a weighing that its record has."""
    memory = None if weighing.figures is None else weighing.ledger.memory
    flops = None if weighing.figures is None else weighing.ledger.flops
    refusal, predicted = weighing.refusal, weighing.prediction
    needed = None if memory is None else memory.reserved_bytes + memory.allowance_bytes
    usable = None if memory is None else memory.usable_bytes
    if refusal is not None:
        needed, usable = refusal.needed_bytes, refusal.usable_bytes
    return {
        "name": weighing.name,
        "fleet": weighing.fleet.name,
        "layout": str(weighing.layout),
        "num_devices": weighing.fleet.num_devices,
        "source": weighing.source,
        "fits": weighing.fits,
        "needed_bytes": needed,
        "usable_bytes": usable,
        "step_seconds": None if predicted is None else dataclasses.asdict(predicted.step_seconds),
        "mfu": weighing.mfu,
        "tokens_per_second": weighing.tokens_per_second,
        "tokens_per_step": weighing.tokens_per_step,
        "num_steps": weighing.num_steps,
        "cost": weighing.cost,
        "price_per_device_hour": weighing.fleet.price_per_device_hour,
        "model_flops": None if flops is None else flops.model,
        "executed_flops": None if flops is None else flops.executed,
        "fingerprint": weighing.compiled.fingerprint if weighing.is_compiled else "",
        "program": weighing.folder.name if weighing.is_compiled else "",
        "run_config": None if weighing.config is None else weighing.config.model_dump(mode="json"),
    }


class KeptRun:
    """The record of a run that this process trains: run.json in its folder, and its place in the store.

    Of several processes the first writes. run.json waits, as all documents of the folder do, if the disk
    refuses it. `refused`: why the store could not be written; "" if it could.
    """

    def __init__(self, held: RunFolder, config: RunConfig, fleet: str, steps: int) -> None:
        self.refused = ""
        self._held = held
        self._is_kept = held.peers.is_first
        self._fields: Fields = {}
        if not self._is_kept:
            return
        path = held.path / RUN_FILE
        before = known_record(path)
        if before is None and path.exists():
            before = self._set_aside(path)
        if not self._is_kept:
            return
        before = before or {"schema": RECORD_SCHEMA, "id": f"r{os.urandom(6).hex()}", "began": now()}
        if (original := original_of(before, held.path)) is not None:
            before |= {"id": f"r{os.urandom(6).hex()}", "copy_of": before["id"], "copied_from": str(original)}
        begun = {"began": now(), "host": os.uname().nodename, "pid": os.getpid(), "steps": steps}
        self._fields = {
            **before,
            "name": config.name,
            "fleet": fleet,
            "steps": steps,
            "tokens_per_step": config.batch.tokens_per_step,
            "batch_unit": config.batch_unit,
            "num_parameters": config.model.num_parameters,
            "sessions": [*_earlier(before.get("sessions"), held.path), begun],
        }
        self._place(is_written=False)
        self._write()

    def _set_aside(self, path: Path) -> Fields | None:
        """Rename a run.json that cannot be read, and return the store's copy of it; leave a newer one."""
        with contextlib.suppress(OSError, ValueError):
            found = read_json(path, MOST_RECORD, strict=False)
            if isinstance(found, dict) and isinstance(found.get("schema"), int):
                self._is_kept = False
                self.refused = f"{path} is of schema {found['schema']}, which another release wrote"
                return None
        with contextlib.suppress(OSError):
            path.replace(path.with_name(f"{RUN_FILE}.damaged"))
        return run_at(path.parent)

    @property
    def number(self) -> str:
        """The same in all sessions of the run; the folder's name where its run.json is not ours to write."""
        return str(self._fields.get("id") or self._held.path.name)

    def weighed(self, weighing: Weighing) -> None:
        """Add what was predicted."""
        figures = weighing_figures(weighing)
        del figures["run_config"]
        self._fields["layout"], self._fields["weighing"] = figures["layout"], figures
        if self._is_kept:  # a session that dies has no end that says it
            self._fields["sessions"][-1]["num_devices"] = figures["num_devices"]
        self._write()

    def sessions(self, rollback_seconds: Sequence[float]) -> list[Fields]:
        """Return the sessions of the run, of which the last is this one, with its rollbacks."""
        *earlier, this = self._fields.get("sessions") or [{}]
        return [*earlier, {**this, **({"rollback_seconds": [*rollback_seconds]} if rollback_seconds else {})}]

    def stepped(self) -> None:
        """Add that the first step of this session is done."""
        if self._is_kept:
            self._fields["sessions"][-1]["first_step"] = now()
            self._write()

    def estimated(self, finish: Fields, rollback_seconds: Sequence[float]) -> None:
        """Add when the run will be finished, as estimated now."""
        if self._is_kept:
            self._fields["finish"] = finish
            self._fields["sessions"] = self.sessions(rollback_seconds[-MOST_ROLLBACKS:])
            self._write()

    def ended(self, measurement: Measurement) -> None:
        """Add how the session ended, and what was measured."""
        losses, held_out, timed = measurement.losses, measurement.held_out_losses, measurement.step_seconds
        state = "stopped" if measurement.interrupted else "finished"
        has_last = bool(held_out) and (measurement.interrupted or measurement.steps in held_out)
        self._end(
            state,
            measurement.signal,
            step=measurement.steps,
            loss=losses[max(losses)] if losses else None,
            held_out_loss=held_out[max(held_out)] if has_last else None,  # None: it was not finite
            step_seconds=None if timed is None else timed.median,
            tokens_per_second=measurement.tokens_per_second,
            peak_bytes=measurement.peak_bytes,
            argument_bytes=measurement.argument_bytes_per_device,
            fingerprint=measurement.fingerprint,
            device_kind=measurement.device_kind,
            num_devices=measurement.num_devices,
            seconds=sum(measurement.seconds_by_phase.values()),
        )

    @contextlib.contextmanager
    def ending(self) -> Iterator[KeptRun]:
        """Record an error of the block as the session's end."""
        try:
            yield self
        except KeyboardInterrupt:
            self._end("stopped", "by Ctrl-C")
            raise
        except BaseException as failed:
            words = (
                failed.message
                if isinstance(failed, MeshwrightError)
                else f"{type(failed).__name__}: {failed}"
            )
            self._end("failed", words.partition("\n")[0][:500])
            raise

    def _end(self, state: str, words: str, **figures: Any) -> None:
        if self._is_kept:
            self._fields["sessions"][-1] |= {"ended": now(), "state": state, "words": words, **figures}
            self._write()

    def _write(self) -> None:
        """Write run.json, then the store's copy of it."""
        if self._is_kept:
            text = json.dumps(finite(self._fields), indent=1)
            self._held.writes.documents({RUN_FILE: text})
            self._place(is_written=RUN_FILE not in self._held.writes.refused)

    def _place(self, *, is_written: bool) -> None:
        path = Path(os.path.abspath(self._held.path))
        try:
            keep_place(path.parent)
            fields = {"path": str(path), "run": self._fields if is_written else None}
            write_entry(RUNS, self._fields["id"], fields)
        except MeshwrightError as refused:
            self.refused = refused.message


def _earlier(sessions: Any, folder: Path) -> list[Any]:
    """Return the sessions of a run that is resumed; one that died ended with its last line."""
    earlier = [each for each in sessions if isinstance(each, dict)] if isinstance(sessions, list) else []
    if earlier and "ended" not in earlier[-1]:
        with contextlib.suppress(OSError):
            until = datetime.fromtimestamp((folder / "metrics.jsonl").stat().st_mtime, UTC)
            earlier[-1] |= {"ended": until.isoformat(timespec="seconds"), "state": "dead"}
    return earlier


def keep_place(folder: Path) -> None:
    """Keep a folder in which runs are looked for.

    Raises:
        MeshwrightError: the store cannot be written.
    """
    number = hashlib.sha256(str(folder).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    if not record_path(PLACES, number).exists():
        write_entry(PLACES, number, {"path": str(folder)})


def original_of(run: Mapping[str, Any], folder: Path) -> Path | None:
    """Return the folder that the store knows of a run if it is there and `folder` is a copy of it."""
    entry = known_record(record_path(RUNS, str(run["id"]))) or {}
    there = Path(str(entry.get("path", "")))
    with contextlib.suppress(OSError, ValueError):
        found = known_record(there / RUN_FILE)
        if found is not None and found["id"] == run["id"] and not os.path.samefile(there, folder):
            return there
    return None


def run_at(folder: Path) -> Fields | None:
    """Return the store's copy of the run.json of a folder; None if the store knows no run there."""
    path = os.path.abspath(folder)
    with contextlib.suppress(OSError):
        for file in sorted((store_folder() / RUNS).glob("r*.json")):
            entry = known_record(file)
            if entry is not None and entry.get("path") == path and isinstance(entry.get("run"), dict):
                return entry["run"]
    return None


def finite(value: Any) -> Any:
    """Return a tree of JSON's types in which a number that is not finite is null."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value
