"""Norms: values and gradients are those of the definition, and of PyTorch where it is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.trainer.models.norms import STATISTICS, normalised

pytestmark = pytest.mark.quick

ROWS, WIDTH, EPSILON = 6, 48, 1e-5


def inputs(dtype=jnp.float32):
    random = np.random.default_rng(0)
    x, d_out = (jnp.asarray(random.normal(1, 2, (2, ROWS, WIDTH)), dtype) for _ in range(2))
    scale, bias = (jnp.asarray(random.normal(1, 0.5, WIDTH), jnp.float32) for _ in range(2))
    return x, scale, bias, d_out


def defined(x, scale, bias, centred):
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True) if centred else wide
    y = wide / jnp.sqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON) * scale[None, None]
    return (y if bias is None else y + bias[None, None]).astype(x.dtype)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_are_those_of_the_definition(centred, has_bias):
    x, scale, bias, d_out = inputs()
    given = (x, scale, bias) if has_bias else (x, scale)

    def ours(x, scale, bias=None):
        return normalised(x, scale, bias, centred, EPSILON, x.dtype)

    def theirs(x, scale, bias=None):
        return defined(x, scale, bias, centred)

    (mine, pull), (wanted, pull_wanted) = jax.vjp(ours, *given), jax.vjp(theirs, *given)
    np.testing.assert_allclose(mine, wanted, atol=1e-5)
    for found, right in zip(pull(d_out), pull_wanted(d_out), strict=True):
        np.testing.assert_allclose(found, right, atol=2e-5)


@pytest.mark.parametrize("centred", [True, False])
def test_values_and_gradients_are_those_of_pytorch(centred):
    torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed")
    x, scale, bias, d_out = inputs()
    if not centred:
        bias = None
    mine, pull = jax.vjp(lambda x, s: normalised(x, s, bias, centred, EPSILON, x.dtype), x, scale)
    theirs = [torch.tensor(np.asarray(each), requires_grad=True) for each in (x, scale)]
    if centred:
        out = torch.nn.functional.layer_norm(
            theirs[0], (WIDTH,), theirs[1], torch.tensor(np.asarray(bias)), EPSILON
        )
    else:
        out = torch.nn.functional.rms_norm(theirs[0], (WIDTH,), theirs[1], EPSILON)
    out.backward(torch.tensor(np.asarray(d_out)))
    np.testing.assert_allclose(mine, out.detach().numpy(), atol=1e-5)
    for found, right in zip(pull(d_out), theirs, strict=True):
        np.testing.assert_allclose(found, right.grad.numpy(), atol=2e-5)


def test_half_precision_rounds_at_the_end_alone():
    x, scale, bias, _ = inputs(jnp.bfloat16)
    exact = normalised(x.astype(jnp.float32), scale, bias, True, EPSILON, jnp.float32)
    np.testing.assert_array_equal(
        normalised(x, scale, bias, True, EPSILON, jnp.bfloat16), exact.astype(jnp.bfloat16)
    )


def test_the_backward_pass_keeps_the_input_and_two_numbers_a_token():
    x, scale, bias, _ = inputs(jnp.bfloat16)
    _, pull = jax.vjp(lambda x: normalised(x, scale, bias, True, EPSILON, x.dtype), x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes"))
    assert kept <= x.nbytes + 2 * 4 * 2 * ROWS + 2 * 4 * WIDTH


def test_a_policy_by_name_keeps_the_statistics():
    x, scale, bias, _ = inputs()

    def loss(x):
        return jnp.sum(normalised(x, scale, bias, True, EPSILON, x.dtype) ** 2)

    keep = jax.checkpoint_policies.save_only_these_names(STATISTICS)
    text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=keep)))(x))
    again = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(x))
    assert text.count("rsqrt") == 1
    assert again.count("rsqrt") == 2
