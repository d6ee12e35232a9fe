"""Write docs/accuracy.md and its picture from the newest record of predict_published.py.

Run: python benchmarks/accuracy_page.py [--record FILE]. Rows on TPUs have a section of their own, from the
newest record of `predict_published.py --tpus`. The page says how far predicted step times are from
published ones: by source, chip, layout, fleet and stack, with the worst rows. Only the figures of the first
score, in `HEAD`, are written by hand; a new record and this command bring all others up to date.
"""

from __future__ import annotations

import argparse
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _published_blind import with_blind_errors
from _published_interval import interval_of
from _published_score import spread
from _record import RECORDS, ROOT
from _tpu_rates import with_blind_errors as with_blind_errors_of_tpus
from matplotlib import rc_context
from matplotlib.figure import Figure

PAGE, PICTURE = ROOT / "docs" / "accuracy.md", "accuracy.svg"
FEWEST = 3  # rows of a group that has a line of its own
WORST = 10
TICKS = (0.5, 0.71, 1, 1.41, 2, 4, 8)  # of measured / predicted
COLOURS = ("#2d5fb4", "#b4552d", "#3a8a4d", "#7a4fa3", "#a3873f", "#2a8c96", "#a33f6b", "#555555")
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
    "maxtext": "Google, MaxText",
    "tpurec": "Google, TPU recipes",
    "jaxtb": "NVIDIA, JAX Toolbox",
    "llmc": "llm.c",
    "vtrainsingle": "vTrain, one node",
    "vtrainmulti": "vTrain, 64 nodes",
}


def newest_record(name: str = "predict_published") -> Path:
    """Return the newest record of a name."""
    return max(RECORDS.glob(f"*_{name}.toml"))


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
    ("source", lambda row: SOURCES.get(row["source"], row["source"])),
    ("chip", lambda row: row["chip"]),
    ("layout", layout_kind),
    ("fleet", by_size),
    ("stack", lambda row: row.get("stack", "ours")),
)


def _percents(found: Mapping[str, float]) -> list[str]:
    """Return median, 90th percentile and bias of errors in words."""
    return [*(f"{100 * found[each]:.1f} %" for each in ("median", "p90")), f"{100 * found['bias']:+.1f} %"]


def table(rows: Sequence[Mapping[str, Any]], name: str, key: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Return the lines of one table: a line for each group of rows, the largest first."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    lines = [f"| {name} | runs | median | nine of ten within | bias | intervals that hold |"]
    lines += ["|---|---|---|---|---|---|"]
    few = [row for group in groups.values() if len(group) < FEWEST for row in group]
    shown = {label: group for label, group in groups.items() if len(group) >= FEWEST}
    ordered = sorted(shown.items(), key=lambda item: -len(item[1]))
    for label, group in [*ordered, *([("all others", few)] if few else [])]:
        found = spread(group)
        figures = [*_percents(found), f"{100 * found['holds']:.0f} %"]
        lines.append(f"| {label} | {found['rows']} | {' | '.join(figures)} |")
    return lines


def worst(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of the largest errors."""
    lines = ["| run | chip | layout | measured | predicted | error | what is known |", "|" + "---|" * 7]
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:WORST]:
        seconds = [f"{row[name]:.3g} s" for name in ("measured_seconds", "predicted_seconds")]
        fleet = f"{row['num_devices']} x {row['chip']}"
        notes = "; ".join(row["notes"])
        figures = f"{' | '.join(seconds)} | {100 * row['error']:+.0f} %"
        lines.append(f"| {row['id']} | {fleet} | `{row['layout']}` | {figures} | {notes} |")
    return lines


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the picture: measured / predicted of each run over its measured seconds, coloured by source."""
    with rc_context({"svg.hashsalt": "accuracy", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(8.6, 4.4), layout="constrained")
        axes = figure.subplots()
        groups: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            groups[row["source"]].append(row)
        most = sorted(groups, key=lambda source: -len(groups[source]))
        for place, source in enumerate(most):
            own = groups[source]
            axes.plot(
                [row["measured_seconds"] for row in own],
                [row["measured_seconds"] / row["predicted_seconds"] for row in own],
                "o" if place < len(COLOURS) else "x",
                color=COLOURS[place % len(COLOURS)],
                markersize=3.6,
                alpha=0.75,
                label=f"{SOURCES.get(source, source)} ({len(own)})",
            )
        axes.axhspan(1 / 1.1, 1.1, color="#888888", alpha=0.15, linewidth=0)
        axes.axhline(1, color="#444444", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xlabel("measured seconds of a step")
        axes.set_ylabel("measured / predicted")
        axes.grid(alpha=0.25, linewidth=0.5)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def section_of_tpus(record: Mapping[str, Any], name: str) -> list[str]:
    """Return the lines of the section on TPUs: every row, and how blind its error is."""
    rows = with_blind_errors_of_tpus([row for row in record["row"] if "error" in row])
    blind = spread([{**row, "error": row["blind_error"]} for row in rows])
    head = TPUS.format(count=len(rows), record=name, figures=" | ".join(_percents(blind)))
    lines = [*head.splitlines(), "", "| run | chip | layout | measured | predicted | error | blind |"]
    lines += ["|" + "---|" * 7]
    for row in sorted(rows, key=lambda row: row["id"]):
        seconds = [f"{row[name]:.3g} s" for name in ("measured_seconds", "predicted_seconds")]
        errors = [f"{100 * row[name]:+.1f} %" for name in ("error", "blind_error")]
        fleet = f"{row['num_devices']} x {row['chip']}"
        lines += [f"| {row['id']} | {fleet} | `{row['layout']}` | {' | '.join([*seconds, *errors])} |"]
    lines += ["", "Not scored:", "", "| runs | why |", "|---|---|"]
    lines += [f"| {count} | {reason} |" for reason, count in record["inexpressible"].items()]
    return [*lines, *(f"| 1 | {row['id']}: {row['failed']} |" for row in record["row"] if "failed" in row)]


TPUS = """## TPUs

{count} runs on one slice each (`benchmarks/records/{record}`, by
`predict_published.py --tpus`). One sustained rate of each generation is fitted to its rows; an error is blind
if all other rows of the generation set that rate (of v4, which has one row: the other generations). All are
runs of MaxText, in tables of two of Google's repositories. [What is known for TPUs](tpus.md) says what was
assumed of them.

| | median error | nine of ten within | bias |
|---|---|---|---|
| each run left out of the fit | {figures} |"""


def page(
    record: Mapping[str, Any],
    name: str,
    tpus: Mapping[str, Any] | None = None,
    name_of_tpus: str = "",
) -> str:
    """Return the page's Markdown."""
    rows = [row for row in record["row"] if "error" in row]
    blind = spread([{**row, "error": row["blind_error"]} for row in with_blind_errors(rows)])
    found, width = spread(rows), interval_of(rows)
    refused = record["inexpressible"]
    fits = [("each source left out of the fit", blind), ("all sources in the fit", found)]
    figures = [f"| {label} | {' | '.join(_percents(each))} |" for label, each in fits]
    held = f"{100 * found['holds']:.0f} % of the printed intervals contain the measured time."
    if "left_out_holds" in width:
        held += " An interval that is taken\nfrom the errors of all other sources would contain "
        held += f"{100 * width['left_out_holds']:.0f} %."
    lines = [
        *HEAD.format(count=len(rows), record=name).splitlines(),
        *figures,
        "",
        held,
        "",
        f"![Measured over predicted step time, by source]({PICTURE})",
        "",
        "The grey band is 10 % to each side.",
    ]
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

Step times that others published, beside those that Meshwright predicts for the same {count} runs. A row's
measured time is no part of its prediction. What a row does not say is assumed by rules that rows share
(`benchmarks/published_assumptions.toml`). Where software works otherwise than our program, its source decides
what is added to the prediction (`benchmarks/_published_stacks.py`). All rows are in the record
`benchmarks/records/{record}`.

**How blind this is.** One sustained rate of each silicon is fitted to such runs; the first line below leaves
a source out of that fit. The models of others' software are not blind: they were corrected after a first
score of these rows on 2026-11-23, whose median error was 10.6 % (nine of ten within 43.6 %, 74 % of the
intervals held). What was corrected: BLOOM's network as its authors measured it, the host's launches,
all-reduces over `tensor` in eager Megatron-LM, and, for Transformer Engine, fused 8-bit casts, messages
beside products and no rematerialisation by default. On 2026-11-26 torchtitan's and Megatron Bridge's rows
got the formats in which these sum gradients, and 27 rows of BLOOM were left out: they ran before its nodes
were set up better, as its authors say. With them the first line was 6.2 % and 19.8 % then, without 5.7 % and
20.0 %. Thirteen rows with `fsdp` beside `tensor` or `context` were then compiled again, for our own step had
become faster there (docs/adr/0002). On 2026-11-27 llm.c's elementwise kernels and InternEvo's broadcasts of
weights were counted by their sources, because those rows were among the worst. Of NCCL's two estimates of a
broadcast's latency the smaller was taken, which fits them better. Before, the first line was 5.6 % and
19.8 %. Two of MaxText's runs on H100 were added, which the records had lacked. On the same day V100s got the
NVLinks that join them, as the source of the rows prints them, and OneFlow and Megatron-LM of 2021 the
all-reduces of their own; these rows were among the worst too. Before, the first line was 5.3 % and 18.2 %.
Later that day all rows were compiled again, and predicted with ten figures of what the silicon sustains. Runs
in fp16 of DeepSpeed and Megatron-LM sum gradients in fp16 since, as the code of both does: BLOOM's rows with
few microbatches had shown that too much was reduced. With that, three sources of runs on A100 ask for the
same sustained rate, 219 TFLOP/s, where 230 had stood. Before, the first line was 4.7 % and 14.8 %.

| | median error | nine of ten within | bias |
|---|---|---|---|"""
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
those of `COLUMNS` in `benchmarks/_published_rows.py`; what is left out counts as not stated.""".splitlines()


def main() -> None:
    """Write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, help="a record of predict_published.py (default: the newest)")
    path = parser.parse_args().record or newest_record()
    record = tomllib.loads(path.read_text())
    path_of_tpus = newest_record("predict_tpus")
    PAGE.write_text(page(record, path.name, tomllib.loads(path_of_tpus.read_text()), path_of_tpus.name))
    rows = [row for row in record["row"] if "error" in row]
    draw(rows).savefig(PAGE.parent / PICTURE, metadata={"Date": None})
    print(f"wrote {PAGE} and {PAGE.parent / PICTURE}")


if __name__ == "__main__":
    main()
