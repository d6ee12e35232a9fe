"""Llama 3 in plain PyTorch, and the plan by which torchtitan spreads it, for the account of its memory.

The model's parts follow the published architecture. What torchtitan does in `parallelize`, its loss and its
selective checkpointing is read from its source at the commits that its tables name
(https://github.com/pytorch/torchtitan); none of its code is here.

What `torch.compile` does is written by hand where it changes what is kept: RMS norms, rotations and gated
products are one kernel each; a product whose result no gradient needs is not kept; a compiled loss keeps its
logits in bfloat16 and two numbers for each row. An account of the module as it was written would miss these.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten
LAST_PRODUCT = 7  # of a block's seven; its result is only added to the residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run of torchtitan does besides its model.

    checkpoint: none | full | op; the last keeps attention and every other product.
    compiled: each block by `torch.compile`. compiled_loss: the loss too.
    groups: whether the embedding, and norm and head, are groups of FSDP's of their own.
    """

    checkpoint: str
    compiled: bool = False
    compiled_loss: bool = False
    groups: bool = False


class Llama(nn.Module):
    """The model with its loss, so that the logits are freed before the backward pass."""

    def __init__(
        self,
        num_layers: int,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        inner: int,
        vocabulary: int,
        length: int,
        recipe: Recipe,
    ) -> None:
        super().__init__()
        head = width // num_heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.register_buffer("angles", torch.empty(length, head // 2, dtype=torch.complex64))
        block = partial(Block, width, num_heads, num_kv_heads, inner, fused=recipe.compiled)
        self.blocks = nn.ModuleList(block() for _ in range(num_layers))
        self.norm = Norm(width, fused=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.compiled_loss = recipe.compiled_loss

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of tokens [batch, sequence] against labels of the same shape."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        logits = self.head(self.norm(x)).flatten(0, 1)
        if self.compiled_loss:
            return FusedLoss.apply(logits, labels.flatten(0, 1))
        return F.cross_entropy(logits.float(), labels.flatten(0, 1))


class Block(nn.Module):
    """Attention, then a gated MLP, each after a norm and beside the residual."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, inner: int, *, fused: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (Norm(width, fused) for _ in range(2))
        self.attention = Attention(width, num_heads, num_kv_heads, fused)
        self.mlp = Mlp(width, inner, fused)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x [batch, sequence, width] to the same."""
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.mlp(self.mlp_norm(h))


class Norm(nn.Module):
    """An RMS norm in float32, step by step or as one kernel."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.weight, self.fused = nn.Parameter(torch.ones(width)), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] to the same."""
        if self.fused:
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary positions; key heads are repeated, not shared."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, fused: bool) -> None:
        super().__init__()
        self.head_width, self.repeats, self.fused = width // num_heads, num_heads // num_kv_heads, fused
        narrow = num_kv_heads * self.head_width
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, narrow, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x [batch, sequence, width] to the same."""
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_width)) for layer in layers)
        rotate = Rotation.apply if self.fused else _rotated
        query, key = rotate(query, angles), rotate(key, angles)
        heads = (t.transpose(1, 2) for t in (query, *(_repeated(t, self.repeats) for t in (key, value))))
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """A gated MLP with SiLU."""

    def __init__(self, width: int, inner: int, fused: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down, self.fused = nn.Linear(inner, width, bias=False), fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] to the same."""
        gate, up = self.gate(x), self.up(x)
        return self.down(GatedProduct.apply(gate, up) if self.fused else F.silu(gate) * up)


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [batch, sequence, heads, head], as complex numbers turned by angles [sequence, head / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(3).type_as(x)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    return x if times == 1 else x[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3)


class Rotation(torch.autograd.Function):
    """The rotation as one kernel, which keeps the angles alone. Bytes only: its values are not right."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x [batch, sequence, heads, head] to the same."""
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Of x."""
        return gradient.clone(), None


class GatedProduct(torch.autograd.Function):
    """SiLU of one times the other as one kernel, which keeps both. Bytes only: its values are not right."""

    @staticmethod
    def forward(context: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Two tensors of one shape to the same."""
        context.save_for_backward(gate, up)
        return gate + up

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Of both."""
        gate, up = context.saved_tensors
        return gradient + gate, gradient + up


class FusedLoss(torch.autograd.Function):
    """A compiled cross entropy: it keeps its logits and two numbers a row; its gradient is in their format.

    Bytes only: its values are not right.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Logits [rows, vocabulary] and labels [rows] to one number."""
        context.save_for_backward(logits, logits.new_empty(2, logits.shape[0], dtype=torch.float32), labels)
        return logits.sum(dtype=torch.float32)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Of the logits."""
        return context.saved_tensors[0] * gradient, None


def spread(module: Llama, mesh: Any, recipe: Recipe) -> None:
    """Checkpoint the blocks, split them over `tensor` if the mesh has it, and shard all by FSDP2."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if "tensor" in mesh.mesh_dim_names:
        split(module, mesh["tensor"])
    if recipe.checkpoint != "none":
        chosen = {"context_fn": partial(_keeping, recipe.compiled)} if recipe.checkpoint == "op" else {}
        for place, block in enumerate(module.blocks):
            module.blocks[place] = checkpoint_wrapper(block, preserve_rng_state=False, **chosen)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = partial(fully_shard, mesh=mesh["fsdp"], mp_policy=policy)
    for block in module.blocks:
        shard(block, reshard_after_forward=recipe.groups or block is not module.blocks[-1])
    if recipe.groups:
        shard(module.embedding, reshard_after_forward=True)
        shard([module.norm, module.head], reshard_after_forward=False)
    shard(module, reshard_after_forward=None)  # which is not, for the root


def split(module: Llama, mesh: Any) -> None:
    """Split the products over a mesh of one axis, and the rest along the sequence; the loss is split too."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    along = Shard(1)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, ends)
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=along)
    whole = partial(PrepareModuleInput)
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": whole(input_layouts=(along, None), desired_input_layouts=(Replicate(), None)),
        **{f"attention.{name}": columns for name in ("query", "key", "value")},
        "attention.out": rows,
        "mlp_norm": SequenceParallel(),
        "mlp": whole(input_layouts=(along,), desired_input_layouts=(Replicate(),)),
        **{f"mlp.{name}": columns for name in ("gate", "up")},
        "mlp.down": rows,
    }
    for block in module.blocks:
        parallelize_module(block, mesh, plan)
    loss_parallel().__enter__()  # for the backward pass too; a script of its own leaves it on


def _keeping(compiled: bool) -> Any:
    """Contexts that keep attention and every other product; compiled blocks only what a gradient needs."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    kept = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    num_products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keeps = operation in kept
        if operation == aten.mm.default:
            num_products[context.is_recompute] += 1
            number = num_products[context.is_recompute]
            keeps = number % 2 == 1 and not (compiled and number == LAST_PRODUCT)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
