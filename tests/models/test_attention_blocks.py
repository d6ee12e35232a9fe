"""Attention in parts, against JAX's own attention to all keys at once, and what is asked of cuDNN."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.trainer.models import attention_blocks as parts
from meshwright.trainer.models.attention_blocks import Blocks, Cudnn, Part, PartResult, merged

pytestmark = pytest.mark.quick

# Attention in parts, against JAX's own attention to all keys at once.


HEADS, KV_HEADS, WIDTH = 4, 2, 8
# Queries and keys of one part: one block; blocks of 8; of 4, for 20 has no larger divisor up to 8 but 5.
LENGTHS = [(8, 8), (16, 24), (20, 8)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(parts, "MIN_BLOCK", 8)


def inputs(queries, keys):
    random = np.random.default_rng(queries + keys)
    shapes = ((2, queries, HEADS, WIDTH), *((2, keys, KV_HEADS, WIDTH),) * 2, (2, queries, HEADS, WIDTH))
    return tuple(jnp.array(random.standard_normal(shape, dtype="float32")) for shape in shapes)


def theirs(query, key, value, d_out, **how):
    """Output and gradients of `jax.nn.dot_product_attention`."""
    with jax.numpy_rank_promotion("allow"):
        attend = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, **how))
        out = attend(query, key, value)
        gradients = jax.jit(lambda *x: jax.vjp(attend, *x)[1](d_out))(query, key, value)
    return out, gradients


def close(found, wanted):
    for mine, their in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-5)


@pytest.mark.parametrize("length", [5, 8, 20])
def test_a_causal_part_is_causal_attention(length):
    *arrays, d_out = inputs(length, length)
    part, blocks = Part(*arrays, None), Blocks()
    seen = jax.jit(lambda: blocks.forward(part, True))()
    out, gradients = theirs(*arrays, d_out, is_causal=True)
    close([seen.out], [out])
    close(jax.jit(lambda: blocks.backward(part, True, seen, d_out))(), gradients)


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_two_parts_add_up_to_all_their_keys_forward_and_backward(queries, keys):
    query, key, value, d_out = inputs(queries, 2 * keys)
    blocks = Blocks()
    both = [Part(query, key[:, half], value[:, half], None) for half in (slice(keys), slice(keys, None))]

    def ours():
        seen = merged(*(blocks.forward(part, False) for part in both))
        return seen.out, [blocks.backward(part, False, seen, d_out) for part in both]

    found, ((d_query, *d_low), (more, *d_high)) = jax.jit(ours)()
    out, gradients = theirs(query, key, value, d_out)
    close([found], [out])
    joined = (jnp.concatenate(x, axis=1) for x in zip(d_low, d_high, strict=True))
    close((d_query + more, *joined), gradients)


def test_a_part_in_which_a_query_sees_nothing_adds_nothing():
    """Its segment is among its own keys, and not among the others."""
    query, key, value, d_out = inputs(16, 16)
    segments = jnp.array(np.repeat([[0, 1, 2]], 2, 0).repeat([5, 8, 3], 1).astype(np.int32))
    low, high = slice(8), slice(8, None)
    blocks = Blocks()
    own = Part(query[:, high], key[:, high], value[:, high], (segments[:, high], segments[:, high]))
    other = Part(query[:, high], key[:, low], value[:, low], (segments[:, high], segments[:, low]))

    def ours():
        seen = merged(blocks.forward(own, True), blocks.forward(other, False))
        given = d_out[:, high]
        return seen.out, blocks.backward(own, True, seen, given), blocks.backward(other, False, seen, given)

    found, (d_query, *d_high), (more, *d_low) = jax.jit(ours)()
    same = segments[:, None, :, None] == segments[:, None, None, :]
    none_low = d_out.at[:, low].set(0)
    out, (d_whole, *d_keys) = theirs(query, key, value, none_low, is_causal=True, mask=same)
    close([found, d_query + more], [out[:, high], d_whole[:, high]])
    close([jnp.concatenate(x, axis=1) for x in zip(d_low, d_high, strict=True)], d_keys)


@pytest.mark.parametrize("causal", [True, False])
def test_the_scores_of_a_whole_part_are_never_held(causal):
    length = parts.MAX_BLOCKS * parts.MIN_BLOCK * 2
    query, key, value, d_out = inputs(length, length)
    part, blocks = Part(query, key, value, None), Blocks()

    def both():
        seen = blocks.forward(part, causal)
        return seen, blocks.backward(part, causal, seen, d_out)

    text = jax.jit(both).lower().as_text()
    assert f"x{length // parts.MAX_BLOCKS}x{length}x" in text
    assert f"x{length}x{length}x" not in text


def test_documents_are_not_for_cudnn():
    query, key, value, _ = inputs(8, 8)
    segments = jnp.zeros((2, 8), jnp.int32)
    part = Part(query, key, value, (segments, segments))
    with pytest.raises(AssertionError, match="cuDNN attends to whole windows"):
        Cudnn().forward(part, True)


@pytest.mark.parametrize("place", [0, 7])
def test_cudnn_is_given_queries_at_their_own_keys(place, monkeypatch):
    """Where the kernel is replaced by the definition, it gives what blocks give."""

    def scores_of(query, key, window):
        rows, columns = (np.arange(x.shape[1]) for x in (query, key))
        behind = rows[:, None] - columns[None]
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        return jnp.where(jnp.asarray((behind >= 0) & (behind < window))[None, None], scores, -1e30)

    def forward(query, key, value, bias, how):
        scores = scores_of(query, key, how.window)
        value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return out, jax.nn.logsumexp(scores, axis=-1)

    def backward(query, key, value, bias, how, result):
        log_sum_exp, out, d_out = result

        def weighted(query, key, value):
            weights = jnp.exp(scores_of(query, key, how.window) - log_sum_exp[..., None])
            value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
            each = jnp.einsum("bqhd,bkhd->bhqk", d_out, value)
            product = jnp.einsum("bqhd,bqhd->bhq", d_out, out)[..., None]
            return jnp.sum(weights * (each - jax.lax.stop_gradient(product)))

        return jax.grad(weighted, argnums=(0, 1, 2))(query, key, value)

    monkeypatch.setattr(parts, "_cudnn_forward", forward)
    monkeypatch.setattr(parts, "_cudnn_backward", backward)
    query, key, value, d_out = inputs(8, 24)
    part = Part(query, key, value, None, 6, jnp.int32(place))
    results = []
    for kernel in (Cudnn(), Blocks()):
        seen = kernel.forward(part, True)
        results.append((seen, kernel.backward(part, True, seen, d_out)))
    for mine, plain in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)


PROGRAM = """
    from functools import partial

    import jax, jax.numpy as jnp, numpy as np
    from meshwright.trainer.models.attention_blocks import Blocks, Cudnn, Part, merged

    random = np.random.default_rng(0)
    shapes = ((2, 256, 8, 64), *((2, 256, 2, 64),) * 4, (2, 256, 8, 64))
    arrays = [jnp.array(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]

    def run(kernel, *arrays):
        query, key, value, other_key, other_value, d_out = arrays
        own, other = Part(query, key, value, None), Part(query, other_key, other_value, None)
        seen = merged(kernel.forward(own, True), kernel.forward(other, False))
        return seen, kernel.backward(own, True, seen, d_out), kernel.backward(other, False, seen, d_out)

    def windowed(kernel, *arrays):
        query, key, value, *_, d_out = arrays
        part = Part(query[:, :96], key, value, None, 40, jnp.int32(130))
        seen = kernel.forward(part, True)
        return seen, kernel.backward(part, True, seen, d_out[:, :96])

    def both(kernel, *arrays):
        return run(kernel, *arrays), windowed(kernel, *arrays)

    found = jax.jit(partial(both, Cudnn()))(*arrays)
    wanted = jax.jit(partial(both, Blocks()))(*(x.astype(jnp.float32) for x in arrays))
    for mine, plain in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=0.02 * float(jnp.abs(plain).max()))
"""


@pytest.mark.gpu
def test_cudnn_in_bf16_gives_what_blocks_give_in_fp32():
    """Log-sum-exp too, and gradients of a part from the log-sum-exp over two."""
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What is asked of cuDNN, as it stands in a program for a GPU that is not there.


BATCH, QUERIES, KEYS, NUM_NUMBERS = 2, 32, 64, 16


def shaped(length, heads, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((BATCH, length, heads, NUM_NUMBERS), dtype)


QUERY, KEY = shaped(QUERIES, HEADS), shaped(KEYS, KV_HEADS)
LOG_SUM_EXP = jax.ShapeDtypeStruct((BATCH, HEADS, QUERIES), jnp.float32)


def call_in(function, *arguments):
    """The one custom call of the program."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call" in line]
    return line


@pytest.mark.parametrize(("causal", "mask"), [(True, "CAUSAL"), (False, "NO_MASK")])
def test_forward_gives_the_log_sum_exp_unrounded(causal, mask):
    def forward(*arrays):
        return Cudnn().forward(Part(*arrays, None), causal)

    out, log_sum_exp = jax.eval_shape(forward, QUERY, KEY, KEY)
    assert (out.shape, out.dtype) == (QUERY.shape, jnp.float32)
    assert (log_sum_exp.shape, log_sum_exp.dtype) == (LOG_SUM_EXP.shape, jnp.float32)
    line = call_in(forward, QUERY, KEY, KEY)
    assert "__cudnn$fmhaSoftmax(%arg0, %arg1, %arg2)" in line
    assert f"\\22{mask}\\22" in line
    assert "\\22fmha_scale\\22: 0.25" in line  # of 16 numbers


@pytest.mark.parametrize(("causal", "mask"), [(True, "CAUSAL"), (False, "NO_MASK")])
def test_backward_takes_output_and_log_sum_exp_from_outside(causal, mask):
    def gradients(query, key, value, log_sum_exp, out, d_out):
        part = Part(query, key, value, None)
        return Cudnn().backward(part, causal, PartResult(out, log_sum_exp), d_out)

    arguments = (QUERY, KEY, KEY, LOG_SUM_EXP, QUERY, QUERY)
    assert [x.shape for x in jax.eval_shape(gradients, *arguments)] == [QUERY.shape, KEY.shape, KEY.shape]
    line = call_in(gradients, *arguments)
    # cuDNN wants the output's gradient before the output.
    assert "__cudnn$fmhaSoftmaxBackward(%arg0, %arg1, %arg2, %arg3, %arg5, %arg4)" in line
    assert f"\\22{mask}\\22" in line
    assert "\\22fmha_scale\\22: 0.25" in line
