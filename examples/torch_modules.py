"""PyTorch modules to weigh, each made by a function: its module, inputs, loss and optimizer.

`meshwright weigh examples.torch_modules:gpt_block --on 1xRTX-4090`. The functions are called for shapes
alone: the last one makes a model of 70 billion parameters in no memory.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn


class Cruncher(nn.Module):
    """Square linear layers without biases, then one output."""

    def __init__(self, dim: int, num_layers: int):
        """All layers are [dim, dim]."""
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, dim, bias=False) for _ in range(num_layers)])
        self.final = nn.Linear(dim, 1, bias=False)

    def forward(self, x):
        """[batch, dim] to [batch]."""
        for layer in self.layers:
            x = layer(x)
        return self.final(x).squeeze(-1)


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm and beside the residual."""

    def __init__(self, dim: int, num_heads: int):
        """`dim` is divided over the heads."""
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        """[batch, sequence, dim] to the same."""
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def cruncher():
    """Two layers of 64 x 64 and an output, AdaGrad."""
    return {
        "module": Cruncher(64, 2),
        "inputs": torch.randn(8, 64),
        "loss": lambda output: F.mse_loss(output, torch.zeros(8)),
        "optimizer": functools.partial(torch.optim.Adagrad, lr=0.01),
    }


def lenet():
    """LeNet on 28 x 28 images, as (module, *inputs)."""
    convolutions = (nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU())
    head = (nn.AvgPool2d(2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(*convolutions, *head), torch.randn(256, 1, 28, 28)


def gpt_block():
    """One block of GPT-2's small model under bf16 autocast, AdamW."""
    return {
        "module": Block(768, 12),
        "inputs": (torch.randn(4, 1024, 768),),
        "loss": lambda output: output.square().mean(),
        "optimizer": torch.optim.AdamW,
        "autocast": torch.bfloat16,
    }


def llama_70b():
    """Llama 3 70B from its configuration, in bf16, 8192 tokens; needs transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28_672, vocab_size=128_256,
    )  # fmt: skip
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    return {
        "module": LlamaForCausalLM(config).bfloat16(),
        "inputs": {"input_ids": tokens, "labels": tokens},
        "optimizer": torch.optim.AdamW,
    }


def llama_8b(sequence: int = 8192, checkpoint: bool = True):
    """Llama 3 8B as torchtitan trains it: FSDP2 in bf16 with fp32 shards; needs transformers.

    `meshwright weigh examples.torch_modules:llama_8b --on 64xH100 --layout fsdp=64`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14_336, vocab_size=128_256,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    if checkpoint:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(1, sequence, dtype=torch.long)

    def parallelize(module, mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        how = {"mesh": mesh["fsdp"], "mp_policy": policy, "reshard_after_forward": True}
        for layer in module.model.layers:
            fully_shard(layer, **how)
        fully_shard(module, **how)

    return {
        "module": module,
        "inputs": {"input_ids": tokens, "labels": tokens},
        "optimizer": torch.optim.AdamW,
        "parallelize": parallelize,
    }
