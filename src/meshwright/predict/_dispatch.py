"""Count what experts' messages carry: by choice, or once for each device and each domain that a token needs.

A plain all-to-all sends a token's row once for each expert that it chose. Libraries such as DeepEP and
HybridEP (https://github.com/deepseek-ai/DeepEP) send it once to each domain that holds any of them, and from
there once to each device; results are summed on the way back by the same counts.

Counted for a router whose choices are independent and uniform, as a forced balance makes them. Not counted:
indices, probabilities and the sums' own time.
"""

from __future__ import annotations

from meshwright.compiler import Routing


def copies_once(routing: Routing, domains: int, members: int) -> tuple[float, float]:
    """Return how many rows each token sends inside domains and between them, by the hierarchical dispatch.

    Args:
        domains: over how many fast domains the experts' devices extend.
        members: their devices in one of them.

    >>> routing = Routing(num_experts=128, num_chosen=8)
    >>> [round(copies_once(routing, hosts, 8)[1], 1) for hosts in (2, 4, 8)]  # 4, 6 and 7 of a plain one
    [1.0, 2.7, 4.7]
    """
    between = (domains - 1) * routing.reached(domains)
    return domains * (members - 1) * routing.reached(domains * members), between
