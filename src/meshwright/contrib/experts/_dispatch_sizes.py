"""State the sizes of experts' buffers where nothing is dropped, for the step and for its estimates.

Where the devices that split the experts lie in several fast domains, a row is sent once to each domain that
has any of a token's experts, if messages then take at most `MOST_OF_CHOICES` of their seconds by choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshwright.compiler import Routing
from meshwright.config import EXPERT_DIMS, Layout, RunConfig, TransformerModel
from meshwright.hardware import Chip, Fleet

TILE_ROWS = 128
"""The most rows of a tile. Each expert's rows fill whole tiles, the last of them in part.

Of 64 and 128 rows the latter is faster on an H200 even for 256 rows of an expert: 384 and 345 TFLOP/s."""
LEAST_SPARE = 1 / 8
"""The spare rows of a pair of devices, over its even share, where the shares are large: a choice."""
SIGMAS = 5.0
"""The spare rows in standard deviations of even chances, where the shares are small: a choice."""


def sent_rows(fair: Any) -> Any:
    """Return how many rows a device may send another at first, where `fair` of its choices are an even share.

    An eighth more than the share. Small shares vary more, and have five standard deviations: with even
    chances one pair of devices in three million needs more. Numbers or arrays.

    >>> round(sent_rows(4096)), round(sent_rows(512))
    (4608, 625)
    """
    least, varying = LEAST_SPARE * fair, SIGMAS * fair**0.5
    return fair + (least + varying + abs(least - varying)) / 2


MOST_OF_CHOICES = 0.85
"""The largest share of the seconds by choice for which rows are sent once to a domain.

A choice: an exchange by choice reads and writes its rows fewer times, and launches fewer kernels. At a share
of 0.78 (Qwen3-30B-A3B, `expert=64` on 64 H100) the step was predicted at 13.2 s, and 15.7 by choice."""
GPUS = ("cuda", "rocm")


def reached_by(model: TransformerModel, domains: int) -> float:
    """Return the probability that one of `domains` has any of a token's experts, by a balanced router.

    A router that chooses groups of experts first reaches no domain outside of these groups.

    >>> from meshwright.config import load_config
    >>> model = load_config("llama3-8b", ["model.num_experts=128", "model.experts_per_token=8"]).model
    >>> round(reached_by(model, 8), 2)
    0.67
    """
    assert model.num_experts is not None, "the model has no experts"
    assert model.experts_per_token is not None, "a checked model says how many experts a token is sent to"
    by_choice = Routing(num_experts=model.num_experts, num_chosen=model.experts_per_token)
    share = by_choice.reached(domains)
    groups, chosen = model.router_groups, model.router_groups_chosen
    if groups is None or chosen is None or groups % domains:
        return share
    return min(share, Routing(num_experts=groups, num_chosen=chosen).reached(domains))


def sends_once(model: TransformerModel, domains: int, members: int, chip: Chip) -> bool:
    """Return whether a row is sent once to each of several domains by default.

    It is on GPUs where nothing is dropped, if messages take at most `MOST_OF_CHOICES` of those by choice.
    By choice both links are busy at once; once, rows cross and then go on inside the domain.

    Args:
        members: the devices of one domain that split the experts.

    >>> from meshwright.config import load_config
    >>> from meshwright.hardware import CATALOG
    >>> model = load_config("llama3-8b", ["model.num_experts=128", "model.experts_per_token=8"]).model
    >>> [sends_once(model, domains, 8, CATALOG["H100"]) for domains in (2, 8, 16)]
    [True, True, False]
    >>> sends_once(model, 2, 8, CATALOG["A100-PCIe-80GB"])  # as slow inside a host
    False
    """
    if model.capacity_factor is not None or chip.platform not in GPUS:
        return False
    if chip.inside is None or chip.between is None:
        return False
    inside, between = chip.inside.bytes_per_second, chip.between.bytes_per_second
    chosen, devices = model.experts_per_token or 0, domains * members
    of_domain, of_others = (members - 1) / devices, (devices - members) / devices  # of the rows by choice
    by_choice = chosen * max(of_domain / inside, of_others / between)
    once = (domains - 1) * reached_by(model, domains) / between + chosen * (members - 1) / members / inside
    return once <= MOST_OF_CHOICES * by_choice


def rows_between(tokens: int, model: TransformerModel, domains: int) -> int:
    """Return how many rows a device sends another domain at first, of its `tokens` tokens."""
    return min(tokens, math.ceil(sent_rows(tokens * reached_by(model, domains))))


Axes = Sequence[tuple[int, int]]
"""The sizes of axes, and the devices between neighbours along each."""


def domains_of_axes(axes: Axes, devices_per_domain: int) -> int:
    """Return over how many fast domains a group of devices extends; 1 where they lie in them unevenly.

    Even are domains of equally many devices, which come one after another in the order of the axes.

    Args:
        axes: those along which the group extends, the outermost first.

    >>> [domains_of_axes([axis], 8) for axis in ((16, 1), (8, 1), (8, 8), (4, 6))]
    [2, 1, 8, 1]
    """
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if size > 1 and merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        elif size > 1:
            merged.append((size, stride))
    domains, least = 1, math.inf  # the least stride of the axes before
    for size, stride in merged:
        is_inside = devices_per_domain % (stride * size) == 0
        whole = stride * size % devices_per_domain == 0 and devices_per_domain % stride == 0
        if not (is_inside or stride >= devices_per_domain or whole):
            return 1
        if not is_inside and stride > least:
            return 1
        least = min(least, stride)
        domains *= 1 if is_inside else size // max(1, devices_per_domain // stride)
    return domains


def domains_of_dispatch(config: RunConfig, axes: Axes, chip: Chip, devices_per_domain: int) -> int:
    """Return to how many fast domains a run sends a token's row once; 1 where it sends rows by choice.

    Args:
        axes: those that split the experts (`EXPERT_DIMS`).
    """
    model = config.model
    if config.expert_domains is not None:
        return config.expert_domains
    if not isinstance(model, TransformerModel) or model.num_experts is None:
        return 1
    domains = domains_of_axes(axes, devices_per_domain)
    members = math.prod(size for size, _ in axes) // domains
    return domains if domains > 1 and sends_once(model, domains, members, chip) else 1


def domains_of_layout(config: RunConfig, layout: Layout, fleet: Fleet) -> int:
    """Return to how many fast domains a run sends a token's row once on a layout; 1 where by choice."""
    strides = {
        name: math.prod(size for _, size in layout.axes[place + 1 :])
        for place, (name, _) in enumerate(layout.axes)
    }
    own = EXPERT_DIMS[config.fold_experts][1]
    axes = [(layout.size(axis), strides.get(axis, 1)) for axis in own]
    return domains_of_dispatch(config, axes, fleet.chip, fleet.chips_per_domain)
