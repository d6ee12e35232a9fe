"""Read the `config.json` of a Hugging Face model as the configuration of a run.

One table for each `model_type` says which of our keys each of theirs means. A key that is in no table is
refused by name: it may change the model. `BESIDE` lists the keys that change neither parameters nor
arithmetic of a training step, or belong to a recipe (dropout, initial values), which a run states itself.

What the file does not say is the same for all: 4,194,304 tokens in a step, the batch with which Llama 3 405B
began, in sequences of at most 8192 tokens; AdamW; parameters sharded over all devices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, nearest_name

from ._base import is_table
from ._transformer import TransformerModel

Tree = Mapping[str, Any]

TOKENS_PER_STEP = 2**22
LONGEST_SEQUENCE = 8192  # unless the file's own limit is lower
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu-erf",
    "relu": "relu",
}
STRETCHING = {
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        "original_max_position_embeddings": "rope_original_positions",
    },
    "linear": {"factor": "rope_factor"},
    "yarn": {
        "factor": "rope_factor",
        "beta_slow": "rope_low_factor",
        "beta_fast": "rope_high_factor",
        "mscale_all_dim": "rope_magnitude",
        "original_max_position_embeddings": "rope_original_positions",
    },
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel", "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
OF_TRAINING = {"dropout", "unroll", "loss_chunk", "capacity_factor", "balancing_loss"}
BESIDE = frozenset(
    [
        "architectures",
        "model_type",
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "use_cache",
        "initializer_range",
        "pretraining_tp",
        "is_decoder",
        "is_encoder_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "attention_dropout",
        "classifier_dropout",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
        "hidden_dropout",
        "task_specific_params",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "gradient_checkpointing",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "reorder_and_upcast_attn",
        "n_ctx",
        "_attn_implementation",
        "attn_implementation",
        "_flash_attn_2_enabled",
        "quantization_config",
        "chunk_size_feed_forward",
        "cache_implementation",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "prefix",
        "tokenizer_class",
        "transformers.js_config",
        "is_llama_config",
        "ep_size",
        "aux_loss_alpha",
        "seq_aux",
        "num_nextn_predict_layers",  # modules beside the model that predict further tokens: not loaded
        "num_mtp_layers",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`: `keys` of its file by ours, with `fixed` values of ours that it always has.

    `defaults`: what `transformers` takes for a key of theirs that the file leaves out. `only`: keys of theirs
    that are understood with one value alone.
    """

    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]


_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA_FIXED = {"norm": "rms", "position": "rotary", "mlp": "gated"}
_LLAMA_DEFAULTS = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
_DEEPSEEK_KEYS = {
    **{ours: theirs for ours, theirs in _LLAMA_KEYS.items() if ours not in ("head_dim", "num_kv_heads")},
    "mlp_dim": "moe_intermediate_size",
    "dense_mlp_dim": "intermediate_size",
    "num_dense_layers": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "experts_per_token": "num_experts_per_tok",
    "router_scale": "routed_scaling_factor",
    "router_groups": "n_group",
    "router_groups_chosen": "topk_group",
    "latent_rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_DEEPSEEK_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GEMMA_FIXED = {**_LLAMA_FIXED, "scaled_embedding": True, "activation": "gelu"}
_GEMMA_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA_ONLY = {"attention_bias": (False,), "use_bidirectional_attention": (False,)}
_GEMMA_CAPS = {
    "score_dim": "query_pre_attn_scalar",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(keys=_LLAMA_KEYS, fixed=_LLAMA_FIXED, defaults=_LLAMA_DEFAULTS, only=_NO_BIAS),
    "mistral": Family(
        keys=_LLAMA_KEYS,
        fixed=_LLAMA_FIXED,
        defaults={**_LLAMA_DEFAULTS, "sliding_window": 4096},
        only=_NO_BIAS,
    ),
    "mixtral": Family(
        keys={**_LLAMA_KEYS, "experts_per_token": "num_experts_per_tok"},
        fixed=_LLAMA_FIXED,
        defaults={**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        only=_NO_BIAS,
    ),
    "qwen2": Family(
        keys=_LLAMA_KEYS,
        fixed={**_LLAMA_FIXED, "qkv_bias": True},
        defaults={**_LLAMA_DEFAULTS, **_QWEN_WINDOW},
        only={**_NO_BIAS, "use_mrope": (False,)},
    ),
    "qwen3": Family(
        keys=_LLAMA_KEYS,
        fixed={**_LLAMA_FIXED, "qk_norm": "head"},
        defaults={**_LLAMA_DEFAULTS, **_QWEN_WINDOW, "head_dim": 128},
        only=_NO_BIAS,
    ),
    "qwen3_moe": Family(
        keys={
            **_LLAMA_KEYS,
            "mlp_dim": "moe_intermediate_size",
            "experts_per_token": "num_experts_per_tok",
            "router_normalised": "norm_topk_prob",
        },
        fixed={**_LLAMA_FIXED, "qk_norm": "head"},
        defaults={**_LLAMA_DEFAULTS, **_QWEN_WINDOW, "norm_topk_prob": False},
        only={
            **_NO_BIAS,
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
        },
    ),
    "olmo2": Family(
        keys=_LLAMA_KEYS,
        fixed={**_LLAMA_FIXED, "qk_norm": "all", "norm_place": "after"},
        defaults={**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5},
        only=_NO_BIAS,
    ),
    "phi3": Family(
        keys=_LLAMA_KEYS,
        fixed=_LLAMA_FIXED,
        defaults={**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5},
        only=_NO_BIAS,
    ),
    "gemma": Family(
        keys=_LLAMA_KEYS,
        fixed=_GEMMA_FIXED,
        defaults=_GEMMA_DEFAULTS,
        only=_GEMMA_ONLY,
    ),
    "gemma2": Family(
        keys={**_LLAMA_KEYS, **_GEMMA_CAPS},
        fixed={**_GEMMA_FIXED, "norm_place": "both"},
        defaults={
            **_GEMMA_DEFAULTS,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        only=_GEMMA_ONLY,
    ),
    "gemma3_text": Family(
        keys={**_LLAMA_KEYS, **_GEMMA_CAPS, "rope_local_theta": "rope_local_base_freq"},
        fixed={**_GEMMA_FIXED, "norm_place": "both", "qk_norm": "head"},
        defaults={
            **_GEMMA_DEFAULTS,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        only=_GEMMA_ONLY,
    ),
    "gpt_neox": Family(
        keys={
            **{ours: theirs for ours, theirs in _LLAMA_KEYS.items() if ours != "num_kv_heads"},
            "norm_epsilon": "layer_norm_eps",
            "parallel": "use_parallel_residual",
            "rotary_share": "rotary_pct",
        },
        fixed={"norm": "layer", "position": "rotary", "mlp": "plain", "bias": True},
        defaults={
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "rotary_pct": 0.25,
            "hidden_act": "gelu",
        },
        only={"attention_bias": (True,)},
    ),
    "deepseek_v2": Family(
        keys={**_DEEPSEEK_KEYS},
        fixed={**_LLAMA_FIXED, "rope_interleaved": True, "router_normalised": False},
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "norm_topk_prob": False,
        },
        only={
            **_NO_BIAS,
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "moe_layer_freq": (1,),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
    ),
    "deepseek_v3": Family(
        keys={**_DEEPSEEK_KEYS, "router_normalised": "norm_topk_prob", "rope_interleaved": "rope_interleave"},
        fixed={**_LLAMA_FIXED, "router": "sigmoid", "router_bias": True},
        defaults={
            **_DEEPSEEK_DEFAULTS,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "rope_interleave": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
        only={
            "attention_bias": (False,),
            "scoring_func": ("sigmoid",),
            "moe_layer_freq": (1,),
            "topk_method": ("noaux_tc",),
        },
    ),
    "gpt2": Family(
        keys={
            "num_layers": "n_layer",
            "embed_dim": "n_embd",
            "num_heads": "n_head",
            "mlp_dim": "n_inner",
            "vocab_size": "vocab_size",
            "norm_epsilon": "layer_norm_epsilon",
            "max_positions": "n_positions",
            "tied_embeddings": "tie_word_embeddings",
        },
        fixed={"norm": "layer", "position": "learned", "mlp": "plain", "bias": True},
        defaults={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
}  # fmt: skip


def is_huggingface(tree: object) -> bool:
    """Return whether a JSON object is the configuration of a Hugging Face model."""
    return is_table(tree) and isinstance(tree.get("model_type"), str)


def run_of_huggingface(tree: Tree, where: str) -> dict[str, Any]:
    """Return the tree of a run of the model that a `config.json` describes.

    Args:
        where: the file, for errors.

    Raises:
        InputError: the family is not known, or a key or its value is not understood.

    >>> tree = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    ...         "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 512}
    >>> run = run_of_huggingface(tree, "config.json")
    >>> run["model"]["embed_dim"], run["batch"]["sequence_length"]
    (64, 512)
    """
    family = FAMILIES.get(tree["model_type"])
    if family is None:
        raise InputError(
            f"{where}: model_type {tree['model_type']!r} is not known",
            hint=f"{nearest_name(tree['model_type'], FAMILIES)}; or weigh the model's own training step",
        )
    given = {key: value for key, value in {**family.defaults, **tree}.items() if value is not None}
    unread = set(given) - BESIDE
    model: dict[str, Any] = {"kind": "transformer", **family.fixed}
    for ours, theirs in family.keys.items():
        unread.discard(theirs)
        if theirs in given:
            model[ours] = given[theirs]
    try:
        for read in READERS:
            read(given, model, unread, where)
        limits = (tree.get("max_position_embeddings"), tree.get("n_positions"))
        length = min((LONGEST_SEQUENCE, *(int(limit) for limit in limits if limit)))
    except (TypeError, ValueError, AttributeError) as wrong:
        raise InputError(
            f"{where}: a value is not of the kind that its key has: {wrong}",
            hint="compare the file with the model's own; numbers are not in quotes, and lists in brackets",
        ) from wrong
    for key, values in family.only.items():
        unread.discard(key)
        if key in given and given[key] not in values:
            raise _not_understood(where, {key: given[key]})
    if unread:
        raise _not_understood(where, {key: given[key] for key in sorted(unread)})
    return {
        "layout": "fsdp=-1",
        "model": model,
        "data": {"source": "synthetic"},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-4, "clip_norm": 1.0},
        "batch": {
            "sequences": max(1, TOKENS_PER_STEP // length),
            "sequence_length": length,
            "microbatch_sequences": 1,
        },
    }


def huggingface_of_model(model: TransformerModel, longest: int) -> dict[str, Any]:
    """Return a `config.json` of the first family that has this model.

    Args:
        longest: positions that the file states as its limit, for a model whose positions are rotary.

    Raises:
        InputError: no family has it.

    >>> from ._load import load_config
    >>> made = huggingface_of_model(load_config("llama3-8b").model, 8192)
    >>> made["model_type"], made["num_hidden_layers"], made["rope_parameters"]["rope_theta"]
    ('llama', 32, 500000.0)
    """
    for name, family in FAMILIES.items():
        tree = _config_json(model, name, family, longest)
        try:
            read = TransformerModel.model_validate(run_of_huggingface(tree, name)["model"])
        except (InputError, ValueError):
            continue  # this family cannot have these sizes
        if _architecture(read) == _architecture(model):
            return tree
    raise InputError(
        "no Hugging Face family that is known has this model's combination of norms, positions and biases",
        hint=f"export it as it is, without --format; known: {', '.join(FAMILIES)}",
    )


def _config_json(model: TransformerModel, name: str, family: Family, longest: int) -> dict[str, Any]:
    """Return the file of a family with the sizes of a model, which that family need not be able to have."""
    tree: dict[str, Any] = {"model_type": name, "architectures": [ARCHITECTURES[name]]}
    tree |= {theirs: getattr(model, ours) for ours, theirs in family.keys.items()}
    theirs_of = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    act = "activation_function" if name == "gpt2" else "hidden_act"
    tree[act] = theirs_of[model.activation]
    if name in ("qwen3_moe", "mixtral"):
        tree["num_local_experts" if name == "mixtral" else "num_experts"] = model.num_experts
    tree |= {key: values[0] for key, values in family.only.items()}
    if name.startswith("deepseek"):
        turned = model.rotary_dim or 0
        tree |= {"qk_nope_head_dim": model.head_dim - turned, "num_key_value_heads": model.num_heads}
        tree["intermediate_size"] = model.dense_mlp_dim or model.mlp_dim
        if model.router_groups is not None and name == "deepseek_v2":
            tree["topk_method"] = "group_limited_greedy"
        if model.router_groups is None and name == "deepseek_v3":
            tree |= {"n_group": 1, "topk_group": 1}
    if model.window is not None:
        kinds = [GLOBAL if window is None else LOCAL for window in model.windows]
        layers = [kinds[layer % len(kinds)] for layer in range(model.num_layers)]
        tree |= {"sliding_window": model.window}
        tree |= {"layer_types": layers} if name in ALTERNATING else {}
        tree |= {"use_sliding_window": True} if name.startswith("qwen") else {}
    elif name in WINDOWED:
        tree["sliding_window"] = None
    if model.rope_theta is not None:
        tree |= {"max_position_embeddings": longest, "rope_parameters": _rope_json(model)}
    return tree


def _rope_json(model: TransformerModel) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_factor is not None:
        keys = STRETCHING[model.rope_stretching]
        rope |= {"rope_type": model.rope_stretching}
        rope |= {theirs: getattr(model, ours) for theirs, ours in keys.items()}
        rope |= {"mscale": model.rope_magnitude} if model.rope_stretching == "yarn" else {}
    if model.rotary_share != 1:
        rope["partial_rotary_factor"] = model.rotary_share
    if model.rope_local_theta is not None:
        return {GLOBAL: rope, LOCAL: {"rope_type": "default", "rope_theta": model.rope_local_theta}}
    return rope


def _architecture(model: TransformerModel) -> dict[str, Any]:
    """Return the keys of a model that a file must keep: not those of training alone."""
    return {key: value for key, value in model.model_dump().items() if key not in OF_TRAINING}


def _not_understood(where: str, keys: Mapping[str, Any]) -> InputError:
    listed = ", ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return InputError(
        f"{where}: not understood, and it may change the model: {listed}",
        hint="remove what you know to have no effect, or weigh the model's own training step",
    )


def _activation(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    for key in ("hidden_act", "activation_function", "hidden_activation"):
        if key in given:
            unread.discard(key)
            if given[key] not in ACTIVATIONS:
                raise _not_understood(where, {key: given[key]})
            model["activation"] = ACTIVATIONS[given[key]]


def _kv_heads(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    model.setdefault("num_kv_heads", model.get("num_heads"))


def _inner(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    if "mlp_dim" not in model and "embed_dim" in model:  # GPT-2's n_inner is usually null
        model["mlp_dim"] = 4 * model["embed_dim"]


def _rotary(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the base of the rotary wavelengths and how they are stretched."""
    unread -= {"rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "n_positions"}
    unread -= {"rotary_emb_base", "partial_rotary_factor", "original_max_position_embeddings"}
    if model["position"] != "rotary":
        return
    scaling = dict(given.get("rope_parameters") or {})  # transformers 5 keeps the base there as well
    scaling |= dict(given.get("rope_scaling") or {})
    if GLOBAL in scaling or LOCAL in scaling:  # transformers 5, where the kinds of layers differ
        local = dict(scaling.get(LOCAL) or {})
        model["rope_local_theta"] = float(local.pop("rope_theta", model.get("rope_local_theta", 10_000.0)))
        if local not in ({}, {"rope_type": "default"}):
            raise _not_understood(where, {"rope_parameters": given["rope_parameters"]})
        scaling = dict(scaling.get(GLOBAL) or {})
    base = given.get("rope_theta", given.get("rotary_emb_base", 10_000.0))
    model["rope_theta"] = float(scaling.pop("rope_theta", base))
    share = scaling.pop("partial_rotary_factor", given.get("partial_rotary_factor"))
    if share is not None:
        model["rotary_share"] = share
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if kind == "default" and not scaling:
        return
    if kind == "yarn" and scaling.get("mscale") == scaling.get("mscale_all_dim"):
        scaling.pop("mscale", None)  # their ratio, 1, would multiply sines and cosines
    if kind not in STRETCHING or set(scaling) != set(STRETCHING[kind]):
        raise _not_understood(where, {"rope_scaling": {"rope_type": kind, **scaling}})
    model["rope_stretching"] = kind
    model |= {ours: scaling[theirs] for theirs, ours in STRETCHING[kind].items()}


MOST_LAYERS = 10_000  # whose kinds are listed
LOCAL, GLOBAL = "sliding_attention", "full_attention"
WINDOWED = ("mistral", "mixtral", "phi3", "qwen3_moe")  # every layer alike
ALTERNATING = ("qwen2", "qwen3", "gemma2", "gemma3_text")  # a kind for each layer


def _window(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read a sliding window, and which layers have it: all, none, or all but the last of each group.

    `use_sliding_window = false` (Qwen) switches it off; the first `max_window_layers` of Qwen's lack it.
    """
    kinds, family = given.get("layer_types"), given["model_type"]
    if kinds is not None and LOCAL not in kinds:
        unread.discard("layer_types")
    if family not in (*WINDOWED, *ALTERNATING):
        return
    keys = {"sliding_window", "use_sliding_window", "max_window_layers"}
    keys |= {"layer_types", "sliding_window_pattern", "_sliding_window_pattern", "sliding_window_size"}
    unread -= keys
    num_layers = given.get("num_hidden_layers", 0)
    if not isinstance(num_layers, int) or not 0 < num_layers <= MOST_LAYERS:
        return  # the model refuses the number
    if family in WINDOWED:
        kinds = [LOCAL] * num_layers
    if kinds is None:
        pattern = given.get("sliding_window_pattern", given.get("_sliding_window_pattern"))
        first = given.get("max_window_layers", 0)
        kinds = [LOCAL if layer >= first else GLOBAL for layer in range(num_layers)]
        if pattern is not None:
            kinds = [GLOBAL if (layer + 1) % pattern == 0 else LOCAL for layer in range(num_layers)]
    if not (given.get("use_sliding_window", True) and given.get("sliding_window")) or LOCAL not in kinds:
        return
    model["window"] = given["sliding_window"]
    if GLOBAL in kinds:
        size = kinds.index(GLOBAL) + 1
        if kinds != [GLOBAL if (layer + 1) % size == 0 else LOCAL for layer in range(num_layers)]:
            raise _not_understood(where, {key: given[key] for key in sorted(keys) if key in given})
        model["global_every"] = size


def _latent(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the sizes of DeepSeek's heads, and leave out what its values leave without effect."""
    if not given["model_type"].startswith("deepseek"):
        return
    unread -= {"qk_nope_head_dim", "head_dim", "qk_head_dim", "num_key_value_heads"}
    for key in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads"):
        if key not in given:
            raise InputError(
                f"{where}: a {given['model_type']} model has no {key}", hint=f"add {key} to config.json"
            )
    model["head_dim"] = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    if given.get("num_key_value_heads", given["num_attention_heads"]) != given["num_attention_heads"]:
        raise _not_understood(where, {"num_key_value_heads": given["num_key_value_heads"]})
    groups = model.get("router_groups"), model.get("router_groups_chosen")
    if given.get("topk_method") == "greedy" or groups == (1, 1):
        model.pop("router_groups", None)
        model.pop("router_groups_chosen", None)
    if not model.get("num_dense_layers"):
        model.pop("dense_mlp_dim", None)


def _expert_mlp(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the number of experts; leave out the width of a dense MLP where every MLP has experts."""
    if "experts_per_token" in model:
        unread -= {"num_experts", "num_local_experts"}  # releases of transformers differ in the name
        model.setdefault("num_experts", given.get("num_experts", given.get("num_local_experts")))
        if "moe_intermediate_size" in given:
            unread.discard("intermediate_size")


def cached_config(name: str) -> Path | None:
    """Return the `config.json` of "organisation/model" in the local Hugging Face cache, or None.

    The cache is at `HF_HUB_CACHE`, or below `HF_HOME`, or in the user's cache folder, as `huggingface_hub`
    has it. Nothing is downloaded.
    """
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    root = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    folder = root / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs/main").read_text().strip()
    except (OSError, ValueError):
        return None
    path = folder / "snapshots" / revision / "config.json"
    return path if path.is_file() else None


READERS: tuple[Callable[..., None], ...] = (
    _activation, _latent, _kv_heads, _inner, _rotary, _window, _expert_mlp
)  # fmt: skip
