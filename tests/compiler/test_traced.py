"""FLOPs of traced programs against closed forms and against convolutions of ones, counted by running them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from meshwright.compiler._traced import count_traced
from meshwright.config import load_config
from meshwright.sharding import mesh_of
from meshwright.step import build_step

ONE = (("data", 1),)
EIGHT = (("data", 2), ("fsdp", 2), ("tensor", 2))
GPT = (
    "model.norm=layer",
    "model.position=learned",
    "model.max_positions=200",
    "model.rope_theta=none",
    "model.mlp=plain",
    "model.activation=gelu",
    "model.bias=true",
    "model.tied_embeddings=true",
    "model.num_kv_heads=4",
    "batch.sequence_length=200",
    "model.loss_chunk=50",
)


def traced_step(preset, *overrides, axes=ONE):
    config = load_config(preset, overrides)
    num_devices = int(np.prod([size for _, size in axes]))
    built = build_step(config, mesh_of(axes, jax.devices()[:num_devices]))
    return config, count_traced(built.step.trace(built.state, built.batch).jaxpr.jaxpr)


def counted(function, *args):
    return count_traced(jax.jit(function).trace(*args).jaxpr.jaxpr)


def model_flops(flops):
    return sum(amount for phase, amount in flops.by_phase.items() if phase != "recompute")


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def by_hand(config):
    """6 x matmul parameters x tokens, and attention: two matmuls forward and four backward, each of
    2 x tokens x sequence x heads x head_dim multiply-adds counted twice, half of which are causal."""
    m, tokens, length = (
        config.model,
        config.batch.sequences * config.batch.sequence_length,
        config.batch.sequence_length,
    )
    mlp = (3 if m.mlp == "gated" else 2) * m.embed_dim * m.mlp_dim
    head_width = m.num_heads * m.head_dim
    projections = 2 * m.embed_dim * head_width + 2 * m.embed_dim * m.num_kv_heads * m.head_dim
    matrices = m.num_layers * (mlp + projections) + m.vocab_size * m.embed_dim
    attention = 6 * tokens * length * head_width * m.num_layers
    return 6 * matrices * tokens + attention, attention


@pytest.mark.parametrize(
    ("overrides", "axes"),
    [
        ((), ONE),
        ((), EIGHT),
        (("model.unroll=true",), ONE),
        (("remat=none",), ONE),
        (("remat=dots",), ONE),
        (("remat=full",), ONE),
        (("remat=full", "batch.microbatch_sequences=1"), EIGHT),
        (("batch.microbatch_sequences=2",), ONE),
        (("batch.sequence_length=300", "model.loss_chunk=100"), ONE),  # blocks of 128, 128 and 44
        (GPT, ONE),
        (GPT, EIGHT),
        ((*GPT, "model.dropout=0.1", "model.unroll=true", "model.num_layers=3"), ONE),
    ],
    ids=lambda value: (
        ",".join(part.split(".")[-1] for part in value) if value and isinstance(value[0], str) else None
    ),
)
def test_a_transformers_model_flops_are_the_closed_form_exactly(overrides, axes):
    config, flops = traced_step("bytes-nano", *overrides, axes=axes)
    total, attention = by_hand(config)
    assert model_flops(flops) == total
    assert flops.attention == attention
    assert flops.by_phase["backward"] == 2 * flops.by_phase["forward"]
    assert flops.unpriced == ()


@pytest.mark.parametrize("remat", ["none", "dots-attention", "dots", "full"])
def test_what_is_computed_again_by_hand(remat):
    """Attention makes its scores again for its gradient, whatever is kept; without its output both its
    matmuls run again first; `full` runs every matmul of a block but the last, which no gradient needs."""
    config, flops = traced_step("bytes-nano", f"remat={remat}")
    m, tokens = config.model, config.batch.sequences * config.batch.sequence_length
    scores = tokens * config.batch.sequence_length * m.num_heads * m.head_dim  # the causal half of 2 x ...
    projections = 2 * m.embed_dim * (m.num_heads + m.num_kv_heads) * m.head_dim
    matrices = 2 * tokens * (projections + 2 * m.embed_dim * m.mlp_dim)
    again = {"none": scores, "dots-attention": scores, "dots": 3 * scores, "full": 3 * scores + matrices}
    assert flops.by_phase["recompute"] == m.num_layers * again[remat]


def test_scanned_and_unrolled_layers_count_the_same_in_every_phase():
    _, scanned = traced_step("bytes-nano")
    _, unrolled = traced_step("bytes-nano", "model.unroll=true")
    assert scanned == unrolled


@pytest.mark.parametrize("axes", [ONE, (("data", 2), ("fsdp", 4))])
def test_the_cruncher_by_hand(axes):
    """Forward 2BP. Backward 4BP less 2BD^2: the gradient of the input, which nobody asks for."""
    config, flops = traced_step("cruncher", axes=axes)
    rows, width = config.batch.sequences, config.model.width
    parameters = 2 * width**2 + width
    assert flops.by_phase["forward"] == 2 * rows * parameters
    assert flops.by_phase["backward"] == 4 * rows * parameters - 2 * rows * width**2


def test_the_crunchers_backward_is_exactly_4bp_if_the_inputs_gradient_is_asked_for():
    def step(params, x):
        return jax.grad(lambda p, x: jnp.sum(x @ p["w1"] @ p["w2"] @ p["head"]), argnums=(0, 1))(params, x)

    rows, width = 32, 16
    params = {"w1": f32(width, width), "w2": f32(width, width), "head": f32(width, 1)}
    flops = counted(step, params, f32(rows, width))
    assert flops.by_phase["backward"] == 4 * rows * (2 * width**2 + width)


def test_linear_regression_by_hand():
    config, flops = traced_step("linear")
    assert flops.by_phase["forward"] == 2 * config.batch.sequences * config.model.input_dim
    assert flops.by_phase["backward"] == 2 * config.batch.sequences * config.model.input_dim


SQUARE = 2 * 8**3


def test_a_scan_of_ten_costs_ten_bodies():
    def scanned(x):
        return lax.scan(lambda carry, _: (carry @ carry, None), x, length=10)[0]

    assert counted(scanned, f32(8, 8)).by_phase["forward"] == 10 * SQUARE


def test_a_branch_costs_what_the_dearest_does():
    def branched(i, x):
        return lax.switch(i, [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x], x)

    flops = counted(branched, jax.ShapeDtypeStruct((), jnp.int32), f32(8, 8))
    assert flops.by_phase["forward"] == 2 * SQUARE


def test_a_loop_of_unknown_length_counts_once_and_is_listed():
    def loop(x):
        return lax.while_loop(lambda c: jnp.sum(c @ c) < 100, lambda c: c @ c @ c, x)

    flops = counted(loop, f32(8, 8))
    assert flops.by_phase["forward"] == 3 * SQUARE  # two of the body, one of the condition
    assert flops.unpriced == ("while of unknown length under the step, counted once x1",)


def test_the_body_of_a_shard_map_runs_on_every_device_of_its_manual_axes():
    mesh = mesh_of(EIGHT, jax.devices())
    rows = PartitionSpec(("data", "fsdp"))
    product = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=rows, out_specs=rows)
    # [4, 16] on a device, multiplied by its own transpose; the two of `tensor` do the same work twice.
    assert counted(product, f32(16, 16)).by_phase["forward"] == 8 * 2 * 4 * 4 * 16


def test_scopes_say_which_share_of_the_runs_is_the_models():
    def ticks(x):
        with jax.named_scope("busy_4_of_5"), jax.named_scope("needed_1_of_2"):
            return lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]

    assert counted(ticks, f32(8, 8)).by_phase["forward"] == 4 * SQUARE // 2


def test_a_pallas_kernel_is_listed_with_its_shapes():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    def called(x):
        return lax.scan(lambda c, _: (pallas.pallas_call(kernel, out_shape=c)(c), None), x, length=3)[0]

    flops = counted(called, f32(8, 8))
    assert flops.unpriced == ("pallas_call(float32[8,8]) x3",)
    assert model_flops(flops) == 0


def test_foreign_calls_and_callbacks_are_listed():
    def calls(x):
        y = jax.ffi.ffi_call("somebodys_kernel", jax.ShapeDtypeStruct((8,), jnp.float32))(x)
        return jax.pure_callback(np.sin, y, y)

    assert counted(calls, f32(4)).unpriced == ("ffi_call(float32[4]) x1", "pure_callback(float32[8]) x1")


@pytest.mark.parametrize(
    "decompose", [jnp.linalg.cholesky, jnp.linalg.eigh, jnp.linalg.svd, jnp.linalg.inv, jnp.fft.fft]
)
def test_linear_algebra_without_a_rule_is_listed(decompose):
    assert counted(decompose, f32(8, 8)).unpriced != ()


CONVOLUTIONS = [
    # size, kernel, strides, padding, lhs_dilation, rhs_dilation, feature groups, batch groups
    ((7, 7), (3, 3), (1, 1), "SAME", (1, 1), (1, 1), 1, 1),
    ((7, 8), (3, 2), (2, 3), "SAME", (1, 1), (1, 1), 1, 1),
    ((9, 9), (5, 5), (2, 2), ((2, 2), (3, 0)), (1, 1), (1, 1), 2, 1),
    ((8, 8), (3, 3), (1, 1), "VALID", (1, 1), (2, 3), 1, 1),
    ((5, 6), (3, 3), (1, 1), ((2, 1), (2, 2)), (2, 3), (1, 1), 4, 1),
    ((6, 6), (3, 3), (2, 1), ((3, 3), (-1, 2)), (3, 1), (1, 2), 1, 1),
    ((6, 6), (3, 3), (1, 1), "SAME", (1, 1), (1, 1), 1, 2),
]


@pytest.mark.parametrize(
    ("size", "kernel", "strides", "padding", "holes", "spread", "groups", "batches"), CONVOLUTIONS
)
def test_a_convolution_costs_the_pairs_that_meet(
    size, kernel, strides, padding, holes, spread, groups, batches
):
    """The sum of a convolution of ones by ones is the number of its multiply-adds that meet real numbers."""

    def convolve(image, filters):
        return lax.conv_general_dilated(
            image, filters, strides, padding, holes, spread,
            feature_group_count=groups, batch_group_count=batches,
        )  # fmt: skip

    image, filters = jnp.ones((2, 4, *size)), jnp.ones((8, 4 // groups, *kernel))
    met = int(np.asarray(convolve(image, filters), np.float64).sum())
    assert counted(convolve, image, filters).by_phase["forward"] == 2 * met
    if batches == 1:  # each pair that meets gives one multiply-add to either gradient
        both = jax.grad(lambda i, f: convolve(i, f).sum(), argnums=(0, 1))
        assert counted(both, image, filters).by_phase["backward"] == 4 * met


def test_a_ragged_matmul_costs_its_rows_once():
    def grouped(x, w, sizes):
        return lax.ragged_dot(x, w, sizes)

    flops = counted(grouped, f32(12, 8), f32(3, 8, 16), jax.ShapeDtypeStruct((3,), jnp.int32))
    assert flops.by_phase["forward"] == 2 * 12 * 8 * 16
