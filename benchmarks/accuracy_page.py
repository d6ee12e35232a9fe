"""Write docs/results/accuracy.md and its picture from the newest records of predict_published.py.

Run: python benchmarks/accuracy_page.py [--record FILE] [--sealed FILE] [--tpus FILE]. What was sealed and
then opened stands first: by default every records/*seal*.toml, the newest before the others. Rows on TPUs
have a section of their own, from the newest record of `predict_published.py --tpus`. The page says how far
predicted step times are from published ones: by source, chip, layout, fleet and stack, with the worst rows,
and which of them are sealed, seen or fitted. A new record and this command bring all figures up to
date; docs/dev/accuracy-history.md, by hand, says what was corrected when.
"""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _accuracy_experts import section_of_experts
from _accuracy_intervals import section_of_intervals
from _published_blind import with_blind_errors
from _published_interval import interval_of
from _published_score import spread
from _record import RECORDS, ROOT
from _row_kinds import FITTED, SEALED, counted, kind_in
from _tpu_rates import with_blind_errors as with_blind_errors_of_tpus
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

PAGE, PICTURE = ROOT / "docs" / "results" / "accuracy.md", "accuracy.svg"
FEWEST = 3  # rows of a group that has a line of its own
WORST = 10
TICKS = (0.5, 0.71, 1, 1.41, 2, 4, 8)  # of measured / predicted
MARKERS = {SEALED: "*", "seen": "s", FITTED: "o"}  # others: "x"
COLOURS = ("#2d5fb4", "#b4552d", "#3a8a4d", "#7a4fa3", "#a3873f", "#2a8c96", "#a33f6b", "#555555")
FILLS = ("full", "none", "left")  # of the first eight sources, of the second, of all others
SOURCES = {
    "mosaic": "MosaicML, LLM Foundry",
    "mbridge": "NVIDIA, Megatron Bridge",
    "internevo": "InternLM, InternEvo",
    "bloom": "BigScience, tuning of BLOOM",
    "bs1b3": "BigScience, 1.3B on V100",
    "dlperf": "OneFlow, DLPerf",
    "mlperf": "MLPerf Training",
    "meg21": "Megatron-LM 2021",
    "mcore": "Megatron Core",
    "tt": "PyTorch, torchtitan",
    "tune": "PyTorch, torchtune",
    "maxtext": "Google, MaxText",
    "tpurec": "Google, TPU recipes",
    "jaxtb": "NVIDIA, JAX Toolbox",
    "llmc": "llm.c",
    "vtrainsingle": "vTrain, one node",
    "vtrainmulti": "vTrain, 64 nodes",
    "dgxcmaxtext": "NVIDIA's recipes, MaxText",
    "dgxcnemo": "NVIDIA's recipes, NeMo",
    "dgxcpaxml": "NVIDIA's recipes, PaxML",
}
Row = Mapping[str, Any]
Record = Mapping[str, Any]


def newest_record(name: str = "predict_published") -> Path:
    """Return the newest record of a name."""
    return max(RECORDS.glob(f"*_{name}.toml"))


def sealed_records() -> list[Path]:
    """Return the records of what was sealed and opened."""
    return sorted(RECORDS.glob("*seal*.toml"))


def by_kind(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return rows by their kind, sealed ones first."""
    return {kind: [row for row in rows if kind_in(row) == kind] for kind in counted(rows)}


def layout_kind(row: Mapping[str, Any]) -> str:
    """Return the axes of a row's layout, without their sizes.

    >>> layout_kind({"layout": "stage=8,data=2,tensor=4"})
    'stage, data, tensor'
    """
    return ", ".join(part.partition("=")[0] for part in row["layout"].split(","))


def by_size(row: Mapping[str, Any]) -> str:
    """Return the class of a fleet's size."""
    return {"to 8": "1 to 8 devices", "9 to 64": "9 to 64", "above 64": "more than 64"}[row["scale"]]


GROUPS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("source", lambda row: str(SOURCES.get(row["source"], row["source"]))),
    ("chip", lambda row: row["chip"]),
    ("layout", layout_kind),
    ("fleet", by_size),
    ("stack", lambda row: row.get("stack", "ours")),
)


def _percents(found: Mapping[str, float]) -> list[str]:
    """Return median, 90th percentile and bias of errors in words."""
    return [*(f"{100 * found[each]:.1f} %" for each in ("median", "p90")), f"{100 * found['bias']:+.1f} %"]


def _held(found: Mapping[str, float]) -> str:
    """Return in words how many intervals hold; "" where a record does not say."""
    return f"{100 * found['holds']:.0f} %" if "holds" in found else ""


def table(rows: Sequence[Row], name: str, key: Callable[[Row], str]) -> list[str]:
    """Return the lines of one table: a line for each group of rows of one kind, the largest first."""
    lines = [f"| {name} | kind | runs | median | nine of ten within | bias | intervals that hold |"]
    lines += ["|" + "---|" * 7]
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        groups[key(row), kind_in(row)].append(row)
    shown = {each: group for each, group in groups.items() if len(group) >= FEWEST}
    few = by_kind([row for group in groups.values() if len(group) < FEWEST for row in group])
    ordered = sorted(shown.items(), key=lambda item: -len(item[1]))
    for (label, kind), group in [*ordered, *((("all others", kind), few[kind]) for kind in few)]:
        found = spread(group)
        lines.append(
            f"| {label} | {kind} | {found['rows']} | {' | '.join([*_percents(found), _held(found)])} |"
        )
    return lines


def worst(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table of the largest errors."""
    lines = [
        "| run | kind | chip | layout | measured | predicted | error | what is known |",
        "|" + "---|" * 8,
    ]
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:WORST]:
        seconds = [f"{row[name]:.3g} s" for name in ("measured_seconds", "predicted_seconds")]
        fleet = f"{row['num_devices']} x {row['chip']}"
        notes = "; ".join(row["notes"])
        figures = f"{' | '.join(seconds)} | {100 * row['error']:+.0f} %"
        lines.append(f"| {row['id']} | {kind_in(row)} | {fleet} | `{row['layout']}` | {figures} | {notes} |")
    return lines


def draw(rows: Sequence[Row]) -> Figure:
    """Return the picture: measured / predicted of each run over its measured seconds.

    Its colour and filling are its source's, and its form its kind's.
    """
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(8.6, 4.4), layout="constrained")
        axes = figure.subplots()
        groups: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            groups[row["source"]].append(row)
        handles: list[Line2D] = []
        most = sorted(groups, key=lambda source: -len(groups[source]))
        for place, source in enumerate(most):
            style = {"color": COLOURS[place % len(COLOURS)], "linestyle": "none", "alpha": 0.75}
            style["fillstyle"] = FILLS[min(place // len(COLOURS), len(FILLS) - 1)]
            for kind, own in by_kind(groups[source]).items():
                axes.plot(
                    [row["measured_seconds"] for row in own],
                    [row["measured_seconds"] / row["predicted_seconds"] for row in own],
                    marker=MARKERS.get(kind, "x"),
                    markersize=7 if kind == SEALED else 3.6,
                    **style,
                )
            label = f"{SOURCES.get(source, source)} ({len(groups[source])})"
            handles.append(Line2D([], [], marker="o", markersize=4, label=label, **style))
        for kind, number in counted(rows).items():
            style = {"marker": MARKERS.get(kind, "x"), "markersize": 7 if kind == SEALED else 4}
            label = f"{kind} ({number})"
            handles.append(Line2D([], [], color="#222222", linestyle="none", label=label, **style))
        axes.axhspan(1 / 1.1, 1.1, color="#888888", alpha=0.15, linewidth=0)
        axes.axhline(1, color="#444444", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xlabel("measured seconds of a step")
        axes.set_ylabel("measured / predicted")
        axes.grid(alpha=0.25, linewidth=0.5)
        figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def first_lines(sealed: Mapping[str, Record], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the first table: sealed errors, the newest first, and beside them the others."""
    lines = ["| kind | runs | of what | median error | nine of ten within | bias | intervals that hold |"]
    lines += ["|" + "---|" * 7]
    for record in sealed.values():
        found = next(group for group in record["group"] if group["name"] == "all")
        what = f"{record['what']}, {record['date']}, at `{record['sealed_at'][:7]}`"
        figures = [f"**{each}**" for each in (*_percents(found), _held(found)) if each]
        lines.append(f"| **{SEALED}** | {found['rows']} | {what} | {' | '.join(figures)} |")
    for kind, own in by_kind(with_blind_errors(rows)).items():
        blind = spread([{**row, "error": row["blind_error"]} for row in own])
        fits = {"each source left out of the fit of software's shares": (blind, "")}
        fits["all sources in that fit"] = spread(own), _held(spread(own))
        for label, (found, held) in fits.items():
            lines.append(f"| {kind} | {len(own)} | {label} | {' | '.join([*_percents(found), held])} |")
    return lines


def section_of_sealed(record: Record, name: str) -> list[str]:
    """Return the lines of the section on the newest sealed errors: its groups, and its worst rows."""
    lines = [
        *SEALED_HEAD.format(record=name, date=record["date"], commit=record["sealed_at"][:7]).splitlines()
    ]
    lines += ["", "| group | kind | runs | median | nine of ten within | bias | intervals that hold |"]
    lines += ["|" + "---|" * 7]
    for found in record["group"]:
        figures = [*_percents(found), _held(found)]
        lines.append(f"| {found['name']} | {SEALED} | {found['rows']} | {' | '.join(figures)} |")
    known = record.get("worst") or [row for row in record.get("row", []) if "error" in row]
    largest = sorted(known, key=lambda row: -abs(row["error"]))[:WORST]
    lines += ["", "| largest errors | kind | error |", "|---|---|---|"]
    return lines + [f"| {row['id']} | {SEALED} | {100 * row['error']:+.1f} % |" for row in largest]


def section_of_tpus(record: Record, name: str) -> list[str]:
    """Return the lines of the section on TPUs: every row, and how blind its error is."""
    rows = with_blind_errors_of_tpus([row for row in record["row"] if "error" in row])
    several = [row for row in rows if row.get("slices", 1) > 1]
    head = TPUS.format(count=len(rows) - len(several), several=len(several), record=name)
    lines = [*head.splitlines(), *_groups_of_tpus(rows)]
    lines += ["", "| run | kind | chip | layout | measured | predicted | error | blind |", "|" + "---|" * 8]
    for row in sorted(rows, key=lambda row: row["id"]):
        seconds = [f"{row[name]:.3g} s" for name in ("measured_seconds", "predicted_seconds")]
        errors = [f"{100 * row[name]:+.1f} %" for name in ("error", "blind_error")]
        slices = row.get("slices", 1)
        fleet = f"{row['num_devices'] // slices} x {row['chip']}"
        fleet = fleet if slices == 1 else f"{slices} slices of {fleet}"
        figures = " | ".join([*seconds, *errors])
        lines += [f"| {row['id']} | {kind_in(row)} | {fleet} | `{row['layout']}` | {figures} |"]
    lines += ["", "Not scored:", "", "| runs | why |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in record["inexpressible"].items()]
    return [*lines, *(f"| 1 | {row['id']}: {row['failed']} |" for row in record["row"] if "failed" in row)]


def _groups_of_tpus(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of errors on TPUs: of runs on one slice, and on several by either assumption."""
    blind = [{**row, "error": row["blind_error"]} for row in rows]
    one = [row for row in blind if row.get("slices", 1) == 1]
    several = [row for row in blind if row.get("slices", 1) > 1]
    waiting = [{**row, "error": _waiting_error(row)} for row in several]
    yield from ("| kind | runs | of what | median error | nine of ten within | bias |", "|" + "---|" * 6)
    for group, what in (
        (one, "one slice, each run left out of the fit"),
        (several, "several slices, by the rates of one; messages beside products, as for one slice"),
        (waiting, "several slices, by the rates of one; messages waited for as our program waits"),
    ):
        if group:
            kinds, figures = " and ".join(counted(group)), " | ".join(_percents(spread(group)))
            yield f"| {kinds} | {len(group)} | {what} | {figures} |"


def _waiting_error(row: dict[str, Any]) -> float:
    """Return the error of our own program's time, with what it waits for messages."""
    waits = -row.get("otherwise_seconds", {}).get(BESIDE_PRODUCTS, 0.0)
    return float((row["predicted_seconds"] + waits) / row["measured_seconds"] - 1)


BESIDE_PRODUCTS = "messages beside products"
TPUS = """## TPUs

{count} runs on one slice and {several} on several (`benchmarks/records/{record}`, by
`predict_published.py --tpus`). One sustained rate of each generation is fitted to its rows on one slice; an
error is blind if all other such rows of the generation set that rate (of v4, which has one: the other
generations). All are runs of MaxText, in tables of two of Google's repositories.
[What is known for TPUs](tpus.md) says what was assumed of them.

"""
SEALED_HEAD = """## Sealed

All of these runs were predicted, and the predictions hashed, before anybody here had read what was measured
(`benchmarks/records/{record}`, {date}, at `{commit}`). The figures are of
that day. What was corrected since in sight of these runs is no part of them; a prediction of today's for the
same runs is fitted."""


def compiled_at(rows: Sequence[Row]) -> list[str]:
    """Return a line that says at which commits programs were compiled; none where no row says it."""
    count = Counter(row.get("compiled_at", "") for row in rows)
    if not any(count):
        return []
    where = {commit: f"at `{commit[:7]}`" if commit else "where it is not known" for commit in count}
    told = ", ".join(f"{number} {where[commit]}" for commit, number in count.most_common())
    return ["", f"Our programs were compiled: {told}. The rest of a prediction is of the record's commit."]


def page(
    record: Record,
    name: str,
    tpus: Record | None = None,
    name_of_tpus: str = "",
    sealed: Mapping[str, Record] | None = None,
) -> str:
    """Return the page's Markdown; `sealed`: the records of sealed errors by name, the newest first."""
    sealed = sealed or {}
    rows = [row for row in record["row"] if "error" in row]
    width, refused = interval_of(rows), record["inexpressible"]
    held = ""
    if "left_out_holds" in width:
        held = "An interval that is taken from the errors of all other sources would contain "
        held += f"{100 * width['left_out_holds']:.0f} % of the {len(rows)} runs' measured times."
    lines = [
        *HEAD.splitlines(),
        "",
        *first_lines(sealed, rows),
        "",
        *KINDS_OF_ROWS.splitlines(),
        "",
        *FITTED_HEAD.format(count=len(rows), record=name).splitlines(),
        "",
        held,
        *compiled_at(rows),
        "",
        f"![Measured over predicted step time, by source and kind]({PICTURE})",
        "",
        "The grey band is 10 % to each side. Sealed runs whose record has no single rows are not drawn.",
    ]
    for name_of_sealed in list(sealed)[:1]:
        lines += ["", *section_of_sealed(sealed[name_of_sealed], name_of_sealed)]
    lines += ["", *of_intervals] if (of_intervals := section_of_intervals(rows, GROUPS)) else []
    lines += ["", *of_experts] if (of_experts := section_of_experts(rows)) else []
    for label, key in GROUPS:
        lines += ["", f"## By {label}", "", *table(rows, label, key)]
    lines += ["", "## The worst ten", "", *worst(rows)]
    if tpus is not None:
        refused = {why: count for why, count in refused.items() if not why.startswith("a TPU")}
        lines += ["", *section_of_tpus(tpus, name_of_tpus)]
    lines += ["", "## Runs that are not scored", "", "| runs | why |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in refused.items()]
    lines += [f"| {len(record['summary']['failed'])} | the step could not be compiled |"]
    lines += ["", *OWN_RUN]
    return "\n".join(lines) + "\n"


HEAD = """<!-- Written by benchmarks/accuracy_page.py; do not edit. -->
# Accuracy

This page compares step times that others published with those that Meshwright predicts for the same runs. A
row's measured time is no part of its prediction."""
KINDS_OF_ROWS = """Three kinds of errors are kept apart, in every table of this page:

* **sealed**: predicted, and the predictions hashed, before anybody here had read what was measured. This is
  what to expect of a run that nobody here has seen. A row is sealed once.
* **seen**: the measurement was known, but nothing was chosen by the error.
* **fitted**: the error was known when a constant, or the model of somebody's software, was chosen.

`benchmarks/row_kinds.toml` says which rows are fitted and which are seen, since when and why."""
FITTED_HEAD = """**What was fitted.** The lines below the sealed ones are of {count} runs, in the record
`benchmarks/records/{record}`.

* What a row does not say is assumed by rules that all rows share (`benchmarks/published_assumptions.toml`).
* Where software works otherwise than our program, its source decides what is added to the prediction
  (`benchmarks/_published_stacks.py`). These models of software were corrected in sight of the errors.
* Two shares are fitted to the runs ([ADR 0020](../dev/adr/0020-a-chip-sustains-software-loses.md)): of what a
  chip sustains, products of PyTorch without Transformer Engine reach 0.88, those of XLA of 2024 0.8. One of
  the lines above leaves each source out of that fit.

[The history of this page](../dev/accuracy-history.md) says what was corrected when, and by what error."""
OWN_RUN = """## Add a run of your own

Write what is known of it into a TOML file, and score it; several `[[run]]` may stand in one file.

```toml
# file: mine.toml
[[run]]
id = "mine-1"
model = "Llama 3 8B"
n_layers = 32
d_model = 4096
n_heads = 32
n_kv_heads = 8
d_ff = 14336
gated_mlp = "yes"
vocab = 128256
seq_len = 8192
accelerator = "H100-80GB-SXM"
n_devices = 8
precision = "bf16"
sharding = "FSDP2"
micro_batch_per_device = 1
global_batch_seqs = 8
act_ckpt = "full"
step_time_s = 1.31
```

`python benchmarks/predict_published.py --runs mine.toml` prints the prediction beside it. The columns are
those of `COLUMNS` in `benchmarks/_published_table.py`; what is left out counts as not stated. A row of which
`row_kinds.toml` says nothing is printed as "kind not declared".

## Seal predictions

An error tells most if the prediction came first. Where a table of runs is new to everybody here:

```sh
python benchmarks/predict_published.py --runs new.csv --seal benchmarks/records/2026-12-01_seal.json
python benchmarks/predict_published.py --runs new.csv --open benchmarks/records/2026-12-01_seal.json
```

The first command drops the measured columns (`MEASURED` in `benchmarks/_published_table.py`) where it reads
the file; they may be empty, or missing. Notes are part of what a row says, so leave figures out of them. It
writes every row's seconds, interval, memory and assumptions, with hashes of what the rows say, of the
source tree and of all packages, and prints a hash of the whole: keep that elsewhere. The second command
reads the measured columns, and writes the errors beside the seal. It refuses, and says what changed, if any
of these hashes does not fit. A row is sealed once, and a seal is opened once: rows that stand in an earlier
seal or record, or in `row_kinds.toml`, are refused, and so is a score without `--open` of rows whose seal
in `benchmarks/records` is closed.""".splitlines()


def main() -> None:
    """Write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, help="a record of predict_published.py (default: the newest)")
    words = "a record of sealed errors; may be repeated (default: all)"
    parser.add_argument("--sealed", type=Path, action="append", help=words)
    parser.add_argument(
        "--tpus", type=Path, help="a record of predict_published.py --tpus (default: the newest)"
    )
    asked = parser.parse_args()
    path, path_of_tpus = asked.record or newest_record(), asked.tpus or newest_record("predict_tpus")
    record = tomllib.loads(path.read_text())
    found = {each.name: tomllib.loads(each.read_text()) for each in asked.sealed or sealed_records()}
    sealed = dict(sorted(found.items(), key=lambda item: (str(item[1]["date"]), item[0]), reverse=True))
    text = page(record, path.name, tomllib.loads(path_of_tpus.read_text()), path_of_tpus.name, sealed)
    PAGE.write_text(text)
    scored = [*record["row"], *(row for each in sealed.values() for row in each.get("row", []))]
    rows = [row for row in scored if "error" in row]
    with rc_context({"svg.hashsalt": "accuracy"}):  # the same rows give the same file
        draw(rows).savefig(PAGE.parent / PICTURE, metadata={"Date": None})
    print(f"wrote {PAGE} and {PAGE.parent / PICTURE}")


if __name__ == "__main__":
    main()
