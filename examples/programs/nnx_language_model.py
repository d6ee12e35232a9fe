"""A Flax NNX language model: `nnx.jit`, `nnx.Optimizer`, dropout, matrices split over a mesh.

Weigh it as it is: `meshwright weigh --on 8xH100 -- python examples/programs/nnx_language_model.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ROWS, LENGTH, VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 32, 128, 512, 256, 1024, 4, 2


def split(*axes):
    """Return an initializer whose array is split over mesh axes, one for each dimension."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Block(nnx.Module):
    """Causal attention and an MLP, each after a norm and added to its input."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            decode=False,
            kernel_init=split("data", "model", None),
            out_kernel_init=split("model", None, "data"),
            use_bias=False,
            rngs=rngs,
        )
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=split("data", "model"), use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=split("model", "data"), use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        """The residual stream after the block [rows, length, width]."""
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class LanguageModel(nnx.Module):
    """Embedding, blocks, and the logits of the next token."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=split("model", "data"), rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        """Logits [rows, length, vocabulary] of tokens [rows, length]."""
        x = jax.lax.with_sharding_constraint(self.embedding(tokens), PartitionSpec("data"))
        for block in self.blocks:
            x = jax.lax.with_sharding_constraint(block(x), PartitionSpec("data"))
        return self.embedding.attend(self.norm(x))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, tokens):
    """One step of AdamW; tokens [rows, length + 1]."""

    def loss(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


@nnx.jit
def created():
    """Return the model and its optimizer, made where their metadata says."""
    model = LanguageModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model, optimizer


def main():
    """Train on random tokens."""
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    numbers = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        model, optimizer = created()
        for _ in range(100):
            tokens = numbers.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
            value = train_step(model, optimizer, jax.device_put(jnp.asarray(tokens), rows))
    print(value)


if __name__ == "__main__":
    main()
