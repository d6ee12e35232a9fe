"""Say which of our keys each key of a Hugging Face `config.json` means: a table for each `model_type`.

A key that is in no table is refused by name. `BESIDE` lists those that change neither parameters nor
arithmetic of a training step, or belong to a recipe (dropout, initial values), which a run states itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu-erf",
    "relu": "relu",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "phi3": "Phi3ForCausalLM", "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
    "olmoe": "OlmoeForCausalLM", "olmo3": "Olmo3ForCausalLM", "ministral": "MinistralForCausalLM",
    "seed_oss": "SeedOssForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM", "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
# Families in which rotary positions may turn a part of each head.
PARTLY_TURNED = {"phi3", "gpt_neox", "glm", "glm4", "glm4_moe"}
OF_TRAINING = {"dropout", "unroll", "loss_chunk", "capacity_factor", "expert_load", "balancing_loss"}
ALWAYS_FALSE = (  # of no family here
    *("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "torchscript"),
    "rope_interleaved",  # in SmolLM2's files; transformers does not read it
)
OF_SAMPLING = (  # once written into every file
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "output_scores", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "max_new_tokens"),
)
BESIDE = frozenset(
    [
        *OF_SAMPLING,
        "use_bfloat16",
        "tf_legacy_loss",
        "unsloth_fixed",
        "unsloth_version",
        "max_sequence_length",  # of the first Llama's files; transformers does not read it
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
        "cross_attention_hidden_size",
        "attention_dropout",
        "classifier_dropout",
        "attn_pdrop",
        "resid_pdrop",
        "embd_pdrop",
        "hidden_dropout",
        "residual_dropout",
        "embedding_dropout",
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
    """One `model_type`: the `keys` of its file by our names, and our keys whose values are `fixed` for it.

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
_QWEN = {
    **_LLAMA_DEFAULTS,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_NO_BIAS = {"attention_bias": (False,), "mlp_bias": (False,)}
_ROUTED_KEYS = {
    "mlp_dim": "moe_intermediate_size",
    "dense_mlp_dim": "intermediate_size",
    "num_dense_layers": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "experts_per_token": "num_experts_per_tok",
    "router_scale": "routed_scaling_factor",
    "router_groups": "n_group",
    "router_groups_chosen": "topk_group",
}
_DEEPSEEK_KEYS = {
    **{ours: theirs for ours, theirs in _LLAMA_KEYS.items() if ours not in ("head_dim", "num_kv_heads")},
    **_ROUTED_KEYS,
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
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA_ONLY = {"attention_bias": (False,), "use_bidirectional_attention": (False,)}
_GEMMA_CAPS = {
    "score_dim": "query_pre_attn_scalar",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}

_GLM_KEYS = {**_LLAMA_KEYS, "qkv_bias": "attention_bias"}
_GLM_FIXED = {**_LLAMA_FIXED, "rope_interleaved": True}
_GLM_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(keys=_LLAMA_KEYS, fixed=_LLAMA_FIXED, defaults=_LLAMA_DEFAULTS, only=_NO_BIAS),
    "mistral": Family(
        keys=_LLAMA_KEYS,
        fixed=_LLAMA_FIXED,
        defaults={**_LLAMA_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        only=_NO_BIAS,
    ),
    "mixtral": Family(
        keys={**_LLAMA_KEYS, "experts_per_token": "num_experts_per_tok"},
        fixed=_LLAMA_FIXED,
        defaults={
            **_LLAMA_DEFAULTS,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        only=_NO_BIAS,
    ),
    "qwen2": Family(
        keys=_LLAMA_KEYS,
        fixed={**_LLAMA_FIXED, "qkv_bias": True},
        defaults=_QWEN,
        only={**_NO_BIAS, "use_mrope": (False,)},
    ),
    "qwen3": Family(
        keys=_LLAMA_KEYS,
        fixed={**_LLAMA_FIXED, "qk_norm": "head"},
        defaults={**_QWEN, "head_dim": 128},
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
        defaults={**_QWEN, "num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False},
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
    "olmoe": Family(
        keys={
            **_LLAMA_KEYS,
            "experts_per_token": "num_experts_per_tok",
            "router_normalised": "norm_topk_prob",
        },
        fixed={**_LLAMA_FIXED, "qk_norm": "all"},
        defaults={**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "norm_topk_prob": False},
        only={**_NO_BIAS, "clip_qkv": ()},
    ),
    "olmo3": Family(
        keys=_LLAMA_KEYS,
        # Layers with a window keep this base, whatever the file says of the others.
        fixed={**_LLAMA_FIXED, "qk_norm": "all", "norm_place": "after", "rope_local_theta": 500_000.0},
        defaults={
            **_LLAMA_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        only=_NO_BIAS,
    ),
    "ministral": Family(
        keys=_LLAMA_KEYS,
        fixed=_LLAMA_FIXED,
        defaults={**_LLAMA_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        only=_NO_BIAS,
    ),
    "seed_oss": Family(
        keys={**_LLAMA_KEYS, "qkv_bias": "attention_bias"},
        fixed=_LLAMA_FIXED,
        defaults={**_LLAMA_DEFAULTS, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        only={"attention_out_bias": (False,), "mlp_bias": (False,)},
    ),
    "ernie4_5": Family(
        keys=_LLAMA_KEYS,
        fixed={**_LLAMA_FIXED, "rope_interleaved": True},
        defaults={
            **_LLAMA_DEFAULTS,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        only={**_NO_BIAS, "use_bias": (False,)},
    ),
    "glm": Family(keys=_GLM_KEYS, fixed=_GLM_FIXED, defaults=_GLM_DEFAULTS, only={"mlp_bias": (False,)}),
    "glm4": Family(
        keys=_GLM_KEYS,
        fixed={**_GLM_FIXED, "norm_place": "both"},
        defaults=_GLM_DEFAULTS,
        only={"mlp_bias": (False,)},
    ),
    "starcoder2": Family(
        keys={**_LLAMA_KEYS, "norm_epsilon": "norm_epsilon"},
        fixed={"norm": "layer", "position": "rotary", "mlp": "plain", "bias": True},
        defaults={
            "rope_theta": 10_000.0,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
        only={"use_bias": (True,), "norm_type": ("layer_norm",), "mlp_type": ("default",)},
    ),
    "phi3": Family(
        keys=_LLAMA_KEYS,
        fixed=_LLAMA_FIXED,
        defaults={**_LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        only={
            **_NO_BIAS,
            "lm_head_bias": (False,),  # of Phi-4-mini's file, with those below
            "full_attn_mod": (1,),
            "interpolate_factor": (1,),
        },
    ),
    "gemma": Family(
        keys=_LLAMA_KEYS,
        fixed=_GEMMA_FIXED,
        defaults={**_GEMMA_DEFAULTS, "num_key_value_heads": 16},
        only=_GEMMA_ONLY,
    ),
    "gemma2": Family(
        keys={**_LLAMA_KEYS, **_GEMMA_CAPS},
        fixed={**_GEMMA_FIXED, "norm_place": "both"},
        defaults={
            **_GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        only=_GEMMA_ONLY,
    ),
    "gemma3_text": Family(
        keys={
            **_LLAMA_KEYS,
            "score_dim": "query_pre_attn_scalar",
            "logit_cap": "final_logit_softcapping",
            "rope_local_theta": "rope_local_base_freq",
        },
        fixed={**_GEMMA_FIXED, "norm_place": "both", "qk_norm": "head"},
        defaults={
            **_GEMMA_DEFAULTS,
            "num_attention_heads": 8,  # Gemma 3's own files leave out these two and the vocabulary
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        only={**_GEMMA_ONLY, "attn_logit_softcapping": ()},
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
        keys=_DEEPSEEK_KEYS,
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
    "glm4_moe": Family(
        keys={
            **_LLAMA_KEYS,
            **_ROUTED_KEYS,
            "router_normalised": "norm_topk_prob",
            "qkv_bias": "attention_bias",
        },
        fixed={**_LLAMA_FIXED, "router": "sigmoid", "router_bias": True},
        defaults={
            **_LLAMA_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        only={"mlp_bias": (False,)},
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
