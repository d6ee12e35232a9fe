import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshwright.trainer.models.loss import LEFT_OUT, Targets, mean_cross_entropy
from tests.rounding import FLOAT32

pytestmark = pytest.mark.quick

BATCH, LENGTH, EMBED, VOCAB = 8, 12, 6, 16
CASES = [
    ({}, 3),
    ({}, 512),
    ({}, 5),
    ({"context": 2, "tensor": 2}, 4),
    ({"data": 2, "fsdp": 2, "tensor": 2}, 4),
]
CASES += [  # where a chunk is no divisor, the last one has fewer positions
    pytest.param(*case, marks=pytest.mark.wide)
    for case in (({}, 12), ({}, 11), ({"data": 8}, 6), ({"fsdp": 2}, 6), ({"tensor": 4}, 6))
]


def loss_of(hidden, head, ids, run, most_positions, *, gaps=False):
    return mean_cross_entropy(hidden, head, Targets(ids, gaps=gaps), run, most_positions)


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    hidden = random.standard_normal((BATCH, LENGTH, EMBED), dtype="float32")
    head = random.standard_normal((VOCAB, EMBED), dtype="float32")
    return (
        jnp.array(hidden),
        jnp.array(head),
        jnp.array(random.integers(VOCAB, size=(BATCH, LENGTH), dtype="int32")),
    )


def reference(hidden, head, targets):
    logits = jnp.einsum("bse,ve->bsv", hidden, head)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@pytest.fixture(scope="module")
def expected(arrays):
    return jax.jit(jax.value_and_grad(reference, argnums=(0, 1)))(*arrays)


@pytest.mark.parametrize(("layout", "most_positions"), CASES, ids=str)
def test_loss_and_gradients_are_optaxs_whatever_the_chunks_and_the_layout(
    layout, most_positions, arrays, expected, context
):
    run, (hidden, head, targets) = context(**layout), arrays

    def loss(hidden, head):
        return loss_of(hidden, head, targets, run, most_positions)

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, head)
    np.testing.assert_allclose(value, expected[0], rtol=FLOAT32)
    for found, wanted in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(found, wanted, atol=FLOAT32)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("layout", [{}, {"data": 2, "tensor": 4}], ids=str)
def test_rows_of_the_head_that_are_padding_take_no_part(layout, cap, arrays, context):
    hidden, head, targets = arrays
    targets = targets.at[:, ::3].set(LEFT_OUT)

    def loss_on(run, num_ids):
        def loss(hidden, head):
            return mean_cross_entropy(hidden, head, Targets(targets, gaps=True), run, 6, cap, num_ids)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    wanted, (d_hidden, d_head) = loss_on(context(), None)(hidden, head)
    padded = jnp.concatenate([head, jnp.full((4, EMBED), 9.0)])  # larger logits than the others'
    value, gradients = loss_on(context(**layout), VOCAB)(hidden, padded)
    np.testing.assert_allclose(value, wanted, rtol=FLOAT32)
    np.testing.assert_allclose(gradients[0], d_hidden, atol=FLOAT32)
    np.testing.assert_allclose(gradients[1][:VOCAB], d_head, atol=FLOAT32)
    np.testing.assert_array_equal(gradients[1][VOCAB:], 0)


@pytest.mark.parametrize("layout", [{}, {"data": 2, "tensor": 2}], ids=str)
def test_without_gradients_it_is_the_same_loss(layout, arrays, expected, context):
    run = context(**layout)
    value = jax.jit(lambda *x: loss_of(*x, run, 4))(*arrays)
    np.testing.assert_allclose(value, expected[0], rtol=FLOAT32)


def test_gradients_scale_with_what_is_done_to_the_loss(arrays, expected, context):
    run, (hidden, head, targets) = context(), arrays
    gradient = jax.jit(jax.grad(lambda h: 3.0 * loss_of(h, head, targets, run, 4)))(hidden)
    np.testing.assert_allclose(gradient, 3.0 * expected[1][0], atol=3 * FLOAT32)


def test_large_logits_do_not_overflow(arrays, context):
    hidden, head, targets = arrays
    run = context()
    loss = jax.jit(jax.value_and_grad(lambda h: loss_of(1e4 * h, head, targets, run, 4)))
    value, gradient = loss(hidden)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_in_half_precision_the_logits_are_rounded_once_and_the_loss_is_float32(arrays, expected, context):
    hidden, head, targets = arrays
    run = context(dtype=jnp.bfloat16)
    half = (hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16))
    loss = jax.value_and_grad(lambda h, w: loss_of(h, w, targets, run, 4), argnums=(0, 1))
    value, gradients = jax.jit(loss)(*half)
    wanted = jax.jit(reference)(*(x.astype(jnp.float32) for x in half), targets)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, wanted, rtol=5e-4)  # bf16 rounds a logit by 2^-9 of it at most
    for found, exact in zip(gradients, expected[1], strict=True):
        assert found.dtype == jnp.bfloat16
        assert np.linalg.norm(found.astype(np.float32) - exact) < 0.02 * np.linalg.norm(exact)


def test_the_logits_of_the_whole_batch_are_never_held(arrays, context):
    run, (hidden, head, targets) = context(), arrays
    loss = jax.jit(jax.value_and_grad(lambda h, w: loss_of(h, w, targets, run, 3), argnums=(0, 1)))
    text = loss.lower(hidden, head).as_text()
    assert f"tensor<{BATCH}x3x{VOCAB}xf32>" in text
    assert f"tensor<{BATCH}x{LENGTH}x{VOCAB}xf32>" not in text


@pytest.mark.parametrize("layout", [{}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_targets_left_out_have_no_loss_and_no_gradient(layout, arrays, context):
    run, (hidden, head, targets) = context(**layout), arrays
    kept = np.random.default_rng(1).random(targets.shape) < 0.7

    def ours(hidden, head):
        return loss_of(hidden, head, jnp.where(kept, targets, LEFT_OUT), run, 4, gaps=True)

    def theirs(hidden, head):
        logits = jnp.einsum("bse,ve->bsv", hidden, head)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.where(kept, losses, 0).sum() / kept.sum()

    value, gradients = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(hidden, head)
    wanted, expected = jax.jit(jax.value_and_grad(theirs, argnums=(0, 1)))(hidden, head)
    np.testing.assert_allclose(value, wanted, rtol=FLOAT32)
    np.testing.assert_allclose(jax.jit(ours)(hidden, head), wanted, rtol=FLOAT32)
    for found, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, want, atol=FLOAT32)


def test_without_any_target_the_loss_is_zero(arrays, context):
    hidden, head, targets = arrays
    none = jnp.full_like(targets, LEFT_OUT)
    loss = jax.value_and_grad(lambda h: loss_of(h, head, none, context(), 4, gaps=True))
    value, gradient = jax.jit(loss)(hidden)
    assert value == 0
    assert not gradient.any()
