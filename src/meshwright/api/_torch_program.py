"""Weigh a PyTorch module as a JAX program: its training step on our trainer, compiled for a fleet.

`module_program` exports the module once; `weigh_module_program` compiles its step for a layout of a fleet.

Imports: `torch_program`, which exports the module and builds the step. Used by: `_weigh`, `_plan_module`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import Layout
from ..errors import InputError
from ..hardware import Fleet
from ..results import KnownPlan, Phase, Weighing
from ..torch_account import is_torch_module, require_torch
from ._torch import DEFAULT_LAYOUT, is_torch_function
from ._weigh import RunFacts, weigh_lowered

if TYPE_CHECKING:
    from ..torch_program import ModuleProgram, ModuleStep

JAX = "jax"
SAYS = (
    "the PyTorch module as a JAX program: exported by torch.export, run by counterparts of its operations in "
    "JAX, compiled by XLA; no figure is of PyTorch's own run"
)
NO_PLAN = "`parallelize` is PyTorch's plan and is not called: the layout alone spreads the JAX program"
_LOWERING = threading.Lock()  # what lets JAX lower without devices holds for the whole process
LOOP, UNROLLED = "loop", "unrolled"
LOOPED = "{} equal blocks, or groups of blocks, run in loops over their stacked parameters"
INPUTS = "the inputs are those of one device; {} devices have as many each"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedProgram:
    """Holds an exported module by its name, with Optax's optimizer and further assumptions to list."""

    name: str
    program: ModuleProgram
    optimizer: Any
    says: tuple[str, ...] = ()


def weigh_as(
    as_: str,
    config: Any,
    given: Mapping[str, Any],
    knobs: Mapping[str, str],
    fleet: Fleet,
    layout: str | None,
    *,
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: RunFacts,
) -> Weighing:
    """Weigh a module, or the module that a function returns, as another kind of program.

    Args:
        as_, config, given, knobs: as for `module_program`.
        fleet, layout: the layout has the axes `fsdp` and `data`.

    Raises:
        InputError: as `module_program` and `weigh_module_program`.
    """
    module = module_program(as_, config, given, knobs, on_event)
    mesh = Layout.parse(layout or DEFAULT_LAYOUT, free_names=True).resolve(fleet.num_devices)
    made = weigh_module_program(module, fleet, mesh, simulate=simulate, on_event=on_event, known=known)
    if not isinstance(config, str) or fleet.num_devices == 1 or simulate or made.prediction is None:
        return made
    words = [
        f"meshwright plan {config} --as {as_} --on {fleet.name}",
        *(f"--set {k}={v}" for k, v in knobs.items()),
    ]
    return dataclasses.replace(made, plan=KnownPlan(command=" ".join(words)))


def module_program(
    as_: str,
    config: Any,
    given: Mapping[str, Any],
    knobs: Mapping[str, str],
    on_event: Callable[[Phase], None],
) -> NamedProgram:
    """Return the program of a module, or of the module that a function returns.

    Args:
        as_: "jax".
        config: the module, which is exported in this process; or "package.module:function", which is called
            in a process of its own.
        given: a module's args, kwargs, optimizer, loss and autocast; each None for a function. `optimizer`: a
            class of torch.optim, or a partial of one; AdamW if None. `autocast`: the format of parameters and
            inputs in use; parameters are stored in their own.
        knobs: a function's arguments; empty for a module.

    Raises:
        InputError: another kind, no module of PyTorch, the module cannot be exported or uses operations
            without a rule, or the optimizer has no counterpart.
    """
    if as_ != JAX:
        raise InputError(f"a module cannot be weighed as {as_!r}", hint=f"as {JAX!r}, or leave it out")
    if is_torch_module(config):
        if knobs:
            raise InputError("a PyTorch module takes no overrides", hint="leave overrides out")
        return _exported_here(config, on_event, **given)
    if not isinstance(config, str) or not is_torch_function(config):
        what = config if isinstance(config, str) else type(config).__name__
        hint = "it is for a module, or for package.module:function whose file imports torch and not JAX"
        raise InputError(f"{what} is no PyTorch module, and cannot be weighed as {as_!r}", hint=hint)
    for part, value in given.items():
        if value:
            hint = f"let the function return it, or leave {part} out"
            raise InputError(f"{config} returns the module, and takes no {part}", hint=hint)
    from ..torch_program import exported_named, optimizer_named

    found = exported_named(config, knobs=knobs, on_phase=lambda phase: on_event(Phase(name=phase)))
    return NamedProgram(
        name=config,
        program=found.program,
        optimizer=optimizer_named(*found.optimizer),
        says=(NO_PLAN,) * found.has_plan,
    )


def _exported_here(
    module: Any,
    on_event: Callable[[Phase], None],
    *,
    args: Any,
    kwargs: Any,
    optimizer: Any,
    loss: Any,
    autocast: Any,
) -> NamedProgram:
    require_torch()
    from ..torch_program import exported, name_and_options, optimizer_named

    update = optimizer_named(*name_and_options(optimizer))
    on_event(Phase(name="exporting the module"))
    program = exported(module, tuple(args or ()), dict(kwargs or {}), loss=loss, compute=autocast)
    return NamedProgram(name=program.name, program=program, optimizer=update)


def weigh_module_program(
    module: NamedProgram,
    fleet: Fleet,
    mesh: Layout,
    *,
    checkpoint: str | None = None,
    layers: str | None = None,
    simulate: bool = False,
    on_event: Callable[[Phase], None],
    known: RunFacts,
) -> Weighing:
    """Trace the training step of an exported module in this process, and compile it in a worker.

    Args:
        checkpoint, layers: as for `module_step`.

    Raises:
        InputError: an axis of the layout has no counterpart, or as `weigh_lowered`.
    """
    from ..models.attention_blocks import without_devices
    from ..worker import lowered_call

    step = module_step(module, fleet, mesh, checkpoint=checkpoint, layers=layers, simulate=simulate)
    on_event(Phase(name="tracing"))
    platform = "cpu" if simulate else fleet.chip.platform
    kind = next(iter(fleet.chip.device_kinds), "")
    with _LOWERING, without_devices():
        lowered = lowered_call(step.function(), step.arguments(), {}, platform, kind)
    told = [INPUTS.format(fleet.num_devices)] if fleet.num_devices > 1 else []
    told += [LOOPED.format(step.num_looped)] if step.has_loops else []
    return weigh_lowered(
        f"{module.name} as a JAX program",
        fleet,
        num_devices=lowered.num_devices,
        mesh_axes=lowered.mesh_axes,
        digest=lowered.digest,
        files=lowered.files(),
        answers=lowered.answers,
        simulate=simulate,
        on_event=on_event,
        says=(SAYS, *told, *module.program.notes, *module.says),
        **known,
    )


def module_step(
    module: NamedProgram,
    fleet: Fleet,
    mesh: Layout,
    *,
    checkpoint: str | None = None,
    layers: str | None = None,
    simulate: bool = False,
) -> ModuleStep:
    """Return the training step of an exported module for a layout of a fleet.

    Args:
        checkpoint: one of its program's `checkpoints`, the module's own if None.
        layers: "loop" or "unrolled"; as the step chooses if None.
    """
    from ..torch_program import AS_WRITTEN, ModuleStep, attention_on

    return ModuleStep(
        program=module.program,
        mesh_axes=mesh.axes,
        optimizer=module.optimizer,
        attention=attention_on(fleet.chip, simulate),
        checkpoint=checkpoint or AS_WRITTEN,
        loops=None if layers is None else layers == LOOP,
    )
