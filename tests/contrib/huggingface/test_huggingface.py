"""Models of `transformers` and ours agree: parameters, logits, loss and gradients, with weights both ways."""

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.contrib.hub import huggingface_of_model, run_of_huggingface
from meshwright.contrib.huggingface import (
    FirstWeights,
    from_huggingface,
    to_huggingface,
    weights_of,
    write_files,
)
from meshwright.errors import InputError
from meshwright.trainer.models.transformer import Transformer
from meshwright.trainer.step import build_step

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed for this Python")
transformers = pytest.importorskip(
    "transformers", reason="compared with transformers, which is not installed"
)
safetensors = pytest.importorskip("safetensors.numpy")

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
IN_TURN = {
    "num_hidden_layers": 5,
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
}
QWEN3_NEXT = {
    **{**GROUPED, "num_hidden_layers": 4, "head_dim": 16, "partial_rotary_factor": 0.5},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 6, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12},
}
QWEN3_5 = {
    **{**GROUPED, "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 6},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
QWEN3_5_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "shared_expert_intermediate_size": 12,
}
GRANITE4 = {
    **{**GROUPED, "num_hidden_layers": 4, "num_local_experts": 0, "shared_intermediate_size": 40},
    **{"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6},
    **{"mamba_n_groups": 2, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    **{"attention_multiplier": 0.2, "rope_parameters": None},
}
NEMOTRON = {
    **{**GROUPED, "head_dim": 16, "hybrid_override_pattern": "M-M*-M-M", "mamba_num_heads": 8},
    **{"mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "n_routed_experts": 4},
    **{"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 12, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
}
del NEMOTRON["num_hidden_layers"]
GEMMA = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9}
GEMMA2 = {**GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA3 = {**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
YARN_ALONE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
EACH_STRETCHED = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
}
IN_THREES = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
}
FAR_ALONE = {
    "rope_parameters": {
        "full_attention": {**YARN_ALONE, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
}
DEEPSEEK = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 16,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
KIMI = {
    **{key: value for key, value in DEEPSEEK.items() if key not in ("q_lora_rank", "n_routed_experts")},
    **{"linear_num_heads": 2, "linear_head_dim": 8, "num_local_experts": 8},
}
IN_LISTS = {
    **{"full_attn_layers": [2, 3], "kda_layers": [1, 4], "head_dim": 8, "num_heads": 2},
    "short_conv_kernel_size": 3,
}
ROUTED = {
    **{
        key: value for key, value in DEEPSEEK.items() if key in ("num_hidden_layers", "moe_intermediate_size")
    },
    **{key: value for key, value in DEEPSEEK.items() if "expert" in key or "scaling" in key},
    "use_qk_norm": True,
    "attention_bias": True,
}
DOTS = {key: value for key, value in ROUTED.items() if key not in ("use_qk_norm", "attention_bias")}
IN_GROUPS = {"n_group": 4, "topk_group": 2}
FAR_AND_NEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
EXPERTS = {"num_experts_per_tok": 2}
ERNIE = {
    **{"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "num_hidden_layers": 3},
    **{"moe_num_shared_experts": 2, "tie_word_embeddings": False},
}
MULTIPLIED = {
    **{"embedding_multiplier": 3, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    "logits_scaling": 6.0,
}
GRANITE = {**GROUPED, **MULTIPLIED}
HUNYUAN = {
    **{**GROUPED, **IDS, "head_dim": 16},
    "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 500.0},
}
IN_FOURS = {"num_hidden_layers": 6, "sliding_window": 9}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA4 = {
    **GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
BESIDE = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT_OSS = {
    **GROUPED,
    **IDS,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "sliding_window": 7,
    "swiglu_limit": 0.5,
}
UNROUNDED = {**YARN_ALONE, "truncate": False}
CASES = {
    "llama": ("LlamaConfig", GROUPED),
    "llama, heads of their own size": ("LlamaConfig", {**GROUPED, "head_dim": 16}),
    "llama 3.1": ("LlamaConfig", {**GROUPED, "rope_parameters": STRETCHED, "tie_word_embeddings": True}),
    "llama, yarn": ("LlamaConfig", {**GROUPED, "rope_parameters": {**YARN, "mscale": 1.0}}),
    "mistral": ("MistralConfig", {**GROUPED, "head_dim": 16, "sliding_window": 64}),
    "mistral, a window shorter than the sequence": ("MistralConfig", {**GROUPED, "sliding_window": 7}),
    "mixtral": ("MixtralConfig", {**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen2, yarn": ("Qwen2Config", {**GROUPED, "rope_parameters": YARN_ALONE}),
    "qwen2, windows in turn": ("Qwen2Config", {**GROUPED, **IN_TURN}),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "qwen3 with experts": (
        "Qwen3MoeConfig",
        {**GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "olmo2": ("Olmo2Config", GROUPED),
    "gemma": ("GemmaConfig", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2Config", GEMMA2),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "gemma3, stretched": ("Gemma3TextConfig", {**GEMMA3, "rope_parameters": FAR_AND_NEAR}),
    "qwen3-next": ("Qwen3NextConfig", QWEN3_NEXT),
    "qwen3-next, some layers without experts": (
        "Qwen3NextConfig",
        {**QWEN3_NEXT, "mlp_only_layers": [0], "layer_types": ["full_attention", *["linear_attention"] * 3]},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", QWEN3_5),
    "qwen3.5 with experts": ("Qwen3_5MoeTextConfig", {**QWEN3_5, **QWEN3_5_EXPERTS}),
    "granite 4, hybrid": ("GraniteMoeHybridConfig", GRANITE4),
    "granite 4, experts": (
        "GraniteMoeHybridConfig",
        {**GRANITE4, "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "nemotron-h": ("NemotronHConfig", NEMOTRON),
    "nemotron-h, experts": (
        "NemotronHConfig",
        {**NEMOTRON, "hybrid_override_pattern": "MEMEM*E", "n_group": 1},
    ),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4 with experts": ("Gemma4TextConfig", {**GEMMA4, **BESIDE, "num_hidden_layers": 2}),
    "gemma4 12B": ("Gemma4UnifiedTextConfig", GEMMA4),
    "gemma4, keys and values apart": (
        "Gemma4TextConfig",
        {**GEMMA4, "attention_k_eq_v": False, "num_hidden_layers": 6, "layer_types": None},
    ),
    "deepseek-v2": ("DeepseekV2Config", {**DEEPSEEK, "topk_method": "group_limited_greedy", **IN_GROUPS}),
    "deepseek-v2, lite": ("DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek-v3": ("DeepseekV3Config", {**DEEPSEEK, **IN_GROUPS, "rope_parameters": YARN}),
    "deepseek-v3, yarn": ("DeepseekV3Config", {**DEEPSEEK, **IN_GROUPS, "rope_parameters": YARN_ALONE}),
    "kimi-linear": (
        "KimiLinearConfig",
        {**KIMI, **IDS, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    ),
    "kimi-linear, as published": (
        "KimiLinearConfig",
        {
            **{**KIMI, **IDS, **IN_GROUPS, "num_hidden_layers": 4, "first_k_dense_replace": 2},
            **{"linear_attn_config": IN_LISTS, "q_lora_rank": 8, "norm_topk_prob": False},
        },
    ),
    "qwen3 with experts, scores as they are": (
        "Qwen3MoeConfig",
        {**GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "olmoe": ("OlmoeConfig", {**GROUPED, **IDS, **EXPERTS, "num_experts": 4}),
    "olmo3": ("Olmo3Config", {**GROUPED, **IDS, "num_hidden_layers": 4, "sliding_window": 9, **FAR_ALONE}),
    "ministral": ("MinistralConfig", {**GROUPED, "head_dim": 16, "num_hidden_layers": 4, **IN_THREES}),
    "seed-oss": ("SeedOssConfig", {**GROUPED, **IDS, "head_dim": 16}),
    "ernie": ("Ernie4_5Config", {**GROUPED, **IDS, "head_dim": 16}),
    "glm": ("GlmConfig", {**GROUPED, **IDS, "head_dim": 16}),
    "glm4": ("Glm4Config", {**GROUPED, **IDS, "head_dim": 16}),
    "glm4 with experts": ("Glm4MoeConfig", {**GROUPED, **IDS, "head_dim": 16, **ROUTED, **IN_GROUPS}),
    "starcoder2": ("Starcoder2Config", {**GROUPED, **IDS, "sliding_window": 9}),
    "phi3": ("Phi3Config", {**GROUPED, **IDS}),
    "phi3, long sequences": (
        "Phi3Config",
        {**GROUPED, **IDS, "original_max_position_embeddings": 16, "rope_parameters": EACH_STRETCHED},
    ),
    "phi3, short sequences": (
        "Phi3Config",
        {**GROUPED, **IDS, "original_max_position_embeddings": 48, "rope_parameters": EACH_STRETCHED},
    ),
    "gpt-neox": ("GPTNeoXConfig", SIZES),
    "gpt-neox, serial": ("GPTNeoXConfig", {**SIZES, "use_parallel_residual": False, "rotary_pct": 1.0}),
    "ernie with experts": ("Ernie4_5_MoeConfig", {**GROUPED, **IDS, **ERNIE}),
    "ministral3": ("Ministral3Config", {**GROUPED, **IDS, "head_dim": 16, "rope_parameters": GROWING}),
    "smollm3": ("SmolLM3Config", {**GROUPED, **IDS, "num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "apertus": ("ApertusConfig", {**GROUPED, **IDS, "rope_parameters": STRETCHED}),
    "granite": ("GraniteConfig", GRANITE),
    "granite with experts": ("GraniteMoeConfig", {**GRANITE, **EXPERTS, "num_local_experts": 4}),
    "granite with shared experts": (
        "GraniteMoeSharedConfig",
        {**GRANITE, **EXPERTS, "num_local_experts": 4, "shared_intermediate_size": 40},
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {**GROUPED, **IDS, **EXPERTS, "head_dim": 16, "num_local_experts": 4, "rotary_dim": 8},
    ),
    "hunyuan": ("HunYuanDenseV1Config", HUNYUAN),
    "hunyuan with experts": ("HunYuanMoEV1Config", {**HUNYUAN, "num_experts": 4, "moe_topk": [2, 2]}),
    "exaone4": ("Exaone4Config", {**GROUPED, **IDS, **IN_FOURS}),
    "exaone4, without windows": (
        "Exaone4Config",
        {**GROUPED, **IDS, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "cohere": ("CohereConfig", {**GROUPED, **IDS}),
    "cohere2": ("Cohere2Config", {**GROUPED, **IDS, **IN_FOURS, "logit_scale": 0.25}),
    "arcee": ("ArceeConfig", {**GROUPED, **IDS}),
    "nemotron": ("NemotronConfig", {**GROUPED, **IDS}),
    "stablelm": ("StableLmConfig", {**GROUPED, **IDS, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm, parallel": ("StableLmConfig", {**GROUPED, **IDS, "use_parallel_residual": True}),
    "qwen2 with experts": (
        "Qwen2MoeConfig",
        {
            **{**GROUPED, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
            "shared_expert_intermediate_size": 40,
        },
    ),
    "dots1": ("Dots1Config", {**GROUPED, **DOTS, **IN_GROUPS}),
    "glm4 lite": ("Glm4MoeLiteConfig", {**DEEPSEEK, **IDS}),
    "gpt-oss": ("GptOssConfig", {**GPT_OSS, "rope_parameters": UNROUNDED}),
    "gpt-oss, an odd number of layers": ("GptOssConfig", {**GPT_OSS, "num_hidden_layers": 3}),
    "gpt2": ("GPT2Config", {**GPT2, **IDS}),
    "gpt2, a head of its own": ("GPT2Config", {**GPT2, **IDS, "tie_word_embeddings": False}),
}


# Another family's case has what is particular to each of these: their weights' names aside.
WIDE = {
    *("llama, heads of their own size", "mistral", "qwen2, windows in turn", "qwen3 with experts", "gemma"),
    *("olmoe", "olmo3", "ernie", "glm4 with experts", "phi3", "gpt-neox, serial"),
    *("llama, yarn", "deepseek-v3, yarn", "phi3, short sequences", "gpt2, a head of its own"),
    *(
        "gemma4 12B",
        "gemma4, keys and values apart",
        "gpt-oss, an odd number of layers",
        "ministral",
        "seed-oss",
        "glm",
        "gemma3",
        "deepseek-v2, lite",
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.wide] if name in WIDE else []) for name in CASES],
    ids=list(CASES),
)
def theirs(request, tmp_path_factory):
    """A small model of `transformers` with random weights, saved as it saves itself."""
    kind, sizes = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + float(parameter.ndim == 1))
            # States forget slowly and queries are like keys, as trained ones; or norms magnify rounding.
            if name.endswith("A_log"):
                parameter.sub_(3)
            elif "conv1d" in name:
                parameter.mul_(5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zero at first, and no gradient changes it
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            if name.endswith("layer_scalar"):  # one at first
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    folder = tmp_path_factory.mktemp("huggingface")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def ours(theirs):
    """Our model of the same folder, its parameters by path, and how they lie in the file."""
    _, folder = theirs
    run = load_config(str(folder))
    model = Transformer(run.model)
    declared, _ = jax.tree_util.tree_flatten_with_path(
        model.parameters(), is_leaf=lambda leaf: hasattr(leaf, "fan_in")
    )
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in declared}
    family = json.loads((folder / "config.json").read_text())["model_type"]
    weights = weights_of(run.model, family)
    arrays = arrays_of(folder)
    return model, weights, shapes, dict(from_huggingface(weights, shapes, arrays.__getitem__))


def arrays_of(folder):
    """The arrays of a file by the names of published ones, of which transformers does not write all."""
    arrays = safetensors.load_file(folder / "model.safetensors")
    layers = {
        name.rpartition(".up_proj")[0] for name in arrays if name.endswith("block_sparse_moe.up_proj.weight")
    }

    def published(name):
        return name.replace("block_sparse_moe", "mlp") if name.rsplit(".", 2)[0] in layers else name

    return {published(name): array for name, array in arrays.items()}


def tree_of(by_path):
    tree = {}
    for path, array in by_path.items():
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = jnp.asarray(array)
    return tree


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(3, VOCABULARY, (2, 33))  # PyTorch gives padding no gradient


def test_parameters_are_as_many_as_transformers_counts(theirs, ours):
    model, *_ = ours
    trained = [each for each in theirs[0].parameters() if each.requires_grad]
    assert model.config.num_parameters == sum(each.numel() for each in trained)


def test_every_array_of_the_file_is_read_and_written_as_it_was(theirs, ours):
    _, weights, shapes, parameters = ours
    arrays = arrays_of(theirs[1])
    written = dict(to_huggingface(weights, parameters))
    assert set(parameters) == set(shapes)
    assert {path: array.shape for path, array in parameters.items()} == shapes
    tied = {"lm_head.weight"} if ours[0].config.tied_embeddings else set()
    assert set(written) == set(arrays) - tied
    for name, array in written.items():
        np.testing.assert_allclose(array, arrays[name], rtol=0, atol=1e-6, err_msg=name)


def test_logits_loss_and_gradients_agree(theirs, ours, tokens, context):
    model, weights, shapes, parameters = ours
    theirs_model = theirs[0]
    theirs_model.zero_grad()
    given = torch.tensor(tokens)
    logits = theirs_model(given).logits
    before_last = logits[:, :-1].reshape(-1, VOCABULARY)
    expected = torch.nn.functional.cross_entropy(before_last, given[:, 1:].reshape(-1))
    expected.backward()
    batch = {"tokens": jnp.asarray(tokens, jnp.int32)}

    def loss(tree):
        hidden, _ = model.hidden(tree, batch["tokens"], context())
        return model.loss(tree, {}, batch, context())[0], model.logits(tree, hidden, context())

    with jax.default_matmul_precision("highest"):
        (found, our_logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(tree_of(parameters))
    their_logits = logits.detach().numpy()
    assert np.abs(np.asarray(our_logits) - their_logits).max() < 1e-4 * max(1.0, np.abs(their_logits).max())
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    flat = {
        tuple(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(gradients)[0]
    }
    named = theirs_model.named_parameters()
    theirs_flat = {name: each.grad for name, each in named if each.requires_grad}
    total = np.sqrt(sum(float((leaf**2).sum()) for leaf in flat.values()))
    theirs_total = np.sqrt(sum(float((grad**2).sum()) for grad in theirs_flat.values()))
    assert total == pytest.approx(theirs_total, rel=1e-4)
    assert set(flat) == set(shapes)
    for weight in weights:
        if weight.ours[0][0] not in ("embedding", "final_norm"):
            continue
        name = weight.name.replace("backbone.", "model.")  # Nemotron-H's files have another word
        wanted = theirs_flat[name].numpy()
        atol = 1e-5 * max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(flat[weight.ours[0]], wanted, rtol=1e-3, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    "layout", [{}, {"fsdp": 2, "tensor": 2}, {"stage": 2, "fsdp": 2}, {"data": 2, "unroll": True}]
)
def test_each_device_of_a_run_begins_with_its_part_of_the_weights(theirs, ours, mesh, layout):
    axes = {axis: size for axis, size in layout.items() if axis != "unroll"}
    groups = ours[0].config.sizes.split_dims["layers"].values()
    if any(size % layout.get("stage", 1) for size in groups):
        pytest.skip("stages cannot share these layers, which check_layout refuses")
    run = load_config(str(theirs[1]), {"model.unroll": "unroll" in layout, "batch.sequences": 4})
    abstract = build_step(run, mesh(**axes)).state["parameters"]
    begun = FirstWeights(theirs[1], run).parameters(abstract)
    parameters, rows = ours[3], collections.Counter()
    for path, leaf in jax.tree_util.tree_flatten_with_path(begun)[0]:
        keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        layer = keys.pop(1) if isinstance(keys[1:2] and keys[1], int) else None
        expected = parameters[tuple(keys)]
        if layer is not None:  # in the stack of the layers that have such a part
            row, rows[tuple(keys)] = rows[tuple(keys)], rows[tuple(keys)] + 1
            expected = expected[row]
        np.testing.assert_array_equal(np.asarray(leaf), expected.astype(np.float32))
    shardings = jax.tree.map(lambda a, b: a.sharding == b.sharding, begun, abstract)
    assert jax.tree.all(shardings)


def test_quantised_weights_are_refused(theirs, tmp_path):
    file = json.loads((theirs[1] / "config.json").read_text())
    file["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(file))
    with pytest.raises(InputError, match=r"are quantised \(fp8\)"):
        FirstWeights(tmp_path, load_config(str(theirs[1])))


def test_the_file_that_describes_a_model_describes_the_same_one(theirs, ours):
    model = ours[0].config
    made = huggingface_of_model(model, 64)
    again = type(model).model_validate(run_of_huggingface(made, "config.json")["model"])
    assert again == model


def test_what_is_exported_is_what_transformers_loads(theirs, ours, tokens, tmp_path):
    model, _, _, parameters = ours
    made = huggingface_of_model(model.config, 64)  # of Phi-3 Llama's: the same model, with products apart
    weights = weights_of(model.config, made["model_type"])
    write_files(tmp_path, to_huggingface(weights, parameters), shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    (tmp_path / "config.json").write_text(json.dumps(made))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    given = torch.tensor(tokens)
    with torch.no_grad():
        ours, wanted = loaded(given).logits, theirs[0](given).logits
    assert float((ours - wanted).abs().max()) < 1e-4 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_run_begins_with_the_text_part_of_a_model_that_sees(prefix, tmp_path, mesh):
    """Both prefixes are those of releases of transformers, which writes one of them here."""
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config={**GEMMA3, "model_type": "gemma3_text"},
        vision_config={**vision, "model_type": "siglip_vision_model"},
        **{"mm_tokens_per_image": 1, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    arrays = safetensors.load_file(tmp_path / "model.safetensors")
    written = next(name for name in arrays if name.endswith("embed_tokens.weight"))
    before = written.removesuffix("embed_tokens.weight")
    renamed = {name.replace(before, prefix): array for name, array in arrays.items()}
    safetensors.save_file(renamed, tmp_path / "model.safetensors")
    run = load_config(str(tmp_path), {"batch.sequences": 4})
    begun = FirstWeights(tmp_path, run).parameters(build_step(run, mesh()).state["parameters"])
    text = model.model.language_model
    np.testing.assert_array_equal(begun["embedding"], text.embed_tokens.weight.detach().numpy())
    down = text.layers[2].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(begun["layers"]["mlp"]["down"][2]), down.T)


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path, mesh):
    """Scales from the least to the largest that bf16 holds, and every code."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    config = transformers.GptOssConfig(**{**GPT_OSS, "intermediate_size": 64, "num_hidden_layers": 2})
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path)
    arrays = safetensors.load_file(tmp_path / "model.safetensors")
    random, packed = np.random.default_rng(0), {}
    for name in [name for name in arrays if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = arrays.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        packed[f"{name}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
        packed[f"{name}_scales"] = random.integers(1, 250, shape, np.uint8)
    safetensors.save_file({**arrays, **packed}, tmp_path / "model.safetensors")
    file = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**file, "quantization_config": {"quant_method": "mxfp4"}})
    )
    run = load_config(str(tmp_path), {"batch.sequences": 4})
    abstract = build_step(run, mesh(fsdp=2)).state["parameters"]
    begun = FirstWeights(tmp_path, run).parameters(abstract)
    for layer in range(2):
        kept = f"model.layers.{layer}.mlp.experts"
        both, down = (
            convert_moe_packed_tensors(
                *(torch.tensor(packed[f"{kept}.{name}_proj{part}"]) for part in ("_blocks", "_scales"))
            )
            .float()
            .numpy()
            for name in ("gate_up", "down")
        )
        ours = {name: np.asarray(leaf[layer]) for name, leaf in begun["layers"]["experts"].items()}
        np.testing.assert_array_equal(ours["gate"], both[..., ::2])
        np.testing.assert_array_equal(ours["up"], both[..., 1::2])
        np.testing.assert_array_equal(ours["down"], down)


def test_parts_of_mxfp4_that_do_not_belong_to_each_other_are_refused(tmp_path, mesh):
    config = transformers.GptOssConfig(**{**GPT_OSS, "intermediate_size": 64, "num_hidden_layers": 1})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    arrays = safetensors.load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    del arrays[name]
    arrays |= {f"{name}_blocks": np.zeros((4, 32, 2, 16), np.uint8)}
    arrays |= {f"{name}_scales": np.zeros((4, 32, 4), np.uint8)}
    safetensors.save_file(arrays, tmp_path / "model.safetensors")
    run = load_config(str(tmp_path))
    abstract = build_step(run, mesh()).state["parameters"]
    with pytest.raises(InputError, match=r"down_proj_scales \(4, 32, 4\)"):
        FirstWeights(tmp_path, run).parameters(abstract)
