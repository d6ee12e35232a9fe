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

os.environ["JAX_PLATFORMS"] = "cpu"  # a CUDA plugin without a GPU complains

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _record import write_record
from _torch_decoder import Decoder, copy_weights

from meshwright.config import TransformerModel, load_config
from meshwright.sharding import mesh_of
from meshwright.step import build_step

ROUNDS, WARM_UP = 8, 2


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
