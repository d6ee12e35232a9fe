"""Each moment lies with its parameter; a part of it, with the dims that it keeps."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshwright.config import load_config
from meshwright.models import initial_parameters, model_of
from meshwright.step import optimizer_of
from meshwright.step._state import moment_shardings

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
    from meshwright.step._state import _of_side

    assert _of_side((0, 1), PartitionSpec("tensor", None)) == "tensor"
    assert _of_side((0, 1), PartitionSpec(None, "tensor")) is None
    assert _of_side((0, 1), PartitionSpec("fsdp", "tensor")) is None


def test_every_number_of_the_state_is_in_fp32_or_counts(mesh):
    for kind in KINDS:
        config = load_config("gpt2-124m", (*SMALL, f"optimizer.kind={kind}", "precision=bf16"))
        declared = model_of(config.model).parameters()
        optimizer = optimizer_of(config, declared)
        state = jax.eval_shape(lambda: optimizer.init(initial_parameters(declared, jax.random.key(0))))  # noqa: B023
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
