"""CPU seconds of weighing what is compiled already, before and after a change.

Run: python benchmarks/warm.py BEFORE [CONFIG@FLEET ...]    (BEFORE: a checkout of the commit to compare with)
Each figure is the least of some rounds of user and system seconds of a process with all its children; rounds
of the two checkouts are interleaved. `cold`: from an empty cache. `imports`: Python, and what the command
imports, until `weigh` is called. `reckoned`: `weigh` beside that, of a compiled program from which the ledger
and the prediction are to be reckoned. `warm`: the same again. `command`, `page`: `meshwright weigh` whole,
warm, without and with `--html`. `help`: `--help`. `figures_equal` compares the JSON of the two checkouts, but
for its part `compile`. Writes records/DATE_warm.toml.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _record import ROOT, write_record

ROUNDS = 3
CASES = ("llama3-8b@64xH100", "llama3-405b@4096xH100", "gpt2-124m@8xH100")
ONE = """
import json, resource, sys
import meshwright.cli._app, meshwright.report, meshwright.results, pydantic, rich.console
from meshwright import explain, weigh
pydantic.TypeAdapter

def spent():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

imports = spent()
weighing = weigh(sys.argv[1], on=sys.argv[2])
text = str(weighing)
print(json.dumps({"imports": imports, "weigh": spent() - imports, "found": weighing.to_dict()}))
"""


def run(checkout: Path, cache: Path, *arguments: str) -> tuple[float, str]:
    """Run Python with a checkout's meshwright; return its CPU seconds with its children's, and its output."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "MESHWRIGHT_CACHE_DIR": str(cache)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, check=True, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def measured(checkout: Path, cache: Path, case: Sequence[str], page: Path) -> tuple[dict[str, float], Any]:
    """Return the seconds of one round, and the JSON of the weighing."""
    for kept in (cache / "compiled").glob("*/beside-*"):
        kept.unlink()
    seconds: dict[str, float] = {}
    found = None
    for name in ("reckoned", "warm"):
        told = json.loads(run(checkout, cache, "-c", ONE, *case)[1])
        seconds["imports"], seconds[name] = told["imports"], told["weigh"]
        found = {key: value for key, value in told["found"].items() if key != "compile"}
    command = ("-m", "meshwright", "weigh", case[0], "--on", case[1])
    seconds["command"], _ = run(checkout, cache, *command)
    seconds["page"], _ = run(checkout, cache, *command, "--html", str(page))
    seconds["help"], _ = run(checkout, cache, "-m", "meshwright", "--help")
    return seconds, found


def main() -> None:
    """Interleave the rounds, print and record the least seconds."""
    checkouts = {"before": Path(sys.argv[1]).resolve(), "after": ROOT}
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        for case in ((*each.split("@"),) for each in sys.argv[2:] or CASES):
            least: dict[str, dict[str, float]] = {}
            found: dict[str, Any] = {}
            for which, checkout in checkouts.items():  # compiles
                cold, _ = run(checkout, Path(made) / which, "-c", ONE, *case)
                least[which] = {"cold": cold}
            for _ in range(ROUNDS):
                for which, checkout in checkouts.items():
                    page = Path(made) / "page.html"
                    seconds, found[which] = measured(checkout, Path(made) / which, case, page)
                    for name, value in seconds.items():
                        least[which][name] = min(value, least[which].get(name, value))
            equal = ordered(found["before"]) == ordered(found["after"])
            for which, seconds in least.items():
                rounded = {name: round(value, 3) for name, value in seconds.items()}
                row = {"config": case[0], "fleet": case[1], "which": which, "cpu_seconds": rounded}
                table.append({**row, "figures_equal": equal})
                print(table[-1], flush=True)
    facts = {"rounds": ROUNDS, "statistic": "least"}
    command = " ".join(("python benchmarks/warm.py BEFORE", *sys.argv[2:]))
    print("wrote", write_record("warm", command, ("jax", "jaxlib", "numpy"), facts, {"warm": table}))


def ordered(value: Any) -> str:
    """Return JSON in which keys are sorted."""
    return json.dumps(value, sort_keys=True)


if __name__ == "__main__":
    main()
