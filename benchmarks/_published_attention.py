"""Price cuDNN's attention in runs of experts by its makers' own tables, where they have its heads.

Our rates of attention on Blackwell are those of inference software of 2025, forward; the backward pass is a
share of them, and heads of latents have the rate of heads of 128. cuDNN's repository has both passes, by
release: `attention_of_cudnn` in published_assumptions.toml.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _published_sizes import Sizes

from meshwright.config import LayerKind
from meshwright.predict._rates import Machine


@functools.cache
def _tables() -> Sequence[Mapping[str, Any]]:
    text = (Path(__file__).parent / "published_assumptions.toml").read_text()
    tables: Sequence[Mapping[str, Any]] = tomllib.loads(text)["attention_of_cudnn"]
    return tables


def attention_seconds(sizes: Sizes, machine: Machine, ours: float, *, eight_bits: bool) -> float:
    """Return the seconds of a step's attention by cuDNN's tables; `ours` for layers whose heads they lack.

    Args:
        ours: what our program's attention takes in a step, all layers together.
        eight_bits: attention multiplies in 8 bits, blocks of 32 with a scale of their own.
    """
    kinds = list(sizes.model.kinds)
    work = [_work(kind, sizes) for kind in kinds]
    known = [_layer_seconds(kind, sizes, machine, eight_bits=eight_bits) for kind in kinds]
    left = sum(each for each, seconds in zip(work, known, strict=True) if seconds is None)
    layers = sizes.layers / len(kinds) * sizes.ticks
    rest = ours * left / sum(work) if left else 0.0
    return layers * sum(seconds for seconds in known if seconds is not None) + rest


def _work(kind: LayerKind, sizes: Sizes) -> float:
    """Return the scores of a position, in which our rates count the work of a layer; 0 without attention."""
    if kind.mixer != "attention":
        return 0.0
    return sizes.length / 2 if kind.window is None else float(min(kind.window, sizes.length))


def _layer_seconds(kind: LayerKind, sizes: Sizes, machine: Machine, *, eight_bits: bool) -> float | None:
    """Return the seconds of a layer's attention, forward and backward, of a microbatch; None if not known."""
    model = sizes.model
    if kind.mixer != "attention":
        return 0.0
    widths = [model.head_dim, model.value_dim or model.head_dim]
    table = next(_fitting(machine, widths, kind.window, eight_bits), None)
    if table is None:
        return None
    peak = machine.peak_flops_per_second["bf16"]
    rates = (np.interp(sizes.length, table["lengths"], table[way]) * peak for way in ("forward", "backward"))
    forward, backward = (float(rate) for rate in rates)
    queries, values = widths
    scores = 2 * sizes.tokens * model.num_heads / sizes.tensor * _work(kind, sizes)
    forwards = 2 if sizes.repeats else 1
    return scores * (forwards * (queries + values) / forward + (3 * queries + 2 * values) / backward)


def _fitting(
    machine: Machine, widths: list[int], window: int | None, eight_bits: bool
) -> Iterator[Mapping[str, Any]]:
    for table in _tables():
        same = table["widths"] == widths and table.get("window") == window
        if same and machine.name in table["chips"] and table["eight_bits"] == eight_bits:
            yield table
