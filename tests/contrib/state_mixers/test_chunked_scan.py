"""The chunked scan against the recurrence that defines it, one token after the other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.contrib.state_mixers import Steps, chunked_scan, inverse_of_unit_lower, short_convolution
from meshwright.hlo import parse_program
from meshwright.ledger import executed_flops, executions_of
from meshwright.worker import count_traced

pytestmark = pytest.mark.quick

LENGTH, KEY_DIM, VALUE_DIM = 100, 8, 6  # no chunk but those of one token divides the length
FORMS = {
    "delta": {"each": 2, "has_delta": True},
    "kda": {"has_delta": True, "by_channel": True},
    "mamba": {"each": 3},
    "channels": {"by_channel": True},
}
"""Value heads of each of two key heads, whether there is a delta rule, and decays of each key dimension."""


def steps_of(
    *,
    each: int = 1,
    has_delta: bool = False,
    by_channel: bool = False,
    length: int = LENGTH,
    sizes: tuple[int, int] = (KEY_DIM, VALUE_DIM),
) -> Steps:
    """Random steps whose keys point in similar directions, so that what is erased matters."""
    draw = np.random.default_rng(0)
    key_dim, value_dim = sizes

    def normal(*shape: int) -> Any:
        return jnp.asarray(draw.normal(size=(2, length, *shape)), jnp.float32)

    query, key = normal(2, key_dim) * key_dim**-0.5, normal(2, key_dim) + 0.5
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    heads = 2 * each
    log_decay = -jnp.exp(normal(heads, key_dim) if by_channel else normal(heads) - 1)
    beta = jax.nn.sigmoid(normal(heads)) if has_delta else None
    return Steps(query, key, normal(heads, value_dim), log_decay, beta)


def recurrence(steps: Steps, begins: Any) -> Any:
    """What each token reads, by the definition: decay, erase, write, read."""
    each = steps.value.shape[2] // steps.key.shape[2]
    query, key = (jnp.repeat(x, each, axis=2) for x in (steps.query, steps.key))
    decay = jnp.exp(steps.log_decay)
    decay = decay[..., None, None] if decay.ndim == 3 else decay[..., None]
    begins = jnp.zeros(steps.value.shape[:2], bool) if begins is None else begins
    shape = (*steps.value.shape[::2][:1], *key.shape[2:], steps.value.shape[-1])

    def one(state: Any, token: Any) -> Any:
        query, key, value, decay, beta, begins = token
        state = jnp.where(begins[:, None, None, None], 0.0, state) * decay
        if beta is not None:
            value = beta[..., None] * (value - jnp.einsum("bhkv,bhk->bhv", state, key))
        state = state + key[..., None] * value[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, query)

    tokens = query, key, steps.value, decay, steps.beta, begins
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    return jnp.moveaxis(jax.lax.scan(one, jnp.zeros(shape), tokens)[1], 0, 1)


def with_gradients(scan: Any, steps: Steps) -> tuple[Any, Steps]:
    weights = jnp.asarray(np.random.default_rng(1).normal(size=steps.value.shape), jnp.float32)

    def loss(steps: Steps) -> Any:
        out = scan(steps)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(steps)
    return out, gradients


def assert_close(found: Any, expected: Any, share: float) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        error = jnp.max(jnp.abs(one.astype(jnp.float32) - other)) / jnp.max(jnp.abs(other))
        assert error < share


# Every two of a form, a chunk and documents but for a few; `make test-wide` has all others of the 24.
EVERY_TIME = {
    ("delta", 1, False),
    ("delta", 64, True),
    ("kda", 64, False),
    ("kda", 128, True),
    ("mamba", 64, True),
    ("mamba", 128, False),
    ("channels", 1, True),
}


@pytest.mark.parametrize(
    ("form", "chunk", "has_documents"),
    [
        pytest.param(
            *(form, chunk, documents),
            id=f"{form}-{chunk}-{'documents' if documents else 'whole'}",
            marks=() if (form, chunk, documents) in EVERY_TIME else pytest.mark.wide,
        )
        for form in FORMS
        for chunk in (1, 64, 128)  # the last holds the whole sequence
        for documents in (False, True)
    ],
)
def test_chunks_give_what_the_recurrence_does_forward_and_backward(form, chunk, has_documents):
    steps, begins = steps_of(**FORMS[form]), None
    if has_documents:
        begins = jnp.asarray(np.random.default_rng(2).random((2, LENGTH)) < 0.06).at[:, 0].set(True)
    expected = with_gradients(lambda steps: recurrence(steps, begins), steps)
    found = with_gradients(lambda steps: chunked_scan(steps, begins, chunk), steps)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("form", ["delta", "kda", "mamba"])
def test_decays_to_nothing_within_a_token_do_not_overflow(form):
    steps = steps_of(**FORMS[form])
    steps = steps._replace(log_decay=steps.log_decay.at[:, 30:60].set(-200.0))
    found = with_gradients(lambda steps: chunked_scan(steps, None, 64), steps)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(found))
    # Differences of sums as large as 30 x 200 are rounded to 1 in 2,000.
    assert_close(found[0], recurrence(steps, None), 1e-3)


@pytest.mark.parametrize("form", ["delta", "kda", "mamba"])
def test_bf16_inputs_are_summed_in_float32(form):
    """The output of 1,000 tokens in bf16 is off by a few roundings, not by a thousand additions'."""
    steps = steps_of(**FORMS[form], length=1000)
    steps = steps._replace(log_decay=steps.log_decay * 0.01)
    narrow = steps._replace(
        **{name: getattr(steps, name).astype(jnp.bfloat16) for name in ("query", "key", "value")}
    )
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    found = with_gradients(lambda steps: chunked_scan(steps, None, 64), narrow)
    expected = with_gradients(lambda steps: recurrence(steps, None), rounded)
    assert_close(found[0], expected[0], 0.02)
    assert_close(found[1], expected[1], 0.04)
    assert found[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_the_inverse_of_a_triangle_of_ones_is_exact(size):
    """Powers of such a matrix are as large as 10^17: an inverse by them would lose all digits."""
    lower = jnp.tril(jnp.ones((size, size)), -1)
    expected = jnp.eye(size) - jnp.eye(size, k=-1)
    np.testing.assert_array_equal(inverse_of_unit_lower(lower), expected)


def test_a_short_convolution_stays_in_its_document():
    x = jnp.arange(1.0, 7.0)[None, :, None]
    taps = jnp.array([[100.0, 10.0, 1.0]])
    whole = [1, 12, 123, 234, 345, 456]
    np.testing.assert_array_equal(short_convolution(x, taps, None, 1)[0, :, 0], whole)
    places = jnp.array([[0, 1, 2, 0, 1, 2]])
    apart = [1, 12, 123, 4, 45, 456]
    np.testing.assert_array_equal(short_convolution(x, taps, places, 1)[0, :, 0], apart)


# FLOPs by hand, for each token and value head: R value heads of a key head, chunks of C.


def by_hand(form: str, chunk: int, each: int, key_dim: int, value_dim: int) -> tuple[int, int]:
    """The recurrence's products, and those that run forward within chunks beside them."""
    with_state = (6 if form != "mamba" else 4) * key_dim * value_dim
    if form == "mamba":
        return with_state, 2 * chunk * (key_dim // each + value_dim)
    matrices = (
        2 * key_dim**2 * (1 + value_dim / chunk)
    )  # of a chunk, by which states depend on the one before
    inverse = 3 * 2 * 2 * 16**2 + sum(2 * width**2 for width in (16, 32) if width < chunk)
    # In KDA halves of halves, down to blocks of 16 that are summed without products.
    pairs = 2 * (chunk - 16) * key_dim if form == "kda" else 2 * 2 * chunk * key_dim // each
    return with_state, pairs + inverse + int(matrices) + 2 * chunk * (key_dim + 2 * value_dim)


@pytest.mark.parametrize("form", ["delta", "kda", "mamba"])
def test_flops_are_those_of_a_count_by_hand(form):
    chunk, sizes, each = 64, (32, 16), FORMS[form].get("each", 1)
    sizes = (48, 16) if form == "mamba" else sizes
    steps = steps_of(**FORMS[form], length=256, sizes=sizes)
    run = jax.jit(jax.grad(lambda steps: jnp.sum(chunked_scan(steps, None, chunk) ** 2)))
    needed, within = (count * 2 * 256 * steps.value.shape[2] for count in by_hand(form, chunk, each, *sizes))
    traced = count_traced(run.trace(steps).jaxpr.jaxpr, "cuda").by_phase
    assert (traced["forward"], traced["backward"]) == (needed, 2 * needed)

    scan = jax.jit(lambda steps: chunked_scan(steps, None, chunk))
    program = parse_program(scan.lower(steps).compile().as_text() or "")
    assert executed_flops(executions_of(program)).total == needed + within
