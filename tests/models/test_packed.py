"""Documents packed into one window, against each document alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.config import TransformerModel
from meshwright.models import attention, initial_parameters
from meshwright.models.transformer import Transformer

LLAMA = TransformerModel(
    kind="transformer", num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=20,
    vocab_size=32, rope_theta=100.0, loss_chunk=4,
)  # fmt: skip
GPT = TransformerModel(
    kind="transformer", num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=4, mlp_dim=20, vocab_size=32,
    norm="layer", norm_epsilon=1e-5, position="learned", max_positions=24, mlp="plain", activation="gelu",
    tied_embeddings=True, bias=True, loss_chunk=512,
)  # fmt: skip
CONFIGS = {"rotary": LLAMA, "learned": GPT, "unrolled": LLAMA.model_copy(update={"unroll": True})}
# Of the documents of each row, 24 inputs + 1. Few lengths, for each is compiled by itself.
LENGTHS = ((7, 1, 10, 7), (25,), (1, 10, 7, 7), (10, 1, 7, 7))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Three blocks of queries, so that documents cross them."""
    monkeypatch.setattr(attention, "MIN_BLOCK", 8)


def packed():
    random = np.random.default_rng(0)
    tokens = random.integers(32, size=(len(LENGTHS), 25), dtype=np.int32)
    segments = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in LENGTHS])
    return tokens, segments


def apart(tokens):
    """Each document of each row: the row's number, where it begins, its tokens."""
    for number, (row, lengths) in enumerate(zip(tokens, LENGTHS, strict=True)):
        for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            yield number, start, row[start : start + length]


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_are_those_of_each_document_alone(name, context):
    model, run, (tokens, segments) = Transformer(CONFIGS[name]), context(), packed()
    parameters = initial_parameters(model.parameters(), jax.random.key(1))
    found = jax.jit(lambda p, t, s: model.hidden(p, t, run, s)[0])(
        parameters, tokens[:, :-1], segments[:, :-1]
    )
    alone = jax.jit(lambda p, t: model.hidden(p, t, run)[0])
    for row, start, document in apart(tokens):
        document = document[: 24 - start]  # the row's last token is a target only
        if len(document):
            wanted = alone(parameters, document[None])[0]
            np.testing.assert_allclose(found[row, start : start + len(document)], wanted, atol=1e-5)


def separate_loss(model, parameters, tokens, context):
    """Mean over the targets of all documents and its gradient, each document by itself, with Optax's loss."""

    @jax.jit
    @jax.value_and_grad
    def loss(parameters, document):
        hidden = model.hidden(parameters, document[None, :-1], context)[0][0]
        logits = hidden @ model.head(parameters, context).T
        return optax.softmax_cross_entropy_with_integer_labels(logits, document[1:]).sum()

    documents = [document for _, _, document in apart(tokens) if len(document) > 1]
    num_targets = sum(len(document) - 1 for document in documents)
    found = [loss(parameters, document) for document in documents]
    return jax.tree.map(lambda *each: sum(each) / num_targets, *found)


@pytest.mark.parametrize("name", ["rotary", "learned"])
def test_loss_and_gradients_are_those_of_the_documents_apart(name, context):
    model, (tokens, segments) = Transformer(CONFIGS[name]), packed()
    parameters = initial_parameters(model.parameters(), jax.random.key(1))
    batch = {"tokens": jnp.array(tokens), "segments": jnp.array(segments)}
    wanted, expected = separate_loss(model, parameters, tokens, context())
    for layout in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        run = context(**layout)
        loss = jax.jit(jax.value_and_grad(lambda p, run=run: model.loss(p, {}, batch, run)[0]))
        found, gradient = loss(parameters)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected)


def test_one_document_is_what_a_window_without_documents_is(context):
    model, run, (tokens, _) = Transformer(LLAMA), context(), packed()
    parameters = initial_parameters(model.parameters(), jax.random.key(1))
    whole = {"tokens": jnp.array(tokens)}
    one = {**whole, "segments": jnp.zeros_like(whole["tokens"])}
    losses = [jax.jit(lambda p, b: model.loss(p, {}, b, run)[0])(parameters, batch) for batch in (whole, one)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
