"""Loss and gradients through stages against one device; what the compiled pipeline sends and keeps."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.config import load_config, padded_layers
from meshwright.contrib.pipelines import AXIS, Pipeline, gather_positions, own_positions, scatter_positions
from meshwright.sharding import activation_spec, mesh_here, parameter_spec, replica_axes
from meshwright.trainer.models import Context, initial_parameters, is_parameter, model_of
from meshwright.trainer.models.loss import LEFT_OUT
from meshwright.trainer.step import FORMATS, build_step, gradients_of, only_axes, spec_in_step
from meshwright.trainer.step._build import declarations
from meshwright.trainer.step._gradients import sum_formats
from tests.rounding import rounding_of

pytestmark = pytest.mark.quick

# Loss and gradients through stages against one device; what the compiled pipeline sends and keeps.


TINY = ("data.source=synthetic", "model.num_layers=4", "model.num_kv_heads=4", "model.embed_dim=16")
TINY += ("model.mlp_dim=32", "model.vocab_size=64", "batch.sequence_length=16", "model.loss_chunk=16")
GPT = ("model.norm=layer", "model.bias=true", "model.mlp=plain", "model.position=learned")
GPT += ("model.rope_theta=none", "model.max_positions=16", "model.tied_embeddings=true")
ROWS = 4


class Run:
    """A tiny model, a batch of it, and the two ways to its gradients."""

    def __init__(self, num_microbatches, *overrides, packed=False):
        self.config = load_config("bytes-nano", (*TINY, "precision=fp32", *overrides))
        self.model = model_of(self.config.model)
        self.declared = self.model.parameters()
        self.parameters = jax.jit(lambda: initial_parameters(self.declared, jax.random.key(0)))()
        shape = (num_microbatches, ROWS, 17)
        self.batch = {"tokens": jax.random.randint(jax.random.key(1), shape, 0, 64)}
        if packed:
            breaks = jax.random.bernoulli(jax.random.key(2), 0.2, shape)
            self.batch["segments"] = jnp.cumsum(breaks, axis=-1, dtype=jnp.int32)
        self.key = jax.random.key(3)

    def context_of(self, mesh, key):
        return Context(
            mesh=mesh_here(mesh),
            dtype=FORMATS[self.config.precision],
            platform="cpu",
            remat=self.config.remat,
            dropout_key=key,
            training=key is not None,
        )

    def alone(self, mesh):
        """On one device, microbatch by microbatch."""
        return self.on_one_device(mesh)(self.parameters)

    def on_one_device(self, mesh):
        """What one device makes of parameters."""

        def loss(parameters, state, batch, key):
            return self.model.loss(parameters, state, batch, self.context_of(mesh, key))

        whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), self.parameters)
        found = jax.jit(lambda p, b: gradients_of(loss, whole, p, {}, b, self.key))
        return lambda parameters: found(parameters, self.batch)[::2]

    def staged(self, mesh):
        """The declarations over stages: with padding, and in chunks."""
        return declarations(self.config, self.model, mesh.shape[AXIS])[1]

    def laid(self, mesh):
        staged = self.staged(mesh)
        return jax.tree.map(
            lambda p: NamedSharding(mesh, parameter_spec(p.dims, mesh)), staged, is_leaf=is_parameter
        )

    def specs(self, mesh):
        return jax.tree.map(
            lambda p: only_axes(spec_in_step(p, mesh, False, in_step=True), (AXIS, *replica_axes(mesh))),
            self.staged(mesh),
            is_leaf=is_parameter,
        )

    def over_stages(self, mesh):
        """The parameters, with whatever in the padding: nothing may come of it."""

        def one(declared, x):
            if x.size == np.prod(declared.shape):
                return x.reshape(declared.shape)
            padding = np.prod(declared.shape) // np.prod(x.shape[1:]) - x.shape[0]
            return jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=0.1).reshape(
                declared.shape
            )

        return jax.tree.map(one, self.staged(mesh), self.parameters, is_leaf=is_parameter)

    def pipeline(self, mesh):
        return Pipeline(
            model=self.model,
            schedule=self.config.pipeline,
            num_chunks=self.config.pipeline_chunks,
            num_layers=self.config.model.num_layers,
            num_padded_layers=padded_layers(self.config, mesh.shape[AXIS]),
            context_of=functools.partial(self.context_of, mesh),
            shardings=self.laid(mesh),
            axes=replica_axes(mesh),
            specs=self.specs(mesh),
            formats=sum_formats(self.staged(mesh), self.config.gradient_sum),
        )

    def compiled(self, mesh):
        """The pipeline's loss and gradients, compiled, with their arguments."""
        rows = NamedSharding(mesh, activation_spec(("microbatch", "batch"), mesh))
        arguments = jax.device_put(self.over_stages(mesh), self.laid(mesh)), jax.device_put(self.batch, rows)
        found = jax.jit(
            lambda p, b: self.pipeline(mesh).scaled_gradients({"parameters": p}, b, self.key)[::2],
            out_shardings=(NamedSharding(mesh, PartitionSpec()), self.laid(mesh)),
        )
        return found.lower(*arguments).compile(), arguments


@pytest.fixture(scope="module")
def run_of():
    return functools.cache(Run)


@pytest.fixture(scope="module")
def alone():
    return functools.cache(lambda run, mesh: run.alone(mesh))


@pytest.mark.wide
def test_experts_are_balanced_over_all_stages_and_their_figures_shown(mesh):
    experts = ("model.num_experts=4", "model.experts_per_token=2", "model.balancing_loss=0.1")
    config = load_config("bytes-nano", (*TINY, *experts, "precision=fp32", "batch.microbatch_sequences=2"))
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"sequences": 16})})
    metrics, states, held_out, start = [], [], [], None
    for axes in ({}, {"stage": 2, "data": 2, "expert": 2}):
        whole = {"microbatch_sequences": 2 if axes else 8}
        config = config.model_copy(update={"batch": config.batch.model_copy(update=whole)})
        built = build_step(config, mesh(**axes))
        start = start or jax.tree.map(np.asarray, built.init(np.uint32(0)))
        state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), start, built.state)
        tokens = np.random.default_rng(0).integers(0, 64, built.batch["tokens"].shape, np.int32)
        batch = {"tokens": jax.device_put(tokens, built.batch["tokens"].sharding)}
        held_out.append(jax.tree.map(float, built.evaluate(state["parameters"], {}, batch)))
        state, found = built.step(state, batch)
        metrics.append(jax.tree.map(float, found))
        states.append(state["parameters"])
    assert {"balancing_loss", "expert_load", "dropped"} < metrics[0].keys()
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
    assert worst(*states) < 1e-4


def worst(mine, theirs):
    """The largest difference of two trees, over the largest number."""
    pairs = list(zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True))
    largest = max(float(jnp.abs(b).max()) for _, b in pairs)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs) / largest


def of_layers(gradient, like):
    """The gradient with the layers of all chunks in one dim, less the padding, whose gradient is zero."""

    def one(path, x, like):
        if "layers" not in jax.tree_util.keystr(path):
            return x
        every = np.asarray(x).reshape(-1, *like.shape[1:])
        assert not every[len(like) :].any()
        return every[: len(like)]

    return jax.tree_util.tree_map_with_path(one, gradient, like)


STAGE_DATA_TENSOR = {"stage": 2, "data": 2, "tensor": 2}
STAGE_FSDP_TENSOR = {"stage": 2, "fsdp": 2, "tensor": 2}
FOUR_FSDP = {"stage": 4, "fsdp": 2}
DROPOUT = ("model.dropout=0.2",)
EIGHT = ("model.num_layers=8",)
TWO_WINDOWS = ("model.num_layers=8", "model.window=4", "model.global_every=2")
KINDS = ("model.num_layers=12", "model.layer_pattern=attention+mlp mlp attention", "remat=dots")
TWO, FOUR = ("pipeline_chunks=2",), ("pipeline_chunks=4",)
WIDE, LONG = pytest.mark.wide, pytest.mark.long
# The axes, the microbatches, what changes the model, and what changes none of its numbers.
CASES = [
    pytest.param(
        *({"stage": 4}, 2, KINDS, ("pipeline=gpipe",)),
        id="four stages, gpipe, fewer microbatches than stages, layers of several kinds",
    ),
    pytest.param({"stage": 4}, 8, (), ("pipeline=gpipe", "remat=full"), id="four stages, gpipe", marks=WIDE),
    pytest.param({"stage": 4}, 2, (), ("remat=none",), id="fewer microbatches than stages", marks=WIDE),
    pytest.param(STAGE_FSDP_TENSOR, 8, GPT, ("remat=full",), id="fsdp and tensor, as GPT-2", marks=WIDE),
    pytest.param({"stage": 2, "fsdp": 2}, 4, DROPOUT, ("remat=none",), id="fsdp, dropout", marks=LONG),
    pytest.param(FOUR_FSDP, 8, DROPOUT, ("remat=none",), id="four stages, fsdp, dropout", marks=WIDE),
    pytest.param({"stage": 2, "data": 2, "tensor": 2}, 4, GPT, TWO, id="two chunks, data, tensor, as GPT-2"),
    pytest.param(
        {"stage": 4, "fsdp": 2}, 8, (*EIGHT, *DROPOUT), TWO, id="two chunks, fsdp, dropout", marks=LONG
    ),
    pytest.param({"stage": 2}, 6, TWO_WINDOWS, TWO, id="two chunks of two windows", marks=LONG),
    pytest.param(
        *({"stage": 4}, 4, ("model.num_layers=5",), TWO),
        id="two chunks, five layers over four stages",
        marks=WIDE,
    ),
    pytest.param({"stage": 2}, 4, ("model.num_layers=3",), (), id="three layers over two stages", marks=LONG),
    pytest.param({"stage": 2}, 2, EIGHT, FOUR, id="four chunks, one group", marks=LONG),
    pytest.param({"stage": 2}, 2, KINDS, (), id="layers of several kinds", marks=WIDE),
    pytest.param({"stage": 2, "fsdp": 2}, 4, KINDS, TWO, id="two chunks, several kinds", marks=LONG),
    pytest.param(
        *({"stage": 4}, 4, ("model.num_layers=6",), ("remat=full-every-2",)),
        id="six layers over four stages, every second block repeated",
        marks=WIDE,
    ),
    pytest.param(
        *({"stage": 2}, 4, EIGHT, (*TWO, "remat=full-every-2")),
        id="two chunks, every second block repeated",
        marks=LONG,
    ),
    pytest.param(
        {"stage": 2, "data": 2}, 6, EIGHT, (*TWO, "pipeline=gpipe"), id="two chunks, gpipe", marks=LONG
    ),
    pytest.param({"stage": 2, "context": 2, "tensor": 2}, 4, (), TWO, id="two chunks, context", marks=LONG),
    pytest.param(
        {"stage": 3, "tensor": 2},
        3,
        ("model.num_layers=3", "model.vocab_size=66"),
        (),
        id="uneven",
        marks=WIDE,
    ),
    pytest.param({"stage": 2}, 8, (), (), id="two stages", marks=LONG),
    pytest.param(STAGE_DATA_TENSOR, 8, (), ("pipeline=gpipe",), id="data and tensor, gpipe", marks=LONG),
    pytest.param({"stage": 2, "context": 2, "tensor": 2}, 8, (), (), id="context and tensor", marks=LONG),
    pytest.param(STAGE_DATA_TENSOR, 8, (), ("remat=none",), id="data and tensor", marks=LONG),
    pytest.param(STAGE_FSDP_TENSOR, 4, (), ("pipeline=gpipe",), id="fsdp, gpipe", marks=LONG),
    pytest.param(FOUR_FSDP, 4, (), ("remat=full",), id="four and fsdp", marks=LONG),
]


@pytest.mark.once
@pytest.mark.parametrize(("axes", "num_microbatches", "model", "more"), CASES)
def test_loss_and_gradients_are_those_of_one_device(axes, num_microbatches, model, more, mesh, run_of, alone):
    value, gradient = alone(run_of(num_microbatches, *model), mesh())
    step, arguments = run_of(num_microbatches, *model, *more).compiled(mesh(**axes))
    found, through_stages = step(*arguments)
    assert float(found) == pytest.approx(float(value), rel=1e-5)
    assert worst(of_layers(through_stages, gradient), gradient) < 1e-5


@pytest.mark.once
@pytest.mark.parametrize(
    ("axes", "more"),
    [
        ({"stage": 2, "data": 2}, ("precision=bf16",)),
        pytest.param({"stage": 2, "data": 2, "context": 2}, (*GPT, *DROPOUT), marks=LONG),
        pytest.param({"stage": 2, "context": 2, "tensor": 2}, ("pipeline=gpipe",), marks=WIDE),
    ],
    ids=str,
)
def test_documents_in_a_window_are_as_on_one_device(axes, more, mesh):
    run = Run(4, *more, packed=True)
    step, arguments = run.compiled(mesh(**axes))
    found, through_stages = step(*arguments)
    if "precision=bf16" in more:
        exact = Run(4, packed=True).alone(mesh())
        bound = rounding_of(run.on_one_device(mesh()), run.parameters, exact, "bf16")
        assert not bound.strays((found, through_stages))
        return
    value, gradient = run.alone(mesh())
    assert float(found) == pytest.approx(float(value), rel=1e-5)
    assert worst(through_stages, gradient) < 1e-5


@pytest.mark.parametrize(
    "layout", [{"stage": 2}, pytest.param({"stage": 2, "context": 2}, marks=LONG)], ids=str
)
def test_the_step_the_held_out_loss_and_the_inspection_go_through_stages_too(layout, mesh):
    """Under fp16, so that the loss scale goes along."""
    config = load_config("bytes-nano", (*TINY, "precision=fp16", "batch.microbatch_sequences=2"))
    metrics, states, start = [], [], None
    for axes in ({}, layout):
        built = build_step(config, mesh(**axes))
        drawn = jax.tree.map(np.asarray, built.init(np.uint32(0)))
        start = start or drawn
        jax.tree.map(np.testing.assert_array_equal, drawn, start)
        state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), start, built.state)
        tokens = np.random.default_rng(0).integers(0, 64, built.batch["tokens"].shape, np.int32)
        batch = {"tokens": jax.device_put(tokens, built.batch["tokens"].sharding)}
        held_out = built.evaluate(state["parameters"], {}, batch)["loss"]
        if axes:
            bad = jax.tree.map(int, built.inspect(state, batch))
            assert all(count == 0 for count in jax.tree.leaves(bad))
        state, found = built.step(state, batch)
        metrics.append({"held out": float(held_out), **jax.tree.map(float, found)})
        states.append(state["parameters"])
    assert metrics[1] == pytest.approx(metrics[0], rel=2e-3)
    assert metrics[1]["loss_scale"] > 1
    assert worst(*states) < 2e-2


@pytest.mark.wide
@pytest.mark.program
def test_what_1f1b_keeps_does_not_grow_with_the_microbatches_and_what_gpipe_keeps_does(mesh):
    held = {
        (schedule, number): Run(number, f"pipeline={schedule}").compiled(mesh(stage=2))[0]
        for schedule in ("1f1b", "gpipe")
        for number in (8, 32)
    }
    temporary = {case: step.memory_analysis().temp_size_in_bytes for case, step in held.items()}
    # The copy of the batch's tokens, which the CPU makes for each loop, does.
    tokens = 3 * (32 - 8) * ROWS * 17 * 4
    assert temporary["1f1b", 32] - temporary["1f1b", 8] <= tokens
    assert (
        temporary["gpipe", 32] - temporary["gpipe", 8] > 24 * 4 * ROWS * 16 * 32
    )  # at least the MLP's product


@pytest.mark.program
@pytest.mark.parametrize(
    ("stages", "chunks", "schedule", "slots"),
    [
        (2, 1, "1f1b", 4),
        pytest.param(2, 2, "1f1b", 5, marks=WIDE),
        pytest.param(2, 2, "gpipe", 17, marks=LONG),
    ],
)
def test_the_compiled_pipeline_has_as_many_slots_as_the_closed_form(stages, chunks, schedule, slots, mesh):
    """(V + 1) S of a chunk, one less if a chunk is one layer; under gpipe V M, and one for dropped passes."""
    run = Run(8, f"pipeline={schedule}", f"pipeline_chunks={chunks}")
    groups = 4 // stages // chunks
    text = run.compiled(mesh(stage=stages))[0].as_text()
    found = re.findall(rf"f32\[(\d+),{groups},{ROWS},16,32\]", text)
    assert max(map(int, found)) == slots  # others are parts of it


def test_a_weighed_pipeline_sends_and_executes_what_is_counted_by_hand():
    """L layers in S stages, M microbatches of R rows: 16 rows of 16 positions of 16 numbers in fp32."""
    overrides = (*TINY, "precision=fp32", "remat=full", "batch.sequences=16", "batch.microbatch_sequences=2")
    alone = mw.weigh("bytes-nano", on="1xCPU", overrides=overrides).ledger.flops
    weighed = mw.weigh("bytes-nano", on="4xCPU", layout="stage=4", overrides=overrides)
    flops, ticks = weighed.ledger.flops, weighed.pipeline
    assert (ticks.num_stages, ticks.num_microbatches) == (4, 8)
    assert flops.model == alone.model
    assert flops.executed - flops.bubble == alone.executed
    # Every stage runs its layers, forward, again and backward, in 11 passes of which 8 have a microbatch.
    head = 6 * 16 * 16 * 16 * 64
    assert flops.bubble / (flops.executed - head) == pytest.approx(3 / 11)
    traffic = weighed.ledger.traffic
    assert {item.axes for item in traffic} == {("stage",)}

    def paid(kind):
        return sum(item.payload_bytes for item in traffic if item.kind == kind)

    passes, activation = 8 + 4 - 1, 2 * 16 * 16 * 4
    assert paid("collective-permute") == 2 * passes * activation
    # For the head a stage is sent a quarter of each microbatch, and gathers the gradients. The head itself is
    # gathered when the step begins, and its gradient is scattered at the end.
    table = 64 * 16 * 4
    assert (paid("reduce-scatter"), paid("all-gather")) == (
        (8 * activation + table) / 4,
        8 * activation + table,
    )
    # Stages add the rows of the embedding that each has found, and the gradients of its output: in each tick,
    # once before and once after. The final norm has 16 numbers, and the rest are scalars.
    assert paid("all-reduce") == pytest.approx(2 * (passes + 1) * activation + 16 * 4, abs=128)


@pytest.mark.wide
def test_a_pipeline_sums_gradients_over_context_once_a_step():
    """However many ticks it has; in them only keys and values are gathered, and their gradients scattered."""
    overrides = (*TINY, "precision=fp32", "batch.sequences=8", "batch.microbatch_sequences=1")
    weighed = mw.weigh("bytes-nano", on="8xH100", layout="stage=2,context=4", overrides=overrides)
    over = [each for each in weighed.ledger.traffic if "context" in each.axes]
    in_loops = {(each.kind, each.axes) for each in over if each.in_loop}
    assert in_loops == {("all-gather", ("context",)), ("reduce-scatter", ("context",))}
    outside = sum(each.payload_bytes for each in over if not each.in_loop)
    num_layers, tables = 4 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) // 2, 2 * 64 * 16 // 2 + 16  # of a stage
    scalars = 64
    assert outside == pytest.approx(4 * (num_layers + tables), abs=scalars)


# What each stage judges: its positions of what the last stage holds, beside the targets of the same.


NUM_ROWS, LENGTH, WIDTH = 2, 16, 4


@pytest.mark.parametrize(
    "axes",
    [
        {"stage": 2},
        {"stage": 4, "tensor": 2},
        {"stage": 2, "context": 2, "tensor": 2},
        {"stage": 2, "fsdp": 2},
        {"stage": 3, "tensor": 2},  # 8 positions a device: 3 for each stage, one of them filled
    ],
    ids=str,
)
def test_positions_and_their_targets_go_together_and_come_back_whole(axes, mesh):
    where = mesh(**axes)
    numbers = jnp.arange(NUM_ROWS * LENGTH, dtype=jnp.int32).reshape(NUM_ROWS, LENGTH)

    def stage(numbers):
        here, is_last = jax.sharding.get_abstract_mesh(), jax.lax.axis_index(AXIS) == axes[AXIS] - 1
        held = jnp.repeat(numbers[:, :, None], WIDTH, axis=2).astype(jnp.float32)
        share = scatter_positions(
            jnp.where(is_last, held, jnp.nan), here
        )  # what the others hold does not count
        whole = gather_positions(share, LENGTH, here)
        return share[None], own_positions(numbers, here)[None], whole[None]

    each = jax.shard_map(
        stage,
        mesh=where,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(AXIS),
        axis_names={AXIS},
        check_vma=False,
    )
    shares, targets, back = jax.jit(each)(numbers)
    tensor = axes.get("tensor", 1)
    held = math.ceil(LENGTH / tensor / axes[AXIS]) * tensor
    assert shares.shape == (axes[AXIS], NUM_ROWS, held, WIDTH)
    held = np.where(targets == LEFT_OUT, 0, targets)
    np.testing.assert_array_equal(shares, np.repeat(held[..., None], WIDTH, axis=3))
    judged = np.ravel(targets)
    assert sorted(judged[judged != LEFT_OUT]) == list(range(NUM_ROWS * LENGTH))  # each position once
    for whole in back:
        np.testing.assert_array_equal(whole[:, :, 0], numbers)
