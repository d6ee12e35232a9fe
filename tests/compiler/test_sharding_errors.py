"""What a program with a wrong sharding is told: each error provoked in JAX by a program of a user's."""

import sys
import textwrap

import jax
import pytest

from meshwright.contrib.jax_steps import foreign_program, lower_foreign, on_the_fleet
from meshwright.errors import InputError
from meshwright.sharding import mesh_of
from tests import commands

LAYOUT = (("data", 4), ("tensor", 2))
HEAD = """
import functools, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def shape(*sizes, on=None):
    return jax.ShapeDtypeStruct(sizes, "float32", sharding=on)

def train_step(mesh):
    def on(*spec):
        return NamedSharding(mesh, P(*spec))
    mapped = functools.partial(jax.shard_map, mesh=mesh)
"""
IN_JAX_S_WORDS = "\n  in JAX's words: "


@pytest.fixture
def told(request_for, tmp_path, monkeypatch):
    """The message and the hint for a program with these lines, on four by two devices."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def tell(lines, fleet="8xCPU"):
        (tmp_path / "wrong.py").write_text(HEAD + textwrap.indent(textwrap.dedent(lines), "    "))
        sys.modules.pop("wrong", None)
        request = request_for("wrong:train_step", fleet, "data=4,tensor=2", search_path=(str(tmp_path),))
        with pytest.raises(InputError) as error, on_the_fleet(request, jax.devices()):
            lower_foreign(request, *foreign_program(request, mesh_of(LAYOUT, jax.devices()))[:3])
        assert error.value.exit_code == 2
        return error.value.message, error.value.hint

    return tell


def test_every_argument_that_does_not_divide_is_named_with_sizes_that_work(told):
    message, hint = told(
        """
        layers = [{"up": shape(10, 6, on=on("data", "tensor")), "down": shape(8, 9, on=on("data", "tensor"))}]
        return lambda params, batch: params, (layers,), {"batch": shape(12, on=on(("data", "tensor")))}
        """
    )
    assert message == (
        "wrong:train_step on layout data=4,tensor=2: 3 things are wrong\n"
        "  params[0]['down'] (8, 9): dimension 1 = 9 does not divide over tensor = 2\n"
        "  params[0]['up'] (10, 6): dimension 0 = 10 does not divide over data = 4\n"
        "  batch (12,): dimension 0 = 12 does not divide over data*tensor = 4*2 = 8"
    )
    assert "params[0]['down']: use tensor = 1 or 3, or a dimension of 8 or 10" in hint
    assert "params[0]['up']: use data = 2 or 5, or a dimension of 8 or 12" in hint
    assert "batch: use data*tensor = 6 or 12, or a dimension of 8 or 16" in hint


def test_rows_of_one_of_several_hosts_are_told_what_makes_them_global(told):
    lines = 'return lambda batch: batch, (shape({}, on=on(("data", "tensor"))),)'
    _, hint = told(lines.format(4), "2x4xCPU")
    assert hint == (
        "use data*tensor = 4, or a dimension of 8; if these are the rows that one of 2 processes has read, "
        "the global array has 8: jax.make_array_from_process_local_data(sharding, rows), or "
        "jax.experimental.multihost_utils.host_local_array_to_global_array(rows, mesh, spec)"
    )
    _, hint = told(lines.format(6), "2x4xCPU")  # twice as many do not divide either
    assert hint == "use data*tensor = 6, or a dimension of 8"


W = '({"w": shape(12, 6)},)'
DOES_NOT_DIVIDE = [
    (
        f'jax.jit(lambda params: params, in_shardings=({{"w": on(("data", "tensor"))}},)), {W}',
        "params['w'] (12, 6): dimension 0 = 12 does not divide over data*tensor = 4*2 = 8",
        "use data*tensor = 6 or 12, or a dimension of 8 or 16",
    ),
    (
        f'jax.jit(lambda params: params["w"][:7], out_shardings=on("data")), {W}',
        "an array of shape (7, 6): dimension 0 = 7 does not divide over data = 4",
        "use data = 1 or 7, or a dimension of 4 or 8",
    ),
    (
        'lambda x: x, (jax.device_put(np.ones((4, 3), "float32"), on("data", "tensor")),)',
        "an array of shape (4, 3): dimension 1 = 3 does not divide over tensor = 2",
        "use tensor = 1 or 3, or a dimension of 2 or 4",
    ),
    (
        'lambda x: x, (jax.eval_shape(jax.jit(lambda: jnp.zeros(9), out_shardings=on("data"))),)',
        "an array of shape (9,): dimension 0 = 9 does not divide over data = 4",
        "use data = 3 or 9, or a dimension of 8 or 12",
    ),
    (
        f'mapped(lambda p: p, in_specs=P(None, "data"), out_specs=P()), {W}',
        "shard_map's argument p['w'] float32[12,6]: dimension 1 = 6 does not divide over data = 4",
        "use data = 3 or 6, or a dimension of 4 or 8",
    ),
    (
        f'mapped(lambda p: p, in_specs=P(("data", "tensor")), out_specs=P()), {W}',
        "shard_map's argument p['w'] float32[12,6]: "
        "dimension 0 = 12 does not divide over data*tensor = 4*2 = 8",
        "use data*tensor = 6 or 12, or a dimension of 8 or 16",
    ),
]


@pytest.mark.parametrize(("returned", "what", "mend"), DOES_NOT_DIVIDE)
def test_a_dimension_that_does_not_divide(told, returned, what, mend):
    message, hint = told(f"return {returned}")
    said, words = message.split(IN_JAX_S_WORDS)
    assert said.endswith(f": {what}")
    assert hint == mend
    assert "should evenly divide the shape" in words or "must be evenly divisible" in words


UNKNOWN = [
    ('lambda x: x, (shape(8, on=on("tensr")),)', "P('tensr',) names", "tensr", "did you mean 'tensor'?"),
    ('lambda x: x, (shape(8, on=on(("data", "tensr"))),)', "names", "tensr", "did you mean 'tensor'?"),
    (
        'lambda x: jax.lax.with_sharding_constraint(x, on("fsdp")), (shape(8),)',
        "P('fsdp',) names",
        "fsdp",
        "known: data, tensor;",
    ),
    (
        'mapped(lambda x: x, in_specs=P("fsdp"), out_specs=P()), (shape(8),)',
        "shard_map's in_specs names",
        "fsdp",
        "known: data, tensor;",
    ),
    (
        'mapped(lambda x: jax.lax.psum(x, "fsdp"), in_specs=P(), out_specs=P()), (shape(8),)',
        "a collective names",
        "fsdp",
        "known: data, tensor;",
    ),
    ('lambda x: jax.lax.psum(x, "fsdp"), (shape(8),)', "a collective names", "fsdp", "known: data, tensor;"),
    ('lambda x: x * mesh.shape["fsdp"], (shape(8),)', "mesh.shape is asked for", "fsdp", "known:"),
]


@pytest.mark.parametrize(("returned", "who", "axis", "near"), UNKNOWN)
def test_a_mesh_axis_that_is_unknown(told, tmp_path, returned, who, axis, near):
    message, hint = told(f"return {returned}")
    said = message.split(IN_JAX_S_WORDS)[0]
    assert said.endswith(f"{who} mesh axis {axis!r}, which the layout data=4,tensor=2 does not have") or (
        who == "names" and f"names mesh axis {axis!r}" in said
    )
    assert hint.startswith(near)
    assert hint.endswith(f" or name it in the layout: --layout data=4,tensor=2,{axis}=1")


def test_an_axis_of_the_layout_in_a_collective_outside_shard_map(told):
    message, hint = told('return lambda x: jax.lax.psum(x, "data"), (shape(8),)')
    assert "a collective over mesh axis 'data' stands outside jax.shard_map" in message
    assert "under jax.jit the compiler puts collectives in" in hint


@pytest.mark.parametrize(
    ("returned", "spec", "mend"),
    [
        (
            'lambda x: x, (shape(8, 8, on=on("data", "data")),)',
            "P('data', 'data')",
            "use P('data', None), or another axis: tensor",
        ),
        (
            'lambda x: x, (shape(8, 8, on=on(("data", "tensor"), "data")),)',
            "P(('data', 'tensor'), 'data')",
            "use P(('data', 'tensor'), None)",
        ),
        (
            'jax.jit(lambda x: x, in_shardings=P("data", "data")), (shape(8, 8),)',
            "P('data', 'data')",
            "use P('data', None), or another axis: tensor",
        ),
        (
            'mapped(lambda x: x, in_specs=P("data", "data"), out_specs=P("data")), (shape(8, 8),)',
            "P('data', 'data')",
            "use P('data', None), or another axis: tensor",
        ),
    ],
)
def test_a_mesh_axis_that_is_used_twice(told, returned, spec, mend):
    message, hint = told(f"return {returned}")
    said, words = message.split(IN_JAX_S_WORDS)
    assert said.endswith(f"{spec} uses mesh axis data twice; an axis can split one dimension of an array")
    assert "has duplicate entries for `data`" in words
    assert hint == mend


@pytest.mark.parametrize(
    ("returned", "what", "mend"),
    [
        (
            'lambda x: x, (shape(8, on=on("data", "tensor")),)',
            "an array has 1 dimension, and its sharding P('data', 'tensor') has 2",
            "use P('data'), or give the array 2 dimensions",
        ),
        (
            f'jax.jit(lambda params: params, in_shardings=({{"w": on("data", None, None)}},)), {W}',
            "params['w'] (12, 6) has 2 dimensions, and its sharding P('data', None, None) has 3",
            "use P('data', None), or give the array 3 dimensions",
        ),
        (
            f'jax.jit(lambda params: {{"sum": params["w"].sum()}}, out_shardings=on("data")), {W}',
            "output result['sum'] has 0 dimensions, and its sharding P('data') has 1",
            "use P(), or give the array 1 dimension",
        ),
        (
            'lambda x: jax.lax.with_sharding_constraint(x, on(None, "data")), (shape(8),)',
            "one of with_sharding_constraint arguments has 1 dimension, "
            "and its sharding P(None, 'data') has 2",
            "use P(None), or give the array 2 dimensions",
        ),
        (
            'mapped(lambda x: x, in_specs=P("data", "tensor"), out_specs=P()), (shape(8),)',
            "shard_map's args[0] float32[8] has 1 dimension, and in_specs P('data', 'tensor') has 2",
            "use P('data'), or give the array 2 dimensions",
        ),
        (
            'mapped(lambda x: x.sum(), in_specs=P("data"), out_specs=P("data")), (shape(8),)',
            "shard_map's <lambda>(*args) float32[] has 0 dimensions, and out_specs P('data') has 1",
            "use P(), or give the array 1 dimension",
        ),
    ],
)
def test_a_sharding_of_more_dimensions_than_the_array(told, returned, what, mend):
    message, hint = told(f"return {returned}")
    said, words = message.split(IN_JAX_S_WORDS)
    assert said.endswith(f": {what}")
    assert "rank" in words
    assert hint == mend


@pytest.mark.parametrize(
    "returned",
    [
        'lambda x: x, (shape(8, on=P("data")),)',
        'jax.jit(lambda x: x, in_shardings=P("data")), (shape(8),)',
        'lambda x: jax.lax.with_sharding_constraint(x, P("data")), (shape(8),)',
        'lambda x: jax.sharding.reshard(x, P("data")), (shape(8),)',
    ],
)
def test_a_spec_without_a_mesh(told, returned):
    message, hint = told(f"return {returned}")
    assert "stands where no mesh is set" in message
    assert hint.startswith("write NamedSharding(mesh, P(")


@pytest.mark.parametrize("how", ["shape(8, on=there)", "jax.device_put(np.ones(8, 'float32'), there)"])
def test_an_argument_on_another_mesh(told, how):
    message, hint = told(
        f"""
        there = NamedSharding(Mesh(mesh.devices.reshape(2, 4), ("x", "y")), P("x"))
        return lambda params: params, ({{"w": {how}}},)
        """
    )
    assert message == (
        "wrong:train_step: argument params['w'] (8,) is on the mesh x=2,y=4, "
        "not on that of the layout, data=4,tensor=2"
    )
    assert hint.endswith("or weigh it on that mesh: --layout x=2,y=4")


def test_an_argument_that_jit_is_told_to_take_from_another_mesh(told):
    message, _ = told(
        """
        there = NamedSharding(Mesh(mesh.devices.reshape(2, 4), ("x", "y")), P("x"))
        return jax.jit(lambda a, b: a + b, in_shardings=(there, on("data"))), (shape(8), shape(8))
        """
    )
    assert message.startswith("wrong:train_step: argument a (8,) is on the mesh x=2,y=4, ")


def test_an_argument_that_lies_otherwise_than_jit_is_told(told):
    message, hint = told('return jax.jit(lambda x: x, in_shardings=on("tensor")), (shape(8, on=on("data")),)')
    said, words = message.split(IN_JAX_S_WORDS)
    assert (
        "x (8,) has sharding P('data') on mesh data=4,tensor=2, and in_shardings requires P('tensor')" in said
    )
    assert words.startswith("ValueError: Sharding passed to jit does not match")
    assert hint == "place the argument as P('tensor') too, or leave it out of in_shardings"


def test_arrays_on_different_devices(told):
    message, hint = told(
        """
        one, other = (jax.device_put(np.ones(8, "float32"), device) for device in jax.devices()[1:3])
        return lambda x: x, (one + other,)
        """
    )
    said, words = message.split(IN_JAX_S_WORDS)
    assert "argument x of add with shape float32[8] and on device 1 (CPU)" in said
    assert "argument y of add with shape float32[8] and on device 2 (CPU)" in said
    assert words.startswith("ValueError: Received incompatible devices")
    assert hint.startswith("place both on the mesh that the function is given (data=4,tensor=2)")


@pytest.mark.parametrize(
    "step",
    [
        "lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(two, P('x')))",
        "jax.shard_map(lambda x: x, mesh=two, in_specs=P('x'), out_specs=P('x'))",
    ],
)
def test_a_mesh_of_fewer_devices_inside_the_step(told, step):
    message, _ = told(
        f"""
        two = Mesh(mesh.devices.flat[:2], ("x",))
        return {step}, (shape(8, on=on("data")),)
        """
    )
    assert "and on 8 devices (0 to 7) (CPU)" in message
    assert "inside jit on 2 devices (0 to 1) (CPU)" in message


def test_other_errors_keep_their_own_words(told):
    message, _ = told("return jax.jit(lambda p: p, in_shardings=({'v': on()},)), ({'w': shape(8)},)")
    assert message.startswith("the step that wrong:train_step returned failed in a library: ValueError: ")
    message, _ = told("return lambda x: {}['fsdp'], (shape(8),)")
    assert message.endswith("KeyError: 'fsdp'")


def test_the_command_line_ends_with_status_2_and_no_traceback(tmp_path):
    (tmp_path / "wrong.py").write_text(
        HEAD + '    return lambda params: params, ({"w": shape(10, on=on("data"))},)'
    )
    done = commands.run("weigh", "wrong:train_step", "--on", "4xCPU", folder=tmp_path)
    assert done.status == 2
    assert done.talk == (
        "error: wrong:train_step on layout data=4: params['w'] (10,): dimension 0 = 10 does not divide over "
        "data = 4\nhint: use data = 2 or 5, or a dimension of 8 or 12\n"
    )
