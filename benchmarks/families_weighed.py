"""Weigh a model of four families of 2025 on 8 and 64 H100, and compare its FLOPs with a count by hand.

Run: python benchmarks/families_weighed.py [--record]. Each is weighed by the command, in a process of its own
without the cache, at its published size in sequences of 8,192 tokens and with 4,194,304 tokens a step.
--record writes records/DATE_families_weighed.toml; `hub_models.py --page` shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from _hand_counts import BY_HAND
from _record import write_record
from _weighed_alone import weighed_alone

LENGTH = 8192
SETTINGS: Mapping[tuple[str, int], Mapping[str, Any]] = {
    ("google/gemma-3-27b-it", 8): {"remat": "full"},
    ("google/gemma-3-27b-it", 64): {"remat": "full"},
}
"""What differs from the defaults, by model and devices: without it the step does not fit."""
HEAD = """
## Four families of 2025, at length

`python benchmarks/families_weighed.py --record` weighed these in sequences of 8,192 tokens, with 4,194,304
tokens a step: published sizes, parameters over all devices, nothing from the cache. *By hand*: the model's
FLOPs of a token, {equal} of `benchmarks/_hand_counts.py`.

| model | fleet | setting | GiB | largest, GiB | other, % | step, s | by hand | executed | processor, s |
|---|---|---|---|---|---|---|---|---|---|
"""


def rows_of(limit: float) -> list[dict[str, Any]]:
    """Return a row for each model and fleet."""
    rows: list[dict[str, Any]] = []
    for name, count in BY_HAND.items():
        for devices in (8, 64):
            given = SETTINGS.get((name, devices), {})
            with tempfile.TemporaryDirectory() as cache:
                os.environ["MESHWRIGHT_CACHE_DIR"] = cache
                settings = {"batch.sequence_length": LENGTH, **given}
                found = weighed_alone(name, f"{devices}xH100", settings, limit)
            row = {"model": name, "fleet": f"{devices}xH100", "settings": dict(given), **found}
            rows.append({**row, "token_flops_by_hand": count(LENGTH)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def section_of(record: Mapping[str, Any]) -> str:
    """Return the section of a page that shows a record."""
    rows = record["model"]
    equal = sum(row["model_flops"] == row["tokens_per_step"] * row["token_flops_by_hand"] for row in rows)
    lines = [HEAD.format(equal=f"which equals the program's in {equal} of {len(rows)}, by the formulas")]
    for row in rows:
        settings = ", ".join(f"`{key}={value}`" for key, value in row["settings"].items())
        largest = ", ".join(
            f"{name.replace('_', ' ')} {size:.1f}" for name, size in list(row["largest_gib"].items())[:3]
        )
        low, expected, high = row["step_seconds"]
        needed = f"{row['needed_gib']:.1f}" if row["fits"] else f"**{row['needed_gib']:.1f}**"
        cells = [f"`{row['model']}`", row["fleet"], settings, needed, largest, f"{row['other_percent']:.2f}"]
        cells += [f"{expected:.3g} ({low:.3g} to {high:.3g})", f"{row['token_flops_by_hand'] / 1e9:.3f} G"]
        cells += [f"{row['executed_per_model']:.3f}", f"{row['processor_seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def main() -> None:
    """Print the rows, and keep them if asked for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--record", action="store_true")
    options.add_argument("--limit", type=float, default=600)
    given = options.parse_args()
    rows = rows_of(given.limit)
    if given.record:
        command = "python benchmarks/families_weighed.py --record"
        write_record("families_weighed", command, ("jax", "jaxlib"), {"length": LENGTH}, {"model": rows})


if __name__ == "__main__":
    main()
