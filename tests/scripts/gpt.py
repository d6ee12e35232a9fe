"""Train a small GPT as nanoGPT does: an evaluation loop first, `loss.item()`, a checkpoint of the best."""

import os
import pickle
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

out_dir = sys.argv[1]
eval_interval, eval_iters, log_interval, max_iters = 200, 5, 10, 600
batch_size, block_size, vocab_size, n_layer, n_head, n_embd = 128, 128, 512, 2, 4, 128

mesh = Mesh(np.array(jax.devices()), ("data",))
everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
data = np.random.default_rng(1).integers(0, vocab_size, 100_000).astype(np.uint16)


def get_batch():
    starts = np.random.randint(len(data) - block_size, size=batch_size)
    tokens = np.stack([data[i : i + block_size + 1] for i in starts]).astype(np.int32)
    tokens = jax.make_array_from_process_local_data(split, tokens[: batch_size // jax.process_count()])
    return tokens[:, :-1], tokens[:, 1:]


def init(key):
    def weight(*shape):
        nonlocal key
        key, mine = jax.random.split(key)
        return jax.random.normal(mine, shape, jnp.float32) * 0.02

    layers = [
        {
            "qkv": weight(n_embd, 3 * n_embd),
            "proj": weight(n_embd, n_embd),
            "up": weight(n_embd, 4 * n_embd),
            "down": weight(4 * n_embd, n_embd),
        }
        for _ in range(n_layer)
    ]
    return {"wte": weight(vocab_size, n_embd), "wpe": weight(block_size, n_embd), "layers": layers}


def forward(params, tokens):
    x = params["wte"][tokens] + params["wpe"]
    for layer in params["layers"]:
        q, k, v = jnp.split(x @ layer["qkv"], 3, axis=-1)
        heads = (*x.shape[:2], n_head, n_embd // n_head)
        y = jax.nn.dot_product_attention(q.reshape(heads), k.reshape(heads), v.reshape(heads), is_causal=True)
        x = x + y.reshape(x.shape) @ layer["proj"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x @ params["wte"].T


def loss_fn(params, tokens, targets):
    logits = forward(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(
    0.0, 6e-4, 100, 600), weight_decay=0.1))  # fmt: skip


@jax.jit
def eval_step(params, tokens, targets):
    return loss_fn(params, tokens, targets)


@jax.jit
def train_step(params, opt_state, tokens, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def estimate_loss(params):
    out = {}
    for part in ("train", "val"):
        losses = np.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = eval_step(params, *get_batch()).item()
        out[part] = losses.mean()
    return out


params = jax.device_put(init(jax.random.key(1337)), everywhere)
opt_state = optimizer.init(params)
manager = ocp.CheckpointManager(os.path.abspath(out_dir), options=ocp.CheckpointManagerOptions(max_to_keep=1))
best_val_loss = 1e9
began = time.time()
for iter_num in range(max_iters):
    if iter_num % eval_interval == 0:
        losses = estimate_loss(params)
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            manager.save(iter_num, args=ocp.args.StandardSave({"params": params, "opt_state": opt_state}))
            manager.wait_until_finished()
    params, opt_state, loss = train_step(params, opt_state, *get_batch())
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(time.time() - began) * 1000:.2f}ms")
with open(os.path.join(out_dir, "final.pkl"), "wb") as file:
    pickle.dump(jax.device_get(params), file)
