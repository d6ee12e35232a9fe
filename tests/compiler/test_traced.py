"""FLOPs of traced programs against closed forms."""

import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas, sparse
from jax.extend import core
from jax.sharding import PartitionSpec

from meshwright.config import load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.step import build_step
from meshwright.worker import FREE, LIBRARY, RULES, WALKED, count_traced

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
    return config, count_traced(built.step.trace(built.state, built.batch).jaxpr.jaxpr, "cuda")


def counted(function, *args):
    return count_traced(jax.jit(function).trace(*args).jaxpr.jaxpr, "cuda")


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


def test_a_branch_costs_what_the_most_expensive_does():
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


@pytest.mark.parametrize(
    ("first", "goes_on", "step", "rounds"),
    [
        (0, lambda i: i < 6, lambda i: i + 1, 6),
        (1, lambda i: i < 100, lambda i: 2 * i, 7),
        (1, lambda i: i % 7 != 0, lambda i: i + 1, 6),
        (0, lambda i: i < 0, lambda i: i + 1, 0),
    ],
)
def test_a_loop_whose_counter_is_known_counts_each_round(first, goes_on, step, rounds):
    def loop(a):
        def body(state):
            counter, product = state
            return step(counter), product @ a

        return lax.while_loop(lambda state: goes_on(state[0]), body, (first, a))

    flops = counted(loop, f32(8, 8))
    assert model_flops(flops) == rounds * SQUARE
    assert flops.unpriced == ()


@pytest.mark.parametrize(
    ("first", "goes_on"),
    [(0, lambda i, a: i < 10**6), (0.0, lambda i, a: i < 6), (0, lambda i, a: (i < 6) & (a[0, 0] > 0))],
    ids=["too long", "rounded", "by data"],
)
def test_a_loop_whose_rounds_are_not_decided_is_listed(first, goes_on):
    def loop(a):
        return lax.while_loop(lambda s: goes_on(*s), lambda s: (s[0] + 1, s[1] @ a), (first, a))

    flops = counted(loop, f32(8, 8))
    assert model_flops(flops) == SQUARE
    assert flops.unpriced == ("while of unknown length under the step, counted once x1",)


def test_a_loop_that_draws_until_it_accepts_is_listed():
    flops = counted(lambda key: jax.random.poisson(key, 3.0, (8,)), jax.eval_shape(jax.random.key, 0))
    assert any("unknown length" in text for text in flops.unpriced)


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


def test_a_share_of_odd_work_is_rounded():
    """A kernel or a product of which a third is needed has no whole number of FLOPs."""

    def thirds(x):
        with jax.named_scope("needed_1_of_3"):
            return x @ x

    assert counted(thirds, f32(8, 8)).by_phase["forward"] == round(SQUARE / 3) != SQUARE / 3


def test_a_pallas_kernel_is_counted_by_its_body():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    def called(x):
        return lax.scan(lambda c, _: (pallas.pallas_call(kernel, out_shape=c)(c), None), x, length=3)[0]

    flops = counted(called, f32(8, 8))
    assert flops.unpriced == ()
    assert model_flops(flops) == 3 * SQUARE


def test_foreign_calls_are_listed_and_calls_of_the_host_have_no_flops():
    def calls(x):
        y = jax.ffi.ffi_call("somebodys_kernel", jax.ShapeDtypeStruct((8,), jnp.float32))(x)
        return jax.pure_callback(np.sin, y, y)

    flops = counted(calls, f32(4))
    assert flops.unpriced == ("ffi_call somebodys_kernel(float32[4]): no rule is registered for it x1",)
    assert model_flops(flops) == 0


def test_linear_algebra_without_a_rule_is_listed():
    assert counted(lax.linalg.cholesky_update, f32(8, 8), f32(8)).unpriced != ()


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
def test_a_convolution_costs_its_whole_window_at_each_output_and_as_much_for_each_gradient(
    size, kernel, strides, padding, holes, spread, groups, batches
):
    """Taps on padding count; one that dilates its input is transposed, and costs its window at each input."""

    def convolve(image, filters):
        return lax.conv_general_dilated(
            image, filters, strides, padding, holes, spread,
            feature_group_count=groups, batch_group_count=batches,
        )  # fmt: skip

    image, filters = f32(2, 4, *size), f32(8, 4 // groups, *kernel)
    batch, features, *outputs = jax.eval_shape(convolve, image, filters).shape
    places = size if max(holes) > 1 else outputs
    by_hand = 2 * batch * features * (4 // groups) * np.prod(kernel) * np.prod(places)
    assert counted(convolve, image, filters).by_phase["forward"] == by_hand
    both = jax.grad(lambda i, f: convolve(i, f).sum(), argnums=(0, 1))
    # Summed, the value is linear in either, and one product of it is dead: only the gradients are left.
    assert counted(both, image, filters).by_phase["backward"] == 2 * by_hand


def test_a_window_larger_than_its_image_costs_the_same_in_each_gradient():
    """The last stage of a residual network on small images: 3 x 3 on a single pixel, nine taps."""

    def loss(image, filters):
        return (lax.conv(image, filters, (1, 1), "SAME") ** 2).sum()

    by_phase = counted(jax.value_and_grad(loss, argnums=(0, 1)), f32(2, 4, 1, 1), f32(8, 4, 3, 3)).by_phase
    assert (by_phase["forward"], by_phase["backward"]) == (2 * 2 * 8 * 4 * 9, 2 * 2 * 2 * 8 * 4 * 9)


def test_a_ragged_matmul_costs_its_rows_once():
    def grouped(x, w, sizes):
        return lax.ragged_dot(x, w, sizes)

    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    flops = counted(grouped, f32(12, 8), f32(3, 8, 16), sizes)
    assert flops.by_phase["forward"] == 2 * 12 * 8 * 16
    gradients = jax.grad(lambda x, w, sizes: (grouped(x, w, sizes) ** 2).sum(), argnums=(0, 1))
    assert counted(gradients, f32(12, 8), f32(3, 8, 16), sizes).by_phase["backward"] == 4 * 12 * 8 * 16


# What nothing uses.


def test_a_product_that_no_output_needs_costs_nothing():
    def step(x):
        lax.linalg.cholesky(x)
        lax.scan(lambda c, _: (c @ c, c @ c), x, length=3)  # not used either
        return lax.scan(lambda c, _: (c @ c, c @ c @ c), x, length=3)[0]

    flops = counted(step, f32(8, 8))
    assert flops.by_phase["forward"] == 3 * SQUARE
    assert flops.unpriced == ()


def test_a_hessian_vector_product_costs_what_it_needs():
    """The oracle is XLA: the products that are left in the compiled program."""

    def loss(w, v, x):
        return (jnp.tanh(x @ w) @ v).sum()

    def product(w, v, x, tangent):
        return jax.jvp(lambda w: jax.grad(loss)(w, v, x), (w,), (tangent,))[1]

    def alive(function, *args):
        text = jax.jit(function).lower(*args).compile().as_text()
        return text.count(" dot(") + text.count("__onednn$matmul")

    args = (f32(8, 8), f32(8, 8), f32(8, 8), f32(8, 8))
    assert model_flops(counted(product, *args)) == alive(product, *args) * SQUARE


def test_a_layer_that_quantises_its_weights_does_not_count_the_product_whose_result_is_dropped():
    @jax.custom_vjp
    def linear(x, w):
        return x @ w

    def forward(x, w):
        return jnp.round(x) @ jnp.round(w), (x, w, x @ w)

    def backward(kept, g):
        x, w, _ = kept
        return g @ w.T, x.T @ g

    linear.defvjp(forward, backward)
    loss = jax.value_and_grad(lambda x, w: (linear(x, w) ** 2).sum(), argnums=(0, 1))
    by_phase = counted(loss, f32(8, 8), f32(8, 8)).by_phase
    assert (by_phase["forward"], by_phase["backward"]) == (SQUARE, 2 * SQUARE)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_rematerialised_loss_whose_value_is_dropped_runs_forward_once(scanned):
    """Its first run is dead. What remat runs in its place is no repetition."""

    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    def loss(ws, x):
        if scanned:
            return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum()
        return layer(layer(x, ws[0]), ws[1]).sum()

    args = (f32(2, 8, 8), f32(8, 8))
    with_value = counted(jax.value_and_grad(jax.checkpoint(loss)), *args)
    alone = counted(jax.grad(jax.checkpoint(loss)), *args)
    assert with_value.by_phase["forward"] == alone.by_phase["forward"] == 2 * SQUARE
    assert with_value.by_phase["recompute"] >= SQUARE
    assert alone.by_phase["recompute"] == 0
    assert model_flops(alone) == model_flops(with_value)
    assert alone.by_module == with_value.by_module


# Primitives.


@pytest.fixture(scope="module")
def primitives():
    """The names of all primitives that this release of JAX defines, found in a process of their own."""
    found = subprocess.run(
        [sys.executable, "-c", ALL_PRIMITIVES], capture_output=True, text=True, check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return set(found.stdout.split())


ALL_PRIMITIVES = """
import gc, importlib, pkgutil, warnings
import jax, jax.experimental
from jax.extend.core import Primitive
warnings.simplefilter("ignore")
for package in ("jax._src", "jax.experimental"):
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + ".", onerror=lambda name: None):
        if any(word in found.name for word in ("test", "jax2tf", "tools", "colocated", "tpu_info")):
            continue
        try:
            importlib.import_module(found.name)
        except Exception:  # a package that it wants is not installed
            pass
print(*sorted({each.name for each in gc.get_objects() if isinstance(each, Primitive)}))
"""
# What does, or may do, arithmetic that is no elementwise work; a program inside a call, which is not seen.
MULTIPLY = re.compile(
    r"dot|mat(mul|mat|vec)|spmm|spmv|product|conv$|conv_|solve|fft|attention|rnn|wgmma|^mma|_mma|eig|svd|^lu$|^qr$|geq|chol"
    r"|schur|hessenberg|tridiag|ormqr|call|kernel|fusion|pallas|mosaic|inline|mpmd|jaxpr|core_map|run_|callback"
)
ENTERED = {"scan", "while", "cond", "shard_map", "conv_general_dilated", "custom_linear_solve"}


def test_of_all_primitives_that_jax_defines_those_that_may_multiply_are_ruled_entered_or_unpriced(primitives):
    assert {"dot_general", "add", "bcoo_dot_general", "call_exported", "pallas_call"} <= primitives
    groups = (set(RULES), WALKED, FREE, ENTERED, LIBRARY)
    assert len(set().union(*groups)) == sum(map(len, groups)), "a primitive in two groups"
    suspicious = {name for name in FREE if MULTIPLY.search(name)}
    assert suspicious <= {"debug_callback", "io_callback", "pure_callback", "platform_index"}
    unpriced = primitives - set().union(*groups)
    assert {"call_exported", "bcoo_spdot_general", "rnn_fwd", "cholesky_update", "pallas_call"} <= unpriced


def test_the_elementwise_primitives_of_jax_are_known_to_be_free(primitives):
    """A public primitive of `jax.lax` that is unpriced is one that does more than elementwise work."""
    public = {each.name for each in vars(jax.lax).values() if isinstance(each, core.Primitive)}
    assert public <= primitives
    assert public - FREE - set(RULES) - WALKED - ENTERED - LIBRARY <= {"linear_solve", "ragged_all_to_all"}


def test_a_primitive_that_nobody_knows_is_unpriced_and_not_zero():
    new = core.Primitive("entangle")
    new.def_abstract_eval(lambda x: x)
    assert counted(new.bind, f32(8, 8)).unpriced == ("entangle(float32[8,8]) x1",)


def test_a_call_of_an_exported_program_is_listed():
    exported = jax.export.export(jax.jit(lambda x: x @ x))(f32(8, 8))
    flops = counted(exported.call, f32(8, 8))
    assert flops.unpriced == ("call_exported(float32[8,8]) x1",)


def test_products_of_sparse_matrices_cost_each_stored_element_once():
    matrix = sparse.BCOO((jnp.ones(10), jnp.zeros((10, 2), int)), shape=(8, 8))
    assert counted(lambda m, x: m @ x, matrix, f32(8, 6)).by_phase["forward"] == 2 * 10 * 6
    batched = sparse.BCOO((jnp.ones((3, 20)), jnp.zeros((3, 20, 2), int)), shape=(3, 4, 5))
    numbers = (((2,), (1,)), ((0,), (0,)))
    product = partial(sparse.bcoo_dot_general, dimension_numbers=numbers)
    assert counted(product, batched, f32(3, 5, 6)).by_phase["forward"] == 2 * 3 * 20 * 6

    def loss(data, x):
        return (sparse.BCOO((data, matrix.indices), shape=matrix.shape) @ x).sum()

    assert counted(jax.grad(loss, argnums=(0, 1)), f32(10), f32(8, 6)).by_phase["backward"] == 4 * 10 * 6


def test_scaled_and_symmetric_products_have_rules():
    narrow, scale = (jax.ShapeDtypeStruct((1, 128, 64), jnp.float8_e4m3fn) for _ in range(2))
    scale = jax.ShapeDtypeStruct((1, 128, 2), jnp.float8_e8m0fnu)
    flops = counted(jax.nn.scaled_matmul, narrow, narrow, scale, scale)
    assert (flops.by_phase["forward"], flops.unpriced) == (2 * 128 * 128 * 64, ())
    flops = counted(lax.linalg.symmetric_product, f32(3, 8, 5), f32(3, 8, 8))
    assert (flops.by_phase["forward"], flops.unpriced) == (3 * 8 * 9 * 5, ())  # LAPACK: n (n + 1) k


def test_a_multiply_add_of_complex_numbers_is_eight():
    c64 = jax.ShapeDtypeStruct((8, 8), jnp.complex64)
    assert counted(jnp.matmul, c64, c64).by_phase["forward"] == 4 * SQUARE
    image, kernel = (jax.ShapeDtypeStruct(shape, jnp.complex64) for shape in ((2, 3, 7, 7), (4, 3, 3, 3)))
    convolve = partial(lax.conv, window_strides=(1, 1), padding="VALID")
    assert counted(convolve, image, kernel).by_phase["forward"] == 8 * 2 * 4 * 25 * 27


@pytest.mark.parametrize(("platform", "products"), [("cpu", 0), ("cuda", 1), ("tpu", 2)])
def test_of_a_choice_by_platform_the_targets_branch_counts(platform, products):
    def chosen(x):
        branches = {"cpu": lambda x: x, "cuda": lambda x: x @ x, "default": lambda x: x @ x @ x}
        return lax.platform_dependent(x, **branches)

    traced = jax.jit(jax.vmap(chosen)).trace(f32(1, 8, 8)).jaxpr.jaxpr
    assert count_traced(traced, platform).by_phase["forward"] == products * SQUARE
