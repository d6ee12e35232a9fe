"""Read the public layout sweeps, and group their rows by what the planner had to choose for.

Rows are sorted by their layout, never by their result, because the files are sorted by speed: with ties, any
planner would look perfect if the first row won.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _sweep_program import MODELS, Layouts, Shape

SEQUENCES = 256  # of a step of the sweep
MOST_NODES = 32  # the 64-node group has outliers: see shared/facts/README.md
SWEEP_COLUMNS = ("model", "nodes", "mbs", "gas", "dp", "pp", "tp", "zero", "tok_s", "status", "flag")
MEGATRON_VOCABULARY = 51_200  # GPT-2's, padded
MEGATRON_COLUMNS = {
    "gpus": "# GPUs",
    "batch": "global batch",
    "mbs": "micro batch",
    "width": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "sequence": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
    "milliseconds": "iteration time (ms)",
}


class RowsError(Exception):
    """Say what is wrong with a file of rows, in words for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration that somebody ran. `seconds`: of a step, None where the run failed."""

    stages: int
    tensor: int
    data: int
    microbatch: int
    count: int
    zero: int
    seconds: float | None = None

    @property
    def layout(self) -> str:
        """The layout in words, as the record and the table print it."""
        size = f"dp={self.data},pp={self.stages},tp={self.tensor}"
        return f"{size},mbs={self.microbatch},gas={self.count},zero={self.zero}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All configurations of one model on one number of nodes; `rows` sorted by layout."""

    model: str
    nodes: int
    shape: Shape
    rows: tuple[Row, ...]

    @property
    def layouts(self) -> Layouts:
        """The rows' layouts as arrays."""
        return layouts_of(self.rows)


def layouts_of(rows: Sequence[Row]) -> Layouts:
    """Return rows as arrays of their layouts' fields."""
    names = ("data", "stages", "tensor", "microbatch", "count", "zero")
    return Layouts(**{name: np.array([getattr(row, name) for row in rows], float) for name in names})


def _read(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    if not path.exists():
        raise RowsError(f"{path} does not exist; name a file with --csv or --vtrain")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise RowsError(f"{path} has no column {', '.join(map(repr, missing))}")
        rows = [{key: value or "" for key, value in row.items() if key} for row in reader]
    if not rows:
        raise RowsError(f"{path} has no rows")
    return rows


def _number(row: Mapping[str, str], column: str, place: str) -> float:
    try:
        found = float(row[column])
    except ValueError:
        raise RowsError(f"{place}: {column} is {row[column]!r}, not a number") from None
    if not np.isfinite(found) or found < 0 or (found == 0 and column != "zero"):
        raise RowsError(f"{place}: {column} is {row[column]!r}, not a positive number")
    return found


def read_sweep(path: Path, most_nodes: int = MOST_NODES) -> tuple[list[Group], int]:
    """Return the sweep's groups, and how many rows were left out.

    Left out: rows with a flag, rows whose sizes do not give 256 sequences, and more than `most_nodes` nodes.

    Raises:
        RowsError: the file is missing, empty or malformed, or names a model whose shape is not known.
    """
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    left_out = 0
    for number, row in enumerate(_read(path, SWEEP_COLUMNS), 2):
        place = f"{path}, line {number}"
        if row["model"] not in MODELS:
            raise RowsError(
                f"{place}: no shape is known of model {row['model']!r}; known: {', '.join(MODELS)}"
            )
        if row["status"] not in ("ok", "failed"):
            raise RowsError(f"{place}: status is {row['status']!r}, neither 'ok' nor 'failed'")
        sizes = {name: int(_number(row, name, place)) for name in SWEEP_COLUMNS[1:8]}
        whole = sizes["mbs"] * sizes["gas"] * sizes["dp"] == SEQUENCES
        if row["flag"] or not whole or sizes["nodes"] > most_nodes:
            left_out += 1
            continue
        shape = MODELS[row["model"]]
        ran = row["status"] == "ok"
        seconds = SEQUENCES * shape.sequence / _number(row, "tok_s", place) if ran else None
        groups[row["model"], sizes["nodes"]].append(
            Row(
                stages=sizes["pp"],
                tensor=sizes["tp"],
                data=sizes["dp"],
                microbatch=sizes["mbs"],
                count=sizes["gas"],
                zero=sizes["zero"],
                seconds=seconds,
            )
        )
    order = list(MODELS)
    return [
        Group(model=model, nodes=nodes, shape=MODELS[model], rows=_sorted(groups[model, nodes]))
        for model, nodes in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    ], left_out


def _sorted(rows: list[Row]) -> tuple[Row, ...]:
    """Return rows by layout; equal layouts by their seconds, the slowest first, a failed one before it."""
    return tuple(sorted(rows, key=lambda row: (row.layout, -(row.seconds or np.inf))))


def read_megatron(path: Path, fewest: int = 4) -> list[Group]:
    """Return the groups of at least `fewest` rows of a file of vTrain: equal model, GPUs and batch.

    Raises:
        RowsError: the file is missing, empty or malformed.
    """
    groups: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for line, row in enumerate(_read(path, tuple(MEGATRON_COLUMNS.values())), 2):
        place = f"{path}, line {line}"
        found = {key: _number(row, column, place) for key, column in MEGATRON_COLUMNS.items()}
        sizes = {key: int(value) for key, value in found.items()}
        key = tuple(sizes[name] for name in ("layers", "width", "heads", "sequence", "gpus", "batch"))
        groups[key].append(
            Row(
                stages=sizes["pp"],
                tensor=sizes["tp"],
                data=sizes["dp"],
                microbatch=sizes["mbs"],
                count=sizes["batch"] // (sizes["dp"] * sizes["mbs"]),
                zero=0,
                seconds=found["milliseconds"] / 1e3,
            )
        )
    made = []
    for (layers, width, heads, sequence, gpus, _), rows in sorted(groups.items()):
        if len(rows) < fewest:
            continue
        shape = Shape(
            name=f"GPT {layers} x {width}",
            num_layers=layers,
            width=width,
            mlp=4 * width,
            num_heads=heads,
            vocabulary=MEGATRON_VOCABULARY,
            sequence=sequence,
            gated=False,
            tied=True,
        )
        made.append(Group(model=shape.name, nodes=gpus // 8, shape=shape, rows=_sorted(rows)))
    return made
