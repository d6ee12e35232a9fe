import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.compiler import read_text
from meshwright.trainer.models import attention_blocks
from meshwright.trainer.models.attention import Shape, causal_attention, documents_of, uses_cudnn
from meshwright.trainer.models.attention_blocks import cudnn_attention
from meshwright.worker import count_traced

pytestmark = pytest.mark.quick


def plain(query, key, value, window=None, cap=None):
    """softmax(q k / sqrt(d)) v with a whole mask, every head by itself, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    length, heads, width = query.shape[1:]
    group = heads // key.shape[2]
    out = np.empty((*query.shape[:3], value.shape[3]))
    mask = np.tril(np.ones((length, length), bool))
    mask &= ~np.tril(np.ones((length, length), bool), -(window or length))
    for b in range(query.shape[0]):
        for h in range(heads):
            scores = query[b, :, h] @ key[b, :, h // group].T / np.sqrt(width)
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            scores = np.where(mask, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, :, h] = weights / weights.sum(axis=1, keepdims=True) @ value[b, :, h // group]
    return out


def inputs(length, heads, kv_heads, width=8, batch=2):
    random = np.random.default_rng(length)
    shapes = ((batch, length, heads, width), *((batch, length, kv_heads, width),) * 2)
    return tuple(jnp.array(random.standard_normal(shape, dtype="float32")) for shape in shapes)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8, and at most 4 of them, so that small sequences have many."""
    monkeypatch.setattr(attention_blocks, "MIN_BLOCK", 8)
    monkeypatch.setattr(attention_blocks, "MAX_BLOCKS", 4)


# One position; one block; a last block of one and of less; larger blocks, so as not to be more.
@pytest.mark.parametrize("length", [1, 8, 17, 30, 45])
def test_blocks_give_what_plain_attention_gives(length, context, small_blocks):
    run, arrays = context(), inputs(length, 4, 2)
    out = jax.jit(lambda *x: causal_attention(*x, run))(*arrays)
    np.testing.assert_allclose(out, plain(*arrays), atol=2e-6)


WINDOWS = (1, 3, 8, 13, 44, 45, 60)


@pytest.mark.parametrize(
    ("length", "window"),
    [  # `make test` has each window once, and each length
        pytest.param(length, window, marks=() if (row + column) % 3 == 0 else pytest.mark.wide)
        for row, length in enumerate((45, 30, 5))
        for column, window in enumerate(WINDOWS)
    ],
)
def test_a_token_sees_its_window_alone(length, window, context, small_blocks):
    run, arrays = context(), inputs(length, 4, 2)
    out = jax.jit(lambda *x: causal_attention(*x, run, None, Shape(window)))(*arrays)
    np.testing.assert_allclose(out, plain(*arrays, window=window), atol=2e-6)


def test_a_short_window_does_not_multiply_with_keys_that_no_row_of_a_block_sees(context):
    run, arrays = context(), inputs(1024, 1, 1, width=4, batch=1)
    text = jax.jit(lambda *x: causal_attention(*x, run, None, Shape(100))).lower(*arrays).as_text()
    assert "x64x192x" in text  # blocks of 64 rows, with the keys of their own and the two blocks before
    assert "x128x384x" not in text


@pytest.mark.parametrize(("length", "window"), [(1024, 100), (1024, 1), (1000, 333), (50, 50), (700, 701)])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_model_flops_count_the_pairs_of_a_window(length, window, platform, context):
    run = context(platform=platform, dtype=jnp.bfloat16)
    arrays = [x.astype(jnp.bfloat16) for x in inputs(length, 4, 2, batch=1)]
    attend = jax.make_jaxpr(lambda *x: causal_attention(*x, run, None, Shape(window)))
    counted = sum(count_traced(attend(*arrays).jaxpr, platform).by_phase.values())
    pairs = sum(min(row + 1, window) for row in range(length))
    pairs -= min(length, window) / 2  # the diagonal counts half, as in S^2 / 2
    assert counted == pytest.approx(2 * 2 * 4 * 8 * pairs, abs=2 * 4 * 8 * 2)


def test_capped_scores_and_values_of_another_width(context, small_blocks):
    run, (query, key, value) = context(), inputs(30, 4, 2)
    query, value = 20 * query, value[..., :5]
    out = jax.jit(lambda *x: causal_attention(*x, run, None, Shape(9, 3.0)))(query, key, value)
    assert out.shape == (2, 30, 4, 5)
    np.testing.assert_allclose(out, plain(query, key, value, window=9, cap=3.0), atol=5e-6)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (3, 1)])
def test_each_group_of_heads_has_its_own_keys(heads, kv_heads, context):
    run, arrays = context(), inputs(9, heads, kv_heads)
    out = jax.jit(lambda *x: causal_attention(*x, run))(*arrays)
    np.testing.assert_allclose(out, plain(*arrays), atol=2e-6)


def test_the_scores_of_the_whole_sequence_are_never_held(context):
    length = attention_blocks.MAX_BLOCKS * attention_blocks.MIN_BLOCK + 5
    run, arrays = context(), inputs(length, 1, 1, width=4, batch=1)
    text = jax.jit(lambda *x: causal_attention(*x, run)).lower(*arrays).as_text()
    size = -(-length // attention_blocks.MAX_BLOCKS)
    assert f"x{size}x{length - length % size}x" in text
    assert f"x{length}x{length}x" not in text


def test_unrolled_layers_compute_their_scores_again_on_a_gpu_instead_of_keeping_them():
    sizes = ["model.num_layers=2", "batch.sequences=2", "precision=fp32", "layer_loop=unroll"]
    weighed = mw.weigh("bytes-10m", on="1xA100-80GB", overrides=sizes)
    pairs = 128 * (128 + 256)  # two blocks of queries, with the keys up to their last
    of_a_layer = 2 * 6 * pairs * 2 * 64  # two rows, six heads of 64
    assert weighed.ledger.flops.recomputed == 2 * of_a_layer


def test_gradients_are_those_of_jaxs_own_attention(context, small_blocks):
    run, arrays = context(), inputs(30, 4, 2)
    weights = jnp.array(np.random.default_rng(9).standard_normal(arrays[0].shape, dtype="float32"))

    def ours(q, k, v):
        return jnp.sum(weights * causal_attention(q, k, v, run))

    def theirs(q, k, v):
        return jnp.sum(weights * jax.nn.dot_product_attention(q, k, v, is_causal=True))

    found = jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(*arrays)
    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(jax.grad(theirs, argnums=(0, 1, 2)))(*arrays)
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)


def test_nothing_is_seen_of_what_comes_later(context, small_blocks):
    run, (query, key, value) = context(), inputs(20, 2, 2)
    attend = jax.jit(lambda *x: causal_attention(*x, run))
    before = attend(query, key, value)
    early = np.arange(20)[None, :, None, None] < 15
    after = attend(query, *(jnp.array(np.where(early, x, np.float32(9))) for x in (key, value)))
    np.testing.assert_array_equal(before[:, :15], after[:, :15])
    assert not np.allclose(before[:, 15:], after[:, 15:])


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "wanted"),
    [
        ("cuda", jnp.bfloat16, 128, True),
        ("cuda", jnp.float16, 64, True),
        ("cuda", jnp.bfloat16, 129, False),
        ("cuda", jnp.bfloat16, 136, False),
        ("cuda", jnp.bfloat16, 20, True),  # filled to 24
        ("cuda", jnp.bfloat16, 122, True),
        ("cuda", jnp.float32, 128, False),
        ("cpu", jnp.bfloat16, 128, False),
        ("tpu", jnp.bfloat16, 128, False),
    ],
)
def test_cudnn_is_for_half_precision_on_nvidia_and_heads_that_fit(platform, dtype, head_dim, wanted, context):
    run = context(platform=platform, dtype=dtype, compute_capability=(8, 0))
    assert uses_cudnn(run, head_dim) is wanted


@pytest.mark.parametrize(
    ("widths", "generations"),
    [
        ((128, 128), {8, 9, 10, 12}),
        ((128, 64), {9, 10}),
        ((192, 128), {9, 10}),  # DeepSeek-V2 and V3
        ((192, 192), {9}),
        ((256, 256), {9}),  # Gemma
        ((264, 264), set()),
        ((256, 20), set()),
    ],
)
def test_wide_heads_are_for_the_generations_whose_gradient_takes_them(widths, generations, context):
    taken = {
        major
        for major in (8, 9, 10, 12)
        if uses_cudnn(context(platform="cuda", dtype=jnp.bfloat16, compute_capability=(major, 0)), *widths)
    }
    assert taken == generations


TWO_BLOCKS = {
    "precision": "bf16",
    "batch.sequence_length": 256,
    "batch.sequences": 4,
    "model.num_layers": 1,
}
LATENT = {
    "model.position": "rotary",
    "model.latent_rank": 64,
    "model.rotary_dim": 64,
    "model.head_dim": 192,
    "model.value_dim": 128,
    "model.num_kv_heads": 4,
}


@pytest.mark.parametrize(
    ("fleet", "heads"),
    [
        pytest.param("1xH100", {"model.head_dim": 192}, marks=pytest.mark.wide),
        pytest.param("1xH100", {"model.head_dim": 256}, marks=pytest.mark.wide),
        pytest.param("1xH100", LATENT, marks=pytest.mark.wide),
        pytest.param("1xB200", LATENT, marks=pytest.mark.long),
    ],
)
def test_wide_heads_compile_for_an_absent_gpu_and_count_as_by_hand(fleet, heads):
    weighed, in_blocks = (
        mw.weigh("bytes-nano", on=each, overrides={**TWO_BLOCKS, **heads}) for each in (fleet, "1xA100")
    )
    keys, values = heads["model.head_dim"], heads.get("model.value_dim", heads["model.head_dim"])
    # By hand: half of 2 x rows x heads x S^2 x width. By the width of keys: the scores forward, again in the
    # backward pass, and their two gradients. By that of values: the output and two gradients.
    one = 2 * 4 * 4 * 256 * 256 // 2
    flops = weighed.ledger.flops
    assert flops.by_module["layers/attention_block/attention"] == one * (4 * keys + 3 * values)
    assert flops.model == in_blocks.ledger.flops.model
    assert flops.executed < in_blocks.ledger.flops.executed  # whose blocks multiply above the diagonal too
    assert not weighed.ledger.unpriced
    reasons = weighed.prediction.interval_reasons
    assert f"attention with heads of {keys} has the rate of heads of 128: no wider was measured" in reasons


@pytest.mark.parametrize(
    ("platform", "length", "has_bias"), [("cuda", 8, True), ("cuda", 9, False), ("cpu", 8, False)]
)
def test_documents_say_where_each_token_stands(platform, length, has_bias, context):
    run = context(platform=platform, dtype=jnp.bfloat16)
    segments = np.array([[0, 0, 1, 2, 2, 2, 2, 2, 3], [0] * 9], np.int32)[:, :length]
    found = jax.jit(lambda s: documents_of(s, run, 64))(segments)
    wanted = np.array([[0, 1, 0, 0, 1, 2, 3, 4, 0], list(range(9))])[:, :length]
    np.testing.assert_array_equal(found.positions, wanted)
    assert (found.bias is not None) is has_bias  # cuDNN takes none of odd length
    if has_bias:
        assert found.bias.shape == (2, 1, 8, 8)
        same = segments[:, :, None] == segments[:, None, :]
        np.testing.assert_array_equal(np.asarray(found.bias[:, 0], np.float32) == 0, same)
        assert float(found.bias.min()) < -1e12


def test_attention_stays_inside_documents_whatever_the_blocks(context, small_blocks):
    run, (query, key, value) = context(), inputs(30, 4, 2)
    lengths = (3, 14, 1, 12)
    segments = jnp.array(np.repeat(np.arange(4, dtype=np.int32), lengths)[None].repeat(2, 0))
    documents = documents_of(segments, run, 8)
    out = jax.jit(lambda *x: causal_attention(*x, run, documents))(query, key, value)
    for start, length in zip((0, 3, 17, 18), lengths, strict=True):
        part = slice(start, start + length)
        wanted = plain(query[:, part], key[:, part], value[:, part])
        np.testing.assert_allclose(out[:, part], wanted, atol=2e-6)


@pytest.mark.wide
def test_with_cudnn_packed_documents_compile_for_a_gpu_that_is_not_there_and_count_as_one_window():
    sizes = ["model.num_layers=2", "precision=bf16", "batch.sequence_length=128", "batch.sequences=4"]
    data = ["data.source=tokens", "data.path=absent.bin", "data.dtype=uint16"]
    packed = ["data.documents=packed", "data.end_of_document=255"]
    joined, apart = (
        mw.weigh("bytes-nano", on="1xH100", overrides=[*sizes, *data, *more]) for more in ([], packed)
    )
    assert apart.ledger.flops.model == joined.ledger.flops.model
    assert apart.ledger.flops.executed == joined.ledger.flops.executed
    # By hand: 7 products (2 forward, 5 backward) in each of 2 layers, half of 2 x rows x heads x S^2 x width.
    causal = 7 * 2 * (2 * 4 * 4 * 128 * 128 * 16) // 2
    assert apart.ledger.flops.by_module["layers/attention_block/attention"] == causal
    assert not apart.ledger.unpriced
    more = apart.ledger.memory.reserved_bytes - joined.ledger.memory.reserved_bytes
    assert 0 < more <= 1.25 * 2 * (4 * 128 * 128 * 2) + 64 * 1024  # a bias and its gradient in bf16


@pytest.mark.wide
def test_heads_that_are_no_multiple_of_eight_are_filled_for_cudnn_and_count_as_they_are():
    """Of 100 numbers (OpenLLaMA 3B): 104 run, 100 are needed; scores are scaled by the root of 100."""
    weighed, plain = (
        mw.weigh(
            "bytes-nano", on="1xH100", overrides={**TWO_BLOCKS, "model.head_dim": 100, "precision": each}
        )
        for each in ("bf16", "fp32")
    )
    one = 2 * 4 * 4 * 256 * 256 // 2
    flops, attention = weighed.ledger.flops, "layers/attention_block/attention"
    assert flops.model == plain.ledger.flops.model
    assert flops.by_module[attention] == one * 7 * 104
    assert flops.model_by_module[attention] == one * 6 * 100
    text = read_text(weighed.folder, "program.hlo.txt")
    assert re.findall(r'"fmha_scale":([0-9.]+)', text.replace(" ", "")) == ["0.1", "0.1"]


def test_a_fused_kernel_attends_with_sinks(monkeypatch):
    """Where its two calls, which know no sinks, are replaced by what cuDNN documents of them."""

    def scores_of(query, key, how):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * how.scale
        return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None], scores, -1e30)

    def forward(query, key, value, bias, how):
        scores = scores_of(query, key, how)
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value), jax.nn.logsumexp(scores, axis=-1)

    def backward(query, key, value, bias, how, result):
        log_sum_exp, out, d_out = result
        weights = jnp.exp(scores_of(query, key, how) - log_sum_exp[..., None])
        product = jnp.einsum("bqhd,bqhd->bhq", out, d_out)
        d_scores = weights * (jnp.einsum("bqhd,bkhd->bhqk", d_out, value) - product[..., None]) * how.scale
        of_query, of_key = "bhqk,bkhd->bqhd", "bhqk,bqhd->bkhd"
        d_value = jnp.einsum(of_key, weights, d_out)
        return jnp.einsum(of_query, d_scores, key), jnp.einsum(of_key, d_scores, query), d_value

    def wanted(query, key, value, sinks):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None], scores, -1e30)
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1))[..., :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    monkeypatch.setattr(attention_blocks, "_cudnn_forward", forward)
    monkeypatch.setattr(attention_blocks, "_cudnn_backward", backward)
    random = np.random.default_rng(0)
    arrays = [jnp.array(random.standard_normal((2, 6, 3, 8), dtype="float32")) for _ in range(3)]
    arrays.append(jnp.array(random.standard_normal(3, dtype="float32")))
    results = []
    for run in (lambda q, k, v, s: cudnn_attention(q, k, v, None, None, sinks=s), wanted):
        results.append((run(*arrays), jax.vjp(run, *arrays)[1](arrays[0])))
    for mine, their in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-5)


def test_filled_heads_attend_as_they_are(monkeypatch):
    """Where the kernel is replaced by the definition: outputs and gradients of heads of 5 numbers."""

    def attended(query, key, value, bias, sinks, how):
        assert query.shape[-1] == 8
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * how.scale
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), value)

    monkeypatch.setattr(attention_blocks, "_cudnn_attention", attended)
    random = np.random.default_rng(0)
    arrays = [jnp.array(random.standard_normal((2, 6, 3, 5), dtype="float32")) for _ in range(3)]
    results = []
    for run in (
        lambda *x: cudnn_attention(*x, None, None),
        lambda *x: jax.nn.dot_product_attention(*x, is_causal=True),
    ):
        with jax.numpy_rank_promotion("allow"):
            results.append((run(*arrays), jax.vjp(run, *arrays)[1](arrays[0])))
    for mine, their in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-5)
