"""Layers that take turns, caps, few key-value heads and odd vocabularies train on a layout as on one device.

Losses and gradients in float32, within 1e-5 of the largest gradient. Parameters are drawn by one device.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from meshwright.config import Layout, check_layout, load_config
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.step import build_step

pytestmark = [pytest.mark.quick, pytest.mark.once]

SIZES = (
    *("data.source=synthetic", "precision=fp32", "model.vocab_size=61", "model.embed_dim=32"),
    *("model.num_heads=4", "model.num_kv_heads=4", "model.mlp_dim=16", "batch.sequence_length=32"),
    *("batch.sequences=8", "optimizer.kind=sgd", "optimizer.momentum=0.9", "optimizer.clip_norm=none"),
)
FAMILIES = {
    "turns": (
        *("model.num_layers=4", "model.window=9", "model.global_every=2", "model.norm_place=both"),
        *("model.score_cap=2.0", "model.logit_cap=3.0", "model.score_dim=12", "model.rope_local_theta=50.0"),
    ),
    "one norm": (
        *("model.num_layers=4", "model.mlp=plain", "model.activation=xielu"),
        *("model.parallel=true", "model.one_norm=true"),
        *("model.norm=layer", "model.norm_bias=true", "model.no_rope_every=2", "model.score_scale=0.2"),
        *("model.logit_scale=0.5", "model.residual_scale=0.4", "model.embedding_scale=3.0"),
    ),
    "further tokens": ("model.mtp_layers=2", "model.num_experts=4", "model.experts_per_token=2"),
    "gate": (
        *("model.num_experts=4", "model.experts_per_token=2", "model.shared_mlp_dim=24"),
        *("model.shared_gate=true", "model.qk_norm=head", "model.qk_norm_turned=true"),
    ),
    "sinks": (
        *("model.num_layers=4", "model.window=9", "model.global_every=2", "model.attention_sinks=true"),
        *("model.qkv_bias=true", "model.output_bias=true", "model.gate_limit=0.5", "model.num_experts=4"),
        *("model.experts_per_token=2", "model.expert_bias=true", "model.activation=gelu-quick"),
    ),
    "wide turns": (
        *("model.num_layers=4", "model.window=9", "model.global_every=2", "model.norm_place=both"),
        *(
            "model.num_kv_heads=2",
            "model.global_head_dim=16",
            "model.global_kv_heads=1",
            "model.qk_norm=head",
        ),
        *("model.global_key_is_value=true", "model.value_norm=true", "model.rope_stretching=proportional"),
        *("model.rotary_share=0.5", "model.rope_local_theta=50.0", "model.layer_factor=true"),
    ),
    "experts beside": (
        *(
            "model.num_layers=2",
            "model.num_experts=4",
            "model.experts_per_token=2",
            "model.expert_norms=true",
        ),
        *("model.shared_mlp_dim=24", "model.norm_place=both"),
    ),
    "delta nets": (
        *("model.num_layers=4", "model.layer_pattern=delta+experts attention+experts", "model.conv_width=4"),
        *("model.delta_heads=4", "model.delta_key_heads=2", "model.delta_key_dim=8", "model.scan_chunk=8"),
        *("model.delta_value_dim=8", "model.num_experts=4", "model.experts_per_token=2"),
        *("model.shared_mlp_dim=24", "model.shared_gate=true", "model.attention_gate=true"),
    ),
    "mamba": (
        *("model.num_layers=6", "model.layer_pattern=mamba mlp attention+mlp", "model.mamba_heads=4"),
        *("model.mamba_head_dim=8", "model.mamba_groups=2", "model.mamba_state_dim=8", "model.conv_width=4"),
        *("model.conv_bias=true", "model.scan_chunk=8", "model.position=none", "model.rope_theta=none"),
    ),
    "few keys": ("model.num_kv_heads=1", "model.qkv_bias=true", "model.qk_norm=all"),
}
CASES = [
    ("one norm", "fsdp=2,tensor=2", "dots-attention"),
    ("wide turns", "fsdp=2,tensor=4", "dots-attention"),
    ("further tokens", "fsdp=2,context=2,tensor=2", "full"),
    ("turns", "fsdp=2,context=2,tensor=2", "dots-attention"),
    # Experts in groups of two layers take five times as long to compile; tests/contrib/experts and
    # tests/contrib/context_attention/test_ring.py have their parts on layouts.
    pytest.param("sinks", "fsdp=2,context=2,tensor=2", "dots-attention", marks=pytest.mark.wide),
    pytest.param("few keys", "fsdp=2,tensor=4", "none", marks=pytest.mark.wide),
    pytest.param("gate", "fsdp=2,tensor=2,expert=2", "none", marks=pytest.mark.wide),
    pytest.param("experts beside", "expert=2,fsdp=2,tensor=2", "dots-attention", marks=pytest.mark.wide),
    pytest.param("one norm", "stage=2,context=2", "full", marks=pytest.mark.wide),
    pytest.param("wide turns", "stage=2,context=2", "full", marks=pytest.mark.wide),
    pytest.param("sinks", "stage=2,expert=2,tensor=2", "full", marks=pytest.mark.wide),
    pytest.param("sinks", "expert=4,fsdp=2", "alternate-dots", marks=pytest.mark.wide),
    pytest.param("turns", "fsdp=2,tensor=2", "full", marks=pytest.mark.wide),
    pytest.param("turns", "stage=2,context=4", "none", marks=pytest.mark.wide),
    pytest.param("turns", "data=2,context=4", "full", marks=pytest.mark.wide),
    pytest.param("few keys", "stage=2,tensor=4", "none", marks=pytest.mark.wide),
    pytest.param("few keys", "context=2,tensor=4", "none", marks=pytest.mark.wide),
    pytest.param("delta nets", "fsdp=2,context=2,tensor=2", "dots-attention", marks=pytest.mark.wide),
    pytest.param("mamba", "stage=2,context=2,tensor=2", "full", marks=pytest.mark.wide),
    pytest.param("mamba", "fsdp=2,tensor=4", "dots-attention", marks=pytest.mark.wide),
]


@functools.cache
def trained(family: str, layout: str, remat: str) -> tuple[float, list[np.ndarray]]:
    """Return the loss of the first step, and its gradients: momentum begins with zeros."""
    axes = Layout.parse(layout)
    config = load_config("bytes-nano", [*SIZES, *FAMILIES[family], f"layout={layout}", f"remat={remat}"])
    check_layout(config, axes)
    built = build_step(config, mesh_of(axes.axes, jax.devices()[: axes.num_devices]))
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), built.state)
    first = (
        initial(family) if axes.num_devices > 1 else jax.device_get(built.init(np.uint32(0))["parameters"])
    )
    state["parameters"] = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), first, built.state["parameters"]
    )
    batch = jax.tree.map(
        lambda x, like: jax.device_put(x.reshape(like.shape), like.sharding),
        open_data(config).batch(0, "train"),
        built.batch,
    )
    state, metrics = built.step(state, batch)
    gradients = jax.tree.leaves(optax.tree.get(state["optimizer"], "trace"))
    return float(metrics["loss"]), [np.array(gradient) for gradient in gradients]


@functools.cache
def initial(family: str):
    config = load_config("bytes-nano", [*SIZES, *FAMILIES[family], "layout=data=1"])
    built = build_step(config, mesh_of(Layout.parse("data=1").axes, jax.devices()[:1]))
    return jax.device_get(built.init(np.uint32(0))["parameters"])


@pytest.mark.parametrize(("family", "layout", "remat"), CASES)
def test_a_layout_trains_as_one_device_does(family, layout, remat):
    loss, gradients = trained(family, "data=1", "none")
    loss_here, gradients_here = trained(family, layout, remat)
    largest = max(float(np.abs(gradient).max()) for gradient in gradients)
    assert loss_here == pytest.approx(loss, rel=1e-5)
    for one, here in zip(gradients, gradients_here, strict=True):
        np.testing.assert_allclose(here, one, rtol=0, atol=1e-5 * largest)
