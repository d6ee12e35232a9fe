"""One training step on fake tensors, watched. Imports torch: imported only by what accounts a module."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.errors import InputError

from ._calls import format_name
from ._failures import checked, run_by_user
from ._fakes import Fakes, mode_of
from ._modules import ModuleStack
from ._records import Account, FlopCount, MemoryCount, ModuleCount
from ._storages import SAVED, TEMPORARY, Storages
from ._watch import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTED, Saved, Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the user asked for."""

    module: Any
    inputs: tuple[Any, ...]
    keyword_inputs: dict[str, Any]
    optimizer: Any
    loss: Any
    autocast: Any


def account_step(step: Step) -> Account:
    """The account of a step.

    Raises:
        InputError: see `account_torch`.
    """
    checked(step)
    mode = mode_of(step.module, step.inputs, step.keyword_inputs)
    fakes = Fakes(mode)
    module = fakes.module(step.module)
    inputs, keywords = fakes.tree(step.inputs), fakes.tree(step.keyword_inputs)
    run = _Run(step, module, (inputs, keywords))
    # The fake mode first: what it decomposes inside itself is one operation to the watch above it.
    with _random_state_kept(), mode, run.stack, run.watch:
        run.forward()
        run.backward()
        run.optimizer_step()
    return run.account()


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Python's and PyTorch's generators are afterwards as before."""
    state = random.getstate()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
    random.setstate(state)


class _Run:
    def __init__(self, step: Step, module: torch.nn.Module, inputs: Any) -> None:
        self.step = step
        self.module = module
        self.inputs = inputs
        self.storages = Storages()
        self.stack = ModuleStack(module)
        self.watch = Watch(self.stack, self.storages)
        self.conventions: list[str] = []
        self.saved_by_module: Counter[str | None] = Counter()
        self.by_format: dict[str, dict[str, int]] = {}
        self.saved_bytes = self.state_bytes = self.gradient_bytes = 0
        self.output: Any = None
        self.loss: Any = None
        self._place("parameters", module.parameters())
        self._place("buffers", module.buffers())
        self._place("inputs", [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)])

    def _place(self, category: str, tensors: Any) -> None:
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self.storages.put(tensor, category, format_name(tensor.dtype))
            else:  # a sparse gradient
                self._place(category, (tensor._indices(), tensor._values()))

    def forward(self) -> None:
        """Forward pass and loss; what is saved for the backward pass is counted at their end."""
        arguments, keywords = self.inputs
        self.watch.phase = FORWARD
        with (
            run_by_user(self.stack, self.watch, self.inputs),
            torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor),
            self._autocast(),
        ):
            self.output = self.module(*arguments, **keywords)
            self.loss = self._loss_of(self.output)
        self.saved_bytes = self.storages.live[SAVED]
        self.by_format[SAVED] = self.storages.by_format().get(SAVED, {})

    def _autocast(self) -> Any:
        if self.step.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device().type, dtype=self.step.autocast)

    def _device(self) -> torch.device:
        tensors = [*self.module.parameters(), *self.module.buffers(), *pytree.tree_leaves(self.inputs)]
        return next(
            (tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)), torch.device("cpu")
        )

    def _pack(self, tensor: torch.Tensor) -> Saved:
        before = self.storages.live[SAVED]
        saved = Saved(tensor, self.storages)
        if self.watch.phase == FORWARD:
            self.saved_by_module[self.stack.path()] += self.storages.live[SAVED] - before
        return saved

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self.step.loss is not None:
            found = self.step.loss(output)
        elif isinstance(output, torch.Tensor) and output.numel() == 1:
            return output
        elif isinstance(getattr(output, "loss", None), torch.Tensor):
            found = output.loss
            self.conventions.append("The loss is the output's own `loss`.")
        else:
            tensors = [t for t in _tensors(output) if t.is_floating_point() and t.requires_grad]
            self.conventions.append("No loss was given: the sum of the output stands for it.")
            if not tensors:
                return torch.zeros(())
            found = sum((tensor.sum() for tensor in tensors[1:]), tensors[0].sum())
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            what = (
                f"a tensor of shape {list(found.shape)}"
                if isinstance(found, torch.Tensor)
                else type(found).__name__
            )
            raise InputError(
                f"the loss is {what}, not one number", hint="return a scalar tensor, by .mean() or .sum()"
            )
        return found

    def backward(self) -> None:
        """Gradients; none where nothing asks for them."""
        self.watch.phase = BACKWARD
        if not self.loss.requires_grad:
            self.conventions.append("Nothing asks for a gradient: there is no backward pass.")
            return
        hooks = []
        for tensor in self._leaves():
            hooks.append(
                tensor.register_post_accumulate_grad_hook(lambda t: self._place("gradients", (t.grad,)))
            )
        with run_by_user(self.stack, self.watch, self.inputs):
            self.loss.backward()
        for hook in hooks:
            hook.remove()
        self.gradient_bytes = self.storages.live["gradients"]

    def _leaves(self) -> list[torch.Tensor]:
        found = [*self.module.parameters(), *pytree.tree_leaves(self.inputs)]
        return [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]

    def optimizer_step(self) -> None:
        """Two steps with the same gradients: the first makes the state, the second is the one that counts."""
        self.by_format |= {k: v for k, v in self.storages.by_format().items() if k not in self.by_format}
        if self.step.optimizer is None:
            return
        self.watch.phase = ""
        with run_by_user(self.stack, self.watch, self.inputs):
            made = self.step.optimizer(list(self.module.parameters()))
            made.step()
        self._place(
            "optimizer state",
            [t for t in pytree.tree_leaves(dict(made.state)) if isinstance(t, torch.Tensor)],
        )
        self.state_bytes = self.storages.live["optimizer state"]
        before = dict(self.storages.at_peak), self.storages.peak_phase
        self.storages.at_peak = {**before[0], "optimizer state": self.state_bytes}
        self.storages.peak_bytes += self.state_bytes
        self.watch.phase = OPTIMIZER
        with run_by_user(self.stack, self.watch, self.inputs):
            made.step()

    def account(self) -> Account:
        """What was seen, as a record."""
        flops = self.watch.flops

        def of(phase: str) -> int:
            return sum(count for (each, _), count in flops.items() if each == phase)

        live, peak = self.storages.live, self.storages
        parameters = {id(p): p.numel() for p in self.module.parameters()}
        return Account(
            name=type(self.module).__name__,
            num_parameters=sum(parameters.values()),
            flops=FlopCount(
                forward=of(FORWARD),
                backward=of(BACKWARD) + of(RECOMPUTED),
                recomputed=of(RECOMPUTED),
                optimizer=of(OPTIMIZER),
                by_operation=dict(self.watch.by_operation.most_common()),
                by_format=dict(self.watch.by_format.most_common()),
            ),
            memory=MemoryCount(
                parameters_bytes=live["parameters"],
                buffers_bytes=live["buffers"],
                gradients_bytes=self.gradient_bytes,
                optimizer_state_bytes=self.state_bytes,
                inputs_bytes=live["inputs"],
                saved_activation_bytes=self.saved_bytes,
                temporary_peak_bytes=peak.at_peak.get(TEMPORARY, 0),
                peak_bytes=peak.peak_bytes,
                peak_phase=peak.peak_phase,
                at_peak={k: v for k, v in peak.at_peak.items() if v},
                by_format=self.by_format,
            ),
            by_module=self._by_module(),
            unknown=dict(sorted(self.watch.unknown.items())),
            conventions=tuple(self.conventions),
            torch_version=torch.__version__,
        )

    def _by_module(self) -> tuple[ModuleCount, ...]:
        rows = []
        for path, child in self.module.named_modules():

            def inside(counts: Mapping[Any, int], phase: str | None = None, path: str = path) -> int:
                found = 0
                for key, count in counts.items():
                    where = key[1] if phase else key
                    if where is not None and (not phase or key[0] == phase) and _is_inside(where, path):
                        found += count
                return found

            recomputed = inside(self.watch.flops, RECOMPUTED)
            rows.append(
                ModuleCount(
                    path=path,
                    kind=type(child).__name__,
                    num_parameters=sum(p.numel() for p in child.parameters()),
                    forward_flops=inside(self.watch.flops, FORWARD),
                    backward_flops=inside(self.watch.flops, BACKWARD) + recomputed,
                    recomputed_flops=recomputed,
                    saved_activation_bytes=inside(self.saved_by_module),
                )
            )
        return tuple(rows)


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
