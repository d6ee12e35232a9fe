"""Plant causes in steps of JAX and PyTorch, and print whether `reconcile` names them.

Run: python benchmarks/planted_causes.py [--record] [--only jax | torch | gloo]. Each step runs on the CPU of
this machine, once as it is meant to be and once with each cause (_planted.py); its trace is reconciled by
`mw.reconcile`. The seconds that a cause is said to cost stand beside the planted ones; where the plant does
not tell them, beside how much slower the median step is than without it. --record writes
records/DATE_planted_causes.toml and the table of docs/how-to/why-is-it-slow.md. Exit status 1: fewer than
four in five causes are named first or second, the parts of one do not sum to its gap, or more than a tenth of
an unplanted step is blamed, in each of three traces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _planted import (
    GLOO,
    JAX,
    TORCH,
    UNPLANTED_JAX,
    UNPLANTED_TORCH,
    Plant,
    gloo_gap,
    parts_sum_to_the_gap,
    rank_of,
    seconds_of,
    torch_gap,
    trace_processes,
)
from _record import ROOT, write_record

import meshwright as mw
from meshwright.units import format_seconds

PAGE = ROOT / "docs/how-to/why-is-it-slow.md"
BEGIN, END = "<!-- planted_causes: begin -->", "<!-- planted_causes: end -->"
PROGRAMS = {"jax": "JAX", "torch": "PyTorch", "gloo": "PyTorch, 2 processes"}
LEAST_NAMED = 0.8  # of the causes, first or second
MOST_BLAMED = 0.1  # of an unplanted step
MOST_TRACES = 3  # of an unplanted step
PLACES = {1: "first", 2: "second"}
Row = dict[str, Any]


def main() -> None:
    """Trace, reconcile and print each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="else all of them")
    parser.add_argument("--record", action="store_true", help="write a dated record and the page's table")
    arguments = parser.parse_args()
    programs = arguments.only or [*PROGRAMS]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in programs:
            (Path(folder) / name).mkdir()
            for row in ROWS[name](Path(folder) / name):
                rows.append({"program": name, **row})
                print(f"{_words(rows[-1])}: {_named(row)}", file=sys.stderr)
    print(table(rows))
    print(summary(rows))
    if arguments.record:
        packages = ("jax", *(["torch"] if {"torch", "gloo"} & {*programs} else []))
        write_record("planted_causes", "python benchmarks/planted_causes.py", packages, {}, {"step": rows})
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n\n{summary(rows)}\n{END}{rest.partition(END)[2]}")
    for each in failures(rows):
        print(f"does not hold: {each}", file=sys.stderr)
    sys.exit(bool(failures(rows)))


def _jax(folder: Path) -> Iterator[Row]:
    import jax

    jax.config.update("jax_num_cpu_devices", max(plant.num_devices for plant in JAX))
    from _planted_jax import TRACED, jax_gap

    plain: dict[int, mw.Gap] = {}
    for name, num_devices in UNPLANTED_JAX.items():

        def traced(place: int, name: str = name, num_devices: int = num_devices) -> mw.Gap:
            return jax_gap(TRACED[name](folder / f"{name} {place}"), num_devices)

        row, gap = _unplanted(name, traced)
        plain.setdefault(num_devices, gap)
        yield row
    for plant in JAX:
        trace = TRACED[plant.name](folder / plant.name)
        gap = jax_gap(trace, plant.num_devices)
        yield _planted(plant, gap, seconds_of(plant, trace), plain[plant.num_devices])


def _torch(folder: Path) -> Iterator[Row]:
    trace_processes("torch", folder, [*UNPLANTED_TORCH, *(plant.name for plant in TORCH)])
    unplanted: list[mw.Gap] = []
    for name in UNPLANTED_TORCH:

        def traced(place: int, name: str = name) -> mw.Gap:
            if place:
                trace_processes("torch", folder, [name])
            return torch_gap(folder / f"{name}.json")

        row, gap = _unplanted(name, traced)
        unplanted.append(gap)
        yield row
    for plant in TORCH:
        trace = folder / f"{plant.name}.json"
        plain = unplanted[0]
        yield _planted(plant, torch_gap(trace), seconds_of(plant, trace), plain)


def _gloo(folder: Path) -> Iterator[Row]:
    trace_processes("gloo", folder, [plant.name for plant in GLOO])

    def traced(place: int) -> mw.Gap:
        here = folder / f"nothing {place}"
        here.mkdir()
        trace_processes("gloo", here, ["nothing"])
        return gloo_gap(here.glob("nothing.?.json"))

    row, unplanted = _unplanted("nothing", traced)
    yield row
    for plant in GLOO:
        gap = gloo_gap(folder.glob(f"{plant.name}.?.json"))
        yield _planted(plant, gap, seconds_of(plant, folder / plant.name), unplanted)


ROWS: Mapping[str, Callable[[Path], Iterator[Row]]] = {"jax": _jax, "torch": _torch, "gloo": _gloo}


def _planted(plant: Plant, gap: mw.Gap, seconds: float | None, plain: mw.Gap) -> Row:
    place = rank_of(plant, gap)
    named = None if place is None else gap.causes[place - 1]
    return {
        "name": plant.name,
        "is_planted": True,
        "kind": plant.kind,
        "place": place or 0,
        "where": "" if named is None else named.where or named.name,
        **({} if named is None else {"said_seconds": _rounded(named.seconds)}),
        **(_slower(gap, plain) if seconds is None else {"planted_seconds": _rounded(seconds)}),
        **_step(gap),
    }


def _slower(gap: mw.Gap, plain: mw.Gap) -> Row:
    """Return how much slower a usual step is, where the plant does not tell its seconds."""
    slower = statistics.median(gap.step_seconds) - statistics.median(plain.step_seconds)
    return {"slower_seconds": _rounded(slower)}


def _unplanted(name: str, traced: Callable[[int], mw.Gap]) -> tuple[Row, mw.Gap]:
    """Trace a step again, at most three times, if a cause is blamed for too much: a busy machine pauses it.

    `traced`: makes the trace of a number.
    """
    shares: list[float] = []
    for place in range(MOST_TRACES):
        gap = traced(place)
        blamed = max(gap.causes, key=lambda cause: cause.seconds, default=None)
        shares.append(0.0 if blamed is None else blamed.seconds / gap.measured_seconds)
        if shares[-1] <= MOST_BLAMED or place + 1 == MOST_TRACES:
            kind = "" if blamed is None else blamed.kind
            all_shares = [_rounded(share) for share in shares]
            row = {"name": name, "is_planted": False, "kind": kind, "blamed_share": all_shares[-1]}
            return {**row, "blamed_shares": all_shares, **_step(gap)}, gap
    raise AssertionError("the last trace is returned")


def _step(gap: mw.Gap) -> Row:
    return {
        "step_seconds": _rounded(gap.measured_seconds),
        "unexplained_seconds": _rounded(gap.unexplained_seconds),
        "sums": parts_sum_to_the_gap(gap),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def failures(rows: Sequence[Row]) -> list[str]:
    """Return in words what does not hold: causes that are not named, sums, and unplanted steps."""
    planted = [row for row in rows if row["is_planted"]]
    named = sum(row["place"] in PLACES for row in planted)
    few = [f"{named} of {len(planted)} are named"] if named < LEAST_NAMED * len(planted) else []
    sums = [f"{_words(row)}: its parts do not sum to the gap" for row in rows if not row["sums"]]
    blamed = [
        f"{_words(row)}: {_named(row)}"
        for row in rows
        if not row["is_planted"] and row["blamed_share"] > MOST_BLAMED
    ]
    return [*few, *sums, *blamed]


def _words(row: Row) -> str:
    return f"{PROGRAMS[row['program']]} ({row['name']})"


def table(rows: Sequence[Row]) -> str:
    """Return the table of planted steps."""
    lines = [
        "| step | planted | named | where | says | planted seconds | or slower by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["is_planted"]:
            times = (_time(row, name) for name in ("said_seconds", "planted_seconds", "slower_seconds"))
            cells = (PROGRAMS[row["program"]], row["name"], _named(row), row["where"], *times)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Return in words how many are named, how many sum, and what is blamed of unplanted steps."""
    planted = [row for row in rows if row["is_planted"]]
    others = [row for row in rows if not row["is_planted"]]
    first, second = (sum(row["place"] == place for row in planted) for place in PLACES)
    sums = sum(row["sums"] for row in rows)
    shares = ", ".join(
        f"{_words(row)} " + ", then ".join(f"{100 * share:.1f} %" for share in row["blamed_shares"])
        for row in others
    )
    return (
        f"Of {len(planted)} causes {first} are named first and {second} second."
        f" In {sums} of {len(rows)} steps the causes and the unexplained rest sum to the gap.\n"
        f"The largest share of an unplanted step that one cause is blamed for: {shares}."
    )


def _named(row: Row) -> str:
    if not row["is_planted"]:
        return f"{100 * row['blamed_share']:.1f} % blamed on {row['kind'] or 'nothing'}"
    words = PLACES.get(row["place"], "not" if not row["place"] else f"number {row['place']}")
    return f"{words}: {row['kind']}" if row["place"] else words


def _time(row: Row, name: str) -> str:
    return format_seconds(row[name]) if name in row else ""


if __name__ == "__main__":
    main()
