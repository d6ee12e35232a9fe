"""The sequence split over `context`, on eight simulated devices, against one device."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import meshwright as mw
from meshwright.config import TransformerModel
from meshwright.contrib.context_attention import allgather_attention, part_sizes
from meshwright.trainer.models import attention, attention_blocks, initial_parameters
from meshwright.trainer.models.attention import Shape, in_ring_order, kernel_attention, ring_positions
from meshwright.trainer.models.attention_blocks import Blocks
from meshwright.trainer.models.transformer import Transformer
from meshwright.worker import count_traced
from tests.rounding import rounding_of

pytestmark = pytest.mark.quick

LLAMA = TransformerModel(
    kind="transformer", num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=20,
    vocab_size=32, rope_theta=100.0, loss_chunk=4,
)  # fmt: skip
GPT = TransformerModel(
    kind="transformer", num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=4, mlp_dim=20, vocab_size=32,
    norm="layer", norm_epsilon=1e-5, position="learned", max_positions=64, mlp="plain", activation="gelu",
    tied_embeddings=True, bias=True, loss_chunk=512, unroll=True,
)  # fmt: skip
MODELS = {"rotary": LLAMA, "learned": GPT}
LENGTH = 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Two blocks on each device that has eight positions."""
    monkeypatch.setattr(attention_blocks, "MIN_BLOCK", 4)
    monkeypatch.setattr(attention_blocks, "MAX_BLOCKS", 2)


@pytest.fixture
def ring(monkeypatch):
    """Keys and values go round the ring, however small they are."""
    monkeypatch.setattr(attention, "MOST_GATHERED_BYTES", 0)


def test_each_device_holds_a_piece_from_either_end(mesh):
    split = mesh(data=2, context=4)
    rows = jnp.arange(2 * 16).reshape(2, 16)
    found = jax.jit(lambda x: in_ring_order(x, split))(rows)
    order = [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    np.testing.assert_array_equal(found, rows[:, np.array(order)])
    np.testing.assert_array_equal(jax.jit(lambda: ring_positions(16, split))(), order)
    assert found.sharding.shard_shape(found.shape) == (1, 4)


def test_without_the_axis_the_order_is_that_of_the_window(mesh):
    rows = jnp.arange(6).reshape(2, 3)
    assert in_ring_order(rows, mesh(data=2)) is rows


def test_parts_of_keys_add_up_to_whatever_a_piece_of_queries_needs():
    for total in range(70):
        sizes = part_sizes(total)
        assert sum(sizes) == total
        assert len(sizes) == total.bit_length()
        sums = {0}
        for size in sizes:
            sums |= {size + other for other in sums}
        assert sums == set(range(total + 1))


@pytest.mark.parametrize(
    ("axes", "documents", "most_gathered"),
    [
        ({"context": 3}, True, 2**28),
        ({"data": 2, "context": 2, "tensor": 2}, False, 0),
        pytest.param({"context": 3}, False, 2**28, marks=pytest.mark.wide),
        pytest.param({"data": 2, "context": 2, "tensor": 2}, False, 2**28, marks=pytest.mark.wide),
        pytest.param({"context": 8}, False, 2**28, marks=pytest.mark.wide),
        pytest.param({"context": 8}, False, 0, marks=pytest.mark.wide),
        pytest.param({"data": 2, "context": 2, "tensor": 2}, True, 2**28, marks=pytest.mark.wide),
    ],
)
def test_attention_over_context_gives_what_jaxs_own_gives(mesh, axes, documents, most_gathered, monkeypatch):
    monkeypatch.setattr(attention, "MOST_GATHERED_BYTES", most_gathered)
    split, length = mesh(**axes), 48
    random = np.random.default_rng(1)
    shapes = ((2, length, 4, 8), *((2, length, 2, 8),) * 2, (2, length, 4, 8))
    *arrays, d_out = (jnp.array(random.standard_normal(shape, dtype="float32")) for shape in shapes)
    segments = jnp.array(np.sort(random.integers(0, 4, (2, length)), axis=1).astype(np.int32))
    order = np.asarray(jax.jit(lambda: ring_positions(length, split))())

    def ours(query, key, value):
        ordered = [x[:, order] for x in (query, key, value, segments)]
        given = ordered[3] if documents else None
        return kernel_attention(*ordered[:3], given, None, split, Blocks())[:, np.argsort(order)]

    mask = segments[:, None, :, None] == segments[:, None, None, :] if documents else None

    def theirs(*x):
        return jax.nn.dot_product_attention(*x, mask=mask, is_causal=True)

    found = jax.jit(lambda *x: (ours(*x), jax.vjp(ours, *x)[1](d_out)))(*arrays)
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.jit(lambda *x: (theirs(*x), jax.vjp(theirs, *x)[1](d_out)))(*arrays)
    for mine, their in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "shape", "documents", "most_gathered"),
    [
        (1, Shape(17, 2.0), True, 2**28),  # one device, with gradients of its own
        pytest.param(1, Shape(5), False, 2**28, marks=pytest.mark.wide),
        (3, Shape(17, 2.0), True, 2**28),  # pieces of 8: a window over several of them
        pytest.param(2, Shape(5), False, 2**28, marks=pytest.mark.wide),
        (4, Shape(None, 2.0), False, 0),
        pytest.param(3, Shape(5), False, 2**28, marks=pytest.mark.wide),
        pytest.param(4, Shape(47), False, 2**28, marks=pytest.mark.wide),
        pytest.param(2, Shape(1), False, 2**28, marks=pytest.mark.wide),
        pytest.param(4, Shape(None, 2.0), False, 2**28, marks=pytest.mark.wide),
    ],
)
def test_windows_and_caps_are_those_of_the_definition(
    mesh, size, shape, documents, most_gathered, monkeypatch
):
    monkeypatch.setattr(attention, "MOST_GATHERED_BYTES", most_gathered)
    monkeypatch.setattr(allgather_attention, "EVEN", 1)
    split, length = mesh(context=size), 48
    random = np.random.default_rng(1)
    shapes = ((2, length, 4, 8), *((2, length, 2, 8),) * 2, (2, length, 4, 8))
    *arrays, d_out = (jnp.array(random.standard_normal(shape, dtype="float32")) for shape in shapes)
    segments = jnp.array(np.sort(random.integers(0, 4, (2, length)), axis=1).astype(np.int32))
    order = np.asarray(jax.jit(lambda: ring_positions(length, split))())

    def ours(query, key, value):
        ordered = [x[:, order] for x in (query, key, value, segments)]
        given = ordered[3] if documents else None
        out = kernel_attention(*ordered[:3], given, None, split, Blocks(shape.cap), shape.window)
        return out[:, np.argsort(order)]

    place = np.arange(length)
    behind = place[:, None] - place[None]
    mask = jnp.asarray((behind >= 0) & (behind < (shape.window or length)))[None]
    if documents:
        mask = mask & (segments[:, :, None] == segments[:, None, :])

    def theirs(query, key, value):
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5
        scores = scores if shape.cap is None else shape.cap * jnp.tanh(scores / shape.cap)
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    found, wanted = (
        jax.jit(lambda *x, run=run: (run(*x), jax.vjp(run, *x)[1](d_out)))(*arrays) for run in (ours, theirs)
    )
    for mine, their in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "window", "documents", "most_gathered"),
    [
        (1, 7, True, 2**28),
        pytest.param(2, None, False, 2**28, marks=pytest.mark.wide),
        (4, None, False, 0),
        pytest.param(2, 7, False, 2**28, marks=pytest.mark.wide),
        pytest.param(4, None, True, 0, marks=pytest.mark.wide),
    ],
)
def test_a_sink_is_a_score_whose_value_is_zero(mesh, size, window, documents, most_gathered, monkeypatch):
    monkeypatch.setattr(attention, "MOST_GATHERED_BYTES", most_gathered)
    monkeypatch.setattr(allgather_attention, "EVEN", 1)
    split, length = mesh(context=size), 48
    random = np.random.default_rng(1)
    shapes = ((2, length, 4, 8), *((2, length, 2, 8),) * 2, (4,), (2, length, 4, 8))
    *arrays, d_out = (jnp.array(random.standard_normal(shape, dtype="float32")) for shape in shapes)
    segments = jnp.array(np.sort(random.integers(0, 4, (2, length)), axis=1).astype(np.int32))
    order = np.asarray(jax.jit(lambda: ring_positions(length, split))())

    def ours(query, key, value, sinks):
        ordered = [x[:, order] for x in (query, key, value, segments)]
        given = ordered[3] if documents else None
        out = kernel_attention(*ordered[:3], given, sinks, split, Blocks(), window)
        return out[:, np.argsort(order)]

    behind = np.arange(length)[:, None] - np.arange(length)[None]
    mask = jnp.asarray((behind >= 0) & (behind < (window or length)))[None]
    if documents:
        mask = mask & (segments[:, :, None] == segments[:, None, :])

    def theirs(query, key, value, sinks):
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5
        scores = jnp.where(mask[:, None], scores, -1e30)
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1))[..., :-1]
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    found, wanted = (
        jax.jit(lambda *x, run=run: (run(*x), jax.vjp(run, *x)[1](d_out)))(*arrays) for run in (ours, theirs)
    )
    for mine, their in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-5)


def batch_of(documents):
    random = np.random.default_rng(0)
    batch = {"tokens": random.integers(32, size=(4, LENGTH + 1), dtype=np.int32)}
    if documents:
        batch["segments"] = np.sort(random.integers(0, 5, size=(4, LENGTH + 1), dtype=np.int32), axis=1)
    return batch


@functools.cache
def drawn(name):
    return jax.jit(lambda: initial_parameters(Transformer(MODELS[name]).parameters(), jax.random.key(1)))()


def loss_and_gradients(name, context, documents):
    """The jitted function and its arguments."""
    model = Transformer(MODELS[name])
    parameters = drawn(name)
    run = jax.jit(jax.value_and_grad(lambda p, b: model.loss(p, {}, b, context)[0]))
    return run, parameters, batch_of(documents)


# Each axis beside it, each format, each way of rematerialisation, each kind of position, documents: these go
# round the ring, all else is gathered. In `make test` two of these: tests/test_layouts.py and
# tests/contrib/pipelines/test_pipeline.py have the axis too.
@pytest.mark.parametrize(
    ("axes", "name", "dtype", "remat", "documents"),
    [
        ({"data": 2, "context": 4}, "learned", jnp.float32, "full", True),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (
                ({"fsdp": 2, "context": 2, "tensor": 2}, "rotary", jnp.bfloat16, "dots-attention", False),
                ({"context": 8}, "rotary", jnp.float32, "none", False),
                ({"fsdp": 2, "context": 2, "tensor": 2}, "rotary", jnp.float32, "dots-attention", True),
                ({"fsdp": 2, "context": 2, "tensor": 2}, "learned", jnp.bfloat16, "dots-attention", False),
                ({"data": 2, "context": 4}, "rotary", jnp.bfloat16, "dots", False),
            )
        ),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(axes, name, dtype, remat, documents, context):
    def found_by(run_context):
        run, parameters, batch = loss_and_gradients(name, run_context, documents)
        return lambda other=parameters: run(other, batch)

    found = found_by(context(dtype=dtype, remat=remat, **axes))()
    wanted, wanted_gradients = exact = found_by(context())()
    if dtype == jnp.bfloat16:
        narrow = found_by(context(dtype=dtype))
        assert not rounding_of(narrow, drawn(name), exact, "bf16").strays(found)
        return
    assert float(found[0]) == pytest.approx(float(wanted), rel=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted_gradients))
    for mine, their in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(mine, their, atol=1e-5 * largest)


def messages(jaxpr, kind="ppermute"):
    """Messages of a kind in a traced program, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == kind
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(messages(inner, kind) for inner in jaxprs_in_params(eqn.params))
    return total


@pytest.mark.parametrize(
    ("remat", "runs"), [pytest.param("none", 1, marks=pytest.mark.wide), ("dots-attention", 1), ("full", 2)]
)
def test_only_full_rematerialisation_runs_the_ring_again(remat, runs, context, ring):
    """Messages round a ring of 4: 3 forward; backward 3 with keys, 3 with their gradients, 1 home."""
    run, *arguments = loss_and_gradients("rotary", context(remat=remat, context=4), False)
    assert messages(jax.make_jaxpr(run)(*arguments).jaxpr) == LLAMA.num_layers * (3 * runs + 3 + 3 + 1)


@pytest.mark.parametrize(("remat", "runs"), [("dots-attention", 1), ("full", 2)])
def test_keys_and_values_are_gathered_forward_and_backward_and_their_gradients_scattered(
    remat, runs, context
):
    run, *arguments = loss_and_gradients("rotary", context(remat=remat, context=4), False)
    traced = jax.make_jaxpr(run)(*arguments).jaxpr
    assert messages(traced, "all_gather") == LLAMA.num_layers * (runs + 1)
    assert messages(traced, "reduce_scatter") == LLAMA.num_layers
    assert messages(traced) == 0


@pytest.mark.parametrize("axes", [{"context": 8}, {"data": 2, "context": 2, "tensor": 2}])
def test_model_flops_are_those_of_one_device(axes, context):
    counted = []
    for where in (context(), context(**axes)):
        run, *arguments = loss_and_gradients("rotary", where, False)
        counted.append(count_traced(jax.make_jaxpr(run)(*arguments).jaxpr, "cuda"))
    alone, split = counted
    assert split.by_phase == alone.by_phase
    # By hand: 6 products of half of sequence^2 x width for each row, head and layer, and the scores again.
    half = Fraction(2 * 4 * 4 * LENGTH**2 * 8, 2)
    assert split.attention == 2 * 6 * half
    assert split.by_phase["recompute"] == 2 * half


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("model.head_dim=64", marks=pytest.mark.wide),
        pytest.param("model.score_cap=30.0", marks=pytest.mark.long),
    ],
)
def test_windows_over_context_compile_for_absent_gpus_with_the_model_flops_of_one(shape):
    """By cuDNN, and in blocks where scores are capped."""
    sizes = ("model.num_layers=1", "model.embed_dim=128", "model.num_heads=2", "model.num_kv_heads=2", shape)
    batch = ("batch.sequences=2", "batch.sequence_length=2048", "data.source=synthetic", "precision=bf16")
    alone, split = (
        mw.weigh("bytes-nano", on=fleet, layout=layout, overrides=(*sizes, *batch, "model.window=256"))
        for fleet, layout in (("1xH100", "data=1"), ("2xH100", "context=2"))
    )
    assert split.ledger.flops.model == alone.ledger.flops.model
