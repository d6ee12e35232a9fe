"""Read matrices in MXFP4, as the files of `openai/gpt-oss-*` hold those of experts.

Two arrays of bytes hold the matrices of all experts of a layer: `NAME_blocks` [experts, outputs, groups, 16]
has two numbers of four bits (E2M1) in a byte, the one with the lower bits first, and `NAME_scales` [experts,
outputs, groups] the exponent of a power of two (E8M0, 127 for 1) for each group of 32 numbers side by side.
Source: Open Compute Project, Microscaling Formats (MX) Specification 1.0, sections 5.2 and 5.4; the names and
the order in the files are those that transformers reads (integrations/mxfp4.py).

Every number is one of bf16, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError

Numbers = NDArray[Any]

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32  # numbers with one scale
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # of four bits, the highest of which is the sign
_PAIRS = np.stack([_NUMBERS[np.arange(256) & 15], _NUMBERS[np.arange(256) >> 4]], axis=1)  # of a byte


class Packed:
    """The matrices [inputs, outputs] of the experts of a layer, of which each is unpacked when it is read.

    >>> blocks = np.full((1, 1, 1, 16), 0x2F, np.uint8)  # -6, then 1
    >>> Packed("w", blocks, np.full((1, 1, 1), 128, np.uint8))[0][:3, 0].tolist()
    [-12.0, 2.0, -12.0]

    Raises:
        InputError: the two arrays do not belong to each other.
    """

    def __init__(self, name: str, blocks: Numbers, scales: Numbers) -> None:
        if blocks.shape != (*scales.shape, GROUP // 2) or scales.ndim != 3:
            what = f"{name}{BLOCKS} has the shape {blocks.shape}, and {name}{SCALES} {scales.shape}"
            wanted = f"[experts, outputs, groups, {GROUP // 2}] and the same without the last"
            raise InputError(f"{what}: in MXFP4 they are {wanted}", hint="download the files again")
        self._blocks, self._scales = blocks, scales

    def __getitem__(self, expert: int) -> Numbers:
        """Return the matrix of one expert, in bf16."""
        blocks, scales = self._blocks[expert], self._scales[expert]
        numbers = _PAIRS[blocks].reshape(*scales.shape, GROUP)
        exponents = scales.astype(np.int32)[..., None] - 127
        return np.ldexp(numbers, exponents).reshape(len(blocks), -1).T.astype(ml_dtypes.bfloat16)


def unpacking(read: Callable[[str], Numbers], names: set[str]) -> Callable[[str], Any]:
    """Return a function that reads arrays by name, those that are held in MXFP4 as `Packed`.

    Args:
        read: returns an array by its name.
        names: of all arrays in the files.
    """

    def packed_or_not(name: str) -> Any:
        if name in names or name + BLOCKS not in names:
            return read(name)
        return Packed(name, read(name + BLOCKS), read(name + SCALES))

    return packed_or_not
