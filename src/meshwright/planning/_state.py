"""Count the parameters and moments of a run by the axes that divide them, for the planner's closed form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig, TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of parameters, by the axes that divide them.

    All but the experts are divided over `expert` as over `fsdp`; under ZeRO-1 as over `data`, between steps.
    """

    blocks: float  # matrices of all blocks: stage, fsdp, tensor
    first: float  # of these those of first layers without experts, which every stage has and runs
    keys: float  # of these those of keys and values, which `tensor` divides no further than their heads
    experts: float  # of all blocks: stage, expert, fsdp, tensor
    norms: float  # and routers, of all blocks: stage, fsdp
    tables: float  # embedding and head: stage (in part), fsdp, tensor


def weights_of(config: RunConfig) -> Weights:
    """Return the numbers of a run's parameters by the axes that divide them."""
    model = config.model
    if not isinstance(model, TransformerModel):
        # Of other models the largest matrices divide over fsdp and tensor, and some not at all.
        return Weights(blocks=0, first=0, keys=0, experts=0, norms=0, tables=model.num_parameters)
    width = model.embed_dim
    tables = width * model.vocab_size * (1 if model.tied_embeddings else 2) + width * (
        model.max_positions or 0
    )
    experts = model.num_expert_layers * (model.num_experts or 0) * model.num_mlp_parameters
    blocks = model.num_mixer_parameters + model.num_dense_parameters
    first = model.num_first_layers and model.num_first_parameters + (
        model.num_first_layers * model.num_attention_parameters
    )
    keys = sum(count * each.num_key_parameters for each, count in model.attentions)
    keys = 0 if model.latent_rank else keys
    norms = model.num_parameters - blocks - experts - tables
    return Weights(blocks=blocks, first=first, keys=keys, experts=experts, norms=norms, tables=tables)


def num_layers_of(config: RunConfig) -> tuple[float, float]:
    """Return the number of a transformer's layers, and of the first without experts; else 1 and 0."""
    model = config.model
    return (model.num_layers, model.num_first_layers) if isinstance(model, TransformerModel) else (1, 0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that a device keeps for each parameter between steps: of itself, of a moment, of all moments.

    `fewest` and `usual` are of all moments, and of the master copy if there is one.
    """

    parameter: float
    moment: float
    fewest: float
    usual: float


def bytes_of_state(config: RunConfig) -> StateBytes:
    """Return the bytes of the state for each parameter of a matrix."""
    each = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / 256}  # eight bits have a scale for each block
    parameter, moment = each[config.state.parameters], each[config.state.moments]
    master = 0.0 if config.state.master == "none" else 4.0
    fewest, usual = _moments_of(config)
    return StateBytes(
        parameter=parameter,
        moment=moment,
        fewest=fewest * moment + master,
        usual=usual * moment + master,
    )


def _moments_of(config: RunConfig) -> tuple[float, float]:
    """Return the fewest and the usual numbers of moments for each parameter."""
    kept, weights = config.optimizer.numbers_kept(), weights_of(config)
    if (alike := config.optimizer.kept_alike) is not None:
        return alike, alike
    groups = {
        "hidden": weights.blocks + weights.experts,
        "tables": weights.tables,
        "vectors": weights.norms,
    }
    total = sum(groups.values())
    return min(kept.values()), sum(kept[group] * number for group, number in groups.items()) / total
