"""Run the tests that take minutes and leave a dated record of how each went.

Run: python benchmarks/long_tests.py (or `make test-long`). Writes
benchmarks/records/DATE_long_tests.toml with the command, commit, versions, machine, and the outcome and
seconds of each test. Exit status is pytest's.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parent.parent
ARGUMENTS = ["-m", "long and not gpu"]


def outcome_of(case: ET.Element) -> str:
    """What became of a test, from its entry in pytest's JUnit XML: passed, failed, error or skipped."""
    for word, tag in (("failed", "failure"), ("error", "error"), ("skipped", "skipped")):
        if case.find(tag) is not None:
            return word
    return "passed"


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Run pytest and write the record; nothing is recorded where no test was found."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", *ARGUMENTS]
        status = subprocess.run([*command, f"--junitxml={xml}"], cwd=ROOT).returncode
        cases = list(ET.parse(xml).iter("testcase")) if xml.exists() else []
    if not cases:
        print("no test ran, so there is no record", file=sys.stderr)
        return status
    date = datetime.date.today().isoformat()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "pytest")}
    versions = {"python": platform.python_version(), **versions}
    lines = [
        f"date = {date}",
        'command = "make test-long"',
        f"commit = {json.dumps(commit())}",
        f"versions = {{ {', '.join(f'{name} = {json.dumps(text)}' for name, text in versions.items())} }}",
        f"machine = {{ cores = {os.cpu_count()}, processor = {json.dumps(platform.machine())} }}",
        f"exit_status = {status}",
    ]
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        lines += ["", "[[test]]", f"name = {json.dumps(name)}", f"outcome = {json.dumps(outcome_of(case))}"]
        lines += [f"seconds = {float(case.get('time', '0')):.1f}"]
    record = ROOT / "benchmarks" / "records" / f"{date}_long_tests.toml"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("\n".join(lines) + "\n")
    print(f"wrote {record.relative_to(ROOT)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
