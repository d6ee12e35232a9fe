"""Our train step against the same model in PyTorch, on the same cores, in one run, as a ratio.

Run: pip install -r requirements/torch-py311.txt; python benchmarks/train_cpu.py
The model is preset bytes-10m at batch 12 x 256: rotary positions, RMSNorm, erf or tanh GELU as the
preset has it, AdamW, fp32. Steps of the two are interleaved, so that a slow moment hits both; the
ratio is torch's seconds over ours, round by round, so below 1 we are slower. Losses of the first step
are compared on equal weights. Writes records/DATE_train_cpu.toml.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # a CUDA plugin without a GPU complains

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _record import write_record
from torch.nn import functional as F

from meshwright.config import TransformerModel, load_config
from meshwright.sharding import mesh_of
from meshwright.step import build_step

ROUNDS, WARM_UP = 8, 2


class Block(torch.nn.Module):
    """One block, as `meshwright.models.transformer` has it."""

    def __init__(self, c: TransformerModel) -> None:
        super().__init__()
        self.heads, self.theta = c.num_heads, c.rope_theta
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(c.embed_dim, eps=c.norm_epsilon) for _ in range(2))
        self.qkv = torch.nn.Linear(c.embed_dim, 3 * c.embed_dim, bias=False)
        self.out = torch.nn.Linear(c.embed_dim, c.embed_dim, bias=False)
        self.up = torch.nn.Linear(c.embed_dim, c.mlp_dim, bias=False)
        self.down = torch.nn.Linear(c.mlp_dim, c.embed_dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [batch, sequence, embed] to the same."""
        b, s, e = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, e // self.heads).permute(2, 0, 3, 1, 4)
        q, k = (_rotated(t, cos, sin) for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, e))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Decoder(torch.nn.Module):
    """The whole model, with the loss."""

    def __init__(self, c: TransformerModel, length: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(c.vocab_size, c.embed_dim)
        self.blocks = torch.nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = torch.nn.RMSNorm(c.embed_dim, eps=c.norm_epsilon)
        self.head = (
            self.embedding if c.tied_embeddings else torch.nn.Linear(c.embed_dim, c.vocab_size, bias=False)
        )
        half = c.head_dim // 2
        frequency = c.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency[None]
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of tokens [batch, sequence + 1]."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.norm(x) @ self.head.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def copy_weights(ours: Any, theirs: Decoder) -> None:
    """Give the PyTorch model the weights of ours; its matrices are [out, in]."""

    def put(target: torch.Tensor, value: Any) -> None:
        with torch.no_grad():
            target.copy_(torch.from_numpy(np.array(value)).reshape(target.shape))

    put(theirs.embedding.weight, ours["embedding"])
    put(theirs.norm.weight, ours["final_norm"]["scale"])
    if "head" in ours:
        put(theirs.head.weight, ours["head"])
    for block, layer in zip(theirs.blocks, ours["layers"], strict=True):
        embed = layer["attention"]["query"].shape[0]
        matrices = [np.array(layer["attention"][n]).reshape(embed, -1).T for n in ("query", "key", "value")]
        put(block.qkv.weight, np.concatenate(matrices))
        put(block.out.weight, np.array(layer["attention"]["output"]).reshape(-1, embed).T)
        put(block.up.weight, np.array(layer["mlp"]["up"]).T)
        put(block.down.weight, np.array(layer["mlp"]["down"]).T)
        put(block.norms[0].weight, layer["attention_norm"]["scale"])
        put(block.norms[1].weight, layer["mlp_norm"]["scale"])


def main() -> None:
    """Interleave steps of both, print and record seconds and their ratio."""
    config = load_config("bytes-10m", ["batch.sequences=12"])
    model = config.model
    assert isinstance(model, TransformerModel)
    assert (model.norm, model.mlp, model.activation, model.bias) == ("rms", "plain", "gelu", False)
    built = build_step(config, mesh_of([("data", 1)], jax.devices()[:1]))
    state = built.init(jnp.uint32(0))
    tokens = np.random.default_rng(0).integers(0, 256, (12, config.batch.sequence_length + 1))
    batch = {"tokens": jax.device_put(tokens[None].astype(np.int32), built.batch["tokens"].sharding)}
    theirs = Decoder(model, config.batch.sequence_length)
    copy_weights(state["parameters"], theirs)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    torch_tokens = torch.from_numpy(tokens)

    def torch_step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = theirs(torch_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    first: dict[str, float] = {}
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        state, metrics = built.step(state, batch)
        ours = float(metrics["loss"])
        middle = time.perf_counter()
        torch_loss = torch_step()
        seconds["ours"].append(middle - start)
        seconds["torch"].append(time.perf_counter() - middle)
        first = first or {"ours": ours, "torch": torch_loss}
    assert abs(first["ours"] - first["torch"]) < 1e-4, f"the models differ: {first}"
    timed = {name: values[WARM_UP:] for name, values in seconds.items()}
    ratios = [t / o for t, o in zip(timed["torch"], timed["ours"], strict=True)]
    facts = {
        "first_loss": first,
        "seconds": {
            n: {"median": statistics.median(v), "low": min(v), "high": max(v)} for n, v in timed.items()
        },
        "ratio": {
            "median": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "rounds": ROUNDS,
        },
        "threads": torch.get_num_threads(),
    }
    for key, value in facts.items():
        print(key, value)
    print(
        "wrote",
        write_record("train_cpu", "python benchmarks/train_cpu.py", ("jax", "jaxlib", "torch"), facts, {}),
    )


if __name__ == "__main__":
    main()
