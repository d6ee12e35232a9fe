"""Steps of `meshwright train` on the attached GPU beside what was predicted for them.

Run: python benchmarks/gpu_steps.py [--record] [CASE ...]. Without a GPU it says so, and measures nothing.
Each case is a command of its own; its run folder has the prediction that was made before the first step.
Sizes fit one card of 80 GB. Together the cases take some five minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import write_record

SMALL_QWEN = ("Qwen/Qwen3-30B-A3B", "model.num_layers=4", "batch.sequences=4", "batch.sequence_length=4096")
LLAMA = ("llama-1b", "batch.sequences=4", "batch.sequence_length=2048")
CASES = {
    "experts": SMALL_QWEN,
    "experts, capacity 1.0": (*SMALL_QWEN, "model.capacity_factor=1.0"),
    "experts, fp8": (*SMALL_QWEN, "precision=fp8"),
    "wide experts": (
        *("mixtral-8x7b", "model.num_layers=2", "batch.sequences=2", "batch.sequence_length=4096"),
        "model.capacity_factor=none",
    ),
    "dense": LLAMA,
    "dense, fp8": (*LLAMA, "precision=fp8"),
    "moments in the host's memory": (*LLAMA, "offload=optimizer"),
    "Muon": (*LLAMA, "optimizer.kind=muon"),
}
COMMON = ("batch.microbatch_sequences=none", "data.source=synthetic")
STEPS, SECONDS = 12, 120


def measured(name: str) -> dict[str, Any]:
    """Train the steps of a case in a process of its own; return what was predicted and measured."""
    program, *settings = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "meshwright",
            "train",
            program,
            "--on",
            "local",
            "--layout",
            "data=1",
        ]
        command += ["--steps", str(STEPS), "--folder", str(run)]
        command += [word for setting in (*settings, *COMMON) for word in ("--set", setting)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            return {"case": name, "failed": done.stderr.strip()[-500:]}
        found = {each: json.loads((run / f"{each}.json").read_text()) for each in ("weighing", "measurement")}
    predicted, step = found["weighing"]["prediction"]["step_seconds"], found["measurement"]["step_seconds"]
    memory = found["weighing"]["ledger"]["memory"]["reserved_bytes"]
    return {
        "case": name,
        "predicted_seconds": {key: value for key, value in predicted.items() if value is not None},
        "measured_seconds": step,
        "over_predicted": step["median"] / predicted["expected"],
        "predicted_reserved_gib": memory / 2**30,
        "measured_bytes": {
            k: v for k, v in found["measurement"].items() if k.endswith("_bytes") and v is not None
        },
    }


def main() -> None:
    """Measure, print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write records/DATE_gpu_steps.toml")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    asked = parser.parse_args()
    device = "import jax; d = jax.devices()[0]; print(d.device_kind if d.platform == 'gpu' else '')"
    kind = subprocess.run(
        [sys.executable, "-c", device], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not kind:
        print("JAX sees no GPU, so nothing was measured.")
        return
    rows = []
    for name in asked.cases or CASES:
        rows.append(measured(name))
        print(rows[-1], flush=True)
    if asked.record:
        command = "python benchmarks/gpu_steps.py --record"
        print(
            "wrote", write_record("gpu_steps", command, ("jax", "jaxlib"), {"device": kind}, {"step": rows})
        )


if __name__ == "__main__":
    main()
