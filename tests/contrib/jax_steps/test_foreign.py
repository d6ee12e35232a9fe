"""Anybody's training steps: their FLOPs by hand, and what a module that is no training step is told."""

import sys

import jax
import pytest

from meshwright import jax_step, weigh
from meshwright.compiler import compile_program
from meshwright.contrib.jax_steps import argument_paths, foreign_program, lower_foreign, on_the_fleet
from meshwright.errors import InputError
from meshwright.sharding import mesh_of

FLEETS = ["8xH100", pytest.param("1xCPU", marks=pytest.mark.long)]


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_recurrent_model_in_plain_jax(weighed, fleet):
    """Each of 32 moments of 64 sequences: 128 inputs and 256 hidden by 4 x 256 gates, 256 hidden by
    256 tokens.
    All of it is differentiated by both operands: the embedding learns, and the last state flows back."""
    forward = 2 * 64 * 32 * (4 * 256 * (128 + 256) + 256 * 256)
    found = weighed("recurrent:train_step", fleet, "data=-1")
    assert found.compiled.traced_flops.by_phase["forward"] == forward
    assert found.ledger.flops.model == 3 * forward
    assert found.ledger.flops.executed == 3 * forward  # the compiler multiplies the loop by its 32 rounds
    assert found.ledger.unpriced == ()


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_convolutional_classifier_in_flax(weighed, fleet):
    """Every tap counts in the model, also on padding: 14 outputs of 3 taps, and 14 of 5, per dimension.

    The compiled program leaves out the taps on padding. Of the first, 28 to 14 with stride 2 and one element
    on the far side, 14 x 3 - 1 = 41 are left. Of the second, two on both sides, 14 x 5 - 2 x (2 + 1) = 64.
    """
    first = 2 * 64 * (14 * 3) ** 2 * 1 * 32
    second = 2 * 64 * (14 * 5) ** 2 * 32 * 64
    dense = 2 * 64 * 64 * 10
    found = weighed("convolutional:train_step", fleet, "data=-1")
    phases = found.compiled.traced_flops.by_phase
    assert phases["forward"] == first + second + dense
    assert phases["backward"] == first + 2 * (second + dense)  # nobody asks for the gradient of the images
    assert found.ledger.flops.model == phases["forward"] + phases["backward"]
    # On a GPU the compiler makes the image of 29 by 29 itself, and multiplies by that zero too.
    first_padding = 0 if fleet == "8xH100" else 2 * 64 * (42**2 - 41**2) * 1 * 32
    second_padding = 2 * 64 * (70**2 - 64**2) * 32 * 64
    assert found.ledger.flops.executed == found.ledger.flops.model - 2 * first_padding - 3 * second_padding
    assert found.ledger.unpriced == ()


@pytest.mark.parametrize("fleet", ["8xH100", "1xCPU"])
def test_a_rematerialised_mlp_with_optax(weighed, fleet):
    """Four blocks of 256 rows by 128 x 512 and back. The first block's input is nobody's parameter."""
    matmul = 2 * 256 * 128 * 512
    found = weighed("rematerialised:train_step", fleet, "data=-1")
    phases, flops = found.compiled.traced_flops.by_phase, found.ledger.flops
    assert phases["forward"] == 8 * matmul
    assert phases["backward"] == 16 * matmul - matmul
    assert phases["recompute"] == 4 * matmul  # the way up again; the way down is no gradient's business
    assert flops.model == 23 * matmul
    # Up to 0.11 a CPU's compiler drops jax.checkpoint's barriers, and finds that it has the forward matmuls.
    merges = fleet == "1xCPU" and found.compiled.versions["jaxlib"].startswith(("0.10", "0.11"))
    assert flops.executed == (23 if merges else 27) * matmul
    assert found.ledger.unpriced == ()


def test_arguments_have_names_bytes_and_shards(weighed):
    found = weighed("rematerialised:train_step", "8xH100", "data=-1").compiled
    by_path = {a.path: a for a in found.arguments}
    up = by_path["params[0]['up']"]
    assert (up.role, up.shape, up.dtype) == ("parameters", (128, 512), "float32")
    assert (up.device_bytes, up.replicated, up.axes) == (4 * 128 * 512 // 8, False, ("data",))
    count = by_path["moments[0].count"]
    assert (count.replicated, count.axes) == (True, ())
    assert {a.role for a in found.arguments} == {"parameters", "optimizer_state", "inputs", "targets"}
    # Two rows of matrices and twice their moments, eight ways; the count; two batches, eight ways.
    matrices = 4 * 2 * 128 * 512
    assert sum(a.device_bytes for a in found.arguments) == 4 * (3 * matrices + 2 * 256 * 128) // 8 + 4
    assert found.reported_bytes["argument"] == sum(a.device_bytes for a in found.arguments)
    assert found.reported_bytes["alias"] >= 4 * 3 * matrices // 8  # params and moments are donated


def test_a_foreign_program_has_no_parameter_count_nor_tokens(weighed):
    found = weighed("recurrent:train_step", "8xH100", "data=-1").compiled
    assert found.num_parameters is None
    assert found.num_matmul_parameters is None
    assert found.tokens_per_step is None
    assert found.sequence_length is None


# What goes wrong, in this process: a worker only carries the words.


@pytest.fixture
def program(request_for, tmp_path, monkeypatch):
    """The program of a module with the given text, on a mesh of eight."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def request(function="train_step", module="somebodys"):
        return request_for(f"{module}:{function}", "8xCPU", "data=-1", search_path=(str(tmp_path),))

    def make(text, function="train_step", module="somebodys"):
        (tmp_path / "somebodys.py").write_text(text)
        sys.modules.pop("somebodys", None)
        asked = request(function, module)
        with on_the_fleet(asked, jax.devices()):
            return foreign_program(asked, mesh_of((("data", 8),), jax.devices()))[:3]

    make.request = request
    return make


def refused(program, *args, **kwargs):
    with pytest.raises(InputError) as error:
        program(*args, **kwargs)
    return error.value.message, error.value.hint


def test_a_module_that_is_not_there(program, tmp_path):
    message, hint = refused(program, "", module="somebody")
    assert message == f"no module 'somebody' in {tmp_path}"
    assert hint == "did you mean 'somebodys'?"


def test_a_package_whose_module_is_not_there(program, tmp_path):
    (tmp_path / "a_package").mkdir()
    message, _ = refused(program, "", module="a_package.steps")
    assert message == f"no module 'a_package.steps' in {tmp_path}"


def test_a_function_that_is_not_there(program):
    message, hint = refused(program, "def train_step(mesh): ...", function="train_stop")
    assert message == "somebodys has no function 'train_stop'"
    assert hint == "did you mean 'train_step'?"


def test_a_dependency_that_is_not_installed(program):
    message, hint = refused(program, "import a_library_of_dreams")
    assert message == "somebodys needs 'a_library_of_dreams', which is not installed"
    assert hint == "install a_library_of_dreams"


def test_a_dependency_that_is_missed_when_it_is_called(program):
    message, _ = refused(program, "def train_step(mesh):\n    import a_library_of_dreams")
    assert message == "somebodys:train_step needs 'a_library_of_dreams', which is not installed"


def test_a_module_that_fails_on_import(program, tmp_path):
    message, hint = refused(program, "x = 1\ny = 1 / 0")
    assert (
        message
        == f"importing somebodys failed at {tmp_path / 'somebodys.py'}:2: ZeroDivisionError: division by zero"
    )
    assert hint == "`python -c 'import somebodys'` shows it"


def test_a_function_that_raises(program, tmp_path):
    message, hint = refused(program, "def train_step(mesh):\n    raise ValueError('no such data set')")
    place = f"{tmp_path / 'somebodys.py'}:2"
    assert message == f"somebodys:train_step(mesh) failed at {place}: ValueError: no such data set"
    assert "return `jax.ShapeDtypeStruct` arguments" in hint


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "returned NoneType, not a step with arguments"),
        ("(1, 2)", "returned tuple, not a step with arguments"),
        ("(print,)", "returned tuple, not a step with arguments"),
        ("(print, 2)", "args is int, not a tuple"),
    ],
)
def test_a_function_that_returns_something_else(program, returned, words):
    message, hint = refused(program, f"def train_step(mesh):\n    return {returned}")
    assert words in message
    assert hint.startswith("it is called with the mesh, if it takes one, and returns (step, args)")


def test_a_step_that_fails_when_it_is_traced(program, tmp_path):
    text = (
        "import jax.numpy as jnp\n"
        "def step(x, y):\n"
        "    return x @ y\n"
        "def train_step(mesh):\n"
        "    return step, (jnp.ones((2, 3)), jnp.ones((4, 5)))\n"
    )
    step, arguments, keywords = program(text)
    message, hint = refused(lower_foreign, program.request(), step, arguments, keywords)
    assert message.startswith(
        f"the step that somebodys:train_step returned failed at {tmp_path / 'somebodys.py'}:3"
    )
    assert "(2, 3)" in hint
    assert "(4, 5)" in hint


def test_arrays_become_shapes_on_the_mesh_and_what_is_no_array_stays(program):
    text = (
        "import jax, numpy as np\n"
        "from jax.sharding import NamedSharding, PartitionSpec\n"
        "def train_step(mesh):\n"
        "    split = NamedSharding(mesh, PartitionSpec('data'))\n"
        "    return lambda w, n, x: w, [np.ones((8, 2)), 3], \\\n"
        "        {'x': jax.ShapeDtypeStruct((8,), 'float32', sharding=split)}\n"
    )
    _, (weight, number), keywords = program(text)
    assert (weight.shape, weight.sharding.spec, number) == ((8, 2), jax.sharding.PartitionSpec(), 3)
    assert keywords["x"].sharding.shard_shape((8,)) == (1,)


def test_what_the_steps_own_jit_says_of_its_arguments_is_where_they_lie(program):
    text = (
        "import jax, numpy as np\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "def train_step(mesh):\n"
        "    split = NamedSharding(mesh, P('data'))\n"
        "    step = jax.jit(lambda params, x: params['w'] * x, in_shardings=({'w': split}, None))\n"
        "    return step, ({'w': jax.ShapeDtypeStruct((16,), 'float32')}, np.ones(16, 'float32'))\n"
    )
    step, (params, x), keywords = program(text)
    assert params["w"].sharding.spec == jax.sharding.PartitionSpec("data")
    assert x.sharding.spec == jax.sharding.PartitionSpec()
    _, lowered = lower_foreign(program.request(), step, (params, x), keywords)
    (of_params, of_x), _ = lowered.compile().input_shardings
    assert of_params["w"].shard_shape((16,)) == (2,)
    assert of_x.is_fully_replicated


def test_a_function_may_not_look_at_values_that_nobody_computes(program, tmp_path):
    text = (
        "import jax.numpy as jnp\n"
        "def train_step(mesh):\n"
        "    weights = jnp.ones((512, 512))\n"
        "    print(weights)\n"
        "    scale = float((weights @ weights).mean())\n"
        "    return lambda w: w * scale, (weights,)\n"
    )
    message, hint = refused(program, text)
    place = f"{tmp_path / 'somebodys.py'}:5"
    assert message == f"somebodys:train_step reads the value of an array of shape () at {place} (float)"
    assert hint.startswith("arrays are shapes while it is called")


BY_NAME = """
import functools, jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
S = jax.ShapeDtypeStruct

def on(mesh, spec, *shape):
    return S(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

def typed_key(mesh):
    def step(w, x, key, unused, rate, nothing):
        mask = jax.random.bernoulli(key, 0.9, x.shape)
        return w - rate * jax.grad(lambda w: jnp.mean(((x * mask) @ w) ** 2))(w)
    return step, (on(mesh, P(), 64, 64), on(mesh, P("data"), 128, 64), jax.random.key(0),
                  np.zeros(7), 0.1, None)

def static_arguments(mesh):
    step = jax.jit(lambda w, x, n, mode: functools.reduce(lambda v, _: jnp.tanh(v @ w), range(n), x),
                   static_argnums=(2,), static_argnames=("mode",))
    return step, (on(mesh, P(), 64, 64), on(mesh, P("data"), 128, 64), 3), {"mode": "train"}

def mesh_of_its_own(mesh):
    mine = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    places = NamedSharding(mine, P()), NamedSharding(mine, P("batch"))
    step = jax.jit(lambda w, x: (x @ w).mean(), in_shardings=places)
    return step, (S((64, 64), jnp.float32), S((128, 64), jnp.float32))

def put_on_the_mesh(mesh):
    w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P()))
    return (lambda w, x: (x @ w).mean()), (w, on(mesh, P("data"), 128, 64))

def closed_over(mesh):
    w = jnp.ones((64, 64))
    return (lambda x: (x @ w).mean()), (on(mesh, P("data"), 128, 64),)
"""


@pytest.mark.parametrize(
    ("function", "products", "axis", "names"),
    [
        ("typed_key", 2, "data", ["w", "x", "key", "rate"]),
        ("static_arguments", 3, "data", ["w", "x"]),
        ("mesh_of_its_own", 1, "batch", ["w", "x"]),
        ("put_on_the_mesh", 1, "data", ["w", "x"]),
        ("closed_over", 1, "data", ["closed_over[0]", "x"]),
    ],
)
def test_what_works_at_hand_works_by_name(monkeypatch, tmp_path, function, products, axis, names):
    (tmp_path / "by_name.py").write_text(BY_NAME)
    monkeypatch.chdir(tmp_path)
    made = weigh(f"by_name.py:{function}", on="8xH100")
    assert made.ledger.flops.model == products * 2 * 128 * 64 * 64
    assert made.compiled.mesh_axes == made.layout.axes == ((axis, 8),)
    by_path = {each.path: each for each in made.compiled.arguments}
    assert list(by_path) == names
    assert by_path["x"].axes == (axis,)
    assert by_path["x"].device_bytes == 4 * 128 * 64 // 8
    assert by_path[names[0]].device_bytes == 4 * 64 * 64


def test_arguments_are_named_as_jax_names_them():
    def step(params, *rest, batch):
        return params

    arguments, keywords = ([{"w": 1}], 2, {"x": 3}), {"batch": {"tokens": 4}}
    paths = argument_paths(step, arguments, keywords)
    assert paths == ["params[0]['w']", "rest[0]", "rest[1]['x']", "batch['tokens']"]
    assert paths == list(jax.jit(step).trace(*arguments, **keywords).jaxpr.jaxpr.debug_info.arg_names)


def test_the_worker_hands_on_the_words(request_for):
    with pytest.raises(
        InputError, match="recurrent has no function 'train_stop'\n  hint: did you mean 'train_step'"
    ):
        compile_program(request_for("recurrent:train_stop", "1xCPU", "data=-1"))


def test_the_same_program_is_found_in_the_cache_by_its_text(weighed, request_for):
    program = ("rematerialised:train_step", "1xCPU", "data=-1")
    first = weighed(*program)
    again, folder, cached = compile_program(request_for(*program))
    assert cached
    assert folder == first.folder
    assert again == first.compiled


def test_a_function_that_returns_nothing_has_memory_and_no_time():
    weighing = weigh(jax_step(lambda x: None, jax.ShapeDtypeStruct((3,), "float32")), on="1xCPU")
    assert weighing.prediction is None
    assert "runs nothing, and takes no time; let it return what it computes" in weighing.no_prediction
    assert weighing.to_dict()["prediction"] is None
