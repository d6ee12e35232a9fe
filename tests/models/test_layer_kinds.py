"""Layers of several kinds in one model: what they declare, a loop over them, and what is refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import holds_layers, load_config
from meshwright.errors import InputError
from meshwright.trainer.models import initial_parameters, is_parameter
from meshwright.trainer.models.transformer import Transformer

pytestmark = pytest.mark.quick

SMALL = (
    *("model.embed_dim=16", "model.mlp_dim=24", "model.vocab_size=32", "model.window=4"),
    *("precision=fp32", "data.source=synthetic"),
)
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.dense_mlp_dim=20")
SHARED = ("model.shared_mlp_dim=12", "model.shared_gate=true")
PATTERNS = {
    "a period": ("model.layer_pattern=local+mlp*2 attention mlp", "model.num_layers=8"),
    "a list": ("model.layer_pattern=local+mlp attention*2 local+mlp attention*2 mlp*3", "model.num_layers=9"),
    "experts": (
        *("model.layer_pattern=mlp local+experts nope", "model.num_layers=6", "remat=full-every-2"),
        *(*EXPERTS, *SHARED, "model.attention_gate=true"),
    ),
    "dense first": (
        *("model.layer_pattern=local+mlp*2 attention+experts*4", "model.num_layers=6", *EXPERTS, *SHARED),
    ),
}
TOKENS = np.random.default_rng(0).integers(32, size=(2, 13), dtype=np.int32)


def config_of(name, *more):
    return load_config("bytes-nano", (*SMALL, *PATTERNS[name], *more))


def drawn(model):
    return jax.jit(lambda: initial_parameters(model.parameters(), jax.random.key(0)))()


def loss_and_gradients(model, parameters, run):
    def loss(parameters):
        return model.loss(parameters, {}, {"tokens": jnp.asarray(TOKENS)}, run)[0]

    return jax.jit(jax.value_and_grad(loss))(parameters)


def by_layer(model, tree):
    """Stacked layers as a list, by the rows that the model says belong to each layer."""
    lists = {}
    for stretch in model.config.stretches:
        layers = [{} for _ in range(stretch.num_layers)]
        for part, stack in tree[stretch.name].items():
            for row, number in enumerate(model.layers_with(stretch.name, part)):
                layers[number - stretch.first][part] = jax.tree.map(lambda a, row=row: a[row], stack)
        lists[stretch.name] = layers
    return {**tree, **lists}


def assert_same(one, other, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), one, other)


@pytest.mark.parametrize(
    "name",
    [
        *("a list", "experts"),
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("a period", "dense first")),
    ],
)
def test_stacked_layers_are_those_written_out(name, context):
    config = config_of(name)
    looped = Transformer(config.model)
    written = Transformer(config.model.model_copy(update={"unroll": True}))
    parameters = drawn(looped)
    value, gradients = loss_and_gradients(looped, parameters, context(remat=config.remat))
    same, others = loss_and_gradients(written, by_layer(looped, parameters), context(remat="none"))
    assert float(value) == pytest.approx(float(same), rel=1e-6)
    assert_same(by_layer(looped, gradients), others)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_count_of_parameters_is_that_of_the_declarations(name):
    model = config_of(name).model
    declared = jax.tree.leaves(Transformer(model).parameters(), is_leaf=is_parameter)
    assert model.num_parameters == sum(math.prod(parameter.shape) for parameter in declared)


def test_a_pattern_of_windows_is_the_model_with_a_global_layer_after_each(context):
    pattern = load_config(
        "bytes-nano", (*SMALL, "model.num_layers=4", "model.layer_pattern=local+mlp attention+mlp")
    )
    every = load_config("bytes-nano", (*SMALL, "model.num_layers=4", "model.global_every=2"))
    models = [Transformer(config.model) for config in (pattern, every)]
    parameters = drawn(models[0])
    assert_same(*(loss_and_gradients(model, parameters, context(remat="dots")) for model in models))
    assert pattern.model.seen_positions(16) == every.model.seen_positions(16)


def test_a_layer_without_positions_sees_the_order_by_its_mask_alone(context):
    """With one layer and no window, moving the tokens that the last one sees changes nothing of it."""
    for word, moves in (("nope", False), ("attention", True)):
        changes = ("model.window=none", f"model.layer_pattern={word}", "model.num_layers=1")
        model = Transformer(load_config("bytes-nano", (*SMALL, *changes)).model)
        found = [
            model.hidden(drawn(model), jnp.asarray(tokens), context())[0][:, -1]
            for tokens in (TOKENS, np.concatenate([TOKENS[:, 5:-1], TOKENS[:, :5], TOKENS[:, -1:]], axis=1))
        ]
        assert (np.abs(found[0] - found[1]).max() > 1e-4) == moves


def test_an_irregular_list_is_cut_into_few_stretches_that_repeat():
    def stretches(pattern, num_layers):
        model = load_config(
            "llama3-8b", (f"model.layer_pattern={pattern}", f"model.num_layers={num_layers}")
        ).model
        return [(stretch.name, len(stretch.period), stretch.num_layers) for stretch in model.stretches]

    assert stretches("attention+mlp*3 mlp", 32) == [("layers", 4, 32)]
    most = "attention+mlp*3" + 3 * " attention mlp attention+mlp*4" + " attention+mlp"
    assert stretches(most, 22) == [("layers_0", 6, 18), ("layers_1", 1, 4)]


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (("layer_pattern=attention+mlq",), "'attention+mlq' is no layer", "attention+mlp*3 mlp"),
        (("layer_pattern=attention+local",), "'attention+local' has two mixers", "mlp"),
        (("layer_pattern=mlp*0",), "'mlp*0' is no layer", "mlp"),
        (("layer_pattern=mlp+attention",), "'mlp+attention' is no layer", "mlp"),
        (("layer_pattern=mlp attention*4", "num_layers=8"), "has 5 layers", "num_layers = 5 or 10"),
        (("layer_pattern=local+mlp",), "has 'local'", "set window"),
        (("layer_pattern=attention+mlp", "window=8"), "has no 'local'", "add 'local'"),
        (("layer_pattern=attention+experts",), "has 'experts'", "set num_experts"),
        (("delta_heads=4",), "delta_heads = 4 has no effect without 'delta' in layer_pattern", '"delta+mlp"'),
        (("mamba_heads=2",), "mamba_heads = 2 has no effect without 'mamba'", "leave mamba_heads out"),
        (
            ("layer_pattern=local", "window=8", "global_every=2"),
            "is not run with layer_pattern",
            "which layers are which",
        ),
    ],
    ids=str,
)
def test_patterns_that_cannot_be_are_refused_in_words(changes, message, hint):
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [f"model.{change}" for change in changes])
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_stages_hold_whole_patterns_or_are_refused(tmp_path):
    from meshwright.config import Layout, check_layout

    def problem(name, stages, *more):
        with pytest.raises(InputError) as caught:
            check_layout(config_of(name, *more), Layout.parse(f"stage={stages}"))
        return f"{caught.value.message} {caught.value.hint}"

    check_layout(config_of("a period"), Layout.parse("stage=2"))
    check_layout(config_of("dense first"), Layout.parse("stage=2"))
    three = ("model.num_layers=12",)
    assert "repeats 3 times, over which stage = 2 does not divide" in problem("a period", 2, *three)
    assert "a model.layer_pattern that does not repeat as a whole = 1" in problem("a list", 2)
    assert [stretch.name for stretch in config_of("a list").model.stretches] == ["layers_0", "layers_1"]
    assert all(holds_layers(stretch.name) for stretch in config_of("a list").model.stretches)
