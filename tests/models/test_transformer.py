"""The Transformer against PyTorch and by hand, and what rematerialisation keeps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import meshwright as mw
from meshwright.compiler import read_text
from meshwright.config import TransformerModel
from meshwright.trainer.models import Parameter, initial_parameters, transformer, transformer_block
from meshwright.trainer.models.rematerialisation import BLOCK_INPUT, rematerialised
from meshwright.trainer.models.transformer import Transformer
from meshwright.trainer.models.transformer_block import dropped_out
from meshwright.worker import count_traced
from tests.rounding import FLOAT32

pytestmark = pytest.mark.quick

# The Transformer against a plain one, written out here: no scan, no blocks, no chunks, no mesh.


LLAMA = TransformerModel(
    kind="transformer",
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=20,
    vocab_size=32,
    rope_theta=100.0,
    loss_chunk=4,
)
GPT = TransformerModel(
    kind="transformer",
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=4,
    mlp_dim=20,
    vocab_size=32,
    norm="layer",
    norm_epsilon=1e-2,
    position="learned",
    max_positions=20,
    mlp="plain",
    activation="gelu",
    tied_embeddings=True,
    bias=True,
    loss_chunk=12,
)

CONFIGS = {"llama": LLAMA, "gpt": GPT, "relu": LLAMA.model_copy(update={"activation": "relu", "bias": True})}
TOKENS = np.random.default_rng(0).integers(32, size=(3, 13), dtype=np.int32)


def plain_norm(x, group, config):
    if config.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon)
    return x * group["scale"] + group.get("bias", 0)


def plain_rotation(x, theta):
    """Each pair (x[i], x[i + half]) as a complex number, turned by position x theta ** (-i / half)."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.outer(np.arange(x.shape[1]), theta ** (-np.arange(half) / half)))[None, :, None]
    pair = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([pair.real, pair.imag], -1)


def plain_activation(x, name):
    match name:
        case "silu":
            return x / (1 + jnp.exp(-x))
        case "relu":
            return x * (x > 0)
        case _:  # as GPT-2 has it
            return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def plain_attention(q, k, v):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = np.tril(np.ones(scores.shape[-2:], bool))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0)), 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def plain_loss(params, tokens, config):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"][inputs]
    if config.position == "learned":
        x = x + params["positions"][: inputs.shape[1]]
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda w: w[i], params["layers"])  # noqa: B023  used at once
        a, m = layer["attention"], layer["mlp"]
        h = plain_norm(x, layer["attention_norm"], config)
        q, k, v = (
            jnp.einsum("bse,ehd->bshd", h, a[name]) + a.get(f"{name}_bias", 0)
            for name in ("query", "key", "value")
        )
        if config.position == "rotary":
            q, k = plain_rotation(q, config.rope_theta), plain_rotation(k, config.rope_theta)
        x = x + jnp.einsum("bshd,hde->bse", plain_attention(q, k, v), a["output"]) + a.get("output_bias", 0)
        h = plain_norm(x, layer["mlp_norm"], config)
        up = h @ m["up"] + m.get("up_bias", 0)
        if config.mlp == "gated":
            up = plain_activation(h @ m["gate"] + m.get("gate_bias", 0), config.activation) * up
        else:
            up = plain_activation(up, config.activation)
        x = x + up @ m["down"] + m.get("down_bias", 0)
    x = plain_norm(x, params["final_norm"], config)
    logits = x @ params["embedding" if config.tied_embeddings else "head"].T
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jnp.log(jnp.exp(logits).sum(-1)) - chosen).mean()


def parameters_of(config):
    """Initial values, stacked, with norms and biases moved off one and zero so that each has its effect."""
    declared = Transformer(config).parameters()
    random = np.random.default_rng(1)

    def value(parameter):
        noise = random.standard_normal(parameter.shape, dtype="float32")
        start = {"zeros": 0.3 * noise, "ones": 1 + 0.3 * noise}
        return jnp.array(start.get(parameter.initial, noise / np.float32(parameter.fan_in) ** 0.5))

    return jax.tree.map(value, declared, is_leaf=lambda x: isinstance(x, Parameter))


class Expected(dict):
    """Answers by name, each computed when it is first asked for."""

    def __init__(self, of):
        self.of = of

    def __missing__(self, name):
        self[name] = self.of(name)
        return self[name]


@pytest.fixture(scope="module")
def expected():
    """Loss and gradients of the plain model, by the config's name."""

    def of(name):
        config = CONFIGS[name]
        with jax.numpy_rank_promotion("allow"):
            return jax.jit(jax.value_and_grad(lambda p: plain_loss(p, TOKENS, config)))(parameters_of(config))

    return Expected(of)


def ours(config, run, parameters):
    model = Transformer(config)
    loss = jax.value_and_grad(lambda p: model.loss(p, {}, {"tokens": jnp.array(TOKENS)}, run)[0])
    return jax.jit(loss)(parameters)


def assert_equal(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert jax.tree.structure(found[1]) == jax.tree.structure(wanted[1])
    largest = max(np.abs(g).max() for g in jax.tree.leaves(wanted[1]))
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found[1]), jax.tree.leaves(wanted[1]), strict=True
    ):
        # A key's bias shifts all scores of a query alike: unrotated, its gradient is nothing but rounding,
        # of terms as large as other gradients' are: a tenth of the largest is 17 units of roundoff of it.
        scale = max(np.abs(theirs).max(), 0.1 * largest)
        np.testing.assert_allclose(mine, theirs, atol=FLOAT32 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", ["llama", "gpt", pytest.param("relu", marks=pytest.mark.wide)])
def test_loss_and_gradients_are_those_of_a_plain_transformer(name, expected, context):
    assert_equal(ours(CONFIGS[name], context(), parameters_of(CONFIGS[name])), expected[name])


@pytest.mark.parametrize(
    "remat",
    [
        *("alternate-dots", "full-every-2", "save:query,value,context"),
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("dots", "dots-attention", "full")),
    ],
)
def test_what_is_kept_does_not_change_the_gradients(remat, expected, context):
    assert_equal(ours(LLAMA, context(remat=remat), parameters_of(LLAMA)), expected["llama"])


@pytest.mark.parametrize(("tied", "above"), [(True, 1 / 6), (False, 1 / 2)])
def test_the_first_loss_is_half_the_variance_of_the_logits_above_equal_odds(tied, above, context):
    # Of normal numbers, the log of the mean exponential is half the variance. A norm gives them a variance
    # of 1, so that of logits is the width times that of the table: 1/3 and 1.
    config = GPT.model_copy(update={"embed_dim": 256, "vocab_size": 4096, "tied_embeddings": tied})
    model, run = Transformer(config), context()
    parameters = jax.jit(lambda: initial_parameters(model.parameters(), jax.random.key(0)))()
    tokens = jnp.array(np.random.default_rng(0).integers(4096, size=(64, 17), dtype=np.int32))
    loss = jax.jit(lambda p: model.loss(p, {}, {"tokens": tokens}, run)[0])(parameters)
    assert float(loss) - np.log(4096) == pytest.approx(above, abs=0.06)


@pytest.mark.once
def test_unrolled_layers_are_the_scanned_ones(expected, context):
    config = LLAMA.model_copy(update={"unroll": True})
    parameters = parameters_of(LLAMA)
    stacked = parameters["layers"]
    parameters["layers"] = [jax.tree.map(lambda w: w[i], stacked) for i in range(2)]  # noqa: B023
    value, gradients = ours(config, context(remat="dots"), parameters)
    gradients["layers"] = jax.tree.map(lambda *w: jnp.stack(w), *gradients["layers"])
    assert_equal((value, gradients), expected["llama"])


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param({}, id="one kind", marks=pytest.mark.wide),
        pytest.param({"window": 4, "global_every": 2}, id="two kinds"),
    ],
)
def test_layers_without_a_loop_are_those_of_the_loop(windows, context):
    config = LLAMA.model_copy(update={**windows, "num_layers": 3})
    parameters = parameters_of(config)
    unrolled, looped = (ours(config, context(layer_loop=how), parameters) for how in ("unroll", "keep"))
    assert_equal(unrolled, looped)


def test_unrolled_layers_start_apart_from_each_other():
    config = LLAMA.model_copy(update={"unroll": True})
    start = jax.jit(lambda: initial_parameters(Transformer(config).parameters(), jax.random.key(0)))()
    first, second = (layer["mlp"]["up"] for layer in start["layers"])
    assert not np.array_equal(first, second)


# Dropout


DROPPED = LLAMA.model_copy(update={"dropout": 0.25})


def test_dropout_zeros_a_share_and_scales_up_the_rest(context):
    x = jnp.ones((20, 10, 16))
    out = np.asarray(dropped_out(x, DROPPED, context(dropout_key=jax.random.key(0)), 0))
    assert set(np.unique(out)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (out == 0).mean() == pytest.approx(0.25, abs=0.03)


def test_dropout_differs_by_place_and_by_key(context):
    x = jnp.ones((2, 3, 16))
    first, again, other_place, other_key = (
        np.asarray(dropped_out(x, DROPPED, context(dropout_key=jax.random.key(seed)), place))
        for seed, place in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other_place)
    assert not np.array_equal(first, other_key)


@pytest.mark.parametrize("unroll", [True, False])
def test_every_layer_and_branch_has_a_place_of_its_own(unroll, context, monkeypatch):
    places = []

    def record(x, config, run, place):
        jax.debug.callback(lambda n: places.append(int(n)), jnp.asarray(place))
        return x

    for module in (transformer, transformer_block):
        monkeypatch.setattr(module, "dropped_out", record)
    config = LLAMA.model_copy(update={"dropout": 0.25, "unroll": unroll})
    parameters = parameters_of(config)
    jax.jit(lambda p: Transformer(config).hidden(p, jnp.array(TOKENS), context()))(parameters)
    jax.effects_barrier()
    assert sorted(places) == [0, 2, 3, 4, 5]


def test_without_a_key_nothing_is_dropped(expected, context):
    config = LLAMA.model_copy(update={"dropout": 0.5})
    parameters = parameters_of(LLAMA)
    kept = ours(config, context(), parameters)
    assert_equal(kept, expected["llama"])
    lost = ours(config, context(dropout_key=jax.random.key(0)), parameters)
    assert abs(lost[0] - kept[0]) > 1e-3


@pytest.mark.once
def test_dropout_is_the_same_on_every_layout(context):
    config = LLAMA.model_copy(update={"dropout": 0.5, "loss_chunk": 6})  # of each half of a sequence
    tokens, key = jnp.array(np.tile(TOKENS[:2], (2, 1))), jax.random.key(3)
    parameters = parameters_of(config)
    losses = [
        jax.jit(lambda p, run=run: Transformer(config).loss(p, {}, {"tokens": tokens}, run)[0])(parameters)
        for run in (
            context(dropout_key=key),
            context(dropout_key=key, data=2, tensor=2),
            context(dropout_key=key, data=2, context=2),
        )
    ]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)


@pytest.mark.once
def test_in_bf16_the_arithmetic_is_bf16(expected, context):
    value, gradients = ours(LLAMA, context(dtype=jnp.bfloat16), parameters_of(LLAMA))
    np.testing.assert_allclose(value, expected["llama"][0], rtol=0.02)
    assert abs(value - expected["llama"][0]) > 1e-5
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def block(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
    x = checkpoint_name(x, BLOCK_INPUT)
    return jnp.sin(x @ weight), None


def gradient_of(context, **chosen):
    """The traced gradient of two blocks on one device."""
    kept = rematerialised(block, replace(context(), **chosen), scanned=True)
    weights = jnp.ones((2, 4, 4))
    traced = jax.make_jaxpr(jax.grad(lambda x: jax.lax.scan(kept, x, weights)[0].sum()))(jnp.ones((3, 4)))
    return str(traced)


def test_on_one_device_a_block_that_keeps_all_stays_as_it_is(context):
    assert rematerialised(block, replace(context(), remat="none"), scanned=True) is block


@pytest.mark.parametrize(("remat", "products"), [("none", 2), ("dots", 2), ("full", 3)])
def test_a_product_is_computed_again_only_where_nothing_but_the_input_is_kept(context, remat, products):
    """Forward, again, and the input's gradient."""
    assert gradient_of(context, remat=remat).count("dot_general") == products


def test_a_blocks_input_waits_in_host_memory_and_comes_back(context):
    assert "pinned_host" not in gradient_of(context, remat="full")
    offloaded = gradient_of(context, remat="full", offloads=True)
    assert offloaded.count("dot_general") == 3
    assert offloaded.count("device_put") == 2


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["model.norm_place=both", "model.norm_place=after"])
def test_the_default_policy_computes_no_product_again_wherever_norms_stand(kind):
    plain, other = (
        mw.weigh("bytes-nano", on="1xH100", overrides=over).ledger.flops for over in ((), (kind,))
    )
    assert other.recomputed == plain.recomputed  # attention's scores, which blocks compute again
    assert other.executed == plain.executed


@pytest.mark.wide
def test_few_layers_are_written_out_on_a_gpu_and_many_are_a_loop():
    """By the program: a loop's layers appear once in it, so its products do not grow with their number."""

    def products(num_layers: int, *how: str) -> int:
        small = (*how, f"model.num_layers={num_layers}", "batch.sequences=1", "batch.microbatch_sequences=1")
        found = mw.weigh("bytes-nano", on="1xH100", overrides=(*small, "data.source=synthetic"))
        return read_text(found.folder, "program.hlo.txt").count('custom_call_target="__cublas')

    two, three, many = products(2), products(3), products(17)
    each = three - two
    assert each >= 7 * 3 - 4  # seven matrices, forward and two backward; joined where they share an operand
    assert many < two + each
    assert products(2, "layer_loop=keep") < two


@pytest.mark.wide
def test_learned_positions_leave_residuals_as_products_read_them():
    """XLA of jax 0.12 made the batch the innermost dimension of each, for the positions' gradient."""
    found = mw.weigh("gpt2-124m", on="8xH100", overrides={"model.num_layers": 1})
    text = read_text(found.folder, "program.hlo.txt")
    assert "[32,1024,768]" in text
    assert "[1024,768,32]" not in text


@pytest.mark.wide
def test_over_context_few_layers_are_a_loop_in_code_of_one_device_too():
    """Written out, XLA would copy the weights of all layers out of their stack before the first."""
    run = ("batch.sequences=2", "batch.microbatch_sequences=1", "data.source=synthetic", "precision=bf16")
    auto, kept, unrolled = (
        mw.weigh("bytes-nano", on="2xH100", layout="context=2", overrides=[*run, *how]).ledger.memory
        for how in ((), ("layer_loop=keep",), ("layer_loop=unroll",))
    )
    assert auto.peak_bytes == kept.peak_bytes < unrolled.peak_bytes


# Blocks of heads of 64 in bf16, whose attention is a call of cuDNN, on one GPU.
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, ROWS, LENGTH = 4, 128, 4, 2, 64, 256, 16, 512
TOKENS_OF_STEP, HEADS_WIDTH, KEYS_WIDTH = ROWS * LENGTH, HEADS * HEAD, KV_HEADS * HEAD
SIZES = (
    *(f"model.num_layers={LAYERS}", f"model.embed_dim={WIDTH}", f"model.num_heads={HEADS}"),
    *(f"model.num_kv_heads={KV_HEADS}", f"model.head_dim={HEAD}", f"model.mlp_dim={HIDDEN}"),
    *(f"batch.sequences={ROWS}", f"batch.sequence_length={LENGTH}"),
    *("precision=bf16", "layer_loop=keep", "data.source=synthetic"),
)
# Of one block: FLOPs by product, those of attention's forward pass, and numbers that are kept by product.
FLOPS = {
    name: 2 * TOKENS_OF_STEP * inputs * outputs
    for name, inputs, outputs in [
        ("query", WIDTH, HEADS_WIDTH),
        *((name, WIDTH, KEYS_WIDTH) for name in ("key", "value")),
        ("output", HEADS_WIDTH, WIDTH),
        *((name, WIDTH, HIDDEN) for name in ("up", "gate")),
    ]
}
ATTENTION = 4 * TOKENS_OF_STEP * LENGTH * HEADS_WIDTH // 2  # causal
STATISTICS = 4 * (2 + HEADS)  # float32, of each token: 1 / sigma of two norms, and attention's log-sum-exp
ALL_KEPT = 2 * (2 * WIDTH + 2 * HEADS_WIDTH + 2 * KEYS_WIDTH + 2 * HIDDEN) + STATISTICS  # with the residuals
HALF_KEPT = 2 * (WIDTH + 2 * HEADS_WIDTH + KEYS_WIDTH + HIDDEN) + STATISTICS
INPUT = 2 * WIDTH
AGAIN = {  # FLOPs that all blocks run again, and bytes that they keep of each token
    "alternate-dots": (
        LAYERS * (FLOPS["key"] + FLOPS["output"] + FLOPS["gate"]),
        LAYERS * HALF_KEPT,
    ),
    "full-every-2": (
        LAYERS // 2 * (sum(FLOPS.values()) + ATTENTION),
        LAYERS // 2 * (ALL_KEPT + INPUT),
    ),
    "full-every-4": (sum(FLOPS.values()) + ATTENTION, 3 * ALL_KEPT + INPUT),
    "save:query,key,value": (
        LAYERS * (FLOPS["output"] + FLOPS["up"] + FLOPS["gate"] + ATTENTION),
        LAYERS * (INPUT + 2 * (HEADS_WIDTH + 2 * KEYS_WIDTH)),
    ),
    "save:query,key,value,context,out": (  # and the log-sum-exp of the scores
        LAYERS * (FLOPS["up"] + FLOPS["gate"]),
        LAYERS * (INPUT + 2 * (2 * HEADS_WIDTH + 2 * KEYS_WIDTH + WIDTH) + 4 * HEADS),
    ),
    "save:residual,mlp_gate,mlp_up": (
        LAYERS * (FLOPS["query"] + FLOPS["key"] + FLOPS["value"] + ATTENTION),
        LAYERS * (INPUT + 2 * (WIDTH + 2 * HIDDEN)),
    ),
}


@pytest.mark.parametrize(
    "remat", ["alternate-dots", *(pytest.param(n, marks=pytest.mark.wide) for n in list(AGAIN)[1:])]
)
def test_a_policy_repeats_and_keeps_what_it_says_by_hand(remat):
    """In the compiled program, against `dots-attention`, which repeats no product and keeps all."""
    all_kept, found = (
        mw.weigh("bytes-nano", on="1xH100", overrides=(*SIZES, f"remat={name}")).ledger
        for name in ("dots-attention", remat)
    )
    flops, kept = AGAIN[remat]
    assert found.flops.recomputed - all_kept.flops.recomputed == flops
    assert found.flops.executed - all_kept.flops.executed == flops
    assert found.flops.model == all_kept.flops.model
    saved = [one.memory.by_category["saved_activations"] for one in (all_kept, found)]
    assert saved == pytest.approx([TOKENS_OF_STEP * LAYERS * ALL_KEPT, TOKENS_OF_STEP * kept], rel=0.05)


def test_what_a_message_over_tensor_brought_is_not_asked_for_again(context):
    """As torchtitan's: the output's product is repeated on one device; with `tensor` its result is kept."""

    def repeated(**axes):
        run = context(remat="alternate-dots", **axes)
        shapes = jax.eval_shape(lambda: parameters_of(LLAMA))
        traced = jax.jit(
            jax.grad(lambda p: Transformer(LLAMA).loss(p, {}, {"tokens": jnp.array(TOKENS)}, run)[0])
        )
        return count_traced(traced.trace(shapes).jaxpr.jaxpr, "cuda").by_phase["recompute"]

    tokens, heads = TOKENS[:, 1:].size, LLAMA.num_heads * LLAMA.head_dim
    assert repeated() - repeated(tensor=2) == LLAMA.num_layers * 2 * tokens * heads * LLAMA.embed_dim


def test_blocks_of_a_group_have_no_copy_of_their_parameters_saved(context):
    """A layer's parameters, taken out of its group's, would be written to a stack of copies."""
    config = LLAMA.model_copy(update={"num_layers": 4})
    parameters = parameters_of(config)
    run = context(remat="full-every-2")
    step = jax.grad(lambda p: Transformer(config).loss(p, {}, {"tokens": jnp.array(TOKENS)}, run)[0])
    loops = [e for e in jax.make_jaxpr(step)(parameters).jaxpr.eqns if e.primitive.name == "scan"]
    made = [v.aval.shape for loop in loops[:1] for v in loop.outvars]
    assert made
    of_matrix = parameters["layers"]["mlp"]["up"].shape[1:]
    assert not [shape for shape in made if shape[-2:] == of_matrix]


@pytest.mark.once
def test_gradients_of_what_is_added_to_every_token_are_summed_in_float32(context):
    """In bf16, of two thousand tokens: biases and the table of positions, within one product's rounding."""
    config = GPT.model_copy(update={"num_layers": 1, "max_positions": 64})
    model = Transformer(config)
    parameters = initial_parameters(model.parameters(), jax.random.key(0))
    batch = {"tokens": jnp.asarray(np.random.default_rng(1).integers(32, size=(32, 65), dtype=np.int32))}
    wide, narrow = (
        jax.jit(jax.grad(lambda p, run=run: model.loss(p, {}, batch, run)[0]))(parameters)
        for run in (context(), context(dtype=jnp.bfloat16))
    )
    named = jax.tree_util.tree_leaves_with_path((wide, narrow))
    pairs = zip(named[: len(named) // 2], named[len(named) // 2 :], strict=True)
    largest = max(float(jnp.abs(each).max()) for each in jax.tree.leaves(wide))
    far = {
        jax.tree_util.keystr(path[1:]): float(jnp.abs(one - other).max()) / largest
        for (path, one), (_, other) in pairs
    }
    added = {name: error for name, error in far.items() if "_bias" in name or "positions" in name}
    assert len(added) == 7
    assert max(added.values()) < 1e-2, added
