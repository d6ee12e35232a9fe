"""Check that a layout divides a run's dimensions, and that a chip computes in its formats.

This module also settles a run's batch on a layout, and returns the ticks of its pipeline.
"""

from __future__ import annotations

import math

from meshwright.errors import InputError
from meshwright.hardware import Chip

from ._base import Problem
from ._layout import Layout, Ticks, near_divisors, near_multiples, or_list
from ._models import CruncherModel, LeNetModel, LinearModel, Model, ResNetModel, TransformerModel
from ._problems import input_error
from ._run import RunConfig


def settled(config: RunConfig, layout: Layout) -> RunConfig:
    """Return the run with `batch.sequences_per_replica` turned into `batch.sequences` on a resolved layout.

    The rows of a batch are split over data * fsdp * expert; those are the replicas. A settled run keeps its
    batch on any layout with which it continues.
    """
    each = config.batch.sequences_per_replica
    if each is None:
        return config
    sequences = each * layout.num_replicas
    batch = config.batch.model_copy(update={"sequences": sequences, "sequences_per_replica": None})
    return config.model_copy(update={"batch": batch})


def ticks_of(config: RunConfig, layout: Layout) -> Ticks | None:
    """Return the pipeline ticks of a settled run on a resolved layout; None if the layout has one stage."""
    if layout.size("stage") == 1:
        return None
    replicas = layout.num_replicas
    rows = (config.batch.microbatch_sequences or config.batch.sequences // replicas) * replicas
    return Ticks(
        schedule=config.pipeline,
        num_stages=layout.size("stage"),
        num_microbatches=config.batch.sequences // rows,
    )


def check_layout(config: RunConfig, layout: Layout) -> None:
    """Raise if a settled `config` cannot be split evenly over a resolved `layout`.

    Checked: the batch over data * fsdp * expert * microbatch; a Transformer's layers over stage; the
    parameters' embed (width, input) dimension over fsdp, with ZeRO-1 over data * fsdp; experts over expert;
    heads, key-value heads, MLP, vocabulary and sequence, the cruncher's width and lenet's hidden layer over
    tensor; a Transformer's sequence over context, in two pieces for each device, and its loss in whole chunks
    there.

    Raises:
        InputError: an axis splits nothing of the model, or dimensions do not divide; the error lists all
            of them with the nearest sizes.
    """
    if layout.size("expert") > 1 and not _has_experts(config.model):
        raise InputError(
            f"{config.name} on layout {layout}: axis 'expert' splits experts, and the model has none",
            hint=f"use data={layout.size('data') * layout.size('expert')} in place of both, or set "
            "model.num_experts",
        )
    problems = _stage_problems(config, layout) + _batch_problems(config, layout)
    for axis in ("stage", "expert", "tensor"):
        problems += _axis_problems(axis, layout.size(axis), _split_sizes(config, axis))
    axis, size = ("fsdp", layout.size("fsdp"))
    if config.zero1:
        axis, size = ("data*fsdp", layout.size("data") * size)
    problems += _axis_problems(axis, size, _split_sizes(config, "fsdp"))
    problems += _context_problems(config, layout) or _position_problems(config, layout)
    if problems:
        raise input_error(f"{config.name} on layout {layout}", problems)


def _has_experts(model: Model) -> bool:
    return isinstance(model, TransformerModel) and model.num_experts is not None


def _stage_problems(config: RunConfig, layout: Layout) -> list[Problem]:
    """Return the reason why a run cannot have stages, each of which holds some of the stacked layers."""
    stages, model = layout.size("stage"), config.model
    if stages == 1:
        return []
    if not isinstance(model, TransformerModel):
        ways = stages * layout.size("data")
        what = f"= {model.kind!r}, but stage = {stages} splits the layers of a transformer"
        return [("model.kind", what, f"use data={ways} in place of stage and data")]
    if model.unroll:
        what = f"= true, but stage = {stages} splits layers that are stacked"
        return [("model.unroll", what, "use model.unroll = false")]
    if config.offload in ("activations", "both"):
        what = f"= {config.offload!r}, but stage = {stages} keeps what it saves in slots on the devices"
        return [("offload", what, 'use offload = "optimizer"')]
    return []


def _split_sizes(config: RunConfig, axis: str) -> dict[str, int]:
    """Return the quantities that an axis splits, by dotted path, or by words if no key sets them."""
    model: Model = config.model
    if axis == "stage":
        return {"model.num_layers": model.num_layers} if isinstance(model, TransformerModel) else {}
    if axis == "expert":
        experts = model.num_experts if isinstance(model, TransformerModel) else None
        return {"model.num_experts": experts} if experts else {}
    if isinstance(model, LinearModel):
        return {"model.input_dim": model.input_dim} if axis == "fsdp" else {}
    if isinstance(model, CruncherModel):
        return {"model.width": model.width}
    if isinstance(model, LeNetModel):
        return {"the inputs of the hidden layer": 800} if axis == "fsdp" else {"the hidden units": 128}
    if isinstance(model, ResNetModel):
        return {"the inputs of the head": 512} if axis == "fsdp" else {}
    if axis == "fsdp":
        return {"model.embed_dim": model.embed_dim}
    return {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.num_kv_heads,
        "model.mlp_dim": model.mlp_dim,
        "model.vocab_size": model.vocab_size,
        "batch.sequence_length": config.batch.sequence_length,
    }


def _axis_problems(axis: str, size: int, quantities: dict[str, int]) -> list[Problem]:
    """Return the quantities that do not divide over an axis.

    A size of the axis is suggested only if it suits every quantity that the axis splits.
    """
    common = math.gcd(*quantities.values())
    return [
        (
            path,
            f"= {quantity} does not divide over {axis} = {size}",
            f"use {axis}={or_list(near_divisors(common, size))}"
            + (f", or {path} = {or_list(near_multiples(size, quantity))}" if "." in path else ""),
        )
        for path, quantity in quantities.items()
        if quantity % size
    ]


def _context_problems(config: RunConfig, layout: Layout) -> list[Problem]:
    size, tensor = layout.size("context"), layout.size("tensor")
    if size == 1:
        return []
    if not isinstance(config.model, TransformerModel):
        what = f"= {config.model.kind} has no sequence for context = {size} to split"
        return [("model.kind", what, "use context=1")]
    length, pieces = config.batch.sequence_length, math.lcm(2, tensor)
    if length % (size * pieces):
        ways = near_divisors(length // pieces, size) if length % pieces == 0 else []
        return [
            (
                "batch.sequence_length",
                f"= {length} does not divide into {pieces} pieces for each of context = {size} devices",
                f"use batch.sequence_length = {or_list(near_multiples(size * pieces, length))}"
                + (f", or context={or_list(ways)}" if ways else ""),
            )
        ]
    return []


def _position_problems(config: RunConfig, layout: Layout) -> list[Problem]:
    """Return problems with the split of positions.

    `context` splits the positions of a Transformer. Over stages, the head's work is split by position too, as
    `context` and `tensor` split the residual.
    """
    model, length, stages = config.model, config.batch.sequence_length, layout.size("stage")
    if not isinstance(model, TransformerModel):
        return []
    splitting = ("context", "tensor", "stage") if stages > 1 else ("context",)
    splitting = tuple(axis for axis in splitting if layout.size(axis) > 1)
    num_parts = math.prod(layout.size(axis) for axis in splitting)
    if length % num_parts:
        what = f"= {length} does not divide over {'*'.join(splitting)} = {num_parts}"
        # Each part of `context` has two halves.
        multiple = math.lcm(num_parts, 2 * layout.size("context")) if "context" in splitting else num_parts
        nearest = or_list(near_multiples(multiple, length))
        return [("batch.sequence_length", what, f"use batch.sequence_length = {nearest}")]
    held = length // (layout.size("context") * stages)
    chunk = min(model.loss_chunk, held)
    if held % chunk == 0:
        return []
    names = "*".join(axis for axis in splitting if axis != "tensor")
    what = f"= {model.loss_chunk} does not divide the {held} positions of {names} = {length // held}"
    return [("model.loss_chunk", what, f"use model.loss_chunk = {near_divisors(held, chunk)[0]}")]


def _batch_problems(config: RunConfig, layout: Layout) -> list[Problem]:
    sequences, micro = config.batch.sequences, config.batch.microbatch_sequences
    replicas = layout.num_replicas
    names = "data*fsdp*expert" if layout.size("expert") > 1 else "data*fsdp"
    if sequences % (replicas * (micro or 1)) == 0:
        return []
    by_micro = f" x batch.microbatch_sequences = {micro}" if micro else ""
    ways = near_divisors(sequences // (micro or 1), replicas)
    return [
        (
            "batch.sequences",
            f"= {sequences} does not divide over {names} = {replicas}{by_micro}",
            f"use batch.sequences = {or_list(near_multiples(replicas * (micro or 1), sequences))}, "
            f"or {names} = {or_list(ways)}",
        )
    ]


NEEDS = {"fp16": ("fp16",), "fp8": ("fp8-e4m3", "fp8-e5m2")}
"""Formats by precision; every chip has fp32, and compilers widen bf16 where a chip has none."""


def check_precision(config: RunConfig, chip: Chip) -> None:
    """Raise if `chip` has no units for a run's precision, which means no peak in the catalog.

    A CPU emulates all formats.

    Raises:
        InputError: the error names the chip, the formats that it lacks, and those that it has.
    """
    has = chip.peak_flops_per_second
    lacking = [name for name in NEEDS.get(config.precision, ()) if name not in has]
    if chip.platform == "cpu" or not lacking:
        return
    raise InputError(
        f'precision = "{config.precision}" multiplies in {" and ".join(lacking)}, for which {chip.name} has '
        f"no units; it has {', '.join(has)}",
        hint=f'use precision = "{"bf16" if "bf16" in has else "fp32"}", '
        f"or a chip that has them: `meshwright fleets`",
    )
