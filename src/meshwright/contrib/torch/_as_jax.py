"""Weigh a PyTorch module as a JAX program: its training step on our trainer, compiled for a fleet.

The module is exported once; its step is compiled for each layout of a fleet.

Imports: `torch_as_jax`, which exports the module and builds the step. Used by: `_torch_step`, `_as_jax_plan`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.config import Layout, Overrides
from meshwright.contrib.torch_eager import require_torch
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.programs import Candidates, Program, RunFacts, Settings, knobs_of, weigh_lowered
from meshwright.results import Phase, Weighing, ignore

if TYPE_CHECKING:
    from meshwright.contrib.torch_as_jax import ModuleProgram, ModuleStep

    from ._torch_step import TorchStep

DEFAULT_LAYOUT = "fsdp=-1"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AsJax(Program):
    """The step of a PyTorch module as a JAX program on our trainer."""

    step: TorchStep

    @property
    def name(self) -> str:
        """The name of the module or function."""
        return self.step.name

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Export the module, and compile its step for a layout with the axes `fsdp` and `data`."""
        facts = self.step.facts(settings, fleet.num_devices)
        module = exported_module(self.step, settings.overrides, settings.on_event)
        layout = settings.layout or DEFAULT_LAYOUT
        mesh = Layout.parse(layout, free_names=True).resolve(fleet.num_devices)
        how = {"simulate": settings.simulate, "on_event": settings.on_event, "facts": facts}
        made = weigh_module_program(module, fleet, mesh, **how)
        is_planned = fleet.num_devices > 1 and not settings.simulate
        is_planned &= made.prediction is not None or made.refusal is not None
        if not self.step.function or not is_planned:
            return made
        knobs = (f"--set {name}={value}" for name, value in knobs_of(settings.overrides).items())
        command = f"meshwright plan {self.name} --as jax {fleet.options}"
        return dataclasses.replace(made, plan_command=" ".join([command, *knobs]))

    def candidates(self, fleet: Fleet, search: Mapping[str, Sequence[str]], settings: Settings) -> Candidates:
        """Return sizes of `data` and `fsdp`, what is computed again, and loops or none."""
        from ._as_jax_plan import module_candidates  # which imports jax

        settings.refuse("a PyTorch module as a JAX program", "layout", hint="fix data and fsdp")
        return module_candidates(self.step, fleet, search, settings)

    def check_same_step(self, sizes: Collection[int], overrides: Overrides) -> None:
        """Raise if the numbers of devices differ: the inputs are those of one device."""
        if len(sizes) > 1:
            what = "a module's inputs are those of one device: on each number its step is another one"
            raise InputError(what, hint="compare fleets of one size; or plan for each by itself")


def exported_module(
    step: TorchStep, overrides: Overrides, on_event: Callable[[Phase], None] = ignore
) -> NamedProgram:
    """Return the program of a module: exported in this process, or in that of the function that returns it.

    Args:
        step: with its inputs, loss and `autocast`, the format of parameters and inputs in use. An optimizer
            is a class of torch.optim, or a partial of one; AdamW if None.
        overrides: arguments of the function; empty for a module.

    Raises:
        InputError: the module cannot be exported or uses operations without a rule, or the optimizer has no
            counterpart.
    """
    if not step.function:
        if overrides:
            raise InputError("a PyTorch module takes no overrides", hint="leave overrides out")
        return _exported_here(step, on_event)
    from meshwright.contrib.torch_as_jax import exported_named, optimizer_named

    found = exported_named(
        step.function,
        name=step.name,
        knobs=step.knobs(overrides),
        on_phase=lambda phase: on_event(Phase(name=phase)),
    )
    return NamedProgram(
        name=step.name,
        program=found.program,
        optimizer=optimizer_named(*found.optimizer),
        says=(NO_PLAN,) * found.has_plan,
    )


def _exported_here(step: TorchStep, on_event: Callable[[Phase], None]) -> NamedProgram:
    require_torch()
    from meshwright.contrib.torch_as_jax import exported, name_and_options, optimizer_named

    update = optimizer_named(*name_and_options(step.optimizer))
    on_event(Phase(name="exporting the module"))
    inputs = tuple(step.args), dict(step.kwargs)
    program = exported(step.module, *inputs, loss=step.loss, compute=step.autocast)
    return NamedProgram(name=program.name, program=program, optimizer=update)


def weigh_module_program(
    module: NamedProgram,
    fleet: Fleet,
    mesh: Layout,
    *,
    checkpoint: str | None = None,
    layers: str | None = None,
    facts: RunFacts,
    simulate: bool = False,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing:
    """Trace the training step of an exported module in this process, and compile it in a worker.

    Args:
        checkpoint, layers: as for `module_step`.

    Raises:
        InputError: an axis of the layout has no counterpart, or as `weigh_lowered`.
    """
    from meshwright.contrib.jax_steps import lowered_call
    from meshwright.trainer.models.attention_blocks import without_devices

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
        facts=facts,
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
    from meshwright.contrib.torch_as_jax import AS_WRITTEN, ModuleStep, attention_on

    return ModuleStep(
        program=module.program,
        mesh_axes=mesh.axes,
        optimizer=module.optimizer,
        attention=attention_on(fleet.chip, simulate),
        checkpoint=checkpoint or AS_WRITTEN,
        loops=None if layers is None else layers == LOOP,
    )
