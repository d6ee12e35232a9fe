"""What is asked of cuDNN, as it stands in a program for a GPU that is not there."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.models import attention_blocks as cudnn

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, WIDTH = 2, 32, 64, 4, 2, 16


def shaped(length, heads, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((BATCH, length, heads, WIDTH), dtype)


QUERY, KEY = shaped(QUERIES, HEADS), shaped(KEYS, KV_HEADS)
LOG_SUM_EXP = jax.ShapeDtypeStruct((BATCH, HEADS, QUERIES), jnp.float32)


def call_in(function, *arguments):
    """The one custom call of the program."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call" in line]
    return line


@pytest.mark.parametrize(("causal", "mask"), [(True, "CAUSAL"), (False, "NO_MASK")])
def test_forward_gives_the_log_sum_exp_unrounded(causal, mask):
    out, log_sum_exp = jax.eval_shape(lambda *x: cudnn.forward(*x, causal), QUERY, KEY, KEY)
    assert (out.shape, out.dtype) == (QUERY.shape, jnp.bfloat16)
    assert (log_sum_exp.shape, log_sum_exp.dtype) == (LOG_SUM_EXP.shape, jnp.float32)
    line = call_in(lambda *x: cudnn.forward(*x, causal), QUERY, KEY, KEY)
    assert "__cudnn$fmhaSoftmax(%arg0, %arg1, %arg2)" in line
    assert f"\\22{mask}\\22" in line
    assert "\\22fmha_scale\\22: 0.25" in line  # of 16 numbers


@pytest.mark.parametrize(("causal", "mask"), [(True, "CAUSAL"), (False, "NO_MASK")])
def test_backward_takes_output_and_log_sum_exp_from_outside(causal, mask):
    def gradients(query, key, value, log_sum_exp, out, d_out):
        return cudnn.backward(query, key, value, causal, log_sum_exp, out, d_out)

    arguments = (QUERY, KEY, KEY, LOG_SUM_EXP, QUERY, QUERY)
    assert [x.shape for x in jax.eval_shape(gradients, *arguments)] == [QUERY.shape, KEY.shape, KEY.shape]
    line = call_in(gradients, *arguments)
    # cuDNN wants the output's gradient before the output.
    assert "__cudnn$fmhaSoftmaxBackward(%arg0, %arg1, %arg2, %arg3, %arg5, %arg4)" in line
    assert f"\\22{mask}\\22" in line
    assert "\\22fmha_scale\\22: 0.25" in line
