"""What a Hugging Face file leaves out, or leaves to its other sizes, is what `transformers` takes for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import TransformerModel, load_config
from meshwright.errors import InputError

GRANITE = {
    **{"model_type": "granitemoehybrid", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8},
    **{"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16},
}
SHARED = {
    **{"model_type": "granitemoeshared", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
}
ERNIE = {
    **{"model_type": "ernie4_5_moe", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_num_experts": 8},
    **{"moe_intermediate_size": 32, "moe_k": 2, "moe_layer_start_index": 1},
}


def model_of(folder: Path, tree: dict[str, Any]) -> TransformerModel:
    (folder / "config.json").write_text(json.dumps(tree))
    model = load_config(str(folder)).model
    assert isinstance(model, TransformerModel)
    return model


def test_a_granite_hybrid_without_a_list_of_layers_has_no_attention(tmp_path: Path):
    listed = model_of(tmp_path, {**GRANITE, "layer_types": ["mamba"] * 4})
    unlisted = model_of(tmp_path, GRANITE)
    assert {kind.mixer for kind in unlisted.kinds} == {"mamba"}
    assert unlisted.num_parameters == listed.num_parameters == 1_507_616  # by transformers 5.23


def test_an_interval_of_attention_is_refused_where_the_family_has_none(tmp_path: Path):
    with pytest.raises(InputError, match="full_attention_interval = 2"):
        model_of(tmp_path, {**GRANITE, "full_attention_interval": 2})


@pytest.mark.parametrize("beside", [{}, {"mamba_d_head": "auto"}])
def test_the_width_of_a_mamba_head_may_be_left_to_the_other_sizes(tmp_path: Path, beside: dict[str, Any]):
    rest = {key: value for key, value in GRANITE.items() if key != "mamba_d_head"}
    assert model_of(tmp_path, {**rest, **beside}).num_parameters == 1_507_616
    assert model_of(tmp_path, {**rest, **beside, "mamba_expand": 4}).num_parameters == 1_608_992


def test_a_shared_expert_of_width_zero_is_none(tmp_path: Path):
    given = {**SHARED, "shared_intermediate_size": 0}
    assert model_of(tmp_path, given).num_parameters == 657_984
    assert model_of(tmp_path, {**SHARED, "shared_intermediate_size": 32}).num_parameters == 682_560


def test_experts_may_end_beyond_the_last_layer(tmp_path: Path):
    ends = model_of(tmp_path, ERNIE).num_parameters
    assert model_of(tmp_path, {**ERNIE, "moe_layer_end_index": 27}).num_parameters == ends
    with pytest.raises(InputError, match="moe_layer_end_index = 2"):
        model_of(tmp_path, {**ERNIE, "moe_layer_end_index": 2})


@pytest.mark.parametrize("key", ["logits_scaling", "hidden_size", "mamba_expand", "mamba_n_heads"])
def test_a_null_that_has_no_meaning_is_named(tmp_path: Path, key: str):
    with pytest.raises(InputError, match=f"granitemoehybrid model has no {key}"):
        model_of(tmp_path, {**GRANITE, "mamba_d_head": "auto", key: None})
