"""Small modules and the ways to spread them: run by real processes (`mesh_rank`), and weighed without."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn


class Perceptron(nn.Module):
    """A gated MLP with its norm, beside the residual."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, inner), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Attention(nn.Module):
    """Attention with its norm, beside the residual."""

    def __init__(self, width: int, num_heads: int, causal: bool):
        super().__init__()
        self.head, self.causal = width // num_heads, causal
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        normed = self.norm(x)
        parts = (
            layer(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        return x + self.out(seen.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, width: int, num_heads: int, inner: int, causal: bool):
        super().__init__()
        self.attention = Attention(width, num_heads, causal)
        self.mlp = Perceptron(width, inner)

    def forward(self, x):
        return self.mlp(self.attention(x))


class Perceptrons(nn.Module):
    """A stack whose odd widths make uneven shards."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Perceptron(251, 515) for _ in range(3)])
        self.head = nn.Linear(251, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Decoder(nn.Module):
    """A language model with a head of its own."""

    def __init__(self, num_layers=3, width=128, vocabulary=512):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, 4, 4 * width, causal=True) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TiedDecoder(Decoder):
    """A language model whose head is its embedding table."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Patches(nn.Module):
    """A vision transformer of few patches."""

    def __init__(self, width=96):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.places = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList([Block(width, 3, 4 * width, causal=False) for _ in range(3)])
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Convolution(nn.Module):
    """A residual block with the statistics of the batch."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(2)])

    def forward(self, x):
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


class Convolutions(nn.Module):
    """A residual network."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Convolution(width) for _ in range(3)))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Mixed(nn.Module):
    """Two towers of different blocks, one of them shared by two inputs."""

    def __init__(self, width=96):
        super().__init__()
        self.encoder = nn.ModuleList([Block(width, 3, 2 * width, causal=False) for _ in range(2)])
        self.decoder = nn.ModuleList([Block(width, 3, 4 * width, causal=True) for _ in range(2)])
        self.join = nn.Linear(2 * width, width)

    def forward(self, x):
        left = right = x
        for block in self.encoder:
            left = block(left)
        for block in self.decoder:
            right = block(right)
        return self.join(torch.cat([left, right], -1))


def tokens():
    return torch.zeros(4, 128, dtype=torch.long)


def image():
    return torch.zeros(8, 3, 64, 64)


MODELS = {
    "perceptrons": (Perceptrons, lambda: torch.zeros(256, 251)),
    "decoder": (Decoder, tokens),
    "tied": (TiedDecoder, tokens),
    "patches": (Patches, image),
    "convolutions": (Convolutions, lambda: torch.zeros(8, 3, 32, 32)),
    "mixed": (Mixed, lambda: torch.zeros(4, 128, 96)),
}


def _layers(module):
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    return [block for each in lists for block in each if isinstance(block, Block | Perceptron | Convolution)]


def _shard(module, mesh, **how):
    from torch.distributed.fsdp import fully_shard

    for block in _layers(module):
        if not hasattr(block, "unshard"):
            fully_shard(block, mesh=mesh["fsdp"], **how)
    fully_shard(module, mesh=mesh["fsdp"], **how)


def _checkpoint(module):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    blocks = {id(block) for block in _layers(module)}
    apply_activation_checkpointing(module, check_fn=lambda each: id(each) in blocks)


def _split(module, mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if isinstance(module, Convolutions):  # its head is its only linear layer
        parallelize_module(module.head, mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))
    for block in module.modules():
        if isinstance(block, Perceptron):
            plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
            if isinstance(module, Perceptrons):  # the shards are uneven, which DTensor forgets between layers
                plan = dict.fromkeys(("up", "gate"), ColwiseParallel(output_layouts=Replicate()))
            parallelize_module(block, mesh["tensor"], plan)


def fsdp(module, mesh):
    _shard(module, mesh, reshard_after_forward=True)


def fsdp_checkpoint(module, mesh):
    _checkpoint(module)
    _shard(module, mesh, reshard_after_forward=True)


def fsdp_kept(module, mesh):
    _shard(module, mesh, reshard_after_forward=False)


def fsdp_bf16(module, mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    _shard(module, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def tensor(module, mesh):
    _split(module, mesh)


def fsdp_tensor(module, mesh):
    _split(module, mesh)
    _shard(module, mesh, reshard_after_forward=True)


def replicated(module, mesh):
    return nn.parallel.DistributedDataParallel(module, process_group=mesh["data"].get_group())


def hybrid(module, mesh):
    from torch.distributed.fsdp import fully_shard

    for block in _layers(module):
        fully_shard(block, mesh=mesh["data", "fsdp"])
    fully_shard(module, mesh=mesh["data", "fsdp"])


# By name: the plan, and the mesh on 2 and on 4 ranks.
PLANS = {
    "fsdp": (fsdp, {2: "fsdp=2", 4: "fsdp=4"}),
    "checkpoint": (fsdp_checkpoint, {2: "fsdp=2", 4: "fsdp=4"}),
    "kept": (fsdp_kept, {2: "fsdp=2", 4: "fsdp=4"}),
    "bf16": (fsdp_bf16, {2: "fsdp=2", 4: "fsdp=4"}),
    "tensor": (tensor, {2: "tensor=2", 4: "tensor=4"}),
    "fsdp_tensor": (fsdp_tensor, {4: "fsdp=2,tensor=2"}),
    "data": (replicated, {2: "data=2", 4: "data=4"}),
    "hybrid": (hybrid, {4: "data=2,fsdp=2"}),
}


def make(model: str = "decoder", plan: str = "fsdp"):
    kind, inputs = MODELS[model]
    return {
        "module": kind(),
        "inputs": (inputs(),),
        "loss": lambda output: output.float().square().mean(),
        "optimizer": functools.partial(torch.optim.AdamW, foreach=False),
        "parallelize": PLANS[plan][0],
    }
