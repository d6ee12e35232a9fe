"""Weigh a training step in JAX: a function that you hold, a traced call, or a function by its name.

A function that you hold is traced and lowered in this process, as is a traced call. A function by its name is
called in a process of its own, and returns the step with its arguments. Neither computes anything.

Used by: `programs`, by the entry point; users, as `mw.jax_step`; `contrib.causes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.compiler import RulesFile, TakesNoMesh
from meshwright.config import Layout
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.programs import (
    Candidates,
    Program,
    Settings,
    knobs_of,
    name_of,
    request_of,
    step_facts,
    weigh_lowered,
    weigh_request,
)
from meshwright.results import Phase, Weighing

if TYPE_CHECKING:
    import jax


def jax_step(
    step: Callable[..., Any] | jax.stages.Traced | str,
    /,
    *args: Any,
    rules: str | Path | None = None,
    **kwargs: Any,
) -> Program:
    """Return a training step in JAX as a program to weigh or to plan.

    Args:
        step: a function (plain, jitted, a method, a partial, or jitted by Flax NNX or Equinox); its
            `jax.stages.Traced`; or "package.module:function" ("train.py:function", "module:Class.method"), a
            function that returns (step, args). It may take the mesh, and further arguments that have
            defaults: those are the `overrides` of `weigh`, and what `plan` searches.
        args, kwargs: what the step is called with: arrays or `jax.ShapeDtypeStruct`, on a mesh of your own or
            on none. A traced step and a named function have theirs.
        rules: a Python file that calls `register_kernel`, for the kernels of the step.

    Raises:
        InputError: it is no function, or has its arguments already.

    >>> import jax, jax.numpy as jnp
    >>> step = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
    >>> program = jax_step(step, jax.ShapeDtypeStruct((8, 4), "float32"), jnp.ones((2, 8)))
    """
    if isinstance(step, str):
        if args or kwargs:
            hint = "its arguments are `overrides` of weigh, and it returns those of the step"
            raise InputError(f"{step} is called by its name, and takes no arguments here", hint=hint)
        return NamedStep(function=step, rules=rules)
    is_traced = hasattr(step, "jaxpr") and hasattr(step, "lower")
    if is_traced and (args or kwargs):
        raise InputError("a traced call has its arguments already", hint="leave args and kwargs out")
    if not callable(step) and not is_traced:
        hint = "give a function with its arguments, or 'package.module:function'"
        if hasattr(step, "compile"):  # a `jax.stages.Lowered`
            hint = "it is lowered for one platform: give the function, or step.trace(...)"
        raise InputError(f"{type(step).__name__} cannot be weighed", hint=hint)
    return LiveStep(step=step, args=args, kwargs=kwargs, rules=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep(Program):
    """A call of a function that the caller holds, or a call that JAX has traced."""

    step: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    rules: str | Path | None = None

    @property
    def name(self) -> str:
        """The function's module and name."""
        is_jaxs = hasattr(self.step, "jaxpr")
        module = None if is_jaxs else getattr(self.step, "__module__", None)
        return f"{module or 'program'}:{name_of(self.step)}"

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Trace and lower the call in this process, and compile it in a worker."""
        settings.refuse("a function", "layout", "overrides", hint="its arguments lie on a mesh of your own")
        facts = settings.run.facts(name_of(self.step))
        if self.rules is not None:
            RulesFile.read(self.rules).register()
        from ._live import lowered_call  # imports jax, as the caller has

        platform = "cpu" if settings.simulate else fleet.chip.platform
        settings.on_event(Phase(name="tracing"))
        kind = next(iter(fleet.chip.device_kinds), "")
        lowered = lowered_call(self.step, self.args, self.kwargs, platform, kind)
        return weigh_lowered(
            self.name,
            fleet,
            num_devices=lowered.num_devices,
            mesh_axes=lowered.mesh_axes,
            digest=lowered.digest,
            files=lowered.files(),
            answers=lowered.answers,
            facts=facts,
            simulate=settings.simulate,
            on_event=settings.on_event,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStep(Program):
    """The step that a function returns, which is called by its name in another process."""

    function: str
    rules: str | Path | None = None

    @property
    def name(self) -> str:
        """The function's name: "package.module:function"."""
        return self.function

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Call the function with a mesh, or as on the fleet if it takes none, and compile its step."""
        facts = settings.run.facts(self.function)
        mesh = Layout.parse(settings.layout or "data=-1", free_names=True).resolve(fleet.num_devices)
        file = None if self.rules is None else RulesFile.read(self.rules)
        request = request_of(self.function, fleet, mesh, settings.simulate, knobs_of(settings.overrides))
        try:
            how = {"facts": facts, "on_event": settings.on_event}
            return weigh_request(replace(request, rules=file), fleet, None, **how)
        except TakesNoMesh:
            if settings.layout is not None or settings.overrides or self.rules is not None:
                raise
        from meshwright.registry import room  # a function with a mesh needs none of it

        return room("scripts").weigh_function(self.function, fleet, settings, facts)

    def candidates(self, fleet: Fleet, search: Mapping[str, Sequence[str]], settings: Settings) -> Candidates:
        """Return the meshes and the arguments that the function declares."""
        from meshwright.contrib.function_plans import function_candidates

        hint = "fix its knobs with --fix KNOB=VALUE"
        settings.refuse(f"{self.function}, which is no configuration,", "overrides", "layout", hint=hint)
        facts = step_facts(settings.run, self.function)
        rules = None if self.rules is None else RulesFile.read(self.rules)
        return function_candidates(self.function, fleet, search, facts, rules)
