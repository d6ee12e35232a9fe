"""Documents packed into one window, against each document alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.config import TransformerModel
from meshwright.trainer.models import attention_blocks, initial_parameters
from meshwright.trainer.models.transformer import Transformer
from tests.rounding import FLOAT32

pytestmark = pytest.mark.quick

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
# Of the documents of each row, 24 inputs + 1.
LENGTHS = ((7, 1, 10, 7), (25,), (1, 10, 7, 7), (10, 1, 7, 7))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Three blocks of queries, so that documents cross them."""
    monkeypatch.setattr(attention_blocks, "MIN_BLOCK", 8)


def packed():
    random = np.random.default_rng(0)
    tokens = random.integers(32, size=(len(LENGTHS), 25), dtype=np.int32)
    segments = np.stack([np.repeat(np.arange(len(row), dtype=np.int32), row) for row in LENGTHS])
    return tokens, segments


def apart(tokens):
    """Each document in a row of its own [documents, 25], and where it was: (row, first position, length).

    The rest of a row is zeros, to which no position of the document attends.
    """
    where = [
        (number, start, length)
        for number, lengths in enumerate(LENGTHS)
        for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False)
    ]
    rows = np.zeros((len(where), 25), np.int32)
    for row, (number, start, length) in zip(rows, where, strict=True):
        row[:length] = tokens[number, start : start + length]
    return rows, where


@pytest.mark.parametrize("name", ["rotary", pytest.param("learned", marks=pytest.mark.wide), "unrolled"])
def test_hidden_states_are_those_of_each_document_alone(name, context):
    model, run, (tokens, segments) = Transformer(CONFIGS[name]), context(), packed()
    parameters = jax.jit(lambda: initial_parameters(model.parameters(), jax.random.key(1)))()
    rows, where = apart(tokens)

    @jax.jit
    def both(parameters):
        together = model.hidden(parameters, jnp.array(tokens[:, :-1]), run, jnp.array(segments[:, :-1]))[0]
        return together, model.hidden(parameters, jnp.array(rows[:, :-1]), run)[0]

    found, alone = both(parameters)
    for document, (number, start, length) in zip(alone, where, strict=True):
        stop = min(start + length, 24)  # the window's last token is a target only
        np.testing.assert_allclose(found[number, start:stop], document[: stop - start], atol=4 * FLOAT32)


def separate_loss(model, parameters, tokens, context):
    """Mean over the targets of all documents and its gradient, each document by itself, with Optax's loss."""
    rows, where = apart(tokens)
    lengths = np.array([length for _, _, length in where])
    is_target = np.arange(1, 25)[None] < lengths[:, None]

    @jax.jit
    @jax.value_and_grad
    def loss(parameters):
        hidden = model.hidden(parameters, jnp.array(rows[:, :-1]), context)[0]
        logits = hidden @ model.head(parameters, context).T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
        return jnp.where(is_target, losses, 0).sum() / is_target.sum()

    return loss(parameters)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("rotary", ({}, {"data": 2, "fsdp": 2, "tensor": 2}), id="rotary"),
        pytest.param("learned", ({},), id="learned", marks=pytest.mark.wide),
    ],
)
def test_loss_and_gradients_are_those_of_the_documents_apart(name, layouts, context):
    model, (tokens, segments) = Transformer(CONFIGS[name]), packed()
    parameters = jax.jit(lambda: initial_parameters(model.parameters(), jax.random.key(1)))()
    batch = {"tokens": jnp.array(tokens), "segments": jnp.array(segments)}
    wanted, expected = separate_loss(model, parameters, tokens, context())
    for layout in layouts:
        run = context(**layout)
        loss = jax.jit(jax.value_and_grad(lambda p, run=run: model.loss(p, {}, batch, run)[0]))
        found, gradient = loss(parameters)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected)


def test_one_document_is_what_a_window_without_documents_is(context):
    model, run, (tokens, _) = Transformer(LLAMA), context(), packed()
    parameters = jax.jit(lambda: initial_parameters(model.parameters(), jax.random.key(1)))()
    whole = {"tokens": jnp.array(tokens)}
    one = {**whole, "segments": jnp.zeros_like(whole["tokens"])}
    losses = [jax.jit(lambda p, b: model.loss(p, {}, b, run)[0])(parameters, batch) for batch in (whole, one)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="alone", marks=pytest.mark.wide),
        pytest.param({"data": 2, "tensor": 2}, id="data, tensor"),
    ],
)
def test_the_loss_is_the_mean_over_the_answers_that_a_batch_marks(layout, context):
    """Against Optax's loss of single tokens, for the tokens that are marked and begin no document."""
    model, (tokens, segments) = Transformer(LLAMA), packed()
    answers = np.random.default_rng(1).integers(2, size=tokens.shape, dtype=np.int32)
    parameters = jax.jit(lambda: initial_parameters(model.parameters(), jax.random.key(1)))()
    batch = {
        name: jnp.array(a) for name, a in (("tokens", tokens), ("segments", segments), ("answers", answers))
    }

    @jax.jit
    def each(parameters):
        alone = context()
        hidden = model.hidden(parameters, batch["tokens"][:, :-1], alone, batch["segments"][:, :-1])[0]
        logits = hidden @ model.head(parameters, alone).T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])

    taught = (answers[:, 1:] == 1) & (segments[:, 1:] == segments[:, :-1])
    run = context(**layout)
    found = jax.jit(lambda p: model.loss(p, {}, batch, run)[0])(parameters)
    np.testing.assert_allclose(found, np.asarray(each(parameters))[taught].mean(), rtol=1e-5)
