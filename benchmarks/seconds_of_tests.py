"""Record the processor's seconds of each test file, with those of all processes that its tests start.

Run: python benchmarks/seconds_of_tests.py [PYTEST ARGUMENT ...]; without arguments the tests of `make test`.
Writes benchmarks/records/DATE_seconds_of_tests.toml: the seconds in all, those of each file with its number
of cases, and the tests that take most. A session of pytest that only had the plugin (`-p _seconds_of_tests`,
with a folder in MESHWRIGHT_TEST_SECONDS) becomes a record by `--from FOLDER`. Exit status is pytest's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from _record import ROOT, write_record
from _seconds_of_tests import FOLDER

# `make test-evidence`, `make test-rooms` and `make test-torch` run these.
APART = [f"--ignore={name}" for name in ("tests/benchmarks", "tests/contrib", "src/meshwright/contrib")]
ARGUMENTS = ["-n", "1", "-m", "not wide and not long and not gpu", *APART]
MOST_TESTS = 60


def main(arguments: list[str]) -> int:
    """Run pytest, or read what it left, and write the record."""
    if arguments[:1] == ["--from"]:
        return record(Path(arguments[1]), "pytest -p _seconds_of_tests", 0)
    with tempfile.TemporaryDirectory() as folder:
        search = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-p", "_seconds_of_tests", *(arguments or ARGUMENTS)]
        environment = {**os.environ, FOLDER: folder, "PYTHONPATH": search.rstrip(os.pathsep)}
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        said = " ".join(["python benchmarks/seconds_of_tests.py", *arguments])
        return record(Path(folder), said, status)


def record(folder: Path, said: str, status: int) -> int:
    """Write the record of the lines that the plugin left in `folder`."""
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    if not lines:
        print("no test ran, so there is no record", file=sys.stderr)
        return status or 1
    files, cases, tests, number = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for line in lines:
        test = f"{line['file']}::{line['test'].partition('[')[0]}"
        files[line["file"]] += line["cpu_seconds"]
        cases[line["file"]] += 1
        tests[test] += line["cpu_seconds"]
        number[test] += 1
    facts = {"exit_status": status, "cases": len(lines), "cpu_seconds": round(sum(files.values()))}
    rows = {
        "file": [
            {"name": name, "cases": cases[name], "cpu_seconds": round(seconds, 1)}
            for name, seconds in files.most_common()
        ],
        "test": [
            {"name": name, "cases": number[name], "cpu_seconds": round(seconds, 1)}
            for name, seconds in tests.most_common(MOST_TESTS)
        ],
    }
    path = write_record("seconds_of_tests", said, ("jax", "jaxlib", "pytest"), facts, rows)
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
