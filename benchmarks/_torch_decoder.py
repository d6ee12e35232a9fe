"""`trainer.models.transformer` written plainly in PyTorch: what the benchmarks of training compare with.

Every configuration of `TransformerModel` but dropout: LayerNorm or RMSNorm, learned or rotary positions,
plain or gated MLP, biases or none, a tied head or its own, shared key heads. The queries, keys and values
are one product; attention is PyTorch's own. What crosses blocks is in the format of the computation, as
ours is, and norms are in float32; the logits are made whole, as most PyTorch code does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from meshwright.config import AdamWOptimizer, TransformerModel

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
Product = Callable[[torch.Tensor, torch.nn.Linear], torch.Tensor]


def plain_product(x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
    """x [..., in] to [..., out], in the format that autocast chooses."""
    return linear(x)


def _norm(c: TransformerModel) -> torch.nn.Module:
    if c.norm == "layer":
        return torch.nn.LayerNorm(c.embed_dim, eps=c.norm_epsilon, bias=c.bias)
    return torch.nn.RMSNorm(c.embed_dim, eps=c.norm_epsilon)


class Block(torch.nn.Module):
    """One block, as `meshwright.trainer.models.transformer` has it."""

    def __init__(self, c: TransformerModel, product: Product) -> None:
        super().__init__()
        self.product, self.head_dim = product, c.head_dim
        self.widths = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        self.shares_keys = c.num_heads != c.num_kv_heads
        self.activation = ACTIVATIONS[c.activation]
        self.norms = torch.nn.ModuleList(_norm(c) for _ in range(2))
        linear = partial(torch.nn.Linear, bias=c.bias)
        self.qkv = linear(c.embed_dim, sum(self.widths))
        self.out = linear(self.widths[0], c.embed_dim)
        self.up = linear(c.embed_dim, c.mlp_dim)
        self.gate = linear(c.embed_dim, c.mlp_dim) if c.mlp == "gated" else None
        self.down = linear(c.mlp_dim, c.embed_dim)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """x [batch, sequence, embed] to the same; `angles` are cosines and sines, None without rotation."""
        b, s, _ = x.shape
        parts = self.product(self.norms[0](x.float()), self.qkv).split(self.widths, dim=-1)
        q, k, v = (part.view(b, s, -1, self.head_dim).transpose(1, 2) for part in parts)
        if angles is not None:
            q, k = (_rotated(t, *angles) for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shares_keys)
        x = x + self.product(attended.transpose(1, 2).reshape(b, s, -1), self.out)
        h = self.norms[1](x.float())
        if self.gate is None:
            hidden = self.activation(self.product(h, self.up))
        else:
            hidden = self.activation(self.product(h, self.gate)) * self.product(h, self.up)
        return x + self.product(hidden, self.down)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Decoder(torch.nn.Module):
    """The whole model, with the loss.

    Args:
        length: of the sequences.
        dtype: of the computation; the parameters are float32 always.
        product: of the blocks; the head's is plain.
    """

    def __init__(
        self,
        c: TransformerModel,
        length: int,
        dtype: torch.dtype = torch.float32,
        product: Product = plain_product,
    ) -> None:
        super().__init__()
        assert c.dropout == 0, "this model has no dropout"
        self.dtype = dtype
        self.embedding = torch.nn.Embedding(c.vocab_size, c.embed_dim)
        self.positions = None
        if c.max_positions is not None:
            self.positions = torch.nn.Parameter(torch.empty(c.max_positions, c.embed_dim))
        self.blocks = torch.nn.ModuleList(Block(c, product) for _ in range(c.num_layers))
        self.norm = _norm(c)
        self.head = (
            self.embedding if c.tied_embeddings else torch.nn.Linear(c.embed_dim, c.vocab_size, bias=False)
        )
        if c.rope_theta is not None:
            half = c.head_dim // 2
            frequency = c.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
            angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency[None]
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of tokens [batch, sequence + 1]."""
        x, angles = self.embedding(tokens[:, :-1]).to(self.dtype), None
        if self.positions is None:
            angles = self.cos, self.sin
        else:
            x = x + self.positions[: x.shape[1]].to(self.dtype)
        for block in self.blocks:
            x = block(x, angles)
        logits = F.linear(self.norm(x.float()), self.head.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def adamw_of(model: Decoder, chosen: AdamWOptimizer, *, fused: bool | None = None) -> torch.optim.AdamW:
    """PyTorch's AdamW as the config has it: decay falls on matrices and tables, not on norms and biases."""
    assert chosen.weight_decay_on == "matrices", "all parameters are decayed alike here only on matrices"
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": chosen.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (chosen.beta1, chosen.beta2)
    return torch.optim.AdamW(groups, lr=chosen.learning_rate, betas=betas, eps=chosen.epsilon, fused=fused)


def copy_weights(ours: Any, theirs: Decoder) -> None:
    """Give the PyTorch model the parameters of ours; its matrices are [out, in]."""
    ours = {name: _on_host(part) for name, part in ours.items()}
    _put(theirs.embedding.weight, ours["embedding"])
    if theirs.positions is not None:
        _put(theirs.positions, ours["positions"])
    if "head" in ours:
        _put(theirs.head.weight, ours["head"])
    _put_norm(theirs.norm, ours["final_norm"])
    for block, layer in zip(theirs.blocks, _layers(ours["layers"]), strict=True):
        assert isinstance(block, Block)
        for norm, name in zip(block.norms, ("attention_norm", "mlp_norm"), strict=True):
            _put_norm(norm, layer[name])
        attention, mlp = layer["attention"], layer["mlp"]
        embed = block.qkv.in_features
        names = ("query", "key", "value")
        _put(block.qkv.weight, np.concatenate([attention[n].reshape(embed, -1).T for n in names]))
        _put(block.out.weight, attention["output"].reshape(-1, embed).T)
        if block.qkv.bias is not None:
            _put(block.qkv.bias, np.concatenate([attention[f"{n}_bias"].reshape(-1) for n in names]))
            _put(block.out.bias, attention["output_bias"])
        for linear, name in ((block.up, "up"), (block.gate, "gate"), (block.down, "down")):
            if linear is not None:
                _put(linear.weight, mlp[name].T)
                if linear.bias is not None:
                    _put(linear.bias, mlp[f"{name}_bias"])


def _on_host(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _on_host(each) for name, each in part.items()}
    return [_on_host(each) for each in part] if isinstance(part, list) else np.array(part)


def _layers(layers: Any) -> Iterator[Any]:
    """Each layer's parameters, whether they are kept apart or stacked."""
    if isinstance(layers, list):
        yield from layers
        return
    for index in range(len(layers["attention_norm"]["scale"])):
        yield {g: {name: value[index] for name, value in group.items()} for g, group in layers.items()}


def _put(target: torch.Tensor, value: np.ndarray) -> None:
    assert target.shape == value.shape, f"{tuple(target.shape)} is not {value.shape}"
    with torch.no_grad():
        target.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _put_norm(norm: torch.nn.Module, group: dict[str, np.ndarray]) -> None:
    for name, value in group.items():
        _put(getattr(norm, {"scale": "weight"}.get(name, name)), value)
