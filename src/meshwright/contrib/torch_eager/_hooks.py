"""Follow hooks that run when a parameter's gradient has been summed up, and may use it at once and free it.

So do optimizers in the backward pass, LOMO, and main gradients in a wider format. What they keep is there in
each step but the first, so a step with such hooks is run once before it is counted.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from ._watch import StorageWatch

COPIED = (
    "a hook that was registered before runs on a copy of its parameter, and finds nothing that it kept by "
    "the original: register it in parallelize=f, which is called with the copy"
)


def hooks_of(tensor: torch.Tensor) -> tuple[Callable[[torch.Tensor], None], ...]:
    """Return the hooks of a tensor that run after its gradient has been summed up."""
    return tuple((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def is_hooked(module: torch.nn.Module) -> bool:
    """Return whether a parameter of the module has such hooks."""
    return any(hooks_of(parameter) for parameter in module.parameters())


@contextlib.contextmanager
def noting_first(leaves: Iterable[torch.Tensor], note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `note` with each leaf when it has its gradient, before any other hook, in the block."""
    handles: list[Any] = []
    for leaf in leaves:
        handle = leaf.register_post_accumulate_grad_hook(note)
        handles.append(handle)
        hooks: Any = getattr(leaf, "_post_accumulate_grad_hooks")  # noqa: B009  a private name
        others = [item for item in hooks.items() if item[0] != handle.id]
        hooks.clear()  # autograd reads the dict below an ordered one, where only insertion gives an order
        hooks.update([(handle.id, note), *others])
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kept_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors that parameters have as attributes named after gradients, as Megatron's `main_grad`."""
    return [
        value
        for parameter in parameters
        for name, value in vars(parameter).items()
        if "grad" in name and isinstance(value, torch.Tensor)
    ]


@contextlib.contextmanager
def hooked_optimizers(watch: StorageWatch) -> Iterator[list[torch.optim.Optimizer]]:
    """Yield a list of the optimizers that take a step in the block, which may read numbers while they do."""
    seen: dict[int, torch.optim.Optimizer] = {}
    found: list[torch.optim.Optimizer] = []

    def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        watch.numbers_are_one = True
        if id(optimizer) not in seen:
            seen[id(optimizer)] = optimizer
            found.append(optimizer)

    def end(*_: Any) -> None:
        watch.numbers_are_one = False

    handles = (register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        watch.numbers_are_one = False
