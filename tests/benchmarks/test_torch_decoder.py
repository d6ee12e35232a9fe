import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.trainer.step import build_step

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _torch_decoder import Decoder, adamw_of, copy_weights  # noqa: E402

GPT2 = [
    "model.num_layers=2", "model.embed_dim=32", "model.num_heads=2", "model.num_kv_heads=2",
    "model.head_dim=16", "model.mlp_dim=64", "model.vocab_size=97", "model.max_positions=24",
]  # fmt: skip
LLAMA = [
    "model.num_layers=2", "model.embed_dim=32", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=8", "model.mlp_dim=64", "model.vocab_size=97",
]  # fmt: skip
COMMON = [
    "batch.sequences=4", "batch.sequence_length=16", "precision=fp32", "layout=data=-1", "steps=10",
    "schedule={kind='constant', warmup_steps=0}", "optimizer.learning_rate=1e-2",
]  # fmt: skip
CASES = {
    "gpt2-124m": [*GPT2, "batch.microbatch_sequences=2"],
    "llama3-8b": [*LLAMA, "batch.microbatch_sequences=2"],
    "llama3-8b, tied and unrolled": [
        *LLAMA, "model.tied_embeddings=true", "model.unroll=true", "batch.microbatch_sequences=none",
    ],
}  # fmt: skip


def both(case, mesh):
    """Our step with its state and batch, and the PyTorch model with the same weights and tokens."""
    config = load_config(case.split(",")[0], [*COMMON, *CASES[case]])
    built = build_step(config, mesh(data=1))
    state = built.init(jnp.uint32(0))
    # Moved off their first values, so that biases are not zeros and scales not ones.
    moved = jax.tree.map(
        lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), state["parameters"]
    )
    state = {**state, "parameters": jax.device_put(moved, jax.tree.map(lambda p: p.sharding, moved))}
    shape = built.batch["tokens"].shape
    tokens = np.random.default_rng(0).integers(0, 97, shape)
    theirs = Decoder(config.model, config.batch.sequence_length)
    copy_weights(state["parameters"], theirs)
    batch = {"tokens": jax.device_put(tokens.astype(np.int32), built.batch["tokens"].sharding)}
    return config, built, state, batch, theirs, torch.from_numpy(tokens)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.wide) for case in CASES],
)
def test_losses_are_ours_before_and_after_updates(case, mesh):
    config, built, state, batch, theirs, tokens = both(case, mesh)
    assert sum(p.numel() for p in theirs.parameters()) == config.model.num_parameters
    optimizer = adamw_of(theirs, config.optimizer)
    for _ in range(3):
        state, metrics = built.step(state, batch)
        optimizer.zero_grad()
        losses = [theirs(rows) for rows in tokens]
        loss = sum(losses) / len(losses)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        assert loss.item() == pytest.approx(float(metrics["loss"]), abs=1e-4)
        assert norm.item() == pytest.approx(float(metrics["gradient_norm"]), rel=1e-3)


def test_a_matrix_of_another_shape_is_refused(mesh):
    config, _, state, _, _, _ = both("llama3-8b", mesh)
    other = Decoder(config.model.model_copy(update={"mlp_dim": 32}), 16)
    with pytest.raises(AssertionError, match=r"\(32, 32\) is not \(64, 32\)"):
        copy_weights(state["parameters"], other)
