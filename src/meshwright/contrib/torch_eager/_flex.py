"""Run `flex_attention` as the one kernel that `torch.compile` makes of it, which a CPU does not have.

It keeps queries, keys, values, its result and a number for each row, and no scores. Its products are counted
for the pairs of positions that the mask's function allows: the function is called on plain numbers, without
the model. A mask that depends on data, or that takes no arrays of positions, counts whole.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.contrib.jax_steps import USERS_FAILURES
from meshwright.errors import InputError

MOST_PAIRS = 2**26  # on which a mask's function is called; of longer sequences every third, fifth, ... row
ROWS_AT_ONCE = 2**24
WHOLE = "A mask of flex attention that depends on data, or takes no arrays of positions, counts whole."
NO_LOWER_END = (
    "flex attention's mask depends on data, so its products count whole, and the mask may leave out any part "
    "of them"
)
_OWN = torch.library.Library("meshwright", "FRAGMENT")
_OWN.define("flex_attention(Tensor query, Tensor key, Tensor value, int pairs) -> (Tensor, Tensor)")
_OWN.define(
    "flex_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, int pairs) -> (Tensor, Tensor, Tensor)"
)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    order = sorted(range(4), key=lambda dim: query.stride(dim), reverse=True)
    sizes = (*query.shape[:-1], value.shape[-1])
    dense = query.new_empty([sizes[dim] for dim in order])
    out = dense.permute([order.index(dim) for dim in range(4)])  # it lies as the queries do
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_OWN.impl("flex_attention", _forward, "Meta")
_OWN.impl("flex_attention_backward", _backward, "Meta")


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsumexp = torch.ops.meshwright.flex_attention(query, key, value, pairs)
        context.save_for_backward(query, key, value, out, logsumexp)
        context.mark_non_differentiable(logsumexp)
        context.pairs = pairs
        return out, logsumexp

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = context.saved_tensors
        found = torch.ops.meshwright.flex_attention_backward(gradients[0], *saved, context.pairs)
        return *found, None


@contextlib.contextmanager
def fused_flex_attention(note: Callable[[str], None]) -> Iterator[None]:
    """Run `flex_attention` as its kernel in the block; `note` is told what is not exact."""
    known: dict[Any, int | None] = {}

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any,
        block_mask: tuple[Any, ...],
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if any(tensor.requires_grad for tensor in _captured(score_mod)):
            raise InputError(
                "flex attention's score_mod uses a tensor that requires a gradient, which is not counted",
                hint="detach that tensor, or add the bias in attention written as products",
            )
        mask = block_mask[-1]
        batch, heads, queries = query.shape[:3]
        sizes = (batch, heads, queries, key.shape[-2])
        if (mask, sizes) not in known:
            known[mask, sizes] = allowed_pairs(mask, *sizes)
        pairs = known[mask, sizes]
        if pairs is None:
            note(WHOLE)
            pairs = math.prod(sizes)
        apply: Any = _FlexAttention.apply
        out, logsumexp = apply(query, key, value, pairs)
        return out, logsumexp, logsumexp

    module: Any = flex
    replaced = {
        "flex_attention_hop": attend,
        "_validate_device": lambda *_: None,  # which refuses gradients on a CPU
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # it would compile itself
    }
    with mock.patch.multiple(module, **replaced):
        yield


def _captured(function: Any) -> list[torch.Tensor]:
    """Return the tensors that a function closes over, and those that it reads from a module that it holds."""
    found: list[torch.Tensor] = []
    waiting, seen = [function], {id(function)}
    while waiting:
        each = waiting.pop()
        read = each.__code__.co_names if inspect.isfunction(each) else ()
        for held in inspect.getclosurevars(each).nonlocals.values() if inspect.isfunction(each) else ():
            if isinstance(held, torch.Tensor):
                found.append(held)
            elif isinstance(held, torch.nn.Module):
                found += [tensor for name, tensor in held.named_parameters(recurse=False) if name in read]
            elif id(held) not in seen:  # functions may refer to themselves
                seen.add(id(held))
                waiting.append(held)
    return found


def allowed_pairs(mask: Any, batch: int, heads: int, queries: int, keys: int) -> int | None:
    """Return the number of pairs of positions that a mask's function allows; None if it cannot be told.

    Above `MOST_PAIRS` only rows at equal distances are looked at.

    >>> allowed_pairs(lambda b, h, q, k: q >= k, 2, 3, 4, 4)
    60
    """
    if mask is flex.noop_mask:
        return batch * heads * queries * keys
    step = max(queries * keys // MOST_PAIRS, 1)
    step += 1 - step % 2  # of an odd number of rows the middle one is the mean, if the mask is causal
    found = looked = 0
    try:
        with _disable_current_modes(), torch.device("cpu"):
            b = torch.arange(batch)[:, None, None, None]
            h = torch.arange(heads)[None, :, None, None]
            k = torch.arange(keys)[None, None, None, :]
            rows = torch.arange(min(step // 2, queries - 1), queries, step)
            for part in rows.split(max(ROWS_AT_ONCE // keys, 1)):
                allowed = mask(b, h, part[None, None, :, None], k)
                if type(allowed) is not torch.Tensor:
                    return None
                shape = torch.broadcast_shapes(allowed.shape, (1, 1, len(part), keys))
                copies = batch * heads // (shape[0] * shape[1])
                found += copies * int(allowed.expand(shape).sum())
                looked += len(part)
    except USERS_FAILURES:
        return None
    return round(found * queries / looked)
