"""The same training on every layout: each axis alone and combinations, on eight devices against one.

The same initial parameters bitwise; losses and gradients within 1e-5 of the largest gradient in float32. In
bfloat16 they are as near to one device's in float32 as tests/rounding.py says that rounding leaves them.
There every expert is chosen, since rounding decides between two that are nearly as good. All products have
biases, beside experts those of queries, keys and values. Every layout meets both models, both formats,
rematerialisation or none, and accumulation or none, and every two of those meet too: a pairwise cover. Each
of the four key-value heads serves two devices where `tensor` has eight, and wherever there is `tensor`, a
vocabulary of 61 is padded. Layouts take the policies of rematerialisation in turn, so that each policy meets
every axis. `make test` runs a case of `tensor` and one of `expert` in float32 (`data` and `fsdp` are in
tests/step/test_build.py, `context` in tests/contrib/context_attention, stages in tests/contrib/pipelines,
other formats in tests/test_layouts_of_options.py), `make test-wide` the rest of the cover, `make test-long`
all combinations. One device's program is compiled for each model and format only:
rematerialisation changes no number, and accumulation none either where there are no experts, whose balance is
that of a microbatch.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from meshwright.config import Layout, RunConfig, check_layout, load_config, resolve_batch
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.step import TrainStep, build_step
from tests.rounding import Rounding, rounding_of

pytestmark = pytest.mark.quick

SEQUENCES, MICROBATCHES = 32, 4
MODEL = ("data.source=synthetic", "model.embed_dim=64", "model.num_heads=8")
MODEL += ("model.num_kv_heads=4", "model.mlp_dim=128", "model.vocab_size=61", "batch.sequence_length=32")
# Momentum from zero: after one step its trace is the gradient.
MODEL += (
    f"batch.sequences={SEQUENCES}",
    "optimizer.kind=sgd",
    "optimizer.momentum=0.9",
    "optimizer.clip_norm=none",
)
EXPERTS = ("model.num_experts=8", "model.balancing_loss=0.01", "model.qkv_bias=true")
DENSE = ("model.bias=true",)
LAYOUTS = (
    "data=8",
    "fsdp=8",
    "tensor=8",
    "context=8",
    "stage=8",
    "data=2,fsdp=4",
    "fsdp=2,tensor=4",
    "data=2,fsdp=2,tensor=2",
    "data=2,context=4",
    "fsdp=2,context=2,tensor=2",
    "stage=2,data=4",
    "stage=2,fsdp=2,tensor=2",
    "stage=4,context=2",
    "stage=2,data=2,context=2",
    "stage=2,context=2,tensor=2",
)
FIRST = ("tensor=8", "expert=8")
WITH_EXPERTS = (
    "expert=8",
    "data=2,expert=4",
    "fsdp=2,expert=2,tensor=2",
    "expert=4,context=2",
    "stage=2,expert=4",
)


POLICIES = ("full", "alternate-dots", "full-every-2")


@dataclass(frozen=True)
class Case:
    layout: str
    experts: bool
    bf16: bool
    remat: bool
    accumulates: bool
    num_layers: int = 2  # each stage needs one
    exact: bool = False  # the case of bfloat16 in float32

    def __str__(self) -> str:
        words = [self.layout]
        words += [name for name in ("experts", "bf16", "remat", "accumulates") if getattr(self, name)]
        return "-".join(words)

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 and not self.exact else "fp32"

    def overrides(self, replicas: int) -> tuple[str, ...]:
        remat = policy_of(self.layout) if self.remat else "none"
        told = (
            *MODEL,
            f"model.num_layers={self.num_layers}",
            f"remat={remat}",
            f"precision={self.precision}",
        )
        if self.experts:
            told += (*EXPERTS, f"model.experts_per_token={8 if self.bf16 else 2}")
        else:
            told += DENSE
        rows = SEQUENCES // replicas // MICROBATCHES
        return (*told, f"batch.microbatch_sequences={rows}") if self.accumulates else told


def everything() -> list[Case]:
    choices = itertools.product([False, True], repeat=3)
    return [
        Case(layout, experts, *choice, num_layers(layout))
        for choice in choices
        for layout, experts in [
            *itertools.product(LAYOUTS, [False, True]),
            *((layout, True) for layout in WITH_EXPERTS),
        ]
    ]


def policy_of(layout: str) -> str:
    return POLICIES[(*LAYOUTS, *WITH_EXPERTS).index(layout) % len(POLICIES)]


def num_layers(layout: str) -> int:
    each = 2 if policy_of(layout) == "full-every-2" else 1
    return max(2, Layout.parse(layout).size("stage") * each)


def cover() -> set[Case]:
    """For each layout one choice of everything else, and its opposite."""
    patterns = list(itertools.product([False, True], repeat=3))
    cases = set()
    for number, layout in enumerate((*LAYOUTS, *WITH_EXPERTS)):
        pattern = patterns[number % len(patterns)]
        opposite = tuple(not choice for choice in pattern)
        depth = num_layers(layout)
        cases |= {Case(layout, layout in WITH_EXPERTS, *pattern, depth), Case(layout, True, *opposite, depth)}
    return cases


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    if case not in cover():
        return [pytest.mark.long]
    alone = case.experts == (case.layout in WITH_EXPERTS)
    if case.layout in FIRST and alone and not case.bf16:
        return []
    # Of a layout without an axis for experts `make test-wide` runs one choice, with experts or without.
    one = case.layout in WITH_EXPERTS or alone == (case.layout in LAYOUTS[::2])
    return [pytest.mark.wide if one else pytest.mark.long]


@functools.lru_cache(maxsize=8)
def program(case: Case) -> tuple[RunConfig, TrainStep]:
    layout = Layout.parse(case.layout)
    replicas = 1
    for axis in ("data", "fsdp", "expert"):
        replicas *= layout.size(axis)
    config = resolve_batch(load_config("bytes-nano", case.overrides(replicas)), layout)
    check_layout(config, layout)
    return config, build_step(config, mesh_of(layout.axes, jax.devices()[: layout.num_devices]))


def drawn(case: Case) -> Any:
    """Return the initial parameters that the layout's own program draws."""
    return jax.tree.map(np.array, program(case)[1].init(np.uint32(0))["parameters"])


def trained(case: Case, parameters: Any) -> tuple[np.ndarray, Any]:
    """Return the loss of the first step from these parameters, and its gradients."""
    config, built = program(case)
    # Momentum begins with zeros.
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), built.state)
    state["parameters"] = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), parameters, built.state["parameters"]
    )
    batch = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding),
        open_data(config).batch(0, "train"),
        built.batch,
    )
    state, metrics = built.step(state, batch)
    gradients = jax.tree.map(np.array, optax.tree.get(state["optimizer"], "trace"))
    return np.asarray(metrics["loss"]), gradients


@functools.cache
def on_one_device(case: Case) -> tuple[Any, tuple[np.ndarray, Any]]:
    """Return the initial parameters, and what one device makes of them in float32."""
    parameters = drawn(case)
    return parameters, trained(case, parameters)


@functools.cache
def rounded(alone: Case) -> Rounding:
    parameters, wanted = on_one_device(replace(alone, exact=True))
    return rounding_of(functools.partial(trained, alone), parameters, wanted, "bf16")


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks_of(case)) for case in everything()], ids=str)
def test_a_layout_trains_as_one_device_does(case):
    alone = Case("data=1", case.experts, case.bf16, False, case.accumulates and case.experts, case.num_layers)
    initial, (loss, gradients) = on_one_device(replace(alone, exact=alone.bf16))
    # Those in `make test` have parameters that tests/step/test_build.py draws on layouts too.
    if case.layout not in FIRST:
        jax.tree.map(np.testing.assert_array_equal, drawn(case), initial)
    loss_here, gradients_here = found = trained(case, initial)
    if case.bf16:
        assert not rounded(alone).strays(found)
        return
    largest = max(float(np.abs(gradient).max()) for gradient in jax.tree.leaves(gradients))
    assert loss_here == pytest.approx(loss, rel=1e-5)
    for one, here in zip(*map(jax.tree.leaves, (gradients, gradients_here)), strict=True):
        np.testing.assert_allclose(here, one, rtol=0, atol=1e-5 * largest)


def test_every_policy_of_rematerialisation_meets_every_axis_in_the_cover():
    met = {
        (policy_of(case.layout), axis)
        for case in cover()
        for axis, _ in Layout.parse(case.layout).axes
        if case.remat
    }
    axes = ("stage", "data", "fsdp", "context", "expert", "tensor")
    assert met == set(itertools.product(POLICIES, axes))


def test_the_cover_is_pairwise_and_small():
    cases = cover()
    assert len(cases) <= 40
    factors = ("layout", "experts", "bf16", "remat", "accumulates")
    for one, other in itertools.combinations(factors, 2):
        pairs = {(getattr(case, one), getattr(case, other)) for case in everything()}
        met = {(getattr(case, one), getattr(case, other)) for case in cases}
        assert met == pairs, (one, other)
