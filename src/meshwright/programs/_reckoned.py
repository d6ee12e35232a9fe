"""Reckon the ledger and the predicted time of a compiled program, and keep both beside it.

Reckoning a step of thousands of instructions takes seconds, and the same step is often weighed again: for
another report, for its page, by the next plan. So the figures lie beside the compiled program, under a digest
of all that they depend on: the program, the fleet, the rates that were measured, the versions of Python and
numpy, and the files of Meshwright that reckon, with their tables of rates. A damaged text is reckoned again.
Rules that the user registers for custom calls are functions, which have no digest: nothing is kept then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.compiler import Compiled, digest_of_sources, installed_versions, keep_beside, kept_beside
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.json_records import EXACT, read_record
from meshwright.ledger import Ledger
from meshwright.measure import KnownRates, cautions
from meshwright.predict import Prediction

SOURCES = (
    "compiler",
    "hardware",
    "hlo",
    "ledger",
    "predict",
    "errors.py",
    "formats.py",
    "json_records.py",
    "units.py",
)
SOURCES += ("contrib/calibration/_factor_fit.py", "contrib/linear_algebra", "programs/_reckoned.py")


_Rates = tuple[KnownRates, tuple[str, ...]]  # and the doubts about them


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoned:
    """The account of a program and its predicted time; without one, `no_prediction` says why."""

    __pydantic_config__ = EXACT
    ledger: Ledger
    prediction: Prediction | None
    no_prediction: str


def reckoned(folder: Path, compiled: Compiled, fleet: Fleet, known: KnownRates) -> Reckoned:
    """Return the ledger and the prediction of a compiled program on a fleet.

    Args:
        folder: of the program in the cache of compiled programs.
        compiled: the record in that folder, perhaps with other tokens per step.
        known: the measured rates of the fleet's chip.

    Raises:
        ValueError: this version does not understand the compiler's text. The message names the line.
    """
    doubts = () if known.calibration is None else cautions(known.calibration)
    rates = known, doubts
    if _has_own_rules():
        return _reckon(folder, compiled, fleet, rates)
    key = _key(folder, compiled, fleet, rates)
    text = kept_beside(folder, key)
    if text is not None:
        try:
            return _read(text)
        except InputError:  # no record of this version: it is replaced below
            pass
    text = json.dumps(dataclasses.asdict(_reckon(folder, compiled, fleet, rates)))
    keep_beside(folder, key, text)
    return _read(text)  # so that a figure is the same to its last digit, kept or not


def _read(text: str) -> Reckoned:
    return read_record(Reckoned, text, name="a reckoned ledger", hint="weigh again")


def _reckon(folder: Path, compiled: Compiled, fleet: Fleet, rates: _Rates) -> Reckoned:
    known, doubts = rates
    from meshwright.ledger import executions_in, ledger_of
    from meshwright.predict import predict

    executions = executions_in(folder, compiled)
    ledger = ledger_of(folder, compiled, fleet, executions)
    measured: dict[str, Any] = {"cautions": doubts, "measured": known.measured}
    try:
        made = predict(executions, ledger, compiled, fleet, known.calibration, **measured)
        return Reckoned(ledger=ledger, prediction=made, no_prediction="")
    except InputError as unknown:
        return Reckoned(ledger=ledger, prediction=None, no_prediction=f"{unknown.message}; {unknown.hint}")


def _has_own_rules() -> bool:
    """Return whether the user has registered a rule for custom calls, for which rules must be imported."""
    if "meshwright.ledger._work_rules" not in sys.modules:
        return False
    from meshwright.ledger import registered_targets

    return bool(registered_targets())


def _all_of(record: Any) -> str:
    """Return all fields of a record as text; its `repr` may be a line for people."""
    return repr(dataclasses.asdict(record))


def _key(folder: Path, compiled: Compiled, fleet: Fleet, rates: _Rates) -> str:
    """Return a digest of all that the figures depend on; the manifest has the digest of each of the texts."""
    known, doubts = rates
    around = json.dumps([digest_of_sources(SOURCES), installed_versions()])
    records = map(_all_of, (compiled, fleet, known))
    parts = [(folder / "manifest.json").read_text(), *records, repr(doubts), around]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
