"""A dated record of a benchmark: TOML with the command, commit, versions and machine, then its rows."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def processor() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_record(
    name: str,
    command: str,
    packages: Sequence[str],
    facts: Mapping[str, Any],
    rows: Mapping[str, Sequence[Any]],
    path: Path | None = None,
) -> Path:
    """Write records/DATE_NAME.toml, or `path`: `facts` as keys, and each of `rows` as an array of tables."""
    date = datetime.date.today().isoformat()
    versions = {"python": platform.python_version()}
    versions |= {package: importlib.metadata.version(package) for package in packages}
    machine = {"cores": os.cpu_count(), "processor": processor()}
    head = {"command": command, "commit": commit(), "versions": versions, "machine": machine, **facts}
    lines = [f"date = {date}", *(f"{key} = {_toml(value)}" for key, value in head.items())]
    for table, entries in rows.items():
        for entry in entries:
            lines += ["", f"[[{table}]]", *(f"{key} = {_toml(value)}" for key, value in entry.items())]
    record = path or RECORDS / f"{date}_{name}.toml"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("\n".join(lines) + "\n")
    return record


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)
