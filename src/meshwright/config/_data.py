"""Where a run's batches come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ._base import Finite, NotNegativeFloat, Section


class SyntheticData(Section):
    """Random tokens, regression rows or images made from the seed; nothing is read."""

    source: Literal["synthetic"]


class LineData(Section):
    """Points about a line, for a linear model of one input: slope x + intercept + noise x a normal number.

    x is standard normal too; every step has new points, made from the seed.
    """

    source: Literal["line"]
    slope: Finite
    intercept: Finite
    noise: NotNegativeFloat


class StdlibData(Section):
    """Bytes of the Python standard library's own sources; every n-th file is held out."""

    source: Literal["python-stdlib"]
    held_out_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.05


class TokenFileData(Section):
    """A raw file of token ids, little-endian, nothing else in it; its tail is held out.

    `path`: as the config file's folder sees it; the loader makes it absolute.
    """

    source: Literal["tokens"]
    path: Annotated[str, Field(min_length=1)]
    dtype: Literal["int32", "uint16", "uint32"]
    held_out_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.05


Data = Annotated[SyntheticData | LineData | StdlibData | TokenFileData, Field(discriminator="source")]
