"""Each optimizer from end to end: beside somebody else's, training, on one device and on eight, weighed."""

import math

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.config import load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.models import Parameter, model_of
from meshwright.trainer.step import build_step, optimizer_of
from tests.stepping import run_steps

pytestmark = pytest.mark.quick

WIDE = ("model.embed_dim=256", "model.mlp_dim=512", "model.num_layers=1", "batch.sequence_length=32")
SHORT = ("model.num_layers=1", "batch.sequence_length=32")
RATES = {
    "sgd": 0.5,
    "adagrad": 0.05,
    "rmsprop": 3e-3,
    "adam": 3e-3,
    "adamw": 3e-3,
    "lion": 1e-3,
    "adafactor": 0.05,
    "muon": 1e-2,
}
DECLARED = {
    "matrix": Parameter(shape=(6, 4), dims=("embed", "mlp"), fan_in=6),
    "bias": Parameter(shape=(4,), dims=("mlp",), initial="zeros"),
}
MATRIX = {"matrix": DECLARED["matrix"]}
NUM_STEPS, RATE = 10, 0.01
SPLIT = "products of split matrices in the optimizer"


def problem(declared):
    """Rows, what a linear layer should make of them, and where the layer starts."""
    random = np.random.default_rng(3)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    return draw(32, 6), draw(32, 4), {name: draw(*p.shape) for name, p in declared.items()}


def loss(p, x, y):
    made = x @ p["matrix"]
    if "bias" in p:
        made = made + (p["bias"] if made.ndim == 1 else p["bias"].reshape(1, -1))
    return ((made - y) ** 2).mean()


def ours(kind, *overrides, declared=DECLARED):
    chosen = (f"optimizer.kind={kind}", f"optimizer.learning_rate={RATE}")
    config = load_config("linear", (*chosen, *(f"optimizer.{o}" for o in overrides)))
    x, y, p = problem(declared)
    optimizer = optimizer_of(config, declared)

    @jax.jit
    def step(p, state):
        updates, state = optimizer.update(jax.grad(loss)(p, x, y), state, p)
        return jax.tree.map(lambda p, u: p + RATE * u, p, updates), state

    state = optimizer.init(p)
    for _ in range(NUM_STEPS):
        p, state = step(p, state)
    return p


def theirs(make, declared=DECLARED):
    """Ten steps of one of PyTorch's optimizers."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, y, p = problem(declared)
    x, y = torch.tensor(x), torch.tensor(y)
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in p.items()}
    optimizer = make(torch.optim, weights)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss(weights, x, y).backward()
        optimizer.step()
    return {name: weight.detach().numpy() for name, weight in weights.items()}


def close(ours, theirs, tolerance=1e-6):
    """Within `tolerance` of the largest number."""
    for name, value in theirs.items():
        assert np.abs(np.asarray(ours[name]) - value).max() <= tolerance * np.abs(value).max(), name


@pytest.mark.parametrize(
    ("kind", "overrides", "make"),
    [
        ("sgd", (), lambda o, w: o.SGD(w.values(), lr=RATE)),
        ("sgd", ("momentum=0.9",), lambda o, w: o.SGD(w.values(), lr=RATE, momentum=0.9)),
        (
            "sgd",
            ("momentum=0.9", "nesterov=true", "weight_decay=0.1", "weight_decay_on=all"),
            lambda o, w: o.SGD(w.values(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.1),
        ),
        ("rmsprop", ("decay=0.9",), lambda o, w: o.RMSprop(w.values(), lr=RATE, alpha=0.9)),
        (
            "rmsprop",
            ("centered=true", "momentum=0.9", "epsilon=1e-4"),
            lambda o, w: o.RMSprop(w.values(), lr=RATE, centered=True, momentum=0.9, eps=1e-4),
        ),
        (
            "rmsprop",
            ("weight_decay=0.1", "weight_decay_on=all", "momentum=0.9"),
            lambda o, w: o.RMSprop(w.values(), lr=RATE, weight_decay=0.1, momentum=0.9),
        ),
        ("adagrad", (), lambda o, w: o.Adagrad(w.values(), lr=RATE)),
        (
            "adagrad",
            ("weight_decay=0.1", "weight_decay_on=all", "epsilon=1e-2"),
            lambda o, w: o.Adagrad(w.values(), lr=RATE, weight_decay=0.1, eps=1e-2),
        ),
        ("adam", (), lambda o, w: o.Adam(w.values(), lr=RATE)),
        (
            "adam",
            ("weight_decay=0.1", "weight_decay_on=all"),
            lambda o, w: o.Adam(w.values(), lr=RATE, weight_decay=0.1),
        ),
        (
            "adamw",
            ("weight_decay_on=all",),
            lambda o, w: o.AdamW(w.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1),
        ),
        (
            "adamw",
            ("weight_decay=0.3",),
            lambda o, w: o.AdamW(
                [{"params": [w["matrix"]], "weight_decay": 0.3}, {"params": [w["bias"]], "weight_decay": 0}],
                lr=RATE,
                betas=(0.9, 0.95),
            ),
        ),
        ("adafactor", ("least_factored=1",), lambda o, w: o.Adafactor(w.values(), lr=RATE)),
        (
            "adafactor",
            ("least_factored=1", "weight_decay=0.1", "weight_decay_on=all"),
            lambda o, w: o.Adafactor(w.values(), lr=RATE, weight_decay=0.1),
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, tuple) else x if isinstance(x, str) else "",
)
def test_ten_steps_end_where_pytorchs_own_end(kind, overrides, make):
    close(ours(kind, *overrides), theirs(make))


def by_hand(step, declared=DECLARED):
    """Ten steps in float64 of `step(parameter's name, value, gradient, memory)`."""
    x, y, p = (np.asarray(a, np.float64) if isinstance(a, np.ndarray) else a for a in problem(declared))
    p = {name: value.astype(np.float64) for name, value in p.items()}
    memory = {name: {"step": 0} for name in p}
    for _ in range(NUM_STEPS):
        error = x @ p["matrix"] + (p.get("bias", np.zeros(4))) - y
        gradients = {"matrix": 2 * x.T @ error / y.size, "bias": 2 * error.sum(0) / y.size}
        for name in p:
            memory[name]["step"] += 1
            p[name] = step(name, p[name], gradients[name], memory[name])
    return p


def test_ten_steps_of_lion_end_where_its_papers_algorithm_ends():
    def step(name, w, gradient, memory):  # Chen et al. 2023, algorithm 2
        mean = memory.get("mean", 0.0)
        memory["mean"] = 0.99 * mean + 0.01 * gradient
        decay = 0.1 * w if name == "matrix" else 0
        return w - RATE * (np.sign(0.9 * mean + 0.1 * gradient) + decay)

    close(ours("lion"), by_hand(step))


def orthogonal(matrix, num_steps=5):
    """Newton-Schulz by Jordan 2024, in float64."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T, num_steps).T
    matrix = matrix / np.linalg.norm(matrix)
    for _ in range(num_steps):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rms", [0.2, None])
def test_ten_steps_of_muon_end_where_newton_schulz_in_numpy_ends(nesterov, rms):
    def step(name, w, gradient, memory):
        t = memory["step"]
        if name == "bias":  # AdamW
            memory["mean"] = 0.9 * memory.get("mean", 0) + 0.1 * gradient
            memory["square"] = 0.95 * memory.get("square", 0) + 0.05 * gradient**2
            return w - RATE * memory["mean"] / (1 - 0.9**t) / np.sqrt(memory["square"] / (1 - 0.95**t))
        memory["mean"] = 0.95 * memory.get("mean", 0) + 0.05 * gradient
        mean = memory["mean"] / (1 - 0.95**t)
        if nesterov:  # Optax corrects both parts for their start from zero
            mean = 0.95 * memory["mean"] / (1 - 0.95 ** (t + 1)) + 0.05 * gradient / (1 - 0.95**t)
        scale = math.sqrt(max(1, 4 / 6)) if rms is None else rms * math.sqrt(6)
        return w - RATE * (scale * orthogonal(mean) + 0.1 * w)

    overrides = (f"nesterov={str(nesterov).lower()}", f"update_rms={rms or 'none'}")
    close(ours("muon", *overrides), by_hand(step))


def test_pytorchs_muon_multiplies_in_bf16_and_so_agrees_in_three_digits():
    def muon(optim, weights):
        return optim.Muon(weights.values(), lr=RATE, nesterov=False, adjust_lr_fn="match_rms_adamw")

    expected = theirs(muon, MATRIX)
    found = ours("muon", "nesterov=false", declared=MATRIX)
    close(found, expected, 3e-3)
    with pytest.raises(AssertionError):
        close(found, expected)


def test_adafactor_is_the_same_of_stacked_layers_and_of_layers_apart():
    """Optax's own would take root mean squares over all layers at once."""
    stacked, apart = (updates_of("adafactor", stacked=stacked) for stacked in (True, False))
    np.testing.assert_allclose(stacked, apart, rtol=1e-5)


def test_muon_is_the_same_of_stacked_layers_and_of_layers_apart():
    stacked, apart = (updates_of("muon", stacked=stacked) for stacked in (True, False))
    np.testing.assert_allclose(stacked, apart, rtol=1e-4, atol=1e-6)
    wide = stacked[0].reshape(4, 6)  # one layer's matrix: its singular values are near one
    values = np.linalg.svd(wide / (0.2 * math.sqrt(6)), compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.3)), values


def updates_of(kind, *, stacked):
    """Changes of two layers' matrices, stacked or apart, after three steps with given gradients."""
    more = ("optimizer.least_factored=2",) if kind == "adafactor" else ("optimizer.weight_decay=0.0",)
    config = load_config("linear", (f"optimizer.kind={kind}", "optimizer.learning_rate=1.0", *more))
    one = Parameter(shape=(4, 2, 3), dims=("embed", "heads", "head_dim"), fan_in=4)
    stack = Parameter(shape=(2, 4, 2, 3), dims=("layers", *one.dims), fan_in=4)
    declared = {"layers": stack} if stacked else {"layers": [one, one]}
    random = np.random.default_rng(0)
    values = [
        random.standard_normal((2, 4, 2, 3)).astype(np.float32) * np.array([1, 9]).reshape(2, 1, 1, 1)
        for _ in range(4)
    ]
    values = [v.astype(np.float32) for v in values]
    trees = [{"layers": v if stacked else list(v)} for v in values]
    optimizer = optimizer_of(config, declared)
    state = optimizer.init(trees[0])
    for gradient in trees[1:]:
        updates, state = jax.jit(optimizer.update)(gradient, state, trees[0])
    return np.stack(list(updates["layers"]))


INITIAL = []  # the parameters of bytes-nano, drawn once


def trained(kind, axes, steps):
    """Losses of a run of bytes-nano. Every moment begins with zeros."""
    chosen = (f"optimizer.kind={kind}", f"optimizer.learning_rate={RATES[kind]}")
    config = load_config("bytes-nano", (*chosen, *SHORT))
    built = build_step(config, mesh_of(axes, jax.devices()[: math.prod(size for _, size in axes)]))
    if not INITIAL:
        INITIAL.append(jax.tree.map(np.asarray, built.init(np.uint32(0))["parameters"]))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), built.state) | {"parameters": INITIAL[0]}
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, built.state)
    return run_steps(config, built, state, steps)[0]


SIMPLE = ("adagrad", "rmsprop", "adam", "lion", "sgd")  # their moments lie as AdamW's do


@pytest.mark.parametrize(
    "kind",
    [  # tests/step/test_build.py trains with AdamW on layouts
        pytest.param(kind, marks=[] if kind in ("adafactor", "muon") else [pytest.mark.wide])
        for kind in RATES
    ],
)
def test_it_reduces_the_loss_of_bytes_nano_and_does_alike_on_eight_devices(kind):
    alone = trained(kind, (("data", 1),), 20)
    assert alone[-1] < alone[0] - 0.8, alone
    together = trained(kind, (("fsdp", 4), ("tensor", 2)), 5)
    np.testing.assert_allclose(together, alone[:5], rtol=1e-5)


LATENT = {
    **{"model.latent_rank": 32, "model.query_rank": 48, "model.rotary_dim": 8, "model.value_dim": 16},
    **{"model.num_kv_heads": 4, "model.head_dim": 24},
}


@pytest.mark.parametrize(
    "chosen",
    [
        {"optimizer.kind": "muon"},
        {"optimizer.kind": "adafactor"},
        {"state.moments": "8bit"},
    ],
    ids=str,
)
def test_norms_of_latents_are_vectors_to_an_optimizer_that_tells_matrices_apart(chosen):
    config = load_config("bytes-nano", {**LATENT, **chosen})
    state = build_step(config, mesh_of((("data", 1),), jax.devices()[:1])).state
    norms = [
        leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state["optimizer"])
        if "key_down_norm" in jax.tree_util.keystr(path) and math.prod(leaf.shape) > 2
    ]
    assert norms
    assert set(norms) == {(2, 32)}, norms  # two layers' norms of 32 numbers


def counted(config):
    """Numbers of the hidden matrices, and of everything else."""
    leaves = jax.tree.leaves(model_of(config.model).parameters(), is_leaf=lambda p: isinstance(p, Parameter))
    hidden = sum(math.prod(p.shape) for p in leaves if p.initial == "fan_in" and p.dims[0] == "layers")
    return hidden, sum(math.prod(p.shape) for p in leaves) - hidden


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.long if kind in SIMPLE else ())
        if kind not in ("sgd", "adamw", "muon")  # tests/test_oracle_memory.py weighs AdamW's
        else pytest.param(kind, marks=pytest.mark.wide)
        for kind in RATES
    ],
)
def test_weighed_its_state_is_the_hand_sum_by_moment(kind):
    overrides = [f"optimizer.kind={kind}", *WIDE, *(["optimizer.momentum=0.9"] if kind == "sgd" else [])]
    weighed = mw.weigh("bytes-nano", on="8xCPU", layout="fsdp=8", overrides=overrides)
    hidden, rest = counted(weighed.config)
    whole = hidden + rest
    assert whole == weighed.compiled.num_parameters
    expected = {
        "sgd": {"trace": whole},
        "adagrad": {"sum_of_squares": whole},
        "rmsprop": {"nu": whole},
        "adam": {"mu": whole, "nu": whole},
        "adamw": {"mu": whole, "nu": whole},
        "lion": {"mu": whole},
        "adafactor": None,
        "muon": {"muon.mu": hidden, "adamw.mu": rest, "adamw.nu": rest},
    }[kind]
    memory = weighed.ledger.memory
    state = [a for a in weighed.compiled.arguments if a.role == "optimizer_state"]
    assert all(a.moment for a in state)
    assert sum(memory.optimizer_state_by_moment.values()) == sum(a.device_bytes for a in state)
    assert sum(memory.by_category.values()) == memory.reserved_bytes
    if expected is not None:
        large = {name: size for name, size in memory.optimizer_state_by_moment.items() if size > 16}
        assert large == {name: 4 * numbers / 8 for name, numbers in expected.items()}
        return
    # Nine matrices: fsdp splits the side of 256 that is `embed`, and these others are whole on each device.
    others = sum((256, 128, 128, 256, 512, 512, 512, 256, 256))
    norms, placeholders = 3 * 256 / 8, 9 + 3 * 2  # Optax keeps one number where it keeps no moment
    assert sum(a.device_bytes for a in state if a.moment != "count") == 4 * (
        9 * 256 / 8 + others + norms + placeholders
    )
    assert sum(a.device_bytes for a in state) < 0.05 * 4 * whole / 8


@pytest.mark.parametrize(
    ("layout", "exchanges"),
    [
        ("fsdp=8", {"fsdp": 8}),
        pytest.param("fsdp=4,tensor=2", {"fsdp": 4, "tensor": 2}, marks=pytest.mark.wide),
    ],
)
def test_muon_deals_whole_matrices_to_devices_in_two_exchanges(layout, exchanges):
    """By hand: a device sends its numbers of hidden matrices, but its own part, there and back.

    None is gathered.
    """
    config = ["model.num_layers=8", "model.unroll=false", "batch.sequence_length=32"]
    muon, adamw = (
        mw.weigh("bytes-nano", on="8xCPU", layout=layout, overrides=[*config, f"optimizer.kind={kind}"])
        for kind in ("muon", "adamw")
    )

    def sent(weighed, kind, axis):
        found = [c for c in weighed.ledger.traffic if c.kind == kind and c.axes == (axis,)]
        return sum(c.wire_bytes for c in found)

    hidden, _ = counted(muon.config)
    for axis, size in exchanges.items():
        more = sent(muon, "all-to-all", axis) - sent(adamw, "all-to-all", axis)
        assert more == 2 * 4 * hidden / 8 * (size - 1) / size
        assert sent(muon, "all-gather", axis) == sent(adamw, "all-gather", axis)
    assert not [f for f in muon.ledger.findings if f.kind == SPLIT]


NAIVE = """
import jax, jax.numpy as jnp, optax
from jax.sharding import NamedSharding, PartitionSpec

def program(mesh):
    split, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, "fsdp", None), ()))
    described = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    optimizer = optax.KIND
    parameters = {"up": jax.ShapeDtypeStruct((4, 128, 256), jnp.float32, sharding=split)}
    state = jax.eval_shape(optimizer.init, parameters)
    state = jax.tree.map(lambda x: described(x, split if x.ndim == 3 else whole), state)

    def loss(parameters, x):
        body = lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None)
        return jnp.mean(jax.lax.scan(body, x, parameters["up"])[0] ** 2)

    def step(parameters, state, x):
        updates, state = optimizer.update(jax.grad(loss)(parameters, x), state, parameters)
        return optax.apply_updates(parameters, updates), state

    rows = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    return jax.jit(step, donate_argnums=(0, 1)), (parameters, state, rows)
"""
DIMS = '{"up": optax.contrib.MuonDimensionNumbers((1,), (2,))}'


@pytest.mark.parametrize(
    ("kind", "is_naive"),
    [(f"contrib.muon(0.1, muon_weight_dimension_numbers={DIMS})", True), ("adamw(0.1)", False)],
    ids=["muon", "adamw"],
)
def test_a_finding_says_why_a_naive_muon_is_slow(kind, is_naive, tmp_path):
    (tmp_path / "naive.py").write_text(NAIVE.replace("KIND", kind), "utf-8")
    weighed = mw.weigh(f"{tmp_path / 'naive.py'}:program", on="8xCPU", layout="fsdp=8")
    found = [f for f in weighed.ledger.findings if f.kind == SPLIT]
    assert len(found) == is_naive
    if is_naive:
        assert "matrices that fsdp splits" in found[0].what
        assert "deal whole matrices to the devices first" in found[0].fix
