"""Say what the keys of a Hugging Face `config.json` mean: a table for each `model_type`, in families.toml.

A key that is in no table is refused by name. `BESIDE` lists those that change neither parameters nor
arithmetic of a training step, or belong to a recipe (dropout, initial values), which a run states itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu-erf",
    "relu": "relu",
    "relu2": "relu2",
}
OF_TRAINING = {
    "dropout",
    "unroll",
    "loss_chunk",
    "capacity_factor",
    "expert_load",
    "balancing_loss",
    "router_bias_rate",
    "mtp_layers",
    "mtp_loss",
}
ALWAYS_FALSE = (  # or empty, of no family here
    *("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript", "pruned_heads"),
    "rope_interleaved",  # in SmolLM2's files; transformers does not read it
)
_OF_SAMPLING = """max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens max_new_tokens"""  # once written into every file
_OF_RECIPES = """use_cache initializer_range attention_dropout classifier_dropout attn_pdrop resid_pdrop
    embd_pdrop hidden_dropout residual_dropout embedding_dropout gradient_checkpointing output_router_logits
    router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux"""
_OF_LABELS = """architectures model_type _name_or_path name_or_path transformers_version torch_dtype dtype
    auto_map bos_token_id eos_token_id eod_token_id pad_token_id unk_token_id sep_token_id
    decoder_start_token_id task_specific_params id2label label2id num_labels problem_type finetuning_task
    prefix tokenizer_class transformers.js_config is_llama_config unsloth_fixed unsloth_version
    _commit_hash"""
QUANTISED = ("quantization_config", "quantization", "hf_quant_config", "compression_config")
_OF_PROGRAMS = """use_bfloat16 tf_legacy_loss pretraining_tp is_decoder cross_attention_hidden_size
    summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout output_attentions output_hidden_states return_dict
    return_dict_in_generate reorder_and_upcast_attn n_ctx _attn_implementation
    attn_implementation _attn_implementation_autoset _attn_implementation_internal experts_implementation
    _experts_implementation _flash_attn_2_enabled chunk_size_feed_forward cache_implementation ep_size"""
# Keys that say how many modules predict further tokens.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
_NOT_READ = "max_sequence_length"  # of the first Llama's files; transformers does not read it
BESIDE = frozenset(
    " ".join((_OF_SAMPLING, _OF_RECIPES, _OF_LABELS, _OF_PROGRAMS, *QUANTISED, *FURTHER, _NOT_READ)).split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`, as families.toml declares it: its comment says what each of these holds."""

    architecture: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]
    only: Mapping[str, list[Any]]
    weights: Mapping[str, str]
    synonyms: Mapping[str, str] = field(default_factory=dict[str, str])
    switches: Mapping[str, tuple[str, Any, Any]] = field(default_factory=dict[str, tuple[str, Any, Any]])
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: tuple[str, ...] = ()
    windows: str = "none"
    partly_turned: bool = False
    turned_width: str | None = None
    rope_types: Mapping[str, str] = field(default_factory=dict[str, str])
    rope_magnitude: bool = False
    grouped: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ungrouped: Mapping[str, Any] = field(default_factory=dict[str, Any])
    dense_by_layer: bool = False
    unpadded: bool = False
    by_head: tuple[str, ...] = ()
    alternating: tuple[str, ...] = ()
    inputs_first: tuple[str, ...] = ()
    shaped: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    further: Mapping[str, str] = field(default_factory=dict[str, str])
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    also: Mapping[str, str] = field(default_factory=dict[str, str])
    inner: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    scales_from_one: bool = False
    constants: Mapping[str, float] = field(default_factory=dict[str, float])
    inverses: Mapping[str, str] = field(default_factory=dict[str, str])
    unturned: str = "none"
    mixers: Mapping[str, str] = field(default_factory=dict[str, str])
    numbered_by_part: bool = False
    rope_alpha: bool = False
    rope_growth: bool = False


_MERGED = ("keys", "fixed", "defaults", "weights")


def _read() -> dict[str, Family]:
    """Return the families by `model_type`, each with what it takes from the one that it is like."""
    declared = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
    whole: dict[str, dict[str, Any]] = {}
    for name, table in declared.items():
        whole[name] = _joined(whole[table["like"]], table) if "like" in table else dict(table)
        unknown = set(whole[name]) - {each.name for each in fields(Family)}
        assert not unknown, f"families.toml: {name} has {sorted(unknown)}, which no family has"
    return {name: Family(**table) for name, table in whole.items()}


def _joined(parent: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a family that is like another, which has a whole one."""
    without = table.get("without", ())
    own = {name: value for name, value in table.items() if name not in ("like", "without")}
    made: dict[str, Any] = {**parent, **own}
    for name in _MERGED:
        kept = {key: value for key, value in parent[name].items() if key not in without}
        made[name] = {**kept, **table.get(name, {})}
    theirs = set(parent["keys"].values()) - set(made["keys"].values())  # keys that only the parent reads
    theirs -= set(table.get("defaults", {}))
    made["defaults"] = {key: value for key, value in made["defaults"].items() if key not in theirs}
    read = table.get("keys", {})
    made["fixed"] = {ours: value for ours, value in made["fixed"].items() if ours not in read}
    fused = {ours for key in table.get("weights", {}) if "+" in key for ours in weight_parameters(key)}
    made["weights"] = {key: name for key, name in made["weights"].items() if key not in fused}
    return made


def weight_parameters(weight: str) -> tuple[str, ...]:
    """Return the parameters of ours that one entry of `weights` names.

    >>> weight_parameters("layers.mlp.gate+up")
    ('layers.mlp.gate', 'layers.mlp.up')
    """
    group, dot, names = weight.partition(" if ")[0].rpartition(".")
    return tuple(f"{group}{dot}{name}" for name in names.split("+"))


FAMILIES: Mapping[str, Family] = _read()
