import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.config import ACTIVATION_RULES, PARAMETER_RULES, load_config, preset_names
from meshwright.sharding import (
    TABLE_ROWS,
    activation_spec,
    batch_axes,
    gather,
    look_up,
    mean_over_manual,
    mesh_here,
    mesh_of,
    on_each_device,
    parameter_spec,
    pin,
    rows_here,
)
from meshwright.trainer.models import Parameter, model_of

pytestmark = pytest.mark.quick

P = PartitionSpec
LAYOUTS = [{"data": 8}, {"fsdp": 4}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]


def test_a_parameter_is_split_by_fsdp_along_embed_and_by_tensor_along_what_tensor_computes(mesh):
    all_three = mesh(data=2, fsdp=2, tensor=2)
    assert parameter_spec(("layers", "embed", "mlp"), all_three) == P(None, "fsdp", "tensor")
    assert parameter_spec(("heads", "head_dim", "embed"), all_three) == P("tensor", None, "fsdp")
    assert parameter_spec(("vocab", "embed"), all_three) == P("tensor", "fsdp")


def test_stages_and_tensor_split_the_rows_of_tables_if_both_divide_them(mesh):
    on = mesh(stage=2, tensor=2)
    assert parameter_spec(("vocab", "embed"), on, shape=(64, 8)) == P(("tensor", "stage"), None)
    assert parameter_spec(("token", "embed"), on, shape=(64, 8)) == P(("stage", "tensor"), None)
    assert parameter_spec(("token", "embed"), on, shape=(66, 8)) == P(None, "tensor")
    assert parameter_spec(("token", "embed"), mesh(stage=2), shape=(65, 8)) == P(None, None)


def test_what_is_no_expert_is_split_over_expert_as_over_fsdp_or_under_zero1_as_over_data(mesh):
    on, of_expert = mesh(data=2, fsdp=2, expert=2), ("experts", "embed", "mlp")
    assert parameter_spec(("embed", "mlp"), on) == P(("fsdp", "expert"), None)
    assert parameter_spec(of_expert, on) == P("expert", "fsdp", None)
    assert parameter_spec(("embed", "mlp"), on, True) == P(("fsdp", "data", "expert"), None)
    assert parameter_spec(("embed", "mlp"), on, True, in_step=True) == P("fsdp", None)
    assert parameter_spec(of_expert, on, True) == P("expert", ("fsdp", "data"), None)
    assert parameter_spec(of_expert, on, True, in_step=True) == P("expert", "fsdp", None)


def test_an_activation_is_split_by_batch_and_by_tensor_inside_or_between_blocks(mesh):
    all_three = mesh(data=2, fsdp=2, tensor=2)
    assert activation_spec(("batch", "sequence", "mlp"), all_three) == P(("data", "fsdp"), None, "tensor")
    assert activation_spec(("batch", "residual_sequence", "embed"), all_three) == P(
        ("data", "fsdp"), "tensor", None
    )


def test_axes_of_one_device_or_that_are_not_there_split_nothing(mesh):
    assert parameter_spec(("embed", "mlp"), mesh(fsdp=8, tensor=1)) == P("fsdp", None)
    assert activation_spec(("batch", "mlp"), mesh(fsdp=8)) == P("fsdp", None)
    assert batch_axes(mesh(data=1, fsdp=4)) == ("fsdp",)
    assert batch_axes(mesh(tensor=4)) == ()


@pytest.mark.parametrize("preset", preset_names())
def test_the_layout_check_knows_every_dimension_of_parameters_that_an_axis_splits(preset):
    model = load_config(preset).model
    parameters = jax.tree.leaves(
        model_of(model).parameters(), is_leaf=lambda leaf: isinstance(leaf, Parameter)
    )
    for parameter in parameters:
        for dim, size in zip(parameter.dims, parameter.shape, strict=True):
            if PARAMETER_RULES[dim]:
                dim = "vocab" if dim in TABLE_ROWS else dim
                assert all(size % checked == 0 for checked in model.sizes.split_dims[dim].values()), dim
                assert model.sizes.split_dims[dim], dim


def test_a_dimension_is_never_split_twice_by_one_axis():
    for rules in (PARAMETER_RULES, ACTIVATION_RULES):
        assert all(len(set(axes)) == len(axes) for axes in rules.values())


def test_pin_lays_an_array_where_its_names_say(mesh):
    on = mesh(data=2, fsdp=2, tensor=2)
    x = jnp.ones((8, 4, 6))
    out = jax.jit(lambda x: pin(x, on, "batch", "sequence", "mlp"))(x)
    assert out.sharding.shard_shape(x.shape) == (2, 4, 3)


def test_pin_wants_a_name_for_each_dimension(mesh):
    with pytest.raises(AssertionError, match=r"\(8, 4\) has 2 dimensions, names given: \('batch',\)"):
        pin(jnp.ones((8, 4)), mesh(data=8), "batch")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_gathered_parameter_is_whole_over_fsdp_and_its_gradient_is_split_again(layout, mesh):
    on = mesh(**layout)
    at_rest = NamedSharding(on, parameter_spec(("embed", "mlp"), on))
    weight = jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), at_rest)

    def use(w):
        return gather(w, on, jnp.bfloat16, "embed", "mlp")

    used = jax.jit(use)(weight)
    tensor = layout.get("tensor", 1)
    assert used.dtype == jnp.bfloat16
    assert used.sharding.shard_shape((8, 8)) == (8, 8 // tensor)
    np.testing.assert_array_equal(used.astype(jnp.float32), np.asarray(weight))
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(3 * use(w).astype(jnp.float32))))(weight)
    assert gradient.dtype == jnp.float32
    assert gradient.sharding.shard_shape((8, 8)) == (8 // layout.get("fsdp", 1), 8 // tensor)
    np.testing.assert_array_equal(gradient, np.full((8, 8), 3.0))


@pytest.mark.parametrize("layout", [{}, *LAYOUTS], ids=str)
def test_looking_up_gives_the_rows_and_sums_the_gradients_of_repeated_ones(layout, mesh):
    on = mesh(**layout)
    random = np.random.default_rng(0)
    table = jnp.array(random.standard_normal((16, 8), dtype="float32"))
    weights = random.standard_normal((8, 4, 8), dtype="float32")
    indices = random.integers(16, size=(8, 4), dtype=np.int32)
    indices[0] = [0, 15, 15, 0]  # the ends, repeated

    def total(table):
        found = look_up(table, jnp.array(indices), on)
        return jnp.sum(found * weights), found

    (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(table)
    np.testing.assert_array_equal(found, np.asarray(table)[indices])
    expected = np.zeros((16, 8))
    np.add.at(expected, indices.ravel(), weights.reshape(-1, 8))
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("layout", [{}, {"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_frequent_tokens_gradient_is_not_lost_in_sixteen_bits(layout, mesh):
    """4096 terms of 0.01; summed one after the other in bfloat16 they would make 4."""
    table = jnp.zeros((4, 8), jnp.bfloat16)
    indices = jnp.zeros((8, 512), jnp.int32)

    def total(table):
        return jnp.sum(look_up(table, indices, mesh(**layout)) * jnp.bfloat16(0.01), dtype=jnp.float32)

    gradient = jax.jit(jax.grad(total))(table)
    np.testing.assert_allclose(np.asarray(gradient[0], np.float32), 40.96, rtol=0.01)


@pytest.mark.program
def test_a_lookup_over_tensor_leaves_the_residuals_layout_and_never_the_whole_table(mesh):
    on = mesh(fsdp=2, tensor=4)
    table = jax.ShapeDtypeStruct((512, 6), jnp.float32, sharding=NamedSharding(on, P("tensor", None)))
    indices = jax.ShapeDtypeStruct((8, 4), jnp.int32, sharding=NamedSharding(on, P("fsdp", None)))
    compiled = jax.jit(lambda t, i: look_up(t, i, on)).lower(table, indices).compile()
    assert compiled.output_shardings.shard_shape((8, 4, 6)) == (4, 1, 6)
    assert "f32[512,6]" not in compiled.as_text()


def test_zero1_splits_embed_over_data_inside_fsdp(mesh):
    all_three = mesh(data=2, fsdp=2, tensor=2)
    assert parameter_spec(("embed", "mlp"), all_three, zero1=True) == P(("fsdp", "data"), "tensor")
    assert parameter_spec(("embed", "mlp"), mesh(data=2), zero1=True) == P("data", None)


def test_zero1_splits_embed_over_context_too_in_the_order_of_the_mesh(mesh):
    """In another order than the devices', XLA sums gradients whole where it could scatter them."""
    inside, outside = mesh(data=2, context=2, fsdp=2), mesh(context=2, data=2, fsdp=2)
    assert parameter_spec(("embed", "mlp"), inside, zero1=True) == P(("fsdp", "data", "context"), None)
    assert parameter_spec(("embed", "mlp"), outside, zero1=True) == P(("fsdp", "context", "data"), None)
    assert parameter_spec(("embed", "mlp"), inside) == P("fsdp", None)


def test_code_of_one_replica_knows_its_rows_and_the_mean_over_all(mesh):
    axes = mesh(data=2, fsdp=2)
    assert mesh_here(axes) is axes

    def local(x):
        here = mesh_here(axes)
        assert here.manual_axes == ("data",)
        return rows_here(x.shape[0], here), mean_over_manual(x, here)

    x = jnp.arange(8.0)
    each = jax.shard_map(
        local, mesh=axes, axis_names={"data"}, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    rows, means = jax.jit(each)(x)
    np.testing.assert_array_equal(rows, np.arange(8))
    np.testing.assert_array_equal(means, np.tile([2.0, 3, 4, 5], 2))
    np.testing.assert_array_equal(rows_here(3, axes), np.arange(3))
    np.testing.assert_array_equal(mean_over_manual(x, axes), x)


def test_devices_fill_the_axes_in_order_the_last_axis_fastest():
    mesh = mesh_of((("data", 2), ("fsdp", 1), ("tensor", 4)), jax.devices())
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.devices.shape == (2, 1, 4)
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]
    assert [d.id for d in mesh.devices[1, 0]] == [d.id for d in jax.devices()[4:]]
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_axes_that_do_not_cover_the_devices_are_our_own_mistake():
    with pytest.raises(AssertionError, match=r"axes {'data': 3} do not cover 8 devices"):
        mesh_of((("data", 3),), jax.devices())


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}, {"data": 2, "expert": 2}], ids=str)
def test_a_lookup_adds_its_tables_gradient_to_earlier_sums_and_gives_the_table_none(axes, mesh):
    """By hand: a row's gradient is the sum of those of its tokens."""
    on, random = mesh(**axes), np.random.default_rng(0)
    table, sums = (jnp.asarray(random.normal(size=(16, 4)), jnp.float32) for _ in range(2))
    indices = jnp.asarray(random.integers(0, 16, (4, 8)), jnp.int32)
    d_found = random.normal(size=(4, 8, 4)).astype(np.float32)

    def pulled(table, sums):
        found = lambda table, sums: look_up(table, indices, on, sums=sums)  # noqa: E731
        return jax.vjp(found, table, sums)[1](jnp.asarray(d_found))

    of_table, of_sums = jax.jit(pulled)(table, sums)
    wanted = np.array(sums)
    np.add.at(wanted, np.array(indices).ravel(), d_found.reshape(-1, 4))
    np.testing.assert_allclose(of_sums, wanted, rtol=1e-5, atol=1e-5)
    assert not np.array(of_table).any()


def test_no_axis_stays_automatic_beside_a_manual_one(mesh):
    """Not even one of a single device: XLA partitions no Pallas kernel on such a mesh."""
    whole = mesh(data=2, fsdp=1)
    left = []

    def local(x):
        left.append(set(whole.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes))
        return x

    def outer(x):
        return on_each_device(local, mesh_here(whole), P(), P())(x)

    rows = P("data")
    mapped = jax.shard_map(
        outer, mesh=whole, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False
    )
    jax.make_jaxpr(jax.jit(mapped))(jnp.ones(4))
    assert left == [set()]
