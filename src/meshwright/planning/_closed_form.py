"""Estimate the memory and the time of many candidates at once, in closed form.

Two kinds of figures. A *bound* is never above what the compiler finds: state and block inputs for memory,
arithmetic at the rate that the chip sustains for time. An *estimate* is near it on average, and orders the
compiling: the search corrects it by what compiled candidates reveal. Neither is ever reported as the figure
of a step.

The form, for one device. A transformer's block has, for T tokens of a microbatch, products of m = T rows
(each once forward and twice backward), fused attention, and passes over memory. `tensor` adds two gathers and
two scatters of the block's input forward, and more of them backward. `fsdp` gathers each layer's weights
forward and backward and scatters their gradients; a share of that is hidden behind computation. `context`
sends keys and values around a ring beside attention. A pipeline of S stages, M microbatches and V chunks
takes M + (S - 1) / V times a stage's pass. Then come the head, the reduction over `data`, and the update.
Rates are those with which `predict` prices a compiled schedule.

With adapters the model's matrices have no gradients, and their products one backward form in place of two.
Not counted: what the compiler fuses or repeats, which is why only compiling decides; adapters' products.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config import (
    MOST_GATHERED_BYTES,
    NF4_BLOCK,
    RunConfig,
    TransformerModel,
)
from meshwright.predict import Machine, attention_seconds

from ._expert_dispatch import dispatch_of
from ._fitted import (
    ATTENTION_BACKWARD,
    BACKWARD_BYTES,
    EXPOSED,
    EXPOSED_GATHERS_OF_KEYS,
    FORWARD_AND_BACKWARD,
    FORWARD_BYTES,
    FP32,
    FULL_IN_PIPELINE,
    HEAD_BYTES,
    HEAD_OVER_MEMORY,
    HIDDEN,
    KEPT_IN_PIPELINE,
    KERNELS,
    KERNELS_OF_A_HOP,
    MERGE_BYTES,
    MOST_DEVICES,
    NARROW,
    OVERLAP,
    PASSES_IN_PIPELINE,
    PASSES_OF_SLOTS,
    PIECES_OF_A_RING,
    PIECES_OF_GATHERED_KEYS,
    REPEATED_IN_PIPELINE,
    STATE_PASSES,
    SUM_BYTES,
    SUMS_OVER_CONTEXT,
)
from ._messages import seconds_of
from ._remat_values import (
    is_list,
    keeps,
    kept_of,
    share_repeating,
    unlisted_products,
)
from ._space import (
    CONTEXT,
    DATA,
    EXPERT,
    FSDP,
    PARTS,
    STAGE,
    TENSOR,
    Candidates,
    experts_spread,
    groups_of_stage,
    waits,
)
from ._state import (
    Weights,
    bytes_of_state,
    num_layers_of,
    share_of_tables,
    weights_of,
)

Numbers = NDArray[np.float64]


class Form:
    """The closed form over candidates of one run in one precision.

    `fits`: take every program as one that fits, whatever the estimate of its memory says.
    """

    def __init__(
        self, config: RunConfig, machine: Machine, candidates: Candidates, *, fits: bool = False
    ) -> None:
        self.config, self.machine, self.candidates, self.fits = config, machine, candidates, fits
        model = config.model
        sizes = candidates.sizes.astype(float)
        self.stage, self.data, self.fsdp = sizes[:, STAGE], sizes[:, DATA], sizes[:, FSDP]
        self.context, self.expert, self.tensor = sizes[:, CONTEXT], sizes[:, EXPERT], sizes[:, TENSOR]
        self.replicas = candidates.num_replicas.astype(float)
        self.micro = candidates.microbatch.astype(float)
        self.remat = candidates.settings["remat"]
        self.offload = candidates.settings["offload"]
        self.zero1 = (candidates.settings["zero1"] == 1) & (self.data * self.context * self.expert > 1)
        # The devices that gather what is no expert, in each pass.
        self.sharing = self.fsdp * np.where(self.zero1, 1.0, self.expert)
        self.length = float(config.batch.sequence_length)
        self.tokens = self.micro * self.length / self.context  # of one microbatch on one device
        self.passes = config.batch.sequences / (self.replicas * self.micro)
        self.chunks = candidates.chunks.astype(float)
        self.ticks = self.passes + (self.stage - 1) / self.chunks  # in passes through all layers of a stage
        self.weights = weights_of(config)
        self.frozen = config.lora.rank is not None
        self.moments_wait, self.layers_wait, self.inputs_wait = (waits(self.offload, part) for part in PARTS)
        self.is_transformer = isinstance(model, TransformerModel)
        self.layers, self.first_layers = num_layers_of(config)
        self.expert_axes, self.whole_experts = experts_spread(config, candidates.sizes)
        group = len(model.period) if isinstance(model, TransformerModel) else 1
        self.layers_of_stage = groups_of_stage(config, candidates.size(STAGE)).astype(float) * group
        self.layers_of_stage = np.where(self.stage > 1, self.layers_of_stage, self.layers)
        self.width = float(model.embed_dim if isinstance(model, TransformerModel) else 0)
        self.heads_width = self.hidden = self.vocab = self.seen = 0.0
        self.keys_width = np.zeros_like(self.tensor)
        self.repeats = np.ones_like(self.tensor)  # devices along `tensor` that use each key-value head
        self.loss_chunk = 1.0
        if isinstance(model, TransformerModel):
            self.heads_width = model.num_heads * (model.head_dim + (model.value_dim or model.head_dim)) / 2
            self.seen = model.seen_positions(int(self.length))
            self.repeats = np.maximum(self.tensor / model.num_kv_heads, 1.0)
            self.keys_width = model.num_kv_heads * model.head_dim * self.repeats  # on all devices together
            self.hidden, self.vocab = float(model.mlp_dim), float(model.vocab_size)
            self.loss_chunk = float(model.loss_chunk)
        self.activation_bytes = FP32 if config.precision == "fp32" else NARROW
        self.sum_bytes = NARROW if config.gradient_sum == "bf16" else FP32
        # Of a gradient as its product writes it, and as `fsdp` scatters it.
        self.gradient_bytes = FP32 if config.gradient_sum == "all-fp32" else NARROW
        self.kept = bytes_of_state(config)
        self.format = "fp8-e4m3" if config.precision == "fp8" else config.precision
        if self.format == "fp32" and machine.matmul_of_fp32 in machine.peak_flops_per_second:
            self.format = machine.matmul_of_fp32
        if machine.peak_flops_per_second.get(self.format) is None:
            self.format = next(iter(machine.peak_flops_per_second))
        strides = candidates.strides().astype(float)
        domain = float(machine.devices_per_domain)
        self.members = np.clip(np.floor(domain / strides), 1, sizes)
        self.dispatch = dispatch_of(config, machine, (sizes, strides), self.expert_axes, self.whole_experts)

    # Memory

    def _held(self, weights: Weights, *, over_data: bool) -> Numbers:
        """Return the parameters that one device holds between steps, or within one (not `over_data`).

        Between steps ZeRO-1 divides them over data and context too, and over expert what is no expert.
        """
        ways = np.where(self.zero1 & over_data, self.data * self.context, 1.0)
        ways = np.maximum(ways, self.context) if CONTEXT in self.expert_axes else ways
        experts = weights.experts / (self.stage * self.tensor * self.expert * self.fsdp * ways)
        return self._held_of_others(weights, over_data=over_data) + experts

    def _held_of_others(self, weights: Weights, *, over_data: bool) -> Numbers:
        """Return the parameters of no expert that one device holds, as `_held`."""
        more = self.data * self.context * self.expert
        ways = self.sharing * np.where(self.zero1 & over_data, more, 1.0)
        of_blocks = weights.blocks + np.where(self.repeats > 1, weights.keys * (self.tensor - 1), 0)
        of_blocks = of_blocks + (self.stage - 1) * weights.first
        blocks = (of_blocks / self.tensor + weights.norms) / self.stage
        tables = share_of_tables(self.config, self.stage, self.tensor, between_steps=over_data)
        return (blocks + tables * weights.tables / self.tensor) / ways

    def _held_trained(self, *, over_data: bool) -> Numbers:
        """Return the trained parameters that one device holds; adapters as if both axes divided all."""
        if not self.frozen:
            return self._held(self.weights, over_data=over_data)
        return self.config.num_trained_parameters / (self.sharing * self.tensor)

    def _frozen_bytes(self) -> Any:
        """Return the bytes of the frozen parameters that one device holds."""
        if not self.frozen:
            return 0.0
        each = FP32 if self.config.lora.base == "fp32" else self.activation_bytes
        weights = self.weights
        if self.config.lora.base == "nf4":  # products in four bits, and a scale for each block
            share = (0.5 + FP32 / NF4_BLOCK) / each
            weights = replace(weights, blocks=weights.blocks * share, keys=weights.keys * share)
        return self._held(weights, over_data=False) * each

    def _block_inputs(self) -> Numbers:
        """Return the bytes of the blocks' inputs that wait for the backward pass of one microbatch."""
        each = self.tokens * self.width * self.activation_bytes / self.tensor
        return np.where(self.inputs_wait, 0.0, each * self.layers / self.stage)

    def memory_bound(self) -> Numbers:
        """Return the bytes of parameters, of moments that stay on the device, and of saved block inputs."""
        return self._state(self.kept.fewest) + self._block_inputs()

    def _state(self, moments: float) -> Numbers:
        """Return the bytes of parameters, and the given bytes for each unless moments wait in host memory."""
        held = self._held_trained(over_data=True)
        stays = held - np.where(self.layers_wait, self._held_layers(), 0.0)
        moments_bytes = np.where(self.moments_wait, 0.0, held * moments)
        return stays * self.kept.parameter + moments_bytes + self._frozen_bytes()

    def _held_layers(self) -> Numbers:
        """Return the parameters of layers that one device holds."""
        return self._held(replace(self.weights, tables=0), over_data=True)

    def memory(self) -> Numbers:
        """Return the bound, and gradients, gathered weights, kept activations, logits and a working set."""
        state = self._state(self.kept.usual)
        held = self._held_trained(over_data=False)
        # With several microbatches a loop's gradients are added where they are made, unless one of these axes
        # reduces them first (`Transformer.summed`).
        beside = np.where(self.sharing > 1, NARROW, 0) if not self.frozen else NARROW
        one_pass = np.where(self.passes > 1, self.sum_bytes + beside, NARROW)
        gradients = held * np.where(self.stage > 1, self.sum_bytes, one_pass)
        blocks, experts = self._layer_bytes()
        tables = self.weights.tables / self.tensor
        copies = np.where(self.sharing > 1, 3 * blocks + 2 * NARROW * tables, 0.0) + tables * NARROW
        copies = copies + np.where(self.fsdp > 1, 3 * experts, 0.0)
        padded = tables * self.kept.parameter
        copies = copies + np.where(self.vocab % self.tensor, padded, 0.0)
        copies = copies + np.where(self.zero1 | (self.fsdp == 1) | (self.stage > 1), held * NARROW, 0.0)
        slots = np.where(
            self.stage > 1,
            np.where(
                self.candidates.settings["pipeline"] == 0,
                np.minimum(self.stage * (1 + 1 / self.chunks), self.passes),
                self.passes,
            ),
            0.0,
        )
        entries = np.where((self.stage > 1) & (self.weights.first > 0), np.ceil(self.passes / self.stage), 0)
        waiting = (slots + entries) * self.tokens * self.width * self.activation_bytes / self.tensor
        kept = self._kept() * self.tokens * self.layers_of_stage
        kept = kept * np.where(self.stage > 1, slots, 1.0)
        working = self.tokens * (
            12 * self.width + (12 * self.mlp_share * self.hidden + 8 * self.heads_width) / self.tensor
        )
        # Keys and values as they arrive and in order; their gradients summed, of one call, and in order.
        working = working + np.where(self._gathers_keys(), 2 * self._keys() * (2 * NARROW + 3 * FP32), 0.0)
        return state + gradients + copies + waiting + self._block_inputs() + kept + working + self._logits()

    @cached_property
    def mlp_share(self) -> Any:
        """The rows of the MLP's products per token."""
        return 1.0 if self.dispatch is None else self.dispatch.rows_per_token(self.tokens)

    def _kept(self) -> Numbers:
        """Return the bytes of each token that a block keeps by the policy."""
        found = np.zeros_like(self.tokens)
        scale = self.activation_bytes / NARROW
        for share, (whole, hidden, heads, keys) in kept_of(self.remat):
            inside = hidden * self.mlp_share * self.hidden + heads * self.heads_width + keys * self.keys_width
            one = whole * self.width / self.tensor + inside / self.tensor
            found = found + share * one
        return found * scale

    def _logits(self) -> Numbers:
        model = self.config.model
        if not isinstance(model, TransformerModel):
            return self.tokens * model.sizes.layer_outputs * 2 * FP32
        held = self.length / self.context
        chunk = held / np.ceil(held / model.loss_chunk)
        return 2 * FP32 * self.micro * chunk * self.vocab / self.tensor

    # Time

    def seconds_bound(self) -> Numbers:
        """Return the seconds of the products and attention alone, at the rate that the chip sustains.

        With factors of measured steps, it is times the least of those that such work may have, at most 1.

        In a pipeline every stage runs M + (S - 1) / V passes for M microbatches.
        """
        model, machine = self.config.model, self.machine
        peak = machine.peak_flops_per_second[self.format]
        rate = min(peak, machine.sustained_flops_per_second(self.format) or peak)
        devices = self.candidates.sizes.prod(axis=1).astype(float)
        tokens = float(self.config.batch.tokens_per_step)
        block_parameters = float(model.num_matmul_parameters)
        head = self.vocab * self.width if self.is_transformer else 0.0
        attention = 4 * self.seen * self.heads_width * 3 * self.layers
        if isinstance(model, TransformerModel):
            attention += 3 * model.num_state_flops
        each = 4 if self.frozen else 6  # frozen matrices have no gradients
        first = self.weights.first / max(block_parameters, 1.0)  # without a bubble
        blocks = (each * (block_parameters - head) + attention) * tokens / devices
        blocks = blocks * (first + (1 - first) * self.ticks / self.passes)
        return (blocks + each * head * tokens / devices) / rate * machine.factors.least()

    def seconds(self) -> Numbers:
        """Return the seconds of all passes, of the reduction over `data`, and of the update."""
        return self._seconds

    @cached_property
    def _seconds(self) -> Numbers:
        return sum(self.parts().values(), np.zeros_like(self.tokens))

    def seconds_fitting(self) -> Numbers:
        """Return the seconds of each candidate as one that fits."""
        over, found = self._is_over_memory, self._seconds.copy()
        if over.any():
            found[over] = Form(self.config, self.machine, self.candidates[over], fits=True).seconds()
        return found

    def parts(self) -> dict[str, Numbers]:
        """Return the seconds that a step waits for each kind of work, in the words of `Prediction.slices`."""
        if not self.is_transformer:
            return {"all": self._seconds_of_others()}
        of_first = np.where(self.stage > 1, self.first_layers / self.stage, 0.0)  # without a bubble
        blocks = self.ticks * self.layers_of_stage + self.passes * of_first  # passes through one block
        light, heavy = self._elementwise(FORWARD_BYTES), self._elementwise(BACKWARD_BYTES)
        forward, backward = self.block_products
        repeats = self._repeats()
        attention, attention_back = self.attention(backward=False), self.attention(backward=True)
        kept = self._passes(self._kept() * self.tokens) * self._kept_passes()
        merged = self._passes(self._hops() * MERGE_BYTES * self.tokens * self.heads_width / self.tensor)
        again = self.machine.factors.again
        compute = {
            "matmul": forward * (1 + again * repeats["matmul"]) + backward,
            "attention": attention * (1 + again * repeats["attention"]) + attention_back,
            "memory-bound": light * (1 + again * repeats["light"]) + heavy + kept + merged,
            "launch": (self._kernels() * self.machine.launch_seconds) + np.zeros_like(self.tokens),
        }
        in_pipeline = (self.stage > 1) & (self._again("products") < 1)
        over = self._is_over_memory
        exposed = np.where(over, 1.0, EXPOSED)
        messages = self._tensor_messages()
        messages = messages * self._exposed_over_tensor(messages / forward, repeats["matmul"])
        busy = sum(compute.values(), np.zeros_like(self.tokens))
        ring = np.maximum(0.0, self._ring() - self._at_most(OVERLAP) * (attention + attention_back))
        ring = np.where(self._gathers_keys(), EXPOSED_GATHERS_OF_KEYS * self._gathers_of_keys(), ring)
        gathers = 2 * self._gathers_of_layer(1 / NARROW if self.config.precision == "fp8" else 1.0)
        if not self.frozen:  # the gradients are scattered as the weights are gathered
            gathers = gathers + self._gathers_of_layer(self.gradient_bytes / NARROW)
        hidden = self._at_most(HIDDEN) * gathers
        fsdp = gathers - hidden + np.maximum(0.0, hidden - busy)
        share = self.config.num_trained_parameters / self.config.model.num_parameters
        blocks_bytes, experts_bytes = self._layer_bytes()
        layer_gradients = blocks_bytes / self.sharing + experts_bytes / self.fsdp
        layer_gradients = layer_gradients * (share if self.frozen else 1.0)
        summed = self.collective("all-reduce", layer_gradients, CONTEXT, times=2.0)
        waits = np.where(self.inputs_wait, 2 * self._host(self._block_inputs_of_one()), 0.0)
        parts = {name: blocks * seconds for name, seconds in compute.items()}
        parts["tensor"] = blocks * messages
        parts["expert"] = blocks * self._expert_messages() * (2 + repeats["matmul"]) * exposed
        # ZeRO-1 scatters gradients and gathers parameters once.
        parts["expert"] = parts["expert"] + self._gather(
            self._over_expert * (self.sum_bytes + NARROW), EXPERT
        )
        in_passes = np.where((self.stage > 1) | (self.passes > 1), 0.0, SUMS_OVER_CONTEXT * summed)
        parts["context"] = blocks * (ring + in_passes) + self._sum_over_context()
        parts["fsdp"] = blocks * fsdp
        parts["host"] = blocks * waits
        parts["stage"] = 2 * self.ticks * self.chunks * self._permute(self._block_inputs_of_one(), STAGE)
        head, head_memory, head_gathers = self._head()
        head = head * np.where(over, HEAD_OVER_MEMORY, 1.0)
        gate = np.where(over & in_pipeline, self._gate, 0.0)
        parts["matmul"] = parts["matmul"] + self.passes * head + blocks * gate
        held = self._held_trained(over_data=False)
        sums = np.where(self.passes > 1, self._passes((SUM_BYTES - 2 * (FP32 - self.sum_bytes)) * held), 0.0)
        parts["memory-bound"] = parts["memory-bound"] + self.passes * (head_memory + sums)
        parts["fsdp"] = parts["fsdp"] + self.passes * head_gathers
        parts["data"] = self._reduction(blocks * busy)
        parts["update"] = self._update()
        return parts

    def _seconds_of_others(self) -> Numbers:
        """Return the seconds of a model without blocks: one product, the reduction, the update."""
        model = self.config.model
        rows = self.micro * self.length
        parameters = float(model.num_matmul_parameters)
        work = self.products(rows, parameters / self.tensor, np.ones_like(rows)) * 3
        outputs = self._passes(rows * model.sizes.layer_outputs * FP32 * 4)
        gathered = self._gather(parameters * NARROW / self.tensor, FSDP) * 3
        in_passes = self.passes * (np.maximum(work + outputs, gathered))
        return in_passes + self._reduction(in_passes) + self._update()

    def products(self, m: Numbers, n: Numbers, k: Numbers) -> Numbers:
        """Return the seconds of a product of [m, k] by [k, n] in the run's format."""
        num_bytes = NARROW * (m * k + k * n + m * n)
        seconds = self.machine.product_seconds(self.format, m=m, n=n, k=k, num_bytes=num_bytes)
        return np.asarray(seconds) * self.machine.factors.of("matmul")

    @cached_property
    def _shapes(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return one candidate for each combination of product sizes, and each candidate's combination."""
        sizes = self.candidates.sizes
        key = (self.tokens.astype(np.int64) * MOST_DEVICES + sizes[:, TENSOR]) * MOST_DEVICES + sizes[
            :, STAGE
        ]
        _, first, places = np.unique(key, return_index=True, return_inverse=True)
        return first, places

    def _product(self, m: Numbers, n: Numbers, k: Numbers) -> Numbers:
        """Return `products` of columns that depend on tokens, tensor and stage alone."""
        first, places = self._shapes
        return self.products(m[first], n[first], k[first])[places]

    @cached_property
    def block_products(self) -> tuple[Numbers, Numbers]:
        """Return the seconds of a block's products, forward and backward."""
        width, tensor = self.width, self.tensor
        matrices = [(width, self.heads_width), (width, self.keys_width), (width, self.keys_width)]
        matrices += [(self.heads_width, width)]
        rows = self.tokens
        mlp = [(width, self.hidden)] * (2 if self._gated else 1) + [(self.hidden, width)]
        share = self.mlp_share
        forward = backward = np.zeros_like(rows)
        for count, group in ((1.0, matrices), (share, mlp)):
            for inputs, outputs in group:
                split_in = inputs != width  # the output matrices have their rows divided over tensor
                k = inputs / tensor if split_in else np.full_like(tensor, inputs)
                n = np.full_like(tensor, outputs) if split_in else outputs / tensor
                m = rows * count
                forward = forward + self._product(m, n, k)
                backward = backward + self._product(m, k, n)
                backward = backward if self.frozen else backward + self._product(k, n, m)
        return forward, backward

    @cached_property
    def _is_over_memory(self) -> NDArray[np.bool_]:
        """Return whether the estimate of a candidate's memory exceeds what a device has."""
        room = self.machine.memory_bytes
        if self.fits or room is None:
            return np.zeros(len(self.tokens), bool)
        return self.memory() > room

    def _at_most(self, share: float) -> Numbers:
        """Return the share that computation hides at most; 0 where a candidate needs too much memory."""
        return np.where(self._is_over_memory, 0.0, share)

    @cached_property
    def _gate(self) -> Numbers:
        """Return the seconds of a block's gate product forward; 0 without one."""
        if not self._gated:
            return np.zeros_like(self.tokens)
        width = np.full_like(self.tokens, self.width)
        return self._product(self.tokens * self.mlp_share, self.hidden / self.tensor, width)

    @property
    def _gated(self) -> bool:
        model = self.config.model
        return isinstance(model, TransformerModel) and model.mlp == "gated"

    def _repeats(self) -> dict[str, Numbers]:
        """Return how often the backward pass repeats each kind of forward work under a candidate's policy."""
        down = self.width * self.hidden * self.layers / max(self.config.model.num_matmul_parameters, 1)
        full = self._again("products") * np.where(self.stage > 1, REPEATED_IN_PIPELINE, 1 - down)
        products = full + self._again("second products") * self._second_products()
        return {
            "matmul": products + unlisted_products(self.remat, *self._sizes_of_products),
            "attention": self._again("attention") + (is_list(self.remat) & ~keeps(self.remat, "context")),
            "light": self._again("light") + is_list(self.remat),
        }

    def _again(self, work: str) -> Numbers:
        return share_repeating(self.remat, work)

    def _second_products(self) -> Any:
        """Return the share of a block's products that `alternate-dots` repeats: key, output and gate."""
        heads, keys, hidden, gated = self._sizes_of_products
        second = keys + heads + hidden * gated
        return second / np.maximum(2 * (keys + heads) + hidden * (2 + gated), 1)

    @property
    def _sizes_of_products(self) -> tuple[float, Numbers, Any, bool]:
        """Return the widths of a block's heads, keys and hidden units, and whether those have a gate."""
        return self.heads_width, self.keys_width, self.mlp_share * self.hidden, self._gated

    def _kept_passes(self) -> Numbers:
        """Return how often a kept activation is read or written; a pipeline moves it between its slots."""
        return np.where(self.stage > 1, PASSES_OF_SLOTS, 2.0)

    def _kernels(self) -> Numbers:
        """Return how many kernels a block launches, forward and backward."""
        return KERNELS + KERNELS_OF_A_HOP * self._hops()

    def attention(self, *, backward: bool) -> Numbers:
        """Return the seconds of a block's attention kernels on one device, all calls over `context` together.

        A ring calls kernels on halves of its pieces of a sequence, which run at the rate of short sequences.
        """
        model = self.config.model
        assert isinstance(model, TransformerModel), "other models have no attention"
        name = self.format if self.format == "fp16" else "bf16"
        peak = self.machine.peak_flops_per_second.get(name) or self.machine.peak_flops_per_second[self.format]
        pieces = np.where(self._gathers_keys(), PIECES_OF_GATHERED_KEYS, PIECES_OF_A_RING * self.context)
        pieces = np.where(self.context > 1, pieces, 1.0)
        flops = 4 * self.tokens * self.seen * self.heads_width / self.tensor
        flops = flops * (ATTENTION_BACKWARD if backward else 1)
        if self.machine.basis == "calibration":  # a CPU runs it as products
            return flops / peak * 2 * self.machine.factors.of("matmul")
        rate = self.machine.attention_rate(model.head_dim, int(self.length), name, backward)
        length = self.length / pieces
        seconds = np.asarray(attention_seconds(rate, flops=flops, length=length, flops_per_second=peak))
        return seconds * self.machine.factors.of("attention")

    def _keys(self) -> Numbers:
        """Return how many numbers the keys of whole windows have on a device, and as many its values."""
        return self.micro * self.length * self.keys_width / self.tensor

    def _gathers_keys(self) -> NDArray[np.bool_]:
        """Return where keys and values are gathered over `context`; elsewhere they go round a ring."""
        is_small = 2 * self._keys() * self.activation_bytes <= MOST_GATHERED_BYTES
        return np.asarray((self.context > 1) & is_small & (not self.config.has_documents))

    def _hops(self) -> Numbers:
        """Return how many calls of attention a block has over `context` besides its first."""
        return np.where(self._gathers_keys(), np.ceil(np.log2(self.context)) + 1, self.context - 1)

    def _gathers_of_keys(self) -> Numbers:
        """Return the seconds of two gathers of keys and values, and of the scatter of their gradients."""
        both = 2 * self._keys()
        return 2 * self._gather(both * NARROW, CONTEXT) + self._gather(both * FP32, CONTEXT)

    def _ring(self) -> Numbers:
        """Return the seconds in which keys, values and their gradients go around the ring, both ways."""
        each = self.tokens * self.keys_width / self.tensor * (4 * NARROW + 2 * FP32)
        return (self.context - 1) * self._permute(each, CONTEXT)

    def _layer_bytes(self) -> tuple[Numbers, Numbers]:
        """Return the bytes of one block's gathered weights in 16 bits: of all but experts, and of experts."""
        scale = NARROW / self.layers / self.tensor
        of_experts = self.weights.experts * scale / self.expert
        return self.weights.blocks * scale, of_experts / (self.context if CONTEXT in self.expert_axes else 1)

    def _gathers_of_layer(self, share: float) -> Numbers:
        """Return the seconds in which the devices that share one block's weights gather them, or scatter.

        `share`: of the bytes that they have in 16 bits.
        """
        blocks, experts = self._layer_bytes()
        return self._gather_width(blocks * share) + self._gather(experts * share, FSDP)

    def _gather_width(self, whole_bytes: Any) -> Numbers:
        """Return the seconds of a gather of what is no expert: over `fsdp`, and `expert` without ZeRO-1."""
        both = self._gather(whole_bytes, FSDP, EXPERT)
        return np.where(self.zero1, self._gather(whole_bytes, FSDP), both)

    def _block_inputs_of_one(self) -> Numbers:
        return self.tokens * self.width * self.activation_bytes / self.tensor

    def _elementwise(self, widths: tuple[float, float, float]) -> Numbers:
        of_width, of_hidden, of_heads = widths
        per_token = (
            of_width * self.width + of_hidden * self.mlp_share * self.hidden + of_heads * self.heads_width
        )
        return self._passes(self.tokens * per_token / self.tensor * self.activation_bytes / NARROW)

    def _passes(self, num_bytes: Numbers) -> Numbers:
        """Return the seconds in which a device reads or writes that many bytes of its memory."""
        per_second = self.machine.memory_bytes_per_second * self.machine.memory_efficiency
        return num_bytes / per_second * self.machine.factors.of("memory-bound")

    def _host(self, num_bytes: Numbers) -> Numbers:
        rate = self.machine.host_bytes_per_second
        factor = self.machine.factors.of("host-transfer")
        return num_bytes / rate * factor if rate else np.zeros_like(num_bytes)

    def _tensor_messages(self) -> Numbers:
        """Return the seconds of a forward pass's two gathers and two scatters over `tensor`.

        Experts' buffers, which hold each token several times, are gathered in place of the MLP's input.
        """
        whole = self.tokens * self.width * self.activation_bytes
        return 4 * self._gather(whole, TENSOR) * (1 + self.mlp_share * (TENSOR not in self.expert_axes)) / 2

    def _exposed_over_tensor(self, ratio: Numbers, repeats: Numbers) -> Numbers:
        """Return how many times a forward pass's messages over `tensor` a block's passes wait for.

        Args:
            ratio: the seconds of those messages / those of the forward products.
            repeats: the share of the forward products that the backward pass repeats.
        """
        alone = np.minimum(1.0, self.stage / self.passes)

        def in_pipeline(constant: float, excess: float, share: float, of_stages: float) -> Numbers:
            return constant + excess * np.maximum(0.0, ratio - share) + of_stages * alone

        is_full, over = self._again("products") == 1, self._is_over_memory
        whole = FORWARD_AND_BACKWARD + repeats
        kept = np.where(over, PASSES_IN_PIPELINE, in_pipeline(*KEPT_IN_PIPELINE))
        full = np.where(over, whole, in_pipeline(*FULL_IN_PIPELINE))
        without_stages = np.where(over, 1.0, EXPOSED) * whole
        return np.where(self.stage > 1, np.where(is_full, full, kept), without_stages)

    def _expert_messages(self) -> Numbers:
        """Return the seconds of a forward pass's two exchanges over `expert`."""
        if self.dispatch is None:
            return np.zeros_like(self.tokens)
        row_bytes = self.width * self.activation_bytes / self.tensor
        members = self.members[:, self.expert_axes].prod(axis=1)
        return 2 * self.dispatch.exchange_seconds(self.tokens, self.mlp_share, row_bytes, members)

    def _head(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return the seconds of embedding and head for one microbatch: products, memory, gathers in excess.

        Stages share the head's positions.
        """
        rows = self.tokens / self.stage
        vocab = self.vocab / self.tensor
        width = np.full_like(rows, self.width)
        work = (
            self._product(rows, vocab, width)
            + self._product(rows, width, vocab)
            + (0.0 if self.frozen else self._product(vocab, width, rows))
        )
        formats = 2 * NARROW + (0 if self.frozen else self.gradient_bytes)
        gathers = self._gather_width(self.weights.tables / self.tensor * formats)
        hidden = self._at_most(HIDDEN) * gathers
        exposed = gathers - hidden + np.maximum(0.0, hidden - work)
        length = self.length / self.context
        chunks = np.ceil(length / self.loss_chunk)
        summed = 0.0 if self.frozen else chunks * (FP32 * 2 + NARROW) * self.width * vocab
        return work, self._passes(rows * vocab * HEAD_BYTES + summed / self.stage), exposed

    def _reduction(self, in_blocks: Numbers) -> Numbers:
        """Return the exposed seconds of the gradients' sum over `data`, and of ZeRO-1's gather.

        With several microbatches their sums are reduced once, after the last. With one, gradients are
        reduced during the backward pass, which hides them for half of the time of all passes. Under ZeRO-1
        what crosses `data` is what scatters over `context` and `expert` leave.
        """
        held = self._held_trained(over_data=False)
        left = (held - self._over_expert) / np.where(self.zero1, self.context, 1.0)
        left = left + self._over_expert / (self.context * self.expert)
        after = np.where(self.zero1, 1.0, 2.0) * self._gather(left * self.sum_bytes, DATA)
        during = np.maximum(0.0, 2 * self._gather(held * self.gradient_bytes, DATA) - 0.5 * in_blocks)
        gathers = self._gather(left * NARROW, DATA) + self._gather(held * NARROW, CONTEXT)
        return np.where(self.passes > 1, after, during) + np.where(self.zero1, gathers, 0.0)

    @property
    def _over_expert(self) -> Numbers:
        """Return the parameters that ZeRO-1 divides over `expert` between steps, as a device holds them."""
        return np.where(self.zero1, self._held_of_others(self.weights, over_data=False), 0.0)

    def _sum_over_context(self) -> Numbers:
        """Return the seconds of the one sum of gradients over `context` that follows several microbatches.

        It is one all-reduce with that over `data`, and the dearer of both counts; under ZeRO-1 a scatter.
        """
        held = np.broadcast_to(self._held_trained(over_data=False) * self.sum_bytes, self.tokens.shape)
        summed = self.collective("all-reduce", held, CONTEXT, times=2.0)
        alone = np.where(self.zero1, self._gather(held, CONTEXT), summed)
        with_data = np.where(self.zero1, 0.0, 2.0 * self._gather(held, DATA))
        return np.where((self.stage > 1) | (self.passes > 1), np.maximum(0.0, alone - with_data), 0.0)

    def _update(self) -> Numbers:
        """Return the seconds of the optimizer's passes over the state, and of its transfers to the host."""
        held = self._held_trained(over_data=True)
        waits = np.where(self.moments_wait, self._host(held * self.kept.usual * 2), 0.0)
        # Layers' parameters are fetched in both passes of each microbatch, and for the update and back.
        layers = self._held_layers() * self.kept.parameter * (2 * self.passes + 2)
        waits = waits + np.where(self.layers_wait, self._host(layers), 0.0)
        # A parameter and Adam's two moments are read and written.
        narrow = 2 * (FP32 - self.kept.parameter) + 4 * (FP32 - self.kept.moment)
        return self._passes(held * (FP32 * STATE_PASSES - narrow)) + waits

    # Messages

    def _gather(self, whole_bytes: Any, *axes: int) -> Numbers:
        """Return the seconds of an all-gather, or a reduce-scatter, of an array over some axes together."""
        return self.collective("all-gather", np.broadcast_to(whole_bytes, self.tokens.shape), *axes)

    def _permute(self, num_bytes: Numbers, axis: int) -> Numbers:
        return self.collective("collective-permute", num_bytes, axis, times=1.0)

    def collective(self, kind: str, whole_bytes: Numbers, *axes: int, times: float | None = None) -> Numbers:
        """Return the seconds of a collective over some axes together, 0 where they have one device.

        They are those by which `predict` prices it. `times`: the share of the array that one device sends;
        (n - 1) / n if None.
        """
        sizes = self.candidates.sizes[:, axes].prod(axis=1).astype(float)
        members = self.members[:, axes].prod(axis=1)
        return seconds_of(self.machine, kind, whole_bytes, sizes, members, times)
