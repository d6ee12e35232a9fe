"""A Hugging Face model without a table of ours is weighed as the module that transformers makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import meshwright as mw  # noqa: E402
from meshwright.contrib.hub import FAMILIES, is_misspelling  # noqa: E402
from meshwright.contrib.torch import _transformers_module  # noqa: E402
from meshwright.contrib.torch._transformers_step import transformers_step  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from meshwright.extras import how_to_install  # noqa: E402
from meshwright.programs import Configured, program_named  # noqa: E402

CODEGEN = {"model_type": "codegen", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_inner": 128}
CODEGEN |= {"vocab_size": 96, "n_positions": 128, "n_ctx": 128, "architectures": ["CodeGenForCausalLM"]}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 128}


@pytest.fixture
def folder_of(tmp_path):
    def make(name: str, keys: dict) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(keys))
        return str(tmp_path / name)

    return make


@pytest.fixture
def made(monkeypatch):
    """Make the parts of a step in this process, whose memory is not limited."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(_transformers_module, "_limit_memory", lambda: None)

    def make(keys: dict, **how):
        import torch

        with torch.device("meta"):
            return _transformers_module.causal_model(json.dumps(keys), **how)

    return make


def test_an_unknown_family_is_weighed_as_the_module_of_transformers(folder_of):
    weighing = mw.weigh(folder_of("codegen", CODEGEN), on="4xH100", overrides=["batch.sequence_length=32"])
    assert weighing.warnings == (
        "Weighed as CodeGenForCausalLM of transformers, a PyTorch module: model_type 'codegen' is not known",
    )
    assert weighing.tokens_per_step == 4 * 32
    block = 64 * 3 * 64 + 64 * 64 + 64 * 128 + 128 + 128 * 64 + 64 + 2 * 64  # by hand
    embeddings = 96 * 64 + 96 * 64 + 96 + 2 * 64
    assert weighing.account.num_parameters == 2 * block + embeddings
    assert weighing.ledger.assumptions[0].startswith("Each device has one sequence of 32 tokens")
    (rank,) = weighing.account.ranks
    assert rank.optimizer_state_bytes > 2 * rank.parameters_bytes == 2 * 2 * (2 * block + embeddings) // 4


def test_a_known_family_is_that_module_if_it_is_asked_for(folder_of):
    folder = folder_of("llama", LLAMA | {"torch_dtype": "float32", "strange": 3})
    step = mw.torch_step(folder)
    weighing = mw.weigh(step, on="2xH100", layout="data=2", overrides={"batch.microbatch_sequences": 2})
    assert weighing.warnings == ()
    assert weighing.tokens_per_step == 2 * 2 * 128
    (rank,) = weighing.account.ranks
    assert (
        rank.parameters_bytes == 4 * weighing.account.num_parameters
    )  # in the format of the file, replicated


@pytest.mark.parametrize(
    ("keys", "is_ours"),
    [
        (LLAMA, True),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, False),
        (LLAMA | {"model_type": "codegen"}, False),
        (LLAMA | {"hidden_size": -1}, True),  # a wrong value, which our own reader names
    ],
)
def test_a_model_that_we_have_words_for_is_a_configuration(keys, is_ours, folder_of):
    folder = folder_of("model", keys)
    assert isinstance(program_named([folder]), Configured) == is_ours
    assert not isinstance(program_named([folder], {"as_": "torch"}), Configured)


@pytest.mark.parametrize(
    ("keys", "words", "hint"),
    [
        ({"model_type": "qwen99"}, "known neither here nor to transformers", "a later release"),
        ({"model_type": "lama"}, "known neither here", "did you mean 'llama'?"),
        (
            {"model_type": "x", "auto_map": {"AutoConfig": "a.B"}},
            "code (auto_map), which is not run",
            "trust",
        ),
        ({"model_type": "t5"}, "has no t5 model that predicts the next token", "let a function of yours"),
        (CODEGEN | {"n_layer": 10**6}, "config.json: n_layer = 1000000", "at most 1,000"),
        (CODEGEN | {"x": {"num_experts": 10**6}}, "x.num_experts = 1000000", "at most 10,000"),
        (CODEGEN | {"pattern": "M" * 10**5}, "config.json: pattern has 100,000 entries", "at most 10,000"),
        (CODEGEN | {"n_layer": "two"}, "cannot make a codegen model of it", "correct the file"),
        (CODEGEN | {"vocab_size": 10**30}, "cannot make a codegen model of it", "correct the file"),
        (CODEGEN | {"torch_dtype": "int4"}, "dtype = 'int4' is no format", "bfloat16"),
    ],
)
def test_what_transformers_cannot_make_is_refused_in_words(keys, words, hint, made):
    with pytest.raises(InputError) as refused:
        made(keys)
    assert words in refused.value.message
    assert len(refused.value.message) < 600
    assert hint in refused.value.hint


def test_a_module_that_takes_too_long_is_given_up(made, monkeypatch):
    monkeypatch.setattr(_transformers_module, "MOST_SECONDS", 0.2)
    keys = {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "local"], 10**9]]}
    with pytest.raises(InputError, match="had not made its module after 0 s of the processor"):
        made(keys)


def test_a_key_that_nobody_understands_is_refused_by_name(made):
    with pytest.raises(InputError, match="has no such keys: strange = 3") as refused:
        made(LLAMA | {"strange": 3}, unread="strange")
    assert "--as torch" in refused.value.hint
    scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert made(LLAMA | scaled, unread="rope_scaling")["module"].config.rope_parameters["factor"] == 2


def test_keys_that_say_how_a_model_is_run_have_no_effect(made):
    running = {"_attn_implementation": "somebody/kernels", "use_cache": True, "return_dict": False}
    running |= {"auto_map": {"AutoModelForCausalLM": "a.B"}, "quantization_config": {"quant_method": "gptq"}}
    config = made(LLAMA | running)["module"].config
    assert (config.use_cache, config.return_dict) == (False, True)
    assert config._attn_implementation == "sdpa"
    assert not hasattr(config, "auto_map")


def test_a_name_of_an_architecture_makes_an_unknown_type_known(made):
    module = made(LLAMA | {"model_type": "somebodys", "architectures": ["LlamaForCausalLM"]})["module"]
    assert type(module).__name__ == "LlamaForCausalLM"
    assert str(next(module.parameters()).dtype) == "torch.bfloat16"


def test_a_sequence_longer_than_learned_positions_is_refused(made):
    keys = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 1, "vocab_size": 96}
    keys |= {"num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 64}
    assert made(keys, sequence_length=64)
    with pytest.raises(
        InputError, match=r"a sequence of 128 tokens, and model.decoder.embed_positions has 66"
    ):
        made(keys, sequence_length=128)


def test_blocks_run_again_in_the_backward_pass_if_asked(made):
    blocks = made(LLAMA, remat="full")["module"].model.layers
    assert all(block.gradient_checkpointing for block in blocks)
    with pytest.raises(InputError, match="remat = 'dots'"):
        made(LLAMA, remat="dots")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_layers=3"], "takes no model.num_layers"),
        (["batch.sequence_length=0"], "batch.sequence_length = '0'"),
        (["batch.sequence_length=many"], "batch.sequence_length = 'many'"),
        (["batch.microbatch_sequences=9000000"], "9000000 sequences of 128 tokens"),
    ],
)
def test_settings_of_a_module_are_its_batch(overrides, words, folder_of):
    with pytest.raises(InputError) as refused:
        mw.weigh(folder_of("codegen", CODEGEN), on="4xH100", overrides=overrides)
    assert words in refused.value.message


def test_the_text_part_of_a_composite_model_is_taken(folder_of):
    keys = {"model_type": "somevision", "architectures": ["SomeForConditionalGeneration"]}
    step = transformers_step(folder_of("both", keys | {"text_config": CODEGEN, "dtype": "float16"}))
    assert step.is_text_part
    assert (step.keys["n_embd"], step.keys["dtype"]) == (64, "float16")
    with pytest.raises(InputError, match="its text_config has no model_type"):
        mw.torch_step(folder_of("untyped", keys | {"text_config": {"hidden_size": 64}}))


def test_a_model_without_a_next_token_head_is_refused(folder_of):
    keys = CODEGEN | {"architectures": ["CodeGenForTokenClassification"]}
    with pytest.raises(InputError, match="predicts the next token"):
        mw.weigh(folder_of("tags", keys), on="1xH100")


def test_a_large_file_is_refused(folder_of):
    with pytest.raises(InputError, match="more than 1,048,576 characters"):
        mw.torch_step(folder_of("long", CODEGEN | {"note": "x" * 2**20}))


def test_without_transformers_the_error_says_what_to_install(folder_of, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    with pytest.raises(
        InputError, match=r"'codegen' is not known; the module .* needs transformers"
    ) as refused:
        mw.weigh(folder_of("codegen", CODEGEN), on="1xH100")
    assert refused.value.hint == how_to_install("huggingface")


def test_no_name_of_another_family_is_taken_for_a_misspelling():
    others = set(transformers.CONFIG_MAPPING) - set(FAMILIES)
    assert not [(name, family) for name in others for family in FAMILIES if is_misspelling(name, family)]
    assert [family for family in FAMILIES if is_misspelling("Qwen-2", family)] == ["qwen2"]


def test_nothing_of_the_models_folder_is_imported(folder_of):
    folder = folder_of("codegen", CODEGEN | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    for name in ("modeling_x", "transformers", "torch"):
        (Path(folder) / f"{name}.py").write_text(f"open({str(Path(folder) / 'ran')!r}, 'w')\n")
    step = mw.torch_step(folder)
    mw.weigh(step, on="1xH100", overrides=["batch.sequence_length=8"])
    assert not (Path(folder) / "ran").exists()
    assert "modeling_x" not in sys.modules
