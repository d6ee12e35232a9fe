"""Which module an operation belongs to, in the forward pass and in the backward pass.

Forward: the innermost module whose `forward` runs. Backward: the module in whose forward the autograd node
was made, told by the node's sequence number. Imports torch: imported only while accounting.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleStack:
    """Follows one module and its children while it is entered as a context."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.paths: dict[int, str] = {id(child): path for path, child in root.named_modules()}
        self._root = root
        self._stack: list[str | None] = []
        self._numbers: list[int] = [0]  # of the autograd nodes made so far, when the innermost module changed
        self._innermost: list[str | None] = [None]
        self._hooks: list[Any] = []

    def __enter__(self) -> ModuleStack:
        self._hooks = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def inside(self) -> bool:
        """Whether some module's forward runs."""
        return bool(self._stack)

    def path(self) -> str | None:
        """The innermost module's path ("" is the root), None outside of all modules."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        found = self._innermost[max(bisect.bisect_right(self._numbers, node._sequence_nr()) - 1, 0)]
        if torch.is_grad_enabled() and found != self._innermost[-1]:
            # A function without a module is recomputed; the node just made for it belongs here as well.
            self._numbers.append(_next_number() - 1)
            self._innermost.append(found)
        return found

    def _entered(self, module: torch.nn.Module, _: Any) -> None:
        # A module that is no child (a loss, one made on the way) belongs to the module that calls it.
        outer = self._stack[-1] if self._stack else None
        self._stack.append(self.paths.get(id(module), outer))
        self._changed()

    def _left(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        self._stack.pop()
        self._changed()

    def _changed(self) -> None:
        # Nodes get rising numbers, recomputed ones too: what is made from now on belongs to this module.
        self._numbers.append(_next_number())
        self._innermost.append(self._stack[-1] if self._stack else None)


def _next_number() -> int:
    """The sequence number that the next autograd node of this thread gets."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
