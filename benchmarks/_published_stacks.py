"""Model what a published run's software did otherwise than our program, in seconds of a step.

A row's program is compiled as ours. Where its stack is known to run another program (attention in parts,
one kernel for each operation, the head in the last stage, reductions under the backward pass), the parts of
our prediction that differ are replaced by counts of what that stack runs. Which stack a row has is decided by
its source alone, in published_assumptions.toml, never by its error.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from _published_attention import attention_seconds
from _published_grouped import (
    Kernels,
    again_seconds,
    experts_bytes,
    grouped_seconds,
    launch_seconds,
    layer_bytes,
)
from _published_mamba import mamba_seconds
from _published_narrow import casts_in_products
from _published_sizes import Sizes
from _published_tensor import seconds_in_pieces, waited_seconds
from _sweep_program import MEGATRON

from meshwright.config import Layout, RunConfig, TransformerModel
from meshwright.predict._formulas import collective_seconds
from meshwright.predict._rates import Machine, shared

# Passes over the scores, each reading or writing 2 bytes of every score, counted by kernel.
# Forward: product writes; scale, mask and softmax read and write; dropout reads, writes and writes a mask of
# one byte; product reads. Backward: two products write and read; dropout reads both and writes; softmax
# reads two arrays and writes; two products read.
FORWARD_PASSES = 6.5
BACKWARD_PASSES = 9.5
# Where softmax and dropout are one kernel: forward it reads, and writes both results and the mask; backward
# it reads the gradient, the softmax and the mask, and writes.
FUSED_FORWARD_PASSES = 5.5
FUSED_BACKWARD_PASSES = 7.5
# Bytes of a layer's elementwise kernels in Transformer Engine and Megatron Core by token: by the width, by
# the width of keys, by the MLP's. An 8-bit result is written twice, as it is and transposed, which is as
# much as one in 16 bits. Forward: two norms 4 each, rotary 4 + 4, two residual sums 6 each, SwiGLU 6 (GELU
# 4). Backward: SwiGLU 10 (GELU 6), rotary 4 + 4, gradients of queries 4, of keys and values 8, two norms 8
# and two residual sums 6 each.
FUSED_WIDTH_BYTES, FUSED_KEY_BYTES, FUSED_GATED_BYTES, FUSED_PLAIN_BYTES = 60.0, 16.0, 16.0, 10.0
# In 8 bits besides, by the width: attention's output 4, the gradients of the outputs of MLP and attention 4
# each.
CAST_WIDTH_BYTES = 12.0
# With dropout, by the width: each of two residual sums writes a mask of one byte. Backward, each reads the
# gradient and the mask, and writes.
DROPOUT_WIDTH_BYTES = 12.0
# Bytes of a layer's elementwise kernels in llm.c by token, by its train_gpt2.cu without recomputation.
# By the width: two kernels forward that add a residual and normalise (each reads 2 arrays and writes 2), two
# norms backward (read 3, write 1), and sums for the biases of queries, of attention's output and of the
# MLP's. By the width of keys: such sums for keys and values. By the MLP's: GELU forward (read 1, write 1) and
# backward (read 2, write 1), and a sum. A product that computes GELU itself writes its argument besides.
BY_HAND_WIDTH_BYTES, BY_HAND_KEY_BYTES = 38.0, 4.0
BY_HAND_PLAIN_BYTES, BY_HAND_FUSED_GELU_BYTES = 12.0, 10.0
# By token, besides: logits are read twice (the second time perhaps from the cache), and their gradient is
# written in their place. By the width: embedding forward (read 2, write 1), embedding backward (read 2, write
# 1), the last norm backward and a gradient set to zero.
BY_HAND_LOGIT_BYTES, BY_HAND_ENDS_BYTES = 6.0, 22.0
# By weight: a product reads the 16-bit gradient that it adds to, and a step sets it to zero. AdamW reads and
# writes the rank's share of float32 weights and moments, reads the gradient twice and writes 16-bit weights.
BY_HAND_SUM_BYTES, BY_HAND_ZERO_BYTES, BY_HAND_UPDATE_BYTES = 2.0, 2.0, 30.0
# Around a ring a broadcast reaches each rank one chunk later than the rank before it. NCCL estimates that as
# 14 us between nodes and 4 us inside one in 2.18.3 and from 2.23, as 28 us in its other releases since 2.8
# (src/graph/tuning.cc, hwLat of Tree/Simple, which it takes for broadcasts). InternEvo does not state its
# release. The newer estimate was taken after the errors were seen: InternEvo's rows ask for about 10 us.
BETWEEN_STEP_SECONDS, INSIDE_STEP_SECONDS = 14e-6, 4e-6
# The host launches a layer and microbatch with full recomputation: in Megatron-DeepSpeed on A100 hosts, the
# least that vTrain's rows with 1 x 1024 tokens of width 1024 took, whatever their tensor axis was.
HOST_LAYER_SECONDS = 3.6e-3
HIDDEN_SHARE = 2 / 3  # of the last microbatch: its backward pass, under which reductions run


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a framework does otherwise than our program.

    `products`: the share that its products reach of what the chip sustains, its software's in the file; those
    in 8 bits too if `slow_in_eight_bits`. `unfused_attention`: it writes the scores, unless a row says that
    its attention is fused; `fused_dropout`: softmax and dropout of the scores are then one kernel. `eager`:
    each elementwise operation is a kernel. `whole_over_tensor`: tensor parallelism keeps norms and residuals
    whole, so that it all-reduces them. `waits_for_reductions`: gradients are reduced over `data` after the
    backward pass, and nothing runs beside that. `narrow_sums`: a run in fp16 sums and reduces gradients in
    fp16. `fused_kernels`: norms, activations and casts are Transformer Engine's, and products sum gradients.
    `dropout`: residual sums drop out. `repeats_nothing`: nothing is rematerialised unless a row says so.
    `head_in_last_stage`: the last stage computes the head besides its layers, where ours is split over all.
    `hidden_reduction`: gradients are reduced in buckets under the last microbatch's backward pass.
    `hidden_messages`: those over `stage` hide where a stage has several chunks, and weights over `data` are
    gathered under the first microbatch's forward pass. `split_products`: messages over `tensor` run beside
    products in pieces (`_published_tensor`); without it they are waited for as ours. `waits_over_tensor`:
    none runs beside a product but two of the backward pass. `wide_gathers`: weights cross the network in 16
    bits where products are in 8. `hides_all_messages`: every message runs beside products. `by_hand`: its
    elementwise kernels are those of llm.c; `fused_gelu`: GELU is part of a product there. `broadcast_arrays`:
    under ZeRO-1 a rank owns whole arrays, of so many in each layer and three besides, and the ranks that own
    any broadcast them, one after another. `document_tokens`: windows hold packed documents of so many tokens,
    and attention computes nothing between them.

    Of runs of experts: `groups_products`: products of experts run at measured rates of grouped ones.
    `sends_once`: a token's row crosses once to each domain and device (DeepEP, HybridEP). `graphs`: what of a
    layer the host launches as one CUDA graph: "" | router | attention (and router) | whole (steps).
    `waits_for_counts`: the host waits for a dispatch's counts of rows before it launches the experts.
    `fused_experts`: activations are part of the grouped products. `overlaps_experts`: experts' messages of
    one microbatch run beside another's products (`SAVED_SHARE`). `narrow_attention`: attention multiplies in
    8 bits. `measured_attention`: its cuDNN is one of those in `attention_of_cudnn`. `repeats`: what the
    backward pass computes again: "norms", "activation" of experts, "latents" (the products from them).
    """

    name: str
    software: str = ""
    products: float = 1.0
    slow_in_eight_bits: bool = False
    attention_kernel: str = "flash-2"  # as `predict` names it, where a row does not say
    unfused_attention: bool = False
    fused_dropout: bool = False
    eager: bool = False
    whole_over_tensor: bool = False
    waits_for_reductions: bool = False
    narrow_sums: bool = False
    fused_kernels: bool = False
    dropout: bool = False
    repeats_nothing: bool = False
    head_in_last_stage: bool = False
    hidden_reduction: bool = False
    hidden_messages: bool = False
    split_products: bool = False
    waits_over_tensor: bool = False
    wide_gathers: bool = False
    hides_all_messages: bool = False
    by_hand: bool = False
    fused_gelu: bool = False
    broadcast_arrays: int = 0
    document_tokens: int = 0
    groups_products: bool = False
    sends_once: bool = False
    graphs: str = ""
    waits_for_counts: bool = True
    fused_experts: bool = False
    overlaps_experts: bool = False
    narrow_attention: bool = False
    measured_attention: bool = False
    repeats: tuple[str, ...] = ()


@functools.cache
def _stacks() -> Mapping[tuple[str, str], Stack]:
    text = (Path(__file__).parent / "published_assumptions.toml").read_text()
    file = tomllib.loads(text)
    software = {entry["name"]: entry for entry in file["software"]}
    stacks: dict[tuple[str, str], Stack] = {}
    for entry in file["stacks"]:
        fields = {key: value for key, value in entry.items() if key not in ("sources", "model")}
        known = software.get(entry.get("software", ""), {})
        products = getattr(shared(), known["shared"]) if "shared" in known else known.get("products", 1.0)
        stack = Stack(**fields, products=products, slow_in_eight_bits=known.get("eight_bits", False))
        stacks |= {(source, entry.get("model", "")): stack for source in entry["sources"]}
    return stacks


def stack_of(source: str, model: str = "") -> Stack:
    """Return the stack of a source, or its stack for models whose name has a word; ours if none is named."""
    for (named, word), stack in _stacks().items():
        if named == source and word and word in model:
            return stack
    return _stacks().get((source, ""), Stack(name="ours"))


def stack_of_experts(row: Mapping[str, str], source: str) -> Stack:
    """Return the stack of a row of experts: its source's, with what its recipe says of experts.

    Of the recipes whose conditions hold, each later one adds to those before.
    """
    file = tomllib.loads((Path(__file__).parent / "published_assumptions.toml").read_text())
    stack = stack_of(source)
    for recipe in file["recipes_of_experts"]:
        holds = (
            source in recipe["sources"]
            and row["model"].startswith(tuple(recipe.get("models", ("",))))
            and row["accelerator"].startswith(tuple(recipe.get("chips", ("",))))
            and recipe.get("since", "") <= (row["date"] or "0") < recipe.get("until", "9")
            and re.search(recipe.get("precision", ""), row["precision"].lower())
        )
        if holds:
            fields = {key: value for key, value in recipe.items() if key not in CONDITIONS}
            fields |= {"repeats": tuple(recipe["repeats"])} if "repeats" in recipe else {}
            stack = replace(stack, **fields)
    return stack


CONDITIONS = ("sources", "models", "chips", "since", "until", "precision")


def otherwise(
    stack: Stack,
    *,
    config: RunConfig,
    heads: int,
    unfused: bool,
    owners: int | None = None,
    machine: Machine,
    step_seconds: float,
    exposed_seconds: Mapping[str, float],
    whole_seconds: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return what the row's stack adds to the predicted step, in seconds by reason; less is negative.

    Args:
        heads: the row's heads, which the compiled program may not have.
        unfused: whether attention is to be priced in parts.
        owners: ranks that share an optimizer under ZeRO-1; None if all replicas do.
        step_seconds: the predicted step of our program.
        exposed_seconds: its parts, by name.
        whole_seconds: the reductions of gradients by name, with what our program hides; None if not known.
    """
    sizes = Sizes.of(config)
    exposed = dict(exposed_seconds)
    added: dict[str, float] = {}
    if stack.head_in_last_stage and sizes.stages > 1:
        ours = math.fsum(exposed.pop(name) for name in tuple(exposed) if _is_of_our_head(name))
        added["sums of tied tables"] = _tied_seconds(sizes, machine) - ours
    added |= _kernels(stack, config.precision, sizes, heads if unfused else None, machine, exposed)
    added |= _over_tensor(stack, config.precision, sizes, machine, exposed)
    if stack.document_tokens:
        share = _share_of_documents(stack.document_tokens, sizes, machine)
        added["attention inside documents"] = (share - 1) * exposed.get("attention", 0.0)
    added |= seconds_of_experts(stack, config.precision, sizes, machine, exposed, whole_seconds or {})
    if stack.broadcast_arrays and config.zero1:
        ours = math.fsum(seconds for name, seconds in exposed.items() if name == "all-gather[data]")
        broadcasts = _broadcast_seconds(stack.broadcast_arrays, owners or sizes.replicas, sizes, machine)
        added["broadcasts of weights"] = broadcasts - ours
    if stack.waits_for_reductions and whole_seconds is not None:
        reductions = {name: seconds for name, seconds in whole_seconds.items() if is_reduction(name)}
        hidden = (seconds - exposed.get(name, 0.0) for name, seconds in reductions.items())
        added["reductions after the backward pass"] = math.fsum(hidden)
    if stack.narrow_sums and config.precision == "fp16" and _is_wide_sum(config, sizes):
        reductions = exposed if whole_seconds is None else whole_seconds
        wide = (seconds for name, seconds in reductions.items() if is_reduction(name))
        added["reductions in fp16"] = -math.fsum(wide) / 2
    if stack.head_in_last_stage and sizes.stages > 1 and not _is_lighter_last(config):
        ours = sizes.ticks / sizes.stages  # where every stage has its share of the head
        added["head in the last stage"] = (sizes.microbatches - ours) * _head_seconds(sizes, machine)
    if (share := products_share(stack, config.precision, machine)) < 1:
        added["slower products"] = (1 / share - 1) * exposed.get("matmul", 0.0)
    if stack.eager:
        device = step_seconds + math.fsum(added.values())
        added["launches by the host"] = max(_launch_seconds(sizes) - device, 0.0)
    reduced = math.fsum(seconds for name, seconds in exposed.items() if is_reduction(name))
    microbatch = (step_seconds - reduced) / sizes.ticks
    if stack.hidden_reduction:
        added["reductions under the backward pass"] = -min(reduced, HIDDEN_SHARE * microbatch)
    added["messages beside products"] = -_hidden_seconds(stack, config, sizes, exposed, microbatch)
    return {reason: seconds for reason, seconds in added.items() if seconds}


def seconds_of_experts(
    stack: Stack,
    precision: str,
    sizes: Sizes,
    machine: Machine,
    exposed: Mapping[str, float],
    whole: Mapping[str, float],
) -> dict[str, float]:
    """Return what a stack's experts, and the layers around them, take otherwise than ours.

    Args:
        whole: the messages of experts by name, with what our program hides.
    """
    if sizes.model.num_experts is None or not stack.groups_products:
        return {}
    layers = sizes.layers * sizes.ticks
    of_experts = layers * sizes.model.num_expert_layers / sizes.model.num_layers
    measured, ours = grouped_seconds(sizes, machine, eight_bits=precision == "fp8")
    added = {"grouped products": of_experts * (measured - ours)}
    if precision == "fp8":
        added["casts in the tables of products"] = -layers * casts_in_products(sizes, machine)
    if "latents" in stack.repeats:
        each = again_seconds(sizes, machine, eight_bits=precision == "fp8")
        added["products from latents again"] = layers * each
    added |= _exchanges(stack, sizes, exposed, whole)
    added |= _attention_of_experts(stack, sizes, machine, exposed.get("attention", 0.0))
    if stack.graphs != "whole" and stack.waits_for_counts:
        moved = sizes.tokens_of_experts * experts_bytes(sizes, _kernels_of_experts(stack, precision))
        device = measured + moved / _copied_per_second(machine)
        each = max(launch_seconds(sizes) - device, 0.0)
        rest = (exposed.get("matmul", 0.0) + exposed.get("attention", 0.0) - of_experts * ours) / layers
        around = 0.0 if stack.graphs else max(0.75 * HOST_LAYER_SECONDS - rest, 0.0)  # without a repeat
        added["launches that a dispatch waits for"] = layers * around + of_experts * each
    return added


def _attention_of_experts(stack: Stack, sizes: Sizes, machine: Machine, ours: float) -> dict[str, float]:
    """Return what attention adds: of this release's cuDNN, and in 8 bits."""
    narrow = stack.narrow_attention
    if not stack.measured_attention:
        share = NARROW_ATTENTION[64 if sizes.model.head_dim <= 64 else 128] if narrow else 1.0
        return {"attention in 8 bits": (share - 1) * ours}
    wide = attention_seconds(sizes, machine, ours, eight_bits=False)
    added = {"attention by cuDNN's tables": wide - ours}
    if narrow:
        share = NARROW_ATTENTION[64 if sizes.model.head_dim <= 64 else 128]
        added["attention in 8 bits"] = attention_seconds(sizes, machine, share * ours, eight_bits=True) - wide
    return added


def _exchanges(
    stack: Stack, sizes: Sizes, exposed: Mapping[str, float], whole: Mapping[str, float]
) -> dict[str, float]:
    """Return what a stack waits for experts' messages beside what our program does, which hides a part.

    Messages run beside the products of another microbatch only where a forward and a backward pass are
    combined (https://github.com/NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/combined_1f1b.py). The
    first forward and the last backward pass are not, and in a pipeline none of its fill and drain
    (schedules.py, get_pp_rank_microbatches): of p stages with v chunks each, (v - 1) p + 1 + 2 (p - 1 - i)
    passes of chunks on stage i, p v at the mean.
    """
    exchanges = _exchanged(whole)
    waited = math.fsum(exposed.get(name, 0.0) for name in exchanges)
    total = math.fsum(exchanges.values())
    if not stack.overlaps_experts:
        return {"experts' messages waited for": total - waited}
    combined = max(1 - sizes.stages / sizes.microbatches, 0.0)
    return {"experts' messages beside products": total * (1 - SAVED_SHARE * combined) - waited}


def _exchanged(whole: Mapping[str, float]) -> Mapping[str, float]:
    return {name: seconds for name, seconds in whole.items() if name.startswith("all-to-all[")}


def _kernels_of_experts(stack: Stack, precision: str) -> Kernels:
    return Kernels(
        eight_bits=precision == "fp8",
        fused=stack.fused_experts,
        sends_once=stack.sends_once,
        repeats=stack.repeats,
    )


# Which share of the time of experts' messages a step saves where they run beside products. Megatron Bridge's
# skills/nemo-mbridge-perf-expert-parallel-overlap/SKILL.md compares Qwen3-30B on 16 H100 (EP=16, HybridEP),
# steps 5 to 20: 21.07 s with it, 24.71 s without. Without it 9.079 ms of messages, 0.11 % of their time, ran
# beside products and attention, so they took 8.25 s. With it 36.55 % of a longer time did. What products lose
# to messages, and the host's waits, are in the seconds of these steps. Taken for all chips and networks: no
# other comparison is known that tells how long messages took.
SAVED_SHARE = 0.44
# cuDNN's attention in 8 bits takes so much of its time in 16, by the width of heads: medians over prefills of
# 2,048 positions and more on GB200 in the tables of aiconfigurator (Apache-2.0).
NARROW_ATTENTION = {64: 0.87, 128: 0.84}


def _over_tensor(
    stack: Stack, precision: str, sizes: Sizes, machine: Machine, exposed: Mapping[str, float]
) -> dict[str, float]:
    """Return what other messages over `tensor` than ours add, with what they do to products beside them."""
    ours = math.fsum(seconds for name, seconds in exposed.items() if _axes(name) == "tensor")
    if stack.whole_over_tensor:
        return {"reductions over tensor": _tensor_seconds(sizes, machine) - ours}
    if stack.waits_over_tensor and sizes.tensor > 1:
        waited = sizes.layers * sizes.ticks * waited_seconds(sizes, machine)
        return {"messages over tensor": waited - ours}
    if not stack.split_products or sizes.tensor == 1:
        return {}
    in_pieces, whole = seconds_in_pieces(sizes, machine, eight_bits=precision == "fp8")
    return {"products over tensor in pieces": sizes.layers * sizes.ticks * (in_pieces - whole) - ours}


def products_share(stack: Stack, precision: str, machine: Machine) -> float:
    """Return the share of the predicted rate that a stack's products reach."""
    holds = stack.slow_in_eight_bits if precision == "fp8" else machine.sustained_share is not None
    return stack.products if holds else 1.0


def _kernels(
    stack: Stack,
    precision: str,
    sizes: Sizes,
    unfused_heads: int | None,
    machine: Machine,
    exposed: Mapping[str, float],
) -> dict[str, float]:
    """Return what other kernels than ours add; `unfused_heads`: where attention is priced in parts."""
    added: dict[str, float] = {}
    if unfused_heads is not None:
        per_tick = sizes.layers * _attention_seconds(sizes, unfused_heads, stack.fused_dropout, machine)
        added["attention in parts"] = sizes.ticks * per_tick - exposed.get("attention", 0.0)
    if stack.eager:
        added["eager kernels"] = _eager_seconds(sizes, machine) - exposed.get("memory-bound", 0.0)
    if stack.fused_kernels:
        added["fused kernels"] = _fused_seconds(stack, sizes, machine, precision) - exposed.get(
            "memory-bound", 0.0
        )
    if stack.by_hand:
        added["kernels by hand"] = _by_hand_seconds(stack, sizes, machine) - exposed.get("memory-bound", 0.0)
    return added


def _hidden_seconds(
    stack: Stack, config: RunConfig, sizes: Sizes, exposed: Mapping[str, float], microbatch: float
) -> float:
    """Return the seconds of our waiting in which the stack's products run; `microbatch`: seconds of one."""
    if stack.hides_all_messages:
        return math.fsum(seconds for name, seconds in exposed.items() if _axes(name))
    if not stack.hidden_messages:
        return 0.0
    others = {name: seconds for name, seconds in exposed.items() if not is_reduction(name)}
    between_stages = math.fsum(seconds for name, seconds in others.items() if _axes(name) == "stage")
    gathered = {name: seconds for name, seconds in others.items() if name.startswith("all-gather[")}
    over = {name: set(_axes(name).split(",")) for name in others}
    weights = math.fsum(seconds for name, seconds in others.items() if "data" in over[name])
    weights += math.fsum(
        t for name, t in gathered.items() if "expert" in over[name] and "data" not in over[name]
    )
    hidden = between_stages if config.pipeline_chunks > 1 else 0.0
    return hidden + min(weights, (1 - HIDDEN_SHARE) * microbatch)


def _axes(name: str) -> str:
    """Return the axes of a collective's name, "data,fsdp" of "all-reduce[data,fsdp]"."""
    return name.partition("[")[2].rstrip("]")


def is_reduction(name: str) -> bool:
    """Return whether a message of this name reduces gradients over `data`."""
    axes = _axes(name).split(",")
    return name.startswith(("all-reduce[", "reduce-scatter[")) and ("data" in axes or "expert" in axes)


def _is_of_our_head(name: str) -> bool:
    """Return whether a message gathers positions for a head over all stages, or sums its tables over them."""
    return _axes(name) == "stage" and not name.startswith("collective-permute[")


def _is_wide_sum(config: RunConfig, sizes: Sizes) -> bool:
    """Return whether our program reduces gradients in fp32, because it sums them over microbatches."""
    return config.gradient_sum == "fp32" and (sizes.microbatches > 1 or sizes.stages > 1)


def _is_lighter_last(config: RunConfig) -> bool:
    """Return whether the layers leave room for the head: 126 of 128 in Llama 3's pipelines."""
    parts = Layout.parse(config.layout).size("stage") * config.pipeline_chunks
    assert isinstance(config.model, TransformerModel)
    return config.model.num_layers % parts != 0


def _product(machine: Machine, batch: float, m: float, n: float, k: float, num_bytes: float) -> float:
    name = "bf16" if "bf16" in machine.peak_flops_per_second else "fp16"
    return float(machine.product_seconds(name, m=m, n=n, k=k, batch=batch, num_bytes=num_bytes))


def _attention_seconds(sizes: Sizes, heads: int, fused_dropout: bool, machine: Machine) -> float:
    """Return the seconds of one layer's attention in parts: two products forward, four backward."""
    length, head = sizes.length, sizes.model.embed_dim // heads
    batch = sizes.tokens / length * heads / sizes.tensor
    scores = _product(machine, batch, length, length, head, 0.0)
    values = _product(machine, batch, length, head, length, 0.0)
    forwards = 2 if sizes.repeats else 1
    products = (forwards + 1) * scores + (forwards + 3) * values
    forward, backward = FORWARD_PASSES, BACKWARD_PASSES
    if fused_dropout:
        forward, backward = FUSED_FORWARD_PASSES, FUSED_BACKWARD_PASSES
    passes = forwards * forward + backward
    return products + passes * 2 * batch * length**2 / _copied_per_second(machine)


def _share_of_documents(tokens: int, sizes: Sizes, machine: Machine) -> float:
    """Return which share of a whole window's attention remains where it holds documents of `tokens`.

    FLOPs fall with the length, and so does the rate: that of the kernel at a document's length.
    """
    head, wide = sizes.model.head_dim, "bf16" if "bf16" in machine.peak_flops_per_second else "fp16"
    seconds: list[float] = []  # of the FLOPs of one token, up to a factor
    for length in (tokens, sizes.length):
        passes = ((1.0, False), (2.5, True))  # backward: five products beside two
        rates = [(flops, machine.attention_rate(head, length, wide, backward)) for flops, backward in passes]
        each = (flops * (length + rate.half_length) / rate.efficiency for flops, rate in rates)
        seconds.append(math.fsum(each))
    return seconds[0] / seconds[1]


def _copied_per_second(machine: Machine) -> float:
    return machine.memory_bytes_per_second * machine.memory_efficiency


def _eager_seconds(sizes: Sizes, machine: Machine) -> float:
    """Return the seconds of a step's elementwise kernels, each reading and writing memory.

    Bytes are those that `_sweep_program` counts for Megatron-LM; a repeated forward pass adds its third.
    """
    model, tensor, count = sizes.model, sizes.tensor, MEGATRON
    passed = count.whole_width_bytes * model.embed_dim
    passed += (count.width_bytes * model.embed_dim + count.mlp_bytes * model.mlp_dim) / tensor
    passed *= 4 / 3 if sizes.repeats else 1
    layer = sizes.tokens * passed + count.gradient_bytes * sizes.weights
    logits = _logit_bytes(sizes)
    update = _update_bytes(sizes)
    moved = sizes.ticks * sizes.layers * layer + sizes.microbatches * logits + update
    return moved / _copied_per_second(machine)


def _logit_bytes(sizes: Sizes) -> float:
    """Return the bytes that cast, softmax and loss of one microbatch's logits move."""
    return MEGATRON.logit_bytes * sizes.tokens * sizes.model.vocab_size / sizes.tensor


def _update_bytes(sizes: Sizes) -> float:
    """Return the bytes that clipping and AdamW move: of gathered gradients, and of the rank's own share."""
    each = MEGATRON.optimizer_bytes / sizes.gathered + MEGATRON.sharded_optimizer_bytes / sizes.sharded
    return each * sizes.layers * sizes.weights


def _fused_seconds(stack: Stack, sizes: Sizes, machine: Machine, precision: str) -> float:
    """Return the seconds of a step's elementwise kernels in Transformer Engine, split over `tensor`.

    Sums of gradients are those of the products' own kernels. A repeated forward pass adds its third.
    Those of Mamba-2 are mamba_ssm's.
    """
    model = sizes.model
    keys = model.num_kv_heads * model.head_dim
    mlp = FUSED_GATED_BYTES if model.mlp == "gated" else FUSED_PLAIN_BYTES
    width = FUSED_WIDTH_BYTES + (CAST_WIDTH_BYTES if precision == "fp8" else 0.0)
    width += DROPOUT_WIDTH_BYTES if stack.dropout else 0.0
    passed = width * model.embed_dim + FUSED_KEY_BYTES * keys + mlp * model.mlp_dim
    mamba = 0.0
    if model.num_experts is not None:
        passed = layer_bytes(sizes, _kernels_of_experts(stack, precision))
        mamba = sizes.ticks * sizes.layers * mamba_seconds(sizes, machine)
    passed *= (4 / 3 if sizes.repeats else 1) / sizes.tensor
    moved = sizes.ticks * sizes.layers * sizes.tokens * passed + sizes.microbatches * _logit_bytes(sizes)
    return mamba + (moved + _update_bytes(sizes)) / _copied_per_second(machine)


def _by_hand_seconds(stack: Stack, sizes: Sizes, machine: Machine) -> float:
    """Return the seconds of a step's elementwise kernels in llm.c."""
    model = sizes.model
    mlp = BY_HAND_FUSED_GELU_BYTES if stack.fused_gelu else BY_HAND_PLAIN_BYTES
    keys = BY_HAND_KEY_BYTES * model.num_kv_heads * model.head_dim
    layer = sizes.tokens * (BY_HAND_WIDTH_BYTES * model.embed_dim + keys + mlp * model.mlp_dim)
    layer += BY_HAND_SUM_BYTES * sizes.weights
    ends = sizes.tokens * (BY_HAND_LOGIT_BYTES * model.vocab_size + BY_HAND_ENDS_BYTES * model.embed_dim)
    moved = sizes.microbatches * (sizes.layers * layer + ends)
    moved += (BY_HAND_ZERO_BYTES + BY_HAND_UPDATE_BYTES / sizes.sharded) * model.num_parameters
    return moved / _copied_per_second(machine)


def _broadcast_seconds(arrays: int, owners: int, sizes: Sizes, machine: Machine) -> float:
    """Return the seconds in which `owners` ranks broadcast their 16-bit weights at the end of a step.

    Source: InternEvo, internlm/solver/optimizer/hybrid_zero_optim.py: `_partition_param_list` gives each
    array to the rank that owns least, the largest first, and `broadcast_params` waits for all broadcasts.

    Args:
        arrays: of a layer; embedding, head and last norm are three more.
    """
    model = sizes.model
    count = min(owners, arrays * model.num_layers + 3)
    payload = 2 * model.num_parameters / sizes.tensor
    inside = owners * sizes.tensor <= machine.devices_per_domain
    if inside:
        link = machine.inside_rate(owners)
        assert link is not None
        rate = machine.rates.collective_for("all-gather", owners)
        sent = float(collective_seconds(rate, wire_bytes=payload, bytes_per_second=link))
    else:
        assert machine.between_bytes_per_second is not None
        network = machine.between_bytes_per_second * machine.shared.network_efficiency
        # The ranks of a node on one ring share its links with those of the other ranks of `tensor`.
        sent = payload / (network * machine.devices_per_domain / sizes.tensor)
    return sent + count * owners * (INSIDE_STEP_SECONDS if inside else BETWEEN_STEP_SECONDS)


def _launch_seconds(sizes: Sizes) -> float:
    """Return the seconds in which a host launches a step's kernels; without a repeat there are fewer."""
    return (1.0 if sizes.repeats else 0.75) * HOST_LAYER_SECONDS * sizes.layers * sizes.ticks


def _tensor_seconds(sizes: Sizes, machine: Machine) -> float:
    """Return the seconds of a step's all-reduces over `tensor`: whole sequences, and nothing hides them.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3: two in a layer's forward pass,
    which a repeated one has again, and two in its backward pass.
    """
    if sizes.tensor == 1:
        return 0.0
    payload = 2 * sizes.tokens * sizes.model.embed_dim
    members = min(sizes.tensor, machine.devices_per_domain)
    domains = -(-sizes.tensor // members)
    link = machine.inside_rate(members)
    assert link is not None
    rate = machine.rates.collective_for("all-reduce", members)
    wire = 2 * (sizes.tensor - 1) / sizes.tensor * payload
    seconds = float(collective_seconds(rate, wire_bytes=wire, bytes_per_second=link))
    if domains > 1:
        assert machine.between_bytes_per_second is not None
        network = machine.between_bytes_per_second * machine.shared.network_efficiency * members
        seconds = max(seconds, (payload if domains == 2 else wire) / network)
    return (6 if sizes.repeats else 4) * sizes.layers * sizes.ticks * seconds


def _tied_seconds(sizes: Sizes, machine: Machine) -> float:
    """Return the seconds in which the first and the last stage sum the 16-bit gradients of tied tables.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2, note 2: nothing else of the
    head is sent between stages.
    """
    if not sizes.model.tied_embeddings:
        return 0.0
    payload = 2 * sizes.model.vocab_size * sizes.model.embed_dim / sizes.tensor
    per_domain = machine.devices_per_domain
    inside = sizes.stages * sizes.replicas * sizes.tensor <= per_domain
    link = machine.inside_rate(2) if inside else machine.between_bytes_per_second
    assert link is not None
    if inside:
        rate = machine.rates.collective_for("all-reduce", 2)
        return float(collective_seconds(rate, wire_bytes=payload, bytes_per_second=link))
    return payload / (link * machine.shared.network_efficiency)


def _head_seconds(sizes: Sizes, machine: Machine) -> float:
    """Return the seconds of the head's three products for one microbatch."""
    columns, width = sizes.model.vocab_size / sizes.tensor, sizes.model.embed_dim
    shapes = ((sizes.tokens, columns, width), (sizes.tokens, width, columns), (width, columns, sizes.tokens))
    return math.fsum(_product(machine, 1, m, n, k, 2 * (m * k + k * n + m * n)) for m, n, k in shapes)
