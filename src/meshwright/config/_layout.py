"""Define the sizes of the mesh axes (`Layout`), and pipeline schedules over the axis `stage` (`Ticks`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from meshwright.errors import InputError, nearest_name

from ._section import near_divisors, or_list

AXES = ("stage", "data", "fsdp", "context", "expert", "tensor")
"""The axes of our own models in their default order, so that `tensor` lies inside a host."""
BATCH_AXES = ("data", "expert", "fsdp")
"""The axes that split the rows of a batch; first those along which a device may sum gradients by itself."""
MOST_GATHERED_BYTES = 2**28
"""Limit the bytes of one layer's keys and values that a device gathers over `context`; more go round a ring.

The value is a choice: four times what Llama 3 405B needs at 131,072 tokens with `tensor` = 8."""

Rules = Mapping[str, tuple[str, ...]]
"""The axes that split a named dimension, by its name."""
_BY_TENSOR: Rules = dict.fromkeys(("mlp", "heads", "kv_heads", "vocab"), ("tensor",))
FoldedExperts = Literal["none", "tensor", "context", "both"]
EXPERT_DIMS: Mapping[FoldedExperts, tuple[str, tuple[str, ...]]] = {
    "none": ("experts", ("expert",)),
    "tensor": ("experts_by_tensor", ("expert", "tensor")),
    "context": ("experts_by_context", ("context", "expert")),
    "both": ("experts_by_both", ("context", "expert", "tensor")),
}
"""The name of the dim that counts experts, and the axes that split it, by `fold_experts`.

Axes that are manual while gradients are summed come first (`ZERO1_AXES`)."""
PARAMETER_RULES: Rules = {
    "layers": ("stage",),
    "chunks": (),  # of a pipeline's layers: of each chunk, every stage holds a part
    "first_layers": (),  # of a pipeline, unlike all others: every stage runs them
    **{dim: axes for dim, axes in EXPERT_DIMS.values()},  # first: an axis splits one dim of a parameter
    "embed": ("fsdp", "expert"),
    "latent": ("fsdp", "expert"),  # the inputs of a product with a latent, which has no other dim for them
    **_BY_TENSOR,
    "vocab": ("tensor", "stage"),  # of a head, which a step first gathers over the stages
    "token": ("stage", "tensor"),  # of an embedding that is no head: each stage looks up its own rows
    "rank": (),  # of an adapter
    "routes": (),  # the router's outputs, one for each expert, whole on every device
    **dict.fromkeys(
        ("head_dim", "rank", "positions", "one", "channels_out", "channels_in", "height", "width"), ()
    ),
}
"""For parameters, their gradients and moments."""
REPLICA_AXES = ("data", "context")
"""The axes along which all devices use the same parameters."""
ZERO1_AXES = (*REPLICA_AXES, "expert")
"""The same under ZeRO-1, which divides parameters over them between steps; `expert` is not one of experts."""
ACTIVATION_RULES: Rules = {
    "batch": BATCH_AXES,
    "sequence": ("context",),  # inside a block, where heads or hidden units are split as well
    "residual_sequence": ("context", "tensor"),  # between blocks: norms and residuals are split by position
    **_BY_TENSOR,
    "replica_rows": (),  # rows within one replica, where `batch` counts the replicas
    **dict.fromkeys(("embed", "head_dim", "rank", "latent", "microbatch", "channels", "height", "width"), ()),
}

_ALIASES = {
    "data": "dp ddp dp_replicate replica data_parallel",
    "fsdp": "dp_shard zero3 fully_sharded",
    "tensor": "tp tensor_parallel model",
    "stage": "pp pipe pipeline pipeline_parallel",
    "context": "cp context_parallel",
    "expert": "ep expert_parallel",
}
AXIS_ALIASES = {alias: axis for axis, aliases in _ALIASES.items() for alias in aliases.split()}
"""Names of axes elsewhere, and ours: Megatron-LM, DeepSpeed, torchtitan, MaxText, T5X."""
_SEQUENCE = (
    "use context=... where attention's sequence is to be split (Ulysses, ring); Megatron's sequence "
    "parallelism is a part of tensor=... here"
)
_UNCLEAR = {
    **dict.fromkeys(("sp", "seq", "sequence", "sequence_parallel"), _SEQUENCE),
    "mp": "use tensor=... for a split of each matrix, or stage=... for a split of the layers",
    "hsdp": "use data=...,fsdp=...: replicas of a group that splits the weights",
}

_EXAMPLE = "write it as fsdp=64,tensor=8"
_LARGEST = 10**12  # devices of all axes together; far above any fleet


def _axis(text: str, name: str) -> str:
    """Return the axis that `name` means in the layout `text`."""
    axis = AXIS_ALIASES.get(name.lower(), name)
    if axis in AXES:
        return axis
    if name.lower() in _UNCLEAR:
        hint = _UNCLEAR[name.lower()]
        raise InputError(f"layout {text!r}: axis {name!r} has several meanings", hint=hint)
    raise InputError(f"layout {text!r}: unknown axis {name!r}", hint=nearest_name(name, AXES))


def layout_reading(text: str) -> str:
    """Return how a layout's aliases are read; "" if every axis has its name in `AXES`.

    >>> layout_reading("dp=8,tp=2")
    "layout 'dp=8,tp=2' read as data=8,tensor=2"

    Raises:
        InputError: as for `Layout.parse`.
    """
    layout = Layout.parse(text)
    named = {part.partition("=")[0].strip() for part in text.split(",")}
    return "" if named == set(layout.names) else f"layout {text!r} read as {layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of the mesh axes in order, outermost first.

    One size may be -1, which means the rest of the fleet.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        assert len({name for name, _ in self.axes}) == len(self.axes), f"an axis is repeated: {self.axes}"
        assert all(size >= 1 or size == -1 for _, size in self.axes), f"a size is not positive: {self.axes}"
        assert [size for _, size in self.axes].count(-1) <= 1, f"two axes are -1: {self.axes}"

    @classmethod
    def parse(cls, text: str, *, free_names: bool = False) -> Layout:
        """Parse "fsdp=64,tensor=8" and keep the order of the axes.

        Args:
            text: the axes; one size may be -1. Aliases are read as the axes here: "dp=8" as "data=8".
            free_names: accept any axis name, as for a foreign program; else only `AXES` and `AXIS_ALIASES`.

        >>> print(Layout.parse("dp=2,fsdp=-1").resolve(64))
        data=2,fsdp=32

        Raises:
            InputError: an unknown or repeated axis, a size that is not a positive number, two sizes of -1, or
                sizes of more than 10^12 devices.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([+-]?\d+)\s*", part, re.ASCII)
            if match is None:
                raise InputError(f"layout {text!r}: cannot read {part.strip()!r}", hint=_EXAMPLE)
            name = match[1] if free_names else _axis(text, match[1])
            # A number of 15 digits or more becomes the least size that is refused.
            size = int(match[2]) if len(match[2]) < 15 else _LARGEST + 1
            if name in axes:
                what = f"layout {text!r}: axis {name!r} is written twice"
                raise InputError(what, hint=f"keep one {name}=...")
            if size < 1 and size != -1:
                hint = f"use {name}=1 or more, or {name}=-1 for the remaining devices"
                raise InputError(f"layout {text!r}: {name}={size} is not a number of devices", hint=hint)
            axes[name] = size
        if math.prod(axes.values()) not in range(-_LARGEST, _LARGEST + 1):
            what = f"layout {text[:80]!r} has more than {_LARGEST:.0e} devices"
            raise InputError(what, hint="use the sizes of a fleet")
        open_axes = [name for name, size in axes.items() if size == -1]
        if len(open_axes) > 1:
            what = (
                f"layout {text!r}: {' and '.join(open_axes)} are -1, and only one axis can take what remains"
            )
            raise InputError(what, hint=f"give {', '.join(open_axes[1:])} a size")
        return cls(axes=tuple(axes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """Product of the sizes of a resolved layout."""
        assert -1 not in self.sizes, f"resolve {self} first"
        return math.prod(self.sizes)

    def size(self, name: str) -> int:
        """Return the size of one axis; 1 if the layout does not have it."""
        return dict(self.axes).get(name, 1)

    @property
    def num_replicas(self) -> int:
        """Number of replicas over which the rows of a batch are split: data * fsdp * expert."""
        return math.prod(self.size(name) for name in BATCH_AXES)

    def resolve(self, num_devices: int) -> Layout:
        """Return the layout with -1 filled in, so that its sizes multiply to `num_devices`.

        Raises:
            InputError: the sizes cannot multiply to `num_devices`.
        """
        assert num_devices >= 1, f"a fleet of {num_devices} devices"
        fixed = math.prod(size for size in self.sizes if size != -1)
        if -1 in self.sizes and num_devices % fixed == 0:
            rest = num_devices // fixed
            return Layout(axes=tuple((name, rest if size == -1 else size) for name, size in self.axes))
        if fixed == num_devices:
            return self
        written = " * ".join(name for name, size in self.axes if size != -1)
        relation = "does not divide" if -1 in self.sizes else "is not"
        raise InputError(
            f"layout {self}: {written} = {fixed} {relation} the fleet's {num_devices} devices",
            hint=self._sizes_that_work(num_devices, fixed),
        )

    def _sizes_that_work(self, num_devices: int, fixed: int) -> str:
        """Return a hint: sizes for the first axis that can absorb the difference, else the nearest fleet."""
        for name, size in self.axes:
            if size == -1:
                continue
            others = fixed // size
            if num_devices % others == 0:
                rest = num_devices // others
                choices = near_divisors(rest, size) if -1 in self.sizes else [rest]
                return f"use {name}={or_list(choices)}"
        below = max(num_devices // fixed * fixed, fixed)
        fleets = sorted({below, below + fixed}) if -1 in self.sizes else [fixed]
        return f"use a fleet of {or_list(fleets)} devices, or sizes that divide {num_devices}"

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


PipelineSchedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """The ticks of one step of a pipeline of S stages and M microbatches, the same on every stage.

    A stage holds V chunks of layers: chunk v of stage s is the (v S + s)-th part of the model's V S parts. In
    a tick a stage does the forward pass of one chunk for one microbatch, or the backward pass, or both. A
    stage's k-th forward pass is in forward tick k + s, and its k-th backward pass in backward tick
    k + S - 1 - s. With several chunks, S microbatches pass one chunk before they pass the next: the k-th
    forward pass is that of chunk k mod V S / S. If a stage has no k-th pass, it computes on the data it holds
    and the result is dropped: this is the bubble.

    Layers that do not divide over the stages are padded: of `num_padded_layers` those beyond `num_layers`
    hand on their input. All stages take as long as the fullest, so this costs what any uneven split costs.

    `gpipe`: all forward ticks, then all backward ticks (Huang et al. 2019, https://arxiv.org/abs/1811.06965).

    `1f1b`: V S forward ticks, then ticks with a forward and a backward pass, until V S backward ticks are
    left (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377, with all stages in step; with several
    chunks Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2).
    """

    schedule: PipelineSchedule
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    num_layers: int = 1
    num_padded_layers: int = 1

    @property
    def num_needed(self) -> int:
        """Number of forward passes that a stage needs, V M; as many backward."""
        return self.num_chunks * self.num_microbatches

    @property
    def num_passes(self) -> int:
        """Number of ticks with a forward pass, V M + S - 1; as many have a backward pass."""
        return self.num_needed + self.num_stages - 1

    @property
    def num_alone(self) -> int:
        """Number of ticks at the start with only a forward pass.

        As many ticks at the end have only a backward pass.
        """
        return self.num_passes if self.schedule == "gpipe" else self.num_chunks * self.num_stages

    @property
    def bubble(self) -> Fraction:
        """Share of a stage's passes that are dropped, (S - 1) / (V M + S - 1), under either schedule.

        With padded layers, the share of the passes through single layers.
        """
        return 1 - Fraction(self.num_needed * self.num_layers, self.num_passes * self.num_padded_layers)

    def to_dict(self) -> dict[str, str | int | float]:
        """Return the ticks in the form of `weigh --json`."""
        return {
            "schedule": self.schedule,
            "num_stages": self.num_stages,
            "num_chunks": self.num_chunks,
            "num_microbatches": self.num_microbatches,
            "num_padded_layers": self.num_padded_layers,
            "bubble": float(self.bubble),
        }
