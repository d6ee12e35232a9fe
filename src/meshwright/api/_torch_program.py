"""Weigh a PyTorch module as a JAX program: its training step on our trainer, compiled for a fleet.

Imports: `torch_program`, which exports the module and builds the step. Used by: `_weigh`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import Layout
from ..errors import InputError
from ..hardware import Fleet
from ..results import Phase, Weighing
from ..torch_account import is_torch_module, require_torch
from ._torch import DEFAULT_LAYOUT, is_torch_function
from ._weigh import RunFacts, weigh_lowered

if TYPE_CHECKING:
    from ..torch_program import ModuleProgram

JAX = "jax"
SAYS = (
    "the PyTorch module as a JAX program: exported by torch.export, run by counterparts of its operations in "
    "JAX, compiled by XLA; no figure is of PyTorch's own run"
)
NO_PLAN = "`parallelize` is PyTorch's plan and is not called: the layout alone spreads the JAX program"
INPUTS = "the inputs are those of one device; {} devices have as many each"


def weigh_as(
    as_: str,
    config: Any,
    given: Mapping[str, Any],
    knobs: Mapping[str, str],
    fleet: Fleet,
    layout: str | None,
    **how: Any,
) -> Weighing:
    """Weigh a module, or the module that a function returns, as another kind of program.

    Args:
        as_: "jax".
        config: the module, or "package.module:function".
        given: a module's args, kwargs, optimizer, loss and autocast; each None for a function.
        knobs: a function's arguments; empty for a module.
        how: simulate, on_event and known.

    Raises:
        InputError: another kind, no module of PyTorch, or as `weigh_module_as_jax`.
    """
    if as_ != JAX:
        raise InputError(f"a module cannot be weighed as {as_!r}", hint=f"as {JAX!r}, or leave it out")
    if is_torch_module(config):
        if knobs:
            raise InputError("a PyTorch module takes no overrides", hint="leave overrides out")
        parts = {**given, "args": given["args"] or (), "kwargs": given["kwargs"] or {}}
        return weigh_module_as_jax(config, fleet=fleet, layout=layout, **parts, **how)
    if not isinstance(config, str) or not is_torch_function(config):
        what = config if isinstance(config, str) else type(config).__name__
        hint = "it is for a module, or for package.module:function whose file imports torch and not JAX"
        raise InputError(f"{what} is no PyTorch module, and cannot be weighed as {as_!r}", hint=hint)
    for part, value in given.items():
        if value:
            hint = f"let the function return it, or leave {part} out"
            raise InputError(f"{config} returns the module, and takes no {part}", hint=hint)
    return weigh_function_as_jax(config, fleet, layout, knobs, **how)


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
    known: RunFacts,
) -> Weighing:
    """Weigh a module in this process, which exports and traces it; a worker compiles.

    Args:
        module, args, kwargs: of one device, as for `weigh`.
        fleet, layout: the layout has the axes `fsdp` and `data`.
        optimizer: a class of torch.optim, or a partial of one; AdamW if None.
        loss: as for `account_torch`.
        autocast: the format of parameters and inputs in use; parameters are stored in their own.

    Raises:
        InputError: the module cannot be exported or uses operations without a rule, the optimizer or an axis
            of the layout has no counterpart, or as `weigh_lowered`.
    """
    require_torch()
    from ..torch_program import exported, name_and_options, optimizer_named

    update = optimizer_named(*name_and_options(optimizer))
    on_event(Phase(name="exporting the module"))
    program = exported(module, tuple(args), dict(kwargs), loss=loss, compute=autocast)
    return _weigh_program(program, update, program.name, fleet, layout, simulate, on_event, known)


def _weigh_program(
    program: ModuleProgram,
    update: Any,
    name: str,
    fleet: Fleet,
    layout: str | None,
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: RunFacts,
    says: Sequence[str] = (),
) -> Weighing:
    """Weigh the training step of an exported module.

    `update`: Optax's optimizer. `says`: further assumptions to list.
    """
    from ..models.attention_blocks import without_devices
    from ..torch_program import ModuleStep, attention_on
    from ..worker import lowered_call

    mesh = Layout.parse(layout or DEFAULT_LAYOUT, free_names=True).resolve(fleet.num_devices)
    step = ModuleStep(
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
    told = [INPUTS.format(fleet.num_devices)] if fleet.num_devices > 1 else []
    return weigh_lowered(
        f"{name} as a JAX program",
        fleet,
        num_devices=lowered.num_devices,
        mesh_axes=lowered.mesh_axes,
        digest=lowered.digest,
        files=lowered.files(),
        answers=lowered.answers,
        simulate=simulate,
        on_event=on_event,
        says=(SAYS, *told, *program.notes, *says),
        **known,
    )


def weigh_function_as_jax(
    name: str,
    fleet: Fleet,
    layout: str | None,
    knobs: Mapping[str, str],
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: RunFacts,
) -> Weighing:
    """Weigh the module that a function, "package.module:function", returns, in a process of its own."""
    from ..torch_program import exported_named, optimizer_named

    found = exported_named(name, knobs=knobs, on_phase=lambda phase: on_event(Phase(name=phase)))
    says = [NO_PLAN] * found.has_plan
    return _weigh_program(
        found.program, optimizer_named(*found.optimizer), name, fleet, layout, simulate, on_event, known, says
    )
