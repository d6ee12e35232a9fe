"""What the compiled train step costs: predicted seconds by class, bytes and compile time of some programs.

Run: python benchmarks/step.py [--src FOLDER] [--record]. Nothing runs on a GPU: every figure is a prediction
from a program that is compiled here. --src weighs with the package in another checkout's folder, such as the
commit before a change; the record then holds both, in one session.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import ROOT, write_record

CASES = [
    ("gpt2-124m", "1xH100", ("batch.sequences=32", "batch.microbatch_sequences=32")),
    ("gpt2-124m", "1xH100", ("batch.sequences=32", "batch.microbatch_sequences=8")),
    ("llama-1b", "1xH100", ("batch.microbatch_sequences=1",)),
    ("llama-1b", "1xH100", ("batch.microbatch_sequences=4",)),
    ("llama-1b", "1xH100", ("batch.microbatch_sequences=4", "precision=fp8")),
    ("llama3-8b", "8xH100", ()),
    ("llama3-70b", "64xH100", ()),
    ("mixtral-8x7b", "64xH100", ()),
]
ONE = """
import json, sys
import meshwright as mw
config, fleet, overrides = json.loads(sys.argv[1])
weighed = mw.weigh(config, on=fleet, overrides=overrides)
made = weighed.prediction
print(json.dumps({
    "tokens_per_second_per_device": made.tokens_per_second_per_device, "mfu": made.mfu,
    "step_seconds": made.step_seconds.expected, "reserved_gib": weighed.ledger.memory.reserved_bytes / 2**30,
    "fits": weighed.fits, "compile_seconds": weighed.compiled.compile_seconds,
    "exposed_seconds": {each.name: each.exposed_seconds for each in made.slices},
}))
"""


def weighed(case: tuple[str, str, tuple[str, ...]], source: Path, cache: str) -> dict[str, Any]:
    """Return the figures of one program, weighed by a process of its own with the package in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source), "XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", ONE, json.dumps(case)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Weigh all programs, print a line for each and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--src", type=Path, help="also weigh with the package in this folder")
    parser.add_argument("--record", action="store_true", help="write records/DATE_step.toml")
    given = parser.parse_args()
    sources = {"before": given.src, "after": ROOT / "src"} if given.src else {"after": ROOT / "src"}
    rows: list[dict[str, Any]] = []
    for config, fleet, overrides in CASES:
        for which, source in sources.items():
            with tempfile.TemporaryDirectory() as cache:
                found = weighed((config, fleet, overrides), source.resolve(), cache)
            named = {"config": config, "fleet": fleet, "overrides": list(overrides), "which": which}
            rows.append(named | found)
            print(which, config, fleet, *overrides, end=": ")
            print(f"{found['step_seconds']:.3f} s, {found['reserved_gib']:.1f} GiB", end=", ")
            print(f"memory-bound {found['exposed_seconds']['memory-bound']:.3f} s", flush=True)
    if given.record:
        command = "python benchmarks/step.py --record" + (" --src BEFORE/src" if given.src else "")
        print(write_record("step", command, ("jax", "jaxlib", "jax-cuda13-pjrt"), {}, {"step": rows}))


if __name__ == "__main__":
    main()
