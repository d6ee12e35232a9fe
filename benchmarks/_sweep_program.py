"""Model what the programs of public layout sweeps do otherwise than ours: stacks over `plan`'s estimates.
The planner's closed form (`meshwright.planning.Form`) prices a group's candidates: products, attention,
collectives, memory passes, with the rates of `meshwright.predict`. A stack keeps its products and
attention, and replaces or adds what another program does otherwise: kernels of its own, where the head is,
how stages are filled, which messages wait. What is counted is read in that program's source. A constant
that was read off the 3B rows of the sweep is called *fitted* in `SOURCES`; no other number here was chosen
in sight of a row.

`SWEEP` is nanotron: 1F1B without interleaving, tensor parallelism with sequence-sharded norms and
asynchronous collectives, gradients summed in fp32 and all-reduced once a step, ZeRO-0 or 1, eager kernels,
no rematerialisation. `MEGATRON` is Megatron-DeepSpeed on A100 with full recomputation. Ranks: tensor
innermost, then data, then stages (nanotron's `parallel/context.py`), as ours by default.

Memory is in `_sweep_memory.py`. Not counted: noise; what makes a third of the runs with stages over hosts
wait is not known, and counts as a risk (`Stacked.risk`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.config import AXES
from meshwright.planning import Form
from meshwright.predict import shared

Numbers = NDArray[np.float64]
DATA, STAGE, TENSOR = AXES.index("data"), AXES.index("stage"), AXES.index("tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a decoder with as many key-value heads as heads."""

    name: str
    num_layers: int
    width: int
    mlp: int
    num_heads: int
    vocabulary: int = 131_072
    sequence: int = 4096
    gated: bool = True
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """The weights of one layer's matrices, which nanotron's stage rule takes as the layer's cost."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def head_parameters(self) -> int:
        """The weights of the output projection, and as many of the embedding."""
        return self.vocabulary * self.width

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's products: qkv, attention's output, MLP's input and output."""
        wide = self.mlp * (2 if self.gated else 1)
        return (
            (self.width, 3 * self.width),
            (self.width, self.width),
            (self.width, wide),
            (self.mlp, self.width),
        )


# The sweep's script ties embedding and head where the MLP is narrower than 10,000
# (nanotron, scripts/scaling_benchmarks.py).
MODELS = {
    shape.name: shape
    for shape in (
        Shape(name="1B", num_layers=16, width=2048, mlp=8192, num_heads=32, tied=True),
        Shape(name="3B", num_layers=28, width=3072, mlp=8192, num_heads=32, tied=True),
        Shape(name="8B", num_layers=32, width=4096, mlp=14336, num_heads=32),
        Shape(name="80B", num_layers=80, width=8192, mlp=28672, num_heads=64),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The habits and constants of one training program; defaults: nanotron. `SOURCES` names the sources."""

    chip: str = "H100"
    precision: str = "bf16"
    attention_kernel: str = "flash-2"
    recompute: bool = False
    sequence_sharded: bool = True
    uneven_stages: bool = True
    products: float = shared().eager_products_share
    overlapped_reduction: bool = True
    width_bytes: float = 108.0
    whole_width_bytes: float = 0.0
    mlp_bytes: float = 36.0
    gradient_bytes: float = 10.0
    logit_bytes: float = 46.0
    optimizer_bytes: float = 16.0
    sharded_optimizer_bytes: float = 30.0
    reduced_bytes: float = 4.0
    bucket_bytes: float = 25 * 2**20
    hidden_share: float = 2 / 3
    hop_inside_seconds: float = 3.4e-6
    hop_between_seconds: float = 14e-6
    host_layer_seconds: float = 2.7e-3
    tensor_hop_seconds: float = 54e-6
    message_seconds: float = 60e-6
    host_tensor_seconds: float = 1.8e-3
    host_tensor_stage_seconds: float = 2.4e-3
    tensor_seconds: float = 0.5e-3
    stall_share: float = 0.27
    stall_seconds: float = 1.15
    stall_two_stages_seconds: float = 0.6
    slow_tensor_share: float = 0.28
    slow_tensor_factor: float = 2.5


SOURCES = {
    "products": "published_assumptions.toml: of this software, by published runs, vTrain's too",
    "width_bytes, mlp_bytes": "counted by hand: passes of eager kernels, per token 24 h + 24 h + 60 h + 36 f",
    "gradient_bytes": "counted: fp32 gradient sum per weight and microbatch (read 2 + 4, write 4)",
    "logit_bytes": "counted: passes of cast, softmax and loss over one logit",
    "optimizer_bytes, sharded_optimizer_bytes": "counted: norm and clip of all, AdamW of a rank's share",
    "reduced_bytes": "nanotron: fp32 gradients are all-reduced",
    "bucket_bytes": "nanotron: ddp_bucket_cap_mb = 25",
    "hidden_share": "the backward pass of one microbatch, two thirds of its FLOPs, hides the reduction",
    "hop_inside_seconds, hop_between_seconds": "NCCL's tuner table: ring, Simple, NVLink and network",
    "host_layer_seconds": "vTrain's rows of small layers: 3.6 ms with a repeated forward pass, 3/4 without",
    "tensor_hop_seconds": "fitted: 3B's rows with one stage and tensor over 2 or 4 hosts, per step of a ring",
    "message_seconds": "fitted by eye to 3B's rows with stages",
    "host_tensor_seconds, host_tensor_stage_seconds": "fitted: the least that a layer of 3B took, by tensor: "
    "9.6, 14.8 and 24 ms for 2, 4 and 8 with stages over hosts, whatever the microbatch",
    "tensor_seconds": "fitted: what 3B's steps take beyond their passes, for each parameter tensor",
    "stall_share, stall_seconds, stall_two_stages_seconds": "fitted: 64 of 239 of 3B's runs with stages over "
    "hosts and tensor inside them waited so long for each microbatch, for which no column shows a cause",
    "slow_tensor_share, slow_tensor_factor": "fitted: 11 of 40 of 3B's runs with one stage and tensor over "
    "hosts took so many times as long as the others like them",
    "products, attention, collectives": "meshwright.planning.Form, with the rates of meshwright.predict",
}

FITTED = tuple(
    name for names, source in SOURCES.items() for name in names.split(", ") if source.startswith("fitted")
)
"""The constants that were read off 3B's rows."""

SWEEP = Program()
# vTrain's runs: Megatron without sequence sharding, so that norms, residuals and dropout are whole on each
# rank (60 h counted), attention's inputs and outputs are split (36 h), bias and GELU are fused (20 f); fp16
# gradients reduced after the backward pass; as many layers in each stage. No host time: none was read off.
MEGATRON = Program(
    chip="A100-80GB",
    precision="fp16",
    recompute=True,
    sequence_sharded=False,
    uneven_stages=False,
    overlapped_reduction=False,
    width_bytes=36.0,
    whole_width_bytes=60.0,
    mlp_bytes=20.0,
    gradient_bytes=6.0,
    reduced_bytes=2.0,
    host_layer_seconds=0.0,
    host_tensor_seconds=0.0,
    host_tensor_stage_seconds=0.0,
    tensor_seconds=0.0,
    stall_share=0.0,
    slow_tensor_share=0.0,
)


@functools.cache
def stages_of(shape: Shape, num_stages: int) -> tuple[tuple[int, ...], int, bool]:
    """Return each stage's layers, the stage with the head, and whether the loss is on the last stage.

    nanotron's rule (`models/base.py`, `build_model`): blocks go to a stage until their cumulated cost exceeds
    its equal share, the crossing one included. A layer costs its matrices, the head V h, all others nothing.
    The labels go to the stage that the rule ends with. Where the loss (the last block) is on an earlier one,
    the run is expected to crash: on 3B these are all pp >= 32, of which 47 of 48 failed.
    """
    costs = [0, *[shape.layer_parameters] * shape.num_layers, 0, shape.head_parameters, 0, 0]
    cumulated = np.cumsum(costs)
    stage, stage_by_block = 0, []
    for cost in cumulated:
        stage_by_block.append(min(stage, num_stages - 1))
        stage += bool(cost > cumulated[-1] * ((stage + 1) / num_stages))
    layers = stage_by_block[1 : shape.num_layers + 1]
    counts = tuple(layers.count(each) for each in range(num_stages))
    return counts, stage_by_block[-3], stage_by_block[-1] == min(stage, num_stages)


def equal_stages(shape: Shape, num_stages: int) -> tuple[tuple[int, ...], int, bool]:
    """Return `stages_of` for a program that gives each stage as many layers, and the head to the last."""
    return (-(-shape.num_layers // num_stages),) * num_stages, num_stages - 1, True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of each candidate: layers [candidate, stage], the head's stage, and whether it can run."""

    layers: Numbers
    head: NDArray[np.int64]
    runs: NDArray[np.bool_]

    @classmethod
    def of(cls, program: Program, shape: Shape, stages: Numbers) -> Stages:
        """Return the stages of candidates with so many stages, by the program's rule."""
        rule = stages_of if program.uneven_stages else equal_stages
        layers = np.zeros((len(stages), int(stages.max())))
        head, can_run = np.zeros(len(layers), np.int64), np.ones(len(layers), bool)
        for number in np.unique(stages):
            at = stages == number
            counts, head[at], can_run[at] = rule(shape, int(number))
            layers[at, : int(number)] = counts
        return cls(layers=layers, head=head, runs=can_run)

    def sums(self, per_layer: Numbers, at_head: Numbers, at_first: Numbers) -> Numbers:
        """Return [candidate, stage]: the layers' sum, with the head's and the first stage's own addends."""
        found = self.layers * per_layer[:, None]
        found[np.arange(len(found)), self.head] += at_head
        found[:, 0] += at_first
        return found

    def weights(self, shape: Shape, tensor: Numbers) -> Numbers:
        """Return [candidate, stage]: the weights that a rank holds, a tied embedding once in one stage."""
        end = shape.head_parameters / tensor
        first = np.where(shape.tied & (self.head == 0), 0.0, end)
        return self.sums(shape.layer_parameters / tensor, end, first)


class Stacked:
    """The candidates of a group, priced as the stack's program runs them.

    `form`: the planner's own closed form over the same candidates.
    """

    def __init__(self, program: Program, shape: Shape, form: Form) -> None:
        self.program, self.shape, self.form = program, shape, form
        self.stages = Stages.of(program, shape, form.stage)
        self.over_hosts = form.tensor > form.machine.devices_per_domain
        self.several_hosts = form.stage * form.data * form.tensor > form.machine.devices_per_domain
        self.payload = 2 * form.tokens * shape.width  # of a microbatch's residuals, in 16 bits

    def parts(self) -> dict[str, Numbers]:
        """Return the seconds that a step waits for each kind of work, in the words of `Form.parts`.

        A step passes the dearest stage once for each microbatch but the first, which passes every stage.
        Replaced of ours: memory-bound, tensor, stage, data, update. Products and attention are ours, in the
        passes of the program's own stages. Added: host.
        """
        form, program, stages = self.form, self.program, self.stages
        layer = sum(self._layer.values(), np.zeros_like(form.tokens))
        products, passed = self._head
        costs = stages.sums(layer, products + passed, np.zeros_like(layer))
        dearest, rows = costs.argmax(1), np.arange(len(costs))
        layers = (form.passes - 1) * stages.layers[rows, dearest] + self.shape.num_layers
        heads = (form.passes - 1) * (dearest == stages.head) + 1
        parts = {name: layers * seconds for name, seconds in self._layer.items()}
        parts["matmul"] = parts["matmul"] + heads * products
        parts["memory-bound"] = parts["memory-bound"] + heads * passed
        message = form.collective("collective-permute", self.payload / form.tensor, STAGE, times=1.0)
        waits = np.where(form.stage > 1, 2 * (message + program.message_seconds), 0.0)
        parts["stage"] = (form.passes - 1 + form.stage - 1) * waits
        parts["data"] = self._reduction(costs.max(1))
        parts["update"] = self._update()
        return parts

    def seconds(self) -> Numbers:
        """Return the seconds of a step."""
        return sum(self.parts().values(), np.zeros_like(self.form.tokens))

    def risk(self, seconds: Numbers) -> Numbers:
        """Return the factor on the seconds by which a planner that knows of slow runs weighs each candidate.

        It is the geometric mean over whether a run stalls, or is slow for its tensor over hosts: an
        arithmetic one would let a rare stall outweigh everything that is known of the others.
        """
        form, program = self.form, self.program
        each = np.where(form.stage == 2, program.stall_two_stages_seconds, program.stall_seconds)
        exposed = (form.stage > 1) & self.several_hosts
        stalls = (1 + form.passes * each / seconds) ** (program.stall_share * exposed)
        return stalls * program.slow_tensor_factor ** (program.slow_tensor_share * self.over_hosts)

    @cached_property
    def _layer(self) -> dict[str, Numbers]:
        """Return a layer's seconds for one microbatch: the GPU's, and by how much the host is later."""
        form, program = self.form, self.program
        again = 2 if program.recompute else 1
        forward, backward = form.block_products
        attention = again * form.attention(backward=False) + form.attention(backward=True)
        parts = {
            "matmul": (again * forward + backward) / program.products,
            "attention": attention,
            "memory-bound": self._elementwise(),
            "tensor": self._tensor(),
        }
        tensor = form.tensor > 1
        waiting = tensor & (form.stage > 1) & self.several_hosts
        host = program.host_layer_seconds + program.host_tensor_seconds * tensor
        host = host + waiting * (program.host_tensor_stage_seconds * form.tensor + 10 * self._ring)
        device = sum(parts.values(), np.zeros_like(form.tokens))
        return {**parts, "host": np.maximum(host - device, 0.0)}

    def _elementwise(self) -> Numbers:
        """Return the seconds of a layer's eager kernels and gradient sums."""
        form, program, shape = self.form, self.program, self.shape
        passed = form.tokens * (program.width_bytes * shape.width + program.mlp_bytes * shape.mlp)
        passed = passed / form.tensor + form.tokens * program.whole_width_bytes * shape.width
        return self._copied(passed + program.gradient_bytes * shape.layer_parameters / form.tensor)

    def _copied(self, num_bytes: Numbers) -> Numbers:
        machine = self.form.machine
        return num_bytes / (machine.memory_bytes_per_second * machine.memory_efficiency)

    @property
    def _ring(self) -> Numbers:
        """Return the latency of a ring of `tensor` over hosts: of each of its steps, beyond the rates."""
        return np.where(self.over_hosts, (self.form.tensor - 1) * self.program.tensor_hop_seconds, 0.0)

    def _tensor(self) -> Numbers:
        """Return the exposed seconds of a layer's tensor collectives.

        Sequence-sharded: 6 gathers and 4 scatters. Two gathers run beside the product of the own shard, two
        scatters beside a weight gradient, the others alone. Else 2 all-reduces forward (again when
        recomputed) and 2 backward, none of them hidden.
        """
        form, program, shape = self.form, self.program, self.shape
        if not program.sequence_sharded:
            whole = form.collective("all-reduce", 2 * self.payload * (1 - 1 / form.tensor), TENSOR, times=1.0)
            return np.where(form.tensor > 1, (6 if program.recompute else 4) * (whole + 2 * self._ring), 0.0)
        gather = form.collective("all-gather", self.payload, TENSOR) + self._ring
        scatter = form.collective("reduce-scatter", self.payload, TENSOR) + self._ring
        exposed = 4 * gather + 2 * scatter
        for rows, columns in (shape.matrices[0], shape.matrices[2]):
            k, n = np.full_like(form.tokens, rows), columns / form.tensor
            own = form.products(form.tokens / form.tensor, n, k) / program.products
            weights = form.products(k, n, form.tokens) / program.products
            exposed = exposed + np.maximum(gather - own, 0.0) + np.maximum(scatter - weights, 0.0)
        return np.where(form.tensor > 1, exposed, 0.0)

    @cached_property
    def _head(self) -> tuple[Numbers, Numbers]:
        """Return the seconds of output projection and loss for one microbatch: products, memory."""
        form, program, shape = self.form, self.program, self.shape
        columns, width = shape.vocabulary / form.tensor, np.full_like(form.tokens, shape.width)
        products = form.products(form.tokens, columns, width) + form.products(form.tokens, width, columns)
        products = products + form.products(width, columns, form.tokens)
        passed = program.logit_bytes * form.tokens * columns
        copied = self._copied(passed + program.gradient_bytes * shape.head_parameters / form.tensor)
        return products / program.products, copied

    def _reduction(self, dearest: Numbers) -> Numbers:
        """Return the exposed seconds of the all-reduce over data of the largest stage, and a gather."""
        form, program, shape = self.form, self.program, self.shape
        weights, most = self._weights, self.stages.layers.max(1)
        hosts = form.data / form.members[:, DATA]
        ring = (form.data - hosts) * program.hop_inside_seconds + (hosts - 1) * program.hop_between_seconds
        sizes = (program.reduced_bytes * rows * columns / form.tensor for rows, columns in shape.matrices)
        buckets = sum((np.minimum(size / program.bucket_bytes, 1) for size in sizes), np.zeros_like(ring))
        reduce = 2 * form.collective("all-gather", program.reduced_bytes * weights, DATA)
        gather = form.collective("all-gather", 2 * weights, DATA) + 6 * most * ring
        hidden = program.hidden_share * dearest if program.overlapped_reduction else 0.0
        exposed = np.maximum(reduce + 2 * most * buckets * ring - hidden, 0.0) + form.zero1 * gather
        return np.where(form.data > 1, exposed, 0.0)

    @property
    def _weights(self) -> Numbers:
        return self.stages.weights(self.shape, self.form.tensor).max(1)

    def _update(self) -> Numbers:
        """Return the seconds from the last gradient to the next step: norm, clipping, AdamW."""
        program, own = self.program, np.where(self.form.zero1, 1 / self.form.data, 1.0)
        passed = self._weights * (program.optimizer_bytes + program.sharded_optimizer_bytes * own)
        return self._copied(passed) + program.tensor_seconds * 6 * self.stages.layers.max(1)
