"""Every schedule, policy and option on layouts trains as one device does: a second pairwise cover.

tests/test_layouts.py has layouts of other sizes; here an axis has two devices or one, beside all that a run
chooses. Every two values of two factors meet in a case, unless the product refuses them in words. Of the four
models two have tied tables, three a vocabulary that `tensor` does not divide, three fewer key-value heads
than heads, of which two fewer than `tensor`, and one has biases of all products, one of queries, keys and
values. One device's parameters are put on the layout's, and one step of SGD shows the gradients.

In float32 losses and gradients are within 1e-5 of the largest gradient. In a narrower format the loss and
each gradient are as near to one device's in float32 as tests/rounding.py says that rounding leaves them; in
eight bits each device has scales of its own. There every expert is chosen, since rounding decides between two
that are nearly as good. `make test` runs a few cases, `make test-wide` most of the cover.
"""

import functools
import itertools
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from meshwright.config import Layout, RunConfig, check_layout, load_config
from meshwright.errors import InputError
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.step import TrainStep, build_step
from tests.rounding import Rounding, rounding_of

pytestmark = pytest.mark.quick

SEQUENCES, MICROBATCHES, STAGES = 32, 4, 2
SIZES = (
    *("data.source=synthetic", "model.embed_dim=32", "model.num_heads=4", "model.mlp_dim=64"),
    *(f"batch.sequences={SEQUENCES}", "batch.sequence_length=16"),
    *("optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.clip_norm=none"),
)
NUM_EXPERTS = 4
EXPERTS = (f"model.num_experts={NUM_EXPERTS}", "model.balancing_loss=0.01")
MODELS = {
    "tied, experts": (*EXPERTS, "model.tied_embeddings=true", "model.vocab_size=64", "model.num_kv_heads=1"),
    "experts": (*EXPERTS, "model.qkv_bias=true", "model.vocab_size=61", "model.num_kv_heads=2"),
    "two tables": ("model.vocab_size=61", "model.num_kv_heads=4"),
    "tied": ("model.tied_embeddings=true", "model.bias=true", "model.vocab_size=61", "model.num_kv_heads=1"),
}
# Beside the cover: first layers that have no experts, which every stage runs.
FIRST = ("model.num_dense_layers=1", "model.dense_mlp_dim=48", "model.num_shared_experts=1")
OTHERS = {f"{name}, dense first": (*MODELS[name], *FIRST) for name in ("experts", "tied, experts")}
AXES = ("data", "fsdp", "context", "expert", "tensor")
# Where several values meet as many pairs, a case has the last one.
FACTORS = {
    # Without a schedule there are no stages.
    "schedule": (None, "1f1b", "gpipe"),
    "chunks": (None, 1, 2),
    **dict.fromkeys(AXES, (1, 2)),
    "zero1": (False, True),
    "precision": ("fp8", "bf16", "fp32"),
    "gradient_sum": ("fp32", "bf16", "all-fp32"),
    "remat": (
        *("full-every-4", "full-every-3", "full-every-2", "full"),
        *("dots", "dots-attention", "alternate-dots", "none"),
    ),
    "layer_loop": (None, "keep", "unroll"),  # stages have a loop of their own
    "model": tuple(MODELS),
    "microbatches": (1, MICROBATCHES),
}
MOST_DEVICES = 8
# How far moved parameters may take one device from its own float32, in all gradients together. Three layers
# round about 90 times on the way to a gradient. Each error has a root mean square of 0.58 units of roundoff,
# 2^-8 in bf16: 0.022 in all. In eight bits a layer's products alone round eight operands by up to 2^-4 on the
# way there, and four times one by 2^-3 and one by 2^-4 on the way back: 0.33 in three layers. (Seen: 0.021 to
# 0.046 with the moves, and 0.24 to 0.34.)
FARTHEST = {"bf16": 0.1, "fp8": 0.7}


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: str | None = None
    chunks: int | None = None
    data: int = 1
    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    zero1: bool = False
    precision: str = "fp32"
    gradient_sum: str = "fp32"
    remat: str = "none"
    layer_loop: str | None = "keep"
    model: str = "two tables"
    microbatches: int = 1
    fold_experts: str = "none"
    expert_domains: int | None = None

    def __str__(self) -> str:
        told = [str(self.layout)]
        told += [f"{self.chunks} x {self.schedule}"] * bool(self.schedule) + ["zero1"] * self.zero1
        told += [self.precision, f"sum {self.gradient_sum}", self.remat]
        told += [self.layer_loop] if self.layer_loop else []
        told += [f"folded over {self.fold_experts}"] * (self.fold_experts != "none")
        told += [f"in {self.expert_domains} domains"] * bool(self.expert_domains)
        return "; ".join([*told, self.model, f"{self.microbatches} microbatches"])

    @property
    def layout(self) -> Layout:
        axes = {"stage": STAGES if self.schedule else 1, **{axis: getattr(self, axis) for axis in AXES}}
        return Layout(axes=tuple((axis, size) for axis, size in axes.items() if size > 1) or (("data", 1),))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The model's: three layers, which pad two stages and leave one over from groups of two.

        In a pipeline each chunk of a stage holds a whole group of blocks.
        """
        num_layers = 3
        if self.remat[-1].isdigit():
            group = int(self.remat[-1])
            num_layers = group * STAGES * self.chunks if self.chunks else max(3, group)
        sizes = (*{**MODELS, **OTHERS}[self.model], f"model.num_layers={num_layers}")
        chosen = 2 if self.precision == "fp32" else NUM_EXPERTS
        return (*sizes, f"model.experts_per_token={chosen}") if "experts" in self.model else sizes

    def overrides(self, sizes: tuple[str, ...]) -> list[str]:
        rows = SEQUENCES // self.layout.num_replicas // self.microbatches
        told = [*SIZES, *sizes, f"layout={self.layout}", f"batch.microbatch_sequences={rows}"]
        chosen = ("zero1", "precision", "gradient_sum", "remat", "fold_experts")
        told += [f"{name}={str(getattr(self, name)).lower()}" for name in chosen]
        told += [f"expert_domains={self.expert_domains}"] * bool(self.expert_domains)
        told += [f"pipeline={self.schedule}", f"pipeline_chunks={self.chunks}"] * bool(self.schedule)
        return [*told, *[f"layer_loop={self.layer_loop}"] * bool(self.layer_loop)]


def possible(choice: dict[str, object]) -> bool:
    """Whether some case has these values: the product accepts them, and they say something.

    What describes stages has values only with stages, and `layer_loop` only without. Of what takes long to
    compile, experts, groups of blocks and eight bits, a case has not all, with stages only one.
    """

    def any_of(name: str, *values: object) -> bool:
        return name not in choice or choice[name] in values

    staged = any_of("schedule", "1f1b", "gpipe") and any_of("chunks", 1, 2) and any_of("layer_loop", None)
    flat = any_of("schedule", None) and any_of("chunks", None) and any_of("layer_loop", "keep", "unroll")
    split = sum(choice.get(axis) == 2 for axis in AXES)
    has_groups = "every" in str(choice.get("remat"))
    num_slow = has_groups + ("experts" in str(choice.get("model"))) + (choice.get("precision") == "fp8")
    return (
        (staged or flat)
        and 2**split * (1 if flat else STAGES) <= MOST_DEVICES
        and (any_of("expert", 1) or any_of("model", "experts", "tied, experts"))
        and (any_of("gradient_sum", "fp32", "all-fp32") or any_of("precision", "bf16", "fp8"))
        and (any_of("chunks", None, 1) or any_of("microbatches", MICROBATCHES))
        and num_slow <= (2 if flat else 1)
        # ZeRO-1's copy of the parameters has the compute format, and so have its gradients.
        and (
            staged
            or any_of("zero1", False)
            or any_of("precision", "fp32")
            or any_of("gradient_sum", "fp32", "bf16")
        )
    )


Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs_of(choice: dict[str, object]) -> set[Pair]:
    return set(itertools.combinations(((name, choice[name]) for name in FACTORS if name in choice), 2))


def completed(choice: dict[str, object], wanted: set[Pair], order: list[str]) -> dict[str, object] | None:
    """Give the other factors values, each that which meets most wanted pairs; None if there is no case."""
    name = next((name for name in order if name not in choice), None)
    if name is None:
        return choice

    def met(value: object) -> int:
        ends = [((other, mine), (name, value)) for other, mine in choice.items()]
        return sum(pair in wanted or pair[::-1] in wanted for pair in ends)

    for value in sorted(reversed(FACTORS[name]), key=met, reverse=True):  # of equals the last
        longer = {**choice, name: value}
        if possible(longer) and (found := completed(longer, wanted, order)):
            return found
    return None


@functools.cache
def cover() -> tuple[tuple[Case, ...], frozenset[Pair]]:
    """Cases that hold every pair of values, the same in every process, and the pairs that no case holds."""
    names = list(FACTORS)
    left = {
        ((one, value), (other, its))
        for one, other in itertools.combinations(names, 2)
        for value, its in itertools.product(FACTORS[one], FACTORS[other])
    }
    draw, cases, refused = random.Random(0), [], set()
    while left:
        seed = dict(min(left, key=str))
        found = []
        for _ in range(20):
            order = draw.sample(names, len(names))
            found.append(completed(seed, left, order) if possible(seed) else None)
        best = max(found, key=lambda choice: len(pairs_of(choice) & left) if choice else 0)
        if best is None:
            refused.add(tuple(seed.items()))
            left.discard(tuple(seed.items()))
        else:
            cases.append(Case(**best))
            left -= pairs_of(best)
    return tuple(cases), frozenset(refused)


Found = tuple[np.ndarray, Any]  # the loss, and the tree of gradients
INITIAL = {}  # one device's initial parameters, by model


def laid(array: np.ndarray, like: jax.Array) -> jax.Array:
    """Put one device's parameter where a layout has it, with zeros in layers that pad its stages."""
    if array.size < np.prod(like.shape):
        padding = np.prod(like.shape) // np.prod(array.shape[1:]) - len(array)
        array = np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))
    return jax.device_put(array.reshape(like.shape), like.sharding)


def unlaid(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Take a gradient as one device has it from what a layout has: the padding has none."""
    layers = np.asarray(array).reshape(-1, *like.shape[1:])
    assert not layers[len(like) :].any()
    return layers[: len(like)]


@functools.lru_cache(maxsize=8)
def program(case: Case, sizes: tuple[str, ...]) -> tuple[RunConfig, TrainStep]:
    config = load_config("bytes-nano", case.overrides(sizes))
    check_layout(config, case.layout)
    return config, build_step(config, mesh_of(case.layout.axes, jax.devices()[: case.layout.num_devices]))


def trained(
    case: Case, sizes: tuple[str, ...], parameters: Any = None, rows: np.ndarray | None = None
) -> Found:
    """Return the loss of the first step, and its gradients: momentum begins with zeros.

    `parameters` are one device's initial ones unless told, `rows` those of the batch, in its order.
    """
    config, built = program(case, sizes)
    if config.model not in INITIAL:
        assert case.layout.num_devices == 1
        INITIAL[config.model] = jax.tree.map(np.array, built.init(np.uint32(0))["parameters"])
    first = INITIAL[config.model] if parameters is None else parameters
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), built.state)
    state["parameters"] = jax.tree.map(laid, first, built.state["parameters"])
    chosen = np.arange(SEQUENCES) if rows is None else rows
    batch = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(SEQUENCES, -1)[chosen].reshape(like.shape), like.sharding),
        open_data(config).batch(0, "train"),
        built.batch,
    )
    state, metrics = built.step(state, batch)
    gradients = jax.tree.map(unlaid, optax.tree.get(state["optimizer"], "trace"), first)
    return np.asarray(metrics["loss"]), gradients


def on_one_device(case: Case, precision: str) -> Case:
    """Return the same model on one device: with experts as many microbatches, whose balance each has."""
    microbatches = case.microbatches if "experts" in case.model else 1
    return Case(precision=precision, model=case.model, microbatches=microbatches)


@functools.cache
def exact(one: Case, sizes: tuple[str, ...]) -> Found:
    return trained(one, sizes)


@functools.cache
def rounded(one: Case, sizes: tuple[str, ...]) -> Rounding:
    """Return how far rounding takes one device in a narrow format from float32, and see that it is near."""
    wanted = exact(replace(one, precision="fp32"), sizes)  # first: it draws the parameters
    first = INITIAL[program(one, sizes)[0].model]
    found = rounding_of(lambda moved: trained(one, sizes, moved), first, wanted, one.precision)
    whole = np.linalg.norm([np.linalg.norm(gradient) for gradient in found.exact[1:]])
    assert np.linalg.norm(found.distances[1:]) <= FARTHEST[one.precision] * whole
    return found


TELLING = (
    {"chunks": 2, "zero1": True, "precision": "fp32"},
    {"schedule": None, "precision": "fp8", "model": "tied"},
    {"schedule": None, "gradient_sum": "bf16", "precision": "bf16", "model": "tied"},
    {"layer_loop": "unroll", "gradient_sum": "all-fp32", "precision": "fp32"},
)


def told(row: dict[str, object]) -> Case:
    """Return the first case that has these values."""
    return next(each for each in cover()[0] if row.items() <= asdict(each).items())


EVERY_TIME = TELLING[1:3]  # other tests below train these too, and `BESIDE` has stages and ZeRO-1


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """`make test` runs the first case that has the values of each row of `EVERY_TIME`.

    `make test-long` runs pipelines with groups of three and four blocks, which take longest to compile.
    """
    is_deep = case.schedule and case.remat in ("full-every-3", "full-every-4")
    return [] if case in map(told, EVERY_TIME) else [pytest.mark.long if is_deep else pytest.mark.wide]


STAGED = {"schedule": "1f1b", "chunks": 1, "layer_loop": None, "microbatches": MICROBATCHES}
BESIDE = (
    Case(model="experts, dense first", data=2, expert=2, zero1=True, **STAGED),
    Case(model="experts", data=2, expert=2, tensor=2, zero1=True, microbatches=4, fold_experts="tensor"),
    Case(model="experts", fsdp=2, context=2, tensor=2, microbatches=4, fold_experts="both"),
    Case(
        model="experts, dense first", context=2, expert=2, fold_experts="context", expert_domains=2, **STAGED
    ),
    Case(model="experts", data=2, expert=2, tensor=2, remat="dots", expert_domains=2, fold_experts="tensor"),
    Case(model="tied, experts, dense first", context=2, tensor=2, remat="full", **STAGED),
    Case(
        model="experts, dense first", fsdp=2, expert=2, **{**STAGED, "schedule": "gpipe", "microbatches": 1}
    ),
)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=marks_of(case)) for case in cover()[0]),
        *(pytest.param(case, marks=[pytest.mark.wide] if place else []) for place, case in enumerate(BESIDE)),
    ],
    ids=str,
)
def test_a_layout_trains_as_one_device_does(case):
    if case.precision != "fp32":
        bound = rounded(on_one_device(case, case.precision), case.sizes)
        assert not bound.strays(trained(case, case.sizes))
        return
    wanted, those_of_one = exact(on_one_device(case, "fp32"), case.sizes)
    loss, gradients = trained(case, case.sizes)
    assert loss == pytest.approx(wanted, rel=1e-5)
    largest = max(float(np.abs(gradient).max()) for gradient in jax.tree.leaves(those_of_one))
    for here, one in zip(*map(jax.tree.leaves, (gradients, those_of_one)), strict=True):
        np.testing.assert_allclose(here, one, rtol=0, atol=1e-5 * largest)


def reordered(tree: Any, order: np.ndarray) -> Any:
    """Give the MLP's hidden units other places, which changes nothing but the order of sums over them."""

    def one(path: tuple[Any, ...], x: np.ndarray) -> np.ndarray:
        name = path[-1].key
        if name == "down":
            return x[:, order]
        return x[..., order] if name in ("gate", "up", "gate_bias", "up_bias") else x

    return jax.tree_util.tree_map_with_path(one, tree)


@pytest.mark.once
@pytest.mark.parametrize("row", [TELLING[2], TELLING[1]], ids=["bf16", "fp8"])
def test_sums_in_another_order_use_less_than_three_quarters_of_what_rounding_can_do(row):
    """Sequences and hidden units change places: each microbatch, device and message sums other ones."""
    case = told(row)
    bound = rounded(on_one_device(case, case.precision), case.sizes)
    first = INITIAL[program(case, case.sizes)[0].model]
    for seed in range(6):
        draw = np.random.default_rng(seed)
        rows, order = draw.permutation(SEQUENCES), draw.permutation(64)
        loss, gradients = trained(case, case.sizes, reordered(first, order), rows)
        used = bound.used((loss, reordered(gradients, np.argsort(order))))
        assert max(used.values()) < 0.75, max(used.items(), key=lambda each: each[1])


@pytest.mark.once
@pytest.mark.parametrize(("row", "devices"), [(TELLING[2], 8), (TELLING[1], 2)], ids=["bf16", "fp8"])
def test_a_share_that_a_device_left_out_is_farther_than_rounding_goes(row, devices):
    """Of one parameter's gradient, in bf16 one device's of eight; in eight bits one of two, of matrices."""
    case = told(row)
    one = on_one_device(case, case.precision)
    bound, found = rounded(one, case.sizes), trained(case, case.sizes)
    rows = np.tile(np.arange(SEQUENCES // devices), devices)
    _, left_out = trained(replace(one, precision="fp32"), case.sizes, rows=rows)
    leaves, tree = jax.tree.flatten(found)
    for place, share in enumerate(jax.tree.leaves(left_out), start=1):
        if case.precision == "fp8" and ("bias" in bound.names[place] or "norm" in bound.names[place]):
            continue  # eight bits leave half of some of these vectors
        for wrong in (leaves[place] - share / devices, 2 * leaves[place]):
            planted = jax.tree.unflatten(tree, [*leaves[:place], wrong, *leaves[place + 1 :]])
            assert list(bound.strays(planted)) == [bound.names[place]]


def test_the_cover_holds_every_pair_of_values_but_those_of_which_no_case_is_accepted():
    cases, refused = cover()
    assert len(cases) <= 40
    every = {
        ((one, value), (other, its))
        for one, other in itertools.combinations(FACTORS, 2)
        for value, its in itertools.product(FACTORS[one], FACTORS[other])
    }
    met = set().union(*(pairs_of(asdict(case)) for case in cases))
    of_stages = {"schedule", "chunks", "layer_loop"}
    no_choice = {pair for pair in every - met if {name for name, _ in pair} <= of_stages}
    assert every - met == refused
    assert refused - no_choice == {
        *((("expert", 2), ("model", model)) for model in ("tied", "two tables")),
        (("precision", "fp32"), ("gradient_sum", "bf16")),
        (("chunks", 2), ("microbatches", 1)),
    }


@pytest.mark.parametrize(
    ("case", "key"),
    [
        (Case(expert=2), "'expert' splits experts"),
        (Case(gradient_sum="bf16"), "gradient_sum"),
        (Case(schedule="1f1b", chunks=2, layer_loop=None), "pipeline_chunks = 2"),
        (Case(zero1=True, precision="bf16", gradient_sum="all-fp32"), "under zero1 without stages"),
    ],
)
def test_what_the_cover_leaves_out_is_refused_in_words(case, key):
    with pytest.raises(InputError, match=key):
        check_layout(load_config("bytes-nano", case.overrides(case.sizes)), case.layout)
