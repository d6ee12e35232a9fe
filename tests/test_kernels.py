"""Kernels of Pallas and foreign functions: FLOPs by hand, found again in the compiled program."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.compiler import _kernel_calls as _kernels
from meshwright.worker import count_traced

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.12 announces the end of its Triton kernels
    from jax.experimental.pallas import triton
    from jax.experimental.pallas.ops.gpu import attention as triton_attention
from jax.experimental.pallas import mosaic_gpu
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

HEADS, LENGTH, WIDTH, BLOCK = 2, 1024, 64, 128
PRODUCT = 2 * HEADS * LENGTH * LENGTH * WIDTH  # one of attention's products, without a mask
BLOCKS = (LENGTH // BLOCK) * (LENGTH // BLOCK + 1) // 2 / (LENGTH // BLOCK) ** 2  # not above the diagonal


def counted(function, *arguments, platform="tpu"):
    traced = jax.jit(function).trace(*arguments).jaxpr
    return count_traced(traced.jaxpr, platform, traced.consts)


def executed(flops):
    return sum(kernel.flops for kernel in flops.kernels)


def model(flops):
    return sum(count for phase, count in flops.by_phase.items() if phase != "recompute")


def attention_of(name, causal):
    """Return an attention function and its arguments as shapes."""
    if name == "triton":
        heads = jax.ShapeDtypeStruct((1, LENGTH, HEADS, WIDTH), jnp.float16)
        return lambda q, k, v: triton_attention.mha(q, k, v, segment_ids=None, causal=causal), (heads,) * 3
    if name == "flash":
        heads = jax.ShapeDtypeStruct((1, HEADS, LENGTH, WIDTH), jnp.bfloat16)
        return lambda q, k, v: flash_attention.flash_attention(q, k, v, causal=causal), (heads,) * 3
    mask = (masks.CausalMask if causal else masks.FullMask)((LENGTH, LENGTH))
    kernel = splash.make_splash_mha_single_device(masks.MultiHeadMask([mask] * HEADS))
    return kernel, (jax.ShapeDtypeStruct((HEADS, LENGTH, WIDTH), jnp.float32),) * 3


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        pytest.param("triton", False, id="triton-full"),
        pytest.param("flash", True, id="flash-causal"),
        pytest.param("splash", True, id="splash-causal"),
        pytest.param("triton", True, id="triton-causal", marks=pytest.mark.wide),
        pytest.param("flash", False, id="flash-full", marks=pytest.mark.wide),
        pytest.param("splash", False, id="splash-full", marks=pytest.mark.wide),
    ],
)
def test_attention_has_its_textbook_products_and_executes_its_blocks(name, causal):
    function, arguments = attention_of(name, causal)
    flops = counted(function, *arguments)
    assert flops.unpriced == ()
    assert model(flops) == 2 * PRODUCT // (2 if causal else 1)
    assert executed(flops) == 2 * PRODUCT * (BLOCKS if causal else 1)


# Executed in the backward pass: Triton S, dP, dV, dK and S, dP, dQ in one kernel, with key blocks of its own
# size; TPU kernels the same in two.
@pytest.mark.parametrize(
    ("name", "causal"),
    [
        pytest.param("flash", True, id="flash-causal"),
        pytest.param("splash", False, id="splash-full"),
        pytest.param("flash", False, id="flash-full", marks=pytest.mark.wide),
        pytest.param("splash", True, id="splash-causal", marks=pytest.mark.wide),
    ],
)
def test_gradients_of_attention_need_four_products_and_recompute_one(name, causal):
    function, arguments = attention_of(name, causal)

    def loss(*heads):
        return function(*heads).astype(jnp.float32).sum()

    flops = counted(jax.grad(loss, (0, 1, 2)), *arguments)
    half = 2 if causal else 1
    assert flops.unpriced == ()
    assert flops.by_phase["recompute"] == PRODUCT // half
    elementwise_sums = 2 * HEADS * LENGTH * WIDTH if name == "splash" else 0  # its di, written as a product
    assert model(flops) == 6 * PRODUCT // half + elementwise_sums
    assert executed(flops) == 9 * PRODUCT * (BLOCKS if causal else 1)


def test_a_window_counts_the_blocks_that_it_touches():
    mask = masks.LocalMask((LENGTH, LENGTH), (256, 0), 0)
    kernel = splash.make_splash_mha_single_device(masks.MultiHeadMask([mask] * HEADS))
    heads = jax.ShapeDtypeStruct((HEADS, LENGTH, WIDTH), jnp.float32)
    flops = counted(kernel, heads, heads, heads)
    places = np.asarray(mask[:, :])
    tiles = places.reshape(LENGTH // BLOCK, BLOCK, LENGTH // BLOCK, BLOCK).any(axis=(1, 3))
    assert executed(flops) == 2 * PRODUCT * tiles.mean()
    assert model(flops) == pytest.approx(2 * PRODUCT * places.mean(), rel=0.02)


def test_a_kernel_in_loops_and_maps_counts_each_run():
    function, _ = attention_of("splash", causal=True)
    heads = jax.ShapeDtypeStruct((3, HEADS, LENGTH, WIDTH), jnp.float32)

    def repeated(q, k, v):
        return jax.lax.scan(lambda q, _: (jax.vmap(function)(q, k, v), None), q, length=4)[0]

    assert model(counted(repeated, heads, heads, heads)) == 4 * 3 * PRODUCT


def test_megablox_counts_each_row_once_by_its_estimate():
    rows = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((4, 128, 256), jnp.bfloat16)
    flops = counted(lambda a, b, g: gmm(a, b, g), rows, weights, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert flops.unpriced == ()
    assert model(flops) == executed(flops) == 2 * 512 * 128 * 256
    assert any("cost_estimate" in text for text in flops.assumptions)


M, K, N = 256, 128, 512


def matmul(left, right, *, name=None, cost_estimate=None, dynamic=None):
    """Return the product by a kernel of one block of rows and columns for each point of its grid."""

    def block(x, y, out):
        out[:, :] = jnp.dot(x[:, :], y[:, :], preferred_element_type=jnp.float32)

    def doubtful(x, y, out):
        @pl.when(x[0, 0] > 0)
        def _():
            block(x, y, out)

    return pl.pallas_call(
        doubtful if dynamic else block,
        out_shape=jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), jnp.float32),
        grid=(left.shape[0] // 64, right.shape[1] // 64),
        in_specs=[pl.BlockSpec((64, K), lambda i, j: (i, 0)), pl.BlockSpec((K, 64), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((64, 64), lambda i, j: (i, j)),
        name=name,
        cost_estimate=cost_estimate,
        compiler_params=triton.CompilerParams(num_warps=4),
    )(left, right)


def operands(rows=M):
    return jax.ShapeDtypeStruct((rows, K), jnp.float16), jax.ShapeDtypeStruct((K, N), jnp.float16)


def test_a_kernel_of_the_users_is_one_call_of_the_compiled_program(forked_workers):
    weighed = mw.weigh(mw.jax_step(lambda x, y: matmul(x, y, name="mine"), *operands()), on="1xH100")
    assert weighed.ledger.flops.model == weighed.ledger.flops.executed == 2 * M * K * N
    assert weighed.ledger.flops.by_format == {"fp16": 2 * M * K * N}
    assert weighed.ledger.unpriced == ()
    assert "kernel mine: FLOPs by its body and grid" in weighed.ledger.assumptions
    assert any("no rate of it is known" in text for text in weighed.prediction.unpriced)
    assert weighed.prediction.step_seconds.high is None


def test_attention_by_triton_is_one_call_forward_and_one_backward(forked_workers):
    function, arguments = attention_of("triton", causal=True)

    def loss(*heads):
        return function(*heads).astype(jnp.float32).sum()

    weighed = mw.weigh(mw.jax_step(jax.grad(loss, (0, 1, 2)), *arguments), on="1xH100")
    assert weighed.ledger.unpriced == ()
    assert weighed.ledger.flops.model == 6 * PRODUCT // 2
    traced = weighed.compiled.traced_flops
    assert weighed.ledger.flops.executed == executed(traced) > weighed.ledger.flops.model
    assert weighed.ledger.flops.recomputed == PRODUCT // 2


def test_a_kernel_under_shard_map_counts_on_every_device(forked_workers):
    # Under shard_map jax 0.12 asks the mesh for the kind of device that it lowers a kernel for.
    kind = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,), abstract_device=kind)
    rows, columns = (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(operands(8 * M), (PartitionSpec("data"), PartitionSpec()), strict=True)
    )
    split = jax.shard_map(
        matmul, mesh=mesh, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data"),
        check_vma=False,
    )  # fmt: skip
    weighed = mw.weigh(mw.jax_step(split, rows, columns), on="8xH100")
    assert weighed.ledger.flops.model == weighed.ledger.flops.executed == 8 * 2 * M * K * N


def test_a_branch_that_depends_on_data_counts_as_its_most_expensive_one_and_says_so():
    flops = counted(lambda x, y: matmul(x, y, name="doubtful", dynamic=True), *operands())
    assert model(flops) == 2 * M * K * N
    said = "kernel doubtful: a branch that depends on data counts as its most expensive one"
    assert said in flops.assumptions


def test_what_cannot_be_counted_is_unpriced_with_the_reason():
    def body(x, out):
        out[:, :] = jax.lax.linalg.cholesky(x[:, :])

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def call(x, **keywords):
        return pl.pallas_call(body, out_shape=square, name="odd", **keywords)(x)

    (unpriced,) = counted(call, square).unpriced
    assert "odd" in unpriced
    assert "its body has a cholesky, and it has no cost_estimate" in unpriced
    estimate = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=0)
    assert model(counted(lambda x: call(x, cost_estimate=estimate), square)) == 12345


@pytest.fixture
def own_rules(monkeypatch):
    monkeypatch.setattr(_kernels, "_REGISTERED", {})


def test_a_registered_rule_comes_first(own_rules, forked_workers):
    def rule(call):
        (_, (m, k)), (_, (_, n)) = call.operands
        assert call.grid == (M // 64, N // 64)
        return mw.KernelFlops(model=m * k * n, executed=3 * m * k * n)

    mw.register_kernel("mine", rule)
    weighed = mw.weigh(mw.jax_step(lambda x, y: matmul(x, y, name="mine_too"), *operands()), on="1xH100")
    assert weighed.ledger.flops.model == M * K * N
    assert weighed.ledger.flops.executed == 3 * M * K * N
    assert "kernel mine_too: FLOPs by a registered rule" in weighed.ledger.assumptions


def test_a_foreign_function_counts_by_its_rule_alone(own_rules):
    def call(x, y):
        return jax.ffi.ffi_call("outside_matmul", jax.ShapeDtypeStruct((M, N), jnp.float16))(x, y)

    (unpriced,) = counted(call, *operands()).unpriced
    assert "ffi_call outside_matmul" in unpriced
    assert "no rule is registered for it" in unpriced
    mw.register_kernel("outside_matmul", lambda call: mw.KernelFlops(model=2 * M * K * N))
    flops = counted(call, *operands())
    assert flops.unpriced == ()
    assert model(flops) == 2 * M * K * N
    assert [kernel.operands for kernel in flops.kernels] == [(("f16", (M, K)), ("f16", (K, N)))]


PROGRAM = """
import warnings
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
def double(x, out):
    out[:, :] = 2 * x[:, :]
def program(mesh):
    one = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    params = triton.CompilerParams(num_warps=4)
    call = pl.pallas_call(double, out_shape=one, name="outside", compiler_params=params)
    return call, (one,)
"""
RULES = "import meshwright as mw\nmw.register_kernel('outside', lambda call: mw.KernelFlops(model={flops}))"


def test_a_rules_file_reaches_a_program_by_name(tmp_path, monkeypatch, forked_workers):
    (tmp_path / "outside.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    assert mw.weigh("outside:program", on="1xH100").ledger.flops.model == 0
    for flops in (1000, 3000):  # another rule is another account of the same program
        (tmp_path / "rules.py").write_text(RULES.format(flops=flops))
        found = mw.weigh(mw.jax_step("outside:program", rules="rules.py"), on="1xH100").ledger.flops
        assert found.model == found.executed == flops


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read"), ("1 / 0", "rules in rules.py failed: ZeroDivisionError")],
)
def test_rules_that_fail_are_refused_with_their_words(text, words, tmp_path, monkeypatch, forked_workers):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside.py").write_text(PROGRAM)
    if text is not None:
        (tmp_path / "rules.py").write_text(text)
    with pytest.raises(mw.InputError, match=words):
        mw.weigh(mw.jax_step("outside:program", rules="rules.py"), on="1xCPU")


@pytest.mark.parametrize(
    ("name", "rule", "words"), [("", len, "has no name"), ("mine", 3, "is not a function: 3")]
)
def test_a_rule_that_is_none_is_refused(name, rule, words):
    with pytest.raises(mw.InputError, match=words):
        mw.register_kernel(name, rule)


def test_a_plan_counts_by_the_rules_of_its_step(tmp_path, monkeypatch, forked_workers):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside.py").write_text(PROGRAM)
    (tmp_path / "rules.py").write_text(RULES.format(flops=7000))
    made = mw.plan(mw.jax_step("outside:program", rules="rules.py"), on="1xH100", budget_seconds=1)
    assert [each.model_flops for each in made.candidates if not each.failed] == [7000]


def test_jaxs_grouped_product_for_gpus_is_what_it_is():
    """A kernel of Pallas' Mosaic for GPUs, whose own code divides the work among warps."""
    blocks = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (16, 512, 256))]
    sizes = jax.ShapeDtypeStruct((16,), jnp.int32)
    product = lambda x, w, sizes: ragged_dot_mgpu.ragged_dot(x, w, group_sizes=sizes, **blocks)  # noqa: E731
    flops = counted(product, *shapes, sizes, platform="cuda")
    assert executed(flops) == model(flops) == 2 * 4096 * 512 * 256
    assert not flops.unpriced


def test_a_kernel_of_mosaic_is_counted_by_its_rule_and_unpriced_without_one():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    kernel = mosaic_gpu.kernel(body, out_type=x, grid=(4,), grid_names=("block",), kernel_name="mine")
    (words,) = counted(kernel, x, platform="cuda").unpriced
    assert "mpmd_map mine" in words
    assert "no cost_estimate and no rule" in words
    mw.register_kernel("mine", lambda call: mw.KernelFlops(model=call.grid[0] * call.operands[0][1][1]))
    assert model(counted(kernel, x, platform="cuda")) == 4 * 128
