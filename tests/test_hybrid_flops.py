"""Model FLOPs of hybrids at published sizes are those of a count by hand, from the papers' formulas.

Traced, not compiled. For a token, forward: 2 for each weight that multiplies it; 6 K V for each head's state
of width K x V with the delta rule (https://arxiv.org/abs/2412.06464), and 4 N P for one of Mamba-2
(https://arxiv.org/abs/2405.21060); attention on half of the pairs. Backward twice as many.
"""

import json

import pytest

from meshwright.config import load_config
from meshwright.contrib.hub import published_config
from meshwright.trainer.step import build_step
from meshwright.worker import count_traced

S = 4096  # tokens of the sequence

QWEN3_NEXT = {  # Qwen/Qwen3-Next-80B-A3B
    **{"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936},
    **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512, "full_attention_interval": 4, "rope_theta": 1e7},
}
NEMOTRON = {  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B
    **{"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "vocab_size": 131072},
    **{"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64},
    **{"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 128},
    **{"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}
GRANITE = {  # the widths of a Granite 4 of 32B parameters
    **{"model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "vocab_size": 100352},
    **{"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128},
    **{"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "num_local_experts": 72},
    **{"num_experts_per_tok": 10, "shared_intermediate_size": 1536, "tie_word_embeddings": True},
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
}


def qwen3_next():
    """36 gated delta nets and 12 layers of attention whose queries come with gates; experts in each."""
    e, heads, keys, d = 2048, 32 * 128, 16 * 128, 128
    delta = e * (2 * keys + heads) + e * heads + e * 2 * 32 + heads * e  # q k v, z, b and a, output
    attention = e * (2 * 16 + 2 * 2) * 256 + 16 * 256 * e
    experts = e * 512 + (10 + 1) * 3 * e * 512 + e  # router; chosen and shared; the shared one's gate
    matrices = 36 * delta + 12 * attention + 48 * experts + 151936 * e
    return 2 * matrices + 36 * 6 * 32 * d * d + 12 * 4 * (S / 2) * 16 * 256


def kimi_linear():
    """20 layers of KDA and 7 of attention from latents; one dense layer, 26 with experts."""
    e, inner, d = 2304, 32 * 128, 128
    latents = 2 * (e * d + d * inner)  # decays and gates
    delta = 3 * e * inner + latents + e * 32 + inner * e
    attention = e * 32 * 192 + e * (512 + 64) + 512 * 32 * (128 + 128) + 32 * 128 * e
    experts = e * 256 + (8 + 1) * 3 * e * 1024
    matrices = 20 * delta + 7 * attention + 3 * e * 9216 + 26 * experts + 163840 * e
    return 2 * matrices + 20 * 6 * 32 * d * d + 7 * 2 * (S / 2) * 32 * (192 + 128)


def nemotron():
    """Layers of one part each: Mamba-2, experts of two matrices, attention without positions."""
    e, inner, shared = 2688, 64 * 64, 8 * 128
    listed = NEMOTRON["hybrid_override_pattern"]
    mamba = e * (2 * inner + 2 * shared + 64) + inner * e
    attention = e * (32 + 2 * 2) * 128 + 32 * 128 * e
    experts = e * 128 + 2 * e * (6 * 1856 + 3712)
    matrices = listed.count("M") * mamba + listed.count("*") * attention + listed.count("E") * experts
    states = listed.count("M") * 4 * 64 * 128 * 64
    return 2 * (matrices + 131072 * e) + states + listed.count("*") * 4 * (S / 2) * 32 * 128


def granite():
    """36 layers of Mamba-2 and 4 of attention, with experts and a shared MLP in each."""
    e, inner, shared = 4096, 128 * 64, 128
    mamba = e * (2 * inner + 2 * shared + 128) + inner * e
    attention = e * (32 + 2 * 8) * 128 + 32 * 128 * e
    experts = e * 72 + 3 * e * (10 * 768 + 1536)
    matrices = 36 * mamba + 4 * attention + 40 * experts + 100352 * e
    return 2 * matrices + 36 * 4 * 128 * 128 * 64 + 4 * 4 * (S / 2) * 32 * 128


@pytest.mark.parametrize(
    ("file", "by_hand"),
    [
        pytest.param(QWEN3_NEXT, qwen3_next, id="qwen3-next", marks=pytest.mark.wide),
        pytest.param(
            published_config("moonshotai/Kimi-Linear-48B-A3B-Instruct"),
            kimi_linear,
            id="kimi-linear",
            marks=pytest.mark.wide,
        ),
        pytest.param(NEMOTRON, nemotron, id="nemotron-3-nano"),
        pytest.param(GRANITE, granite, id="granite-4", marks=pytest.mark.wide),
    ],
)
def test_model_flops_of_a_hybrid_are_those_by_hand(file, by_hand, mesh, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(file))
    sizes = {"layout": "data=1", "batch.sequences": 1, "batch.sequence_length": S}
    config = load_config(str(tmp_path), sizes)
    built = build_step(config, mesh())
    flops = count_traced(built.step.trace(built.state, built.batch).jaxpr.jaxpr, "cuda")
    assert flops.by_phase["forward"] == pytest.approx(S * by_hand(), rel=1e-6)
    assert flops.by_phase["backward"] == pytest.approx(2 * S * by_hand(), rel=1e-6)
