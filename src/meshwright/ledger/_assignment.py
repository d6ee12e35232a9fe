"""The compiler's buffer assignment and live ranges, read from the texts of a `Compiled` folder.

XLA places every value of a program in an allocation (`*buffer-assignment.txt`) and says during which
instructions of the flattened schedule it lives (`*live-range.txt`). Forms of jaxlib 0.10 to 0.12.
Text that is not understood raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.+)$")
_RANGE = re.compile(r" {4}(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value in its place; `index` is its place in the instruction's tuple: "{2}", or "{}"."""

    name: str
    index: str
    num_bytes: int
    offset_bytes: int
    shape: str

    @property
    def is_tuple_table(self) -> bool:
        """Whether this is a tuple's table of pointers."""
        return self.shape.startswith("(")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of memory. `color` names the memory: 0 is the device's main one."""

    num_bytes: int
    kind: str  # parameter | constant | thread-local | temporary | output
    parameter: int | None
    color: int
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRange:
    """First and last instruction at which a value lives, both included."""

    first: int
    last: int


def parse_assignment(text: str) -> tuple[Allocation, ...]:
    """Read a buffer assignment.

    Raises:
        ValueError: a line is not understood.
    """
    heads: list[tuple[int, str]] = []
    values: list[list[Value]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _VALUE.match(line):
            name, index, size, offset, shape = match.groups()
            value = Value(
                name=name, index=index or "{}", num_bytes=int(size), offset_bytes=int(offset), shape=shape
            )
            values[-1].append(value)
        elif match := _ALLOCATION.match(line):
            heads.append((int(match[1]), match[2]))
            values.append([])
        elif line.strip() not in ("", "BufferAssignment:"):
            raise ValueError(f"buffer assignment, line {number} is not understood: {line[:200]}")
    return tuple(_allocation(*head, tuple(held)) for head, held in zip(heads, values, strict=True))


def parse_live_ranges(text: str) -> dict[tuple[str, str], LiveRange]:
    """Read the live ranges by (instruction, index in its tuple).

    Raises:
        ValueError: a line of the section is not understood, or the section is missing.
    """
    start, end = text.find("  BufferLiveRange:\n"), text.find("  Live ranges at ")
    if start < 0 or end < 0:
        raise ValueError(f"live ranges have no section of that name: {text[:200]!r}")
    ranges: dict[tuple[str, str], LiveRange] = {}
    for line in text[start:end].splitlines()[1:]:
        match = _RANGE.match(line)
        if not match:
            raise ValueError(f"live range is not understood: {line[:200]}")
        ranges[match[1], match[2]] = LiveRange(first=int(match[3]), last=int(match[4]))
    return ranges


def _allocation(num_bytes: int, words: str, values: tuple[Value, ...]) -> Allocation:
    parameter = re.search(r", parameter (\d+)", words)
    color = re.search(r", color (\d+)", words)
    if parameter:
        kind = "parameter"
    elif ", thread-local" in words:
        kind = "thread-local"
    elif ", constant" in words:
        kind = "constant"
    elif "maybe-live-out" in words:
        kind = "output"
    else:
        kind = "temporary"
    return Allocation(
        num_bytes=num_bytes,
        kind=kind,
        parameter=int(parameter[1]) if parameter else None,
        color=int(color[1]) if color else 0,
        values=values,
    )
