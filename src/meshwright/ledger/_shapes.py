"""Shapes as XLA prints them: arrays with their layout, and tuples of such.

Imported by `hlo`, which re-exports `Array`, `Shape`, `leaves_of` and `parse_shape`.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

DTYPE_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s1": 1, "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8,
    "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128,
}  # fmt: skip
COMMENT = re.compile(r"/\*.*?\*/")
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{.*\})?$")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """The shape of one array: element type and dimensions, outermost first, on one device."""

    dtype: str
    dims: tuple[int, ...]
    layout: str  # as printed: "{1,0:T(8,128)S(1)}", or ""
    memory_space: int  # 0 is the device's main memory; 5 the host's on NVIDIA

    @property
    def num_elements(self) -> int:
        """Product of the dimensions; a scalar has one."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements; padding by a tiled layout is not counted."""
        return -(-self.num_elements * DTYPE_BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape = Array | tuple["Shape", ...]


def leaves_of(shape: Shape) -> tuple[Array, ...]:
    """The arrays of a shape, tuples flattened."""
    if isinstance(shape, Array):
        return (shape,)
    return tuple(leaf for part in shape for leaf in leaves_of(part))


def split_text(text: str) -> list[str]:
    """The parts of `text` between commas that stand in no bracket and no string."""
    parts: list[str] = []
    depth, start = 0, 0
    for token in TOKEN.finditer(text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif token[0] == "," and not depth:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


@functools.lru_cache(maxsize=100_000)
def parse_shape(text: str) -> Shape:
    """Read "bf16[2,4]{1,0:T(8,128)S(1)}" or a tuple of such.

    Raises:
        ValueError: the text is no shape, or names an unknown element type.
    """
    text = COMMENT.sub("", text).strip()
    if text.startswith("("):
        return tuple(parse_shape(part) for part in split_text(text[1:-1]) if part)
    match = _ARRAY.match(text)
    if not match or match[1] not in DTYPE_BITS:
        raise ValueError(f"shape {text!r}")
    dims = tuple(int(d.removeprefix("<=")) for d in match[2].split(",") if d)
    layout = match[3] or ""
    space = _MEMORY_SPACE.search(layout)
    return Array(dtype=match[1], dims=dims, layout=layout, memory_space=int(space[1]) if space else 0)
