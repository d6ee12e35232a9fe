"""Predicted weak and strong scaling of Llama 3 8B and 70B from 8 to 4096 H100, beside published runs.

Run: python benchmarks/scaling.py [--runs CSV] [--quick] [--record]. Every point is a step compiled for its
fleet. Strong: the preset's batch of 512 sequences, whatever the fleet. Weak: 2 sequences for each GPU, as
the published runs have. Of the layouts in _scaling_points.py the fastest that fits is taken; all are
recorded. --runs: the survey of published runs, as predict_published.py takes it; MFU of a published run is
its tokens per second times our model FLOPs of a token. --quick: the smallest fleets. --record writes
records/DATE_scaling.toml and .svg; else a table is all.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _record import write_record
from _scaling_points import (
    COPY_GPUS,
    MODES,
    NUM_GPUS,
    REMAT,
    SEQUENCES_PER_GPU,
    Candidate,
    candidates,
    fastest,
    global_sequences,
    overrides,
    published,
)
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import meshwright as mw
from meshwright.config import load_config
from meshwright.errors import CompileError

PRESETS = tuple(COPY_GPUS)
COLOURS = {"strong": "#b4552d", "weak": "#2d5fb4"}
MARKERS = {  # shape, colour and fill of published points, by kind
    "bf16": ("D", "#222222", "#222222"),
    "bf16, cards of 500 W": ("D", "#222222", "none"),
    "8-bit": ("x", "#8a8a8a", "none"),
}


def weighed(preset: str, mode: str, num_gpus: int, sequences: int, candidate: Candidate) -> dict[str, Any]:
    """One layout weighed: what the record says of it."""
    told: dict[str, Any] = {
        "preset": preset,
        "mode": mode,
        "num_gpus": num_gpus,
        "layout": candidate.layout,
        "global_sequences": sequences,
        "microbatch_sequences": candidate.microbatch_sequences,
    }
    weighing = mw.weigh(
        preset,
        on=f"{num_gpus}xH100",
        layout=candidate.layout,
        overrides=overrides(preset, sequences, candidate),
    )
    prediction, memory = weighing.prediction, weighing.ledger.memory
    assert prediction is not None, weighing.no_prediction
    seconds = prediction.step_seconds
    tokens = weighing.compiled.tokens_per_step
    assert tokens is not None, f"{preset} tells no tokens"
    by_kind = prediction.seconds_by_kind
    return {
        **told,
        "fits": bool(weighing.fits),
        "reserved_gib": round(memory.reserved_bytes / 2**30, 2),
        "step_seconds": _short(seconds.expected),
        "low_step_seconds": None if seconds.low is None else _short(seconds.low),
        "high_step_seconds": None if seconds.high is None else _short(seconds.high),
        "tokens_per_second_per_gpu": _short(tokens / seconds.expected / num_gpus),
        "mfu": round(prediction.mfu, 4),
        "model_flops_per_token": _short(weighing.ledger.flops.model / tokens),
        "peak_flops_per_second": prediction.peak_flops_per_second,
        "exposed_communication_share": round(by_kind["communication"] / seconds.expected, 4),
        "compile_seconds": round(weighing.compiled.compile_seconds, 1),
    }


def _short(number: float) -> float:
    """Five digits are more than a prediction has."""
    return float(f"{number:.5g}")


def point(preset: str, mode: str, num_gpus: int, sequences: int) -> list[dict[str, Any]]:
    """The candidates of one fleet, weighed until some fit; the one taken has `taken = true`."""
    rows: list[dict[str, Any]] = []
    for group in candidates(preset, num_gpus, sequences):
        for candidate in group:
            try:
                rows.append(weighed(preset, mode, num_gpus, sequences, candidate))
            except CompileError as failed:
                sys.exit(f"{preset} on {num_gpus}xH100, {candidate}: {failed}")
        if best := fastest(rows):
            return [{**row, "taken": row is best} for row in rows]
    return [{**row, "taken": False} for row in rows]


def with_mfu(points: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Published points with their MFU, by the weighed step's model FLOPs of a token and its peak."""
    per_token, peak = rows[0]["model_flops_per_token"], rows[0]["peak_flops_per_second"]
    return [
        {**each, "mfu": round(each["tokens_per_second_per_gpu"] * per_token / peak, 4)} for each in points
    ]


def draw(figure: Figure, rows: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]]) -> None:
    """Tokens per second per GPU, and MFU, against the number of GPUs: a panel for each preset."""
    panels = figure.subplots(1, len(PRESETS))
    for axes, preset in zip(panels, PRESETS, strict=True):
        of_preset = [row for row in rows if row["preset"] == preset]
        for mode in MODES:
            _line(axes, [row for row in of_preset if row["mode"] == mode and row["taken"]], mode)
        for kind, (marker, colour, fill) in MARKERS.items():
            shown = [each for each in beside if each["preset"] == preset and each["kind"] == kind]
            axes.plot(
                [each["num_gpus"] for each in shown],
                [each["tokens_per_second_per_gpu"] for each in shown],
                marker,
                color=colour,
                markerfacecolor=fill,
                markersize=5,
                label=f"published, {kind}",
            )
        _dressed(axes, preset, of_preset)
    panels[0].set_ylabel("tokens/s per GPU")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)


def _line(axes: Axes, line: Sequence[Mapping[str, Any]], mode: str) -> None:
    x = [row["num_gpus"] for row in line]
    tokens = [row["tokens_per_second_per_gpu"] * row["step_seconds"] for row in line]
    low = [each / row["high_step_seconds"] for each, row in zip(tokens, line, strict=True)]
    high = [each / row["low_step_seconds"] for each, row in zip(tokens, line, strict=True)]
    y = [row["tokens_per_second_per_gpu"] for row in line]
    axes.plot(x, y, "o-", color=COLOURS[mode], markersize=3.5, label=f"predicted, {mode} scaling")
    axes.fill_between(x, low, high, color=COLOURS[mode], alpha=0.12, linewidth=0)


def _dressed(axes: Axes, preset: str, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title(f"{preset}, bf16, 8192 tokens per sequence", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(NUM_GPUS, [str(each) for each in NUM_GPUS], fontsize=8)
    axes.set_xlim(NUM_GPUS[0] / 1.3, NUM_GPUS[-1] * 1.3)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("H100")
    axes.grid(alpha=0.25, linewidth=0.5)
    ratio = rows[0]["model_flops_per_token"] / rows[0]["peak_flops_per_second"]
    mfu = axes.secondary_yaxis(
        "right", functions=(lambda y: _times(y, 100 * ratio), lambda y: _times(y, 0.01 / ratio))
    )
    mfu.set_ylabel("MFU of 989 TFLOP/s, %")


def _times(rates: Any, factor: float) -> Any:  # an array, whatever matplotlib calls it
    return rates * factor


def _told(row: Mapping[str, Any]) -> str:
    mark = "*" if row["taken"] else " " if row["fits"] else "does not fit"
    return (
        f"{row['preset']:11} {row['mode']:6} {row['num_gpus']:5} {row['layout']:24} "
        f"x{row['microbatch_sequences']} {row['reserved_gib']:7.1f} GiB {row['step_seconds']:8.2f} s "
        f"{row['tokens_per_second_per_gpu']:8.0f} tokens/s/GPU MFU {row['mfu']:.3f} {mark}"
    )


def main() -> None:
    """Weigh every point, print the table, write record and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, help="the survey's CSV")
    parser.add_argument("--quick", action="store_true", help="the smallest fleets only")
    parser.add_argument("--record", action="store_true", help="write records/DATE_scaling.toml and .svg")
    asked = parser.parse_args()
    survey = list(csv.DictReader(asked.runs.open(newline="", encoding="utf-8"))) if asked.runs else []
    rows: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for preset in PRESETS:
        config = load_config(preset)
        of_preset: list[dict[str, Any]] = []
        for mode in MODES:
            for num_gpus in NUM_GPUS[:2] if asked.quick else NUM_GPUS:
                found = point(
                    preset, mode, num_gpus, global_sequences(mode, num_gpus, config.batch.sequences)
                )
                print("\n".join(_told(row) for row in found), flush=True)
                of_preset += found
        rows += of_preset
        beside += [{"preset": preset, **each} for each in with_mfu(published(survey, config), of_preset)]
    if asked.record:
        command = "python benchmarks/scaling.py" + (" --runs CSV" if survey else "") + " --record"
        facts = {"chip": "H100", "sequences_per_gpu_weak": SEQUENCES_PER_GPU, "remat": REMAT}
        record = write_record(
            "scaling",
            command,
            ("jax", "jaxlib", "jax-cuda13-pjrt", "matplotlib"),
            facts,
            {"weighed": rows, "published": beside},
        )
        with rc_context(
            {"svg.fonttype": "none", "svg.hashsalt": "scaling"}
        ):  # text as text; same bytes again
            figure = Figure(figsize=(11, 4.4), layout="constrained")
            draw(figure, rows, beside)
            figure.savefig(record.with_suffix(".svg"), metadata={"Date": None})
        print("wrote", record, "and its picture")


if __name__ == "__main__":
    main()
