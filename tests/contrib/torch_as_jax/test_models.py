"""Models of transformers as JAX programs: loss and gradients are those of PyTorch."""

from __future__ import annotations

import jax
import pytest

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HIDDEN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
WORDS = {**HIDDEN, "vocab_size": 64}
SHARED = {**WORDS, "num_key_value_heads": 2}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {**HIDDEN, **NO_DROPOUT, "image_size": 32, "patch_size": 8, "num_labels": 10}
CONVNEXT = {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 1], "image_size": 32, "num_labels": 10}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 1, 1, 1], "num_labels": 10}

MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SHARED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SHARED),
    "mistral, a window": ("MistralForCausalLM", "MistralConfig", {**SHARED, "sliding_window": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**SHARED, "head_dim": 8, "sliding_window": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", {**WORDS, **NO_DROPOUT}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SHARED, "num_local_experts": 4}),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", RESNET),
}
FIRST = ("llama", "vit")
IMAGES = ("vit", "convnext", "resnet")


def inputs_of(name: str) -> dict:
    if name in IMAGES:
        return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([1, 2, 3, 4])}
    ids = torch.randint(64, (2, 16))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.wide) for name in MODELS]
)
def test_a_model_has_the_loss_and_gradients_of_pytorch(name: str, compared):
    torch.manual_seed(0)
    kind, config, settings = MODELS[name]
    module = getattr(transformers, kind)(getattr(transformers, config)(**settings)).train()
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = False
    if name != "resnet":
        of_loss, of_gradients = compared(module, **inputs_of(name))
        assert of_loss < 1e-5
        assert of_gradients < 1e-5
        return
    # Statistics over 16 pixels of 4 images: the gradients are ill-conditioned in float32.
    images = {name: x.double() if x.is_floating_point() else x for name, x in inputs_of(name).items()}
    with jax.enable_x64(True):
        of_loss, of_gradients = compared(module.double(), **images)
    assert of_loss < 1e-12
    assert of_gradients < 1e-10
