"""Published models by their ids: as many parameters as `transformers` and the models' pages count."""

import re

import pytest

from meshwright.config import load_config, preset_about, preset_names
from meshwright.contrib.hub import published_config, published_id, published_ids
from meshwright.errors import InputError

# Parameters as the models' pages or reports state them, to the digits that they give.
STATED = {
    "Qwen/Qwen2.5-0.5B": "0.49B",
    "Qwen/Qwen2.5-1.5B": "1.54B",
    "Qwen/Qwen2.5-3B": "3.09B",
    "Qwen/Qwen2.5-72B": "72.7B",
    "Qwen/Qwen3-30B-A3B": "30.5B",
    "meta-llama/Llama-3.2-1B": "1.24B",
    "meta-llama/Llama-3.2-3B": "3.21B",
    "meta-llama/Llama-3.1-8B": "8.03B",
    "meta-llama/Llama-3.1-70B": "70.6B",
    "HuggingFaceTB/SmolLM2-135M": "0.135B",
    "mistralai/Mixtral-8x7B-v0.1": "46.7B",
    "google/gemma-2-2b": "2.61B",
    "google/gemma-2-9b": "9.24B",
    "google/gemma-2-27b": "27.2B",
    "google/gemma-3-1b-it": "1.00B",
    "openai/gpt-oss-20b": "20.9B",
    "openai/gpt-oss-120b": "117B",
    "deepseek-ai/DeepSeek-V2-Lite": "15.7B",
    "deepseek-ai/DeepSeek-V2": "236B",
    "deepseek-ai/DeepSeek-V3": "671B",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "49B",  # rounded down in its name
}
ACTIVE = {
    "deepseek-ai/DeepSeek-V3": "37.6B",
    "deepseek-ai/DeepSeek-V2": "21.4B",
    "Qwen/Qwen3-30B-A3B": "3.35B",
}


@pytest.mark.parametrize("name", published_ids())
def test_a_published_model_is_a_run_with_its_sources(name):
    run = load_config(name)
    assert run.name == name.rpartition("/")[2]
    assert load_config(run.name.lower()).model == run.model
    about = preset_about(name)
    assert about.startswith(f"https://huggingface.co/{name}\nValues read on 20")
    assert len(re.findall(r"^https://\S+$", about, re.M)) >= 2  # its page, and where they were read


def test_there_are_enough_of_them_and_none_hides_a_preset():
    assert len(published_ids()) >= 25
    assert not {name.lower().rpartition("/")[2] for name in published_ids()} & set(preset_names())
    assert published_id("mixtral-8x7b") is None  # that is the preset, with its recipe


@pytest.mark.parametrize("name", STATED)
def test_the_parameters_are_those_that_the_models_page_states(name):
    stated = STATED[name]
    digits = len(stated.rstrip("B").partition(".")[2])
    assert f"{load_config(name).model.num_parameters / 1e9:.{digits}f}B" == stated


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_the_parameters_that_are_stated_as_active(name):
    assert f"{load_config(name).model.num_active_parameters / 1e9:.3g}B" == ACTIVE[name]


@pytest.mark.parametrize("name", published_ids())
def test_transformers_counts_as_many_parameters(name):
    torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed")
    transformers = pytest.importorskip("transformers", reason="compared with transformers")
    values = published_config(name)
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert load_config(name).model.num_parameters == sum(
        each.numel() for each in model.parameters() if each.requires_grad
    )


def test_a_file_may_start_from_one(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "Qwen/Qwen2.5-7B"\nsteps = 10\n')
    run = load_config(str(file))
    assert (run.name, run.steps, run.model.num_parameters) == ("mine", 10, 7_615_616_512)


def test_an_unknown_id_names_near_ones():
    with pytest.raises(InputError, match=r"qwen2\.5-7b"):
        load_config("Qwen/Qwen2.5-8B")
