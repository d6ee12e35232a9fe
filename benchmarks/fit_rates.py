"""Fit the coefficients of `meshwright.predict`'s kernel models to public measurements.

Run: python benchmarks/fit_rates.py FOLDER, where FOLDER holds SYSTEM.{gemm,attention,nccl}.parquet of
https://github.com/ai-dynamo/aiconfigurator (Apache-2.0). Needs pandas, pyarrow and scipy.
Writes src/meshwright/predict/rates.toml and a dated record of the errors on rows held out from the fit.
With --casts it prints the rates of products in fp8 without the casts of their inputs, which the gemm tables
have in them (`products_without_casts` in published_assumptions.toml): FOLDER holds SYSTEM.gemm.parquet with
SYSTEM.{computescale,scale_matrix}.parquet of the same release.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from meshwright.hardware import Chip, find_chip
from meshwright.predict import (
    AttentionRate,
    CollectiveRate,
    GemmRate,
    attention_seconds,
    collective_seconds,
    gemm_seconds,
)

ROOT = Path(__file__).parent.parent
DATE = datetime.date(2026, 11, 21)
SEED = 20261121
# The table's system, and the chips of the catalog with its silicon: rates are shares of each one's figures.
SYSTEMS = {
    "a100_sxm": ("A100-80GB", "A100-40GB", "A800-80GB"),
    "h100_sxm": ("H100", "H100-96GB-HBM2e", "H800"),
    "h200_sxm": ("H200",),
    "b200_sxm": ("B200",),
    "b300_sxm": ("B300",),
    "gb200": ("GB200",),
    "gb300": ("GB300",),
    "l40s": ("L40S",),
    "rtx_pro_6000_server": ("RTX-PRO-6000",),
}
GEMM_FORMATS = {"bfloat16": ("bf16", 2), "fp8": ("fp8-e4m3", 1)}
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
}
HEAD_SIZES = (64, 128)
Model = Callable[..., Any]


def fit(model: Model, record: type, start: dict[str, float], seconds: np.ndarray) -> Any:
    """The record whose model is nearest to `seconds` in mean absolute logarithm; positive coefficients."""
    names = list(start)

    def loss(logs: np.ndarray) -> float:
        values = dict(zip(names, np.exp(logs), strict=True))
        if values.get("wave_share", 0) > 1:  # more than all of a wave cannot be paid
            return 1e3
        predicted = model(record(**values))
        return float(np.mean(np.abs(np.log(predicted / seconds))))

    best = None
    for scale in (1.0, 0.3, 3.0):  # several starts: the loss has kinks
        first = np.log(
            [v * (scale if n.endswith(("_seconds", "_half", "_length")) else 1) for n, v in start.items()]
        )
        found = minimize(
            loss, first, method="Nelder-Mead", options={"maxiter": 2500, "xatol": 1e-4, "fatol": 1e-6}
        )
        best = found if best is None or found.fun < best.fun else best
    return record(**{n: float(f"{v:.4g}") for n, v in zip(names, np.exp(best.x), strict=True)})


def error_of(predicted: np.ndarray, seconds: np.ndarray) -> dict[str, float]:
    """Median and 90th percentile of the relative error, and its sign, in percent."""
    error = predicted / seconds - 1
    return {
        "num_rows": len(seconds),
        "median_error_percent": round(100 * float(np.median(np.abs(error))), 1),
        "p90_error_percent": round(100 * float(np.quantile(np.abs(error), 0.9)), 1),
        "bias_percent": round(100 * float(np.median(error)), 1),
    }


def held_out(num_rows: int) -> np.ndarray:
    """Which rows are not fitted: a random fifth."""
    return np.random.default_rng(SEED).random(num_rows) < 0.2


def fit_gemm(table: pd.DataFrame, chip: Chip, dtype: str) -> tuple[GemmRate, dict[str, Any]]:
    """Rows of at least 1 GFLOP and 128 in each dimension; one odd row above a round m is left out."""
    name, num_bytes = GEMM_FORMATS[dtype]
    rows = table[(table.gemm_dtype == dtype) & (table.m % 2 == 0)]
    rows = rows.groupby(["m", "n", "k"], as_index=False).latency.median()
    rows = rows[(rows[["m", "n", "k"]].min(axis=1) >= 128) & (rows.m * rows.n * rows.k >= 2**29)]
    m, n, k = (rows[c].to_numpy(float) for c in "mnk")
    seconds, test = rows.latency.to_numpy() * 1e-3, held_out(len(rows))

    def model(rate: GemmRate, at: np.ndarray) -> Any:
        return gemm_seconds(
            rate,
            m=m[at],
            n=n[at],
            k=k[at],
            num_bytes=num_bytes * (m * k + k * n)[at] + 2 * (m * n)[at],
            flops_per_second=chip.peak_flops_per_second[name],
            memory_bytes_per_second=chip.memory_bytes_per_second,
            num_sms=chip.num_sms,
        )

    start = {"efficiency": 0.8, "k_half": 100.0, "start_seconds": 4e-6, "memory_efficiency": 0.8}
    start |= {"wave_share": 0.5, "small_tile_exponent": 0.1}
    rate = fit(lambda r: model(r, ~test), GemmRate, start, seconds[~test])
    large = test & (rows[["m", "n", "k"]].min(axis=1) >= 1024).to_numpy()
    return rate, {
        "held_out": error_of(model(rate, test), seconds[test]),
        "held_out_large": error_of(model(rate, large), seconds[large]),
    }


def fit_attention(table: pd.DataFrame, chip: Chip, head: int) -> tuple[AttentionRate, dict[str, Any]] | None:
    """Causal bf16 prefill of 256 positions or more, no window; two matmuls over half of the scores."""
    rows = table[
        (table.head_dim == head) & (table.attn_dtype == "bfloat16") & (table.kv_cache_dtype == "bfloat16")
    ]
    rows = rows[(rows.window_size == 0) & (rows.isl >= 256)]
    if rows.empty:
        return None
    length = rows.isl.to_numpy(float)
    flops = 2 * 2 * rows.batch_size.to_numpy(float) * rows.num_heads.to_numpy(float) * length**2 * head / 2
    seconds, test = rows.latency.to_numpy() * 1e-3, held_out(len(rows))

    def model(rate: AttentionRate, at: np.ndarray) -> Any:
        peak = chip.peak_flops_per_second["bf16"]
        return attention_seconds(rate, flops=flops[at], length=length[at], flops_per_second=peak)

    start = {"efficiency": 0.5, "half_length": 1000.0, "start_seconds": 1e-5}
    rate = fit(lambda r: model(r, ~test), AttentionRate, start, seconds[~test])
    return rate, {"held_out": error_of(model(rate, test), seconds[test])}


def fit_collective(
    table: pd.DataFrame, chip: Chip, kind: str, size: int
) -> tuple[CollectiveRate, dict[str, Any]]:
    """The table counts elements of two bytes of the whole array; so few rows that every fifth is held out."""
    rows = table[(table.nccl_dtype == "half") & (table.op_name == kind) & (table.num_gpus == size)]
    rows = rows.sort_values("message_size")
    times = 2 if kind == "all_reduce" else 1
    wire = times * 2 * rows.message_size.to_numpy(float) * (size - 1) / size
    seconds, test = rows.latency.to_numpy() * 1e-3, np.arange(len(rows)) % 5 == 3

    def model(rate: CollectiveRate, at: np.ndarray) -> Any:
        return collective_seconds(rate, wire_bytes=wire[at], bytes_per_second=chip.inside.bytes_per_second)

    start = {"efficiency": 0.8, "alpha_seconds": 1e-5, "ramp_seconds": 1e-5}
    rate = fit(lambda r: model(r, ~test), CollectiveRate, start, seconds[~test])
    return rate, {"held_out": error_of(model(rate, test), seconds[test])}


def fit_system(folder: Path, system: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Every rate of one system by its key in rates.toml."""
    chip, found = find_chip(SYSTEMS[system][0]), {}
    gemm, attention, nccl = (
        pd.read_parquet(folder / f"{system}.{t}.parquet") for t in ("gemm", "attention", "nccl")
    )
    for dtype, (name, _) in GEMM_FORMATS.items():
        if name in chip.peak_flops_per_second and (gemm.gemm_dtype == dtype).any():
            found[f"gemm.{name}"] = fit_gemm(gemm, chip, dtype)
    for head in HEAD_SIZES:
        if fitted := fit_attention(attention, chip, head):
            found[f"attention.{head}"] = fitted
    for kind, name in KINDS.items():
        for size in sorted(nccl.num_gpus.unique()):
            found[f"collectives.{name}.{size}"] = fit_collective(nccl, chip, kind, size)
    return found


def print_without_casts(folder: Path) -> None:
    """Fit what products in fp8 take once their inputs are cast, for systems whose casts were measured."""
    for system in (name for name in SYSTEMS if (folder / f"{name}.computescale.parquet").exists()):
        gemm = pd.read_parquet(folder / f"{system}.gemm.parquet")
        gemm = gemm[gemm.gemm_dtype == "fp8"].groupby(["m", "n", "k", "gemm_dtype"], as_index=False)
        rows = gemm.latency.median()
        for each in ("computescale", "scale_matrix"):
            casts = pd.read_parquet(folder / f"{system}.{each}.parquet")
            casts = casts.groupby(["m", "k"], as_index=False).latency.median()
            rows = rows.merge(casts.rename(columns={"latency": each}), on=["m", "k"])
        alone = rows.assign(latency=rows.latency - rows.computescale - rows.scale_matrix)
        alone = alone[alone.latency > 0.1 * rows.latency]  # what is left of others is noise
        rate, errors = fit_gemm(alone, find_chip(SYSTEMS[system][0]), "fp8")
        print(table_of(system, rate, errors), flush=True)


def table_of(header: str, record: Any, errors: dict[str, Any]) -> str:
    """One TOML table of a record's coefficients, after a comment with its error."""
    fields = {name: getattr(record, name) for name in type(record).__dataclass_fields__}
    error = errors["held_out"]
    comment = (
        f"# held out: median error {error['median_error_percent']} %, p90 {error['p90_error_percent']} %\n"
    )
    return (
        comment
        + "\n".join([f"[{header}]", *(f"{name} = {value!r}" for name, value in fields.items())])
        + "\n"
    )


def errors_of(header: str, errors: dict[str, Any]) -> str:
    """One TOML table of a fit's errors."""
    lines = [
        f"{key} = {{ " + ", ".join(f"{n} = {v}" for n, v in e.items()) + " }" for key, e in errors.items()
    ]
    return "\n".join([f"[{header}]", *lines]) + "\n"


def main(folder: Path) -> None:
    """Fit every system, write the rates and the record, print the errors."""
    rates = [
        "# Written by benchmarks/fit_rates.py; efficiencies are shares of catalog peaks and links.",
        'source = "https://github.com/ai-dynamo/aiconfigurator (Apache-2.0): GEMM, attention, NCCL tables"',
        f"date = {DATE}\n",
    ]
    record = [
        f'command = "python benchmarks/fit_rates.py FOLDER"\ndate = {DATE}\nseed = {SEED}',
        "# held_out: a fifth of the rows, not fitted. held_out_large: of those, dimensions >= 1024.\n",
    ]
    for system, chips in SYSTEMS.items():
        rates.append(f"[chips.{system}]\nnames = {list(chips)!r}\n".replace("'", '"'))
        for key, (rate, errors) in fit_system(folder, system).items():
            rates.append(table_of(f"chips.{system}.{key}", rate, errors))
            record.append(errors_of(f"{system}.{key}", errors))
            print(system, key, errors, flush=True)
    (ROOT / "src/meshwright/predict/rates.toml").write_text("\n".join(rates))
    (ROOT / f"benchmarks/records/{DATE}_fit_rates.toml").write_text("\n".join(record))


if __name__ == "__main__":
    (print_without_casts if "--casts" in sys.argv else main)(Path(sys.argv[1]))
