"""Weigh a step for a fleet that need not exist: compile it, account for it, and predict its time.

This module also loads configs, and accounts for PyTorch modules. Neither importing it nor weighing imports
jax: a worker process compiles. Used by: `_explain`, `_train`, `_sweep`, and users as `mw.weigh` and
`mw.load`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, overload

from ..compiler import (
    Compiled,
    RulesFile,
    TakesNoMesh,
    compile_program,
    is_compiled,
)
from ..config import (
    Layout,
    Overrides,
    RunConfig,
    check_layout,
    check_precision,
    load_config,
    on_nearest_layout,
    overridden,
    override_pairs,
    preset_names,
    resolve_batch,
)
from ..errors import InputError, MeshwrightError
from ..hardware import Fleet
from ..measure import known_rates
from ..predict import checked_price, steps_for
from ..results import KnownPlan, Phase, TorchWeighing, Weighing, ignore
from ..torch_account import Account, account_torch, is_torch_module
from ..units import parse_count
from ._known_plans import plan_command, remembered
from ._reckoned import reckoned
from ._requests import request_of
from ._torch import is_torch_function, weigh_module, weigh_torch_function

if TYPE_CHECKING:
    import jax
    import torch

NO_BACKWARD = "No backward pass was found: these are the figures of a forward pass, not of a training step"
LEAST_NAMED_SAVING = 0.05  # share of the step: an earlier plan's best is named if it saves more


@overload
def weigh(
    config: str | RunConfig,
    *,
    on: str | Fleet,
    layout: str | None = None,
    overrides: Overrides = (),
    simulate: bool = False,
    tokens: float | str | None = None,
    tokens_per_step: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    rules: str | Path | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing: ...


@overload
def weigh(
    config: Callable[..., Any] | jax.stages.Traced,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on: str | Fleet,
    simulate: bool = False,
    rules: str | Path | None = None,
    tokens: float | str | None = None,
    tokens_per_step: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing: ...


@overload
def weigh(
    config: torch.nn.Module,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> Account: ...


@overload
def weigh(
    config: torch.nn.Module,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on: str | Fleet,
    layout: str | None = None,
    parallelize: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    tokens: float | str | None = None,
    tokens_per_step: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> TorchWeighing: ...


@overload
def weigh(
    config: torch.nn.Module | str,
    *,
    as_: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on: str | Fleet,
    layout: str | None = None,
    overrides: Overrides = (),
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    simulate: bool = False,
    tokens: float | str | None = None,
    tokens_per_step: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing: ...


def weigh(
    config: Any,
    *,
    on: str | Fleet | None = None,
    layout: str | None = None,
    overrides: Overrides = (),
    simulate: bool = False,
    tokens: float | str | None = None,
    tokens_per_step: float | str | None = None,
    price_per_device_hour: float | str | None = None,
    rules: str | Path | None = None,
    on_event: Callable[[Phase], None] = ignore,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    loss: Any = None,
    autocast: Any = None,
    parallelize: Any = None,
    as_: str | None = None,
) -> Weighing | TorchWeighing | Account:
    """Compile a training step for a fleet and account for it, or run a PyTorch module's step on fake tensors.

    Args:
        config: a preset, a TOML file, a run's folder, a `RunConfig`; "package.module:function" (or
            "train.py:function", "module:Class.method"), which returns (step, args); a function of JAX (plain,
            jitted, a method, a partial, or jitted by Flax NNX or Equinox), or its `jax.stages.Traced`; or a
            PyTorch module.
        on: the fleet in the syntax of `Fleet.parse`: "8xH100", "v5p-512", "8xCPU"; or "local". Or a `Fleet`,
            whose links, memory or peaks may differ from the catalog's: `dataclasses.replace` makes one.
        layout: mesh axes, "fsdp=64,tensor=8"; the config's own if not given.
        overrides: {"section.key": value}, or a sequence of "section.key=value".
        simulate: let the CPU's compiler partition the program for the fleet; every figure is marked.
        tokens: the tokens of the whole run, 15e9 or "15B"; those of the config's `steps` if not given.
        tokens_per_step: tokens, or samples, in a step of a program that is no configuration, 524288 or "2M".
        price_per_device_hour: in your currency; the fleet's own if not given.
        rules: a Python file that calls `register_kernel`, for the kernels of a function.
        on_event: called with each `Phase` of the weighing as it begins.
        args, kwargs: the arguments of a function: arrays or `jax.ShapeDtypeStruct`, on a mesh of your own or
            on none; or of a PyTorch module's `forward`, on one rank: tensors may be real, meta or fake.
        optimizer, loss, autocast: for a PyTorch module, as for `account_torch`.
        parallelize: for a PyTorch module, a function of it and of a `DeviceMesh` with the layout's axes that
            spreads it, as your training script does. Without one FSDP2 shards each repeated block and the
            root over `fsdp`, and `data` replicates.
        as_: "jax" weighs a PyTorch module as a JAX program on our trainer, and not as PyTorch runs it; the
            layout has the axes `fsdp` and `data`, and `autocast` is the format of parameters in use.

    Returns:
        A `Weighing`; for a PyTorch module on a fleet a `TorchWeighing`, and without `on` its `Account`, which
        is of one device.

    Raises:
        InputError: the config, fleet, layout, tokens or price is wrong, the target's compiler is not
            installed, or a PyTorch module cannot run on fake tensors.
        CompileError: the compiler failed; the error quotes its message.

    >>> weighing = weigh("linear", on="8xH100")
    >>> weighing.fits, weighing.ledger.flops.executed >= weighing.ledger.flops.model
    (True, True)
    """
    parts = {"optimizer": optimizer, "loss": loss, "autocast": autocast}
    for_torch = {"args": args, "kwargs": kwargs, **parts, "parallelize": parallelize}
    counts = {"tokens": tokens, "tokens_per_step": tokens_per_step}
    counts["price_per_device_hour"] = price_per_device_hour
    if as_ is not None:
        fleet = named_fleet(on, price_per_device_hour)
        return _weigh_as(as_, config, for_torch, rules, overrides, fleet, layout, counts, simulate, on_event)
    for_configs = {"rules": rules, "simulate": simulate or None}
    if is_torch_module(config):
        _refuse("a PyTorch module", {"overrides": overrides or None, **for_configs})
        of_a_mesh = {"layout": layout, "parallelize": parallelize, **counts}
        return _weigh_torch(config, args, kwargs or {}, parts, on, of_a_mesh, on_event)
    if not isinstance(config, str | RunConfig):
        _check_program(config, given=bool(args or kwargs))
        _refuse("a function", {"layout": layout, "overrides": overrides or None})
        _refuse("a function", {**parts, "parallelize": parallelize})
    else:
        _refuse("a config", for_torch)
    fleet = named_fleet(on, price_per_device_hour)
    if not isinstance(config, str | RunConfig):
        known = totals_of(name_of(config), tokens_per_step, tokens, price_per_device_hour)
        return _weigh_live(config, args or (), kwargs or {}, fleet, simulate, on_event, known, rules)
    run = config_of_run(config, overrides, layout)
    if run is None and is_torch_function(str(config)):
        _refuse("a PyTorch module", for_configs)
        known = totals_of(config, tokens_per_step, tokens, price_per_device_hour)
        return weigh_torch_function(str(config), fleet, layout, knobs_of(overrides), known, on_event)
    if run is None:
        known = totals_of(config, tokens_per_step, tokens, price_per_device_hour)
        return _weigh_named(str(config), fleet, layout, overrides, simulate, on_event, known, rules)
    _refuse("a configuration", {"tokens_per_step": tokens_per_step, "rules": rules})
    is_given = layout is not None or "layout" in _keys_of(overrides)
    run, mesh, warnings = _on_some_layout(run, fleet, is_given=is_given)
    num_steps = _steps_of(run, tokens, is_own=not _is_another_batch(config, overrides))
    made = weigh_resolved(run, fleet, mesh, simulate=simulate, num_steps=num_steps, on_event=on_event)
    made = dataclasses.replace(made, warnings=warnings)
    if fleet.num_devices == 1 or simulate or made.prediction is None:
        return made
    return dataclasses.replace(made, plan=_known_plan(made, run, plan_command(config, fleet, overrides)))


def _keys_of(overrides: Overrides) -> set[str]:
    """Return the keys that overrides set."""
    return {key for key, _ in override_pairs(overrides)}


def _is_another_batch(config: str | RunConfig, overrides: Overrides) -> bool:
    """Return whether a preset's batch is overridden and its steps are not: they are of its own batch."""
    keys = _keys_of(overrides)
    is_preset = isinstance(config, str) and config in preset_names()
    return is_preset and "steps" not in keys and any(key.partition(".")[0] == "batch" for key in keys)


def _steps_of(run: RunConfig, tokens: float | str | None, *, is_own: bool) -> int | None:
    """Return the steps of a whole run: from its tokens, else its own if `is_own`; None if unknown."""
    if tokens is not None:
        return steps_for(tokens, run.batch.tokens_per_step)
    return run.steps if is_own else None


def _on_some_layout(
    run: RunConfig, fleet: Fleet, *, is_given: bool
) -> tuple[RunConfig, Layout, tuple[str, ...]]:
    """Return the run and its layout on a fleet, and a warning if the layout is not the run's own.

    The run's own layout may not suit the fleet. Unless the user gave it, the nearest legal one stands in.

    Raises:
        InputError: as for `resolved`; of the run's own layout.
    """
    try:
        return *resolved(run, fleet), ()
    except InputError as refused:
        near = None if is_given else on_nearest_layout(run, fleet.num_devices)
        if near is None:
            raise
        chunks = "" if near.pipeline_chunks == run.pipeline_chunks else " and pipeline_chunks=1"
        words = f"Weighed with layout {near.layout}{chunks}, the nearest for {fleet.num_devices} devices"
        try:
            return *resolved(near, fleet), (f"{words}: {run.layout} of {run.name} does not",)
        except InputError:
            raise refused from None


def _weigh_as(
    as_: str,
    config: Any,
    given: dict[str, Any],
    rules: Any,
    overrides: Overrides,
    fleet: Fleet,
    layout: str | None,
    counts: dict[str, Any],
    simulate: bool,
    on_event: Callable[[Phase], None],
) -> Weighing:
    """Weigh a module as a JAX program. `counts`: tokens, tokens per step and price."""
    from ._torch_program import weigh_as  # which weighs with what is defined here

    _refuse("a PyTorch module as a JAX program", {"rules": rules, "parallelize": given["parallelize"]})
    parts = {name: part for name, part in given.items() if name != "parallelize"}
    price = counts["price_per_device_hour"]
    known = totals_of(name_of(config), counts["tokens_per_step"], counts["tokens"], price)
    how = {"simulate": simulate, "on_event": on_event, "known": known}
    return weigh_as(as_, config, parts, knobs_of(overrides), fleet, layout, **how)


def _weigh_torch(
    module: Any,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any],
    parts: dict[str, Any],
    on: str | Fleet | None,
    of_a_mesh: dict[str, Any],
    on_event: Callable[[Phase], None],
) -> TorchWeighing | Account:
    """Weigh a module on a fleet, or account for it on one device if none is named.

    `parts`: its optimizer, loss and autocast. `of_a_mesh`: what else a mesh needs, and its tokens and price.
    """
    args = () if args is None else args
    if not isinstance(args, tuple | list):
        hint = "give inputs by name as kwargs=" if isinstance(args, Mapping) else "write args=(x,)"
        raise InputError(f"args is a {type(args).__name__}, not a tuple of inputs", hint=hint)
    if on is None:
        _refuse("a PyTorch module, accounted on one device,", of_a_mesh, "name a fleet: on='8xH100'")
        return account_torch(module, *args, **parts, **kwargs)
    price = of_a_mesh["price_per_device_hour"]
    known = totals_of(type(module).__name__, of_a_mesh["tokens_per_step"], of_a_mesh["tokens"], price)
    parts["parallelize"] = of_a_mesh["parallelize"]
    fleet = named_fleet(on, price)
    return weigh_module(module, args, kwargs, fleet, of_a_mesh["layout"], known, on_event, **parts)


def _known_plan(made: Weighing, run: RunConfig, command: str) -> KnownPlan:
    """Return what an earlier plan found for the same run, if it is faster by enough and still compiled."""
    nothing = KnownPlan(command=command)
    overrides = remembered(run, made.fleet)
    if overrides is None or made.prediction is None:
        return nothing
    try:
        request = request_of(*_on_fleet(run, overrides, made.fleet))
        if not is_compiled(request.key()):
            return nothing
        best = weigh_resolved(*_on_fleet(run, overrides, made.fleet), num_steps=None)
    except MeshwrightError:  # written by a version whose settings this one does not take
        return nothing
    from ..planning import settings_words  # imports numpy

    seconds, now = best.step_seconds, made.prediction.step_seconds.expected
    if seconds is None or best.fits is False or (made.fits and seconds > (1 - LEAST_NAMED_SAVING) * now):
        return nothing
    return KnownPlan(
        command=command, layout=str(best.layout), settings=settings_words(overrides), step_seconds=seconds
    )


def _on_fleet(run: RunConfig, overrides: Overrides, fleet: Fleet) -> tuple[RunConfig, Fleet, Layout]:
    config, layout = resolved(overridden(run, overrides), fleet)
    return config, fleet, layout


def _check_program(step: Any, given: bool) -> None:
    """Raise unless it is a function, or a call that JAX has traced. `given`: arguments are."""
    is_traced = hasattr(step, "jaxpr") and hasattr(step, "lower")
    if is_traced and given:
        raise InputError("a traced call has its arguments already", hint="leave args and kwargs out")
    if not callable(step) and not is_traced:
        hint = "give a preset, a TOML file, a RunConfig, a function with args=..., "
        hint += "'package.module:function' or a PyTorch module"
        if hasattr(step, "compile"):  # a `jax.stages.Lowered`
            hint = "it is lowered for one platform: give the function, or step.trace(...)"
        raise InputError(f"{type(step).__name__} cannot be weighed", hint=hint)


def name_of(step: Any) -> str:
    """Return the name of a function or of a traced call."""
    return getattr(step, "__qualname__", None) or getattr(step, "fun_name", None) or type(step).__name__


def _weigh_named(
    name: str,
    fleet: Fleet,
    layout: str | None,
    overrides: Overrides,
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: RunFacts,
    rules: str | Path | None,
) -> Weighing:
    """Weigh the step that a function returns, which is called by its name in another process."""
    mesh = Layout.parse(layout or "data=-1", free_names=True).resolve(fleet.num_devices)
    how: dict[str, Any] = {"simulate": simulate, "knobs": knobs_of(overrides), "on_event": on_event}
    file = None if rules is None else RulesFile.read(rules)
    try:
        return weigh_resolved(name, fleet, mesh, rules=file, **how, **known)
    except TakesNoMesh:
        if layout is not None or overrides or rules is not None:
            raise
    from ._script import weigh_function  # which weighs with what is defined here

    return weigh_function(name, fleet, simulate, on_event, known)


def _weigh_live(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fleet: Fleet,
    simulate: bool,
    on_event: Callable[[Phase], None],
    known: RunFacts,
    rules: str | Path | None,
) -> Weighing:
    """Weigh a call of a function: traced and lowered in this process, compiled in a worker."""
    if rules is not None:
        RulesFile.read(rules).register()
    from ..worker import lowered_call  # imports jax, as the caller has

    platform = "cpu" if simulate else fleet.chip.platform
    on_event(Phase(name="tracing"))
    lowered = lowered_call(step, args, kwargs, platform, next(iter(fleet.chip.device_kinds), ""))
    module = None if hasattr(step, "jaxpr") else getattr(step, "__module__", None)  # else it is JAX's own
    name = f"{module or 'program'}:{name_of(step)}"
    return weigh_lowered(
        name,
        fleet,
        num_devices=lowered.num_devices,
        mesh_axes=lowered.mesh_axes,
        digest=lowered.digest,
        files=lowered.files(),
        answers=lowered.answers,
        simulate=simulate,
        on_event=on_event,
        **known,
    )


def weigh_lowered(
    name: str,
    fleet: Fleet,
    *,
    num_devices: int,
    mesh_axes: Sequence[tuple[str, int]],
    digest: str,
    files: Mapping[str, str],
    answers: Callable[[str], str] | None = None,
    simulate: bool,
    on_event: Callable[[Phase], None],
    tokens_per_step: int | None,
    num_steps: int | None,
    says: Sequence[str] = (),
) -> Weighing:
    """Weigh a program that is lowered already.

    `answers`: as for `compile_program`. `says`: assumptions to list with it.

    Raises:
        InputError: its mesh has another number of devices than the fleet.
    """
    alone, idle, warnings = num_devices == 1 and fleet.num_devices > 1, 0, tuple[str, ...]()
    if not alone and num_devices != fleet.num_devices:
        raise InputError(
            f"the arguments lie on a mesh of {num_devices} devices, and {fleet.name} has {fleet.num_devices}",
            hint="make a mesh of as many devices: jax.sharding.AbstractMesh needs none of them",
        )
    if alone:
        idle = fleet.num_devices - 1
        others = "the other one stands" if idle == 1 else f"{idle} stand"
        warnings = (f"One device of {fleet.name} works, and {others} idle: no argument lies on a mesh",)
        fleet = dataclasses.replace(fleet, num_hosts=1, chips_per_host=1, chips_per_domain=1)
    mesh = Layout(axes=tuple(mesh_axes) or (("data", 1),))
    request = request_of(name, fleet, mesh, simulate)
    request = dataclasses.replace(request, function=None, search_path=(), digest=digest)
    compiled, folder, cached = compile_program(
        request, files=files, on_phase=lambda name: on_event(Phase(name=name)), answers=answers
    )
    compiled = dataclasses.replace(compiled, tokens_per_step=tokens_per_step)
    made = _accounted(name, None, fleet, mesh, compiled, folder, cached)
    ledger = dataclasses.replace(made.ledger, assumptions=(*says, *made.ledger.assumptions))
    warnings = (*warnings, *made.warnings)
    return dataclasses.replace(made, ledger=ledger, num_steps=num_steps, warnings=warnings, idle_devices=idle)


def _refuse(what: str, given: Mapping[str, Any], hint: str = "") -> None:
    """Raise if an argument is given that has no meaning for this kind of config."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{what} takes no {name}", hint=hint or f"leave {name} out")


class RunFacts(TypedDict):
    """Holds what the caller says about a program without a configuration: tokens per step, steps per run."""

    tokens_per_step: int | None
    num_steps: int | None


def totals_of(
    name: object, tokens_per_step: float | str | None, tokens: float | str | None, price: float | str | None
) -> RunFacts:
    """Return the tokens of a step and the number of steps of a program that is no configuration.

    Raises:
        InputError: `tokens_per_step` is no whole number above zero, or is missing beside tokens or a price.
    """
    if tokens_per_step is not None:
        count = parse_count(str(tokens_per_step))
        if count < 1:
            raise InputError(f"{count} tokens per step", hint="write those of one step: 524288")
        return {"tokens_per_step": count, "num_steps": None if tokens is None else steps_for(tokens, count)}
    for what, given in (("tokens", tokens), ("a price", price)):
        if given is not None:
            raise InputError(
                f"{name} is not a configuration, and the number of tokens in its step is not known: "
                f"{what} of {given} cannot be turned into the cost of a run",
                hint="tell it: tokens_per_step=524288, on the command line --tokens-per-step 524288",
            )
    return {"tokens_per_step": None, "num_steps": None}


def resolved(config: RunConfig, fleet: Fleet) -> tuple[RunConfig, Layout]:
    """Return the config with the batch that it has on a fleet, and its layout there.

    Raises:
        InputError: the layout does not cover the fleet, or the config or its precision does not suit it.
    """
    layout = Layout.parse(config.layout).resolve(fleet.num_devices)
    config = resolve_batch(config, layout)
    check_layout(config, layout)
    check_precision(config, fleet.chip)
    return config, layout


def weigh_resolved(
    config: str | RunConfig,
    fleet: Fleet,
    layout: Layout,
    *,
    num_steps: int | None,
    tokens_per_step: int | None = None,
    simulate: bool = False,
    knobs: Mapping[str, str] | None = None,
    rules: RulesFile | None = None,
    on_event: Callable[[Phase], None] = ignore,
) -> Weighing:
    """Weigh a config and layout from `resolved`, or a foreign program by its name, knobs and rules.

    `tokens_per_step`: of a foreign program; a config states its own.
    """
    request = dataclasses.replace(request_of(config, fleet, layout, simulate, knobs), rules=rules)
    compiled, folder, cached = compile_program(request, on_phase=lambda name: on_event(Phase(name=name)))
    on_event(Phase(name="reckoning"))
    run = config if isinstance(config, RunConfig) else None
    if tokens_per_step is not None:
        compiled = dataclasses.replace(compiled, tokens_per_step=tokens_per_step)
    if run is None:  # its arguments may lie on a mesh of its own
        layout = Layout(axes=compiled.mesh_axes)
    made = _accounted(request.name, run, fleet, layout, compiled, folder, cached)
    return dataclasses.replace(made, num_steps=num_steps)


def _accounted(
    name: str,
    run: RunConfig | None,
    fleet: Fleet,
    layout: Layout,
    compiled: Compiled,
    folder: Path,
    cached: bool,
) -> Weighing:
    """Return the account of a compiled program and its predicted time."""
    rates = known_rates(fleet)
    figures = reckoned(folder, compiled, fleet, rates)
    return Weighing(
        name=name,
        config=run,
        fleet=fleet,
        layout=layout,
        compiled=compiled,
        folder=folder,
        cached=cached,
        ledger=figures.ledger,
        prediction=figures.prediction,
        no_prediction=figures.no_prediction,
        warnings=() if run is not None or _has_backward(compiled) else (NO_BACKWARD,),
        rates=rates,
    )


def _has_backward(compiled: Compiled) -> bool:
    """Return whether a program computes gradients, or has no products at all."""
    flops = compiled.traced_flops.by_phase
    return flops.get("backward", 0) > 0 or not any(flops.values())


def named_fleet(on: str | Fleet | None, price_per_device_hour: float | str | None) -> Fleet:
    """Return the fleet that a weighing names, with the price if one is given.

    Raises:
        InputError: no fleet is named, or it cannot be read, or the price is none.
    """
    if on is None:
        raise InputError("no fleet is named", hint='weigh(..., on="8xH100"); `meshwright fleets` lists chips')
    fleet = on if isinstance(on, Fleet) else fleet_of(on)
    if price_per_device_hour is None:
        return fleet
    return dataclasses.replace(fleet, price_per_device_hour=checked_price(price_per_device_hour))


def fleet_of(text: str) -> Fleet:
    """Return the fleet that `text` names; "local" names the attached devices."""
    if text != "local":
        return Fleet.parse(text)
    from ..training import local_fleet  # imports jax to query the attached devices

    return local_fleet()


def load(config: str | RunConfig, overrides: Overrides = ()) -> RunConfig:
    """Return a run's configuration, checked.

    Args:
        config: a preset, a TOML file, the folder of an earlier run, or a `RunConfig`.
        overrides: {"section.key": value}, or a sequence of "section.key=value".

    Raises:
        InputError: an unknown preset, file, section or key, or wrong values; one error lists all of them.

    >>> load("bytes-nano", {"batch.sequences": 16, "model.num_layers": 2}).batch.sequences
    16
    """
    return load_config(config, overrides) if isinstance(config, str) else overridden(config, overrides)


def config_of_run(config: str | RunConfig, overrides: Overrides, layout: str | None) -> RunConfig | None:
    """Return the config with its overrides and layout; None for a foreign program, named by its function."""
    if isinstance(config, str) and ":" in config and not os.path.exists(config):
        return None
    if layout is None:
        return load(config, overrides)
    if isinstance(overrides, Mapping):
        return load(config, {**overrides, "layout": layout})
    given = [overrides] if isinstance(overrides, str) else overrides
    return load(config, [*given, f"layout={layout}"])


def knobs_of(overrides: Overrides) -> dict[str, str]:
    """Return the knobs of a foreign program's function, as text: {"remat": "full"} or ["remat=full"].

    Raises:
        InputError: a text has no "=", or a knob is given twice.
    """
    if isinstance(overrides, Mapping):
        return {name: str(value) for name, value in overrides.items()}
    knobs: dict[str, str] = {}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        name, equals, value = text.partition("=")
        if not equals or name.strip() in knobs:
            problem = "is given twice" if equals else "has no value"
            raise InputError(f"{name.strip()!r} {problem}", hint="write each knob once, as remat=full")
        knobs[name.strip()] = value.strip()
    return knobs


def config_to_run(verb: str, config: str | RunConfig, overrides: Overrides, layout: str | None) -> RunConfig:
    """Return the config with its overrides and layout, for `train` and `sweep`; refuse a foreign program."""
    run = config_of_run(config, overrides, layout)
    if run is None:
        raise InputError(
            f"{config} is not a configuration; `{verb}` runs only configurations",
            hint="run it with your own loop, or write a config; `meshwright presets` lists some",
        )
    return run
