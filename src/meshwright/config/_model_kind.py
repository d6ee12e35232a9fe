"""Define the base of every kind of model: counts, sizes and limits, asked of a model before it is built."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ._section import Problem, Section

MOST_UNROLLED = 10_000
"""Layers that are written out one by one; more would fill the memory before the compiler sees them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that other packages read, whatever its kind.

    `input_shape`: that of one row or image; empty for one token. `num_token_ids`: 0 without tokens.
    `split_dims`: sizes by the named dimension that the axes of its rule split (`PARAMETER_RULES`), each with
    the key that sets it, or words where no key does. `layer_outputs`: numbers in the outputs of all layers
    but the last, per row, image or token; `layer_outputs_rule` says how they are counted.
    `widest_activation`: the most numbers in one activation per row, image or token, without attention's
    scores. `scores`: the number of attention scores per position of the sequence.
    """

    input_shape: tuple[int, ...]
    num_token_ids: int = 0
    split_dims: Mapping[str, Mapping[str, int]]
    layer_outputs: int
    layer_outputs_rule: str
    widest_activation: int
    scores: int = 0


class ModelKind(Section):
    """The base of every kind: what other packages ask of a model before it is built."""

    takes: ClassVar[Literal["rows", "images", "sequences"]]
    """The entries of a batch: rows of numbers, square images, or sequences of token ids."""
    has_blocks: ClassVar[bool] = False
    """True for a stack of blocks, whose saved activations `remat` and `offload` choose."""
    has_answer: ClassVar[bool] = True
    """False if the targets of synthetic rows do not follow from the inputs."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters, each counted once."""

    @property
    @abstractmethod
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply every row, token or position of an image."""

    @property
    @abstractmethod
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""

    @property
    def has_fp8_products(self) -> bool:
        """True if the layers' products can run in eight bits."""
        return False

    def length_problems(self, length: int) -> Iterator[Problem]:
        """Yield the problems with `batch.sequence_length`; paths start at the run."""
        yield from ()
