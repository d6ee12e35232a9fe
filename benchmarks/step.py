"""Compare the compiled train step of some programs before and after a change: seconds and bytes by class.

Run: python benchmarks/step.py [--before CHECKOUT] [--record]. Nothing runs on a GPU: every figure is a
prediction from a program that is compiled here. --before weighs with another checkout of this repository too,
such as the commit before a change. --record writes records/DATE_step.toml after each program. A row that
today's record already has, of the same program and commit, is not weighed again: a stopped run goes on.

`memory_bound_gb` is what kernels without products or attention read and write in a step, on one device,
`sent_gb` what a device sends, and `gib_by_category` its memory at the peak.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from _record import RECORDS, ROOT, write_record


class Case(NamedTuple):
    """A program: its settings in both checkouts, in this one alone, and in the one before alone."""

    name: str
    config: str
    fleet: str
    overrides: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


_405B = ("remat=dots-attention", "zero1=true")
_CHUNKS, _WHOLE_STAGES = ("pipeline_chunks=8",), ("model.num_layers=128",)
_LONG = ("batch.sequences=128", "batch.sequence_length=131072")
CASES = (
    Case("GPT-2", "gpt2-124m", "1xH100", ("batch.sequences=32", "batch.microbatch_sequences=32")),
    Case(
        "GPT-2, four microbatches",
        "gpt2-124m",
        "1xH100",
        ("batch.sequences=32", "batch.microbatch_sequences=8"),
    ),
    Case("Llama 1B, one sequence a microbatch", "llama-1b", "1xH100", ("batch.microbatch_sequences=1",)),
    Case("Llama 1B", "llama-1b", "1xH100", ("batch.microbatch_sequences=4",)),
    Case("Llama 1B, fp8", "llama-1b", "1xH100", ("batch.microbatch_sequences=4", "precision=fp8")),
    Case("Llama 3 8B, a loop over layers", "llama3-8b", "8xH100", (), ("layer_loop=keep",)),
    Case("Llama 3 8B", "llama3-8b", "8xH100", (), ("layer_loop=unroll",)),
    Case("Llama 3 70B, the preset", "llama3-70b", "64xH100"),
    Case(
        "Llama 3 70B, a pipeline",
        "llama3-70b",
        "64xH100",
        (
            "layout=stage=8,data=2,tensor=4",
            "zero1=true",
            "remat=dots-attention",
            "batch.microbatch_sequences=1",
        ),
        ("pipeline_chunks=10",),
    ),
    Case("Mixtral 8x7B, the preset", "mixtral-8x7b", "64xH100"),
    Case(
        "Llama 3 405B, its owners' layout",
        "llama3-405b",
        "8192xH100",
        ("layout=data=64,stage=16,tensor=8", *_405B),
        _CHUNKS,
        _WHOLE_STAGES,
    ),
    Case(
        "Llama 3 405B, their larger fleet",
        "llama3-405b",
        "16384xH100",
        ("layout=data=128,stage=16,tensor=8", *_405B),
        _CHUNKS,
        _WHOLE_STAGES,
    ),
    Case(
        "Llama 3 405B, 131,072 tokens",
        "llama3-405b",
        "16384xH100",
        ("layout=data=8,stage=16,context=16,tensor=8", *_LONG, *_405B),
        _CHUNKS,
        _WHOLE_STAGES,
    ),
    Case(
        "GPT-3 175B",
        "gpt3-175b",
        "64xA100-80GB",
        ("layout=stage=8,tensor=8", "remat=dots-attention", "batch.sequences=64"),
        ("pipeline_chunks=4",),
        ("model.vocab_size=50304",),
    ),
    Case(
        "SimuMax's 12 layers of 70B",
        "llama3-70b",
        "8xB200",
        (
            "layout=data=4,tensor=2",
            "zero1=true",
            "remat=dots-attention",
            "model.num_layers=12",
            "batch.sequences=16",
            "batch.sequence_length=4096",
            "batch.microbatch_sequences=1",
        ),
    ),
)
ONE = """
import collections, json, sys
import meshwright as mw
from meshwright.predict import machine_of
config, fleet, overrides = json.loads(sys.argv[1])
weighed = mw.weigh(config, on=fleet, overrides=overrides)
made, machine = weighed.prediction, machine_of(weighed.fleet, None)
memory_bound = sum(each.seconds for each in made.slices if each.name == "memory-bound")
sent = collections.Counter()
for each in weighed.ledger.traffic:
    sent[f"{each.kind}[{','.join(each.axes)}]"] += each.wire_bytes
print(json.dumps({
    "tokens_per_second_per_device": made.tokens_per_second_per_device, "mfu": made.mfu,
    "model_tflops_per_second_per_device": weighed.ledger.flops.model / made.step_seconds.expected
        / weighed.fleet.num_devices / 1e12,
    "step_seconds": made.step_seconds.expected, "reserved_gib": weighed.ledger.memory.reserved_bytes / 2**30,
    "fits": weighed.fits, "compile_seconds": weighed.compiled.compile_seconds,
    "memory_bound_gb": memory_bound * machine.memory_bytes_per_second * machine.memory_efficiency / 1e9,
    "sent_gb": {name: sent_bytes / 1e9 for name, sent_bytes in sent.items() if sent_bytes > 1e6},
    "gib_by_category": {name: held / 2**30 for name, held in weighed.ledger.memory.by_category.items()},
    "exposed_seconds": {each.name: each.exposed_seconds for each in made.slices},
}))
"""


def weighed(case: Case, checkout: Path, is_before: bool) -> dict[str, Any]:
    """Return the figures of one program, weighed by a process of its own with the package in `checkout`."""
    overrides = (*case.overrides, *(case.before if is_before else case.after))
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "XDG_CACHE_HOME": cache}
        command = [sys.executable, "-c", ONE, json.dumps((case.config, case.fleet, overrides))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"overrides": list(overrides), "failed": done.stderr.strip().splitlines()[-1]}
    return {"overrides": list(overrides), **json.loads(done.stdout.splitlines()[-1])}


def commit_of(checkout: Path) -> str:
    """Return the commit that is checked out in a folder, marked where the package differs from it."""
    head = ["git", "rev-parse", "--short=12", "HEAD"]
    changed = subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", "src"], cwd=checkout, check=False
    ).returncode
    found = subprocess.run(head, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    return found + ("-dirty" if changed else "")


def known_rows() -> list[dict[str, Any]]:
    """Return the rows of today's record; none if there is no such record."""
    path = RECORDS / f"{datetime.date.today().isoformat()}_step.toml"
    return tomllib.loads(path.read_text())["step"] if path.exists() else []


def line_of(row: dict[str, Any]) -> str:
    """Return what is printed of a row."""
    start = f"{row['which']} {row['name']}: "
    if "failed" in row:
        return start + row["failed"]
    exposed = ", ".join(
        f"{name} {seconds:.3f}" for name, seconds in row["exposed_seconds"].items() if seconds
    )
    fits = "" if row["fits"] else ", does not fit"
    return (
        f"{start}{row['step_seconds']:.4g} s, {row['tokens_per_second_per_device']:,.0f} tokens/s, "
        f"MFU {row['mfu']:.1%}, {row['reserved_gib']:.1f} GiB{fits}, memory-bound kernels move "
        f"{row['memory_bound_gb']:.0f} GB ({exposed})"
    )


def main() -> None:
    """Weigh all programs, print a line for each and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="also weigh with this checkout")
    parser.add_argument("--record", action="store_true", help="write records/DATE_step.toml")
    given = parser.parse_args()
    checkouts = {"before": given.before.resolve(), "after": ROOT} if given.before else {"after": ROOT}
    known = known_rows() if given.record else []
    rows: list[dict[str, Any]] = []
    for which, checkout in checkouts.items():
        commit = commit_of(checkout)
        for case in CASES:
            named = {
                "name": case.name,
                "which": which,
                "commit": commit,
                "config": case.config,
                "fleet": case.fleet,
            }
            row = next((row for row in known if named.items() <= row.items()), None)
            row = row or named | weighed(case, checkout, which == "before")
            rows.append(row)
            print(line_of(row), flush=True)
            if given.record:
                command = "python benchmarks/step.py --record" + (
                    " --before CHECKOUT" if given.before else ""
                )
                path = write_record("step", command, ("jax", "jaxlib", "jax-cuda13-pjrt"), {}, {"step": rows})
    if given.record:
        print("wrote", path)


if __name__ == "__main__":
    main()
