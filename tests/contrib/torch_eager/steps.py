"""Weigh training steps of PyTorch modules in one call, and read the figures of one device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import meshwright as mw
from meshwright.eager import ModuleCount, RankCount

SETTINGS = ("layout", "overrides", "run", "simulate")


def weighed(module: Any, *inputs: Any, on: str = "1xH100", **how: Any) -> mw.Weighing:
    """Weigh a step. `how`: keyword arguments of `weigh`, and all others of `torch_step`."""
    settings = {name: how.pop(name) for name in SETTINGS if name in how}
    return mw.weigh(mw.torch_step(module, *inputs, **how), on=on, **settings)


@dataclass(frozen=True)
class Counted:
    """The figures of one rank on one device, which is a CPU, by the names that these tests use."""

    weighing: mw.Weighing

    @property
    def rank(self) -> RankCount:
        (rank,) = self.weighing.account.ranks
        return rank

    @property
    def num_parameters(self) -> int:
        return self.weighing.account.num_parameters

    @property
    def forward(self) -> int:
        return self.rank.flops_by_phase["forward"]

    @property
    def recomputed(self) -> int:
        assert self.weighing.ledger.flops.recomputed == self.rank.flops_by_phase["recomputed"]
        return self.rank.flops_by_phase["recomputed"]

    @property
    def backward(self) -> int:
        """With what runs again."""
        return self.rank.flops_by_phase["backward"] + self.recomputed

    @property
    def model(self) -> int:
        return self.weighing.ledger.flops.model

    @property
    def both(self) -> tuple[int, int]:
        return self.forward, self.backward

    @property
    def by_format(self) -> dict[str, int]:
        return self.weighing.ledger.flops.by_format

    @property
    def by_operation(self) -> dict[str, int]:
        return self.rank.flops_by_operation

    @property
    def at_peak(self) -> dict[str, int]:
        return self.weighing.ledger.memory.by_category

    @property
    def modules(self) -> dict[str, ModuleCount]:
        return {module.scope: module for module in self.weighing.account.modules}

    @property
    def unknown(self) -> Counter[str]:
        """Calls of the operations that have no rule."""
        found = (line.rpartition(", ") for line in self.weighing.ledger.unpriced)
        return Counter({name: int(times.partition(" ")[0]) for name, _, times in found})

    @property
    def assumptions(self) -> tuple[str, ...]:
        return self.weighing.ledger.assumptions


def counted(module: Any, *inputs: Any, on: str = "1xCPU", **how: Any) -> Counted:
    """Weigh a step on one CPU, whose memory is that of the storages, without libraries."""
    return Counted(weighed(module, *inputs, on=on, **how))
