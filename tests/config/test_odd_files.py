"""Files as the Hub has them: odd values are read as transformers reads them, or refused by their names."""

import json

import pytest

from meshwright.config import load_config, text_reading
from meshwright.errors import InputError

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 256},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
SECTIONS = {"mrope_section": [2, 3, 3]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.fixture
def folder_of(tmp_path):
    def write(tree):
        (tmp_path / "config.json").write_text(json.dumps(tree))
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("tree", "plain"),
    [
        ({**LLAMA, "_attn_implementation_autoset": True, "_experts_implementation": "eager"}, LLAMA),
        ({**LLAMA, "pruned_heads": {}, "_commit_hash": None, "dtype": "bfloat16"}, LLAMA),
        ({**LLAMA, "torch_dtype": None, "rope_scaling": None, "tie_word_embeddings": None}, LLAMA),
        ({**QWEN2, "rope_scaling": {"type": "mrope", **SECTIONS}}, QWEN2),
        ({**QWEN2, "rope_scaling": {"rope_type": "default", "type": "default", **SECTIONS}}, QWEN2),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, LLAMA),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", **YARN, "finetuned": True}},
            {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
        ),
    ],
)
def test_what_changes_no_model_is_passed_over(tree, plain, folder_of):
    assert load_config(folder_of(tree)).model == load_config(folder_of(plain)).model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "linear", "factor": "2.0"}}, r'rope_scaling\.factor = "2\.0" is text'),
        ({"rope_scaling": [1, 2]}, r"rope_scaling = \[1, 2\] is no table"),
        ({"rope_parameters": "default"}, 'rope_parameters = "default" is no table'),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"hidden_size": 66}, "hidden_size = 66 is no multiple of num_attention_heads = 4, and there is no"),
        ({"pruned_heads": {"0": [1]}}, r'not understood, .*pruned_heads = {"0": \[1\]}'),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, 'rope_scaling = {"rope_type": "ntk", "factor"'),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_key_of_the_file(changes, words, folder_of):
    with pytest.raises(InputError, match=words):
        load_config(folder_of({**LLAMA, **changes}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantization_config is of the weights",
        ),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "quantization_config is of the"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization is of the weights in the file"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic stretching of positions begins"),
    ],
)
def test_what_is_left_out_is_said(changes, words, folder_of):
    folder = folder_of({**LLAMA, **changes})
    assert load_config(folder).model == load_config(folder_of(LLAMA)).model
    assert words in text_reading(folder_of({**LLAMA, **changes}))
    assert text_reading(folder_of(LLAMA)) == ""


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            {"model_type": "qwen2_5_vl", "text_config": {**QWEN2, "model_type": "qwen2_5_vl_text"}},
            QWEN2,
        ),
        ({**QWEN2, "model_type": "qwen2_vl", "image_token_id": 9, "vision_start_token_id": 8}, QWEN2),
        ({"model_type": "qwen3_vl", "text_config": {**QWEN3, "model_type": "qwen3_vl_text"}}, QWEN3),
    ],
)
def test_the_text_of_a_model_that_reads_images_is_that_of_its_family(tree, text, folder_of):
    """Its class does not predict tokens alone, and its file of 2024 has one table."""
    names = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {"depth": 2}}
    if "text_config" in tree:
        tree["text_config"]["architectures"] = names["architectures"]
    folder = folder_of({**tree, **names})
    assert "reads more than text" in text_reading(folder)
    assert load_config(folder).name.endswith("-text")
    assert load_config(folder).model == load_config(folder_of(text)).model


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("qwen2_vl", "qwen2"),
        ("qwen2_5_vl", "qwen2"),
        ("qwen3_vl", "qwen3"),
        ("qwen3_vl_moe", "qwen3_moe"),
    ],
)
def test_transformers_runs_such_text_as_it_runs_the_family(kind, family):
    torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed")
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    sizes = {key: value for key, value in QWEN3.items() if key not in ("model_type", "architectures")}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "rope_theta": 5e5}
    sizes |= {"num_experts_per_tok": 2, "attn_implementation": "eager"}
    rope = {"rope_type": "default", "rope_theta": 5e5, **SECTIONS}
    configs = [
        transformers.CONFIG_MAPPING[name](**sizes, rope_parameters=rope) for name in (f"{kind}_text", family)
    ]
    name = type(configs[0]).__name__.replace("TextConfig", "TextModel")
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=[name])
    text, plain = getattr(module, name)(configs[0]), transformers.AutoModel.from_config(configs[1])
    plain.load_state_dict(text.state_dict())
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        found, expected = (each(tokens, use_cache=False).last_hidden_state for each in (text, plain))
    torch.testing.assert_close(found, expected)
