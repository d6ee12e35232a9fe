"""Refuse runs of which a part cannot wait in the hosts' memory."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config import Problem, RunConfig


def offload_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield problems with offload.

    Activations wait on the host only if a block saves one, its input. Moments wait there only if the
    optimizer keeps any. Parameters do only if they are stacked layers that all are trained.
    """
    offload, hint = f"= {config.offload!r}", "leave it out"
    if config.optimizer.moments():
        hint = 'use offload = "optimizer"'
    if config.waits("parameters") and (why := _why_not_held(config)) is not None:
        yield "offload", f"{offload}, but {why}", hint
    elif config.waits("activations") and not config.model.has_blocks:
        yield (
            "offload",
            f"{offload}, but a {config.model.kind} model has no blocks whose input is saved",
            hint,
        )
    elif config.waits("activations") and config.remat != "full":
        what = f"{offload}, but with remat = {config.remat!r} blocks save more than their input"
        yield "offload", what, f'use remat = "full", or {hint.removeprefix("use ")}'
    if config.waits("moments") and not config.optimizer.moments():
        what = f"{offload}, but optimizer.kind = {config.optimizer.kind!r} without momentum keeps no moments"
        yield "offload", what, "leave it out, or set optimizer.momentum"


def _why_not_held(config: RunConfig) -> str | None:
    """Return why parameters cannot wait in the hosts' memory; None if they can."""
    if not config.model.has_blocks or getattr(config.model, "unroll", False):
        return f"a {config.model.kind} model without stacked layers fetches none one by one"
    if config.layer_loop == "unroll":
        return 'layer_loop = "unroll" has no loop that fetches one layer at a time'
    if config.zero1:
        return "zero1 gathers all parameters on the devices when a step begins"
    if config.lora.rank is not None:
        return f"lora.rank = {config.lora.rank} freezes the layers, and those stay on the devices"
    return None
