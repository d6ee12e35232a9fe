"""Our train step against the same model in PyTorch, on the same cores, in one run, as a ratio.

Run: pip install -r requirements/torch-py311.txt; python benchmarks/train_cpu.py
The model is preset bytes-10m at batch 12 x 256: rotary positions, RMSNorm, erf or tanh GELU as the
preset has it, AdamW, fp32. Steps of the two are interleaved, so that a slow moment hits both; the
ratio is torch's seconds over ours, round by round, so below 1 we are slower. Losses of the first step
are compared on equal weights. Then a few steps of each are traced, and say where its seconds go by class
of work (`_step_classes`); a profiler slows both a little. Writes records/DATE_train_cpu.toml.
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
from _step_classes import OPTIMIZER, our_seconds_by_class, torch_seconds_by_class
from _torch_decoder import Decoder, copy_weights

import meshwright as mw
from meshwright.config import RunConfig, TransformerModel, load_config
from meshwright.sharding import mesh_of
from meshwright.step import build_step

ROUNDS, WARM_UP = 8, 2


class Ours:
    """Our step of a config with its state and a batch."""

    def __init__(self, config: RunConfig, tokens: np.ndarray) -> None:
        built = build_step(config, mesh_of([("data", 1)], jax.devices()[:1]))
        self.state, self.step = built.init(jnp.uint32(0)), built.step
        rows = tokens[None].astype(np.int32)
        self.batch = {"tokens": jax.device_put(rows, built.batch["tokens"].sharding)}

    def run(self) -> float:
        """Take a step and return its loss."""
        self.state, metrics = self.step(self.state, self.batch)
        return float(jax.block_until_ready(metrics)["loss"])


class Theirs:
    """The same in PyTorch, from our parameters."""

    def __init__(self, model: TransformerModel, tokens: np.ndarray, parameters: Any) -> None:
        self.decoder = Decoder(model, tokens.shape[1] - 1)
        copy_weights(parameters, self.decoder)
        self.tokens = torch.from_numpy(tokens)
        weights = self.decoder.parameters()
        self.optimizer = torch.optim.AdamW(weights, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def run(self) -> float:
        """Take a step and return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.decoder(self.tokens)
        loss.backward()
        with torch.profiler.record_function(OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
            self.optimizer.step()
        return float(loss.detach())


def interleaved(ours: Ours, theirs: Theirs) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the first losses of both, and the seconds of each step after the warm-up."""
    seconds: dict[str, list[float]] = {"ours": [], "torch": []}
    first: dict[str, float] = {}
    for _ in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        our_loss = ours.run()
        middle = time.perf_counter()
        torch_loss = theirs.run()
        seconds["ours"].append(middle - start)
        seconds["torch"].append(time.perf_counter() - middle)
        first = first or {"ours": our_loss, "torch": torch_loss}
    assert abs(first["ours"] - first["torch"]) < 1e-4, f"the models differ: {first}"
    return first, {name: values[WARM_UP:] for name, values in seconds.items()}


def spread(values: list[float]) -> dict[str, float]:
    """The median, the least and the most."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def main() -> None:
    """Interleave steps of both, trace some of each, print and record seconds and their ratio."""
    config = load_config("bytes-10m", ["batch.sequences=12"])
    model = config.model
    assert isinstance(model, TransformerModel)
    assert (model.norm, model.mlp, model.activation, model.bias) == ("rms", "plain", "gelu", False)
    tokens = np.random.default_rng(0).integers(0, 256, (12, config.batch.sequence_length + 1))
    weighing = mw.weigh(config, on="1xCPU")  # before anything is timed
    ours = Ours(config, tokens)
    theirs = Theirs(model, tokens, ours.state["parameters"])
    first, timed = interleaved(ours, theirs)
    ratios = [t / o for t, o in zip(timed["torch"], timed["ours"], strict=True)]
    facts = {
        "first_loss": first,
        "seconds": {name: spread(values) for name, values in timed.items()},
        "ratio": {**spread(ratios), "rounds": ROUNDS},
        "ours_seconds_by_class": our_seconds_by_class(weighing, ours.run),
        "torch_seconds_by_class": torch_seconds_by_class(theirs.run),
        "threads": torch.get_num_threads(),
    }
    for key, value in facts.items():
        print(key, value)
    packages = ("jax", "jaxlib", "torch")
    print("wrote", write_record("train_cpu", "python benchmarks/train_cpu.py", packages, facts, {}))


if __name__ == "__main__":
    main()
