"""State the sizes of experts' buffers where nothing is dropped, for the step and for its estimates.

Where the devices that split the experts lie in several fast domains, a row is sent once to each domain that
has any of a token's experts, if that is at most `MOST_OF_CHOICES` of the rows that choices would send.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._layout import EXPERT_DIMS
from ._section import Problem
from ._transformer import TransformerModel

if TYPE_CHECKING:
    from meshwright.hardware import Fleet

    from ._layout import Layout
    from ._run_config import RunConfig

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


MOST_OF_CHOICES = 3 / 4
"""The largest share of the rows by choice for which rows are sent once to a domain: a choice.

An exchange by choice reads and writes its rows fewer times."""


def reached(num_experts: int, num_chosen: int, parts: int) -> float:
    """Return the probability that a given one of `parts` equal parts holds any of a token's experts.

    Choices are independent and uniform, as a forced balance makes them.

    >>> round(15 * reached(128, 8, 16), 1)  # 15 other devices
    6.2
    """
    elsewhere = num_experts - num_experts // parts
    return 1 - math.comb(elsewhere, num_chosen) / math.comb(num_experts, num_chosen)


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
    share = reached(model.num_experts, model.experts_per_token, domains)
    groups, chosen = model.router_groups, model.router_groups_chosen
    if groups is None or chosen is None or groups % domains:
        return share
    return min(share, reached(groups, chosen, domains))


def sends_once(model: TransformerModel, domains: int) -> bool:
    """Return whether a row is sent once to each of several domains by default.

    It is where nothing is dropped, and at most `MOST_OF_CHOICES` of the rows by choice leave a domain.

    >>> from meshwright.config import load_config
    >>> model = load_config("llama3-8b", ["model.num_experts=128", "model.experts_per_token=8"]).model
    >>> [sends_once(model, domains) for domains in (2, 8, 16)]
    [True, True, False]
    """
    if model.capacity_factor is not None:
        return False
    by_choice = (model.experts_per_token or 0) / domains  # rows to one domain
    return reached_by(model, domains) <= MOST_OF_CHOICES * by_choice


def rows_between(tokens: int, model: TransformerModel, domains: int) -> int:
    """Return how many rows a device sends another domain at first, of its `tokens` tokens."""
    return min(tokens, math.ceil(sent_rows(tokens * reached_by(model, domains))))


def domains_of_experts(config: RunConfig, layout: Layout, devices_per_domain: int) -> int:
    """Return over how many fast domains the experts' devices extend; 1 where they lie in them unevenly.

    >>> from meshwright.config import Layout, load_config
    >>> run = load_config("llama3-8b", ["model.num_experts=128", "model.experts_per_token=8"])
    >>> domains_of_experts(run, Layout.parse("fsdp=4,expert=16"), 8)
    2
    """
    own = EXPERT_DIMS[config.fold_experts][1]
    strides = [math.prod(size for _, size in layout.axes[place + 1 :]) for place in range(len(layout.axes))]
    steps = {
        name: [stride * step for step in range(size)]
        for (name, size), stride in zip(layout.axes, strides, strict=True)
    }
    members = [sum(at) for at in itertools.product(*(steps.get(axis, [0]) for axis in own))]
    groups = itertools.product(*(at for name, at in steps.items() if name not in own))
    found = {_domains_of([sum(at) + member for member in members], devices_per_domain) for at in groups}
    return found.pop() if len(found) == 1 else 1


def _domains_of(places: list[int], devices_per_domain: int) -> int:
    """Return over how many domains devices extend; 1 if not as blocks of equal size, one after another."""
    domains = [place // devices_per_domain for place in places]
    count = len(set(domains))
    members = len(places) // count
    is_even = all(domain == domains[place - place % members] for place, domain in enumerate(domains))
    return count if is_even and members * count == len(places) else 1


def dispatch_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the reasons why a model cannot send a row once to each of several domains."""
    what, hint, model = f"= {config.expert_domains}, but ", "leave it out", config.model
    if (config.expert_domains or 1) == 1:
        return
    if not isinstance(model, TransformerModel) or model.num_experts is None:
        yield "expert_domains", f"{what}the model has no experts", hint
    elif model.capacity_factor is not None:
        yield "expert_domains", f"{what}buffers of a capacity factor hold a row for each choice", hint


def resolve_dispatch(config: RunConfig, layout: Layout, fleet: Fleet) -> RunConfig:
    """Return the run with the domains to each of which a token's row is sent once; unchanged without any.

    By default these are the fast domains of GPUs over which the experts' devices extend (`sends_once`).
    """
    model = config.model
    if not isinstance(model, TransformerModel) or model.num_experts is None:
        return config
    if config.expert_domains is not None or fleet.chip.platform != "cuda":
        return config
    domains = domains_of_experts(config, layout, fleet.chips_per_domain)
    if domains == 1 or not sends_once(model, domains):
        return config
    return config.model_copy(update={"expert_domains": domains})
