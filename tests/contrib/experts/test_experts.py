"""Experts against loops over tokens, dense MLPs, autodiff of the dense form, and Hugging Face's Mixtral."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import TransformerModel
from meshwright.contrib.experts import expert_mlp, expert_parameters, order_of, places_of, route
from meshwright.trainer.models import Parameter
from meshwright.trainer.models.transformer import Transformer
from meshwright.worker import count_traced
from tests.rounding import FLOAT32

pytestmark = pytest.mark.quick

EMBED, EXPERTS = 16, 8
BASE = TransformerModel(
    kind="transformer",
    num_layers=2,
    embed_dim=EMBED,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=12,
    vocab_size=32,
    rope_theta=100.0,
    num_experts=EXPERTS,
    experts_per_token=2,
    balancing_loss=0.1,
)

TOKENS = np.random.default_rng(0).integers(32, size=(8, 17), dtype=np.int32)


def changed(**fields):
    return TransformerModel.model_validate({**BASE.model_dump(), **fields})


def values(declared, seed=1):
    random = np.random.default_rng(seed)

    def value(parameter):
        noise = random.standard_normal(parameter.shape, dtype="float32")
        return jnp.array(noise / np.float32(parameter.fan_in) ** 0.5)

    return jax.tree.map(value, declared, is_leaf=lambda x: isinstance(x, Parameter))


# One layer against a loop


def silu(x):
    return x / (1 + np.exp(-x))


def loop(x, layer, config, num_devices):
    """Each token by itself, in order; each device has its own rows and so its own buffers."""
    layer = {name: np.asarray(weight, np.float64) for name, weight in layer.items()}
    out, choices, dropped = np.zeros(x.shape), np.zeros(config.num_experts), 0
    probabilities = np.zeros(config.num_experts)
    for rows, sums in zip(np.split(x, num_devices), np.split(out, num_devices), strict=True):
        tokens, sums = rows.reshape(-1, EMBED), sums.reshape(-1, EMBED)
        room = np.full(config.num_experts, len(tokens))
        if config.capacity_factor is not None:
            fair = len(tokens) * config.experts_per_token / config.num_experts
            room = np.minimum(room, math.ceil(config.capacity_factor * fair))
        for token, total in zip(tokens, sums, strict=True):
            logits = token @ layer["router"] + layer.get("logit_bias", 0)
            probabilities += np.exp(logits) / np.exp(logits).sum()
            best = np.argsort(-logits)[: config.experts_per_token]
            weights = np.exp(logits[best]) / np.exp(logits[best]).sum()
            for expert, weight in zip(best, weights, strict=True):
                choices[expert] += 1
                if room[expert] == 0:
                    dropped += 1
                    continue
                room[expert] -= 1
                up, gate, down = (
                    layer.get(f"{name}_bias", np.zeros((EXPERTS, 1)))[expert]
                    for name in ("up", "gate", "down")
                )
                up = up + token @ layer["up"][expert]
                if "gate" not in layer:
                    hidden = silu(up)
                else:
                    gate, limit = gate + token @ layer["gate"][expert], config.gate_limit
                    if limit is not None:
                        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
                    hidden = silu(gate) * up
                total += weight * (down + hidden @ layer["down"][expert])
    num_tokens = x[..., 0].size
    loss = config.num_experts * np.sum(choices / num_tokens * probabilities / num_tokens)
    load = choices.max() / choices.mean()
    return out, (loss, load, dropped / choices.sum())


CASES = [
    ({}, {}),
    ({"capacity_factor": 1.0}, {}),
    ({"capacity_factor": 0.3, "mlp": "plain", "experts_per_token": 3}, {}),
    ({"capacity_factor": 1.1, "experts_per_token": 1}, {"data": 2, "expert": 4}),
    ({"expert_bias": True, "gate_limit": 0.5}, {"fsdp": 2, "expert": 2, "tensor": 2}),
    ({"expert_bias": True, "capacity_factor": 1.0}, {"expert": 2}),
    pytest.param({"expert_bias": True, "mlp": "plain"}, {}, marks=pytest.mark.wide),
    pytest.param({"capacity_factor": 1.0}, {"fsdp": 2, "expert": 2}, marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("fields", "layout"), CASES, ids=str)
def test_a_layer_is_a_loop_over_tokens(fields, layout, context):
    config, run = changed(**fields), context(**layout)
    layer = values(expert_parameters(config))
    x = np.random.default_rng(2).standard_normal((8, 6, EMBED)).astype(np.float32)
    out, balance = jax.jit(lambda x, layer: expert_mlp(x, layer, config, run))(x, layer)
    wanted, figures = loop(x, layer, config, run.mesh.size)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(balance, figures, rtol=1e-5, atol=1e-7)
    assert (figures[2] > 0) == (config.capacity_factor is not None)  # the cases do what they are for


def test_a_token_whose_every_choice_is_dropped_gets_nothing(context):
    """A router of zeros sends all to the first experts, and to each alike."""
    config = changed(capacity_factor=1.0)
    layer = values(expert_parameters(config))
    layer["router"] = jnp.zeros_like(layer["router"])
    x = jnp.ones((4, 8, EMBED))
    out, balance = jax.jit(lambda x: expert_mlp(x, layer, config, context()))(x)
    used = np.any(np.asarray(out) != 0, axis=-1).reshape(-1)
    np.testing.assert_array_equal(used, np.arange(32) < 32 * 2 / 8)
    assert balance.dropped == pytest.approx(1 - 2 * 8 / 64)
    assert balance.load == pytest.approx(8 / 2)
    assert balance.loss == pytest.approx(2)  # equal probabilities: whoever is chosen


def test_choices_are_numbered_in_the_order_of_the_tokens():
    logits = jnp.array([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0], [9.0, 8.0, 0.0]])
    chosen, weights = route(logits, changed(num_experts=3, experts_per_token=2))
    np.testing.assert_array_equal(chosen.argmax(-1), [[0, 2], [1, 2], [0, 1]])
    np.testing.assert_allclose(weights[:, 0], 1 / (1 + np.exp([-1.0, -4.0, -1.0])), rtol=1e-6)
    order = order_of(chosen)
    np.testing.assert_array_equal(order.counts, [2, 2, 2])
    places = places_of(order.expert, order.rank < 1, 3)
    # Expert 0 keeps token 0, expert 1 token 1, expert 2 token 0; three choices come too late.
    np.testing.assert_array_equal(places.slots < 3, [[True, True], [True, False], [False, False]])
    np.testing.assert_array_equal(places.sources, [0, 2, 1])


def test_experts_are_chosen_in_the_best_groups_and_weighted_by_their_scores():
    """By hand: groups (0, 1), (2, 3), (4, 5), of which the best two may be chosen."""
    groups = {"num_experts": 6, "router_groups": 3}
    sigmoid = changed(**groups, router_groups_chosen=2, router="sigmoid", router_scale=2.0)
    logits = jnp.log(jnp.array([[0.9, 0.1, 0.6, 0.5, 0.2, 0.7]]))  # as odds: s = x / (1 + x)
    scores = np.array([0.9, 0.1, 0.6, 0.5, 0.2, 0.7])
    scores = scores / (1 + scores)
    chosen, weights = route(logits, sigmoid)
    # Sums of two: 0.565, 0.708, 0.578. Expert 0 has the best score, but its group is the worst.
    np.testing.assert_array_equal(chosen.argmax(-1), [[5, 2]])
    np.testing.assert_allclose(weights[0], 2 * scores[[5, 2]] / scores[[5, 2]].sum(), rtol=1e-5)
    biased, with_bias = route(logits, sigmoid, jnp.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    np.testing.assert_array_equal(biased.argmax(-1), [[1, 0]])  # group 0 is the best now
    np.testing.assert_allclose(with_bias[0], 2 * scores[[1, 0]] / scores[[1, 0]].sum(), rtol=1e-5)
    softmax = changed(**groups, router_groups_chosen=1, router_normalised=False)
    chosen, weights = route(logits, softmax)
    np.testing.assert_array_equal(chosen.argmax(-1), [[0, 1]])  # softmax takes the group of the best expert
    np.testing.assert_allclose(weights[0], np.array([0.9, 0.1]) / 3.0, rtol=1e-5)


def dense(x, layer, config):
    """Every expert on every token; those that were not chosen count nothing."""
    logits = x @ layer["router"]
    kept = logits >= jax.lax.top_k(logits, config.experts_per_token)[0][..., -1:]
    weights = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    up = jnp.einsum("bse,xem->bsxm", x, layer["up"])
    hidden = jax.nn.silu(jnp.einsum("bse,xem->bsxm", x, layer["gate"])) * up
    out = jnp.einsum("bsxm,xme,bsx->bse", hidden, layer["down"], weights)
    share = kept.astype(jnp.float32).mean((0, 1))
    return out, config.num_experts * jnp.sum(share * jax.nn.softmax(logits, axis=-1).mean((0, 1)))


@pytest.mark.parametrize("layout", [{}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_gradients_are_autodiffs_of_the_dense_form(layout, context):
    run = context(**layout)
    layer = values(expert_parameters(BASE))
    x, direction = np.random.default_rng(2).standard_normal((2, 8, 6, EMBED)).astype(np.float32)

    def ours(x, layer):
        out, balance = expert_mlp(x, layer, BASE, run)
        return jnp.sum(out * direction) + 3 * balance.loss

    def theirs(x, layer):
        out, balance = dense(x, layer, BASE)
        return jnp.sum(out * direction) + 3 * balance

    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, layer)
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.jit(jax.grad(theirs, argnums=(0, 1)))(x, layer)
    assert_near(found, wanted)


def assert_near(found, wanted):
    """Within 1e-5 of the largest gradient."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    most = max(float(np.abs(g).max()) for g in jax.tree.leaves(wanted))
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-5 * most, err_msg=jax.tree_util.keystr(path))


# Whole models


def loss_of(config, run, packed=False):
    model, batch = Transformer(config), {"tokens": TOKENS} | ({"segments": SEGMENTS} if packed else {})

    def loss(parameters):
        value, outcome = model.loss(parameters, {}, {k: jnp.array(v) for k, v in batch.items()}, run)
        return value, outcome.metrics

    return loss


@functools.cache
def gradient_of(config, run, packed=False):
    """Jitted, so that each program is compiled once."""
    return jax.jit(jax.value_and_grad(loss_of(config, run, packed), has_aux=True))


def test_one_expert_is_a_dense_mlp(context):
    config = changed(num_experts=1, experts_per_token=1, balancing_loss=0.0)
    plain = changed(num_experts=None, experts_per_token=None, balancing_loss=0.0)
    parameters = values(Transformer(plain).parameters())
    (wanted, _), gradients = gradient_of(plain, context())(parameters)
    mlp = parameters["layers"].pop("mlp")
    router = jnp.zeros((2, EMBED, 1))
    parameters["layers"]["experts"] = {name: w[:, None] for name, w in mlp.items()} | {"router": router}
    (found, metrics), ours = gradient_of(config, context())(parameters)
    np.testing.assert_allclose(found, wanted, rtol=FLOAT32)
    assert metrics == {"balancing_loss": 1, "expert_load": 1, "dropped": 0}
    experts = ours["layers"].pop("experts")
    np.testing.assert_array_equal(experts.pop("router"), 0)
    ours["layers"]["mlp"] = {name: g[:, 0] for name, g in experts.items()}
    assert_near(ours, gradients)


def test_shared_experts_are_an_mlp_of_their_width_beside(context):
    config = changed(num_shared_experts=2)
    plain = changed(num_experts=None, experts_per_token=None, balancing_loss=0.0, mlp_dim=24)
    parameters = values(Transformer(plain).parameters())
    wanted = jax.jit(loss_of(plain, context()))(parameters)[0]
    silent = values(expert_parameters(config))
    silent["down"] = jnp.zeros_like(silent["down"])
    parameters["layers"]["experts"] = {name: jnp.stack([w, w]) for name, w in silent.items()}
    parameters["layers"]["shared"] = parameters["layers"].pop("mlp")
    found, metrics = jax.jit(loss_of(config, context()))(parameters)
    np.testing.assert_allclose(found, wanted + 0.1 * metrics["balancing_loss"], rtol=FLOAT32)


@pytest.mark.once
def test_the_balancing_loss_is_none_of_the_held_out_loss(context):
    run = dataclasses.replace(context(), training=False)
    parameters = values(Transformer(BASE).parameters())
    trained, metrics = gradient_of(BASE, context())(parameters)[0]
    held_out, same = jax.jit(loss_of(BASE, run))(parameters)
    assert metrics["balancing_loss"] == same["balancing_loss"] > 2
    np.testing.assert_allclose(trained - held_out, 0.1 * metrics["balancing_loss"], rtol=1e-4)


SEGMENTS = np.cumsum(np.random.default_rng(3).random(TOKENS.shape) < 0.2, axis=1).astype(np.int32)
LAYOUTS = [
    ({"fsdp": 2, "expert": 2, "tensor": 2}, {"num_shared_experts": 1, "unroll": True}, "none"),
    *(
        pytest.param(*case, marks=pytest.mark.wide)
        for case in (
            ({"expert": 8}, {}, "none"),  # tests/test_layouts.py has it
            ({"data": 2, "expert": 4}, {"num_shared_experts": 1}, "dots-attention"),
            ({"data": 2, "fsdp": 2, "tensor": 2}, {"mlp": "plain"}, "full"),
            ({"fsdp": 4, "expert": 2}, {"capacity_factor": 4.0}, "dots"),
        )
    ),
]


@pytest.mark.parametrize(("layout", "fields", "remat"), LAYOUTS, ids=str)
def test_eight_devices_train_as_one_does(layout, fields, remat, context):
    config = changed(**fields)
    packed = "unroll" in fields
    parameters = values(Transformer(config).parameters())
    (wanted, figures), gradients = gradient_of(config, context(), packed)(parameters)
    (found, same), ours = gradient_of(config, context(remat=remat, **layout), packed)(parameters)
    np.testing.assert_allclose(found, wanted, rtol=FLOAT32)
    for name, figure in figures.items():
        np.testing.assert_allclose(same[name], figure, rtol=1e-5)
    assert same["dropped"] == 0
    assert_near(ours, gradients)


@pytest.mark.parametrize(
    ("remat", "products"), [("dots", 0), ("dots-attention", 0), ("alternate-dots", 1), ("full", 2)]
)
def test_policies_that_keep_products_run_no_expert_twice(remat, products, context):
    """Between experts of width 12 and 24, what is computed again differs by the products that are.

    The product `down` never is: nothing that runs backward needs its result.
    """

    def again(mlp_dim):
        config = changed(capacity_factor=1.0, num_layers=1, mlp_dim=mlp_dim)
        shapes = jax.eval_shape(lambda: values(Transformer(config).parameters()))
        traced = gradient_of(config, context(remat=remat)).trace(shapes)
        return count_traced(traced.jaxpr.jaxpr, "cuda").by_phase["recompute"]

    num_choices = 8 * 16 * 2
    assert again(24) - again(12) == products * 2 * num_choices * EMBED * 12


# Mixtral


def mixtral(transformers):
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=EMBED,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM(config)


def as_theirs(tree):
    """Our parameters, or gradients, under Mixtral's names and in its shapes."""

    def flat(w):
        return w.reshape(EMBED, -1).T

    named = {"model.embed_tokens.weight": tree["embedding"], "lm_head.weight": tree["head"]}
    named["model.norm.weight"] = tree["final_norm"]["scale"]
    for i in range(2):
        layer = jax.tree.map(lambda w: np.asarray(w[i]), tree["layers"])  # noqa: B023  used at once
        attention, experts = layer["attention"], layer["experts"]
        ours = {
            f"self_attn.{name[0]}_proj.weight": flat(attention[name]) for name in ("query", "key", "value")
        }
        ours["self_attn.o_proj.weight"] = attention["output"].reshape(-1, EMBED).T
        ours["input_layernorm.weight"] = layer["attention_norm"]["scale"]
        ours["post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        ours["mlp.gate.weight"] = experts["router"].T
        ours["mlp.experts.gate_up_proj"] = np.concatenate([experts["gate"], experts["up"]], 2).swapaxes(1, 2)
        ours["mlp.experts.down_proj"] = experts["down"].swapaxes(1, 2)
        named |= {f"model.layers.{i}.{name}": w for name, w in ours.items()}
    return {name: np.asarray(w) for name, w in named.items()}


def test_loss_and_gradients_are_those_of_hugging_faces_mixtral(context):
    """Their balancing loss takes all layers together; ours, as Switch's, each layer, and the mean of them."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    parameters = values(Transformer(BASE).parameters())
    theirs = mixtral(transformers)
    theirs.load_state_dict({name: torch.tensor(w) for name, w in as_theirs(parameters).items()})
    tokens = torch.tensor(TOKENS).long()
    told = theirs(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(told.logits.reshape(-1, 32), tokens[:, 1:].reshape(-1))
    each = [torch.as_tensor(load_balancing_loss_func((logits,), EXPERTS, 2)) for logits in told.router_logits]
    balance = torch.stack(each).mean()
    (loss + 0.1 * balance).backward()

    (found, metrics), gradients = gradient_of(BASE, context())(parameters)
    np.testing.assert_allclose(metrics["balancing_loss"], float(balance.detach()), rtol=1e-5)
    np.testing.assert_allclose(found, float((loss + 0.1 * balance).detach()), rtol=1e-5)
    wanted = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert_near({name: as_theirs(gradients)[name] for name in wanted}, wanted)
