"""Define low-rank adapters (LoRA): the section of a run. What follows of it, a room outside the core knows.

An adapter adds x A B alpha / rank to a product x W, whose W is frozen (Hu et al. 2021,
https://arxiv.org/abs/2106.09685). Keys and defaults are those of PEFT (`LoraConfig`), and products are named
as PEFT names a Llama's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import model_validator

from ._section import OptionalPositive, PositiveFloat, Problem, Section, raise_problems

if TYPE_CHECKING:
    from ._layout import Layout
    from ._run_config import RunConfig
    from ._transformer import TransformerModel

NF4_BLOCK = 64
"""The most numbers that share a scale with `base = "nf4"` (https://arxiv.org/abs/2305.14314, section 3)."""
USUAL_TARGETS = ("q_proj", "v_proj")


class LoraConfig(Section):
    """Low-rank adapters beside frozen products: the adapters are trained, and nothing else."""

    rank: OptionalPositive = None
    """Columns of each adapter's first matrix; `none` trains all parameters and has no adapters.
    Effect: gradients and moments exist for the adapters alone, whose parameters grow in proportion.
    Unit: columns"""
    alpha: PositiveFloat = 8.0
    """Multiplies what adapters add, divided by `rank`.
    Effect: the size of what is learned; nothing that is weighed. Unit: none"""
    targets: tuple[str, ...] = USUAL_TARGETS
    """Products that have adapters, by PEFT's names of a Llama's: q_proj, k_proj, v_proj, o_proj, gate_proj,
    up_proj, down_proj; in_proj and out_proj of gated delta nets and Mamba-2; or `["all-linear"]` for all.
    Effect: parameters, gradients and moments grow in proportion."""
    base: Literal["compute", "fp32", "nf4"] = "compute"
    """Format of the frozen matrices: that of the run's arithmetic, fp32, or QLoRA's four bits for products.
    Frozen norms stay in fp32.
    Effect: `compute` holds 2 bytes of a frozen parameter under bf16, fp16 and fp8; `fp32` holds 4. `nf4`
    holds 4.5 bits of those in the products of blocks, and computes them again for each use."""

    @property
    def scale(self) -> float:
        """Return the factor of an adapter's output, alpha / rank."""
        assert self.rank is not None, "a run without adapters has no scale"
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _targets_are_known(self) -> LoraConfig:
        if self.targets != USUAL_TARGETS:
            raise_problems([*lora_room().target_problems(self.targets)])
        return self


class LoraRoom(Protocol):
    """Knows the products that have adapters, as configurations need it: a room outside the core."""

    def target_problems(self, targets: tuple[str, ...]) -> Iterable[Problem]:
        """Return what is wrong with the names of products."""
        ...

    def lora_problems(self, config: RunConfig) -> Iterable[Problem]:
        """Return what a run's adapters cannot be combined with; paths start at the run."""
        ...

    def block_problems(self, config: RunConfig, layout: Layout) -> Iterable[Problem]:
        """Return the dimensions whose blocks of numbers in four bits do not divide over their axis."""
        ...

    def num_adapter_parameters(self, lora: LoraConfig, model: TransformerModel) -> int:
        """Return the number of parameters of all adapters."""
        ...


def lora_room() -> LoraRoom:
    """Return the room of adapters, as a module.

    Raises:
        InputError: the installed package names none.
    """
    from meshwright.registry import room  # most runs have no adapters

    return room("lora")
