"""Read the public layout sweeps, and group their rows by what the planner had to choose for.

A group is a run of ours on a fleet, and its rows are candidates of the planner's own space.

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
from _sweep_program import DATA, MEGATRON, MODELS, STAGE, SWEEP, TENSOR, Program, Shape
from numpy.typing import NDArray

from meshwright.config import AXES, RunConfig
from meshwright.hardware import Fleet
from meshwright.planning import Candidates, parsed_knobs, space_of

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
    """All configurations of one model and batch on one number of nodes; `rows` sorted by layout."""

    model: str
    nodes: int
    shape: Shape
    sequences: int  # of a step
    rows: tuple[Row, ...]
    program: Program

    @property
    def fleet(self) -> Fleet:
        """The fleet of the runs: hosts of eight."""
        return Fleet.parse(f"{self.nodes}x8x{self.program.chip}")

    @property
    def run(self) -> RunConfig:
        """The run that `plan` is asked to place, with the settings that the program has no choice of."""
        shape = self.shape
        model: dict[str, object] = {
            "kind": "transformer",
            "num_layers": shape.num_layers,
            "embed_dim": shape.width,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_heads,
            "mlp_dim": shape.mlp,
            "vocab_size": shape.vocabulary,
            "tied_embeddings": shape.tied,
        }
        if shape.gated:
            model |= {"position": "rotary", "rope_theta": 500000.0}
        else:
            model |= {"norm": "layer", "mlp": "plain", "activation": "gelu"}
            model |= {"position": "learned", "max_positions": shape.sequence}
        return RunConfig.model_validate(
            {
                "name": shape.name,
                "model": model,
                "data": {"source": "synthetic"},
                "optimizer": {"kind": "adamw", "learning_rate": 1e-4, "clip_norm": 1.0},
                "schedule": {"kind": "constant"},
                "precision": self.program.precision,
                "remat": "full" if self.program.recompute else "none",
                "batch": {"sequences": self.sequences, "sequence_length": shape.sequence},
                "steps": 1,
            }
        )

    def candidates(self) -> tuple[Candidates, NDArray[np.bool_]]:
        """Return the rows as candidates of `plan`, and which of them its space has.

        The space is that of the knobs that the program has: data, stage and tensor, microbatch, ZeRO-1.
        """
        run = self.run
        fixed = {axis: "1" for axis in AXES if axis not in ("data", "stage", "tensor")}
        fixed |= {"remat": run.remat, "offload": "none", "pipeline": "1f1b", "pipeline_chunks": "1"}
        space = space_of(run, self.fleet, parsed_knobs({**fixed, "inner": "tensor"})).candidates
        sizes = np.ones((len(self.rows), len(AXES)), np.int64)
        for axis, name in ((STAGE, "stages"), (DATA, "data"), (TENSOR, "tensor")):
            sizes[:, axis] = [getattr(row, name) for row in self.rows]
        micro = np.array([row.microbatch for row in self.rows], np.int64)
        zero1 = np.array([row.zero if row.data > 1 else 0 for row in self.rows], np.int64)
        known = set(map(tuple, _keys(space.sizes, space.microbatch, space.settings["zero1"]).tolist()))
        has = np.array([tuple(key) in known for key in _keys(sizes, micro, zero1).tolist()])
        settings = {name: np.full(len(micro), column[0]) for name, column in space.settings.items()}
        inner = np.full(len(micro), TENSOR, np.int64)
        settings["zero1"] = zero1
        return Candidates(sizes=sizes, inner=inner, microbatch=micro, settings=settings), has


def _keys(sizes: NDArray[np.int64], *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([sizes, *(column[:, None] for column in columns)], axis=1)


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
        Group(
            model=model,
            nodes=nodes,
            shape=MODELS[model],
            sequences=SEQUENCES,
            rows=_sorted(groups[model, nodes]),
            program=SWEEP,
        )
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
    for (layers, width, heads, sequence, gpus, batch), rows in sorted(groups.items()):
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
        made.append(
            Group(
                model=shape.name,
                nodes=gpus // 8,
                shape=shape,
                sequences=batch,
                rows=_sorted(rows),
                program=MEGATRON,
            )
        )
    return made
