"""Run one training step on fake tensors and watch it.

This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.compiler import USERS_FAILURES
from meshwright.errors import InputError

from ._fakes import Fakes, check_parts, in_words, mode_of, quiet_fakes
from ._flops import format_name, tensor_text
from ._records import Account
from ._storages import SAVED, Seen, Storages, account_of
from ._watch import BACKWARD, FORWARD, OPTIMIZER, ModuleStack, Saved, Watch, has_storage


@dataclass(frozen=True, slots=True)
class Step:
    """A user's request, as `account_torch` takes it."""

    module: Any
    inputs: tuple[Any, ...]
    keyword_inputs: dict[str, Any]
    optimizer: Any
    loss: Any
    autocast: Any


def account_step(step: Step) -> Account:
    """Return the account of a step.

    Raises:
        InputError: see `account_torch`.
    """
    check_parts(step.module, (step.inputs, step.keyword_inputs), step.optimizer, step.loss, step.autocast)
    with _surroundings():
        run = _Run(step)
        # Enter the fake mode first: an operation that it decomposes is then only one for the watch above it.
        with run.mode, run.stack, run.watch:
            run.forward()
            run.backward()
            run.optimizer_step()
    return account_of(run.seen, run.watch, run.storages)


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Restore the random generators after the block, and keep backward passes in this thread."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices=devices),
        torch.autograd.set_multithreading_enabled(False),
        quiet_fakes(),
    ):
        # oneDNN's LSTM keeps a workspace whose size only a real run shows; PyTorch's own LSTM hides nothing.
        onednn = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(onednn)
            random.setstate(python)
            np.random.set_state(numpy)


class _Run:
    def __init__(self, step: Step) -> None:
        self.step = step
        self.mode: FakeTensorMode = mode_of(step.module, (step.inputs, step.keyword_inputs))
        fakes = Fakes(self.mode)
        self.module = fakes.module(step.module)
        self.inputs, self.keywords = fakes.tree(step.inputs), fakes.tree(step.keyword_inputs)
        self.storages = Storages()
        self.stack = ModuleStack(self.module)
        self.watch = Watch(self.stack, self.storages, fakes)
        self.seen = Seen(module=self.module)
        self.output: Any = None  # lives until the step ends, like a variable of a training loop
        self.loss: Any = None
        self._parts: list[Any] = []
        self._place("parameters", self.module.parameters())
        self._place("buffers", self.module.buffers())
        self._place("inputs", self._input_tensors())
        device = next((t.device.type for t in (*self.module.parameters(), *self._input_tensors())), "cpu")
        self.seen.device = self.device = device

    def _input_tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.inputs, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _place(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if has_storage(tensor):
                self.storages.put(tensor, category, format_name(tensor.dtype))
            else:  # a sparse gradient; a fake one creates these two at each call and keeps neither
                parts = (tensor._indices(), tensor._values())
                self._parts.append(parts)
                self._place(category, parts)

    @contextlib.contextmanager
    def _of_the_user(self, what: str, hint: str | None = None) -> Iterator[None]:
        """Turn errors of the user's code into an `InputError`; a mistake of ours keeps its traceback."""
        try:
            yield
        except InputError:
            raise
        except USERS_FAILURES as failed:
            if self.watch.own_mistake is not None:
                raise
            raise in_words(failed, what, self.stack.paths, hint or self._inputs_text()) from failed

    def forward(self) -> None:
        """Run the forward pass and the loss, then count the activations saved for the backward pass."""
        self.watch.phase = FORWARD
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        with hooks, self._autocast():
            with self._of_the_user("the forward pass"):
                self.output = self.module(*self.inputs, **self.keywords)
            with self._of_the_user("the loss"):
                self.loss = self._loss_of(self.output)
        self.seen.saved_activation_bytes = self.storages.live[SAVED]
        self.seen.by_format[SAVED] = self.storages.by_format().get(SAVED, {})

    def _autocast(self) -> Any:
        if self.step.autocast is None:
            return contextlib.nullcontext()
        self.seen.notes.append("Copies of weights that autocast makes are among the saved activations.")
        return torch.autocast(self.device, dtype=self.step.autocast)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        before = self.storages.live[SAVED]
        saved = Saved(tensor, self.storages)
        if self.watch.phase == FORWARD:
            self.seen.saved_by_module[self.stack.path()] += self.storages.live[SAVED] - before
        return saved

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self.step.loss is not None:
            found = self.step.loss(output)
        elif isinstance(output, torch.Tensor) and output.numel() == 1:
            return output
        elif isinstance(getattr(output, "loss", None), torch.Tensor):
            found = getattr(output, "loss")  # noqa: B009  no attribute that a tensor is known to have
            self.seen.notes.append("The loss is the output's own `loss`.")
        else:
            self.seen.notes.append("No loss was given: the sum of the output stands for it.")
            return _sum_of(output)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            is_tensor = isinstance(found, torch.Tensor)
            what = f"a tensor of shape {list(found.shape)}" if is_tensor else f"a {type(found).__name__}"
            raise InputError(f"the loss is {what}, not one number", hint="end it in .mean() or .sum()")
        return found

    def backward(self) -> None:
        """Compute gradients if anything requires them."""
        self.watch.phase = BACKWARD
        if not self.loss.requires_grad:
            self.seen.notes.append("Nothing asks for a gradient: there is no backward pass.")
        else:
            leaves = [t for t in (*self.module.parameters(), *self._input_tensors()) if t.requires_grad]
            hooks = [leaf.register_post_accumulate_grad_hook(self._got_gradient) for leaf in leaves]
            with self._of_the_user("the backward pass"):
                self.loss.backward()
            for hook in hooks:
                hook.remove()
        self.seen.gradients_bytes = self.storages.live["gradients"]
        self._note_formats()

    def _got_gradient(self, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None, "a hook after accumulation runs when there is a gradient"
        self._place("gradients", (leaf.grad,))

    def _note_formats(self) -> None:
        self.seen.by_format |= {k: v for k, v in self.storages.by_format().items() if k != SAVED}

    def optimizer_step(self) -> None:
        """Run two steps with the same gradients: the first creates the state, the second is counted."""
        if self.step.optimizer is None:
            return
        with self._of_the_user("the optimizer", "the account calls its step() without a closure"):
            self.watch.phase, self.watch.numbers_are_one = "", True
            made = self.step.optimizer(list(self.module.parameters()))
            if not isinstance(made, torch.optim.Optimizer):
                raise InputError(
                    f"the optimizer's function returned a {type(made).__name__}",
                    hint="it takes the parameters and returns a torch.optim.Optimizer",
                )
            made.step()
            self._place("optimizer state", _tensors(dict(made.state)))
            self.seen.optimizer_state_bytes = self.storages.live["optimizer state"]
            # In any later step, the state already exists during the forward and backward passes.
            self.storages.add_to_peak("optimizer state")
            self.watch.phase = OPTIMIZER
            made.step()
        self._note_formats()
        if self.watch.numbers_read:
            self.seen.notes.append(
                "The optimizer reads numbers off tensors; 1 stood for those that only a real run gives."
            )

    def _inputs_text(self) -> str:
        return f"the inputs were {', '.join(map(tensor_text, self._input_tensors())) or 'no tensors'}"


def _sum_of(output: Any) -> torch.Tensor:
    """Sum all tensors that require a gradient."""
    sums = [tensor.sum() for tensor in _tensors(output) if tensor.requires_grad]
    return sum(sums[1:], sums[0]) if sums else torch.zeros(())


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
