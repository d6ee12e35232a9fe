"""`RunConfig` and the sections beside the model."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from meshwright.errors import InputError

from ._base import (
    OptionalPositive,
    OptionalPositiveFloat,
    Positive,
    PositiveFloat,
    Problem,
    Section,
    raise_problems,
)
from ._data import Data, IdxData, LineData
from ._layout import Layout
from ._models import LeNetModel, LinearModel, Model, ResNetModel, TransformerModel
from ._optimizers import Optimizer, Schedule, SGDOptimizer, schedule_problems
from ._pipeline import PipelineSchedule


class BatchConfig(Section):
    """What one step reads.

    `sequences`: of the whole fleet, per step (rows for linear and cruncher, images for lenet and resnet18).
    `sequence_length`: positions that are predicted; 1 where there are no sequences.
    `microbatch_sequences`: how many one data replica handles at a time; None is all of them at once.
    `sequences_per_replica`: of each data replica; where given, `sequences` is this times the layout's data *
    fsdp, whatever else it says (see `settled`). `base_sequences`: the `sequences` for which the learning
    rate was chosen, from which a schedule's `scale` scales it.
    """

    sequences: Positive
    sequence_length: Positive = 1
    microbatch_sequences: OptionalPositive = None
    sequences_per_replica: OptionalPositive = None
    base_sequences: OptionalPositive = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens (rows or images, where there are no sequences) of the whole fleet per step."""
        return self.sequences * self.sequence_length


class EvaluationConfig(Section):
    """Held-out loss: every how many steps, over how many batches."""

    every_steps: Positive = 100
    batches: Positive = 8


class CheckpointConfig(Section):
    """What of a run is saved, so that it can be resumed.

    `every_steps`: a checkpoint every so many steps and after the last; None saves nothing.
    `keep_last`: how many of the newest are kept. `keep_every`: checkpoints of steps that are multiples of
    this are kept as well, for good.
    """

    every_steps: OptionalPositive = 1000
    keep_last: Positive = 3
    keep_every: OptionalPositive = None


class FaultConfig(Section):
    """What happens when something goes wrong.

    `bad_step`: after a step whose loss or gradient is not finite (its update is never applied): `stop` saves
    and ends the run, `skip` goes on with the next batch, `rollback` goes back to the last checkpoint and
    leaves the batches since then out. `most_bad_steps`: of these in a row, after which the run ends anyway.
    `spike_sigmas`: a loss this many standard deviations above those before it is flagged.
    `startup_deadline_seconds`, `step_deadline_seconds`: after which a run that does not go on hangs.
    """

    bad_step: Literal["stop", "skip", "rollback"] = "stop"
    most_bad_steps: Positive = 10
    spike_sigmas: PositiveFloat = 6.0
    startup_deadline_seconds: OptionalPositiveFloat = 3600.0
    step_deadline_seconds: OptionalPositiveFloat = 1800.0


Remat = Literal["none", "dots", "dots-attention", "full"]


class RunConfig(Section):
    """One run: what is weighed is what runs.

    `name`: the preset's or the file's stem. `precision`: of the arithmetic; parameters and moments are
    fp32 in all (docs/precision.md). `layout`: as `Layout.parse` reads it. `remat`: what a block keeps for
    the backward pass (`none` recomputes nothing, `full` keeps only the block's input). `zero1`: parameters
    and moments are split over data too, and the parameters gathered once a step. `offload`: what waits in
    the hosts' memory: moments, between steps; activations, until the backward pass. `pipeline`: in which
    order microbatches pass the stages, where the layout has several: activations of `1f1b` do not grow with
    the number of microbatches, as those of `gpipe` do. `steps`: of `train`.
    `deterministic`: repeats on one GPU are bitwise equal, which may cost speed; CPUs and TPUs repeat anyway.
    """

    name: Annotated[str, Field(min_length=1)]
    model: Model
    data: Data
    optimizer: Optimizer
    schedule: Schedule
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    layout: str = "data=-1"
    remat: Remat = Field(default_factory=lambda data: _default_remat(data))
    zero1: bool = False
    offload: Literal["none", "optimizer", "activations", "both"] = "none"
    pipeline: PipelineSchedule = "1f1b"
    batch: BatchConfig
    steps: Positive
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    deterministic: bool = False
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultConfig = FaultConfig()

    @property
    def peak_learning_rate(self) -> float:
        """`optimizer.learning_rate`, scaled to the batch as `schedule.scale` says."""
        rate, base = self.optimizer.learning_rate, self.batch.base_sequences
        if base is None:
            return rate
        times = self.batch.sequences / base
        return rate * (times if self.schedule.scale == "linear" else math.sqrt(times))

    @field_validator("layout")
    @classmethod
    def _layout_reads(cls, text: str) -> str:
        try:
            Layout.parse(text)
        except InputError as error:
            raise_problems([("", f"= {text!r}: {error.message}", error.hint)])
        return text

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        problems: list[Problem] = []
        if isinstance(self.model, TransformerModel):
            problems += _sequence_problems(self.model, self.batch.sequence_length)
        else:
            problems += self._row_problems()
        problems += self._data_problems()
        problems += self._precision_problems()
        problems += self._offload_problems()
        problems += self._batch_problems()
        problems += schedule_problems(self.schedule, self.steps)
        raise_problems(problems)
        return self

    def _batch_problems(self) -> list[Problem]:
        """Microbatches that do not divide it; a scale without what it scales from, or the reverse."""
        batch, scale, problems = self.batch, self.schedule.scale, list[Problem]()
        micro, each = batch.microbatch_sequences, batch.sequences_per_replica
        path, whole = ("batch.sequences", batch.sequences)
        if each is not None:
            path, whole = "batch.sequences_per_replica", each
        if micro is not None and whole % micro:
            what = f"= {whole} is not a multiple of batch.microbatch_sequences = {micro}"
            problems.append((path, what, f"use {path} = {whole - whole % micro or micro}"))
        if scale != "none" and batch.base_sequences is None:
            what = f"= {scale!r}, but nothing says for which batch the learning rate was chosen"
            problems.append(("schedule.scale", what, "set batch.base_sequences to that batch's sequences"))
        if scale == "none" and batch.base_sequences is not None:
            what = f'= {batch.base_sequences} has no effect with schedule.scale = "none"'
            problems.append(
                ("batch.base_sequences", what, 'use schedule.scale = "linear" or "sqrt", or leave it out')
            )
        return problems

    def _row_problems(self) -> list[Problem]:
        """Models of rows or images have no sequence and no block to rematerialise."""
        kind, taken, problems = self.model.kind, _taken(self.model), list[Problem]()
        if self.batch.sequence_length != 1:
            problems.append(
                (
                    "batch.sequence_length",
                    f"= {self.batch.sequence_length}, but a {kind} model takes {taken}, not sequences",
                    "use batch.sequence_length = 1",
                )
            )
        if self.remat != "none":
            problems.append(
                ("remat", f"= {self.remat!r} has no effect on a {kind} model", 'use remat = "none"')
            )
        return problems

    def _precision_problems(self) -> list[Problem]:
        """Only the Transformer's layers are written with products in eight bits, and its experts are not."""
        has_products = isinstance(self.model, TransformerModel) and self.model.num_experts is None
        if self.precision != "fp8" or has_products:
            return []
        what = f'= "fp8", but a {self.model.kind} model has no products in eight bits'
        if isinstance(self.model, TransformerModel):
            what = '= "fp8", but experts have no products in eight bits'
        return [("precision", what, 'use precision = "bf16"')]

    def _offload_problems(self) -> list[Problem]:
        """Activations wait on the host where a block saves one, its input; moments where there are any."""
        problems, offload = list[Problem](), f"= {self.offload!r}"
        if self.offload in ("activations", "both") and self.remat != "full":
            mend = 'offload = "optimizer"'
            if isinstance(self.model, TransformerModel):
                mend = 'remat = "full", or ' + mend
            what = f"{offload}, but with remat = {self.remat!r} blocks save more than their input"
            if not isinstance(self.model, TransformerModel):
                what = f"{offload}, but a {self.model.kind} model has no blocks whose input is saved"
            problems.append(("offload", what, f"use {mend}"))
        sgd = isinstance(self.optimizer, SGDOptimizer) and not self.optimizer.momentum
        if self.offload in ("optimizer", "both") and sgd:
            what = f"{offload}, but optimizer.kind = 'sgd' without momentum keeps no moments"
            problems.append(("offload", what, "leave it out, or set optimizer.momentum"))
        return problems

    def _data_problems(self) -> list[Problem]:
        """Tokens are for transformers, images for LeNet and ResNet, points about a line for one input."""
        model, source = self.model, f"= {self.data.source!r}"
        other = 'use data.source = "synthetic"'
        if isinstance(self.data, LineData):
            if not isinstance(model, LinearModel):
                taken = _taken(model)
                what = f"{source} gives points about a line, but a {model.kind} model takes {taken}"
                return [("data.source", what, other)]
            if model.input_dim != 1:
                what = f"= {model.input_dim}, but data.source {source} gives one input"
                return [("model.input_dim", what, f"use model.input_dim = 1, or {other[4:]}")]
        elif isinstance(self.data, IdxData):
            if not isinstance(model, LeNetModel | ResNetModel):
                what = f"{source} gives images, but a {model.kind} model takes {_taken(model)}"
                return [("data.source", what, other)]
        elif not isinstance(model, TransformerModel) and self.data.source != "synthetic":
            what = f"{source} gives tokens, but a {model.kind} model takes {_taken(model)}"
            return [("data.source", what, other)]
        return []


def _taken(model: Model) -> str:
    """What a batch of the model holds."""
    return {"transformer": "sequences", "lenet": "images", "resnet18": "images"}.get(model.kind, "rows")


def _default_remat(data: dict[str, Any]) -> Remat:
    """What is kept by default: the blocks' matmuls and attention, where there are blocks."""
    return "dots-attention" if isinstance(data["model"], TransformerModel) else "none"


def _sequence_problems(model: TransformerModel, length: int) -> list[Problem]:
    problems: list[Problem] = []
    if model.max_positions is not None and length > model.max_positions:
        problems.append(
            (
                "batch.sequence_length",
                f"= {length} is longer than model.max_positions = {model.max_positions} learned positions",
                f"use at most batch.sequence_length = {model.max_positions}",
            )
        )
    chunk = min(model.loss_chunk, length)
    if length % chunk:
        near = max(n for n in range(1, chunk + 1) if length % n == 0)
        problems.append(
            (
                "model.loss_chunk",
                f"= {model.loss_chunk} does not divide batch.sequence_length = {length}",
                f"use model.loss_chunk = {near}",
            )
        )
    return problems
