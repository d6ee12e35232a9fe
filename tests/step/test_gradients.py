"""Gradients over microbatches and replicas, and the loss scale of half precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.config import load_config
from meshwright.trainer.data import open_data
from meshwright.trainer.models import Outcome
from meshwright.trainer.step import (
    FIRST_SCALE,
    GOOD_STEPS,
    LEAST_SCALE,
    MOST_SCALE,
    build_step,
    gradients_by_replica,
    gradients_of,
    next_scale,
)
from tests.rounding import FLOAT32, rounding_of

pytestmark = pytest.mark.quick

# Microbatches against the whole batch at once, and replicas that sum up their own.


P = PartitionSpec


def loss(parameters, state, batch, key):
    """A mean square; the state counts the microbatches, and a metric shows the mean input."""
    error = batch["x"] * parameters["w"] - 1
    return jnp.mean(error**2), Outcome({"seen": state["seen"] + 1}, {"mean": jnp.mean(batch["x"])})


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_however_a_batch_is_cut_loss_gradient_and_metrics_are_those_of_the_whole(mesh, num_microbatches):
    x = np.linspace(-1, 2, 16, dtype=np.float32)
    parameters, whole = {"w": jnp.float32(0.5)}, {"w": NamedSharding(mesh(), PartitionSpec())}
    value, outcome, gradient = jax.jit(
        lambda batch: gradients_of(loss, whole, parameters, {"seen": 0}, batch, jax.random.key(0))
    )({"x": x.reshape(num_microbatches, -1)})
    by_hand = 0.5 * x - 1
    assert float(value) == pytest.approx(np.mean(by_hand**2), rel=FLOAT32)
    assert float(gradient["w"]) == pytest.approx(np.mean(2 * by_hand * x), rel=FLOAT32)
    assert float(outcome.metrics["mean"]) == pytest.approx(np.mean(x), rel=FLOAT32)
    assert int(outcome.state["seen"]) == num_microbatches


@pytest.mark.parametrize("spec", [P(), P("data"), P("fsdp"), P(("fsdp", "data"))], ids=str)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_replicas_that_sum_up_their_own_rows_give_the_whole_batchs_mean(mesh, num_microbatches, spec):
    axes = mesh(data=2, fsdp=2)
    x = np.linspace(-1, 2, 16, dtype=np.float32)
    parameters = {"w": jnp.linspace(0.5, 1.5, 8)}
    shardings = {"w": NamedSharding(axes, spec)}

    def loss(parameters, state, batch, key):
        mean = jnp.mean(batch["x"])
        return jnp.mean(parameters["w"]) * mean, Outcome({}, {"mean": mean})

    rows = NamedSharding(axes, P(None, ("data", "fsdp")))
    batch = {"x": jax.device_put(np.stack([x] * num_microbatches), rows)}
    value, outcome, gradient = jax.jit(
        lambda batch: gradients_by_replica(loss, shardings, parameters, {}, batch, jax.random.key(0))
    )(batch)
    assert float(value) == pytest.approx(np.mean(x), rel=FLOAT32)
    assert float(outcome.metrics["mean"]) == pytest.approx(np.mean(x), rel=FLOAT32)
    np.testing.assert_allclose(gradient["w"], np.mean(x) / 8, rtol=1e-6)
    if num_microbatches > 1:
        assert gradient["w"].sharding.is_equivalent_to(shardings["w"], 1)


@pytest.mark.parametrize(("format", "total"), [(None, 256 + 255 * 0.5), (jnp.bfloat16, 256.0)])
def test_a_sum_in_bf16_loses_what_is_below_half_its_last_digit(mesh, format, total):
    x = np.array([256.0] + [0.5] * 255, np.float32)[:, None]  # beside 256, bf16 numbers are 2 apart
    whole = {"w": NamedSharding(mesh(), P())}
    formats = None if format is None else {"w": format}

    def linear(parameters, state, batch, key):
        return parameters["w"] * batch["x"][0], Outcome({}, {})

    found = jax.jit(
        lambda batch: gradients_of(
            linear, whole, {"w": jnp.float32(1)}, {}, batch, jax.random.key(0), formats=formats
        )[2]["w"]
    )({"x": x})
    assert found.dtype == jnp.float32
    assert float(found) == total / 256


@pytest.mark.once
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"data": 4}, marks=pytest.mark.wide),
        {"data": 2, "fsdp": 2},
        pytest.param({"stage": 2, "data": 2}, marks=pytest.mark.long),
        pytest.param({"context": 2, "tensor": 2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="whole", marks=pytest.mark.wide), pytest.param(("zero1=true",), id="zero1")],
)
def test_sums_in_bf16_give_every_layout_the_gradient_of_fp32_to_their_precision(mesh, layout, more):
    def figures(gradient_sum):
        chosen = ["precision=bf16", "batch.sequences=16", "batch.microbatch_sequences=2", *more]
        config = load_config("bytes-nano", [*chosen, f"gradient_sum={gradient_sum}"])
        built = build_step(config, mesh(**layout))
        state = jax.jit(built.init)(jnp.uint32(0))
        tokens = np.random.default_rng(0).integers(0, 256, built.batch["tokens"].shape, np.int32)
        after, metrics = built.step(state, {"tokens": jax.device_put(tokens, built.batch["tokens"].sharding)})
        moments = jax.tree.leaves(after["optimizer"])  # after one step, a tenth of the clipped gradient
        return float(metrics["gradient_norm"]), [np.asarray(x) for x in moments if x.ndim]

    (exact, moments), (rough, others) = (figures(format) for format in ("fp32", "bf16"))
    assert rough == pytest.approx(exact, rel=2**-7)
    assert rough != exact
    # Eight microbatches, and at most four devices, are added up in bf16: a dozen roundings of the sum so far,
    # which are at most half a unit of roundoff of it at the mean, and 8 units are allowed.
    for one, other in zip(moments, others, strict=True):
        assert np.linalg.norm(other - one) < 2**-5 * np.linalg.norm(one)


BLOCKS, TABLE = 2 * (3 * 64**2 + 3 * 64 * 128), 256 * 64  # numbers of `bytes-nano`, which has two tables


def _weighed(gradient_sum, layout, microbatch):
    """Return the ledger of `bytes-nano` in bf16 on eight H100, and its payloads by kind of message."""
    chosen = {"precision": "bf16", "batch.sequences": 16, "batch.microbatch_sequences": microbatch}
    chosen["gradient_sum"] = gradient_sum
    ledger = mw.weigh("bytes-nano", on="8xH100", layout=layout, overrides=chosen).ledger
    payloads = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0)
    for row in ledger.traffic:
        if row.kind in payloads:
            payloads[row.kind] += row.payload_bytes
    return ledger, payloads


@pytest.mark.wide
def test_sums_in_bf16_halve_the_gradients_memory_and_what_crosses_data():
    (wide, messages), (narrow, fewer) = (_weighed(format, "data=8", 1) for format in ("fp32", "bf16"))
    assert messages["all-reduce"] - fewer["all-reduce"] == 2 * (BLOCKS + 2 * TABLE)
    assert wide.memory.reserved_bytes - narrow.memory.reserved_bytes > 1.5 * (BLOCKS + 2 * TABLE)


@pytest.mark.wide
def test_gradients_all_in_fp32_cross_fsdp_and_data_in_four_bytes_and_weights_still_in_two():
    narrow, wide = (_weighed(format, "data=2,fsdp=4", 2)[1] for format in ("fp32", "all-fp32"))
    assert wide["all-gather"] == narrow["all-gather"]
    assert wide["reduce-scatter"] - narrow["reduce-scatter"] == 2 * (BLOCKS + TABLE) / 4  # one is a head
    assert wide["all-reduce"] - narrow["all-reduce"] == 2 * (BLOCKS + 2 * TABLE) / 4


STAGE_FSDP_CONTEXT = ({"stage": 2, "fsdp": 2, "context": 2}, ("batch.microbatch_sequences=2",))


@pytest.mark.once
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param({"fsdp": 8}, (), marks=pytest.mark.wide),
        ({"data": 2, "fsdp": 2, "tensor": 2}, ("batch.microbatch_sequences=2",)),
        pytest.param(*STAGE_FSDP_CONTEXT, marks=pytest.mark.long),
        pytest.param(
            {"stage": 2, "data": 2}, ("batch.microbatch_sequences=2", "zero1=true"), marks=pytest.mark.wide
        ),
        pytest.param({"fsdp": 2, "tensor": 2}, ("precision=fp8",), marks=pytest.mark.long),
        pytest.param({"fsdp": 2}, ("lora.rank=4",), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_gradients_all_in_fp32_are_those_of_one_device_and_change_no_loss(mesh, layout, more):
    one = [each for each in more if "microbatch" not in each and "zero1" not in each]
    alone = Nano("all-fp32", mesh(), one)
    exact = Nano("fp32", mesh(), [*one, "precision=fp32"], alone.state)
    drawn = None if "stage" in layout else alone.state  # stages have other shapes
    wide = Nano("all-fp32", mesh(**layout), more, drawn)()
    same = Nano("fp32", mesh(**layout), more, drawn)()
    assert wide[0] == same[0], "the forward pass is the same"
    precision = "fp8" if "precision=fp8" in more else "bf16"
    assert not rounding_of(alone, alone.start, exact(), precision).strays(wide)


@pytest.mark.wide
@pytest.mark.parametrize("remat", ["dots", pytest.param("alternate-dots", marks=pytest.mark.long)])
def test_gradients_all_in_fp32_change_nothing_of_what_a_policy_repeats(remat):
    chosen = {"precision": "bf16", "remat": remat}
    flops = [
        mw.weigh("bytes-nano", on="1xH100", overrides={**chosen, "gradient_sum": format}).ledger.flops
        for format in ("fp32", "all-fp32")
    ]
    assert flops[0].executed == flops[1].executed


@pytest.mark.wide
def test_of_a_run_with_adapters_only_their_gradients_are_in_fp32():
    """A frozen matrix that was widened would be saved so for the backward pass, for each layer of a loop."""
    chosen = {"precision": "bf16", "remat": "none", "layer_loop": "keep", "lora.rank": 4}
    saved = [
        mw.weigh("bytes-nano", on="1xH100", overrides={**chosen, "gradient_sum": format}).ledger.memory
        for format in ("fp32", "all-fp32")
    ]
    assert saved[1].reserved_bytes < 1.01 * saved[0].reserved_bytes


def placed_state(drawn, built):
    """Return a state that was drawn once as arrays on the devices of a step."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), drawn, built.state)


class Nano:
    """A step of `bytes-nano` in bf16, from its start or from other parameters.

    Its start is `drawn` where that is given: tests/step/test_build.py sees that every layout draws the same.
    """

    def __init__(self, gradient_sum, mesh, more, drawn=None):
        chosen = ["precision=bf16", "batch.sequences=16", *more, f"gradient_sum={gradient_sum}"]
        self.built = build_step(load_config("bytes-nano", chosen), mesh)
        self.state = drawn or jax.tree.map(np.array, jax.jit(self.built.init)(jnp.uint32(0)))
        self.start = {name: self.state[name] for name in ("parameters", "frozen") if name in self.state}

    def __call__(self, start=None):
        """Return the loss, the gradient's norm and the moments after the step."""
        state = {**self.state, **(start or self.start)}
        state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, self.built.state)
        tokens = self.built.batch["tokens"]
        shape = (16, tokens.shape[-1])
        drawn = np.random.default_rng(0).integers(0, 256, shape, np.int32).reshape(tokens.shape)
        after, metrics = self.built.step(state, {"tokens": jax.device_put(drawn, tokens.sharding)})
        moments = [np.asarray(x) for x in jax.tree.leaves(after["optimizer"]) if x.ndim]
        return np.asarray(metrics["loss"]), np.asarray(metrics["gradient_norm"]), moments


PACKED = ("data.source=tokens", "data.path=absent.bin", "data.dtype=uint16")
PACKED += ("data.documents=packed", "data.end_of_document=0", "model.dropout=0.1", "precision=fp32")
PACKED += (
    "optimizer.kind=sgd",
    "optimizer.learning_rate=1.0",
    "model.num_layers=2",
    "batch.sequences=8",
    "batch.sequence_length=32",
)
LEARNED = ("model.position=learned", "model.rope_theta=none", "model.max_positions=32")
LEARNED += ("model.tied_embeddings=true",)


@pytest.mark.once
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"data": 2, "fsdp": 2}, marks=pytest.mark.wide),
        {"data": 2, "context": 2, "tensor": 2},
        pytest.param({"fsdp": 2, "context": 4}, marks=pytest.mark.wide),
    ],
    ids=str,
)
@pytest.mark.parametrize("learned", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gaps_and_dropout_do_not_depend_on_which_device_sees_a_token(axes, learned, mesh):
    """Rows of different numbers of documents, so that devices count different numbers of tokens."""
    random = np.random.default_rng(0)
    segments = np.sort(random.integers(0, np.arange(1, 17, 2)[:, None], (8, 33)), axis=1)
    batch = {"tokens": random.integers(256, size=(8, 33)), "segments": segments}
    found, drawn = [], None
    for where in ({}, axes):
        rows = 4 // (where.get("data", 1) * where.get("fsdp", 1))
        model = (*PACKED, *(LEARNED if learned else ()), f"batch.microbatch_sequences={rows}")
        config = load_config("bytes-nano", model)
        built = build_step(config, mesh(**where))
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x.reshape(like.shape).astype(np.int32), like.sharding),
            batch,
            built.batch,
        )
        drawn = drawn or jax.tree.map(np.array, built.init(np.uint32(0)))
        state = placed_state(drawn, built)
        state, metrics = built.step(state, placed)
        found.append((metrics["loss"], metrics["gradient_norm"], state["parameters"]["layers"]["mlp"]["up"]))
    for alone, split in zip(*found, strict=True):
        np.testing.assert_allclose(split, alone, rtol=1e-4, atol=1e-6)


# The policies fp32, bf16, fp16 and fp8: losses, gradients, and the loss scale.


NUM_STEPS = 60
FARTHEST = {"bf16": 0.03, "fp16": 0.03, "fp8": 0.06}  # nats of held-out loss from fp32, as in the document


@pytest.fixture(scope="module")
def built_on():
    @functools.cache
    def build(mesh, precision, *overrides):
        config = load_config("bytes-nano", (f"precision={precision}", *overrides))
        return build_step(config, mesh), open_data(config)

    return build


def place(batch, built):
    return jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding), batch, built.batch
    )


@pytest.fixture(scope="module")
def held_out_loss(built_on):
    @functools.cache
    def train(mesh, precision):
        built, data = built_on(mesh, precision)
        state = built.init(np.uint32(0))
        for index in range(NUM_STEPS):
            state, metrics = built.step(state, place(data.batch(index, "train"), built))
            assert int(metrics["applied"]) == 1
        judged = [
            built.evaluate(state["parameters"], state["model_state"], place(data.batch(i, "held-out"), built))
            for i in range(8)
        ]
        return float(np.mean([float(each["loss"]) for each in judged]))

    return train


@pytest.mark.once
@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(each, marks=pytest.mark.wide) for each in ("fp16", "fp8"))]
)
def test_each_precision_learns_what_fp32_learns(mesh, held_out_loss, precision):
    plain = held_out_loss(mesh(), "fp32")
    assert plain < 4.0  # from 5.5 nats of equal chances
    assert abs(held_out_loss(mesh(), precision) - plain) < FARTHEST[precision]


def gradients_norm(built, data):
    state = built.init(np.uint32(0))
    return float(built.step(state, place(data.batch(0, "train"), built))[1]["gradient_norm"])


@pytest.mark.once
@pytest.mark.parametrize(
    ("precision", "tolerance", "overrides"),
    [("fp16", 2e-3, ("batch.microbatch_sequences=2",)), ("fp8", 5e-2, ())],
)
def test_gradients_are_those_of_fp32_whatever_the_scale(mesh, built_on, precision, tolerance, overrides):
    norms = [
        gradients_norm(*built)
        for built in (built_on(mesh(), "fp32"), built_on(mesh(), precision, *overrides))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=tolerance)


@pytest.mark.parametrize(
    ("precision", "more"),
    [("fp16", ()), ("fp8", ()), pytest.param("fp8", ("remat=none",), marks=pytest.mark.wide)],
)
def test_eight_devices_compute_what_one_computes(mesh, built_on, precision, more):
    losses, drawn = [], None
    for axes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        built, data = built_on(mesh(**axes), precision, *(more if axes else ()))
        drawn = drawn or jax.tree.map(np.array, built.init(np.uint32(0)))
        state = placed_state(drawn, built)
        _, metrics = built.step(state, place(data.batch(0, "train"), built))
        losses.append([float(metrics["loss"]), float(metrics["gradient_norm"])])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.wide
def test_latent_attention_in_eight_bits_computes_the_same_on_eight_devices(mesh, built_on):
    latent = ("model.latent_rank=16", "model.rotary_dim=8", "model.query_rank=24", "model.num_kv_heads=4")
    losses = []
    for axes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        built, data = built_on(mesh(**axes), "fp8", *latent)
        _, metrics = built.step(built.init(np.uint32(0)), place(data.batch(0, "train"), built))
        losses.append([float(metrics["loss"]), float(metrics["gradient_norm"])])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.once
def test_the_whole_sequence_decides_which_factors_longrope_takes_where_context_splits_it(mesh, built_on):
    """A sequence of 64 positions is long here; the 16 of each device would not be."""
    stretched = ("batch.microbatch_sequences=2", "model.rope_stretching=longrope")
    stretched += ("model.rope_original_positions=32",)
    stretched += (f"model.rope_short_factors={[1.0] * 8}", f"model.rope_long_factors={[4.0] * 8}")
    losses, drawn = [], None
    for axes in ({}, {"context": 4, "data": 2}):
        built, data = built_on(mesh(**axes), "fp32", *stretched)
        drawn = drawn or jax.tree.map(np.array, built.init(np.uint32(0)))
        state = placed_state(drawn, built)
        losses.append(float(built.step(state, place(data.batch(0, "train"), built))[1]["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_only_fp16_keeps_a_loss_scale(mesh, built_on):
    for precision in ("fp32", "bf16", "fp8"):
        assert "loss_scale" not in built_on(mesh(), precision)[0].state
    state = built_on(mesh(), "fp16")[0].init(np.uint32(0))
    assert float(state["loss_scale"]["scale"]) == 2**15 == FIRST_SCALE
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state["parameters"]))


def test_an_overflow_changes_nothing_but_the_scale_and_the_run_recovers(mesh, built_on):
    built, data = built_on(mesh(), "fp16")
    state = built.init(np.uint32(0))
    state["loss_scale"]["scale"] = jnp.float32(MOST_SCALE * 2**6)  # gradients above 65504
    before, scales, applied = jax.tree.map(np.asarray, state["parameters"]), [], []
    for index in range(16):
        state, metrics = built.step(state, place(data.batch(index, "train"), built))
        scales.append(float(metrics["loss_scale"]))
        applied.append(int(metrics["applied"]))
        if not any(applied):
            assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(state["parameters"])))
    assert applied[0] == 0
    assert applied[-1] == 1
    num_skipped = applied.index(1)
    assert all(applied[num_skipped:])
    assert scales[: num_skipped + 1] == [MOST_SCALE * 2.0 ** (6 - i) for i in range(num_skipped + 1)]
    assert int(state["loss_scale"]["good_steps"]) == 16 - num_skipped


@pytest.mark.parametrize(
    ("scale", "good", "applied", "after"),
    [
        (1024, 7, True, (1024, 8)),
        (1024, GOOD_STEPS - 1, True, (2048, 0)),
        (1024, GOOD_STEPS - 1, False, (512, 0)),
        (MOST_SCALE, GOOD_STEPS - 1, True, (MOST_SCALE, 0)),
        (LEAST_SCALE, 3, False, (LEAST_SCALE, 0)),
    ],
)
def test_the_scale_doubles_after_good_steps_and_halves_after_a_bad_one(scale, good, applied, after):
    state = {"loss_scale": {"scale": jnp.float32(scale), "good_steps": jnp.int32(good)}}
    found = next_scale(state, jnp.asarray(applied))["loss_scale"]
    assert (float(found["scale"]), int(found["good_steps"])) == after


@pytest.mark.wide
def test_few_alike_tokens_a_device_skip_the_first_steps_and_no_others(mesh):
    """A device with 8 tokens begins with gradients of up to 32768 / 8 a token, and fp16 ends at 65504."""
    sizes = ("model.num_layers=1", "model.embed_dim=16", "model.mlp_dim=32", "model.vocab_size=64")
    batch = ("batch.sequence_length=16", "batch.sequences=1", "precision=fp16", "data.source=synthetic")
    built = build_step(load_config("bytes-nano", (*sizes, *batch)), mesh(context=2))
    tokens = np.full(built.batch["tokens"].shape, 3, np.int32)
    batch = {"tokens": jax.device_put(tokens, built.batch["tokens"].sharding)}
    state, found = built.init(np.uint32(0)), []
    for _ in range(8):
        state, metrics = built.step(state, batch)
        found.append((float(metrics["loss_scale"]), int(metrics["applied"])))
        assert np.isfinite(metrics["loss"])
    applied = [each for _, each in found]
    num_skipped = applied.index(1)
    assert num_skipped >= 1
    assert all(applied[num_skipped:])
    scales = [scale for scale, _ in found[: num_skipped + 1]]
    assert scales == [2.0 ** (15 - number) for number in range(num_skipped + 1)]
