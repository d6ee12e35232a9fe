"""MPT in plain PyTorch, and how LLM Foundry spreads it by FSDP, for the time of its eager step.

The parts follow the published architecture (https://github.com/mosaicml/llm-foundry): no biases, layer norms
in the computation's format, one product for queries, keys and values, GELU, the table of tokens used again
for the logits, learned positions. Its fused cross entropy writes the logits' gradient in their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Mpt(nn.Module):
    """The model with its loss."""

    def __init__(self, num_layers: int, width: int, num_heads: int, inner: int, vocabulary: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, inner) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of tokens [batch, sequence] against labels of the same shape."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)
        return InPlaceLoss.apply(logits, labels.flatten())


class Block(nn.Module):
    """Attention, then an MLP, each after a norm and beside the residual."""

    def __init__(self, width: int, num_heads: int, inner: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.joint, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, sequence, width] to the same."""
        heads = self.joint(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        seen = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class InPlaceLoss(torch.autograd.Function):
    """A fused cross entropy that writes its gradient over the logits. Shapes and bytes only."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Logits [rows, vocabulary] and labels [rows] to one number."""
        context.save_for_backward(logits)
        return logits.sum(dtype=torch.float32)  # which reads as many bytes

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Of the logits."""
        return context.saved_tensors[0].mul_(0), None  # which reads and writes as many bytes


def spread(module: Mpt, mesh: Any, *, repeats: bool, reduced: torch.dtype) -> None:
    """Checkpoint the blocks if their forward pass is repeated, and shard them and the root by FSDP2."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if repeats:
        for place, block in enumerate(module.blocks):
            module.blocks[place] = checkpoint_wrapper(block, preserve_rng_state=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    shard = partial(fully_shard, mesh=mesh["fsdp"], mp_policy=policy)
    for block in module.blocks:
        shard(block, reshard_after_forward=True)
    shard(module)
