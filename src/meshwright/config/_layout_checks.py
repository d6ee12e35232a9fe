"""Check that a layout divides a run's dimensions, and that a chip computes in its formats.

This module also resolves a run's batch on a layout and to how many fast domains it sends a token's row once,
and returns the ticks of its pipeline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.errors import InputError

from ._layout import ACTIVATION_RULES, EXPERT_DIMS, PARAMETER_RULES, ZERO1_AXES, Layout, Ticks
from ._lora import lora_room
from ._run_config import RunConfig
from ._section import Problem, input_error, near_divisors, near_multiples, or_list
from ._transformer import TransformerModel

MOST_OF_AN_AXIS, MOST_TRIED = 1024, 200  # of a layout near the run's own


if TYPE_CHECKING:
    from meshwright.hardware import Chip, Fleet


def resolve_batch(config: RunConfig, layout: Layout) -> RunConfig:
    """Return the run with the batch and the microbatch that it has on a resolved layout.

    The rows of a batch are split over data * fsdp * expert; those are the replicas.
    `batch.sequences_per_replica` becomes `batch.sequences`, which a resolved run keeps on any layout with
    which it continues. A microbatch larger than a replica's share of the batch becomes that share.

    >>> from meshwright.config import load_config
    >>> run = load_config("bytes-nano", ["batch.sequences_per_replica=6", "batch.microbatch_sequences=6"])
    >>> resolve_batch(run, Layout.parse("data=2,fsdp=4,tensor=2")).batch.sequences
    48
    >>> run = load_config("bytes-nano", ["batch.sequences=8", "batch.microbatch_sequences=4"])
    >>> resolve_batch(run, Layout.parse("data=4")).batch.microbatch_sequences
    2
    """
    batch, changes = config.batch, dict[str, int | None]()
    if batch.sequences_per_replica is not None:
        changes = {
            "sequences": batch.sequences_per_replica * layout.num_replicas,
            "sequences_per_replica": None,
        }
    share, left_over = divmod(changes.get("sequences") or batch.sequences, layout.num_replicas)
    if batch.microbatch_sequences is not None and not left_over and share < batch.microbatch_sequences:
        changes["microbatch_sequences"] = share
    return config.model_copy(update={"batch": batch.model_copy(update=changes)}) if changes else config


def ticks_of(config: RunConfig, layout: Layout) -> Ticks | None:
    """Return the pipeline ticks of a resolved run on a resolved layout; None if the layout has one stage.

    >>> from meshwright.config import load_config
    >>> ticks_of(load_config("llama3-8b"), Layout.parse("stage=4,fsdp=16")).num_microbatches
    32
    """
    if layout.size("stage") == 1:
        return None
    replicas = layout.num_replicas
    rows = (config.batch.microbatch_sequences or config.batch.sequences // replicas) * replicas
    return Ticks(
        schedule=config.pipeline,
        num_stages=layout.size("stage"),
        num_microbatches=config.batch.sequences // rows,
        num_chunks=config.pipeline_chunks,
        num_layers=_num_layers(config),
        num_padded_layers=padded_layers(config, layout.size("stage")),
    )


def padded_layers(config: RunConfig, num_stages: int) -> int:
    """Return the number of a run's layers, raised so that whole groups of them divide over the stages.

    >>> from meshwright.config import load_config
    >>> padded_layers(load_config("llama3-405b"), 16)  # of 126
    128
    """
    group = len(config.model.period) if isinstance(config.model, TransformerModel) else 1
    unit = num_stages * group
    return -(-_num_layers(config) // unit) * unit


def num_stacked_layers(config: RunConfig) -> int | None:
    """Return the number of a transformer's layers that are alike; None for a model without stacked layers."""
    return config.model.num_stacked_layers if isinstance(config.model, TransformerModel) else None


def _num_layers(config: RunConfig) -> int:
    return num_stacked_layers(config) or 1


def check_layout(config: RunConfig, layout: Layout) -> None:
    """Raise if a resolved `config` cannot be split evenly over a resolved `layout`.

    Checked: the batch over data * fsdp * expert * microbatch; the layers, padded for the stages, over chunks;
    each other dimension of `ModelSizes.split_dims` over the axes of its rule, with ZeRO-1 for the parameters;
    positions of sequences over tensor and over context, there in two pieces for each device. Key-value heads
    may also be fewer than `tensor`, each for several whole devices. Where `stage` and `tensor` do not divide
    the vocabulary, `tensor` has to divide the columns of tables, with the axes of `embed`.

    Raises:
        InputError: an axis splits nothing of the model, or dimensions do not divide; the error lists all
            of them with the nearest sizes.
    """
    dims = config.model.sizes.split_dims
    if layout.size("expert") > 1 and not dims.get("experts"):
        raise InputError(
            f"{config.name} on layout {layout}: axis 'expert' splits experts, and the model has none",
            hint=f"use data={layout.size('data') * layout.size('expert')} in place of both, or set "
            "model.num_experts",
        )
    if config.model.takes == "sequences":
        dims = {**dims, "residual_sequence": {"batch.sequence_length": config.batch.sequence_length}}
    rules = {**ACTIVATION_RULES, **PARAMETER_RULES}
    problems = [
        *_stage_problems(config, layout),
        *_sum_problems(config, layout),
        *_batch_problems(config, layout),
    ]
    dims = {**dims, "kv_heads": _not_repeated(dims.get("kv_heads", {}), layout)}
    problems += _table_problems(config, layout, dims.pop("vocab", {}), dims.get("embed", {}))
    for axis in ("expert", "tensor", "fsdp"):  # `_stage_problems` has the rule of `stage`
        # What `expert` splits together with `fsdp` is looked at with `fsdp`.
        its = [dim for dim in dims if axis in rules[dim] and ("fsdp" in rules[dim]) == (axis == "fsdp")]
        split = [dims[dim].items() for dim in its]
        axes = (axis,)
        if axis == "fsdp":
            axes = _axes_of_width(config, layout)
        elif axis == "expert":
            _, over = EXPERT_DIMS[config.fold_experts]
            axes = tuple(axis for axis in over if layout.size(axis) > 1) or (axis,)
            problems += _domain_problems(config, layout, axes)
        problems += _axis_problems(axes, layout, dict(itertools.chain(*split)))
    if config.lora.rank is not None and config.lora.base == "nf4":
        problems += lora_room().block_problems(config, layout)
    problems += _context_problems(config, layout)
    if problems:
        raise input_error(f"{config.name} on layout {layout}", problems)


def _domain_problems(config: RunConfig, layout: Layout, axes: Sequence[str]) -> Iterator[Problem]:
    """Yield that the devices of a group of experts do not divide over its fast domains."""
    devices, domains = math.prod(layout.size(axis) for axis in axes), config.expert_domains or 1
    if devices == 1 < domains:
        yield "expert_domains", f"= {domains}, but no axis of the layout splits the experts", "leave it out"
    elif devices % domains:
        what = f"= {domains} does not divide the {devices} devices of {'*'.join(axes)}"
        yield "expert_domains", what, f"use {or_list(near_divisors(devices, domains))}, or leave it out"


def resolve_dispatch(config: RunConfig, layout: Layout, fleet: Fleet) -> RunConfig:
    """Return the run with the domains to each of which a token's row is sent once; unchanged without any.

    A room outside the core reckons them, for models with experts alone.

    >>> from meshwright.config import Layout, load_config
    >>> from meshwright.hardware import Fleet
    >>> run = load_config("llama3-8b", ["model.num_experts=128", "model.experts_per_token=8"])
    >>> resolve_dispatch(run, Layout.parse("fsdp=4,expert=16"), Fleet.parse("64xH100")).expert_domains
    2
    """
    if not isinstance(config.model, TransformerModel) or config.model.num_experts is None:
        return config
    from meshwright.registry import room

    domains: int = room("experts").domains_of_layout(config, layout, fleet)
    return config if domains == 1 else config.model_copy(update={"expert_domains": domains})


def check_slices(fleet: Fleet, layout: Layout) -> None:
    """Raise if the groups of an axis lie unevenly over a fleet's TPU slices; any other fleet passes.

    The outermost axes join slices. An axis may be part of it: of `fsdp=512` on two slices of 256, each group
    has two halves. XLA ends the process that compiles anything else (libtpu 0.0.42 and 0.0.50).

    >>> from meshwright.hardware import Fleet
    >>> check_slices(Fleet.parse("2xv5e-256"), Layout.parse("data=4,fsdp=128"))

    Raises:
        InputError: the groups of an axis lie in several slices, and not alike in each.
    """
    if fleet.domain != "slice" or fleet.num_domains == 1:
        return
    slice_size, stride = fleet.chips_per_domain, 1
    for name, size in reversed(layout.axes):
        if not _lies_evenly(slice_size, stride, size):
            inside = near_divisors(slice_size // math.gcd(slice_size, stride), size)
            raise InputError(
                f"layout {layout} on {fleet.name}: groups of {name}={size} straddle slices of {slice_size} "
                "devices, and not alike: XLA joins only groups that divide alike over slices",
                hint=f"use {name}={or_list(inside)}, which stays in a slice, and put the rest into an axis "
                "before it",
            )
        stride *= size


def _lies_evenly(slice_size: int, stride: int, size: int) -> bool:
    """Return whether groups of devices stay in one slice, or divide alike over several.

    Args:
        stride: the devices between neighbours of a group.
        size: the devices of a group.

    >>> [_lies_evenly(256, 1, size) for size in (128, 192, 256, 384, 512)]
    [True, False, True, False, True]
    """
    reach = stride * size
    return stride >= slice_size or slice_size % reach == 0 or reach % slice_size == 0


def on_nearest_layout(config: RunConfig, num_devices: int) -> RunConfig | None:
    """Return the run on the legal layout of `num_devices` that is nearest to its own; None without one.

    It has the axes of the run's own layout, without those of size 1. The axis of size -1, else the outermost
    one, takes what the others leave. The distance is the sum of the others' changes by factors of two. Of
    equally near ones the later axes keep their sizes. If the layers of the stages have no chunks of the run's
    number, they have one. Where no layout of these axes is legal, replicas along `data` are tried beside
    `fsdp`: a width of 2880 divides over 64 devices, and not over 128.

    >>> from meshwright.config import load_config
    >>> on_nearest_layout(load_config("llama3-405b"), 8).layout
    'tensor=8'
    """
    own = Layout.parse(config.layout)
    found = _nearest(config, own, num_devices)
    if found is None and "fsdp" in own.names and "data" not in own.names:
        return _nearest(config, Layout(axes=(("data", 1), *own.axes)), num_devices)
    return found


def _nearest(config: RunConfig, own: Layout, num_devices: int) -> RunConfig | None:
    """Return the run on the legal layout of `num_devices` with the axes of `own` that is nearest to it."""
    rest = own.names[own.sizes.index(-1) if -1 in own.sizes else 0]
    others = [(name, size) for name, size in own.axes if name != rest]
    found: list[tuple[float, tuple[float, ...], Layout]] = []
    for sizes in _divided(num_devices, len(others)):
        changes = [abs(math.log2(size / kept)) for size, (_, kept) in zip(sizes, others, strict=True)]
        named = dict(zip((name for name, _ in others), sizes, strict=True))
        named[rest] = num_devices // math.prod(sizes)
        axes = tuple((name, named[name]) for name in own.names if named[name] > 1)
        found.append((sum(changes), tuple(reversed(changes)), Layout(axes=axes or ((rest, 1),))))
    for _, _, layout in sorted(found, key=lambda each: each[:2])[:MOST_TRIED]:
        for chunks in dict.fromkeys((config.pipeline_chunks, 1)):
            run = config.model_copy(update={"layout": str(layout), "pipeline_chunks": chunks})
            try:
                check_layout(resolve_batch(run, layout), layout)
            except InputError:
                continue
            return run
    return None


def _divided(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of `parts` axes, in each combination whose product divides `number`."""
    if parts == 0:
        yield ()
        return
    for size in (size for size in range(1, min(number, MOST_OF_AN_AXIS) + 1) if number % size == 0):
        yield from ((size, *rest) for rest in _divided(number // size, parts - 1))


def _axes_of_width(config: RunConfig, layout: Layout) -> tuple[str, ...]:
    """Return the axes that split the width of parameters between steps: `fsdp`, and others with devices."""
    more = ZERO1_AXES[::-1] if config.zero1 else PARAMETER_RULES["embed"]
    return (*(axis for axis in more if axis != "fsdp" and layout.size(axis) > 1), "fsdp")


def _not_repeated(kv_heads: Mapping[str, int], layout: Layout) -> dict[str, int]:
    """Return the sizes of which each key-value head does not serve several whole devices along `tensor`."""
    return {path: size for path, size in kv_heads.items() if layout.size("tensor") % size}


def _table_problems(
    config: RunConfig, layout: Layout, vocabulary: Mapping[str, int], embed: Mapping[str, int]
) -> Iterator[Problem]:
    """Yield the widths of tables that do not divide, where `tensor` has to split them and not their rows."""
    in_rows = math.prod(layout.size(axis) for axis in PARAMETER_RULES["vocab"])
    axes = [*_axes_of_width(config, layout), "tensor"]
    ways, names = math.prod(layout.size(axis) for axis in axes), "*".join(axes)
    for path, rows in vocabulary.items():
        if rows % in_rows == 0:
            continue
        for width_path, width in embed.items():
            if width % ways:
                what = f"= {width} does not divide over {names} = {ways}, which split the columns of tables"
                what += f" with {path} = {rows} rows"
                hint = f"use {names}={or_list(near_divisors(width, ways))}, or {path} = "
                yield width_path, what, hint + or_list(near_multiples(in_rows, rows))


def _stage_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield the reason why a run cannot have stages, each of which holds some of the stacked layers."""
    stages, model = layout.size("stage"), config.model
    if stages == 1:
        return
    if "layers" not in model.sizes.split_dims:
        what = f"= {model.kind!r}, but stage = {stages} splits the layers of a transformer"
        yield "model.kind", what, f"use data={stages * layout.size('data')} in place of stage and data"
    elif isinstance(model, TransformerModel) and model.unroll:
        what = f"= true, but stage = {stages} splits layers that are stacked"
        yield "model.unroll", what, "use model.unroll = false"
    elif isinstance(model, TransformerModel) and model.mtp_layers:
        what = f"= {model.mtp_layers}, but stage = {stages} predicts one token of each position"
        yield "model.mtp_layers", what, f"use fsdp={stages * layout.size('fsdp')} in place of stage and fsdp"
    elif config.lora.rank is not None:
        what = f"= {config.lora.rank}, but stage = {stages} has gradients of all parameters alone"
        yield "lora.rank", what, f"use fsdp={stages * layout.size('fsdp')} in place of stage and fsdp"
    elif config.waits("parameters"):
        what = f"= {config.offload!r}, but stage = {stages} keeps its layers on its devices"
        yield "offload", what, 'use offload = "optimizer", or fsdp in place of stage'
    elif config.waits("activations"):
        what = f"= {config.offload!r}, but stage = {stages} keeps saved activations in slots on the devices"
        yield "offload", what, 'use offload = "optimizer"'
    else:
        yield from _chunk_problems(config, layout)


def _sum_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield the reason why gradients cannot be in fp32 from the start: ZeRO-1's copy is in 16 bits."""
    if config.gradient_sum != "all-fp32" or config.precision == "fp32":
        return
    if config.zero1 and layout.size("stage") == 1:
        what = '= "all-fp32", but under zero1 without stages gradients have the format of the gathered copy'
        yield "gradient_sum", what, 'use gradient_sum = "fp32", or fsdp in place of zero1'


def _chunk_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    """Yield the reasons why stages cannot share the layers, or cannot hold them in several chunks."""
    stages, chunks, model = layout.size("stage"), config.pipeline_chunks, config.model
    assert isinstance(model, TransformerModel), "_stage_problems refuses other models"
    for path, size in model.sizes.split_dims["layers"].items():
        if size < stages:
            yield (
                path,
                f"= {size} is less than stage = {stages}",
                f"use stage={size}" + " or less" * (size > 1),
            )
    group = len(model.period)
    groups = padded_layers(config, stages) // stages // group
    repeats = model.num_stacked_layers // group
    if model.layer_pattern and stages <= repeats and repeats % stages:
        # Layers of one kind are padded; of several kinds, each array would have padding of its own.
        what = f"has {group} layers and repeats {repeats} times, over which stage = {stages} does not divide"
        yield "model.layer_pattern", what, f"use stage={or_list(near_divisors(repeats, stages))}"
    elif groups % chunks:
        held = f"{groups} groups of {group} layers" if group > 1 else f"{groups} layers"
        what = f"= {chunks} does not divide the {held} of each of stage = {stages}"
        yield "pipeline_chunks", what, f"use pipeline_chunks = {or_list(near_divisors(groups, chunks))}"
    else:
        yield from _group_problems(config, groups // chunks * group, stages)
    sequences, replicas = config.batch.sequences, layout.num_replicas
    rows = (config.batch.microbatch_sequences or sequences // replicas) * replicas
    if chunks > 1 and rows and sequences % rows == 0 and sequences // rows % stages:
        what = (
            f"= {sequences} makes {sequences // rows} microbatches, and with pipeline_chunks = {chunks} they "
        )
        what += f"pass in groups of stage = {stages}"
        hint = f"use batch.sequences = {or_list(near_multiples(rows * stages, sequences))}"
        yield "batch.sequences", what, f"{hint}, or pipeline_chunks = 1"


def _group_problems(config: RunConfig, num_layers: int, stages: int) -> Iterator[Problem]:
    """Yield the reason why a stage's chunk of layers is no whole number of `remat`'s groups of blocks."""
    model = config.model
    assert isinstance(model, TransformerModel), "_stage_problems refuses other models"
    size = model.group_size(config.remat)
    if size > len(model.period) and (num_layers % size or model.num_stacked_layers % size):
        what = (
            f"= {config.remat!r} has groups of {size} blocks, and of the {model.num_stacked_layers} layers "
        )
        what += f"a chunk has {num_layers} (stage = {stages}, pipeline_chunks = {config.pipeline_chunks})"
        yield "remat", what, 'use remat = "alternate-dots", which holds for each block alone'


def _axis_problems(axes: Sequence[str], layout: Layout, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Yield the sizes that do not divide over all of `axes` together.

    A size of the axes is suggested only if it suits every size that they split.
    """
    ways, names = math.prod(layout.size(axis) for axis in axes), "*".join(axes)
    for path, size in sizes.items():
        if size % ways:
            hint = f"use {names}={or_list(near_divisors(math.gcd(*sizes.values()), ways))}"
            hint = _hint_of_replicas(axes, layout, sizes) or hint
            if "." in path:
                hint += f", or {path} = {or_list(near_multiples(ways, size))}"
            yield path, f"= {size} does not divide over {names} = {ways}", hint


def _hint_of_replicas(axes: Sequence[str], layout: Layout, sizes: Mapping[str, int]) -> str:
    """Return how replicas of smaller groups take the devices of `fsdp`; "" if none do."""
    fsdp, width = layout.size("fsdp"), math.gcd(*sizes.values())
    others = math.prod(layout.size(axis) for axis in axes) // fsdp
    if "fsdp" not in axes or "data" in axes:
        return ""
    best = max(
        (each for each in range(1, fsdp) if fsdp % each == 0 and width % (others * each) == 0), default=1
    )
    if best == 1:
        return ""
    return f"use data={layout.size('data') * fsdp // best},fsdp={best} in place of fsdp={fsdp}"


def _context_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    size, length = layout.size("context"), config.batch.sequence_length
    pieces = math.lcm(2, layout.size("tensor"))
    if size > 1 and config.model.takes != "sequences":
        what = f"= {config.model.kind} has no sequence for context = {size} to split"
        yield "model.kind", what, "use context=1"
    elif size > 1 and length % (size * pieces):
        what = f"= {length} does not divide into {pieces} pieces for each of context = {size} devices"
        hint = f"use batch.sequence_length = {or_list(near_multiples(size * pieces, length))}"
        if length % pieces == 0:
            hint += f", or context={or_list(near_divisors(length // pieces, size))}"
        yield "batch.sequence_length", what, hint
    elif size > 1 and isinstance(config.model, TransformerModel) and config.model.latent_rank is not None:
        what = (
            f"= {size}: attention over context is not latent (model.latent_rank = {config.model.latent_rank})"
        )
        yield "layout.context", what, f"use context=1; tensor={size} splits the heads instead"
    elif size > 1 and isinstance(config.model, TransformerModel):
        width, piece = config.model.conv_width or 1, length // (2 * size)
        if piece < width - 1:
            # A convolution reads the ends of one piece.
            what = f"= {length} gives each of context = {size} devices two pieces of {piece}, and "
            what += f"model.conv_width = {width} reads {width - 1} tokens before each"
            hint = f"use batch.sequence_length = {2 * size * (width - 1)} or more"
            yield "batch.sequence_length", what, hint


def _batch_problems(config: RunConfig, layout: Layout) -> Iterator[Problem]:
    sequences, micro = config.batch.sequences, config.batch.microbatch_sequences or 1
    replicas = layout.num_replicas
    if sequences % (replicas * micro):
        names = "data*fsdp*expert" if layout.size("expert") > 1 else "data*fsdp"
        by_micro = f" x batch.microbatch_sequences = {micro}" if config.batch.microbatch_sequences else ""
        what = f"= {sequences} does not divide over {names} = {replicas}{by_micro}"
        nearest = or_list(near_multiples(replicas * micro, sequences))
        ways = or_list(near_divisors(sequences // micro, replicas))
        hint = f"use batch.sequences = {nearest}, or {names} = {ways}"
        if shares := _sharing_sequences(config, layout):
            hint += f"; or {shares}: then devices of a group of experts share sequences"
        yield "batch.sequences", what, hint


def _sharing_sequences(config: RunConfig, layout: Layout) -> str:
    """Return arguments with which experts are over as many devices, of which several share a sequence.

    `context`, or else `tensor`, takes the smallest part of `expert` with which everything divides; "" if
    nothing does.
    """
    parts = [part for part in range(2, layout.size("expert") + 1) if layout.size("expert") % part == 0]
    of_batch, micro = config.batch.sequences, config.batch.microbatch_sequences or 1
    parts = [part for part in parts if of_batch % (layout.num_replicas // part * micro) == 0]
    for axis, part in itertools.product(("context", "tensor"), parts):
        folded = axis if config.fold_experts in ("none", axis) else "both"
        # ZeRO-1 splits the state over `context` too, where it can.
        for more in ({"zero1": True}, {}) if axis == "context" else ({},):
            shared = _with_part_of_expert(layout, axis, part)
            try:
                changed = {**config.model_dump(exclude_unset=True), "fold_experts": folded, **more}
                check_layout(RunConfig.model_validate(changed), shared)
            except (InputError, ValueError):
                continue
            settings = f"--set fold_experts={folded}" + " --set zero1=true" * bool(more)
            return f"--layout {shared} {settings}"
    return ""


def _with_part_of_expert(layout: Layout, axis: str, part: int) -> Layout:
    """Return a layout whose `expert` has left `part` of its devices to another axis, which follows it."""
    sizes = dict(layout.axes)
    sizes |= {"expert": layout.size("expert") // part, axis: part * layout.size(axis)}
    axes = [name for name, _ in layout.axes if name != axis]
    axes.insert(axes.index("expert") + 1, axis)
    return Layout(axes=tuple((name, sizes[name]) for name in axes if sizes[name] > 1))


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
