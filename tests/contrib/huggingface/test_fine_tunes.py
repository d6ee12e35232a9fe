"""Small models of families with parts of their own learn on a CPU, and `transformers` loads the result."""

import json

import numpy as np
import pytest

from meshwright import Session, train
from meshwright.config import load_config
from meshwright.contrib.huggingface import export_huggingface
from meshwright.trainer.checkpoint import checkpoint_of

torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed for this Python")
transformers = pytest.importorskip(
    "transformers", reason="compared with transformers, which is not installed"
)
safetensors = pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.quick

PERIOD, STEPS = 16, 30
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT_OSS = {**SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}


def gpt_oss(folder):
    """Save a small model as openai/gpt-oss-* are: all in bf16 but the experts' matrices in MXFP4."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**GPT_OSS)).bfloat16()
    with torch.no_grad():
        model.lm_head.weight.mul_(16)  # adapters alone could not make a head of small weights sure of a token
    model.save_pretrained(folder)
    arrays = safetensors.load_file(folder / "model.safetensors")
    random = np.random.default_rng(0)
    for name in [name for name in arrays if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = arrays.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        arrays[f"{name}_blocks"] = random.integers(0, 256, (*groups, 16), np.uint8)
        arrays[f"{name}_scales"] = np.full(groups, 127 - 4, np.uint8)
    safetensors.save_file(arrays, folder / "model.safetensors")
    file = json.loads((folder / "config.json").read_text())
    file["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(file))


QWEN3_NEXT = {
    **{**SIZES, "head_dim": 16, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
}


def qwen3_next(folder):
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**QWEN3_NEXT)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        model.lm_head.weight.mul_(16)
    model.save_pretrained(folder)


BASES = {"gpt-oss": gpt_oss, "qwen3-next": qwen3_next}
OF_ATTENTION = '"q_proj","k_proj","v_proj","o_proj"'
TARGETS = {"gpt-oss": OF_ATTENTION, "qwen3-next": f'{OF_ATTENTION},"in_proj","out_proj"'}
WAYS = {
    "lora": ("lora.rank=16", "optimizer.learning_rate=0.05"),
    "full": ("state.parameters=bf16", "state.moments=bf16", "optimizer.learning_rate=0.02"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family",
    ["gpt-oss", pytest.param("qwen3-next", marks=pytest.mark.wide)],  # which compiles for a minute
)
def test_a_fine_tune_learns_and_transformers_loads_it(family, way, tmp_path):
    """The set is one sequence of tokens, again and again."""
    base, folder, out = (tmp_path / name for name in ("base", "run", "out"))
    BASES[family](base)
    period = np.random.default_rng(1).permutation(np.arange(3, 96, dtype=np.uint16))[:PERIOD]
    np.tile(period, 200).tofile(tmp_path / "set.bin")
    overrides = (
        *("precision=bf16", "batch.sequences=8", "batch.sequence_length=32", "remat=none"),
        *("data.source=tokens", f"data.path={tmp_path / 'set.bin'}", "data.dtype=uint16"),
        *WAYS[way],
        *([f"lora.targets=[{TARGETS[family]}]"] if way == "lora" else []),
    )
    session = Session(begin_from=base)
    run = train(str(base), on="1xCPU", steps=STEPS, folder=folder, overrides=overrides, session=session)
    losses = run.measurement.losses
    assert losses[STEPS] < 0.2 * losses[1]
    export_huggingface(checkpoint_of(folder), load_config(str(folder)), out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").float().eval()
    tokens = torch.tensor(np.tile(period, 2)[None].astype(np.int64))
    with torch.no_grad():
        logits = model(tokens).logits[0]
    found = torch.nn.functional.cross_entropy(logits[PERIOD - 1 : -1], tokens[0, PERIOD:]).item()
    assert found < 0.3 * losses[1], "what transformers loads predicts the set too"
