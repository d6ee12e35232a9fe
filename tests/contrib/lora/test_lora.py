"""Low-rank adapters: what is trained and what is frozen, in the step, in its FLOPs and in its ledger."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.config import Layout, check_layout, load_config, overridden
from meshwright.contrib.lora import adapted_products, adapter_declarations, with_adapters
from meshwright.errors import InputError
from meshwright.trainer.data import open_data
from meshwright.trainer.models import Context, model_of
from meshwright.trainer.step import build_step
from meshwright.worker import count_traced

pytestmark = pytest.mark.quick

EVERY = 'lora.targets=["all-linear"]'
LORA = ("lora.rank=4", "data.source=synthetic", "batch.sequence_length=32", EVERY)


def config_with(*overrides, preset="bytes-nano"):
    return load_config(preset, [*LORA, *overrides])


def placed(config, built, step):
    batch = open_data(config).batch(step, "train")
    return jax.tree.map(lambda x, a: jax.device_put(x.reshape(a.shape), a.sharding), batch, built.batch)


@pytest.fixture(scope="module", autouse=True)
def forgotten_at_the_end():
    """Tests of `mw.live` look at the largest arrays that are alive in this process."""
    yield
    trained.cache_clear()


@functools.cache
def trained(mesh, *overrides, steps=3):
    """The first state, the last one, and the metrics of each step; equal meshes are one."""
    config = config_with("optimizer.learning_rate=0.01", *overrides)
    built = build_step(config, mesh)
    state = built.init(np.uint32(config.seed))
    first = jax.tree.map(np.asarray, state)
    metrics = []
    for step in range(steps):
        state, metric = built.step(state, placed(config, built, step))
        metrics.append((float(metric["loss"]), float(metric["gradient_norm"])))
    return first, state, metrics


def test_a_run_begins_as_its_base_and_trains_the_adapters_alone(mesh):
    first, last, metrics = trained(mesh())
    plain = build_step(overridden(config_with(), ["lora.rank=none"]), mesh())
    base = plain.init(np.uint32(0))["parameters"]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first["frozen"], jax.tree.map(np.asarray, base))))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first["frozen"], last["frozen"])))
    _, metric = plain.step({**plain.init(np.uint32(0))}, placed(config_with(), plain, 0))
    assert metrics[0][0] == pytest.approx(float(metric["loss"]), rel=1e-6)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), first["parameters"], last["parameters"])
    assert min(jax.tree.leaves(moved)) > 0
    assert metrics[-1] != metrics[0]


def test_gradients_and_moments_exist_for_adapters_alone(mesh):
    config = config_with("precision=bf16")
    state = build_step(config, mesh()).state
    count = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree) if x.ndim)  # noqa: E731
    assert count(state["parameters"]) == config.num_trained_parameters
    assert count(state["frozen"]) == config.num_frozen_parameters == config.model.num_parameters
    assert count(state["optimizer"]) == 2 * config.num_trained_parameters
    assert {x.dtype.name for x in jax.tree.leaves(state["parameters"])} == {"float32"}
    frozen = state["frozen"]
    assert frozen["layers"]["mlp"]["up"].dtype.name == frozen["embedding"].dtype.name == "bfloat16"
    assert frozen["final_norm"]["scale"].dtype.name == "float32"


def test_adapters_have_as_many_parameters_as_by_hand():
    """Llama 3 8B, rank 16, queries and values: 32 layers x 16 x ((4096 + 4096) + (4096 + 1024)) = 6,815,744,
    the number that PEFT prints for it."""
    config = load_config("llama3-8b", ["lora.rank=16"])
    assert config.num_trained_parameters == 32 * 16 * ((4096 + 4096) + (4096 + 1024)) == 6_815_744


def test_an_adapter_adds_x_a_b_times_alpha_over_rank(context):
    """The model with adapters is the model whose matrices have the products added."""
    config = config_with("lora.alpha=12", "model.unroll=false")
    model = model_of(config.model)
    frozen = build_step(overridden(config, ["lora.rank=none"]), context().mesh).init(np.uint32(0))[
        "parameters"
    ]
    random = np.random.default_rng(0)
    declared = adapter_declarations(model, config.lora)
    is_leaf = lambda p: hasattr(p, "fan_in")  # noqa: E731
    adapters = jax.tree.map(
        lambda p: jnp.asarray(random.normal(0, 0.1, p.shape), jnp.float32), declared, is_leaf=is_leaf
    )
    changed = jax.tree.map(lambda x: x, frozen)
    for group, name in adapted_products(config.lora, config.model):
        pair, matrix = adapters["layers"][group][f"{name}_adapter"], frozen["layers"][group][name]
        layers = matrix.shape[0]
        added = np.einsum("lir,lro->lio", pair["a"].reshape(layers, -1, 4), pair["b"].reshape(layers, 4, -1))
        changed["layers"][group][name] = matrix + 12 / 4 * added.reshape(matrix.shape)
    tokens = random.integers(0, 256, (2, 33))
    losses = [
        float(model.loss(tree, {}, {"tokens": jnp.asarray(tokens)}, given)[0])
        for tree, given in (
            (with_adapters(frozen, adapters), context(adapter_scale=config.lora.scale)),
            (changed, context()),
        )
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.fixture
def context(mesh):
    """A context of a model in float32 on one device."""

    def make(**given):
        given = {"mesh": mesh(), "dtype": jnp.float32, "platform": "cpu", "remat": "none", **given}
        return Context(**given)

    return make


IN_TWO = "batch.microbatch_sequences=2"
AXES = {
    "data, in two": ({"data": 2}, (IN_TWO,)),
    "fsdp, tensor": ({"fsdp": 2, "tensor": 2}, ()),
    "context, full": ({"context": 2}, ("remat=full",)),
    "unrolled": ({"fsdp": 2}, ("model.unroll=true", "remat=none")),
}


@pytest.mark.parametrize(
    ("axes", "overrides"),
    [pytest.param(*AXES[k], id=k, marks=() if k == "fsdp, tensor" else pytest.mark.wide) for k in AXES],
)
def test_layouts_train_adapters_alike(axes, overrides, mesh):
    unrolled = [each for each in overrides if "unroll" in each]
    _, _, alone = trained(mesh(), *unrolled)
    _, _, split = trained(mesh(**axes), *overrides)
    np.testing.assert_allclose(split, alone, rtol=2e-5)


@pytest.mark.once
@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(each, marks=pytest.mark.wide) for each in ("fp16", "fp8"))]
)
def test_other_formats_train_adapters_nearly_alike(precision, mesh):
    _, _, exact = trained(mesh())
    _, _, other = trained(mesh(data=2), f"precision={precision}")
    np.testing.assert_allclose(other, exact, rtol=0.03)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("all-linear",)])
def test_model_flops_are_those_by_hand(targets, mesh):
    """T tokens, forward: 2 T for each number of the matrices and of the adapters, and attention.

    Backward, a frozen matrix has the gradient of its input alone: as much as forward. Adapters and attention
    have two gradients for each product. The first block's inputs count like those of the others.
    """
    config = config_with(f"lora.targets={json.dumps(targets)}", "remat=full")
    built = build_step(config, mesh())
    flops = count_traced(built.step.trace(built.state, built.batch).jaxpr.jaxpr, "cuda")
    m, batch = config.model, config.batch
    tokens = batch.tokens_per_step
    heads, kv_heads = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    matrices = m.num_layers * m.embed_dim * (2 * heads + 2 * kv_heads + 3 * m.mlp_dim)
    matrices += m.vocab_size * m.embed_dim
    pairs = {"q_proj": m.embed_dim + heads, "v_proj": m.embed_dim + kv_heads}
    if targets == ("all-linear",):
        pairs |= {"k_proj": m.embed_dim + kv_heads, "o_proj": heads + m.embed_dim}
        pairs |= dict.fromkeys(("gate", "up", "down"), m.embed_dim + m.mlp_dim)
    adapters = m.num_layers * 4 * sum(pairs.values())
    attention = 2 * m.num_layers * batch.sequences * batch.sequence_length**2 * heads
    assert flops.by_phase["forward"] == 2 * tokens * (matrices + adapters) + attention
    assert flops.by_phase["backward"] == 2 * tokens * (matrices + 2 * adapters) + 2 * attention


def test_the_ledger_shows_what_is_frozen_and_moments_of_adapters_alone():
    weighing = mw.weigh("bytes-nano", on="2xCPU", overrides=[*LORA, "precision=bf16", "layout=fsdp=2"])
    config, memory = weighing.config, weighing.ledger.memory
    held = {argument.role: 0 for argument in weighing.compiled.arguments}
    for argument in weighing.compiled.arguments:
        held[argument.role] += argument.device_bytes if argument.shape else 0
    wide = (2 * config.model.num_layers + 1) * config.model.embed_dim  # norms, in float32
    frozen = 2 * (config.num_frozen_parameters - wide) + 4 * wide
    assert held["frozen_parameters"] == frozen // 2
    assert memory.by_category["frozen_parameters"] == frozen // 2
    assert held["optimizer_state"] == 2 * held["parameters"]
    assert memory.by_category["optimizer_state"] < memory.by_category["frozen_parameters"]
    assert weighing.compiled.num_parameters == config.num_frozen_parameters + config.num_trained_parameters
    assert weighing.ledger.flops.rule_6nd is None, "the rule supposes that all parameters are trained"


@pytest.mark.wide
@pytest.mark.once
def test_a_plan_ranks_layouts_of_a_run_with_adapters():
    fixed, run = ["rest", "remat=full", "microbatch=1"], ["lora.rank=16", "layer_loop=keep"]
    plan = mw.plan("llama3-8b", on="2xH100", budget_seconds=60, overrides=run, search=[*fixed, *["data=1,2"]])
    assert plan.winner is not None
    assert len({candidate.layout for candidate in plan.candidates}) > 1
    whole = {**plan.winner.overrides, "layer_loop": "keep"}
    full = mw.weigh("llama3-8b", on="2xH100", overrides=whole)
    held, moments = 8_030_261_248 / 2, 2 * 4  # parameters of one device; bytes of their moments
    assert full.ledger.memory.reserved_bytes > plan.winner.reserved_bytes + held * moments


REFUSED = {
    "linear": (
        ("linear", "lora.rank=2"),
        "lora.rank = 2, but a linear model has no products with adapters",
        "leave",
    ),
    "a name": (
        ("bytes-nano", "lora.rank=2", 'lora.targets=["q_prj"]'),
        "lora.targets holds 'q_prj', which is no product of a block",
        "did you mean 'q_proj'?",
    ),
    "no names": (("bytes-nano", "lora.targets=[]"), "is empty, so that nothing would be trained", "q_proj"),
    "experts": (
        ("mixtral-8x7b", "lora.rank=2", EVERY),
        "lora.targets has products of the MLP, and experts have no adapters",
        'use ["q_proj"',
    ),
    "a router's bias": (
        ("mixtral-8x7b", "lora.rank=2", "model.router_bias=true", "model.router_bias_rate=0.01"),
        "model.router_bias_rate = 0.01 has nothing to move: lora freezes the router's bias",
        "leave router_bias_rate out",
    ),
    "plain": (
        ("gpt2-124m", "lora.rank=2", 'lora.targets=["gate_proj"]'),
        "has 'gate_proj', which no layer of this model has",
        "up_proj or down_proj",
    ),
    "no such mixer": (
        ("bytes-nano", "lora.rank=2", 'lora.targets=["q_proj","in_proj"]'),
        "has 'in_proj', which no layer of this model has",
        "use q_proj or k_proj",
    ),
    "latents": (
        ("deepseek-v2-lite", "lora.rank=2"),
        "adapters beside latent attention and dense first layers are not run",
        "leave lora out",
    ),
    "zero1": (
        ("bytes-nano", "lora.rank=2", "zero1=true"),
        "with lora those are few",
        "use zero1 = false; fsdp divides the frozen parameters",
    ),
}


@pytest.mark.parametrize(("asked", "words", "hint"), REFUSED.values(), ids=list(REFUSED))
def test_what_adapters_cannot_be_combined_with_is_refused(asked, words, hint):
    preset, *overrides = asked
    with pytest.raises(InputError) as refused:
        load_config(preset, overrides)
    assert words in refused.value.message
    assert hint in refused.value.hint


def test_stages_of_a_run_with_adapters_are_refused():
    with pytest.raises(InputError, match="stage = 2 has gradients of all parameters alone") as refused:
        check_layout(config_with(), Layout.parse("stage=2"))
    assert refused.value.hint == "use fsdp=2 in place of stage and fsdp"
