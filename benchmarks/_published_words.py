"""Words of published rows as settings of ours: what a block keeps, windows of attention, adapters.

A setting that a row does not state is None, or a reason why the row cannot be expressed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.contrib.lora import TARGETS

Row = Mapping[str, str]


class InexpressibleError(Exception):
    """Why a row is no run of ours: `args[0]`, in words that many rows share."""


_QKV = ("query", "key", "value")
# The results of a block by the names of MaxText (layers/attentions.py, layers/linears.py) and of Praxis
# (layers/checkpoint_policy.py), without "_proj". A block's input is always kept.
_RESULTS_ELSEWHERE: dict[str, tuple[str, ...]] = {
    **{name: _QKV for name in ("qkv", "combined_qkv")},
    **{name: ("query",) for name in ("q", "query")},
    **{name: ("key",) for name in ("k", "key")},
    **{name: ("value",) for name in ("v", "value")},
    **{name: ("context",) for name in ("context", "encoded")},
    **{name: ("out",) for name in ("o", "out")},
    "mlpwi": ("mlp_gate", "mlp_up"),
    "mlpwi_0": ("mlp_gate",),
    "mlpwi_1": ("mlp_up",),
    "mlpwo": ("mlp_out",),
    **{name: () for name in ("layer input", "decoder_layer_input", "iteration_input")},
}
# Policies whose names do not list what they save (MaxText's layers/decoders.py, Praxis).
_LISTS_ELSEWHERE = {
    "save_dot_except_mlp": (*_QKV, "out"),
    "save_dot_except_mlpwi": (*_QKV, "out", "mlp_out"),
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out"),
    "save_dot_for_mlperf_200b": (*_QKV, "context", "out"),
}
_ONE_RESULT = re.compile(
    "|".join(rf"{name}(?:_proj)?" for name in sorted(_RESULTS_ELSEWHERE, key=len, reverse=True))
)


def results_kept(words: str) -> tuple[str, ...] | None:
    """Return the results that a policy lists, by name or as "custom: ... on device"; None if it is no list.

    A list of an unknown name is None too. What its words recompute is not kept.
    """
    if words in _LISTS_ELSEWHERE:
        return _LISTS_ELSEWHERE[words]
    if words.startswith("save_"):
        parts = [words.removeprefix("save_")]
    elif words.startswith("custom"):
        parts = re.sub(r"^custom\W*", "", words).split(",")
    else:
        return None
    found: list[str] = []
    for part in parts:
        again = re.search(r"\b(recompute\w*|remat\w*)$", part)
        left = re.sub(r"\b(saved|on device|recompute\w*|remat\w*)", "", part)
        names = _ONE_RESULT.findall(left)
        if re.sub(r"[\s_/+]|and", "", _ONE_RESULT.sub(" ", left)) or not names:
            return None
        for name in names:
            found += () if again else _RESULTS_ELSEWHERE[name.removesuffix("_proj")]
    return tuple(dict.fromkeys(found))


_IS_WINDOWED = re.compile(r"sliding|gemma|\bwindow")
_WINDOW = re.compile(r"window(?: size)?(?: of|[- =:])? ?(\d+)(?![\d:])")
_LOCAL_TO_GLOBAL = re.compile(r"\b(\d+):1\b")


def window_of(row: Row, told: Mapping[str, Any]) -> dict[str, int]:
    """Return the window of a row's attention, and every how many layers one sees all positions.

    By the row's words: "sliding window 1024, 5:1", "alternating" for 1:1. Nothing without such words.

    Args:
        row: with all of its columns.
        told: what scripts beside its source say, `window` and `global_every` among it.

    Raises:
        InexpressibleError: its attention has a window, and nothing tells its size.
    """
    words = f"{row['model']} {row['notes']}".lower()
    found = {name: int(told[name]) for name in ("window", "global_every") if name in told}
    if not _IS_WINDOWED.search(words) and not found:
        return {}
    if size := _WINDOW.search(words):
        found = {"window": int(size[1]), **found}
    if local := _LOCAL_TO_GLOBAL.search(words):
        found = {"global_every": int(local[1]) + 1, **found}
    elif "alternating" in words:
        found = {"global_every": 2, **found}
    if "window" not in found:
        raise InexpressibleError("attention with a window that is not stated")
    return found


_IS_LORA = re.compile(r"lora|adapter")
_RANK = re.compile(r"\b(?:rank|r)(?: of|[ =:])? ?(\d+)\b")
_ALL_TARGETS = re.compile(r"all[- ]linear|all linear layers")


def is_lora(row: Row) -> bool:
    """Return whether a row trains adapters beside frozen parameters."""
    return bool(_IS_LORA.search(f"{row['model']} {row['optimizer']}".lower()))


def lora_of(row: Row, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a run's adapters that a row states; empty if it trains all parameters.

    By its words, "rank 16" and "q_proj v_proj" or "all-linear", or by `told`, as for `window_of`: `lora` is
    then a table of that section.

    Raises:
        InexpressibleError: nothing tells their rank, or which products have them.
    """
    if not is_lora(row):
        return {}
    words = " ".join(row[column] for column in ("model", "optimizer", "notes")).lower()
    found: dict[str, Any] = dict(told.get("lora", {}))
    if rank := _RANK.search(words):
        found = {"rank": int(rank[1]), **found}
    targets = tuple(name for name in TARGETS if re.search(rf"\b{name}\b", words))
    if targets or _ALL_TARGETS.search(words):
        found = {"targets": targets or ("all-linear",), **found}
    if "rank" not in found:
        raise InexpressibleError("LoRA whose rank is not stated")
    if "targets" not in found:
        raise InexpressibleError("LoRA whose products are not stated")
    base = "nf4" if "qlora" in words else "compute"
    return {"base": base, **found, "targets": tuple(found["targets"])}
