"""Sees each ATen operation of a step: its FLOPs, phase and module, and the storages that it makes.

Imports torch: imported only by what accounts a module.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.errors import InputError

from ._calls import call_of, format_name, operation_name, tensor_text
from ._modules import ModuleStack
from ._rules import RULES, work_of
from ._silent import is_silent
from ._storages import Storages

FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER = "forward", "backward", "recomputed", "optimizer"


class Watch(TorchDispatchMode):
    """A dispatch mode; `phase` says which part of the step runs, empty for one that is not counted."""

    def __init__(self, stack: ModuleStack, storages: Storages) -> None:
        super().__init__()
        self.phase = ""
        self.flops: Counter[tuple[str, str | None]] = Counter()  # by phase and module path
        self.by_operation: Counter[str] = Counter()
        self.by_format: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.stands_for: dict[str, int] = {}
        self.own_mistake: Exception | None = None
        self.operation = ""  # the last that started
        self._stack = stack
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        kind = _kind(func)
        if kind == "unknown":  # perhaps made of others, as `linear` is in inference mode
            with self:
                made_of = func.decompose(*args, **kwargs)
            if made_of is not NotImplemented:
                return made_of
        self.operation = operation_name(func)
        self._meet(args, kwargs)
        result = func(*args, **kwargs)
        try:
            if self.phase and kind != "silent":
                self._count(func, args, kwargs, result, kind)
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and _has_storage(tensor):
                    self._storages.see(tensor, format_name(tensor.dtype))
            if self.phase:
                self._storages.note_peak(self.phase)
        except Exception as mistake:
            self.own_mistake = mistake
            raise
        return result

    def _meet(self, args: Any, kwargs: Any) -> None:
        """A tensor from outside the step is what a closure or a global holds: an input."""
        for tensor in pytree.tree_leaves((args, kwargs)):
            if not isinstance(tensor, torch.Tensor) or not _has_storage(tensor):
                continue
            if not isinstance(tensor, FakeTensor) and tensor.requires_grad:
                raise InputError(
                    f"the module or the loss uses a tensor that is not the module's and asks for a gradient, "
                    f"{tensor_text(tensor)}, in {self.operation}",
                    hint="make it a parameter of the module (a function kept in the module may hold the original's)",
                )
            if self._storages.is_new(tensor):
                self._storages.put(tensor, "inputs", format_name(tensor.dtype))

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, kind: str) -> None:
        call = call_of(func, args, kwargs, result)
        work = work_of(call) if kind == "rule" else None
        if work is None:
            self.unknown[str(call)] += 1
            return
        path = self._stack.path()
        phase = self._phase_now()
        self.flops[phase, path] += work.flops
        if work.recomputed_flops:
            self.flops[RECOMPUTED, path] += work.recomputed_flops
            self.flops[phase, path] -= work.recomputed_flops
        self.by_operation[call.name] += work.flops
        self.by_format[work.format] += work.flops

    def _phase_now(self) -> str:
        """Within the backward pass a forward computation runs with gradients on, or inside a module."""
        if self.phase == BACKWARD and (torch.is_grad_enabled() or self._stack.inside):
            return RECOMPUTED
        return self.phase


@functools.cache
def _kind(func: Any) -> str:
    """rule | silent | unknown."""
    name = operation_name(func)
    if name.startswith("aten."):
        bare = name.removeprefix("aten.")
        if bare in RULES:
            return "rule"
        tags = {torch.Tag.pointwise, torch.Tag.view_copy} | (
            {torch.Tag.reduction} if hasattr(torch.Tag, "reduction") else set()
        )
        if is_silent(bare) or func.is_view or tags & set(func.tags):
            return "silent"
    return "silent" if name.startswith(("prim.", "profiler.")) else "unknown"


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


class Saved:
    """A tensor that autograd keeps for the backward pass, as long as it is kept."""

    __slots__ = ("_key", "_storages", "tensor")

    def __init__(self, tensor: torch.Tensor, storages: Storages) -> None:
        self.tensor = tensor
        self._storages = storages
        self._key = storages.save(tensor, format_name(tensor.dtype)) if _has_storage(tensor) else None

    def __del__(self) -> None:
        if self._key is not None:
            self._storages.release(self._key)
