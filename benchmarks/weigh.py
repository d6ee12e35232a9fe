"""How long weighing takes: models x fleets of 1 to 4096 devices, a process each, cold then warm.

Run: python benchmarks/weigh.py [--quick]. Prints a table and writes records/DATE_weigh.toml.
Seconds are wall clock; peak memory is the largest process of the weighing, by the operating system. Shares of
the reserved bytes: `ownerless`, filed under "other"; `unsure`, filed by a neighbour's phase or by none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from _record import ROOT, write_record

CASES = [
    ("gpt2-124m", "1xH100", None),
    ("gpt2-124m", "8xH100", None),
    ("gpt2-1.5b", "8xA100-80GB", None),
    ("llama3-8b", "8xH100", None),
    ("llama3-8b", "64xH100", None),
    ("llama3-8b", "8xB200", None),
    ("llama3-70b", "64xH100", None),
    ("llama3-70b", "512xH100", None),
    ("gpt3-175b", "512xH100", None),
    ("llama3-405b", "512xH100", "fsdp=64,tensor=8"),
    ("llama3-405b", "4096xH100", "data=8,fsdp=64,tensor=8"),
    ("llama3-8b", "4096xH100", "data=64,fsdp=64"),
]
# One weighing: run in a child, so that its memory and its imports are its own.
ONE = """
import json, sys, time
start = time.perf_counter()
import meshwright as mw
from meshwright.ledger import ledger_of
config, fleet, layout, overrides = json.loads(sys.argv[1])
weighed = mw.weigh(config, on=fleet, layout=layout, overrides=overrides)
memory = weighed.ledger.memory
unsure = sum(memory.by_certainty.get(kind, 0) for kind in ("inherited", "fallback"))
wall = time.perf_counter() - start
start = time.perf_counter()
ledger_of(weighed.folder, weighed.compiled, weighed.fleet)
print(json.dumps({
    "wall_seconds": wall, "cached": weighed.cached, "compile_seconds": weighed.compiled.compile_seconds,
    "ledger_seconds": time.perf_counter() - start, "fits": weighed.fits,
    "reserved_gib": weighed.ledger.memory.reserved_bytes / 2**30,
    "ownerless": memory.by_category.get("other", 0) / memory.reserved_bytes,
    "unsure": unsure / memory.reserved_bytes, "findings": [found.kind for found in weighed.ledger.findings],
    "mfu": weighed.prediction.mfu, "jax_imported": "jax" in sys.modules,
}))
"""


def weigh_once(case: tuple[str, str, str | None], cache: str) -> dict[str, Any]:
    """One weighing in a process of its own: its own words, and its peak memory in GiB."""
    config, fleet, layout = case
    devices = int(fleet.split("x")[0])
    overrides = [f"batch.sequences={devices}"] if devices > 2048 and config != "llama3-405b" else []
    process = subprocess.Popen(
        [sys.executable, "-c", ONE, json.dumps([config, fleet, layout, overrides])],
        stdout=subprocess.PIPE,
        env={**os.environ, "MESHWRIGHT_CACHE_DIR": cache},
        cwd=ROOT,
    )
    assert process.stdout is not None
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"weighing {case} failed with status {status}")
    return {**json.loads(answer), "peak_gib": usage.ru_maxrss * 1024 / 2**30}


def main() -> None:
    """Weigh every case cold and warm, print the table, write the record."""
    rows = []
    heads = ("cold s", "compile s", "ledger s", "warm s", "peak GiB")
    print(f"{'config':12} {'fleet':12} " + " ".join(f"{head:>9}" for head in heads))
    for case in CASES[:3] if "--quick" in sys.argv else CASES:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = weigh_once(case, cache), weigh_once(case, cache)
        assert warm["cached"], f"{case} was not cached"
        assert not warm["jax_imported"], f"{case}: the parent imported jax"
        row = {
            "config": case[0],
            "fleet": case[1],
            "layout": case[2] or "the preset's",
            "cold_seconds": round(cold["wall_seconds"], 2),
            "compile_seconds": round(cold["compile_seconds"], 2),
            "ledger_seconds": round(warm["ledger_seconds"], 2),
            "warm_seconds": round(warm["wall_seconds"], 2),
            "peak_gib": round(cold["peak_gib"], 2),
            "reserved_gib": round(cold["reserved_gib"], 2),
            "fits": cold["fits"],
            "ownerless_share": round(cold["ownerless"], 5),
            "unsure_share": round(cold["unsure"], 5),
            "findings": cold["findings"],
            "predicted_mfu": round(cold["mfu"], 3),
        }
        rows.append(row)
        print(
            f"{row['config']:12} {row['fleet']:12} {row['cold_seconds']:9.1f} {row['compile_seconds']:9.1f} "
            f"{row['ledger_seconds']:9.2f} {row['warm_seconds']:9.2f} {row['peak_gib']:9.2f}",
            flush=True,
        )
    if "--quick" not in sys.argv:
        packages = ("jax", "jaxlib", "jax-cuda13-pjrt")
        print("wrote", write_record("weigh", "python benchmarks/weigh.py", packages, {}, {"weighing": rows}))


if __name__ == "__main__":
    main()
