"""Price a step of the public layout sweep's program (nanotron) in closed form, for many layouts at once.

This is a model of *their* program, not of ours. It shares with the product only the chip's catalog figures
and the formulas of meshwright.predict (`gemm_seconds`, `attention_seconds`, `collective_seconds`) with rates.
`SWEEP` is nanotron: 1F1B without interleaving, tensor parallelism with sequence-sharded norms and
asynchronous collectives, gradients summed in fp32 and all-reduced once a step, ZeRO-0 or 1, eager kernels,
no rematerialisation. `MEGATRON` is Megatron-DeepSpeed on A100 with full recomputation.
Ranks: tensor innermost, then data, then stages (nanotron's `parallel/context.py`).

Counted: products, attention, elementwise passes, the host's launches, collectives of tensor, stages and data,
uneven stages, the pipeline's fill and drain, the optimizer. Memory is in `_sweep_memory.py`.
Not counted: noise, allocator retries near the memory limit, and the runs that took several times as long as
their twins, for which the public rows show no cause.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.hardware import Chip, find_chip
from meshwright.predict._formulas import attention_seconds, collective_seconds, gemm_seconds
from meshwright.predict._rates import ChipRates, attention_of, rates_of, shared, sustained_share

Numbers = NDArray[np.float64]


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
class Layouts:
    """Layouts as arrays of one length: `microbatch` sequences, `count` microbatches a step, `zero` 0 or 1."""

    data: Numbers
    stages: Numbers
    tensor: Numbers
    microbatch: Numbers
    count: Numbers
    zero: Numbers

    def take(self, rows: NDArray[Any]) -> Layouts:
        """Return the layouts at `rows`."""
        return Layouts(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def devices(self) -> Numbers:
        """The number of GPUs."""
        return self.data * self.stages * self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The habits and constants of one training program; defaults: nanotron. `SOURCES` names the sources."""

    chip: str = "H100"
    attention_kernel: str = "flash-2"
    recompute: bool = False
    sequence_sharded: bool = True
    uneven_stages: bool = True
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
    tensor_hop_seconds: float = 43e-6
    message_seconds: float = 60e-6
    host_layer_seconds: float = 2.5e-3
    host_tensor_seconds: float = 1.8e-3
    host_tensor_stage_seconds: float = 2.4e-3
    tensor_seconds: float = 0.5e-3


SOURCES = {
    "width_bytes, mlp_bytes": "counted by hand: passes of eager kernels, per token 24 h + 24 h + 60 h + 36 f",
    "gradient_bytes": "counted: fp32 gradient sum per weight and microbatch (read 2 + 4, write 4)",
    "logit_bytes": "counted: passes of cast, softmax and loss over one logit",
    "optimizer_bytes, sharded_optimizer_bytes": "counted: norm and clip of all, AdamW of a rank's share",
    "reduced_bytes": "nanotron: fp32 gradients are all-reduced",
    "bucket_bytes": "nanotron: ddp_bucket_cap_mb = 25",
    "hidden_share": "the backward pass of one microbatch, two thirds of its FLOPs, hides the reduction",
    "hop_inside_seconds, hop_between_seconds": "NCCL's tuner table: ring, Simple, NVLink and network",
    "tensor_hop_seconds": "read off 3B's rows with tensor over hosts and one stage",
    "message_seconds": "judgement, read off 3B's rows",
    "host_layer_seconds, host_tensor_seconds, host_tensor_stage_seconds": "read off 3B's rows",
    "tensor_seconds": "read off 3B's rows",
    "products, attention, collectives": "rates.toml: public kernel tables",
    "sustained products, backward attention, memory, network, seconds a host": "runs.toml: published runs",
    "bandwidths, peak, GPUs a host": "catalog.toml",
}

SWEEP = Program()
# vTrain's runs: Megatron without sequence sharding, so that norms, residuals and dropout are whole on each
# rank (60 h counted), attention's inputs and outputs are split (36 h), bias and GELU are fused (20 f); fp16
# gradients reduced after the backward pass; as many layers in each stage. No host time: none was read off.
MEGATRON = Program(
    chip="A100-80GB",
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
class Machine:
    """A chip's figures and rates, and those of the collectives as functions of a group's size."""

    chip: Chip
    rates: ChipRates

    @classmethod
    def of(cls, program: Program) -> Machine:
        """Return the machine of a program's chip."""
        chip = find_chip(program.chip)
        return cls(chip=chip, rates=rates_of(chip))

    @property
    def peak(self) -> float:
        """The dense bf16 peak, in FLOP/s."""
        return self.chip.peak_flops_per_second["bf16"]

    @property
    def copied_per_second(self) -> float:
        """The bytes of memory that an elementwise kernel moves in a second."""
        assert self.chip.memory_bytes_per_second
        return self.chip.memory_bytes_per_second * shared().memory_efficiency

    @property
    def link_per_second(self) -> float:
        """The nominal bytes that one GPU sends inside its host in a second."""
        assert self.chip.inside
        return self.chip.inside.bytes_per_second

    @property
    def network_per_second(self) -> float:
        """The bytes that one GPU sends to another host in a second."""
        assert self.chip.between
        return self.chip.between.bytes_per_second * shared().network_efficiency


def product_seconds(machine: Machine, m: Numbers, n: Numbers, k: Numbers) -> Numbers:
    """Return the seconds of [m, k] x [k, n], at no more than the rate that the chip sustains in training."""
    sustained = machine.peak * (sustained_share(machine.chip) or 1.0)
    assert machine.chip.memory_bytes_per_second
    assert machine.chip.num_sms
    seconds = gemm_seconds(
        machine.rates.gemm_for("bf16"),
        m=m,
        n=n,
        k=k,
        num_bytes=2 * (m * k + k * n + m * n),
        flops_per_second=machine.peak,
        memory_bytes_per_second=machine.chip.memory_bytes_per_second,
        num_sms=machine.chip.num_sms,
    )
    return np.maximum(seconds, 2 * m * n * k / sustained)


def collective(
    machine: Machine,
    kind: str,
    payload: Numbers,
    group: Numbers,
    members: Numbers,
    hop_seconds: Numbers | float,
) -> Numbers:
    """Return the seconds of a collective, as meshwright.predict prices it, plus a ring's hops between hosts.

    Args:
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        payload: the bytes of the whole array.
        group: devices of the group; 1 costs nothing.
        members: those of them in one host.
        hop_seconds: of every step of the ring beyond what the rates hold.
    """
    passes = 2 if kind == "all-reduce" else 1
    sent = passes * payload * (group - 1) / group
    inside = np.zeros_like(payload)
    for size in np.unique(members):
        at = (members == size) & (size > 1)
        rate = machine.rates.collective_for(kind, int(size))
        inside[at] = collective_seconds(rate, wire_bytes=sent[at], bytes_per_second=machine.link_per_second)
    hosts = group / members
    between = passes * payload * (hosts - 1) / hosts / members / machine.network_per_second
    seconds = np.maximum(inside, between) + shared().network_alpha_seconds * (hosts - 1) + hop_seconds
    return np.where(group > 1, seconds, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How the ranks of a layout lie on hosts: members of a tensor and of a data group in one host."""

    tensor_members: Numbers
    data_members: Numbers
    several_hosts: NDArray[np.bool_]

    @classmethod
    def of(cls, machine: Machine, layouts: Layouts) -> Groups:
        """Return the groups for tensor innermost, then data, then stages."""
        host = float(machine.chip.chips_per_host or 1)
        inside = np.minimum(layouts.tensor, host)
        return cls(
            tensor_members=inside,
            data_members=np.maximum(np.minimum(layouts.data, host // inside), 1.0),
            several_hosts=layouts.devices > host,
        )


def hops(program: Program, group: Numbers, members: Numbers) -> Numbers:
    """Return the latency of one turn of a ring, as NCCL's tuner counts it: hops inside and between hosts."""
    hosts = group / members
    return (group - hosts) * program.hop_inside_seconds + (hosts - 1) * program.hop_between_seconds


def compute_seconds(program: Program, machine: Machine, shape: Shape, layouts: Layouts) -> Numbers:
    """Return a layer's seconds for a microbatch without collectives: products, attention, other passes."""
    tokens = layouts.microbatch * shape.sequence
    tensor = layouts.tensor
    total = attention_seconds_of(program, machine, shape, layouts)
    forwards = 2 if program.recompute else 1
    for number, (rows, columns) in enumerate(shape.matrices):
        k, n = (rows, columns / tensor) if number % 2 == 0 else (rows / tensor, columns)
        k, n = k + 0 * tokens, n + 0 * tokens
        total = total + forwards * product_seconds(machine, tokens, n, k)
        total = total + product_seconds(machine, tokens, k, n) + product_seconds(machine, k, n, tokens)
    passed = tokens * (program.width_bytes * shape.width + program.mlp_bytes * shape.mlp) / tensor
    passed += tokens * program.whole_width_bytes * shape.width
    passed += program.gradient_bytes * shape.layer_parameters / tensor
    return total + passed / machine.copied_per_second


def attention_seconds_of(program: Program, machine: Machine, shape: Shape, layouts: Layouts) -> Numbers:
    """Return the attention kernels' seconds of a layer and microbatch, forward and backward.

    No table has FlashAttention-2 with heads of 64: its rate is that for 128 times the ratio of the two in the
    chip's own tables.
    """
    head = shape.width // shape.num_heads
    rates = attention_of(machine.chip, program.attention_kernel)
    rate, own = rates[128], machine.rates.attention
    smaller = own[64].efficiency / own[128].efficiency if head <= 64 and 64 in own else 1.0
    flops = 2 * layouts.microbatch * shape.sequence**2 * shape.width / layouts.tensor
    forward = np.asarray(
        attention_seconds(rate, flops=flops, length=shape.sequence, flops_per_second=machine.peak * smaller)
    )
    backward = 2.5 / shared().backward_attention_share
    return forward * ((2 if program.recompute else 1) + backward)


def tensor_seconds_of(
    program: Program, machine: Machine, shape: Shape, layouts: Layouts, groups: Groups
) -> Numbers:
    """Return the exposed seconds of a layer's tensor collectives.

    Sequence-sharded: 6 gathers and 4 scatters. Two gathers run beside the product of the own shard, two
    scatters beside a weight gradient, the others alone. Else 2 all-reduces forward (again when recomputed)
    and 2 backward, none of them hidden.
    """
    tokens = layouts.microbatch * shape.sequence
    payload = 2 * tokens * shape.width
    ring = layouts.tensor * program.tensor_hop_seconds
    extra = np.where(layouts.tensor > groups.tensor_members, ring, 0.0)
    price = functools.partial(
        collective, machine, payload=payload, group=layouts.tensor, members=groups.tensor_members
    )
    if not program.sequence_sharded:
        return (6 if program.recompute else 4) * price("all-reduce", hop_seconds=2 * extra)
    gather, scatter = price("all-gather", hop_seconds=extra), price("reduce-scatter", hop_seconds=extra)
    exposed = 4 * gather + 2 * scatter
    for rows, columns in (shape.matrices[0], shape.matrices[2]):
        k, n = rows + 0 * tokens, columns / layouts.tensor
        own = product_seconds(machine, tokens / layouts.tensor, n, k)
        exposed += np.maximum(gather - own, 0.0)
        exposed += np.maximum(scatter - product_seconds(machine, k, n, tokens), 0.0)
    return np.where(layouts.tensor > 1, exposed, 0.0)


def layer_seconds(
    program: Program, machine: Machine, shape: Shape, layouts: Layouts, groups: Groups
) -> Numbers:
    """Return a layer's seconds for one microbatch: the GPU's, or the host's where that is later."""
    device = compute_seconds(program, machine, shape, layouts)
    device = device + tensor_seconds_of(program, machine, shape, layouts, groups)
    tensor = layouts.tensor > 1
    waiting = tensor & (layouts.stages > 1) & groups.several_hosts
    host = program.host_layer_seconds + program.host_tensor_seconds * tensor
    host = host + program.host_tensor_stage_seconds * layouts.tensor * waiting
    return np.maximum(device, host)


def head_seconds(program: Program, machine: Machine, shape: Shape, layouts: Layouts) -> Numbers:
    """Return the seconds of output projection and loss for one microbatch."""
    tokens = layouts.microbatch * shape.sequence
    columns, width = shape.vocabulary / layouts.tensor, shape.width + 0 * tokens
    products = product_seconds(machine, tokens, columns, width)
    products += product_seconds(machine, tokens, width, columns)
    products += product_seconds(machine, width, columns, tokens)
    passed = (
        program.logit_bytes * tokens * columns
        + program.gradient_bytes * shape.head_parameters / layouts.tensor
    )
    return products + passed / machine.copied_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The uneven stages of each layout: layers [layout, stage], the head's stage, and whether it can run."""

    layers: Numbers
    head: NDArray[np.int64]
    runs: NDArray[np.bool_]

    @classmethod
    def of(cls, program: Program, shape: Shape, layouts: Layouts) -> Stages:
        """Return the stages of each layout by the program's rule."""
        rule = stages_of if program.uneven_stages else equal_stages
        layers = np.zeros((len(layouts.stages), int(layouts.stages.max())))
        head, can_run = np.zeros(len(layers), np.int64), np.ones(len(layers), bool)
        for number in np.unique(layouts.stages):
            at = layouts.stages == number
            counts, head[at], can_run[at] = rule(shape, int(number))
            layers[at, : int(number)] = counts
        return cls(layers=layers, head=head, runs=can_run)

    def sums(self, per_layer: Numbers, at_head: Numbers, at_first: Numbers) -> Numbers:
        """Return [layout, stage]: the layers' sum, with the head's and the first stage's own addends."""
        found = self.layers * per_layer[:, None]
        found[np.arange(len(found)), self.head] += at_head
        found[:, 0] += at_first
        return found

    def weights(self, shape: Shape, layouts: Layouts) -> Numbers:
        """Return [layout, stage]: the weights that a rank holds, a tied embedding once in one stage."""
        end = shape.head_parameters / layouts.tensor
        first = np.where(shape.tied & (self.head == 0), 0.0, end)
        return self.sums(shape.layer_parameters / layouts.tensor, end, first)


def reduction_seconds(
    program: Program, machine: Machine, shape: Shape, layouts: Layouts, groups: Groups, stages: Stages
) -> tuple[Numbers, Numbers]:
    """Return the seconds of the all-reduce over data of the largest stage, and of ZeRO-1's gather."""
    weights = stages.weights(shape, layouts).max(1)
    ring = hops(program, layouts.data, groups.data_members)
    per_layer = sum(
        np.minimum(program.reduced_bytes * rows * columns / layouts.tensor / program.bucket_bytes, 1)
        for rows, columns in shape.matrices
    )
    most = stages.layers.max(1)
    price = functools.partial(collective, machine, group=layouts.data, members=groups.data_members)
    reduce = price("all-reduce", program.reduced_bytes * weights, hop_seconds=2 * most * per_layer * ring)
    gather = price("all-gather", 2 * weights, hop_seconds=6 * most * ring)
    return reduce, gather * (layouts.zero == 1)


def end_seconds(
    program: Program, machine: Machine, shape: Shape, layouts: Layouts, stages: Stages
) -> Numbers:
    """Return the seconds from the last gradient to the next step: norm, clipping, AdamW."""
    weights = stages.weights(shape, layouts).max(1)
    own = np.where(layouts.zero == 1, 1 / layouts.data, 1.0)
    passed = weights * (program.optimizer_bytes + program.sharded_optimizer_bytes * own)
    return passed / machine.copied_per_second + program.tensor_seconds * 6 * stages.layers.max(1)


def step_seconds(program: Program, shape: Shape, layouts: Layouts) -> Numbers:
    """Return the seconds of a step of each layout."""
    machine = Machine.of(program)
    groups, stages = Groups.of(machine, layouts), Stages.of(program, shape, layouts)
    layer = layer_seconds(program, machine, shape, layouts, groups)
    head = head_seconds(program, machine, shape, layouts)
    slowest = stages.sums(layer, head, np.zeros_like(layer)).max(1)
    payload = 2 * layouts.microbatch * shape.sequence * shape.width / layouts.tensor
    inside = machine.link_per_second * machine.rates.collective_for("all-to-all", 2).efficiency
    link = np.where(groups.several_hosts, machine.network_per_second, inside)
    message = np.where(layouts.stages > 1, 2 * (payload / link + program.message_seconds), 0.0)
    run = (layouts.count - 1) * (slowest + message) + shape.num_layers * layer + head
    run += message * (layouts.stages - 1)
    reduce, gather = reduction_seconds(program, machine, shape, layouts, groups, stages)
    hidden = program.hidden_share * slowest if program.overlapped_reduction else 0.0
    return (
        run
        + np.maximum(reduce - hidden, 0.0)
        + gather
        + end_seconds(program, machine, shape, layouts, stages)
    )
