"""Score the estimate of a finish on documented runs, each from what was known before it.

Run: python benchmarks/finish_history.py. Writes a dated record and the table of docs/explanation/finish.md.
The figures that a run itself published are left out of the estimate of that run (finish_runs.toml).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from _record import ROOT, write_record

from meshwright.contrib.finishing import Operations, Range, Workload, finish_of
from meshwright.predict import Interval

RUNS = ROOT / "benchmarks/finish_runs.toml"
PAGE = ROOT / "docs/explanation/finish.md"
BEGIN, END = "<!-- finish_history: begin -->", "<!-- finish_history: end -->"
DAY = 86400
SECOND = Interval(low=1.0, expected=1.0, high=1.0)  # the shares do not depend on the length of a step


def main() -> None:
    """Write the record and the page's table, and print how many intervals hold."""
    rows = list(scored())
    write_record("finish", "python benchmarks/finish_history.py", ("jax",), {}, {"run": rows})
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")
    print(f"{sum(row['inside'] for row in rows)} of {len(rows)} shares are inside")


def scored() -> Iterator[dict[str, Any]]:
    """Yield each run with its estimate, and whether the interval holds what was published."""
    for run in tomllib.loads(RUNS.read_text())["run"]:
        work = Workload(
            step_seconds=SECOND,
            steps=round(run["days"] * DAY),
            hosts=run["hosts"],
            chips_per_host=run["chips_per_host"],
            extra_share=run.get("extra_share", 0.0),
        )
        made = finish_of(
            work,
            Operations(**run["operations"]),
            without=run["left_out"],
            period_seconds=run.get("save_seconds"),
        )
        share = made.up_share if run["counts"] == "up" else made.useful_share
        yield {
            "name": run["name"],
            "counts": run["counts"],
            "published": run["share"],
            **_ends("share", share, 4),
            "inside": share.low <= run["share"] <= (share.high or 1),
            **({"interruptions": run["interruptions"]} if "interruptions" in run else {}),
            **_ends("faults", made.interruptions, 0),
        }


def _ends(name: str, range_: Range, digits: int) -> dict[str, float]:
    assert range_.high is not None, "the step is known"
    ends = {"low": range_.low, "expected": range_.expected, "high": range_.high}
    return {f"{end}_{name}": round(value, digits) for end, value in ends.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the page's table."""
    lines = [
        "| run | what is counted | estimate before it (80 %) | published | interruptions (80 %) | counted |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def _line(row: Mapping[str, Any]) -> str:
    low, expected, high = (100 * row[f"{end}_share"] for end in ("low", "expected", "high"))
    mark = "" if row["inside"] else " (outside)"
    faults = "{low_faults:,.0f} to {high_faults:,.0f}".format(**row)
    seen = row.get("interruptions")
    beyond = seen is not None and not row["low_faults"] <= seen <= row["high_faults"]
    cells = (
        row["name"],
        row["counts"],
        f"{expected:.1f} % ({low:.1f} to {high:.1f})",
        f"{100 * row['published']:.4g} %{mark}",
        faults,
        "" if seen is None else f"{seen}{' (outside)' if beyond else ''}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
