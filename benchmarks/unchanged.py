"""Compare what this tree weighs and trains with what another commit did, field by field.

Run: python benchmarks/unchanged.py COMMIT [--only WORD]. It is for a refactoring: it checks the commit out in
a second tree, runs the same cases with both, and prints every field that differs. Each tree has its own
compile cache. Exits with 1 where anything differs.

Cases: `weigh --json` of every preset on a GPU fleet, of the small ones on a CPU fleet, and of bytes-nano in
twelve layouts; the losses of twenty steps of bytes-nano in eight layouts. Not compared: compile seconds,
whether a program was cached, source lines (ours move), and predictions for CPUs, which follow each cache's
calibration.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _record import ROOT

GPU_FLEETS = {
    "llama3-405b": "512xH100",
    "llama3-70b": "64xH100",
    "gpt3-175b": "64xH100",
    "mixtral-8x7b": "64xH100",
}
LAYOUTS = (
    "data=8", "fsdp=8", "data=2,tensor=4", "context=8", "data=2,fsdp=4", "data=2,fsdp=2,tensor=2",
    "fsdp=4,tensor=2", "data=2,context=4", "stage=2,fsdp=4", "stage=2,data=2,fsdp=2",
    "stage=2,context=2,tensor=2", "fsdp=2,context=4",
)  # fmt: skip
TRAINED = LAYOUTS[:8]
# What depends on this machine's calibration.
LEFT_OUT = {"prediction", "no_prediction", "run_total"}


def cases(only: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each case's name and the arguments of `meshwright`."""
    presets = sorted(path.stem for path in (ROOT / "src/meshwright/config/presets").glob("*.toml"))
    small = [name for name in presets if not name.startswith(("llama", "gpt2-1.5b", *GPU_FLEETS))]
    weighed = [(name, GPU_FLEETS.get(name, "8xH100")) for name in presets] + [
        (name, "8xCPU") for name in small
    ]
    found = [(f"weigh {name} on {fleet}", ["weigh", name, "--on", fleet]) for name, fleet in weighed]
    nano = ["bytes-nano", "--on"]
    for layout in LAYOUTS:
        found.append((f"weigh bytes-nano, {layout}", ["weigh", *nano, "8xH100", "--layout", layout]))
    for layout in TRAINED:
        command = ["train", *nano, "8xCPU", "--layout", layout, "--steps", "20"]
        found.append((f"train bytes-nano, {layout}", command))
    return ((name, command) for name, command in found if only in name)


def answer(tree: Path, command: list[str], scratch: Path) -> dict[str, Any]:
    """Run a command of the tree's meshwright, and return its JSON; an error's last line where it fails."""
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "MESHWRIGHT_CACHE_DIR": str(scratch / "cache"),
    }
    folder = tempfile.mkdtemp(dir=scratch)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "meshwright", *command, "--json"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    shutil.rmtree(folder)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    whole = json.loads(done.stdout)
    if command[0] == "train":
        return {
            "losses": whole["measurement"]["losses"],
            "fingerprint": whole["weighing"]["compile"]["fingerprint"],
        }
    # A CPU's prediction depends on this machine's calibration, which each cache measures for itself.
    return whole if "CPU" not in command[3] else {k: v for k, v in whole.items() if k not in LEFT_OUT}


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield each field that differs, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        if path.endswith("by_line"):
            before, after = _by_file(before), _by_file(after)
        for key in sorted({*before, *after}):
            if key != "source_line" and (key not in ("seconds", "cached") or not path.endswith("compile")):
                yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif before != after:
        yield f"{path}: {str(before)[:100]} -> {str(after)[:100]}"


def _by_file(lines: dict[str, Any]) -> dict[str, list[str]]:
    """Return the values of lines by the file that has them, since lines move within it."""
    files: dict[str, list[str]] = {}
    for line, value in sorted(lines.items(), key=lambda item: json.dumps(item[1], sort_keys=True)):
        files.setdefault(line.rpartition(":")[0], []).append(json.dumps(value, sort_keys=True))
    return files


def main() -> None:
    """Compare, and exit with 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    told = parser.parse_args()
    differing = 0
    with tempfile.TemporaryDirectory() as scratch:
        before = Path(scratch) / "before"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", before, told.commit], cwd=ROOT, check=True
        )
        try:
            for tree in (before, ROOT):
                (Path(scratch) / f"of-{tree.name}").mkdir()
            for name, command in cases(told.only):
                pair = [answer(tree, command, Path(scratch) / f"of-{tree.name}") for tree in (before, ROOT)]
                failed = [f"failed: {each['failed']}" for each in pair if "failed" in each]
                found = failed or list(differences(*pair))  # two equal failures show nothing
                differing += bool(found)
                print(f"{'DIFFERS' if found else 'equal':8} {name}", *found[:20], sep="\n    ", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
