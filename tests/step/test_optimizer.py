"""Optimizers and schedules: their rules, the matrices they see, and how their moments are sharded."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshwright.config import load_config, preset_names, variants
from meshwright.trainer.models import Parameter, initial_parameters, model_of
from meshwright.trainer.step import (
    is_hidden_matrix,
    is_matrix,
    matrix_dims,
    moment_shardings,
    optimizer_of,
    schedule_of,
)

pytestmark = pytest.mark.quick

INNER = jax.tree_util.GetAttrKey("inner_states")


# The optimizers against their papers' formulas, written out in numpy.


DECLARED = {
    "matrix": Parameter(shape=(2, 3), dims=("embed", "mlp"), fan_in=2),
    "bias": Parameter(shape=(2, 3), dims=("heads", "head_dim"), initial="zeros"),
    "scale": Parameter(shape=(3,), dims=("embed",), initial="ones"),
}


def updated(config, num_steps=3):
    """Parameters after steps whose gradients are given, and what was given."""
    random = np.random.default_rng(0)
    first = {name: random.standard_normal(p.shape).astype("float32") for name, p in DECLARED.items()}
    gradients = [
        {name: random.standard_normal(p.shape).astype("float32") for name, p in DECLARED.items()}
        for _ in range(num_steps)
    ]
    optimizer = optimizer_of(config, DECLARED)
    rate = config.optimizer.learning_rate  # by which the step scales

    @jax.jit
    def run(parameters, gradients):
        state = optimizer.init(parameters)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, parameters)
            parameters = jax.tree.map(lambda p, u: p + rate * u, parameters, updates)
        return parameters

    return first, gradients, run(first, gradients)


def clipped(gradient, most):
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values()))
    return {name: g * min(1.0, most / norm) for name, g in gradient.items()}


@pytest.mark.parametrize("clip", ["none", "0.5", "1e9"])
def test_adamw_decays_matrices_alone_and_clips_the_norm_of_all(clip):
    overrides = ("optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.epsilon=1e-3")
    overrides += ("optimizer.learning_rate=0.1", "optimizer.weight_decay=0.2", f"optimizer.clip_norm={clip}")
    first, gradients, found = updated(load_config("bytes-nano", overrides))
    if clip != "none":
        gradients = [clipped(g, float(clip)) for g in gradients]
    for name in DECLARED:
        w, mean, square = first[name].astype(np.float64), 0.0, 0.0
        for t, gradient in enumerate(gradients, start=1):  # Loshchilov & Hutter 2019, algorithm 2
            mean = 0.8 * mean + 0.2 * gradient[name]
            square = 0.9 * square + 0.1 * gradient[name] ** 2
            step = (mean / (1 - 0.8**t)) / (np.sqrt(square / (1 - 0.9**t)) + 1e-3)
            w = w - 0.1 * (step + (0.2 * w if name == "matrix" else 0))
        np.testing.assert_allclose(found[name], w, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_keeps_a_trace_only_with_momentum(momentum):
    overrides = ("optimizer.kind=sgd", "optimizer.learning_rate=0.1", f"optimizer.momentum={momentum}")
    config = load_config("linear", overrides)
    first, gradients, found = updated(config)
    for name in DECLARED:
        w, trace = first[name], 0.0
        for gradient in gradients:
            trace = momentum * trace + gradient[name]
            w = w - 0.1 * trace
        np.testing.assert_allclose(found[name], w, rtol=1e-4, atol=1e-6)
    state = jax.tree.leaves(jax.eval_shape(optimizer_of(config, DECLARED).init, first))
    num_numbers = sum(math.prod(leaf.shape) for leaf in state if leaf.dtype == jnp.float32)
    assert num_numbers == (15 if momentum else 0)


@pytest.mark.parametrize("under", [False, True], ids=["on the root", "under the root"])
def test_adagrad_divides_by_the_root_of_all_squares_so_far(under):
    overrides = ("optimizer.epsilon=0.1", f"optimizer.epsilon_under_root={str(under).lower()}")
    config = load_config("linear", ("optimizer.kind=adagrad", *overrides))
    first, gradients, found = updated(config)
    for name in DECLARED:
        w, squares = first[name].astype(np.float64), 0.0
        for gradient in gradients:  # Duchi, Hazan & Singer 2011, the diagonal form
            squares = squares + gradient[name].astype(np.float64) ** 2
            root = np.sqrt(squares + 0.1) if under else np.sqrt(squares) + 0.1
            w = w - 0.1 * gradient[name] / root
        np.testing.assert_allclose(found[name], w, rtol=1e-5, atol=1e-6, err_msg=name)
    state = jax.tree.leaves(jax.eval_shape(optimizer_of(config, DECLARED).init, first))
    assert sum(math.prod(leaf.shape) for leaf in state if leaf.dtype == jnp.float32) == 15


ADDING = {"momentum": 0.9, "centered": "true", "least_factored": 1}  # settings that add a moment


@pytest.mark.parametrize("kind", variants("optimizer")[1])
def test_an_optimizer_declares_the_moments_that_its_update_keeps_and_their_signs(kind):
    keys = variants("optimizer")[1][kind].model_fields
    added = [f"optimizer.{key}={value}" for key, value in ADDING.items() if key in keys]
    config = load_config("linear", (f"optimizer.kind={kind}", *added))
    optimizer = optimizer_of(config, DECLARED)
    first, gradients, _ = updated(config, num_steps=2)
    state = optimizer.init(first)
    for gradient in gradients:
        _, state = optimizer.update(gradient, state, first)
    least = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        group = next((path[i + 1].key for i, key in enumerate(path) if key == INNER), None)
        if x.size > 1 and x.ndim:  # Optax keeps one number where it keeps no moment
            name = next(f for f in fields if not f.startswith("inner_state"))
            name = name if group is None else f"{group}.{name}"
            least[name] = min(least.get(name, 0), float(x.min()))
    assert {m.name: m.signed for m in config.optimizer.moments()} == {n: x < 0 for n, x in least.items()}


def is_parameter(leaf):
    return isinstance(leaf, Parameter)


def test_of_a_transformer_decay_falls_on_its_matrices():
    """Not on norms and biases, whatever their shape: some are of heads by width, and all are stacked."""
    config = load_config("gpt2-124m", ("schedule.kind=constant",))
    declared = model_of(config.model).parameters()
    parameters = jax.tree.map(lambda p: jnp.ones((1,) * len(p.shape)), declared, is_leaf=is_parameter)
    optimizer = optimizer_of(config, declared)

    @jax.jit
    def update(parameters):
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return optimizer.update(zeros, optimizer.init(parameters), parameters)[0]

    changes = jax.tree_util.tree_leaves_with_path(update(parameters))
    decayed = {jax.tree_util.keystr(path) for path, change in changes if np.any(np.asarray(change) != 0)}
    matrices = {f"['layers']['attention']['{n}']" for n in ("query", "key", "value", "output")}
    matrices |= {f"['layers']['mlp']['{n}']" for n in ("up", "down")}
    assert decayed == matrices | {"['embedding']", "['positions']"}


def test_a_constant_schedule_is_constant():
    rate = schedule_of(load_config("linear"))
    assert [float(rate(step)) for step in (0, 99, 10**6)] == pytest.approx([0.1] * 3)


def test_a_cosine_schedule_warms_up_and_falls_to_its_fraction():
    overrides = (
        "schedule.kind=cosine",
        "schedule.warmup_steps=10",
        "schedule.final_fraction=0.2",
        "steps=110",
    )
    rate = schedule_of(load_config("linear", overrides))
    assert float(rate(0)) == 0
    assert float(rate(5)) == pytest.approx(0.05)
    assert float(rate(10)) == pytest.approx(0.1)
    assert float(rate(60)) == pytest.approx(0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2))
    assert float(rate(110)) == pytest.approx(0.02)
    assert float(rate(500)) == pytest.approx(0.02)


def test_a_cosine_schedule_may_do_without_warming_up():
    overrides = ("schedule.kind=cosine", "schedule.warmup_steps=0", "steps=10")
    assert float(schedule_of(load_config("linear", overrides))(0)) == pytest.approx(0.1)


def rates(*overrides):
    schedule = schedule_of(load_config("linear", ("steps=110", *(f"schedule.{o}" for o in overrides))))
    return lambda *steps: [float(schedule(step)) / 0.1 for step in steps]


def test_a_constant_schedule_may_warm_up():
    found = rates("kind=constant", "warmup_steps=10")
    assert found(0, 5, 10, 500) == pytest.approx([0, 0.5, 1, 1])


@pytest.mark.parametrize(
    "kind",
    [
        ("constant", "warmup_steps=10"),
        ("cosine", "warmup_steps=10"),
        ("linear", "warmup_steps=10"),
        ("stable-then-decay", "warmup_steps=10", "decay_steps=20"),
        ("inverse-square-root", "warmup_steps=10"),
    ],
    ids=lambda kind: kind[0],
)
@pytest.mark.parametrize(
    ("scale", "sequences", "times"),
    [("linear", 256, 8), ("sqrt", 256, math.sqrt(8)), ("linear", 16, 0.5), ("sqrt", 8, 0.5), ("sqrt", 32, 1)],
)
def test_every_schedule_is_scaled_by_the_batch_or_its_root(kind, scale, sequences, times):
    chosen = [f"schedule.{each}" for each in (f"kind={kind[0]}", *kind[1:])]
    steps = (0, 5, 10, 60, 110)
    plain = schedule_of(load_config("linear", ["steps=110", *chosen]))
    scaled = [f"schedule.scale={scale}", "batch.base_sequences=32", f"batch.sequences={sequences}"]
    found = schedule_of(load_config("linear", ["steps=110", *chosen, *scaled]))
    wanted = [times * float(plain(step)) for step in steps]
    assert [float(found(step)) for step in steps] == pytest.approx(wanted, rel=1e-6)


def test_a_linear_schedule_warms_up_and_falls_in_a_line():
    found = rates("kind=linear", "warmup_steps=10", "final_fraction=0.2")
    assert found(0, 5, 10, 60, 110, 500) == pytest.approx([0, 0.5, 1, 0.6, 0.2, 0.2])


def test_a_stable_schedule_decays_over_its_last_steps_alone():
    found = rates("kind=stable-then-decay", "warmup_steps=10", "decay_steps=20")
    assert found(0, 5, 10, 60, 90, 100, 110, 500) == pytest.approx([0, 0.5, 1, 1, 1, 0.5, 0, 0])
    at_once = rates("kind=stable-then-decay", "warmup_steps=0", "decay_steps=110", "final_fraction=0.5")
    assert at_once(0, 55, 110) == pytest.approx([1, 0.75, 0.5])


def test_an_inverse_square_root_schedule_halves_at_four_times_its_warmup():
    found = rates("kind=inverse-square-root", "warmup_steps=10")
    assert found(0, 5, 10, 40, 90, 1000) == pytest.approx([0, 0.5, 1, 0.5, 1 / 3, 0.1])


# Which dims of a parameter are a matrix's, by models whose products are known.


def declared(preset, *overrides):
    return model_of(load_config(preset, overrides).model).parameters()


def flattened(parameter):
    return matrix_dims(parameter).flat_shape(parameter.shape)


def test_attentions_matrices_are_those_of_single_layers_with_all_heads_on_one_side():
    layers = declared("gpt2-124m")["layers"]
    for name in ("query", "key", "value"):
        assert flattened(layers["attention"][name]) == (12, 768, 12 * 64)
        assert matrix_dims(layers["attention"][name]).input_output_dims == ((1,), (2, 3))
    assert flattened(layers["attention"]["output"]) == (12, 12 * 64, 768)
    assert matrix_dims(layers["attention"]["output"]).input_output_dims == ((1, 2), (3,))
    assert matrix_dims(layers["mlp"]["down"]).input_output_dims == ((1,), (2,))
    assert flattened(layers["attention"]["query_bias"]) == (12, 768)
    assert flattened(layers["mlp_norm"]["scale"]) == (12, 768)


def test_each_expert_is_a_matrix_of_its_own():
    layers = declared("bytes-moe", "model.num_shared_experts=2")["layers"]
    assert flattened(layers["experts"]["up"]) == (2, 4, 64, 128)
    assert flattened(layers["experts"]["down"]) == (2, 4, 128, 64)
    assert matrix_dims(layers["experts"]["down"]).input_output_dims == ((2,), (3,))
    assert flattened(layers["experts"]["router"]) == (2, 64, 4)
    assert flattened(layers["shared"]["up"]) == (2, 64, 2 * 128)


def test_a_convolutions_inputs_are_its_channels_and_the_window():
    kernel = declared("lenet")["convolution2"]["weight"]
    assert flattened(kernel) == (50, 20 * 5 * 5)
    assert matrix_dims(kernel).input_output_dims == ((1, 2, 3), (0,))
    assert matrix_dims(kernel).inputs_outputs(kernel.shape) == (500, 50)


@pytest.mark.parametrize("preset", preset_names())
def test_every_parameter_of_every_preset_is_a_matrix_or_a_vector(preset):
    for parameter in jax.tree.leaves(declared(preset), is_leaf=lambda p: isinstance(p, Parameter)):
        dims = matrix_dims(parameter)
        assert sorted(dims.stack + dims.first + dims.second) == list(range(len(parameter.shape)))
        if is_matrix(parameter):
            assert dims.inputs_outputs(parameter.shape)[0] == parameter.fan_in


def test_tables_heads_norms_and_biases_are_no_hidden_matrices():
    leaves = jax.tree_util.tree_leaves_with_path(
        declared("gpt2-124m", "model.tied_embeddings=false"), is_leaf=lambda p: isinstance(p, Parameter)
    )
    hidden = {jax.tree_util.keystr(path) for path, p in leaves if is_hidden_matrix(p)}
    names = [("attention", n) for n in ("query", "key", "value", "output")]
    assert hidden == {f"['layers']['{g}']['{n}']" for g, n in [*names, ("mlp", "up"), ("mlp", "down")]}
    assert not is_hidden_matrix(declared("cruncher")["head"])
    assert all(is_hidden_matrix(p) for p in declared("cruncher")["layers"])


def test_a_parameter_whose_inputs_cannot_be_told_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="have its fan_in"):
        matrix_dims(Parameter(shape=(4, 6), dims=("embed", "mlp"), fan_in=5))
    with pytest.raises(AssertionError, match="stack is not first"):
        matrix_dims(Parameter(shape=(4, 6), dims=("embed", "layers"), fan_in=4))


# Each moment lies with its parameter; a part of it, with the dims that it keeps.


KINDS = ("sgd", "adagrad", "rmsprop", "adam", "adamw", "lion", "adafactor", "muon")
SMALL = ("model.num_layers=2", "model.embed_dim=256", "model.mlp_dim=512", "model.vocab_size=1024")
SMALL += ("model.num_heads=4", "model.num_kv_heads=4")


def specs(mesh, *overrides):
    """By path: shape and how it lies, of the optimizer's state and of the parameters."""
    config = load_config("gpt2-124m", (*SMALL, *overrides))
    declared = model_of(config.model).parameters()
    optimizer = optimizer_of(config, declared)
    shapes = jax.eval_shape(lambda: optimizer.init(initial_parameters(declared, jax.random.key(0))))
    found = moment_shardings(shapes, declared, mesh)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    lying = jax.tree.leaves(found)
    return {
        jax.tree_util.keystr(path): (leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(leaves, lying, strict=True)
    }


def of(found, ending):
    (only,) = [value for path, value in found.items() if path.endswith(ending)]
    return only


QUERY = "['layers']['attention']['query']"
SPLIT_QUERY = PartitionSpec(None, "fsdp", "tensor", None)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "adafactor"])
def test_a_moment_of_the_parameters_shape_lies_where_the_parameter_lies(mesh, kind):
    momentum = ["optimizer.momentum=0.9"] if kind in ("sgd", "rmsprop") else []
    found = specs(mesh(fsdp=4, tensor=2), f"optimizer.kind={kind}", *momentum)
    queries = [value for path, value in found.items() if path.endswith(QUERY)]
    assert len(queries) == {"adam": 2, "adamw": 2, "rmsprop": 2}.get(kind, 1)
    assert queries == [((2, 256, 4, 64), SPLIT_QUERY)] * len(queries)
    for shape, spec in found.values():  # what is whole on every device is small
        assert spec != PartitionSpec() or shape in ((), (3,))


def test_adafactors_rows_and_columns_are_split_as_the_sides_that_they_keep(mesh):
    found = specs(mesh(fsdp=4, tensor=2), "optimizer.kind=adafactor")
    # 256 inputs and 256 outputs: the second side counts as the longer one, and rows are the shorter's
    assert of(found, f".v_row{QUERY}") == ((2, 256), PartitionSpec(None, "fsdp"))
    assert of(found, f".v_col{QUERY}") == ((2, 256), PartitionSpec(None, "tensor"))
    assert of(found, ".v_row['layers']['mlp']['down']") == ((2, 256), PartitionSpec(None, "fsdp"))
    assert of(found, ".v_col['layers']['mlp']['down']") == ((2, 512), PartitionSpec(None, "tensor"))
    assert of(found, ".v_row['embedding']") == ((256,), PartitionSpec("fsdp"))
    assert of(found, ".v_col['embedding']") == ((1024,), PartitionSpec("tensor"))
    assert of(found, ".v['layers']['mlp_norm']['scale']") == ((2, 256), PartitionSpec(None, "fsdp"))
    assert of(found, f".v{QUERY}") == ((2, 1), PartitionSpec())  # Optax's placeholder
    assert of(found, ".v['layers']['attention']['query_bias']") == ((2, 256), PartitionSpec(None, "tensor"))


def test_adafactors_rows_of_experts_are_split_over_expert(mesh):
    experts = (
        "num_experts=8",
        "experts_per_token=2",
        "capacity_factor=1.0",
        "balancing_loss=0.01",
        "bias=false",
    )
    sets = ("optimizer.kind=adafactor", *(f"model.{each}" for each in experts))
    found = specs(mesh(expert=4, tensor=2), *sets)
    assert of(found, ".v_row['layers']['experts']['down']") == (
        (2, 8, 256),
        PartitionSpec(None, "expert", None),
    )
    assert of(found, ".v_col['layers']['experts']['down']") == (
        (2, 8, 512),
        PartitionSpec(None, "expert", "tensor"),
    )


def test_adafactors_moment_of_a_small_matrix_is_whole_and_split_as_both_sides(mesh):
    found = specs(mesh(fsdp=4, tensor=2), "optimizer.kind=adafactor", "optimizer.least_factored=1024")
    assert of(found, f".v{QUERY}") == ((2, 256, 256), PartitionSpec(None, "fsdp", "tensor"))


def test_dims_made_one_are_split_only_as_the_first_of_them():
    from meshwright.trainer.step import merged_entry

    assert merged_entry((0, 1), PartitionSpec("tensor", None)) == "tensor"
    assert merged_entry((0, 1), PartitionSpec(None, "tensor")) is None
    assert merged_entry((0, 1), PartitionSpec("fsdp", "tensor")) is None


def test_every_number_of_the_state_is_in_fp32_or_counts(mesh):
    for kind in KINDS:
        config = load_config("gpt2-124m", (*SMALL, f"optimizer.kind={kind}", "precision=bf16"))
        declared = model_of(config.model).parameters()
        optimizer = optimizer_of(config, declared)
        state = jax.eval_shape(lambda: optimizer.init(initial_parameters(declared, jax.random.key(0))))  # noqa: B023
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
