"""Experts that drop nothing: grouped products against loops, layers against the dense form, if uneven too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import TransformerModel
from meshwright.contrib.experts import (
    Axes,
    Grouping,
    dropless,
    expert_mlp,
    expert_parameters,
    grouped_fp8_product,
    grouped_product,
    sent_rows,
    tiles_for,
    tiles_of,
)
from meshwright.trainer.models.eight_bits import narrowed
from meshwright.worker import count_traced

pytestmark = pytest.mark.quick

EMBED, EXPERTS, WIDTH = 32, 8, 16
MODEL = TransformerModel(
    kind="transformer",
    num_layers=1,
    embed_dim=EMBED,
    num_heads=4,
    num_kv_heads=4,
    mlp_dim=WIDTH,
    vocab_size=32,
    rope_theta=100.0,
    num_experts=EXPERTS,
    experts_per_token=2,
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Products

COUNTS = np.array([0, 1, 40, 17, 16])
LOOP = Grouping(tile=16, rows=74, experts=5, by_kernel=None)
KERNEL = dataclasses.replace(LOOP, by_kernel=(9, 0), interpret=True)
PACKED = dataclasses.replace(KERNEL, packed=True)
MOST = 80  # rows that the array holds, six of which fill nothing


def grouped_rows(width, seed, how):
    tiles = tiles_of(jnp.array(COUNTS), MOST, how)
    x = np.zeros((how.num_slots(MOST), width), np.float32)
    for expert, (first, last) in enumerate(zip(tiles.first, tiles.last, strict=True)):
        x[int(first) : int(last)] = normal(COUNTS[expert], width, seed=seed + expert)
    return jnp.array(x), tiles


def in_order(y, tiles):
    """The rows of all experts, without what lies between."""
    return np.concatenate([y[int(a) : int(b)] for a, b in zip(tiles.first, tiles.last, strict=True)])


@pytest.mark.parametrize(
    ("how", "axes"),
    [
        pytest.param(LOOP, Axes(0, 1), id="loop, as declared"),
        pytest.param(LOOP, Axes(1, 2), id="loop, experts second, summed last"),
        pytest.param(KERNEL, Axes(0, 2), id="kernel, summed last"),
        pytest.param(PACKED, Axes(1, 0), id="packed, experts second"),
        pytest.param(PACKED, Axes(0, 1), id="packed, as declared"),
        pytest.param(KERNEL, Axes(1, 0), id="kernel, experts second", marks=pytest.mark.wide),
        pytest.param(PACKED, Axes(0, 2), id="packed, summed last", marks=pytest.mark.wide),
        pytest.param(PACKED, Axes(1, 2), id="packed, experts second, summed last", marks=pytest.mark.wide),
        pytest.param(LOOP, Axes(0, 2), id="loop, summed last", marks=pytest.mark.wide),
        pytest.param(LOOP, Axes(1, 0), id="loop, experts second", marks=pytest.mark.wide),
        pytest.param(KERNEL, Axes(0, 1), id="kernel, as declared", marks=pytest.mark.wide),
        pytest.param(KERNEL, Axes(1, 2), id="kernel, experts second, summed last", marks=pytest.mark.wide),
    ],
)
def test_each_row_meets_the_matrix_of_its_expert(how, axes):
    (x, tiles), (gradient, _) = grouped_rows(EMBED, 1, how), grouped_rows(48, 2, how)
    matrices = normal(5, EMBED, 48)
    laid_out = jnp.array(np.moveaxis(matrices, (0, 1, 2), (axes.experts, axes.summed, axes.left)))
    y, pull = jax.vjp(lambda x, m: grouped_product(x, m, tiles, how, axes), x, laid_out)
    d_x, d_matrices = pull(gradient)
    d_matrices = np.moveaxis(np.asarray(d_matrices), (axes.experts, axes.summed, axes.left), (0, 1, 2))
    for expert, (first, last) in enumerate(zip(tiles.first, tiles.last, strict=True)):
        mine = slice(int(first), int(last))
        np.testing.assert_allclose(y[mine], x[mine] @ matrices[expert], atol=1e-5)
        np.testing.assert_allclose(d_x[mine], gradient[mine] @ matrices[expert].T, atol=1e-5)
        np.testing.assert_allclose(d_matrices[expert], x[mine].T @ gradient[mine], atol=1e-5)
    beyond = int(tiles.last[-1])
    assert beyond < len(y)
    np.testing.assert_array_equal(y[beyond:], 0)


def test_packed_rows_need_no_array_beyond_the_rows_themselves():
    """A tile at the end of the array reads rows before its own; fewer rows than a tile have one tile."""
    assert (PACKED.num_slots(74), LOOP.num_slots(74)) == (74, 9 * 16)
    for counts in ([3, 0, 0, 0, 0], [0, 0, 0, 0, 74], [15, 15, 15, 15, 14]):
        how, rows = PACKED, sum(counts)
        tiles = tiles_of(jnp.array(counts), rows, how)
        x = normal(how.num_slots(rows), EMBED)
        x[rows:] = 0
        matrices = normal(5, EMBED, 48)
        y = grouped_product(jnp.array(x), jnp.array(matrices), tiles, how, Axes())
        wanted = [x[int(a) : int(b)] @ m for a, b, m in zip(tiles.first, tiles.last, matrices, strict=True)]
        np.testing.assert_allclose(y[:rows], np.concatenate(wanted), atol=1e-5)


def test_a_product_in_eight_bits_is_within_its_rounding(context):
    matrices = jnp.array(normal(5, EMBED, 48))

    def results(product, how):
        (x, tiles), (gradient, _) = grouped_rows(EMBED, 1, how), grouped_rows(48, 2, how)
        y, pull = jax.vjp(lambda x, m: product(x, m, tiles, how, Axes()), x, matrices)
        d_x, d_matrices = pull(gradient)
        return in_order(y, tiles), in_order(d_x, tiles), d_matrices

    def in_eight_bits(x, m, tiles, how, axes):
        return grouped_fp8_product(x, narrowed(m, x.dtype), tiles, how, axes)

    found = [results(in_eight_bits, how) for how in (LOOP, PACKED)]
    for loop, kernel, wide in zip(*found, results(grouped_product, LOOP), strict=True):
        # E4M3 has 3 bits of mantissa: each factor is off by 1/16 at most, the sum of many by less.
        error = float(jnp.sqrt(jnp.mean((loop - wide) ** 2) / jnp.mean(wide**2)))
        assert 1e-3 < error < 1 / 16
        np.testing.assert_allclose(kernel, loop, atol=2e-2 * float(jnp.abs(wide).max()))


@pytest.mark.parametrize(
    ("rows", "experts", "tile"), [(10, 3, 4), (3, 8, 4), (0, 4, 8), (64, 1, 16), (65, 4, 16)]
)
def test_tiles_hold_any_spread_and_no_fewer_would(rows, experts, tile):
    def needed(counts):
        return sum(-(-count // tile) for count in counts)

    def spreads(left, places):
        if places == 1:
            yield (left,)
            return
        for first in range(left + 1):
            yield from ((first, *rest) for rest in spreads(left - first, places - 1))

    small = experts <= 4
    most = max(map(needed, spreads(rows, experts))) if small else rows
    assert tiles_for(rows, experts, tile) == max(most, 1)


def test_even_chances_seldom_need_a_further_round():
    """The spare rows against a simulation: 4096 tokens choose 8 of 128 experts on 32 devices."""
    random = np.random.default_rng(0)
    fair = 4096 * 8 // 32
    sent = random.multinomial(4096 * 8, [1 / 32] * 32, size=2000)
    assert sent.max() < sent_rows(fair) < 1.25 * fair


# Layers


def layer_of(seed=1):
    declared = expert_parameters(MODEL)
    return {
        name: jnp.array(normal(*p.shape, seed=seed + i) / p.fan_in**0.5)
        for i, (name, p) in enumerate(declared.items())
    }


def dense(x, layer):
    logits = x @ layer["router"]
    kept = logits >= jax.lax.top_k(logits, 2)[0][..., -1:]
    weights = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    up = jnp.einsum("bse,xem->bsxm", x, layer["up"])
    hidden = jax.nn.silu(jnp.einsum("bse,xem->bsxm", x, layer["gate"])) * up
    return jnp.einsum("bsxm,xme,bsx->bse", hidden, layer["down"], weights)


LAYOUTS = [
    {"expert": 8},
    {"fsdp": 2, "expert": 4},
    {"expert": 4, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"data": 2, "fsdp": 4},
]
# Added to the scores of the experts: as they are; nearly all tokens choose the first two; one has no token.
SPREADS = {
    "even": np.zeros(EXPERTS),
    "two": np.array([9.0, 8, 0, 0, 0, 0, 0, 0]),
    "none": np.eye(EXPERTS)[5] * -50,
}


@pytest.mark.parametrize(
    ("layout", "spread"),
    [  # `make test` has each layout once, and each spread
        pytest.param(layout, spread, marks=() if place % 3 == number else pytest.mark.wide)
        for place, layout in enumerate(LAYOUTS)
        for number, spread in enumerate(SPREADS)
    ],
    ids=str,
)
def test_a_layer_is_the_dense_sum_over_chosen_experts(layout, spread, context):
    compare_with_dense(context(**layout), spread)


@pytest.mark.parametrize("layout", [{}, {"fsdp": 2, "expert": 4}], ids=str)
def test_a_layer_of_packed_rows_is_the_dense_sum_too(layout, context, monkeypatch):
    """The kernels' programs, which a CPU runs slowly, in place of its loop."""

    def by_kernels(rows, experts, *_, **__):
        return Grouping(tile=16, rows=rows, experts=experts, by_kernel=(9, 0), packed=True, interpret=True)

    monkeypatch.setattr(dropless, "grouping_for", by_kernels)
    compare_with_dense(context(**layout), "two")


DOMAINS = [  # of the devices that split the experts
    ({"expert": 8}, 2),
    ({"expert": 8}, 4),
    ({"fsdp": 2, "expert": 4}, 2),
    ({"fsdp": 2, "expert": 4}, 4),  # each device is a domain
    ({"expert": 4, "tensor": 2}, 2),
]


@pytest.mark.parametrize(
    ("layout", "domains", "spread"),
    [  # `make test` has each layout once, and each spread
        pytest.param(layout, domains, spread, marks=() if place % 3 == number else pytest.mark.wide)
        for place, (layout, domains) in enumerate(DOMAINS)
        for number, spread in enumerate(SPREADS)
    ],
    ids=str,
)
def test_rows_sent_once_to_each_domain_give_the_dense_sum_too(layout, domains, spread, context):
    compare_with_dense(dataclasses.replace(context(**layout), expert_domains=domains), spread)


def test_two_halves_of_the_tokens_give_the_dense_sum_too(context, monkeypatch):
    monkeypatch.setattr(dropless, "LEAST_ROWS", 1)
    compare_with_dense(dataclasses.replace(context(fsdp=2, expert=4), expert_domains=2), "none")


def test_a_domain_that_more_tokens_need_gets_the_rest_in_further_rounds(context, monkeypatch):
    """Of twelve tokens a domain gets three at first."""
    monkeypatch.setattr(dropless, "rows_between", lambda *_: 3)
    compare_with_dense(dataclasses.replace(context(expert=8), expert_domains=4), "two")


def compare_with_dense(run, spread):
    layer = layer_of()
    x, direction = normal(8, 12, EMBED, seed=7), normal(8, 12, EMBED, seed=8)
    x[..., 0] = 1  # so that a row of the router adds to all scores
    layer["router"] = layer["router"].at[0].set(SPREADS[spread])

    def ours(x, layer):
        return jnp.sum(expert_mlp(x, layer, MODEL, run)[0] * direction)

    out, balance = jax.jit(lambda x, layer: expert_mlp(x, layer, MODEL, run))(x, layer)
    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, layer)
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.jit(dense)(x, layer)
        gradients = jax.jit(jax.grad(lambda x, layer: jnp.sum(dense(x, layer) * direction), argnums=(0, 1)))(
            x, layer
        )
    assert balance.dropped == 0
    assert (balance.load > 3) == (spread == "two")
    np.testing.assert_allclose(out, wanted, atol=1e-6 * float(jnp.abs(wanted).max()) * 8)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6 * float(jnp.abs(theirs).max()) + 1e-7)


@pytest.mark.parametrize("domains", [1, 2])
def test_eight_bits_drop_nothing_either(domains, context):
    run = dataclasses.replace(context(fsdp=2, expert=4), fp8=True, expert_domains=domains)
    x, layer = jnp.array(normal(8, 12, EMBED, seed=7)), layer_of()
    out, balance = jax.jit(lambda x, layer: expert_mlp(x, layer, MODEL, run))(x, layer)
    with jax.numpy_rank_promotion("allow"):
        wanted = dense(x, layer)
    assert balance.dropped == 0
    assert 1e-3 < float(jnp.sqrt(jnp.mean((out - wanted) ** 2) / jnp.mean(wanted**2))) < 0.1
    gradient = jax.jit(jax.grad(lambda layer: expert_mlp(x, layer, MODEL, run)[0].sum()))(layer)
    assert all(bool(jnp.isfinite(g).all()) and float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("layout", [{}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_the_gradient_of_the_bias_is_the_excess_of_tokens(layout, context):
    model = TransformerModel(
        kind="transformer", num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=8, vocab_size=8,
        num_experts=8, experts_per_token=2, router="sigmoid", router_bias=True, router_bias_rate=0.01,
        rope_theta=100.0,
    )  # fmt: skip
    random = np.random.default_rng(0)
    shapes = {name: parameter.shape for name, parameter in expert_parameters(model).items()}
    layer = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x = random.standard_normal((8, 4, 16)).astype(np.float32)
    scores = 1 / (1 + np.exp(-(x.reshape(-1, 16) @ layer["router"]))) + layer["router_bias"]
    chosen = np.argsort(-scores, axis=1)[:, :2]
    excess = np.bincount(chosen.reshape(-1), minlength=8) - 32 * 2 / 8
    run = context(**layout)
    loss = lambda layer: expert_mlp(jnp.array(x), layer, model, run)[0].sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))({name: jnp.array(weight) for name, weight in layer.items()})
    np.testing.assert_allclose(gradient["router_bias"], excess, atol=1e-5)


@pytest.mark.parametrize("width", [48, 50], ids=["kernels", "loop"])
def test_model_flops_are_those_of_the_routed_rows_whatever_multiplies(width, context):
    """A width without a factor of 16 runs as a loop on a GPU too, over more rows than the kernels take."""
    model = MODEL.model_copy(update={"mlp_dim": width})
    run = dataclasses.replace(context(), platform="cuda", compute_capability=(9, 0))
    layer = {name: jnp.zeros(p.shape) for name, p in expert_parameters(model).items()}
    x = jnp.zeros((8, 12, EMBED))
    loss = lambda x, layer: expert_mlp(x, layer, model, run)[0].sum()  # noqa: E731
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(x, layer).jaxpr
    found = count_traced(traced.jaxpr, "cuda", traced.consts).by_module
    experts = sum(count for module, count in found.items() if "router" not in module)
    assert experts == 3 * 2 * (8 * 12 * 2) * 3 * EMBED * width


def test_eight_bits_of_an_odd_width_are_multiplied_wider(context):
    """The loop stands in for the kernels on a GPU; its results are a CPU's, and not rounded to eight bits."""
    model = MODEL.model_copy(update={"mlp_dim": 50})
    declared = expert_parameters(model)
    layer = {name: jnp.array(normal(*p.shape, seed=i)) for i, (name, p) in enumerate(declared.items())}
    x, run = jnp.array(normal(8, 12, EMBED)), dataclasses.replace(context(), fp8=True)
    on_gpu = dataclasses.replace(run, platform="cuda", compute_capability=(9, 0))
    results = [expert_mlp(x, layer, model, each)[0] for each in (run, on_gpu)]
    np.testing.assert_array_equal(*results)
