"""A Hugging Face `config.json` is a run, or is refused by the names of the keys that are not understood."""

import json
import math
import re
from pathlib import Path

import pytest

from meshwright.config import TransformerModel, load_config, text_reading
from meshwright.contrib.hub import FAMILIES, published_config
from meshwright.errors import InputError

# Sizes as published with the models, and the parameters that their pages count.
PUBLISHED = {
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        8_030_261_248,
    ),
    "Mistral-7B": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        7_241_732_096,
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
        46_702_792_704,
    ),
    "Qwen2.5-7B": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "use_mrope": False,
        },
        7_615_616_512,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
}


@pytest.fixture
def folder_of(tmp_path):
    def make(tree, name="model"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tree))
        return str(folder)

    return make


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_parameters_that_are_counted_elsewhere(name, folder_of):
    tree, count = PUBLISHED[name]
    run = load_config(folder_of(tree, name))
    assert run.name == name
    assert run.model.num_parameters == count
    assert run.batch.tokens_per_step == 2**22
    assert load_config(f"{folder_of(tree, 'again')}/config.json").model == run.model


def test_a_preset_and_the_file_of_the_same_model_are_one_model(folder_of):
    tree, _ = PUBLISHED["Mixtral-8x7B"]
    read, preset = load_config(folder_of(tree)).model, load_config("mixtral-8x7b").model
    same = {"num_parameters", "num_active_parameters", "num_matmul_parameters"}
    assert all(getattr(read, name) == getattr(preset, name) for name in same)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llava"}, "model_type 'llava' is not known"),
        ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"hidden_act": "xielu"}, 'hidden_act = "xielu"'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "temperature": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "base": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),  # which its layers do not read
        ({"add_cross_attention": True}, "add_cross_attention = true"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "predicts the next token"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
        ({"model_type": "gemma4_text", "sliding_window": 512}, "hidden_size_per_layer_input = 256"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}, "rope_scaling": None}, "sliding"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, words, folder_of):
    tree, _ = PUBLISHED["Llama-3.1-8B"]
    with pytest.raises(InputError, match=words):
        load_config(folder_of({**tree, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden_size": "4096"},
            r'hidden_size = "4096" \(model.embed_dim\): input should be ',
        ),
        ({"num_hidden_layers": -2}, "num_hidden_layers = -2"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = Infinity"),
        ({"model_type": "mistral", "num_attention_heads": 4}, "without num_key_value_heads has 8"),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn needs a base above 1"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_in_the_file(changes, words, folder_of):
    tree = {**PUBLISHED["Llama-3.1-8B"][0], **changes}
    if "model_type" in changes:
        del tree["num_key_value_heads"]
    with pytest.raises(InputError, match=words):
        load_config(folder_of(tree))


@pytest.mark.parametrize(
    ("tree", "hint"),
    [
        (
            {"model_type": "opt"},
            "weigh the module that transformers makes of the file: meshwright weigh FOLDER",
        ),
        ({"model_type": "llava", "text_config": {"model_type": "opt"}}, "--as torch"),
        ({"model_type": "lama"}, "did you mean 'llama'? Or weigh the module"),
        ({"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64}, 'add its "model_type": "qwen2"'),
    ],
)
def test_a_file_of_no_known_family_is_refused_with_what_to_do(tree, hint, folder_of):
    with pytest.raises(InputError) as refused:
        load_config(folder_of(tree))
    assert hint in refused.value.hint


def test_of_a_model_that_reads_images_the_text_part_is_taken_and_that_is_said(folder_of):
    text = {"hidden_size": 64, "intermediate_size": 128, "model_type": "gemma3_text", "num_hidden_layers": 2,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    vision = {"hidden_size": 32, "model_type": "siglip_vision_model", "num_hidden_layers": 2}
    tree = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": text, "vision_config": vision, "torch_dtype": "bfloat16"}  # fmt: skip
    both, alone = folder_of(tree), folder_of(text, "alone")
    assert load_config(both).name.endswith("-text")
    assert load_config(both).model == load_config(alone).model
    untyped = {key: value for key, value in text.items() if key != "model_type"}
    assert (
        load_config(folder_of({**tree, "text_config": untyped}, "untyped")).model == load_config(both).model
    )
    assert "reads more than text; its text part, a gemma3_text, is taken" in text_reading(both)
    assert text_reading(alone) == text_reading("llama3-8b") == ""


# As Kimi-K2's and DeepSeek-V3.1's folders have it: what one family's file says with and without effect.
DEEPSEEK_V3 = {
    **{"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_deepseek.X"}},
    **{"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64},
    **{"num_hidden_layers": 61, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "vocab_size": 163840},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1},
    **{"routed_scaling_factor": 2.827, "norm_topk_prob": True, "moe_layer_freq": 1, "ep_size": 1},
    **{"aux_loss_alpha": 0.001, "seq_aux": True, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05},
    **{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "rope_scaling": {
        **{"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0},
        **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    },
}


def test_an_unknown_model_type_is_read_as_the_family_of_the_class_that_it_names(folder_of):
    kimi = folder_of({**DEEPSEEK_V3, "model_type": "kimi_k2"}, "kimi")
    model = load_config(kimi).model
    assert f"{model.num_parameters / 1e9:.0f} {model.num_active_parameters / 1e9:.1f}" == "1026 32.9"
    assert model == load_config(folder_of({**DEEPSEEK_V3, "model_type": "deepseek_v3"}, "v3")).model
    assert "'kimi_k2' is read as deepseek_v3, whose class its architectures name" in text_reading(kimi)
    inner = {"model_type": "kimi_k25", "text_config": {**DEEPSEEK_V3, "model_type": "kimi_k2"}}
    assert load_config(folder_of(inner, "images")).model == model
    with pytest.raises(InputError, match="'kimi_k2' is not known"):
        load_config(folder_of({**DEEPSEEK_V3, "model_type": "kimi_k2", "architectures": ["Kimi"]}, "none"))


# The keys of published files.
MINIMAX = {
    **{"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128},
    **{"hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "model_type": "minimax_m2"},
    **{"max_position_embeddings": 196608, "mtp_transformer_layers": 1, "num_attention_heads": 48},
    **{"num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_mtp_modules": 3},
    **{"num_local_experts": 256, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000},
    **{"rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_cache": True},
    **{"tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True},
    "vocab_size": 200064,
}
ERNIE = {
    **{"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_act": "silu"},
    **{"hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072, "moe_k": 6},
    **{"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536},
    **{"moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1},
    **{"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": True, "use_bias": False},
    **{"num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 500000},
    **{"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "tie_word_embeddings": True},
    "vocab_size": 103424,
}
HUNYUAN = {
    **{"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"intermediate_size": 3072, "vocab_size": 128167, "num_experts": 64, "tie_word_embeddings": True},
    **{"moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32},
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "type": "dynamic"},
    **{"add_classification_head": False, "anyres_pooling_size": 2, "class_num": 0, "dense_list": [4096, 0]},
    **{"moe_drop_tokens": False, "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False},
    **{"org_vocab_size": 128167, "pool_type": "last", "use_mixed_mlp_moe": True, "use_mla": False},
    **{"use_rotary_pos_emb": True, "use_cla": False, "cla_share_factor": 2, "norm_type": "rms"},
}
QWEN3_5_TEXT = {
    **{"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "vocab_size": 248320},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    **{"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"},
    **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": []},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
        **{"rope_theta": 10000000, "rope_type": "default"},
    },
}
QWEN3_5 = {"model_type": "qwen3_5_moe", "text_config": QWEN3_5_TEXT, "vision_config": {"depth": 27}}
GRANITE_4 = {
    **{"model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "vocab_size": 100352},
    **{"num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48},
    **{"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "num_local_experts": 64},
    **{"num_experts_per_tok": 6, "shared_intermediate_size": 1024, "tie_word_embeddings": True},
    **{"init_method": "mup", "normalization_function": "rmsnorm", "position_embedding_type": "nope"},
    "layer_types": ["mamba"] * 5 + (["attention"] + ["mamba"] * 9) * 3 + ["attention"] + ["mamba"] * 4,
}
GRANITE_4_MICRO = {
    **{**GRANITE_4, "hidden_size": 2560, "intermediate_size": 8192, "num_attention_heads": 40},
    **{"num_key_value_heads": 8, "num_local_experts": 0, "num_experts_per_tok": 0},
    **{
        "shared_intermediate_size": 8192,
        "position_embedding_type": "rope",
        "layer_types": ["attention"] * 40,
    },
}
COMMAND_R7B = {
    **{"model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256000},
    **{"layer_switch": 4, "sliding_window_pattern": 4, "order_of_interleaved_layers": "local_attn_first"},
    **{"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True},
    **{"use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True},
}
NEMOTRON_NANO = {
    **{"model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "vocab_size": 131072},
    **{"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128},
    **{"mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "num_hidden_layers": 56},
    **{"layer_norm_epsilon": 1e-05, "rms_norm_eps": 1e-05, "time_step_rank": 256},
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
}
EXAONE = {
    **{"model_type": "exaone4", "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64},
    **{"num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    **{"reorder_qk_norm": True, "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": 4096},
    **{"sliding_window_pattern": "LLLG", "vocab_size": 102400, "max_window_layers": 64},
}
NEMOTRON = {
    **{"model_type": "nemotron_h", "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2},
    **{"head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05},
    **{"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
    **{"mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mlp_hidden_act": "relu2"},
    **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_groups": 8},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True},
    **{"num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52},
    **{"num_key_value_heads": 2, "routed_scaling_factor": 2.5, "ssm_state_size": 128, "vocab_size": 131072},
}
STARCODER = {
    **{"model_type": "starcoder2", "activation_function": "gelu", "hidden_act": "gelu_pytorch_tanh"},
    **{"hidden_size": 4608, "intermediate_size": 18432, "layer_norm_epsilon": 1e-05, "norm_epsilon": 1e-05},
    **{"mlp_type": "default", "norm_type": "layer_norm", "num_attention_heads": 36, "num_hidden_layers": 32},
    **{"num_key_value_heads": 4, "rope_theta": 1000000, "sliding_window": 4096, "use_bias": True},
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    ("tree", "total", "active"),  # billions of parameters that the models' pages state
    [
        *((MINIMAX, 230, 10), (ERNIE, 21, 3), (HUNYUAN, 80, 13), (EXAONE, 32, 32)),
        *((NEMOTRON, 31.6, 3.6), (STARCODER, 7.17, 7.17)),
        *((QWEN3_5, 35, 3.4), (GRANITE_4, 7, 1.4), (GRANITE_4_MICRO, 3.4, 3.4)),
        *((NEMOTRON_NANO, 9, 9), (COMMAND_R7B, 8, 8)),
    ],
    ids=[
        *("minimax", "ernie", "hunyuan", "exaone", "nemotron", "starcoder"),
        *("qwen3.5", "granite-4", "granite-4-micro", "nemotron-nano", "command-r7b"),
    ],
)
def test_the_keys_of_a_published_file_are_understood(tree, total, active, folder_of):
    model = load_config(folder_of(tree)).model
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.04)
    assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=0.12)  # tables included here


def test_what_files_say_of_layers_and_positions_is_read(folder_of):
    minimax = load_config(folder_of(MINIMAX, "minimax")).model
    assert minimax.rotary_share == 0.5
    hunyuan = load_config(folder_of(HUNYUAN, "hunyuan")).model
    assert hunyuan.rope_theta == pytest.approx(10_000 * 1000 ** (128 / 126))
    assert text_reading(folder_of(HUNYUAN, "alpha")) == ""
    further = text_reading(folder_of(QWEN3_5, "further"))
    assert "further tokens (mtp_num_hidden_layers = 1) are left out" in further
    exaone = load_config(folder_of(EXAONE, "exaone")).model
    assert exaone.windows == (4096, 4096, 4096, None)
    assert [kind.has_positions for kind in exaone.period] == [True, True, True, False]
    everywhere = load_config(folder_of({**EXAONE, "sliding_window": None}, "all")).model
    assert [(kind.window, kind.has_positions) for kind in everywhere.period] == [(None, True)]
    smol = {**PUBLISHED["Llama-3.1-8B"][0], "model_type": "smollm3", "rope_scaling": None}
    assert load_config(folder_of(smol, "smol")).model.no_rope_every == 4
    turned = {**smol, "no_rope_layers": [1] * 32}
    assert load_config(folder_of(turned, "turned")).model.no_rope_every is None


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({**MINIMAX, "scoring_func": "softmax"}, 'scoring_func = "softmax"'),
        ({**ERNIE, "moe_layer_end_index": 20}, "moe_layer_end_index = 20"),
        ({**HUNYUAN, "moe_topk": [8, 4] * 16}, "moe_topk = "),
        ({**GRANITE_4, "num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ({**HUNYUAN, "moe_layer_num_skipped": 1}, "moe_layer_num_skipped = 1"),
        ({**QWEN3_5_TEXT, "output_gate_type": "sigmoid"}, 'output_gate_type = "sigmoid"'),
        ({**GRANITE_4, "normalization_function": "layernorm"}, 'normalization_function = "layernorm"'),
        ({**EXAONE, "sliding_window_pattern": "LLGL"}, "LLGL"),
        ({**NEMOTRON, "norm_eps": 1e-06}, "norm_eps = 1e-06, layer_norm_epsilon = 1e-05"),
        (
            {
                **{**PUBLISHED["Llama-3.1-8B"][0], "model_type": "smollm3", "rope_scaling": None},
                "no_rope_layers": [0, 1] * 16,
            },
            "no_rope_layers",
        ),
        (
            {**DEEPSEEK_V3, "model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse"] * 60 + ["dense"]},
            "mlp_",
        ),
    ],
)
def test_a_part_of_a_published_family_that_is_not_run_is_refused(tree, words, folder_of):
    with pytest.raises(InputError, match=words):
        load_config(folder_of(tree))


KIMI = published_config("moonshotai/Kimi-Linear-48B-A3B-Instruct")
LINEAR = "linear_attn_config"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({LINEAR: {**KIMI[LINEAR], "kda_layers": [1, 2]}}, r"kda_layers = \[1, 2\]"),
        ({LINEAR: {**KIMI[LINEAR], "kda_layers": list(range(1, 28))}}, r"full_attn_layers = \[4, 8"),
        ({LINEAR: {**KIMI[LINEAR], "gate_lower_bound": -5.0}}, r"linear_attn_config.gate_lower_bound = -5.0"),
        ({"mla_use_nope": False}, "mla_use_nope = false"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
    ],
)
def test_layers_of_kimi_linear_that_are_not_run_are_refused(changes, words, folder_of):
    with pytest.raises(InputError, match=words):
        load_config(folder_of({**KIMI, **changes}))


def test_transformers_names_of_keys_and_lists_of_layers_are_read_like_the_published_ones(folder_of):
    theirs = {key: value for key, value in KIMI.items() if key not in (LINEAR, "first_k_dense_replace")}
    theirs |= {"num_experts_per_tok": theirs.pop("num_experts_per_token"), "linear_num_heads": 32}
    full = KIMI[LINEAR]["full_attn_layers"]
    theirs["layer_types"] = [f"{'full' if n in full else 'linear'}_attention" for n in range(1, 28)]
    theirs["mlp_layer_types"] = ["dense"] + ["sparse"] * 26
    assert load_config(folder_of(theirs)).model == load_config(folder_of(KIMI, "published")).model


def test_layers_that_are_all_without_experts_have_the_width_of_plain_mlps(folder_of):
    model = load_config(folder_of({**KIMI, "first_k_dense_replace": 27})).model
    assert (model.mlp_dim, model.num_experts, model.count(mlp="mlp")) == (9216, None, 27)


def test_a_folder_of_adapters_is_refused_with_where_their_base_is(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-7B"}')
    with pytest.raises(InputError, match=r"cannot read .*config.json") as refused:
        load_config(str(tmp_path))
    assert "name that of the model below them" in refused.value.hint


def test_a_limit_of_positions_that_is_no_length_is_refused(folder_of):
    with pytest.raises(InputError, match="sequence_length = 0: expected at least 1"):
        load_config(folder_of({**PUBLISHED["Llama-3.1-8B"][0], "max_position_embeddings": -0.5}))


def test_a_mark_of_byte_order_in_front_of_the_file_is_passed_over(tmp_path):
    tree, count = PUBLISHED["Qwen2.5-7B"]
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(tree).encode())
    assert load_config(str(tmp_path)).model.num_parameters == count


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": "8k"},
        {"model_type": "gemma2", "sliding_window_pattern": 0},
        {"max_position_embeddings": [8192]},
        {"max_position_embeddings": float("inf")},
        {"rope_theta": "high"},
        {"hidden_act": ["silu"]},
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_key(changes, folder_of):
    (key,) = changes.keys() - {"model_type"}
    words = f"a value is not of the kind that its key has: {key} = {json.dumps(changes[key])}"
    with pytest.raises(InputError, match=re.escape(words)):
        load_config(folder_of({**PUBLISHED["Llama-3.1-8B"][0], **changes}))


@pytest.mark.parametrize("wrong", [{"max_position_embeddings": [8192]}, {}])
def test_a_file_with_very_many_keys_is_refused_in_few_words(wrong, folder_of):
    """Each key of a file that cannot be read could be the cause, and each is one that we do not know."""
    many = {f"key_{number}": number for number in range(20_000)}
    with pytest.raises(InputError) as refused:
        load_config(folder_of({**PUBLISHED["Llama-3.1-8B"][0], **many, **wrong}))
    assert len(refused.value.message) < 2_000
    assert wrong or refused.value.message.endswith("and 19,960 more")


def test_the_width_of_a_head_has_two_names_in_files_of_nemotron_h(folder_of):
    tree = {**NEMOTRON_NANO, "attention_head_dim": NEMOTRON_NANO["head_dim"]}
    assert load_config(folder_of({**tree, "head_dim": None})).model.head_dim == 128


def test_key_heads_in_a_list_of_one_are_read(folder_of):
    listed = folder_of({**PUBLISHED["Llama-3.1-8B"][0], "num_key_value_heads": [8]})
    assert load_config(listed).model.num_kv_heads == 8


@pytest.mark.parametrize("kind", [["llama"], {}, 3])
def test_a_text_part_whose_model_type_is_no_word_is_that_of_its_class(kind, folder_of):
    inner = {**PUBLISHED["Llama-3.1-8B"][0], "model_type": kind, "architectures": ["LlamaForCausalLM"]}
    assert load_config(folder_of({"model_type": "llava", "text_config": inner})).model.num_layers == 32


def test_a_text_part_whose_model_type_is_no_word_is_refused_without_a_class(folder_of):
    inner = {**PUBLISHED["Llama-3.1-8B"][0], "model_type": ["llama"]}
    with pytest.raises(InputError, match="its text part is no known family"):
        load_config(folder_of({"model_type": "llava", "text_config": inner}))


def test_more_layers_than_there_can_be_are_refused_at_once(folder_of):
    with pytest.raises(InputError, match="num_layers"):
        load_config(folder_of({**PUBLISHED["Mistral-7B"][0], "num_hidden_layers": 10**30}))


def test_a_model_with_latents_that_lacks_a_size_is_refused(folder_of):
    sizes = {**PUBLISHED["Llama-3.1-8B"][0], "model_type": "deepseek_v2", "qk_rope_head_dim": None}
    with pytest.raises(InputError, match="a deepseek_v2 model has no qk_rope_head_dim"):
        load_config(folder_of(sizes))


def test_a_model_that_lacks_sizes_is_refused_by_their_names(folder_of):
    sizes = {**PUBLISHED["Llama-3.1-8B"][0], "intermediate_size": None}
    del sizes["num_hidden_layers"]
    with pytest.raises(InputError, match="a llama model has no num_hidden_layers and intermediate_size"):
        load_config(folder_of(sizes))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mixtral", "num_local_experts"),
        ("mixtral", "num_experts_per_tok"),
        ("glm4_moe", "intermediate_size"),
        ("gpt2", "n_layer"),
    ],
)
def test_a_key_that_a_family_needs_is_named(name, key, folder_of):
    tree = PUBLISHED["gpt2" if name == "gpt2" else "Mixtral-8x7B"][0]
    with pytest.raises(InputError, match=f"a {name} model has no .*{key}"):
        load_config(folder_of({**tree, "model_type": name, key: None}))


def test_what_a_file_leaves_out_is_what_transformers_takes_for_it(folder_of):
    mistral = dict(PUBLISHED["Mistral-7B"][0])
    del mistral["num_key_value_heads"]
    assert load_config(folder_of(mistral, "mistral")).model.num_kv_heads == 8
    # Of Gemma 3 4B's published file, the part about text.
    gemma = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    gemma |= {"num_hidden_layers": 34, "sliding_window": 1024}
    assert load_config(folder_of(gemma, "gemma")).model.num_parameters == 3_880_263_168


def test_keys_that_tools_add_without_effect_are_passed_over(folder_of):
    tree, count = PUBLISHED["Llama-3.1-8B"]
    added = {"rope_interleaved": False, "unsloth_fixed": True, "temperature": 0.6, "max_length": 4096}
    added |= {"torchscript": False, "use_bfloat16": False, "is_encoder_decoder": False}
    assert load_config(folder_of({**tree, **added}, "added")).model.num_parameters == count
    with pytest.raises(InputError, match="rope_interleaved = true"):
        load_config(folder_of({**tree, "rope_interleaved": True}, "refused"))


def test_gelu_in_a_file_of_gemma_is_its_tanh_form(folder_of):
    gemma = {**PUBLISHED["Mistral-7B"][0], "model_type": "gemma", "hidden_act": "gelu"}
    del gemma["sliding_window"]
    assert load_config(folder_of(gemma, "one")).model.activation == "gelu"
    two = {**gemma, "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}
    assert load_config(folder_of(two, "two")).model.activation == "gelu"


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        (
            {"rope_scaling": {"type": "yarn", **YARN}},  # as Qwen2.5's page has it
            {"rope_factor": 4.0, "rope_high_factor": 32.0, "rope_gain": 1 + 0.1 * math.log(4.0)},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {"rope_gain": 1.0, "rope_magnitude": 0.0},  # DeepSeek alone multiplies the scores as well
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}},
            {"rope_factor": 2.0, "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": 4096},
            {"rope_original_positions": 4096},
        ),
    ],
)
def test_rotary_positions_are_read_in_old_and_new_spellings(changes, read, folder_of):
    model = load_config(folder_of({**PUBLISHED["Qwen2.5-7B"][0], "rope_theta": 1e6, **changes})).model
    assert {key: getattr(model, key) for key in read} == read


def test_windows_are_read_as_transformers_reads_them(folder_of):
    mistral = load_config(folder_of(PUBLISHED["Mistral-7B"][0], "mistral"))
    assert (mistral.model.windows, mistral.batch.sequence_length) == ((4096,), 8192)
    qwen = PUBLISHED["Qwen2.5-7B"][0]
    assert load_config(folder_of(qwen, "off")).model.windows == (None,)
    on = {**qwen, "use_sliding_window": True, "sliding_window": 1024}
    assert load_config(folder_of(on, "last layers")).model.windows == (None,)  # max_window_layers are all
    assert load_config(folder_of({**on, "max_window_layers": 0}, "all")).model.windows == (1024,)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 10
    turns = load_config(folder_of({**on, "layer_types": kinds[:28]}, "turns")).model
    assert (turns.windows, turns.global_every) == ((1024, 1024, None), 3)


def test_layers_in_no_order_that_repeats_are_refused(folder_of):
    on = {**PUBLISHED["Qwen2.5-7B"][0], "use_sliding_window": True, "max_window_layers": 21}
    with pytest.raises(InputError, match="max_window_layers = 21"):
        load_config(folder_of(on))


def test_a_window_of_a_family_without_windows_is_refused(folder_of):
    with pytest.raises(InputError, match="sliding_window = 4096"):
        load_config(folder_of({**PUBLISHED["Llama-3.1-8B"][0], "sliding_window": 4096}))


def test_overrides_and_a_file_of_ones_own_change_it(folder_of):
    folder = folder_of(PUBLISHED["gpt2"][0])
    run = load_config(folder, {"batch.sequences": 64, "model.dropout": 0.1})
    assert (run.batch.sequences, run.model.dropout) == (64, 0.1)


def test_a_model_of_the_local_cache_is_found_by_its_id(monkeypatch, tmp_path):
    snapshot = tmp_path / "models--mistralai--Mistral-7B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(PUBLISHED["Mistral-7B"][0]))
    refs = tmp_path / "models--mistralai--Mistral-7B" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    run = load_config("mistralai/Mistral-7B")
    assert (run.name, run.model.num_parameters) == ("Mistral-7B", 7_241_732_096)
    with pytest.raises(InputError, match="no preset or folder is named 'mistralai/other'"):
        load_config("mistralai/other")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_names_what_there_is_and_stands_on_its_page(name):
    family, known = FAMILIES[name], set(TransformerModel.model_fields)
    switched = {ours for ours, *_ in family.switches.values()}
    assert {*family.keys, *family.fixed, *family.inverses, *switched} <= known
    assert family.activation in family.defaults
    assert {*family.by_head, *family.shaped} <= set(family.weights)
    assert family.windows in ("none", "all", "by layer")
    assert family.unturned in ("none", "global", "by layer")
    page = Path(__file__).parents[3] / "docs/how-to/huggingface.md"
    assert f"`{name}`" in page.read_text()


GEMMA3_27B = {  # all that the text part of the published file says
    **{"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62},
    **{"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
    **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
}


@pytest.mark.parametrize("stretching", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("preset", "left_out"),
    [
        ("gemma-3-27b-it", ()),
        (
            "gemma-3-4b-it",
            ("head_dim", "num_attention_heads", "num_key_value_heads", "query_pre_attn_scalar"),
        ),
    ],
)
def test_the_text_part_of_a_gemma_3_has_the_defaults_of_its_family(preset, left_out, stretching, folder_of):
    wanted = load_config(preset).model
    sizes = {"hidden_size": wanted.embed_dim, "intermediate_size": wanted.mlp_dim}
    sizes |= {"num_hidden_layers": wanted.num_layers}
    text = {key: value for key, value in {**GEMMA3_27B, **sizes}.items() if key not in left_out}
    if stretching == "rope_parameters":  # as later releases of transformers write it
        linear = text.pop("rope_scaling")
        text["rope_parameters"] = {
            "full_attention": linear,
            "sliding_attention": {"rope_type": "default"},
        }
        text |= {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "_sliding_window_pattern": 6}
    file = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    assert load_config(folder_of(file)).model == wanted
