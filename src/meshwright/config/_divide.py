"""What a layout makes of a run: its batch, and whether every dimension that an axis splits divides by it."""

from __future__ import annotations

import math

from meshwright.errors import InputError

from ._base import Problem
from ._layout import RESERVED_AXES, Layout, near_divisors, near_multiples, or_list
from ._models import CruncherModel, LeNetModel, LinearModel, Model, ResNetModel
from ._problems import input_error
from ._run import RunConfig


def settled(config: RunConfig, layout: Layout) -> RunConfig:
    """The run as it is on a resolved `layout`: `batch.sequences_per_replica` turned into `batch.sequences`.

    Rows of a batch are split over data * fsdp; those are the replicas. A settled run keeps its batch on
    whatever layout it goes on.
    """
    each = config.batch.sequences_per_replica
    if each is None:
        return config
    sequences = each * layout.size("data") * layout.size("fsdp")
    batch = config.batch.model_copy(update={"sequences": sequences, "sequences_per_replica": None})
    return config.model_copy(update={"batch": batch})


def check_layout(config: RunConfig, layout: Layout) -> None:
    """Refuse a resolved `layout` over which a settled `config` cannot be split evenly.

    Checked: the batch over data * fsdp * microbatch; parameters' embed (width, input) dimension over
    fsdp, under ZeRO-1 over data * fsdp; heads, key-value heads, MLP, vocabulary and sequence over tensor; of
    lenet, its hidden layer.

    Raises:
        InputError: a reserved axis, or what does not divide, all at once, with the nearest sizes.
    """
    for name in RESERVED_AXES:
        if layout.size(name) > 1:
            raise InputError(
                f"layout {layout}: axis {name!r} is reserved; no model of ours is split over it yet",
                hint=f"use {name}=1; the axes data, fsdp and tensor are built",
            )
    problems = _batch_problems(config, layout)
    problems += _axis_problems("tensor", layout.size("tensor"), _split_sizes(config, "tensor"))
    axis, size = ("fsdp", layout.size("fsdp"))
    if config.zero1:
        axis, size = ("data*fsdp", layout.size("data") * size)
    problems += _axis_problems(axis, size, _split_sizes(config, "fsdp"))
    if problems:
        raise input_error(f"{config.name} on layout {layout}", problems)


def _split_sizes(config: RunConfig, axis: str) -> dict[str, int]:
    """The quantities that an axis splits, by their dotted path; by words where no key sets them."""
    model: Model = config.model
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
    """Sizes of the axis are suggested only if they suit every quantity it splits."""
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


def _batch_problems(config: RunConfig, layout: Layout) -> list[Problem]:
    sequences, micro = config.batch.sequences, config.batch.microbatch_sequences
    replicas = layout.size("data") * layout.size("fsdp")
    if sequences % (replicas * (micro or 1)) == 0:
        return []
    by_micro = f" x batch.microbatch_sequences = {micro}" if micro else ""
    ways = near_divisors(sequences // (micro or 1), replicas)
    return [
        (
            "batch.sequences",
            f"= {sequences} does not divide over data*fsdp = {replicas}{by_micro}",
            f"use batch.sequences = {or_list(near_multiples(replicas * (micro or 1), sequences))}, "
            f"or data*fsdp = {or_list(ways)}",
        )
    ]
