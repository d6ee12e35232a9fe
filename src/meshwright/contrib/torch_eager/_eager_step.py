"""Run one training step of a rank on fake tensors, and watch it.

This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.contrib.jax_steps import USERS_FAILURES
from meshwright.eager import NO_BACKWARD
from meshwright.errors import InputError
from meshwright.hlo import Axes

from ._aten_flops import tensor_text
from ._attention_kernels import as_it_was_written, compiled_parts, outermost, whole_sequences
from ._default_plan import MIXED_FORMATS, mixed_formats, unusual_formats
from ._fakes import Fakes, explain_failure, mode_of, quiet_fakes
from ._hooks import COPIED, hooked_optimizers, is_hooked, kept_gradients, noting_first
from ._watch import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    SAVED,
    ModuleStack,
    SavedTensor,
    Storages,
    StorageWatch,
    has_storage,
    inner_tensors,
    keeping_selected,
    watching_sizes,
)

WITHOUT_CLOSURE = (
    "its step() is called without a closure: weigh one that needs none, such as torch.optim.AdamW"
)
ONE_SEQUENCE = "Each row is one sequence: no positions are given that could start another."
ALWAYS = (
    "FLOPs are of matrix products, convolutions, attention and recurrent layers; a multiply-add is two. "
    "Elementwise work and reductions count none; a convolution's products with padding count.",
    "Causal attention in one operation counts the pairs of positions that may meet; a mask that is a tensor, "
    "and attention written as matrix products, count whole.",
    "Bytes are those of the storages. The peak is of a step after the first, the output lives until its end, "
    "and memory that a kernel allocates for itself is not seen.",
)


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
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


class EagerStep:
    """One step of a fake copy of the module, pass by pass, and the facts that `watch` does not hold.

    Args:
        parallelize: changes the fake copy for a mesh, and returns it.
        on_host: returns those of its tensors that are in the host's memory.
        mesh_axes: names and sizes of the axes of that mesh.
        compiled: paths of modules that `torch.compile` compiles, which their copies no longer know.
    """

    def __init__(
        self,
        module: Any,
        inputs: tuple[Any, ...],
        keyword_inputs: dict[str, Any],
        parallelize: Callable[[Any], Any] = lambda module: module,
        mesh_axes: Axes = (),
        on_host: Callable[[Any], Iterable[torch.Tensor]] = lambda module: (),
        compiled: Iterable[str] = (),
    ) -> None:
        self.mode: FakeTensorMode = mode_of(module, (inputs, keyword_inputs))
        fakes = Fakes(self.mode)
        copied = fakes.module(module)
        regions = [copied.get_submodule(path) for path in compiled]
        self.module = parallelize(copied)
        self.regions = outermost([*regions, *compiled_parts(self.module)])
        self.inputs, self.keywords = fakes.tree(inputs), fakes.tree(keyword_inputs)
        self.storages = Storages()
        self.stack = ModuleStack(self.module)
        self.watch = StorageWatch(self.stack, self.storages, fakes, mesh_axes)
        self.output: Any = None  # lives until the step ends, like a variable of a training loop
        self.loss: Any = None
        self.optimizer: Any = None  # lives on too: what it keeps is there in each later step
        self.saved_activation_bytes = self.gradients_bytes = self.optimizer_state_bytes = 0
        self.by_format: dict[str, dict[str, int]] = {}
        self.saved_by_module: Counter[str | None] = Counter()
        self.notes: list[str] = []
        self.phases_as_written: set[str] = set()  # in which compiled functions ran as they were written
        self._parts: list[Any] = []
        for shard in on_host(self.module):
            self.storages.keep_on_host(shard)
        self._place("parameters", self.module.parameters())
        self._place("buffers", self.module.buffers())
        self._place("inputs", self._input_tensors())
        kept = kept_gradients(self.module.parameters())
        self._place("gradients", (fakes.tensor(each, "a parameter's gradient") for each in kept))
        self.device = next(
            (t.device.type for t in (*self.module.parameters(), *self._input_tensors())), "cpu"
        )

    def _input_tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.inputs, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(self, loss: Any, autocast: torch.dtype | None, optimizer: Any, regions: Any = None) -> None:
        """Run forward pass, backward pass and optimizer under the watch.

        Args:
            regions: a context that runs compiled modules otherwise than as they were written.
        """
        sequences = whole_sequences(self.module, self.inputs, self.keywords)
        # Enter the fake mode first: an operation that it decomposes is then only one for the watch above it.
        with (
            as_it_was_written(self._note_as_written),
            self.mode,
            self.stack,
            self.watch,
            watching_sizes(self.storages),
            keeping_selected(self._pack),
            sequences as are_told,
            contextlib.nullcontext() if regions is None else regions,
        ):
            if are_told:
                self.notes.append(ONE_SEQUENCE)
            if is_hooked(self.module):
                self._begin_with_hooks(loss, autocast)
            self.forward(loss, autocast)
            self.backward()
            self._place("parameters", self.module.parameters())  # FSDP2 pads shards at their first use
            if optimizer is not None:
                self.optimize(optimizer)

    def _note_as_written(self, words: str) -> None:
        self.notes.append(words)
        self.phases_as_written.add(self.watch.phase)

    def _place(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in (inner for each in tensors for inner in inner_tensors(each)):
            if has_storage(tensor):
                self.storages.put(tensor, category)
            else:  # a sparse gradient; a fake one creates these two at each call and keeps neither
                parts = (tensor._indices(), tensor._values())
                self._parts.append(parts)
                self._place(category, parts)

    @contextlib.contextmanager
    def _users_code(self, what: str, hint: str | None = None) -> Iterator[None]:
        """Turn errors of the user's code into an `InputError`; a mistake of ours keeps its traceback."""
        try:
            yield
        except InputError:
            raise
        except USERS_FAILURES as failed:
            if self.watch.own_mistake is not None:
                raise
            if MIXED_FORMATS in str(failed):
                raise mixed_formats(unusual_formats(self.module)) from failed
            raise explain_failure(failed, what, self.stack.paths, hint or self._inputs_text()) from failed

    def _begin_with_hooks(self, loss: Any, autocast: torch.dtype | None) -> None:
        """Run a forward and a backward pass that do not count, in which hooks make what they keep."""
        with hooked_optimizers(self.watch) as optimizers:
            self._run_forward(loss, autocast)
            self._run_backward()
        for each in optimizers:
            self._place("optimizer state", _tensors(dict(each.state)))
        self._place("gradients", kept_gradients(self.module.parameters()))
        self._place("parameters", self.module.parameters())
        self.optimizer_state_bytes = self.storages.held_bytes("optimizer state")
        self.output = self.loss = None
        for leaf in self._leaves():
            leaf.grad = None

    def forward(self, loss: Any, autocast: torch.dtype | None) -> None:
        """Run the forward pass and the loss, then count the activations saved for the backward pass."""
        self.watch.phase = FORWARD
        self._run_forward(loss, autocast)
        self.saved_activation_bytes = self.storages.live[SAVED]
        self.by_format[SAVED] = self.storages.by_format().get(SAVED, {})

    def _run_forward(self, loss: Any, autocast: torch.dtype | None) -> None:
        casting: Any = contextlib.nullcontext()
        if autocast is not None:
            self.notes.append("Copies of weights that autocast makes are among the saved activations.")
            casting = torch.autocast(self.device, dtype=autocast)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor), casting:
            with self._users_code("the forward pass"):
                self.output = self.module(*self.inputs, **self.keywords)
            with self._users_code("the loss"):
                self.loss = self._loss_of(self.output, loss)

    def _pack(self, tensor: torch.Tensor) -> SavedTensor:
        before = self.storages.live[SAVED]
        saved = SavedTensor(tensor, self.storages)
        if self.watch.phase == FORWARD:
            self.saved_by_module[self.stack.path()] += self.storages.live[SAVED] - before
        return saved

    def _loss_of(self, output: Any, loss: Any) -> torch.Tensor:
        if loss is not None:
            value = loss(output)
        elif isinstance(output, torch.Tensor) and output.numel() == 1:
            return output
        elif isinstance(getattr(output, "loss", None), torch.Tensor):
            value = getattr(output, "loss")  # noqa: B009  no attribute that a tensor is known to have
            self.notes.append("The loss is the output's own `loss`.")
        else:
            self.notes.append("No loss was given: the sum of the output stands for it.")
            return _sum_of(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, torch.Tensor)
            what = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise InputError(f"the loss is {what}, not one number", hint="end it in .mean() or .sum()")
        return value

    def backward(self) -> None:
        """Compute gradients if anything requires them."""
        self.watch.phase = BACKWARD
        if not self.loss.requires_grad:
            self.notes.append(NO_BACKWARD)
        else:
            with hooked_optimizers(self.watch):
                self._run_backward()
            # FSDP2 sets those of its shards, which are no leaves while it holds gathered parameters.
            self._place("gradients", (p.grad for p in self.module.parameters() if p.grad is not None))
        self.gradients_bytes = self.storages.held_bytes("gradients")
        self._note_formats()

    def _leaves(self) -> list[torch.Tensor]:
        return [t for t in (*self.module.parameters(), *self._input_tensors()) if t.requires_grad]

    def _run_backward(self) -> None:
        hint = COPIED if is_hooked(self.module) else None
        with noting_first(self._leaves(), self._note_gradient), self._users_code("the backward pass", hint):
            if self.loss.requires_grad:
                self.loss.backward()

    def _note_gradient(self, leaf: torch.Tensor) -> None:
        if leaf.grad is not None:
            self._place("gradients", (leaf.grad,))

    def _note_formats(self) -> None:
        self.by_format |= {k: v for k, v in self.storages.by_format().items() if k != SAVED}

    def optimize(self, optimizer: Any) -> None:
        """Run two steps with the same gradients: the first creates the state, the second is counted."""
        with self._users_code("the optimizer", WITHOUT_CLOSURE):
            self.watch.phase, self.watch.numbers_are_one = "", True
            made = self.optimizer = optimizer(list(self.module.parameters()))
            if not isinstance(made, torch.optim.Optimizer):
                raise InputError(
                    f"the optimizer's function returned a {type(made).__name__}",
                    hint="it takes the parameters and returns a torch.optim.Optimizer",
                )
            made.step()
            self._place("optimizer state", _tensors(dict(made.state)))
            self._keep_beside_parameters(made.state)
            self.optimizer_state_bytes = self.storages.held_bytes("optimizer state")
            # In any later step, the state already exists during the forward and backward passes.
            self.storages.add_to_peak("optimizer state")
            self.watch.phase = OPTIMIZER
            made.step()
        self._note_formats()
        if self.watch.numbers_read:
            self.notes.append(
                "The optimizer reads numbers from tensors; 1 replaced those that only a real run computes."
            )

    def _keep_beside_parameters(self, state: Mapping[Any, Any]) -> None:
        """Put what an optimizer keeps of parameters in the host's memory there: it names their device."""
        for parameter, kept in state.items():
            is_tensor = isinstance(parameter, torch.Tensor)
            if is_tensor and any(map(self.storages.is_on_host, inner_tensors(parameter))):
                for tensor in (inner for each in _tensors(kept) for inner in inner_tensors(each)):
                    self.storages.move_to_host(tensor)

    def _inputs_text(self) -> str:
        return f"the inputs were {', '.join(map(tensor_text, self._input_tensors())) or 'no tensors'}"

    def kernel_notes(self) -> list[str]:
        """Return what is not known of the memory of recurrent layers, in sentences."""
        if "aten._cudnn_rnn" in self.watch.by_operation:
            words = "Memory that cuDNN keeps of recurrent layers for the backward pass has an unknown size "
            return [f"{words}and is not counted."]
        if any(isinstance(child, torch.nn.LSTM) for child in self.module.modules()):
            return ["LSTM layers run step by step, not by oneDNN, which keeps a workspace of unknown size."]
        return []


def _sum_of(output: Any) -> torch.Tensor:
    """Sum all tensors that require a gradient."""
    sums = [tensor.sum() for tensor in _tensors(output) if tensor.requires_grad]
    return sum(sums[1:], sums[0]) if sums else torch.zeros(())


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(dict(tree) if isinstance(tree, Mapping) else tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
