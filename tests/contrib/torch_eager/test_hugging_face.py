"""Models of transformers, made from tiny configurations."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager.steps import counted  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}
TOKENS = 2 * 16


def ids():
    return torch.randint(64, (2, 16))


def test_llama_counts_as_by_hand():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))
    account = counted(model, input_ids=ids(), labels=ids(), optimizer=torch.optim.AdamW)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64  # query and output, key and value, MLP
    attention = 2 * 4 * 8 * (16 * 17 // 2)  # batch, heads, width of a head, pairs that causality allows
    forward = 2 * TOKENS * (2 * layer + 32 * 64) + 2 * 2 * 2 * attention
    assert account.forward == forward
    assert account.model == 3 * forward
    assert not account.unknown
    assert "The loss is the output's own `loss`" in account.assumptions
    assert account.rank.optimizer_state_bytes == 2 * 4 * account.num_parameters + 4 * len(
        list(model.parameters())
    )


def test_attention_is_causal_with_a_cache_and_without_one_unless_positions_are_given():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))
    by_cache = [counted(model, input_ids=ids(), labels=ids(), use_cache=use) for use in (True, False)]
    assert by_cache[0].rank.flops_by_phase == by_cache[1].rank.flops_by_phase
    assert by_cache[0].rank.peak_bytes == by_cache[1].rank.peak_bytes
    assert by_cache[1].assumptions[0].startswith("Each row is one sequence")
    positions = torch.arange(16).expand(2, -1)
    packed = counted(model, input_ids=ids(), labels=ids(), use_cache=False, position_ids=positions)
    pairs = 16 * 16 - 16 * 17 // 2
    assert packed.forward - by_cache[1].forward == 2 * 2 * 2 * 2 * 4 * 8 * pairs


@pytest.mark.parametrize(
    "make",
    [
        lambda: (transformers.BertModel(transformers.BertConfig(**SMALL)), {"input_ids": ids()}),
        lambda: (
            transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
            ),
            {"input_ids": ids(), "labels": ids()},
        ),
        lambda: (
            transformers.MambaForCausalLM(
                transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8)
            ),
            {"input_ids": ids(), "labels": ids()},
        ),
    ],
    ids=["bert", "gpt2", "mamba"],
)
def test_models_cost_what_pytorchs_own_counter_says_where_attention_is_in_parts(make):
    from torch.utils.flop_counter import FlopCounterMode

    model, inputs = make()
    model.train()
    model.config._attn_implementation = "eager"
    ours = counted(model, **inputs)
    with FlopCounterMode(display=False) as counter:
        output = model(**inputs)
        loss = output.loss if "labels" in inputs else sum(t.sum() for t in output.values())
        loss.backward()
    theirs = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    assert not ours.unknown
    products = [name for name in theirs if "convolution" not in name]
    assert {name: ours.by_operation[name] for name in products} == {name: theirs[name] for name in products}
    if type(model).__name__ == "MambaForCausalLM":
        # Two layers, two rows, 64 channels, four taps, 16 places and three that the model cuts off; PyTorch's
        # counter takes each channel's gradient for one of all channels.
        convolution = 2 * 2 * 2 * 64 * 4 * (16 + 3)
        assert ours.by_operation["aten.convolution"] == theirs["aten.convolution"] == convolution
        assert ours.by_operation["aten.convolution_backward"] == 2 * convolution
        assert theirs["aten.convolution_backward"] > 32 * 2 * convolution


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_whose_rows_are_grouped_cost_each_token_its_two(dtype):
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    model = transformers.MixtralForCausalLM(config).to(dtype)
    account = counted(model, input_ids=ids(), labels=ids())
    experts = account.modules["model/layers/*/mlp/experts"]
    assert experts.num_modules == 2
    assert experts.flops_by_phase["forward"] == 2 * (2 * TOKENS * 2 * 3 * 32 * 64)
    assert not account.unknown


def test_experts_that_look_where_tokens_go_are_told_with_their_line():
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    model.config._experts_implementation = "eager"
    with pytest.raises(InputError) as raised:
        counted(model, input_ids=ids())
    assert "model.layers.0.mlp.experts (MixtralExperts) at " in raised.value.message
    assert "modeling_mixtral.py:" in raised.value.message
    assert "aten.nonzero returns depends on the data" in raised.value.message
