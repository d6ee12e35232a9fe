"""Say to how many fast domains a run sends a token's row once, and where it cannot.

A room outside the core reckons it (`registry.room("experts")`), for models with experts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._section import Problem
from ._transformer import TransformerModel

if TYPE_CHECKING:
    from meshwright.hardware import Fleet

    from ._layout import Layout
    from ._run_config import RunConfig


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

    >>> from meshwright.config import Layout, load_config
    >>> from meshwright.hardware import Fleet
    >>> run = load_config("llama3-8b", ["model.num_experts=128", "model.experts_per_token=8"])
    >>> resolve_dispatch(run, Layout.parse("fsdp=4,expert=16"), Fleet.parse("64xH100")).expert_domains
    2
    """
    if not isinstance(config.model, TransformerModel) or config.model.num_experts is None:
        return config
    from meshwright.registry import room

    domains: int = room("experts").domains_of_layout(config, layout, fleet)
    return config if domains == 1 else config.model_copy(update={"expert_domains": domains})
