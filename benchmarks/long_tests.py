"""Run the tests that take minutes and leave a dated record of how each went.

Run: python benchmarks/long_tests.py [PYTEST ARGUMENT ...] (or `make test-long`, which runs all). Writes
benchmarks/records/DATE_long_tests.toml with the command, commit, versions, machine, and the outcome and
seconds of each test; with test files among the arguments DATE_long_tests_NAME.toml, by their names. Exit
status is pytest's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from _record import ROOT, write_record

ARGUMENTS = ["-m", "long and not gpu"]


def outcome_of(case: ET.Element) -> str:
    """What became of a test, from its entry in pytest's JUnit XML: passed, failed, error or skipped."""
    for word, tag in (("failed", "failure"), ("error", "error"), ("skipped", "skipped")):
        if case.find(tag) is not None:
            return word
    return "passed"


def main(arguments: list[str]) -> int:
    """Run pytest and write the record; nothing is recorded where no test was found."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", *ARGUMENTS, *arguments]
        status = subprocess.run([*command, f"--junitxml={xml}"], cwd=ROOT).returncode
        cases = list(ET.parse(xml).iter("testcase")) if xml.exists() else []
    if not cases:
        print("no test ran, so there is no record", file=sys.stderr)
        return status
    rows = [
        {
            "name": f"{case.get('classname')}.{case.get('name')}",
            "outcome": outcome_of(case),
            "seconds": round(float(case.get("time", "0")), 1),
        }
        for case in cases
    ]
    said = " ".join(["python benchmarks/long_tests.py", *arguments]) if arguments else "make test-long"
    packages = ("jax", "jaxlib", "numpy", "pytest")
    files = [Path(argument).stem.removeprefix("test_") for argument in arguments if argument.endswith(".py")]
    record = write_record(
        "_".join(["long_tests", *files]), said, packages, {"exit_status": status}, {"test": rows}
    )
    print(f"wrote {record.relative_to(ROOT)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
