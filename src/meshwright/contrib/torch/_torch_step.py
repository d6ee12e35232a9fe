"""Weigh a training step of a PyTorch module for a fleet that need not exist, as PyTorch runs it.

Imports: `torch_eager`, which runs the module on fake tensors; `_as_jax`. Used by: users as `mw.torch_step`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.config import Layout, Overrides
from meshwright.contrib.torch_eager import account_named, is_torch_module, require_torch
from meshwright.eager import NO_BACKWARD, EagerAccount
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.programs import Candidates, Program, RunFacts, Settings, knobs_of
from meshwright.results import Phase, Weighing

from ._as_jax import DEFAULT_LAYOUT, AsJax
from ._kind import is_function

if TYPE_CHECKING:
    import torch


def torch_step(
    module: torch.nn.Module | str,
    /,
    *args: Any,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    parallelize: Callable[[Any, Any], Any] | None = None,
    **kwargs: Any,
) -> TorchStep:
    """Return a training step of a PyTorch module as a program to weigh.

    Args:
        module: the module; or "package.module:function", a function that returns (module, *inputs), or a dict
            with "module" and perhaps "inputs", "optimizer", "loss", "autocast", "parallelize"; or the folder
            or id of a Hugging Face model, whose module `transformers` makes.
        args, kwargs: of the module's `forward`, on one rank: tensors may be real, meta or fake.
        optimizer: a class of torch.optim or a partial of one, called with the parameters; None for no update.
        loss: a function from the module's output to one number. By default the output if it is one number, or
            else its `loss`, or else the sum of its tensors.
        autocast: the format of products under `torch.autocast`.
        parallelize: a function of the module and of a `DeviceMesh` with the layout's axes that spreads it, as
            your training script does. Without one FSDP2 shards each repeated block and the root over `fsdp`,
            and `data` replicates.

    Raises:
        InputError: it is no module, or a named function is given what it must return itself.
    """
    parts = {"optimizer": optimizer, "loss": loss, "autocast": autocast, "parallelize": parallelize}
    if isinstance(module, str):
        given = {"args": args, "kwargs": kwargs, **parts}
        for name, value in given.items():
            if value not in ((), {}, None):
                hint = f"let the function return it, or leave {name} out"
                raise InputError(f"{module} returns the module, and takes no {name}", hint=hint)
        if is_function(module):
            return TorchStep(function=module)
        from ._transformers_step import transformers_step  # which imports this module

        return transformers_step(module)
    if isinstance(module, type):
        hint = f"make one: {module.__name__}(...)"
        raise InputError(f"{module.__name__} is a class, not a module", hint=hint)
    if not is_torch_module(module):
        hint = "give a torch.nn.Module, or 'package.module:function'"
        raise InputError(f"{type(module).__name__} is no PyTorch module", hint=hint)
    return TorchStep(module=module, args=args, kwargs=kwargs, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStep(Program):
    """A training step of a PyTorch module, which is held, or which a function of that name returns."""

    module: Any = None
    function: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    optimizer: Any = None
    loss: Any = None
    autocast: Any = None
    parallelize: Any = None

    @property
    def name(self) -> str:
        """The function's name, or the module's class; of a module that torch.compile wraps its own."""
        return self.function or type(getattr(self.module, "_orig_mod", self.module)).__name__

    def knobs(self, overrides: Overrides) -> dict[str, str]:
        """Return the arguments of the function that returns the module, as text."""
        return knobs_of(overrides)

    def facts(self, settings: Settings, num_ranks: int) -> RunFacts:
        """Return the tokens of a step and the number of steps, as they are given for `num_ranks` devices."""
        return settings.run.facts(self.name)

    def as_jax(self) -> Program:
        """Return the module as a JAX program on our trainer, which is not how PyTorch runs it.

        It is weighed, and planned, on layouts with the axes `fsdp` and `data`. `autocast` is the format of
        parameters in use.

        Raises:
            InputError: `parallelize` is given: the layout alone spreads the JAX program.
        """
        if self.parallelize is not None:
            hint = "leave parallelize out: the layout alone spreads the JAX program"
            raise InputError("a PyTorch module as a JAX program takes no parallelize", hint=hint)
        return AsJax(step=self)

    def candidates(self, fleet: Fleet, search: Mapping[str, Sequence[str]], settings: Settings) -> Candidates:
        """Raise: layouts are searched for JAX programs only.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self.name} is a PyTorch module, and layouts are searched for JAX programs only",
            hint="plan it `as_jax()`, --as jax; or weigh it in the layouts of your choice",
        )

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Run the step of a rank on fake tensors, and account for the fleet."""
        settings.refuse("a PyTorch module", "simulate")
        if fleet.chip.platform == "tpu":
            raise InputError(
                f"a PyTorch module is weighed as PyTorch runs it on GPUs, and {fleet.chip.name} is a TPU",
                hint="name a fleet of GPUs, 8xH100; or weigh it as a JAX program: `as_jax()`, --as jax",
            )
        layout = settings.layout or DEFAULT_LAYOUT
        mesh = Layout.parse(layout, free_names=True).resolve(fleet.num_devices)
        facts = self.facts(settings, mesh.num_devices)

        def on_phase(name: str) -> None:
            settings.on_event(Phase(name=name))

        if self.function:
            knobs = self.knobs(settings.overrides)
            how = {"fleet": fleet, "layout": mesh, "knobs": knobs, "on_phase": on_phase}
            return _weighing(account_named(self.function, name=self.name, **how), fleet, mesh, facts)
        settings.refuse("a PyTorch module", "overrides")
        require_torch()
        from meshwright.contrib.torch_eager import account_on_mesh

        account = account_on_mesh(
            self.module,
            tuple(self.args),
            dict(self.kwargs),
            name=self.name,
            fleet=fleet,
            layout=mesh,
            on_phase=on_phase,
            optimizer=self.optimizer,
            loss=self.loss,
            autocast=self.autocast,
            parallelize=self.parallelize,
        )
        return _weighing(account, fleet, mesh, facts)


def _weighing(account: EagerAccount, fleet: Fleet, mesh: Layout, facts: RunFacts) -> Weighing:
    """Return the weighing of an account, with the rate of its tokens."""
    prediction, tokens_per_step = account.prediction, facts["tokens_per_step"]
    if prediction is not None and tokens_per_step is not None:
        rate = tokens_per_step / prediction.step_seconds.expected / fleet.num_devices
        prediction = dataclasses.replace(prediction, tokens_per_second_per_device=rate)
    return Weighing(
        name=account.name,
        fleet=fleet,
        layout=mesh,
        figures=account.ledger,
        prediction=prediction,
        no_prediction=account.no_prediction,
        made_by=account,
        warnings=(f"{NO_BACKWARD}, and training would fail",) * (NO_BACKWARD in account.ledger.assumptions),
        **facts,
    )
