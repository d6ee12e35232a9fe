"""Time `make demo` and `make test` in a fresh clone on each Python, apart from what they install.

Run: python benchmarks/fresh_clones.py [--again] PYTHON ...    (an interpreter of each; on a quiet machine)
Each Python has a clone of the checked-out commit, an environment made anew and no cache of the user's.
--again runs `make test-again` too. What installs is timed apart, with the bytes that the environment takes
then; records of `install.py` have what is downloaded. Seconds are a clock's. Writes
records/DATE_fresh_clones.toml. Exit status is the number of targets that failed; their output lies in the
folder that is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import ROOT, write_record
from install import disk_bytes, run

VERSION = "import platform; print(platform.python_version())"


def timed(clone: Path, target: str, python: str, log: Path) -> dict[str, Any]:
    """Run a target of make in a clone; return its wall seconds, its status and its last line."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(clone.parent / "cache")}
    for name in ("MESHWRIGHT_CACHE_DIR", "PYTHONPATH"):
        environment.pop(name, None)
    started = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            ["make", target, f"PYTHON={python}"], cwd=clone, env=environment, stdout=file, stderr=file
        )
    seconds = round(time.monotonic() - started, 1)
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1].strip(" =")
    print(f"{log.stem}: {seconds} s, status {done.returncode}: {last}", flush=True)
    return {"seconds": seconds, "status": done.returncode, "last_line": last}


def of_a_clone(python: str, folder: Path, *, again: bool) -> list[dict[str, Any]]:
    """Clone, install and run; return a row for each step."""
    version = run(python, "-c", VERSION).strip()
    clone = folder / version / "clone"
    run("git", "clone", "--quiet", ROOT, clone)
    steps = [("install what runs", f".venv/.installed-{version}"), ("make demo", "demo")]
    steps += [("install what tests", f".venv/.testable-{version}"), ("make test", "test")]
    steps += [("make test-again", "test-again")] * again
    rows = []
    for name, target in steps:
        log = folder / f"{version} {name}.txt"
        row = {"python": version, "step": name, **timed(clone, target, python, log)}
        if name.startswith("install"):
            row["disk_bytes"] = disk_bytes(clone / ".venv")
        rows.append(row)
    return rows


def main() -> int:
    """Measure each interpreter, and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pythons", nargs="+")
    parser.add_argument("--again", action="store_true", help="run `make test-again` too")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="meshwright-clones-"))
    print(f"output lies in {folder}", flush=True)
    rows = [row for python in given.pythons for row in of_a_clone(python, folder, again=given.again)]
    command = "python benchmarks/fresh_clones.py PYTHON ..."
    print("wrote", write_record("fresh_clones", command, (), {}, {"step": rows}))
    return sum(row["status"] != 0 for row in rows)


if __name__ == "__main__":
    sys.exit(main())
