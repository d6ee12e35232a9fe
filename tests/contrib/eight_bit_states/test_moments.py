"""Moments in eight bits: their codes, their bytes, and what a run learns with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.contrib.eight_bit_states import codes_of, values_of
from tests.stepping import IN_16_BITS
from tests.stepping import trained_shortly as trained

pytestmark = pytest.mark.quick

EIGHT = (*IN_16_BITS, "state.moments=8bit")


@pytest.mark.parametrize(
    ("kind", "learning_rate"),
    [("adamw", None)]
    + [pytest.param(*given, marks=pytest.mark.wide) for given in (("lion", 1e-3), ("muon", 1e-2))],
)
def test_moments_in_eight_bits_learn_what_fp32_learns(kind, learning_rate):
    chosen = (f"optimizer.kind={kind}", f"optimizer.learning_rate={learning_rate}") if learning_rate else ()
    (wide, _), (narrow, state) = trained((*IN_16_BITS, *chosen)), trained((*EIGHT, *chosen))
    assert wide[-1] < wide[0] - 0.5
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    assert narrow != wide
    codes = [x for x in jax.tree.leaves(state["optimizer"]) if x.dtype == jnp.uint8]
    assert all(len(np.unique(x)) > 20 for x in codes)
    assert len(codes) == {"adamw": 2 * 7, "lion": 7, "muon": 5 + 2 * 2}[kind]  # keys and values are too small


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"stage": 2, "data": 2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_layouts_learn_alike_in_eight_bits(axes):
    more = (*EIGHT, "batch.microbatch_sequences=2", *(["zero1=true"] if "stage" in axes else []))
    alone, _ = trained(EIGHT)
    together, _ = trained(more, tuple(axes.items()), steps=6)
    np.testing.assert_allclose(together, alone[:6], rtol=0.01)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_of_eight_bits_is_that_of_the_nearest_value(signed):
    """Against the values of Dettmers et al. 2021, section 1.3, written out, and a search among them."""
    values = {0.0, 1.0}
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        of_decade = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values |= {*of_decade, *(-of_decade if signed else ())}
    table = np.sort(np.array(list(values)))
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_allclose(values_of(jnp.asarray(codes), signed=signed), table, rtol=2e-6)
    np.testing.assert_array_equal(codes_of(jnp.asarray(table, jnp.float32), signed=signed), codes)
    random = np.random.default_rng(0)
    x = np.concatenate([10.0 ** random.uniform(-8, 0, 20_000), random.uniform(0, 1, 20_000), [0, 1]])
    x = np.concatenate([x, -x] if signed else [x]).astype(np.float32)
    nearest = np.abs(x.astype(np.float64) - table[np.searchsorted((table[1:] + table[:-1]) / 2, x)])
    found = np.abs(x - np.asarray(values_of(codes_of(jnp.asarray(x), signed=signed), signed=signed)))
    np.testing.assert_allclose(found, nearest, atol=1e-7)


def test_weighed_moments_in_eight_bits_take_the_bytes_of_codes_and_scales():
    """By hand: a byte for each number of a matrix, 4 for each block of them, and 4 for each other number.

    A side of 384 has no blocks of 256: those of attention are of 192.
    """
    overrides = [*IN_16_BITS, "model.num_layers=2", "batch.sequences=8", "state.moments=8bit"]
    weighed = mw.weigh("bytes-10m", on="1xH100", overrides=overrides)
    width, hidden, vocabulary = 384, 1536, 256
    moments = weighed.ledger.memory.optimizer_state_by_moment
    attention = 2 * 4 * width * width  # query, key, value and output of two layers
    others = 2 * 2 * width * hidden + 2 * vocabulary * width
    vectors = 5 * width
    assert weighed.compiled.num_parameters == attention + others + vectors
    by_hand = attention + others + 4 * attention // 192 + 4 * others // 256 + 4 * vectors
    assert moments["mu"] == moments["nu"] == by_hand
    assert weighed.rule_of_thumb is not None
    assert "in 8 bits where the rule counts fp32" in weighed.rule_of_thumb.rows[1].why
