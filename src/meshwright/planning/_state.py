"""Count the parameters and moments of a run by the axes that divide them, for the planner's closed form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.config import (
    AdafactorOptimizer,
    AdaGradOptimizer,
    AdamOptimizer,
    AdamWOptimizer,
    LionOptimizer,
    MuonOptimizer,
    RMSPropOptimizer,
    RunConfig,
    SGDOptimizer,
    TransformerModel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of parameters, by the axes that divide them.

    All but the experts are divided over `expert` as over `fsdp`; under ZeRO-1 as over `data`, between steps.
    """

    blocks: float  # matrices of all blocks: stage, fsdp, tensor
    keys: float  # of these those of keys and values, which `tensor` divides no further than their heads
    experts: float  # of all blocks: stage, expert, fsdp, tensor
    norms: float  # and routers, of all blocks: stage, fsdp
    tables: float  # embedding and head: stage (in part), fsdp, tensor


def weights_of(config: RunConfig) -> Weights:
    """Return the numbers of a run's parameters by the axes that divide them."""
    model = config.model
    if not isinstance(model, TransformerModel):
        # Of other models the largest matrices divide over fsdp and tensor, and some not at all.
        return Weights(blocks=0, keys=0, experts=0, norms=0, tables=model.num_parameters)
    layers, width = model.num_layers, model.embed_dim
    tables = width * model.vocab_size * (1 if model.tied_embeddings else 2) + width * (
        model.max_positions or 0
    )
    experts = model.num_expert_layers * (model.num_experts or 0) * model.num_mlp_parameters
    blocks = layers * model.num_attention_parameters + model.num_dense_parameters
    keys = 0 if model.latent_rank else 2 * layers * width * model.num_kv_heads * model.head_dim
    norms = model.num_parameters - blocks - experts - tables
    return Weights(blocks=blocks, keys=keys, experts=experts, norms=norms, tables=tables)


def share_of_tables(
    config: RunConfig, stages: NDArray[np.float64], tensor: NDArray[np.float64], *, between_steps: bool
) -> NDArray[np.float64]:
    """Return the share of embedding and head that a stage holds, before `tensor` divides it, by candidate.

    Between steps stages share tables whose rows they and `tensor` divide. Within one, a stage has its part of
    the embedding, and the whole head, which a tied table is.
    """
    model = config.model
    if not isinstance(model, TransformerModel):
        return np.ones_like(stages)
    if between_steps:
        return np.where(model.vocab_size % (stages * tensor) == 0, 1 / stages, 1.0)
    return np.ones_like(stages) if model.tied_embeddings else (1 + 1 / stages) / 2


def moments_of(config: RunConfig) -> tuple[float, float]:
    """Return the fewest and the usual numbers of moments for each parameter."""
    match config.optimizer:
        case AdamOptimizer() | AdamWOptimizer():
            return 2, 2
        case AdaGradOptimizer() | LionOptimizer():
            return 1, 1
        case MuonOptimizer():
            return 1, 1.1
        case AdafactorOptimizer():
            return 0, 0.1
        case SGDOptimizer(momentum=momentum):
            return int(momentum > 0), int(momentum > 0)
        case RMSPropOptimizer(momentum=momentum, centered=centered):
            count = 1 + int(momentum > 0) + int(centered)
            return count, count


def bytes_of_state(config: RunConfig) -> tuple[int, int]:
    """Return the bytes in which a device keeps a parameter of a matrix, and a moment."""
    return 2 if config.state.parameters == "bf16" else 4, 2 if config.state.moments == "bf16" else 4
