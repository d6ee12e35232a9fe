"""`Layout`: how many devices each mesh axis has, outermost first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.errors import InputError, nearest_name

AXES = ("stage", "data", "fsdp", "context", "expert", "tensor")
"""The axes of our own models in their default order, so that `tensor` lies inside a host."""
BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split the rows of a batch."""

_EXAMPLE = "write it as fsdp=64,tensor=8"


def near_divisors(number: int, wanted: int) -> list[int]:
    """The largest divisor of `number` that is at most `wanted`, and the smallest above it, if any."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
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
            text: the axes; one size may be -1.
            free_names: any axis name will do, as for a foreign program; else only `AXES`.

        Raises:
            InputError: an unknown or repeated axis, a size that is no positive number, or two -1.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([+-]?\d+)\s*", part, re.ASCII)
            if match is None:
                raise InputError(f"layout {text!r}: cannot read {part.strip()!r}", hint=_EXAMPLE)
            name, size = match[1], int(match[2])
            if not free_names and name not in AXES:
                raise InputError(f"layout {text!r}: unknown axis {name!r}", hint=nearest_name(name, AXES))
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
