"""Seal predictions of published rows before their measured columns are read, and open them once.

A seal is a JSON file: every row's prediction, a hash of what the row says, of our source and of the packages
beside it, and a hash over the file's own content, which is printed so that it can be kept elsewhere. Opening
refuses where any of these differs. A row is sealed once: none whose measured columns somebody has read.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _published_rows import INPUTS, Expressed, InexpressibleError, Row, express, rows_of, with_measured
from _published_score import compared, summary_of
from _record import RECORDS, ROOT, commit, write_record
from _row_kinds import SEALED, declared

import meshwright

SCHEMA = 1
NAMED = re.compile(r".*seal.*\.json")
MOST_NAMED = 5  # in a message
PRODUCT = Path(meshwright.__file__).parent
BENCHMARKS = ROOT / "benchmarks"


class SealError(Exception):
    """Why nothing is sealed or opened: `args[0]`, in words."""


def digest_of(content: object) -> str:
    """Return the SHA-256 of a value as JSON with sorted keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def inputs_digest(row: Row) -> str:
    """Return the hash of what a row says besides what was measured."""
    return digest_of({column: (row.get(column) or "").strip() for column in INPUTS})


def tree() -> dict[str, str]:
    """Return the hash of each file that a prediction comes from: the package's, and the benchmarks' code."""
    package = [path for path in PRODUCT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = {f"meshwright/{path.relative_to(PRODUCT).as_posix()}": path for path in package}
    files |= {
        f"benchmarks/{path.name}": path for kind in ("py", "toml") for path in BENCHMARKS.glob(f"*.{kind}")
    }
    return {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in sorted(files)}


def packages() -> dict[str, str]:
    """Return the version of Python and of every package beside it."""
    found = {str(each.metadata["Name"]).lower(): each.version for each in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}


def spent(folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield the id of every row that was predicted in a record or a seal, and the file's name."""
    for place in {RECORDS, folder or RECORDS}:
        for path in sorted(place.glob("*seal*.*")):
            yield from ((each, path.name) for each in _ids_in(path))
    for path in sorted(RECORDS.glob("*_predict_*.toml")):
        yield from (
            (each, path.name) for each in re.findall(r'^id = "(.+)"$', path.read_text(), re.MULTILINE)
        )


def _ids_in(path: Path) -> list[str]:
    """Return the ids of a seal's rows, or of a record of sealed errors, which may have nothing but ids."""
    if path.suffix not in (".json", ".toml"):
        return []
    found = (json.loads if path.suffix == ".json" else tomllib.loads)(path.read_text())
    return [each["id"] for each in [*found.get("row", []), *found.get("rows", [])]] + found.get("ids", [])


def refuse_spent(ids: Iterable[str], folder: Path | None = None) -> None:
    """Refuse to seal rows of which somebody has read what was measured, or that were sealed before.

    Raises:
        SealError: there are such rows.
    """
    before = dict(spent(folder))
    found: list[str] = []
    for each in ids:
        if kind := declared(each):
            found.append(f"{each} is {kind[0]} since {kind[1]}")
        elif each in before:
            found.append(f"{each} stands in {before[each]}")
    if found:
        raise SealError(f"A row is sealed once: {_few(found, '; ')}. Leave them out with --ids.")


def refuse_unopened(ids: Iterable[str]) -> None:
    """Refuse to score rows that stand in a seal among the records which nobody has opened.

    Raises:
        SealError: there are such rows.
    """
    closed = {
        each: path
        for path in RECORDS.glob("*seal*.json")
        if not outcome_of(path).exists()
        for each in _ids_in(path)
    }
    if found := [each for each in ids if each in closed]:
        raise SealError(
            f"{_few(found)} of {closed[found[0]].name}: sealed, and not opened. Open the seal with --open, "
            "or leave these rows out with --ids."
        )


def _few(words: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return between.join(words[:MOST_NAMED]) + more


def outcome_of(seal: Path) -> Path:
    """Return where the errors of a seal are written."""
    return seal.with_name(f"{seal.stem}_opened.toml")


def refuse_path(seal: Path) -> None:
    """Refuse a place for a seal that stands already, or that later seals would not look at.

    Raises:
        SealError: no seal can be written there.
    """
    if not NAMED.fullmatch(seal.name):
        raise SealError(f"Name {seal.name} *seal*.json: later seals look for rows in files of such names.")
    if seal.exists():
        raise SealError(f"{seal.name} exists: a seal is written once. Choose another name.")


def write_seal(
    seal: Path,
    predictions: Sequence[Mapping[str, Any]],
    *,
    runs: Sequence[Path],
    others: Mapping[str, Sequence[str]],
    before: Mapping[str, str],
    seed: int,
    command: str,
) -> str:
    """Write the predictions of rows with the hashes of all that they come from; return the file's own.

    `before`: the source tree as it was when the first row was predicted.

    Raises:
        SealError: the source has changed since.
    """
    if changed := _different(before, tree()):
        raise SealError(f"The source changed while rows were predicted: {changed}. Seal again.")
    inputs = {row["id"]: inputs_digest(row) for path in runs for row in rows_of(path, blind=True)}
    told = packages()
    content = {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "command": command,
        "commit": commit(),
        "seed": seed,
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in runs},
        "digests": {"tree": digest_of(before), "packages": digest_of(told)},
        "rows": [{**row, "kind": SEALED, "inputs": inputs[row["id"]]} for row in predictions],
        "inexpressible": others,
        "packages": told,
        "tree": before,
    }
    whole = digest_of(json.loads(json.dumps(content)))
    seal.write_text(json.dumps({"sha256": whole, **content}, indent=1) + "\n")
    return whole


def _different(sealed: Mapping[str, str], now: Mapping[str, str], *, values: bool = False) -> str:
    """Return in words which entries differ, with both values where they say something; "" where none does."""
    words: list[str] = []
    for name in sorted({*sealed, *now}):
        old, new = sealed.get(name), now.get(name)
        if old != new:
            how = "is new" if old is None else "is gone" if new is None else "differs"
            words.append(f"{name} {old} -> {new}" if values and old and new else f"{name} {how}")
    return _few(words)


def read_seal(seal: Path) -> dict[str, Any]:
    """Read a seal of which nothing has changed: not the file, nor our source, nor the packages.

    Raises:
        SealError: something has, or the seal was opened before.
    """
    if outcome_of(seal).exists():
        date = tomllib.loads(outcome_of(seal).read_text())["date"]
        raise SealError(f"{seal.name} was opened on {date}: its errors are in {outcome_of(seal).name}.")
    content = json.loads(seal.read_text())
    told = content.pop("sha256", None)
    if (found := digest_of(content)) != told:
        raise SealError(
            f"The predictions of {seal.name} were changed: they hash to {found}, sealed was {told}."
        )
    if changed := _different(content["tree"], tree()):
        raise SealError(
            f"The source is not that of the seal: {changed}. Check out {content['commit']}, with what was "
            "changed there, and open it then."
        )
    if changed := _different(content["packages"], packages(), values=True):
        raise SealError(
            f"The packages are not those of the seal: {changed}. Install what was there, and open it then."
        )
    return {"sha256": told, **content}


def opened(
    content: Mapping[str, Any], runs: Sequence[Path]
) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """Return the sealed rows with their errors, and the ids of those without by reason.

    Raises:
        SealError: a row is gone, or says something else than it said when it was sealed.
    """
    rows = {row["id"]: row for path in runs for row in rows_of(path)}
    if gone := [row["id"] for row in content["rows"] if row["id"] not in rows]:
        raise SealError(f"{_few(gone)} of the seal in none of {', '.join(path.name for path in runs)}.")
    if changed := [row["id"] for row in content["rows"] if inputs_digest(rows[row["id"]]) != row["inputs"]]:
        raise SealError(
            f"What was predicted is not what stands there now: {_few(changed)} differ in their inputs."
        )
    scored: list[dict[str, Any]] = []
    without: dict[str, list[str]] = {}
    for told in content["rows"]:
        row = rows[told["id"]]
        try:
            scored.append({**compared(told, _measured_seconds(row)), **_memory(told, row)})
        except InexpressibleError as reason:
            without.setdefault(str(reason), []).append(told["id"])
    return scored, without


def _measured_seconds(row: Row) -> float:
    run: Expressed = with_measured(express(row), row)
    return run.measured_seconds


def _memory(told: Mapping[str, Any], row: Row) -> dict[str, float]:
    """Return what the row prints of its device's memory; nothing where it prints nothing."""
    text = (row.get("peak_mem_gib_per_device") or "").strip()
    if not text or "reserved_gib" not in told:
        return {}
    try:
        return {"measured_gib": float(text)}
    except ValueError as error:
        raise InexpressibleError("peak_mem_gib_per_device is no number") from error


def write_outcome(
    seal: Path,
    content: Mapping[str, Any],
    runs: Sequence[Path],
    scored: list[dict[str, Any]],
    without: Mapping[str, Sequence[str]],
) -> Path:
    """Write the errors of a seal beside it, as a record; return its path.

    `files_as_sealed`: no measured column was written or changed after the seal.
    """
    now = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in runs}
    summary = summary_of(scored)
    groups = [{"name": name, **found} for name, found in summary.pop("spread").items()]
    facts = {
        "what": f"runs of {', '.join(sorted({row['source'] for row in content['rows']}))}",
        "seal": seal.name,
        "sealed_on": content["date"],
        "sealed_at": content["commit"],
        "sha256": content["sha256"],
        "files_as_sealed": now == content["files"],
        "summary": summary,
        "inexpressible": {reason: len(ids) for reason, ids in content["inexpressible"].items()},
        "not_measured": without,
    }
    rows = {"group": groups, "row": scored}
    command = f"python benchmarks/predict_published.py --open {seal.name}"
    return write_record("sealed", command, (), facts, rows, outcome_of(seal))
