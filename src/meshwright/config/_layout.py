"""Hold the sizes of the mesh axes, and the schedules of a pipeline over the axis `stage`.

`Layout`: how many devices each mesh axis has, outermost first.

`Ticks`: what the stages of a pipeline do when, in the two schedules that are built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from meshwright.errors import InputError, nearest_name

AXES = ("stage", "data", "fsdp", "context", "expert", "tensor")
"""The axes of our own models in their default order, so that `tensor` lies inside a host."""
BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split the rows of a batch."""

AXIS_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        alias: axis
        for axis, aliases in {
            "data": "dp ddp dp_replicate replica data_parallel",
            "fsdp": "dp_shard zero3 fully_sharded",
            "tensor": "tp tensor_parallel model",
            "stage": "pp pipe pipeline pipeline_parallel",
            "context": "cp context_parallel",
            "expert": "ep expert_parallel",
        }.items()
        for alias in aliases.split()
    }
)
"""Names of axes elsewhere, and ours: Megatron-LM, DeepSpeed, torchtitan, MaxText, T5X."""
_SEQUENCE = (
    "use context=... where attention's sequence is to be split (Ulysses, ring); Megatron's sequence "
    "parallelism is a part of tensor=... here"
)
_UNCLEAR = {
    "sp": _SEQUENCE,
    "seq": _SEQUENCE,
    "sequence": _SEQUENCE,
    "sequence_parallel": _SEQUENCE,
    "mp": "use tensor=... for a split of each matrix, or stage=... for a split of the layers",
    "hsdp": "use data=...,fsdp=...: replicas of a group that splits the weights",
}

_EXAMPLE = "write it as fsdp=64,tensor=8"
_LARGEST = 10**12  # devices of all axes together; far above any fleet
_TRIED = 2**16  # every number that a config may hold has all its divisors found


def near_divisors(number: int, wanted: int) -> list[int]:
    """Return the largest divisor of `number` that is at most `wanted`, and the smallest above it, if any.

    Of a number above 2**32, divisors are found only where they or their cofactors are at most 2**16.
    """
    small = [d for d in range(1, min(math.isqrt(number), _TRIED) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d <= wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def near_multiples(step: int, wanted: int) -> list[int]:
    """The multiples of `step` on both sides of `wanted`, none of them zero."""
    below = wanted - wanted % step
    return [n for n in (below, below + step) if n]


def or_list(numbers: Iterable[int]) -> str:
    """Numbers as a sentence has them: "4", "4 or 8"."""
    return " or ".join(str(n) for n in numbers)


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
    """Return how a layout's aliases are understood; "" where every axis is named as it is here.

    Raises:
        InputError: as `Layout.parse`.
    """
    layout = Layout.parse(text)
    named = {part.partition("=")[0].strip() for part in text.split(",")}
    return "" if named == set(layout.names) else f"layout {text!r} read as {layout}"


def _size(digits: str) -> int:
    """Read the size of an axis; every one that is too large is taken as one just too large."""
    return int(digits) if len(digits) < 15 else _LARGEST + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes in order, outermost first; one may be -1, "what is left of the fleet"."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        assert len({name for name, _ in self.axes}) == len(self.axes), f"an axis is repeated: {self.axes}"
        assert all(size >= 1 or size == -1 for _, size in self.axes), f"a size is not positive: {self.axes}"
        assert [size for _, size in self.axes].count(-1) <= 1, f"two axes are -1: {self.axes}"

    @classmethod
    def parse(cls, text: str, *, free_names: bool = False) -> Layout:
        """Read "fsdp=64,tensor=8", keeping the order written.

        Args:
            text: the axes; one size may be -1. Aliases stand for our axes: "dp=8" is read as "data=8".
            free_names: any axis name will do, as for a foreign program; else only `AXES` and `AXIS_ALIASES`.

        Raises:
            InputError: an unknown or repeated axis, a size that is no positive number, two -1, or sizes of
                more than 10^12 devices.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([+-]?\d+)\s*", part, re.ASCII)
            if match is None:
                raise InputError(f"layout {text!r}: cannot read {part.strip()!r}", hint=_EXAMPLE)
            name, size = match[1], _size(match[2])
            if not free_names:
                name = _axis(text, name)
            if name in axes:
                raise InputError(
                    f"layout {text!r}: axis {name!r} is written twice", hint=f"keep one {name}=..."
                )
            if size < 1 and size != -1:
                raise InputError(
                    f"layout {text!r}: {name}={size} is no number of devices",
                    hint=f"use {name}=1 or more, or {name}=-1 for what is left of the fleet",
                )
            axes[name] = size
        if math.prod(axes.values()) not in range(-_LARGEST, _LARGEST + 1):
            raise InputError(
                f"layout {text[:80]!r} has more than {_LARGEST:.0e} devices", hint="use the sizes of a fleet"
            )
        open_axes = [name for name, size in axes.items() if size == -1]
        if len(open_axes) > 1:
            raise InputError(
                f"layout {text!r}: {' and '.join(open_axes)} are -1, but only one axis can be what is left",
                hint=f"give {', '.join(open_axes[1:])} a size",
            )
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
        """Size of one axis; 1 where the layout does not have it."""
        return dict(self.axes).get(name, 1)

    @property
    def num_replicas(self) -> int:
        """Ways in which the rows of a batch are split: data * fsdp * expert."""
        return math.prod(self.size(name) for name in BATCH_AXES)

    def resolve(self, num_devices: int) -> Layout:
        """The layout with -1 filled in, so that its sizes multiply to `num_devices`.

        Raises:
            InputError: they cannot.
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
        """Change one axis, the first that can absorb the difference; else the nearest fleet."""
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
    """The ticks of one step of a pipeline, the same on every stage.

    In forward tick i stage s has microbatch i - s, in backward tick j it has microbatch j - (S - 1 - s):
    each of S stages is one tick behind its neighbour. Where that is no microbatch the stage computes
    on whatever it holds, and the result is dropped: that is the bubble.

    `gpipe`: all forward ticks, then all backward ticks (Huang et al. 2019, https://arxiv.org/abs/1811.06965).
    `1f1b`: after S - 1 forward ticks every tick has a forward and a backward pass, until S - 1 backward ticks
    are left (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377, with all stages in step).
    """

    schedule: PipelineSchedule
    num_stages: int
    num_microbatches: int

    @property
    def num_passes(self) -> int:
        """M + S - 1: ticks with a forward pass; as many have a backward pass."""
        return self.num_microbatches + self.num_stages - 1

    @property
    def num_alone(self) -> int:
        """Ticks with a forward pass alone, at the start; as many with a backward pass alone end the step."""
        return self.num_passes if self.schedule == "gpipe" else self.num_stages - 1

    @property
    def num_kept(self) -> int:
        """Forward ticks of which a stage keeps what their backward pass needs.

        A tick's forward pass is at most 2 (S - 1) ticks older than its backward pass under `1f1b`.
        """
        return self.num_passes if self.schedule == "gpipe" else min(2 * self.num_stages - 1, self.num_passes)

    @property
    def bubble(self) -> Fraction:
        """(S - 1) / (M + S - 1): the share of a stage's passes that are dropped, under either schedule."""
        return Fraction(self.num_stages - 1, self.num_passes)

    def to_dict(self) -> dict[str, str | int | float]:
        """As `weigh --json` prints it."""
        return {
            "schedule": self.schedule,
            "num_stages": self.num_stages,
            "num_microbatches": self.num_microbatches,
            "bubble": float(self.bubble),
        }
