"""A user's script is weighed unchanged: it runs without a device until its training step repeats."""

import os
import textwrap
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import meshwright as mw

SCRIPTS = Path(__file__).parents[2] / "scripts"


def assumed(weighing):
    return "\n".join(weighing.ledger.assumptions)


def script(tmp_path, text):
    """Write a script with the usual first lines and a step in it, and return its command."""
    file = tmp_path / "train.py"
    first = "import sys, jax, jax.numpy as jnp, numpy as np"
    step = """
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)
    @jax.jit
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value
    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    """
    file.write_text(f"{first}\n{textwrap.dedent(step)}\n{textwrap.dedent(text)}")
    return ["python", str(file)]


def test_a_plain_script_on_its_own_mesh_is_the_same_program_as_its_function(forked_workers):
    def loss(parameters, rows):
        hidden = jnp.tanh(rows @ parameters["up"])
        return jnp.mean((hidden @ parameters["down"] - rows) ** 2)

    def update(parameters, momentum, rows):
        value, gradients = jax.value_and_grad(loss)(parameters, rows)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, parameters, momentum), momentum, value

    made = mw.weigh(mw.script("python", str(SCRIPTS / "plain.py"), "3"), on="8xH100")
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    matrices = {"up": jax.ShapeDtypeStruct((512, 2048), jnp.float32),
                "down": jax.ShapeDtypeStruct((2048, 512), jnp.float32)}  # fmt: skip
    specs = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)}
    rows = mw.place(mesh, jax.ShapeDtypeStruct((256, 512), jnp.float32), PartitionSpec("data"))
    matrices = mw.place(mesh, matrices, specs)
    named = mw.weigh(
        mw.jax_step(jax.jit(update, donate_argnums=(0, 1)), matrices, matrices, rows), on="8xH100"
    )
    assert made.layout.axes == named.layout.axes == (("data", 2), ("model", 4))
    assert made.ledger.flops.model == named.ledger.flops.model == 5 * 2 * 256 * 512 * 2048
    assert made.ledger.memory.reserved_bytes == named.ledger.memory.reserved_bytes
    sent = [[replace(each, by_line={}) for each in w.ledger.traffic] for w in (made, named)]
    assert sent[0] == sent[1]  # but for the lines that need it
    assert [each.path for each in made.compiled.arguments][-1] == "rows"


def test_what_is_read_on_the_host_is_said_with_its_line_and_the_branch(forked_workers):
    made = mw.weigh(mw.script(str(SCRIPTS / "plain.py"), "3"), on="8xH100")
    words = assumed(made)
    assert "plain.py:55: if value < 1e-4:; line 55 branches on it" in words
    assert "one branch was taken" in words
    assert "item is read on the host at" in words
    assert 'plain.py:53: print("before"' in words
    assert "also jitted: evaluate at" in words
    assert "(1.07 GFLOP, without a backward pass, called once)" in words


@pytest.mark.parametrize(
    ("name", "arguments", "flops", "split"),
    [
        # Three products for each matrix, but the input of the first one has no gradient.
        ("nnx_modules", [], 3 * 2 * 512 * (3 * 256**2 + 256 * 16) - 2 * 512 * 256**2, {"rows"}),
        pytest.param(
            "linen_state",
            ["--width", "256"],
            3 * 2 * 1024 * (4 * 256**2 + 256) - 2 * 1024 * 256**2,
            {"Dense_0"},
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "filtered",
            [],
            3 * 2 * 512 * (2 * 256**2 + 256 * 8) - 2 * 512 * 256**2,
            set(),
            marks=pytest.mark.wide,
        ),
    ],
)
def test_the_scripts_of_libraries_have_the_flops_counted_by_hand(
    name, arguments, flops, split, forked_workers
):
    made = mw.weigh(mw.script("python3", str(SCRIPTS / f"{name}.py"), *arguments), on="8xH100")
    assert made.ledger.flops.model == flops
    assert made.ledger.flops.executed >= flops
    assert made.fits is True
    divided = [each.path for each in made.compiled.arguments if not each.replicated]
    assert divided
    assert all(any(part in path for path in divided) for part in split)


def test_a_script_like_nanogpt_is_weighed_by_its_training_step_and_writes_nothing(tmp_path, forked_workers):
    out = tmp_path / "out"
    made = mw.weigh(mw.script("python", str(SCRIPTS / "gpt.py"), str(out)), on="64xH100")
    width, layers, length, rows, vocabulary = 128, 2, 128, 128, 512
    weights = layers * 12 * width**2 + vocabulary * width
    scores = layers * rows * length**2 * width
    assert made.ledger.flops.model == 6 * rows * length * weights + 12 * scores
    assert made.compiled.num_devices == 64
    words = assumed(made)
    assert "the step is train_step" in words
    assert 'line 100 branches on it (if losses["val"] < best_val_loss:)' in words
    assert "the checkpoint that is saved at" in words
    assert not out.exists()


@pytest.mark.wide
@pytest.mark.parametrize("name", ["nnx_modules", "filtered"])
def test_the_modules_of_a_script_have_the_roles_of_their_classes(name, forked_workers):
    made = mw.weigh(mw.script("python", str(SCRIPTS / f"{name}.py")), on="1xH100")
    num_bytes = dict.fromkeys(("parameters", "optimizer_state"), 0)
    for each in made.compiled.arguments:
        if each.role in num_bytes and each.shape:
            num_bytes[each.role] += each.device_bytes
    parameters = {"nnx_modules": 3 * (256**2 + 256) + 2 * 256 + 256 * 16 + 16,
                  "filtered": 2 * (256**2 + 256) + 256 * 8 + 8}[name]  # fmt: skip
    assert num_bytes == {"parameters": 4 * parameters, "optimizer_state": 2 * 4 * parameters}
    assert {each.path for each in made.compiled.arguments} & {"rows"}
    assert "arguments" not in made.ledger.memory.by_category


@pytest.mark.wide
def test_libraries_that_are_reached_through_a_link_are_no_code_of_the_users(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(Path(jax.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "link"), prepend=os.pathsep)
    made = mw.weigh(mw.script("python", str(SCRIPTS / "nnx_modules.py")), on="1xH100")
    assert "parameters" in {each.role for each in made.compiled.arguments}


def test_a_step_of_pmap_is_weighed_with_its_own_array_on_each_device(tmp_path, forked_workers):
    command = script(
        tmp_path,
        """
        def updated(params, x):
            return params - 0.1 * jax.lax.pmean(jax.grad(loss)(params, x), "devices")
        updated = jax.pmap(updated, axis_name="devices")
        w, x = jnp.ones((8, 64, 64)), jnp.ones((8, 32, 64))
        for _ in range(3):
            w = updated(w, x)
        """,
    )
    made = mw.weigh(mw.script(*command), on="8xH100")
    assert made.ledger.flops.model == made.ledger.flops.executed == 8 * 2 * 2 * 32 * 64 * 64
    assert [each.device_bytes for each in made.compiled.arguments] == [4 * 64 * 64, 4 * 32 * 64]
    assert {message.kind for message in made.ledger.traffic} == {"all-reduce"}


def test_an_array_that_a_step_closes_over_has_a_name(tmp_path, forked_workers):
    command = script(
        tmp_path,
        """
        rows = jnp.full((32, 64), 2.0)
        @jax.jit
        def closed(params):
            return params - 0.1 * jax.grad(loss)(params, rows)
        for _ in range(3):
            w = closed(w)
        """,
    )
    made = mw.weigh(mw.script(*command), on="1xH100")
    assert [each.role for each in made.compiled.arguments] == ["closed_over", "parameters"]
    assert made.ledger.memory.by_category["closed_over"] == 4 * 32 * 64


def test_each_call_is_weighed_when_asked(forked_workers):
    step = mw.weigh(mw.script(str(SCRIPTS / "plain.py"), "3", all_calls=True), on="8xCPU")
    made = (step, *step.other_calls)
    assert [each.name.rpartition(":")[2] for each in made] == ["update", "evaluate"]
    product = 2 * 256 * 512 * 2048
    assert [each.ledger.flops.model for each in made] == [5 * product, 2 * product]


def test_the_throughput_and_the_cost_are_of_the_tokens_that_are_told(tmp_path, forked_workers):
    command = script(tmp_path, "while True:\n    w, value = step(w, x)")
    made = mw.weigh(
        mw.script(*command),
        on="1xH100",
        run=mw.RunLength(tokens_per_step="32", tokens=3200, price_per_device_hour=3),
    )
    assert made.num_steps == 100
    seconds = made.prediction.step_seconds.expected
    assert made.prediction.tokens_per_second_per_device == pytest.approx(32 / seconds)
    assert made.run_total.cost.expected == pytest.approx(100 * seconds / 3600 * 3)


def test_the_script_sees_the_fleet_and_its_own_arguments(tmp_path, forked_workers):
    command = script(
        tmp_path,
        """
        assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "3e-4"], sys.argv
        jax.config.update("jax_num_cpu_devices", 2)
        jax.distributed.initialize()
        assert len(jax.devices()) == jax.device_count() == 16 and jax.local_device_count() == 8
        assert jax.process_count() == 2 and jax.process_index() == 0
        assert jax.devices()[0].device_kind == "NVIDIA H100 80GB HBM3" and jax.default_backend() == "gpu"
        assert jax.devices("cpu")[0].platform == "cpu" and jax.devices()[0].memory_stats() == {}
        mesh = jax.make_mesh((16,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
        jax.set_mesh(mesh)
        split = jax.sharding.PartitionSpec("data")
        x = jax.device_put(x, split)
        assert jax.typeof(x).sharding.spec[0] == "data"
        assert [part.data.shape for part in x.addressable_shards] == [(2, 64)] * 8
        assert x.addressable_data(0).size == 128 and not x.is_fully_addressable
        key, other = jax.random.split(jax.random.key(7))
        assert int(jnp.asarray(3) + 4) == 7 and np.asarray(jnp.arange(3)).tolist() == [0, 1, 2]
        compiled = step.lower(w, x).compile()
        for _ in range(3):
            w, value = compiled(w, x)
        """,
    )
    made = mw.weigh(mw.script(*command, "--lr", "3e-4"), on="16xH100")
    assert made.layout.axes == (("data", 16),)


def test_nothing_of_the_script_runs_after_its_step(tmp_path, forked_workers):
    left = tmp_path / "left"
    command = script(
        tmp_path,
        f"""
        try:
            for i in range(5):
                w, value = step(w, x)
        finally:
            open({str(left)!r}, "w").write("saved")
        """,
    )
    mw.weigh(mw.script(*command), on="1xH100")
    assert not left.exists()


def test_a_script_that_fails_after_its_step_is_weighed_and_that_is_said(tmp_path, forked_workers):
    command = script(tmp_path, "w, value = step(w, x)\nraise KeyError('evaluation')")
    made = mw.weigh(mw.script(*command), on="1xH100")
    assert "the script failed after step had run 1 times: KeyError at" in assumed(made)


EACH_DEVICES = """
def gradient_step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * jax.lax.pmean(gradient, "i"), jax.lax.pmean(value, "i")
"""
PMAPPED = f"""{EACH_DEVICES}
n = jax.local_device_count()
total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
train = jax.pmap(gradient_step, axis_name="i", in_axes=(0, 0), donate_argnums=0)
w = jnp.broadcast_to(w, (n, 64, 64))
for _ in range(5):
    w, value = train(w, np.ones((n, 32, 64), np.float32))
    assert value.shape == total(value).shape == (n,)
"""
MAPPED = f"""{EACH_DEVICES}
from jax.sharding import NamedSharding, PartitionSpec as P
n = jax.device_count()
mesh = jax.make_mesh((n,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
train = jax.shard_map(
    gradient_step, mesh=mesh, in_specs=(P(), P("i")), out_specs=(P(), P()), check_vma=False
)
for _ in range(5):
    w, value = train(w, jax.device_put(np.ones((32 * n, 64), np.float32), NamedSharding(mesh, P("i"))))
    assert w.sharding.is_fully_replicated
"""


@pytest.mark.parametrize(  # on one process, and on two
    ("text", "num_devices"),
    [
        pytest.param(PMAPPED, 8, id="pmap-8"),
        pytest.param(MAPPED, 16, id="shard_map-16"),
        pytest.param(PMAPPED, 16, id="pmap-16", marks=pytest.mark.wide),
        pytest.param(MAPPED, 8, id="shard_map-8", marks=pytest.mark.wide),
    ],
)
def test_a_step_that_is_mapped_outside_jit_holds_a_slice_on_each_device(
    text, num_devices, tmp_path, forked_workers
):
    made = mw.weigh(mw.script(*script(tmp_path, text)), on=f"{num_devices}xH100")
    assert made.layout.axes == (("i", num_devices),)
    assert made.ledger.flops.model == made.ledger.flops.executed == num_devices * 2 * 2 * 32 * 64 * 64
    assert {argument.device_bytes for argument in made.compiled.arguments} == {4 * 64 * 64, 4 * 32 * 64}
    assert {(each.kind, each.axes) for each in made.ledger.traffic} == {("all-reduce", ("i",))}


def test_a_large_array_that_is_read_stops_the_script(tmp_path, forked_workers):
    command = script(
        tmp_path, "w, value = step(w, x)\nnp.save('w.npy', np.asarray(jnp.ones((1024, 1024)) * value))"
    )
    made = mw.weigh(mw.script(*command), on="1xH100")
    assert made.ledger.flops.model == 2 * 2 * 32 * 64 * 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gradient = jax.grad(loss)(w, x)", "called no jitted function with matrix products"),
        pytest.param(
            *("raise OSError('no data')", r"with a backward pass: OSError at .*train.py:.*: no data"),
            marks=pytest.mark.wide,
        ),
        pytest.param(
            *("print('I am here')\nsys.exit(3)", r"(?s)exit status 3.*I am here"), marks=pytest.mark.wide
        ),
        pytest.param(
            "np.asarray(jnp.ones((1024, 1024)))",
            r"reads 4.0 MiB of computed values on the host at .*train.py",
            marks=pytest.mark.wide,
        ),
        ("import os; os._exit(4)", "ended with status 4 before it called its training step"),
    ],
    ids=["eager", "fails", "exits", "reads", "ends"],
)  # fmt: skip
def test_a_script_without_a_step_is_refused_in_words(text, words, tmp_path):
    with pytest.raises(mw.InputError, match=words):
        mw.weigh(mw.script(*script(tmp_path, text)), on="1xCPU")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", "own.py:fails() failed at "),
        ("ends", "the process of own.py:ends ended with status 3 "),
    ],
)
def test_a_function_that_gives_no_step_is_named_first(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    functions = "def fails():\n    raise RuntimeError('x')\n\ndef ends():\n    os._exit(3)\n"
    (tmp_path / "own.py").write_text(f"import os\n\n{functions}")
    with pytest.raises(mw.InputError) as refused:
        mw.weigh(f"own.py:{name}", on="1xCPU")
    assert str(refused.value).startswith(words)


def test_what_is_read_in_a_branch_on_the_line_of_its_test_branches_on_nothing(tmp_path, forked_workers):
    text = """
    for at in range(3):
        w, value = step(w, x)
        if at % 10 == 0: print(float(value))
    """
    words = assumed(mw.weigh(mw.script(*script(tmp_path, text)), on="1xCPU"))
    assert "float is read on the host at" in words
    assert "branches on it" not in words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["torchrun", "train.py"], "'torchrun train.py' runs no Python script"),
        (["python", "-u", "train.py"], "runs no Python script"),
        (["python", "no_such.py"], "no file no_such.py"),
        (["python", "step.ipynb"], "runs no Python script\n.*jupyter nbconvert --to script step.ipynb"),
        ([], "runs no Python script"),
    ],
)
def test_a_command_that_is_no_script_is_refused(command, words):
    with pytest.raises(mw.InputError, match=words):
        mw.weigh(mw.script(*command), on="8xH100")


def test_overrides_without_their_option_are_told_how_to_be_written():
    with pytest.raises(mw.InputError, match="runs no Python script") as refused:
        mw.weigh(mw.script("llama-1b", "precision=fp8", "model.num_layers=2"), on="8xH100")
    assert refused.value.hint == "llama-1b --set precision=fp8 --set model.num_layers=2"


def test_a_release_of_jax_without_a_private_name_is_refused_in_words():
    from meshwright.contrib.jax_steps._shapes import _private

    with pytest.raises(mw.InputError, match=rf"jax {jax.__version__} has no jax._src.core.EvalTrace.gone"):
        _private("jax._src.core", "EvalTrace.gone")


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec

def loss(w, x):
    return jnp.sum((x @ w) ** 2)

def on_the_fleet():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(jax.random.normal(jax.random.key(0), (64, 64)), NamedSharding(mesh, PartitionSpec()))
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return jax.jit(jax.value_and_grad(loss)), (w, x)

def on_no_mesh():
    return jax.value_and_grad(loss), (np.ones((64, 64), np.float32), np.ones((32, 64), np.float32))

def wrong():
    return 3

def fails():
    raise ValueError("no tokens")

class Trainer:
    def __init__(self, width=64):
        self.width = width

    def program(self, mesh):
        rows = NamedSharding(mesh, PartitionSpec("data"))
        w = jax.ShapeDtypeStruct((self.width, self.width), jnp.float32)
        x = jax.ShapeDtypeStruct((32, self.width), jnp.float32, sharding=rows)
        return jax.value_and_grad(loss), (w, x)

class Needy:
    def __init__(self, width):
        pass

    def program(self):
        return self
"""
PRODUCTS = 2 * 2 * 32 * 64 * 64


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "train.py").write_text(PROGRAM)
    (tmp_path / "mine.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        pytest.param("parts/train.py:on_the_fleet", 8, marks=pytest.mark.wide),
        ("mine:Trainer.program", 8),
        ("mine:on_no_mesh", 1),
    ],
)
def test_files_methods_and_functions_without_a_mesh_are_programs(name, num_devices, program, forked_workers):
    weighed = mw.weigh(name, on="8xH100", run=mw.RunLength(tokens_per_step=32, tokens="3200"))
    assert weighed.ledger.flops.model == PRODUCTS
    assert weighed.compiled.num_devices == num_devices
    assert weighed.num_steps == 100
    assert weighed.idle_devices == (7 if num_devices == 1 else 0)


@pytest.mark.parametrize(
    ("name", "keywords", "words"),
    [
        ("mine:on_no_mesh", {"layout": "data=8"}, "takes no mesh, so it takes no layout"),
        ("mine:wrong", {}, "mine:wrong returned int, not a step with arguments"),
        ("mine:fails", {}, r"mine:fails\(\) failed at .*mine.py:\d+: ValueError: no tokens"),
        ("mine:Trainer.programme", {}, "mine has no function 'Trainer.programme'"),
        ("mine:Needy.program", {}, r"mine:Needy\(\) failed"),
        ("gone.py:step", {}, "no file gone.py"),
        (
            "mine:on_no_mesh",
            {"run": mw.RunLength(tokens="1B")},
            "the number of tokens in its step is not known",
        ),
        ("mine:on_no_mesh", {"run": mw.RunLength(tokens_per_step=0)}, "0 tokens per step"),
    ],
)
def test_a_program_that_cannot_be_weighed_is_refused_in_words(name, keywords, words, program):
    with pytest.raises(mw.InputError, match=words):
        mw.weigh(name, on="8xH100", **keywords)


def test_a_config_states_its_own_tokens_per_step():
    with pytest.raises(mw.InputError, match="a configuration takes no tokens_per_step"):
        mw.weigh("linear", on="1xCPU", run=mw.RunLength(tokens_per_step=3))


def test_a_script_that_samples_before_it_trains_is_weighed_by_its_training_step(tmp_path, forked_workers):
    text = """
    @jax.jit
    def sample(w, x):
        return jnp.tanh(x @ w)
    for _ in range(400):
        token = sample(w, x[:1])
    for _ in range(3):
        w, value = step(w, x)
    """
    made = mw.weigh(mw.script(*script(tmp_path, text)), on="1xH100")
    assert made.name.endswith("train.py:step")
    assert made.ledger.flops.model == 2 * 2 * 32 * 64 * 64  # nobody asks for the gradient of x
    assert made.warnings == ()


def test_a_script_without_a_backward_pass_is_no_training_step_and_the_verdict_says_it(
    tmp_path, forked_workers
):
    made = mw.weigh(mw.script(*script(tmp_path, "jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x)")), on="1xH100")
    assert made.warnings[0].startswith("No backward pass was found")
    text = " ".join(str(made).split())
    assert text.index(made.warnings[0]) < text.index("FITS")
    assert "no call with a backward pass came before the script ended" in assumed(made)
    assert made.to_dict()["warnings"] == list(made.warnings)


MESH = """
mesh = jax.make_mesh((jax.device_count(),), ("dp",))
table = jax.device_put(jnp.ones((64, 16)), jax.sharding.NamedSharding(mesh, jax.P()))
rows = jax.device_put(jnp.zeros((16, 8), jnp.int32), jax.sharding.NamedSharding(mesh, jax.P("dp")))
@jax.jit
def train_step(table, rows):
    loss, grad = jax.value_and_grad(lambda t: jnp.mean((t[rows] @ t.T) ** 2))(table)
    return table - 0.1 * grad, loss
for _ in range(2):
    table, loss = train_step(table, rows)
"""


def test_a_mesh_without_types_of_its_axes_is_named_where_they_became_explicit(tmp_path, forked_workers):
    command = script(tmp_path, MESH)
    with pytest.raises(mw.InputError) as error:
        mw.weigh(mw.script(*command), on="8xH100")
    line = (
        Path(command[1])
        .read_text()
        .splitlines()
        .index('mesh = jax.make_mesh((jax.device_count(),), ("dp",))')
    )
    assert f"jax.make_mesh gets no axis_types at {command[1]}:{line + 1}" in error.value.message
    assert "Its last lines" not in error.value.message
    assert "axis_types=(jax.sharding.AxisType.Auto,)" in error.value.hint
    made = mw.weigh(mw.script(*command, auto_meshes=True), on="8xH100")
    assert made.layout.axes == (("dp", 8),)
    assert "JAX since 0.9 makes them Explicit" in assumed(made)


def test_an_optimizer_of_pytorch_ends_the_script_before_it_steps(tmp_path, forked_workers):
    pytest.importorskip("torch")
    text = """
    import importlib
    torch = importlib.import_module("torch")
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    open("stepped", "w").close()
    """
    command = script(tmp_path, text)
    with pytest.raises(mw.InputError, match=r"an optimizer of torch\.optim steps at") as error:
        mw.weigh(mw.script(*command), on="8xH100")
    assert "docs/how-to/pytorch.md" in error.value.hint


TORCH = """
import torch.nn as nn
import torch
from blocks import WIDTH
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)
def main():
    net = Net(WIDTH).to("cuda")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.randn(8, WIDTH)).sum().backward()
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("launcher", [["python"], ["torchrun", "--nproc-per-node", "8"]])
def test_a_script_of_pytorch_does_not_run_and_hears_what_to_write(tmp_path, launcher):
    (tmp_path / "blocks.py").write_text("WIDTH = 64")
    file = tmp_path / "train.py"
    file.write_text(TORCH)
    with pytest.raises(mw.InputError, match="trains with PyTorch") as error:
        mw.weigh(mw.script(*launcher, str(file)), on="8xH100")
    lines = [line.strip() for line in error.value.hint.splitlines()]
    assert "from blocks import WIDTH" in lines
    assert "from train import Net" in lines
    assert "module = Net(WIDTH)  # as train.py:10 makes it" in lines
    assert any('"inputs": (torch.randn(8, WIDTH),)' in line for line in lines)
    assert "`meshwright weigh weigh_model.py:build --on 8xH100`" in error.value.hint


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        ("DDP(torch.compile(Net(64).to(rank)), device_ids=[rank])", "torch.compile(Net(64))"),
        ("torch.nn.parallel.DistributedDataParallel(Net(64).cuda())", "Net(64)"),
        ("Net(64).to('cuda', dtype=torch.bfloat16).train()", "Net(64).to(torch.bfloat16)"),
        ("Net(64).bfloat16().cuda()", "Net(64).bfloat16()"),
    ],
)
def test_what_needs_devices_is_left_out_of_the_module_and_its_format_is_not(tmp_path, made, wanted):
    file = tmp_path / "train.py"
    file.write_text(TORCH.replace('Net(WIDTH).to("cuda")', made))
    with pytest.raises(mw.InputError, match="trains with PyTorch") as error:
        mw.weigh(mw.script(str(file)), on="8xH100")
    assert f"module = {wanted}  # as train.py:10 makes it" in error.value.hint


def test_a_script_that_loads_data_with_pytorch_and_trains_with_jax_runs(tmp_path, forked_workers):
    text = (
        "try:\n    import torch\nexcept ImportError:\n    pass\nfor _ in range(3):\n    w, value = step(w, x)"
    )
    made = mw.weigh(mw.script(*script(tmp_path, text)), on="1xH100")
    assert made.name.endswith("train.py:step")


def test_the_last_line_of_a_script_is_quoted_in_part(tmp_path):
    command = script(tmp_path, "print('x' * 5_000_000)\nraise ValueError('y' * 5_000_000)")
    with pytest.raises(mw.InputError, match=r"ValueError at .*yyy") as refused:
        mw.weigh(mw.script(*command), on="8xCPU")
    assert len(refused.value.message) < 15_000


def test_a_script_is_named_by_a_path_and_its_arguments_by_text(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("")
    assert mw.script(file, "--lr", "1").name == mw.script(str(file), "--lr", "1").name
    with pytest.raises(mw.InputError, match="runs no Python script: give its file and its arguments as text"):
        mw.script(str(file), 3)
