"""Add to a step's memory what experts' buffers take where one device's experts get more tokens than others'.

A compiled step has buffers of a balanced router. Those of the device that gets most are larger by the load
(`model.expert_load`), and all that it keeps or passes on of them is too.
Counted: values of the experts' scope that are alive at the peak, parameters and their gradients left out.
Not counted: another instant that the larger buffers may make the peak.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler import Routing

from ._ledger_records import MemoryLedger
from ._traffic import is_of_experts

CATEGORY = "expert_load"
_OF_TOKENS = (
    *("saved_activations", "forward_temporaries", "activation_gradients", "recomputed_activations"),
    "collective_staging",
)


def with_load(memory: MemoryLedger, routing: Routing | None) -> MemoryLedger:
    """Return the memory of the device whose experts get most tokens."""
    if routing is None or routing.load == 1.0:
        return memory
    of_tokens = (
        buffer.num_bytes
        for buffer in memory.buffers
        if buffer.category in _OF_TOKENS and is_of_experts(buffer.operation)
    )
    more = round((routing.load - 1) * sum(of_tokens))
    return replace(
        memory,
        reserved_bytes=memory.reserved_bytes + more,
        peak_bytes=None if memory.peak_bytes is None else memory.peak_bytes + more,
        by_category={**memory.by_category, CATEGORY: more},
    )


def load_in_words(routing: Routing | None) -> tuple[str, ...]:
    """Return what is assumed of the experts' load, in words; nothing without experts."""
    if routing is None or routing.ways == 1:  # with one, each device multiplies its own tokens alone
        return ()
    if routing.load == 1.0:
        return ("experts: every device gets as many tokens as another (model.expert_load = 1.0)",)
    whole = ", all of them" if routing.load == routing.ways else ""
    return (
        f"experts: one device gets {routing.load:g} times the mean of tokens{whole} (model.expert_load): the "
        "time of its experts and their messages is multiplied by that, and so are their buffers",
    )
