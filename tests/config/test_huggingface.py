"""A Hugging Face `config.json` is a run, or is refused by the names of the keys that are not understood."""

import json

import pytest

from meshwright.config import load_config
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
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, words, folder_of):
    tree, _ = PUBLISHED["Llama-3.1-8B"]
    with pytest.raises(InputError, match=words):
        load_config(folder_of({**tree, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": "8k"},
        {"max_position_embeddings": [8192]},
        {"rope_theta": "high"},
        {"rope_scaling": 8},
        {"hidden_act": ["silu"]},
    ],
)
def test_a_value_of_another_kind_is_refused(changes, folder_of):
    with pytest.raises(InputError, match="a value is not of the kind that its key has"):
        load_config(folder_of({**PUBLISHED["Llama-3.1-8B"][0], **changes}))


def test_more_layers_than_there_can_be_are_refused_at_once(folder_of):
    with pytest.raises(InputError, match="num_layers"):
        load_config(folder_of({**PUBLISHED["Mistral-7B"][0], "num_hidden_layers": 10**30}))


def test_a_model_with_latents_that_lacks_a_size_is_refused(folder_of):
    with pytest.raises(InputError, match="a deepseek_v2 model has no qk_rope_head_dim"):
        load_config(folder_of({"model_type": "deepseek_v2", "qk_rope_head_dim": None}))


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
