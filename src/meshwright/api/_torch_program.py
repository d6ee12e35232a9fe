"""Weigh a PyTorch module as a JAX program: its training step on our trainer, compiled for a fleet.

Imports: `torch_program`, which exports the module and builds the step. Used by: `_weigh`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import Layout
from ..errors import InputError
from ..hardware import Fleet
from ..results import Phase, Weighing
from ..torch_account import require_torch
from ._torch import DEFAULT_LAYOUT
from ._weigh import Totals, weigh_lowered

JAX = "jax"
SAYS = (
    "the PyTorch module as a JAX program: exported by torch.export, each operation by its counterpart in JAX, "
    "compiled by XLA; no figure is of PyTorch's own run"
)
INPUTS = "the inputs are those of one device; {} devices have as many each"


def weigh_module_as_jax(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fleet: Fleet,
    layout: str | None,
    *,
    optimizer: Any,
    loss: Any,
    autocast: Any,
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: Totals,
    name: str = "",
) -> Weighing:
    """Weigh a module in this process, which exports and traces it; a worker compiles.

    Args:
        module, args, kwargs: of one device, as for `weigh`.
        fleet, layout: the layout has the axes `fsdp` and `data`.
        optimizer: a class of torch.optim, or a partial of one; AdamW if None.
        loss: as for `account_torch`.
        autocast: the format of parameters and inputs in use; parameters are stored in their own.
        name: that of the function that made the module.

    Raises:
        InputError: the module cannot be exported or uses operations without a rule, the optimizer or an axis
            of the layout has no counterpart, or as `weigh_lowered`.
    """
    require_torch()
    _check_format(autocast)
    from ..models.attention_blocks import without_devices
    from ..torch_program import Step, attention_on, optimizer_named
    from ..torch_program._export import exported
    from ..worker import lowered_call

    mesh = Layout.parse(layout or DEFAULT_LAYOUT, free_names=True).resolve(fleet.num_devices)
    update = optimizer_named(*_named(optimizer))
    on_event(Phase(name="exporting the module"))
    program = exported(module, tuple(args), dict(kwargs), loss=loss, compute=autocast)
    step = Step(
        program=program,
        mesh_axes=mesh.axes,
        optimizer=update,
        attention=attention_on(fleet.chip, simulate),
    )
    on_event(Phase(name="tracing"))
    platform = "cpu" if simulate else fleet.chip.platform
    kind = next(iter(fleet.chip.device_kinds), "")
    with without_devices():
        lowered = lowered_call(step.function(), step.arguments(), {}, platform, kind)
    says = (SAYS, INPUTS.format(fleet.num_devices), *program.notes)
    return weigh_lowered(
        f"{name or program.name} as a JAX program",
        fleet,
        num_devices=lowered.num_devices,
        mesh_axes=lowered.mesh_axes,
        digest=lowered.digest,
        files=lowered.files(),
        answers=lowered.answers,
        simulate=simulate,
        on_event=on_event,
        says=says,
        **known,
    )


def weigh_function_as_jax(
    name: str,
    fleet: Fleet,
    layout: str | None,
    knobs: Mapping[str, str],
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: Totals,
) -> Weighing:
    """Weigh the module that a function returns, "package.module:function", which is called in this process."""
    require_torch()
    from ..torch_account import parts_of_function

    on_event(Phase(name=f"calling {name}"))
    parts = parts_of_function(name, (os.getcwd(),), knobs)
    if parts.pop("parallelize") is not None:
        SAYS_NO_PLAN = "the function's `parallelize` is PyTorch's; the layout alone spreads the JAX program"
        on_event(Phase(name=SAYS_NO_PLAN))
    return weigh_module_as_jax(
        parts.pop("module"),
        parts.pop("inputs"),
        parts.pop("keyword_inputs"),
        fleet,
        layout,
        simulate=simulate,
        on_event=on_event,
        known=known,
        name=name,
        **parts,
    )


def _check_format(autocast: Any) -> None:
    import torch

    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        hint = "use torch.bfloat16 or torch.float16"
        raise InputError(f"autocast={autocast!r} is not a floating-point format", hint=hint)


def _named(optimizer: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of an optimizer's class, and its options."""
    if optimizer is None:
        return "AdamW", {}
    if isinstance(optimizer, functools.partial):
        return getattr(optimizer.func, "__name__", "function"), dict(optimizer.keywords)
    return getattr(optimizer, "__name__", type(optimizer).__name__), {}
