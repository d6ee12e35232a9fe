"""Weigh a model by the command, in a process of its own with a time limit, and return what was found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"


def weighed_alone(program: str, on: str, settings: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Return the verdict and the figures of `meshwright weigh`, and what it took.

    `refused`: the words of a refusal. `failed`: the end of what a command said that ended otherwise, or
    that it was stopped after `limit` seconds. Processor seconds are those of the command and of its workers.
    """
    command = [sys.executable, "-m", "meshwright", "weigh", program, "--on", on, "--json"]
    for key, value in settings.items():
        command += ["--layout", str(value)] if key == "layout" else ["--set", f"{key}={value}"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        code, processor_seconds = _ended(process, began + limit)
        took = {
            "seconds": round(time.monotonic() - began, 1),
            "processor_seconds": round(processor_seconds, 1),
        }
        out.seek(0)
        err.seek(0)
        said = err.read().decode()
        if code is None:
            return {"failed": f"stopped after {limit:.0f} s", **took}
        try:
            return {**_figures(json.loads(out.read())), **took}
        except ValueError:
            words = " ".join(said.partition("error: ")[2].split())
            return {"refused" if words and code == 2 else "failed": words or said[-500:], **took}


def _ended(process: subprocess.Popen[bytes], until: float) -> tuple[int | None, float]:
    """Return the exit status and the processor seconds of a process; None if it had to be ended."""
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > until:
            os.killpg(process.pid, signal.SIGKILL)
            _, _, used = os.wait4(process.pid, 0)
            process.returncode = -signal.SIGKILL
            return None, used.ru_utime + used.ru_stime
        time.sleep(0.1)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record keeps of the fields of a weighing."""
    row: dict[str, Any] = {"layout": found["layout"], "fits": found["fits"]}
    row["compile_seconds"] = round(found["compile"]["seconds"], 1)
    if (refusal := found.get("refusal")) is not None:
        return row | {"needed_gib": round(refusal["needed_bytes"] / 2**30, 1), "verdict_of": "the compiler"}
    memory, flops = found["ledger"]["memory"], found["ledger"]["flops"]
    needed = memory["reserved_bytes"] + memory["allowance_bytes"]
    other = memory["by_category"].get("other", 0) / memory["reserved_bytes"]
    row |= {"tokens_per_step": found["tokens_per_step"], "needed_gib": round(needed / 2**30, 1)}
    row |= {"other_percent": round(100 * other, 3), "model_flops": flops["model"]}
    row["executed_per_model"] = round(flops["executed"] / flops["model"], 4)
    largest = sorted(memory["by_category"].items(), key=lambda each: -each[1])[:5]
    row["largest_gib"] = {name: round(size / 2**30, 2) for name, size in largest}
    if (prediction := found["prediction"]) is None:
        return row | {"no_prediction": found["no_prediction"]}
    ends = (prediction["step_seconds"][end] for end in ("low", "expected", "high"))
    return row | {"step_seconds": [end for end in ends if end is not None]}
