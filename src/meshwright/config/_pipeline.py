"""`Ticks`: what the stages of a pipeline do when, in the two schedules that are built."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

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
