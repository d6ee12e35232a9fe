"""A live function is weighed as the same function is by its name: the same program, the same account."""

import functools
import importlib
from pathlib import Path

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.compiler import fingerprint_of, read_text

EXAMPLES = Path(__file__).parents[1] / "examples"
WIDTH, ROWS = 256, 64
OPTIMIZER = optax.adamw(1e-3)


def loss(parameters, rows):
    return jnp.mean(jnp.tanh(rows @ parameters["w"]) ** 2)


def step(state, rows):
    """A step of AdamW on one matrix."""
    value, gradients = jax.value_and_grad(loss)(state["parameters"], rows)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], state["parameters"])
    return {"parameters": optax.apply_updates(state["parameters"], updates), "moments": moments}, value


def arguments(mesh=None):
    """Return the state and the rows as shapes, split over `data` if there is a mesh."""
    split = None if mesh is None else NamedSharding(mesh, PartitionSpec("data"))
    parameters = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=split)}
    moments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split if leaf.ndim else None),
        jax.eval_shape(OPTIMIZER.init, parameters),
    )
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=split)
    return {"parameters": parameters, "moments": moments}, rows


@pytest.fixture(scope="module")
def abstract_mesh():
    return AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


PRODUCTS = 2 * 2 * ROWS * WIDTH * WIDTH  # forward, and for the weights' gradient


@pytest.mark.parametrize(
    "form",
    [
        step,
        jax.jit(step),
        jax.jit(step, donate_argnums=0),
        functools.partial(step),
        lambda state, rows: step(state, rows),
    ],
    ids=["plain", "jit", "donated", "partial", "lambda"],
)
def test_every_form_of_a_function_has_the_flops_counted_by_hand(form, abstract_mesh, forked_workers):
    weighed = mw.weigh(mw.jax_step(form, *arguments(abstract_mesh)), on="8xH100")
    assert weighed.ledger.flops.model == weighed.ledger.flops.executed == PRODUCTS
    state_bytes = 3 * WIDTH * WIDTH * 4 // 8
    assert state_bytes <= sum(each.device_bytes for each in weighed.compiled.arguments) < state_bytes + 20_000
    assert weighed.fits is True
    assert weighed.layout.axes == (("data", 8),)


def test_a_traced_call_is_the_program_of_its_function(abstract_mesh, forked_workers):
    given = arguments(abstract_mesh)
    traced = mw.weigh(mw.jax_step(jax.jit(step).trace(*given)), on="8xH100")
    assert traced.name == "program:step"
    assert traced.ledger.flops.model == PRODUCTS
    named = mw.weigh(mw.jax_step(jax.jit(step), *given), on="8xH100")
    assert traced.compiled.arguments == named.compiled.arguments
    assert traced.ledger.memory.by_category == named.ledger.memory.by_category


def test_a_traced_call_takes_no_arguments_and_a_lowered_one_is_refused(abstract_mesh):
    given = arguments(abstract_mesh)
    with pytest.raises(mw.InputError, match="a traced call has its arguments already"):
        mw.weigh(mw.jax_step(jax.jit(step).trace(*given), *given), on="8xH100")
    with pytest.raises(mw.InputError, match="Lowered cannot be weighed") as refused:
        mw.jax_step(jax.jit(step).trace(*given).lower(lowering_platforms=("cuda",)))
    assert "step.trace" in refused.value.hint


def test_what_is_donated_is_no_output_of_its_own(abstract_mesh, forked_workers):
    given = arguments(abstract_mesh)
    kept = mw.weigh(mw.jax_step(jax.jit(step), *given), on="8xH100").ledger.memory
    donated = mw.weigh(mw.jax_step(jax.jit(step, donate_argnums=0), *given), on="8xH100").ledger.memory
    assert kept.by_category["outputs"] > 90_000
    assert donated.by_category.get("outputs", 0) < 1_000


def test_real_arrays_on_simulated_devices_are_as_shapes(mesh, abstract_mesh, forked_workers):
    here = mesh(data=8)
    split = NamedSharding(here, PartitionSpec("data"))
    state = {"w": jax.device_put(jnp.ones((WIDTH, WIDTH)), split)}
    rows = jax.device_put(jnp.ones((ROWS, WIDTH)), split)
    found = mw.weigh(mw.jax_step(jax.jit(jax.grad(loss)), state, rows), on="8xH100")
    shapes = arguments(abstract_mesh)
    expected = mw.weigh(mw.jax_step(jax.jit(jax.grad(loss)), shapes[0]["parameters"], shapes[1]), on="8xH100")
    assert found.ledger.flops == expected.ledger.flops
    assert found.ledger.memory.by_category == expected.ledger.memory.by_category


@pytest.mark.parametrize(
    ("fleet", "name"),
    [
        ("8xH100", "rematerialised:train_step"),
        pytest.param("8xCPU", "recurrent:train_step", marks=pytest.mark.wide),
        pytest.param("8xH100", "recurrent:train_step", marks=pytest.mark.wide),
        pytest.param("8xCPU", "rematerialised:train_step", marks=pytest.mark.wide),
    ],
)
def test_a_function_and_its_name_are_one_program(name, fleet, mesh, monkeypatch, forked_workers):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module, _, function = name.partition(":")
    here = mesh(data=8)
    called, args, *rest = getattr(importlib.import_module(module), function)(here)
    whole = NamedSharding(here, PartitionSpec())  # what the named road gives to arrays without a sharding

    def placed(leaf):
        sharding = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    args, kwargs = jax.tree.map(placed, (tuple(args), rest[0] if rest else {}))
    live = mw.weigh(mw.jax_step(called, *args, **kwargs), on=fleet)
    named = mw.weigh(name, on=fleet, layout="data=8")
    assert live.ledger.flops == named.ledger.flops
    assert live.ledger.memory.reserved_bytes == named.ledger.memory.reserved_bytes
    programs = [fingerprint_of(read_text(each.folder, "program.hlo.txt")) for each in (live, named)]
    assert programs[0] == programs[1]


def test_leaves_that_are_no_arrays_are_closed_over(forked_workers):
    def product(how, rows, key):
        assert how == "square"
        return jnp.sum(rows @ rows) + jax.random.normal(key, ())

    rows = np.ones((32, 32), np.float32)
    weighed = mw.weigh(mw.jax_step(product, "square", rows, key=jax.random.key(0)), on="1xH100")
    assert weighed.ledger.flops.model == 2 * 32**3
    assert [each.path for each in weighed.compiled.arguments] == ["rows", "key"]


def test_a_pmapped_step_holds_on_each_device_one_slice(forked_workers):
    def update(w, rows):
        gradient = jax.grad(lambda w: jnp.sum((rows @ w) ** 2))(w)
        return w - 0.1 * jax.lax.pmean(gradient, "replica")

    arguments = (
        jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((8, ROWS, WIDTH), jnp.float32),
    )
    weighing = mw.weigh(
        mw.jax_step(jax.pmap(update, axis_name="replica", donate_argnums=0), *arguments), on="8xH100"
    )
    w, rows = weighing.compiled.arguments
    assert (w.device_bytes, rows.device_bytes) == (4 * WIDTH * WIDTH, 4 * ROWS * WIDTH)
    held = weighing.ledger.memory.by_category
    assert (held["w"], held["rows"]) == (w.device_bytes, rows.device_bytes)
    assert weighing.ledger.memory.by_category.get("outputs", 0) < 1000  # the new slice lies in the old one
    assert weighing.ledger.flops.model == weighing.ledger.flops.executed == 8 * 2 * 2 * ROWS * WIDTH**2
    (reduction,) = weighing.ledger.traffic
    assert (reduction.kind, reduction.axes) == ("all-reduce", ("replica",))
    assert reduction.payload_bytes == w.device_bytes


def test_a_shard_map_of_arguments_without_a_mesh_splits_them(abstract_mesh, forked_workers):
    def product(w, rows):
        return jax.lax.psum(rows @ w, "data")

    split = jax.shard_map(
        product,
        mesh=abstract_mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec(None, "data")),
        out_specs=PartitionSpec(),
    )
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (ROWS, WIDTH))]
    for form in (split, jax.jit(split)):
        weighing = mw.weigh(mw.jax_step(form, *arguments), on="8xH100")
        found = [argument.device_bytes for argument in weighing.compiled.arguments]
        assert found == [4 * WIDTH * WIDTH // 8, 4 * ROWS * WIDTH // 8]
        assert weighing.ledger.flops.model == weighing.ledger.flops.executed == 2 * ROWS * WIDTH**2


def test_a_pmap_over_more_than_the_process_has_is_refused_in_words():
    rows = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    with pytest.raises(mw.InputError, match="jax_num_cpu_devices") as refused:
        mw.weigh(mw.jax_step(jax.pmap(lambda x: x * 2), rows), on="16xH100")
    assert "needs a device for each slice, and this process has 8" in str(refused.value)


def test_the_transposed_products_of_a_resized_image_compile(forked_workers):
    """XLA of jax 0.10 finds no tiles for them without a device; cuBLAS needs none."""
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    weighing = mw.weigh(
        mw.jax_step(lambda x: jax.image.resize(x, (2, 64, 64, 3), "bilinear"), images), on="1xH100"
    )
    rows, columns = 2 * 32 * 3 * 64 * 32, 2 * 64 * 3 * 64 * 32
    assert weighing.ledger.flops.model == weighing.ledger.flops.executed == 2 * (rows + columns)


def test_without_a_mesh_one_device_works_and_that_is_said(forked_workers):
    weighed = mw.weigh(mw.jax_step(step, *arguments()), on="8xH100")
    assert weighed.ledger.flops.model == PRODUCTS
    assert "One device of 8xH100 works, and 7 stand idle" in str(weighed)
    assert mw.weigh(mw.jax_step(step, *arguments()), on="1xH100").ledger.assumptions == ()


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"on": "16xH100"}, "a mesh of 8 devices, and 16xH100 has 16"),
        ({"on": None}, "no fleet is named"),
        ({"on": "8xH100", "layout": "data=8"}, "takes no layout"),
    ],
)
def test_what_cannot_be_weighed_is_refused(keywords, words, abstract_mesh):
    with pytest.raises(mw.InputError, match=words):
        mw.weigh(mw.jax_step(step, *arguments(abstract_mesh)), **keywords)


def test_a_call_that_fails_is_told_with_its_own_words(abstract_mesh):
    with pytest.raises(mw.InputError, match="the call of step failed while it was traced: TypeError"):
        mw.weigh(mw.jax_step(step, *arguments(abstract_mesh)[:1]), on="8xH100")
    with pytest.raises(mw.InputError, match="int cannot be weighed"):
        mw.jax_step(3)


def test_a_second_weighing_comes_from_the_cache(abstract_mesh, forked_workers):
    given = arguments(abstract_mesh)
    first = mw.weigh(mw.jax_step(step, *given), on="8xH100")
    assert mw.weigh(mw.jax_step(step, *given), on="8xH100").compiled == first.compiled
    assert mw.weigh(mw.jax_step(step, *given), on="8xH100").cached


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, rows):
        return self.down(nnx.relu(self.up(rows)))


BLOCK_PRODUCTS = 5 * 2 * ROWS * 64 * 256  # two forward, two for weights, one for the hidden rows


def test_work_without_scopes_belongs_to_the_functions_that_wrote_it(forked_workers):
    block = Block(nnx.Rngs(0))
    optimizer = nnx.Optimizer(block, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(block, optimizer, rows):
        gradients = nnx.grad(lambda block: jnp.mean(block(rows) ** 2))(block)
        optimizer.update(block, gradients)

    weighed = mw.weigh(mw.jax_step(train_step, block, optimizer, jnp.ones((ROWS, 64))), on="1xH100")
    flops = weighed.ledger.flops
    assert flops.executed == flops.model == BLOCK_PRODUCTS
    (place,) = flops.by_module  # both products are on one line
    assert place.startswith("Block.__call__/test_live.py:")
    assert flops.model_by_module == flops.by_module
    assert flops.waste_by_module == {}


def test_a_module_of_equinox_may_be_a_result(forked_workers):
    network = equinox.nn.MLP(64, 64, 256, 1, use_bias=False, key=jax.random.key(0))

    @equinox.filter_jit
    def train_step(network, rows):
        gradients = equinox.filter_grad(lambda network: jnp.mean(jax.vmap(network)(rows) ** 2))(network)
        return equinox.apply_updates(network, gradients)

    weighed = mw.weigh(mw.jax_step(train_step, network, jnp.ones((ROWS, 64))), on="1xH100")
    assert weighed.ledger.flops.model == BLOCK_PRODUCTS
    assert "" not in weighed.ledger.flops.by_module


def test_the_parts_of_a_state_have_their_roles(forked_workers):
    def train_step(state, rows):
        changed, _ = step({"parameters": state["params"], "moments": state["opt_state"]}, rows)
        return {"params": changed["parameters"], "opt_state": changed["moments"]}

    state, rows = arguments()
    state = {"params": state["parameters"], "opt_state": state["moments"]}
    weighed = mw.weigh(mw.jax_step(jax.jit(train_step, donate_argnums=0), state, rows), on="1xH100")
    by_category, size = weighed.ledger.memory.by_category, WIDTH * WIDTH * 4
    assert by_category["parameters"] == size
    assert 2 * size <= by_category["optimizer_state"] < 2 * size + 1024
    assert {each.role for each in weighed.compiled.arguments} == {"parameters", "optimizer_state", "rows"}


def test_variables_of_nnx_have_their_paths_and_the_roles_of_their_classes(forked_workers):
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.block, self.norm = Block(rngs), nnx.BatchNorm(64, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    network = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(network, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(rows, both, *, scale):
        network, adam, factor = both

        def loss(network):
            return factor * scale * jnp.mean(network.dropout(network.norm(network.block(rows))) ** 2)

        adam.update(network, nnx.grad(loss)(network))

    rows, scale = jnp.ones((ROWS, 64)), jnp.ones(())
    args = (rows, (network, optimizer, scale))
    weighed = mw.weigh(mw.jax_step(train_step, *args, scale=scale), on="1xH100")
    role_of = {each.path: each.role for each in weighed.compiled.arguments}
    assert role_of["both[0].block.up.kernel"] == "parameters"
    assert role_of["both[0].norm.mean"] == "model_state"
    assert role_of["both[0].dropout.rngs.key"] == "keys"
    assert role_of["both[1].opt_state[0].mu.block.down.kernel"] == "optimizer_state"
    assert (role_of["rows"], role_of["both[2]"], role_of["scale"]) == ("rows", "both", "scale")
    parameters = 2 * 64 * 256 + 256 + 64 + 2 * 64
    assert weighed.ledger.memory.by_category["parameters"] == 4 * parameters
    assert weighed.ledger.memory.host_needs.keys() == {"a checkpoint's copy of the state"}
    assert "arguments" not in weighed.ledger.memory.by_category


def test_variables_of_nnx_in_a_state_have_roles_under_any_name(forked_workers):
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.opt, self.norm = nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)

    graph, state = nnx.split(Network(nnx.Rngs(0)))

    @jax.jit
    def gradient(state, rows):
        def loss(state):
            network = nnx.merge(graph, state)
            return jnp.mean(network.norm(network.opt(rows)) ** 2)

        return jax.grad(loss, allow_int=True)(state)

    weighed = mw.weigh(mw.jax_step(gradient, state, jnp.ones((ROWS, 64))), on="1xH100")
    role_of = {each.path: each.role for each in weighed.compiled.arguments}
    assert role_of["state['opt']['kernel'].value"] == "parameters"
    assert role_of["rows"] == "rows"
    assert weighed.ledger.flops.model == 2 * 2 * ROWS * 64 * 64


def test_modules_of_equinox_and_states_of_optax_have_roles_under_any_name(forked_workers):
    network, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(64, axis_name="rows", mode="batch")
    moments = OPTIMIZER.init(equinox.filter(network, equinox.is_array))

    @equinox.filter_jit
    def train_step(a, b, c, d):
        @equinox.filter_grad(has_aux=True)
        def gradient(network):
            after, statistics = jax.vmap(network, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(
                d, c
            )
            return jnp.mean(after**4), statistics

        gradients, c = gradient(a)
        updates, b = OPTIMIZER.update(gradients, b, a)
        return equinox.apply_updates(a, updates), b, c

    weighed = mw.weigh(mw.jax_step(train_step, network, moments, state, jnp.ones((ROWS, 64))), on="1xH100")
    roles = {each.path.partition(".")[0].partition("[")[0]: each.role for each in weighed.compiled.arguments}
    assert roles == {"a": "parameters", "b": "optimizer_state", "c": "model_state", "d": "d"}
    assert weighed.ledger.memory.by_category["parameters"] == 4 * 2 * 64


def test_a_matrix_called_key_is_no_random_key(forked_workers):
    def projected(params, rng, rows):
        noise = jax.random.normal(rng, rows.shape)
        return jnp.sum((rows + noise) @ params["attention"]["key"])

    params = {"attention": {"key": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}}
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    weighed = mw.weigh(mw.jax_step(jax.jit(projected), params, jax.random.PRNGKey(0), rows), on="1xH100")
    assert [each.role for each in weighed.compiled.arguments] == ["parameters", "keys", "rows"]


def test_a_class_that_computes_with_its_arrays_may_be_an_argument(forked_workers):
    @jax.tree_util.register_pytree_node_class
    class Checked:
        """It tests its array when it is made, which JAX's own description of arguments does not allow."""

        def __init__(self, value):
            if type(value) is not object:
                jax.eval_shape(lambda: value)
            self.value = value

        def tree_flatten(self):
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, _, values):
            return cls(*values)

    rows = Checked(jnp.ones((ROWS, WIDTH)))
    with pytest.raises(TypeError, match="ArgInfo"):
        jax.jit(lambda rows: rows.value @ rows.value.T).lower(rows)
    weighed = mw.weigh(mw.jax_step(jax.jit(lambda rows: rows.value @ rows.value.T), rows), on="1xH100")
    assert weighed.ledger.flops.model == 2 * ROWS * ROWS * WIDTH


def test_the_first_line_says_how_many_devices_stand_idle(forked_workers):
    weighed = mw.weigh(mw.jax_step(step, *arguments()), on="8xH100")
    assert weighed.idle_devices == weighed.to_dict()["idle_devices"] == 7
    assert "on 1xH100 (7 of the 8 devices named stand idle)" in str(weighed).splitlines()[0]


def test_a_function_without_a_backward_pass_is_said_to_be_no_training_step(forked_workers):
    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    weighed = mw.weigh(mw.jax_step(lambda w, x: jnp.tanh(x @ w), square, square), on="1xH100")
    assert weighed.warnings == (
        "No backward pass was found: these are the figures of a forward pass, not of a training step",
    )


def test_arguments_on_two_devices_are_refused_with_both_names():
    first, second = jax.devices()[:2]
    w, x = jax.device_put(jnp.ones((4, 4)), first), jax.device_put(jnp.ones((4, 4)), second)
    with pytest.raises(mw.InputError, match=r"w on device 0 \(cpu\), x on device 1 \(cpu\)") as refused:
        mw.weigh(mw.jax_step(lambda w, x: (w @ x).sum(), w, x), on="1xH100")
    assert "jax.device_put(y, x.sharding)" in refused.value.hint
    assert mw.weigh(mw.jax_step(lambda w, x: (w @ x).sum(), w, jnp.ones((4, 4))), on="1xH100").fits
