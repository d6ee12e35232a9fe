"""State where experts' rows go: the sizes of buffers, and over which hosts a token crosses once.

The step, its estimates and the planner use both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._layout import Layout
from ._section import Problem
from ._transformer import TransformerModel

if TYPE_CHECKING:
    from ._run_config import RunConfig

TILE_ROWS = 128
"""The most rows of a tile. Each expert's rows fill whole tiles, the last of them in part.

Of 64 and 128 rows the latter is faster on an H200 even for 256 rows of an expert: 384 and 345 TFLOP/s."""
LEAST_SPARE = 1 / 8
"""The spare rows of a pair of devices, over its even share, where the shares are large: a choice."""
SIGMAS = 5.0
"""The spare rows in standard deviations of even chances, where the shares are small: a choice."""

MOST_SENT = 3 / 4
"""The most rows that cross the network if a token crosses once to each host, of those by choice: a choice.

Above it, the rows inside hosts, and a second exchange, are not worth what is saved."""


def sent_rows(fair: Any) -> Any:
    """Return how many rows a device may send another at first, where `fair` of its choices are an even share.

    An eighth more than the share. Small shares vary more, and have five standard deviations: with even
    chances one pair of devices in three million needs more. Numbers or arrays.

    >>> round(sent_rows(4096)), round(sent_rows(512))
    (4608, 625)
    """
    least, varying = LEAST_SPARE * fair, SIGMAS * fair**0.5
    return fair + (least + varying + abs(least - varying)) / 2


def needed_share(num_experts: int, num_choices: int, num_hosts: int) -> float:
    """Return the share of tokens that need a given one of equal hosts, where choices are even.

    >>> round(7 * needed_share(128, 8, 8), 1), round(needed_share(128, 8, 2), 1)
    (4.7, 1.0)
    """
    elsewhere = num_experts - num_experts // num_hosts
    return 1 - math.comb(elsewhere, num_choices) / math.comb(num_experts, num_choices)


def share_once(model: TransformerModel, num_hosts: int) -> float:
    """Return the rows that cross if a token crosses once to each host, as a share of those by choice.

    >>> from ._load import load_config
    >>> round(share_once(load_config("Qwen/Qwen3-30B-A3B").model, 2), 2)
    0.25
    """
    assert model.num_experts is not None, "the model has no experts"
    assert model.experts_per_token is not None, "nothing says how many experts a token is sent to"
    needed = needed_share(model.num_experts, model.experts_per_token, num_hosts)
    return num_hosts * needed / model.experts_per_token


def hosts_of_experts(config: RunConfig, layout: Layout, devices_per_domain: int) -> int:
    """Return over how many hosts a token of a resolved layout crosses once; 1 if a row for each choice does.

    The run's own number, if it has one; else the fast domains over which the devices of `expert` lie.

    >>> from ._load import load_config
    >>> run = load_config("Qwen/Qwen3-30B-A3B", ["layout=expert=16"])
    >>> [hosts_of_experts(run, Layout.parse(run.layout), domain) for domain in (8, 16)]
    [2, 1]
    """
    if config.expert_hosts is not None:
        return config.expert_hosts
    model, parts = config.model, layout.size("expert")
    if not isinstance(model, TransformerModel) or model.num_experts is None or parts == 1:
        return 1
    if model.capacity_factor is not None or config.fold_experts != "none":
        return 1
    names = [name for name, _ in layout.axes]
    inner = math.prod(size for _, size in layout.axes[names.index("expert") + 1 :])
    members, rest = divmod(devices_per_domain, inner)
    if rest or members < 2 or members >= parts or parts % members:
        return 1
    hosts = parts // members
    return hosts if share_once(model, hosts) <= MOST_SENT else 1


def fold_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the reasons why experts cannot be folded over other axes, nor sent once to each host."""
    has_experts = bool(config.model.sizes.split_dims.get("experts"))
    if config.fold_experts != "none" and not has_experts:
        what = f"= {config.fold_experts!r}, but the model has no experts"
        yield "fold_experts", what, 'use fold_experts = "none", or set model.num_experts'
    if config.fold_experts in ("context", "both") and config.lora.rank is not None:
        what = f"= {config.fold_experts!r}, but frozen experts are whole over context"
        yield "fold_experts", what, 'use fold_experts = "none" or "tensor" beside adapters'
    if (hosts := config.expert_hosts or 1) == 1:
        return
    if not has_experts:
        yield "expert_hosts", f"= {hosts}, but the model has no experts", "leave expert_hosts out"
    elif getattr(config.model, "capacity_factor", None) is not None:
        what = f"= {hosts}, but with a capacity factor each expert has a buffer on each device"
        yield "expert_hosts", what, "leave out expert_hosts, or model.capacity_factor"
    if config.fold_experts != "none":
        what = f"= {hosts}, but with fold_experts = {config.fold_experts!r} other axes have experts too"
        yield "expert_hosts", what, 'leave expert_hosts out, or use fold_experts = "none"'


def host_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield the reason why a number of hosts does not divide the devices of `expert`."""
    hosts, parts = config.expert_hosts or 1, layout.size("expert")
    if parts % hosts or (hosts > 1 and hosts == parts):
        few = [size for size in range(1, parts) if parts % size == 0]
        what = f"= {hosts}, but {parts} devices of expert do not lie in {hosts} hosts of several each"
        yield "expert_hosts", what, f"use expert_hosts = {' or '.join(map(str, few or [1]))}, or leave it out"
