"""Price the kernels of a layer of Mamba-2 by how much of a chip's memory rate published profiles show.

They are those of https://github.com/state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py
(mamba_split_conv1d_scan_combined), which Megatron Core's MambaMixer calls with chunks of 128 tokens. They are
written in Triton, and wait for more than memory: so their bytes alone say too little.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from _published_sizes import Sizes

from meshwright.predict._rates import Machine

# Forward and backward, by token, each array counted where a kernel reads or writes it. By the inner width, by
# the shared keys and queries of all groups, by states (inner width times state over the chunk, in float32 but
# where they are passed on) and by products of keys and queries (groups times the chunk, in float32). The norm
# after it is counted with the inner width, for it is such a kernel too.
INNER_BYTES, SHARED_BYTES, STATE_BYTES, SCORE_BYTES = 68.0, 37.0, 46.0, 32.0
MAMBA_CHUNK = 128
# Copies around them: several sequences are turned from [tokens, sequences] and back, and in 8 bits its output
# and the gradients of what it reads are cast.
TURNED_INNER_BYTES, TURNED_SHARED_BYTES = 24.0, 8.0
CAST_INNER_BYTES, CAST_SHARED_BYTES = 12.0, 4.0


def mamba_bytes(sizes: Sizes) -> float:
    """Return the bytes of a token that the kernels of a layer of Mamba-2 move; 0 without one."""
    model = sizes.model
    inner, shared = _widths(sizes)
    states = STATE_BYTES * inner * (model.mamba_state_dim or 0) / MAMBA_CHUNK
    scores = SCORE_BYTES * (model.mamba_groups or 0) * MAMBA_CHUNK
    return INNER_BYTES * inner + SHARED_BYTES * shared + states + scores


def copied_bytes(sizes: Sizes, *, eight_bits: bool) -> float:
    """Return the bytes of a token that copies and casts around those kernels move; 0 without any."""
    inner, shared = _widths(sizes)
    copied = 0.0
    if sizes.tokens > sizes.length:
        copied += TURNED_INNER_BYTES * inner + TURNED_SHARED_BYTES * shared
    if eight_bits:
        copied += CAST_INNER_BYTES * inner + CAST_SHARED_BYTES * shared
    return copied


def mamba_seconds(sizes: Sizes, machine: Machine) -> float:
    """Return the seconds of Mamba-2's kernels for a microbatch: the mean over all layers of the model.

    A repeated forward pass adds nothing: none of the recipes of these models repeats them.
    """
    share = sum(kind.mixer == "mamba" for kind in sizes.model.kinds) / sizes.model.num_layers
    if not share:
        return 0.0
    reached = machine.memory_bytes_per_second * memory_share(machine.name, sizes.tokens)
    return share * sizes.tokens * mamba_bytes(sizes) / sizes.tensor / reached


def memory_share(chip: str, tokens: float) -> float:
    """Return the share of a chip's memory rate that Mamba-2's kernels reach, by a microbatch's tokens.

    On other chips than the profiled one it differs as that of the convolution does. Between measured sizes
    it follows the logarithm of the size. A chip without a measurement is taken as the profiled one.
    """
    table = _table()
    of_chip = {name: entry["shares"] for entry in table["convolutions"] for name in entry["chips"]}
    profiled = of_chip[table["chip"]]
    at = math.log(tokens)
    there, here = (
        float(np.interp(at, np.log(table["tokens"]), shares))
        for shares in (of_chip.get(chip, profiled), profiled)
    )
    return float(table["share"]) * there / here


def _widths(sizes: Sizes) -> tuple[int, int]:
    """Return the inner width, and that of the keys and queries of all groups."""
    model = sizes.model
    inner = (model.mamba_heads or 0) * (model.mamba_head_dim or 0)
    return inner, 2 * (model.mamba_groups or 0) * (model.mamba_state_dim or 0)


@functools.cache
def _table() -> Mapping[str, Any]:
    text = (Path(__file__).parent / "published_assumptions.toml").read_text()
    return tomllib.loads(text)["mamba_kernels"]
