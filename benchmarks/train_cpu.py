"""Our train step against the same model in PyTorch, on the same cores, in one run, as a ratio.

Run: pip install -r requirements/torch-py311.txt; python benchmarks/train_cpu.py
The model is preset bytes-10m at batch 12 x 256: rotary positions, RMSNorm, erf or tanh GELU as the
preset has it, AdamW, fp32, in the preset's microbatches. PyTorch runs the batch at once, and also in the same
microbatches. A step of PyTorch's comes before and after each of ours, so that a slow moment hits both. The
ratio is the mean of those two over ours, round by round, so below 1 we are slower; the ratio to the faster
of PyTorch's two ways is `ratio`. Losses of the first step are compared on equal weights. Then a few steps of
each are traced, and say where its seconds go by class of work (`_step_classes`); a profiler slows both a
little. Writes records/DATE_train_cpu.toml.
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
from meshwright.trainer.step import build_step

ROUNDS, WARM_UP = 12, 2
LARGEST_DIFFERENCE = 1e-4  # of fp32 losses near 6, whose sums are ordered otherwise
AT_ONCE, IN_MICROBATCHES = "torch", "torch_in_microbatches"


class Ours:
    """Our step of a config with its state and a batch."""

    def __init__(self, config: RunConfig, tokens: np.ndarray) -> None:
        built = build_step(config, mesh_of([("data", 1)], jax.devices()[:1]))
        self.state, self.step = built.init(jnp.uint32(0)), built.step
        expected = built.batch["tokens"]
        rows = tokens.reshape(expected.shape).astype(np.int32)
        self.batch = {"tokens": jax.device_put(rows, expected.sharding)}

    def run(self) -> float:
        """Take a step and return its loss."""
        self.state, metrics = self.step(self.state, self.batch)
        return float(jax.block_until_ready(metrics)["loss"])


class Theirs:
    """The same in PyTorch, from our parameters; `rows` of the batch at a time."""

    def __init__(
        self, model: TransformerModel, tokens: np.ndarray, parameters: Any, rows: int | None = None
    ) -> None:
        self.decoder = Decoder(model, tokens.shape[1] - 1)
        copy_weights(parameters, self.decoder)
        self.microbatches = torch.from_numpy(tokens).split(rows or len(tokens))
        weights = self.decoder.parameters()
        self.optimizer = torch.optim.AdamW(weights, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def run(self) -> float:
        """Take a step and return its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for tokens in self.microbatches:
            loss = self.decoder(tokens) / len(self.microbatches)
            loss.backward()
            total += float(loss.detach())
        with torch.profiler.record_function(OPTIMIZER):
            torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
            self.optimizer.step()
        return total


def timed(trainer: Ours | Theirs) -> tuple[float, float]:
    """Take a step and return its loss and its seconds."""
    start = time.perf_counter()
    loss = trainer.run()
    return loss, time.perf_counter() - start


def interleaved(
    ours: Ours, others: dict[str, Theirs]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each step after the warm-up, by who ran it, and the ratios to ours by the other.

    Raises:
        AssertionError: the loss of another's first step is not that of ours.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *others)}
    ratios: dict[str, list[float]] = {name: [] for name in others}
    first_loss: float | None = None  # of ours
    for count in range(WARM_UP + ROUNDS):
        for name, theirs in others.items():
            (their_loss, first), (our_loss, own), (_, second) = timed(theirs), timed(ours), timed(theirs)
            first_loss = our_loss if first_loss is None else first_loss
            if count == 0:
                difference = abs(their_loss - first_loss)
                assert difference < LARGEST_DIFFERENCE, f"{name} begins with {their_loss}, ours {first_loss}"
            if count >= WARM_UP:
                seconds["ours"].append(own)
                seconds[name] += [first, second]
                ratios[name].append((first + second) / 2 / own)
    return seconds, ratios


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
    rows = config.batch.microbatch_sequences
    others = {
        AT_ONCE: Theirs(model, tokens, ours.state["parameters"]),
        IN_MICROBATCHES: Theirs(model, tokens, ours.state["parameters"], rows),
    }
    seconds, ratios = interleaved(ours, others)
    faster = min(ratios, key=lambda name: statistics.median(ratios[name]))
    facts = {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": {**spread(ratios[faster]), "to": faster, "rounds": ROUNDS},
        "ratios": {name: spread(values) for name, values in ratios.items()},
        "microbatch_sequences": rows,
        "ours_seconds_by_class": our_seconds_by_class(weighing, ours.run),
        "torch_seconds_by_class": torch_seconds_by_class(others[faster].run),
        "threads": torch.get_num_threads(),
    }
    for key, value in facts.items():
        print(key, value)
    packages = ("jax", "jaxlib", "torch")
    print("wrote", write_record("train_cpu", "python benchmarks/train_cpu.py", packages, facts, {}))


if __name__ == "__main__":
    main()
