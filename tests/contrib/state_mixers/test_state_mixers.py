"""Gated delta nets, KDA and Mamba-2 against the modules of transformers; on meshes against one device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals

from meshwright.config import TransformerModel
from meshwright.contrib.state_mixers import apply_delta, apply_mamba, delta_parameters, mamba_parameters
from meshwright.trainer.models import Context, initial_parameters
from meshwright.trainer.models.attention import documents_of, in_ring_order

pytestmark = pytest.mark.quick

WIDTH, LENGTH = 16, 80
BASE = TransformerModel(
    kind="transformer", num_layers=1, embed_dim=WIDTH, num_heads=2, num_kv_heads=2, mlp_dim=16, vocab_size=32,
    rope_theta=1e4, norm_epsilon=1e-6,
)  # fmt: skip


class Mixer(NamedTuple):
    """A mixer of the tests: its keys, the functions, and its count of parameters."""

    config: TransformerModel
    declare: Any
    apply: Any
    num_parameters: int

    @classmethod
    def of(cls, **keys: Any) -> "Mixer":
        kind = "mamba" if "mamba_heads" in keys else "delta"
        keys |= {"conv_width": 4, "layer_pattern": kind}
        config = TransformerModel.model_validate(BASE.model_dump() | keys)
        if config.mamba_heads:
            return cls(config, mamba_parameters, apply_mamba, config.num_mamba_parameters)
        return cls(config, delta_parameters, apply_delta, config.num_delta_parameters)

    def run(self, parameters: Any, x: Any, context: Context, segments: Any = None) -> Any:
        """The mixer's output and that of the output product, for `x` in the order of the window."""
        declared = self.declare(self.config)
        documents = None if segments is None else documents_of(segments, context, WIDTH)

        def project(h: Any, name: str) -> Any:
            dims = declared[name].dims
            y = jnp.tensordot(h, context.gather(parameters[name], *dims), 1)
            return context.pin(y, "batch", "sequence", *dims[1:])

        places = in_ring_order(jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2]), context.mesh)
        h = context.pin(jnp.take_along_axis(x, places[..., None], axis=1), "batch", "sequence", "embed")
        read = self.apply(h, parameters, project, self.config, context, documents)
        y = jnp.einsum("bshd,hde->bse", read, context.gather(parameters["output"], *declared["output"].dims))
        return jnp.take_along_axis(y, jnp.argsort(places, axis=1)[..., None], axis=1)


QWEN = Mixer.of(delta_heads=4, delta_key_heads=2, delta_key_dim=8, delta_value_dim=6)
KIMI = Mixer.of(
    delta_heads=4, delta_key_heads=4, delta_key_dim=8, delta_value_dim=8, delta_rank=8, delta_gate="sigmoid"
)
NEMOTRON = Mixer.of(
    mamba_heads=8, mamba_head_dim=4, mamba_groups=2, mamba_state_dim=8, conv_bias=True, mamba_least_step=0.3
)
ONE_GROUP = Mixer.of(mamba_heads=8, mamba_head_dim=4, mamba_groups=1, mamba_state_dim=8)
MIXERS = {"qwen": QWEN, "kimi": KIMI, "nemotron": NEMOTRON, "one-group": ONE_GROUP}


def inputs(seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, LENGTH, WIDTH)), jnp.float32)


def with_gradients(mixer: Mixer, parameters: Any, context: Context, segments: Any = None) -> Any:
    weights = inputs(1)

    def loss(parameters: Any, x: Any) -> Any:
        y = mixer.run(parameters, x, context, segments)
        return jnp.sum(y * weights), y

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, y), (of_parameters, of_x) = run(parameters, inputs())
    return {"output": y, "input": of_x, **of_parameters}


def farthest(found: Any, expected: Any) -> dict[str, float]:
    """The largest error of each array, as a share of its largest number."""
    return {
        name: float(np.max(np.abs(found[name] - expected[name])) / np.max(np.abs(expected[name])))
        for name in expected
    }


# Against transformers.


def qwen_of(get: Callable[[str], Any]) -> dict[str, Any]:
    key_heads, keys, values, shares = 2, 8, 6, 2
    both = get("in_proj_qkvz.weight").T.reshape(WIDTH, key_heads, -1)
    gates = get("in_proj_ba.weight").T.reshape(WIDTH, key_heads, -1)
    query, key, value, gate = np.split(both, np.cumsum([keys, keys, shares * values]), axis=-1)
    taps = np.split(get("conv1d.weight")[:, 0], np.cumsum([key_heads * keys] * 2))
    return {
        "query": query,
        "key": key,
        "value": value.reshape(WIDTH, -1, values),
        "output_gate": gate.reshape(WIDTH, -1, values),
        "beta": gates[..., :shares].reshape(WIDTH, -1),
        "decay": gates[..., shares:].reshape(WIDTH, -1),
        "output": get("out_proj.weight").T.reshape(-1, values, WIDTH),
        "log_rate": get("A_log"),
        "step_bias": get("dt_bias"),
        "norm": get("norm.weight"),
        "query_taps": taps[0].reshape(-1, keys, 4),
        "key_taps": taps[1].reshape(-1, keys, 4),
        "value_taps": taps[2].reshape(-1, values, 4),
    }


def kimi_of(get: Callable[[str], Any]) -> dict[str, Any]:
    def heads(name: str) -> Any:
        return get(name).T.reshape(-1, 4, 8)

    taps = get("conv1d.weight")[:, 0].reshape(3, 4, 8, 4)
    return {
        "query": heads("q_proj.weight"),
        "key": heads("k_proj.weight"),
        "value": heads("v_proj.weight"),
        "decay_down": get("forget_gate.f_a_proj.weight").T,
        "decay": heads("forget_gate.f_b_proj.weight"),
        "output_gate_down": get("g_a_proj.weight").T,
        "output_gate": heads("g_b_proj.weight"),
        "beta": get("b_proj.weight").T,
        "output": get("o_proj.weight").T.reshape(4, 8, WIDTH),
        "log_rate": get("forget_gate.A_log").reshape(4),
        "step_bias": get("forget_gate.dt_bias").reshape(4, 8),
        "norm": get("o_norm.weight"),
        **{f"{name}_taps": taps[place] for place, name in enumerate(("query", "key", "value"))},
    }


def mamba_of(groups: int) -> Callable[[Callable[[str], Any]], dict[str, Any]]:
    def ours(get: Callable[[str], Any]) -> dict[str, Any]:
        shared, ends = groups * 8, np.cumsum([32, 32, groups * 8, groups * 8])
        parts = np.split(get("in_proj.weight").T, ends, axis=1)
        shapes = {"output_gate": (8, 4), "value": (8, 4), "key": (groups, 8), "query": (groups, 8)}
        declared = {
            name: part.reshape(WIDTH, *shape)
            for part, (name, shape) in zip(parts[:4], shapes.items(), strict=True)
        }
        for suffix, name in (("_taps", "conv1d.weight"), ("_taps_bias", "conv1d.bias")):
            split = np.split(get(name), (32, 32 + shared))
            for which, part in zip(("value", "key", "query"), split, strict=True):
                declared[f"{which}{suffix}"] = part.reshape(*shapes[which], *part.shape[2:])
        return {
            **declared,
            "step": parts[4],
            "output": get("out_proj.weight").T.reshape(8, 4, WIDTH),
            "skip": get("D"),
            "log_rate": get("A_log"),
            "step_bias": get("dt_bias"),
            "norm": get("norm.weight").reshape(8, 4),
        }

    return ours


def qwen_module() -> Any:
    modelling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modelling.Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=6, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    return modelling.Qwen3NextGatedDeltaNet(config, 0)


def kimi_module() -> Any:
    modelling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = modelling.KimiLinearConfig(
        hidden_size=WIDTH, linear_num_heads=4, linear_head_dim=8, num_hidden_layers=1,
        layer_types=["linear_attention"], rms_norm_eps=1e-6,
    )  # fmt: skip
    return modelling.KimiLinearDeltaAttention(config, 0)


def nemotron_module() -> Any:
    modelling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = modelling.NemotronHConfig(
        hidden_size=WIDTH, mamba_num_heads=8, mamba_head_dim=4, n_groups=2, ssm_state_size=8, conv_kernel=4,
        chunk_size=16, layers_block_type=["mamba"], layer_norm_epsilon=1e-6, time_step_min=0.3,
    )  # fmt: skip
    return modelling.NemotronHMamba2Mixer(config, 0)


def granite_module() -> Any:
    modelling = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    config = modelling.GraniteMoeHybridConfig(
        hidden_size=WIDTH, mamba_n_heads=8, mamba_d_head=4, mamba_n_groups=1, mamba_d_state=8, mamba_d_conv=4,
        mamba_expand=2, num_hidden_layers=1, layer_types=["mamba"], rms_norm_eps=1e-6,
    )  # fmt: skip
    return modelling.GraniteMoeHybridMambaLayer(config, 0)


GRANITE = Mixer.of(mamba_heads=8, mamba_head_dim=4, mamba_groups=1, mamba_state_dim=8, conv_bias=True)


@pytest.mark.parametrize(
    ("mixer", "module", "ours"),
    [
        pytest.param(QWEN, qwen_module, qwen_of, id="qwen3-next"),
        pytest.param(KIMI, kimi_module, kimi_of, id="kimi-linear"),
        pytest.param(NEMOTRON, nemotron_module, mamba_of(2), id="nemotron-h"),
        pytest.param(GRANITE, granite_module, mamba_of(1), id="granite", marks=pytest.mark.wide),
    ],
)
def test_a_mixer_gives_what_transformers_does_forward_and_backward(mixer, module, ours, context):
    torch = pytest.importorskip("torch")
    theirs, draw = module(), np.random.default_rng(3)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            drawn = draw.normal(size=weight.shape, scale=0.3) + (1.0 if "norm" in name else 0.0)
            weight.copy_(torch.tensor(drawn))
    parameters = ours(lambda name: weights[name].detach().numpy())
    declared = mixer.declare(mixer.config)
    assert {name: x.shape for name, x in parameters.items()} == {n: p.shape for n, p in declared.items()}
    assert sum(weight.numel() for weight in weights.values()) == mixer.num_parameters

    x = torch.tensor(np.asarray(inputs()), requires_grad=True)
    y = theirs(x)
    (y * torch.tensor(np.asarray(inputs(1)))).sum().backward()
    expected = {"output": y.detach().numpy(), "input": x.grad.numpy()}
    expected |= ours(lambda name: weights[name].grad.numpy())
    found = with_gradients(mixer, jax.tree.map(jnp.asarray, parameters), context())
    errors = farthest(found, expected)
    assert errors["output"] < 1e-5
    assert max(errors.values()) < 5e-5, errors


# Over meshes.


def parameters_of(mixer: Mixer) -> Any:
    return initial_parameters(mixer.declare(mixer.config), jax.random.key(0))


SEGMENTS = jnp.asarray(np.cumsum(np.random.default_rng(4).random((2, LENGTH)) < 0.08, axis=1), jnp.int32)


AXES = {
    "data,context,tensor of documents": ({"data": 2, "context": 2, "tensor": 2}, True),
    "fsdp,context": ({"fsdp": 2, "context": 4}, False),
    "fsdp,tensor with repeated groups": ({"fsdp": 2, "tensor": 4}, False),
}
# Each mixer once and each layout; `make test-wide` has all others of the twelve.
EVERY_TIME = {
    ("qwen", "fsdp,tensor with repeated groups"),
    ("kimi", "data,context,tensor of documents"),
    ("nemotron", "data,context,tensor of documents"),
    ("one-group", "fsdp,context"),
}


@pytest.mark.parametrize(
    ("name", "axes", "has_documents"),
    [
        pytest.param(
            *(name, *AXES[layout]),
            id=f"{name}, {layout}",
            marks=() if (name, layout) in EVERY_TIME else pytest.mark.wide,
        )
        for name in MIXERS
        for layout in AXES
    ],
)
def test_a_layout_gives_what_one_device_does(name, axes, has_documents, context):
    mixer = MIXERS[name]
    mixer = mixer._replace(config=mixer.config.model_copy(update={"scan_chunk": 8}))
    parameters, segments = parameters_of(mixer), SEGMENTS if has_documents else None
    expected = with_gradients(mixer, parameters, context(), segments)
    found = with_gradients(mixer, parameters, context(**axes), segments)
    errors = farthest(found, expected)
    assert max(errors.values()) < 2e-5, errors


# What is saved, sent and refused.


@pytest.mark.parametrize("name", ["qwen", "kimi", "nemotron"])
def test_the_backward_pass_keeps_projections_and_reads_and_no_state(name, context):
    """States would be 48 numbers or more for each token and head; here are those of projections and reads."""
    mixer, declared = MIXERS[name], MIXERS[name].declare(MIXERS[name].config)
    parameters, x = parameters_of(mixer), inputs()
    tokens = x.shape[0] * x.shape[1]
    kept: list[Any] = saved_residuals(lambda p, x: jnp.sum(mixer.run(p, x, context())), parameters, x)
    numbers = sum(aval.size for aval, source in kept if "argument" not in source) / tokens
    products = [n for n, p in declared.items() if "embed" in p.dims[:1] or "latent" in p.dims[:1]]
    made = sum(int(np.prod(declared[n].shape[1:])) for n in products)
    heads = int(np.prod(declared["output"].shape[:2]))
    # Heads' reads, the input of `output`, and this test's: the input of products, and places to reorder it.
    assert numbers == made + 2 * heads + WIDTH + 2


@pytest.mark.parametrize("name", ["qwen", "nemotron"])
def test_states_cross_devices_in_one_message_beside_those_of_convolutions(name, context):
    mixer = MIXERS[name]
    parameters, run = parameters_of(mixer), context(context=2)
    lowered = jax.jit(lambda p, x: mixer.run(p, x, run)).trace(parameters, inputs()).jaxpr
    assert str(lowered).count("all_gather[") == 4  # queries, keys and values; states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta_heads": 4}, "delta_key_heads is missing; delta_heads = 4 needs it"),
        ({"delta_gate": "sigmoid"}, "delta_gate = 'sigmoid' has no effect without delta_heads"),
        ({"scan_chunk": 128 + 64, "mamba_heads": 2}, "scan_chunk = 192 is no power of two"),
        ({"mamba_heads": 6, "mamba_groups": 4}, "mamba_groups = 4 does not divide mamba_heads = 6"),
        ({"conv_bias": True}, "conv_bias = True has no effect without delta_heads or mamba_heads"),
        (
            {"delta_rank": 8, "delta_heads": 4, "delta_key_heads": 2},
            "each of delta_heads has keys of its own",
        ),
    ],
)
def test_keys_that_need_others_are_refused(change, message):
    pattern = "".join(key.removesuffix("_heads") for key in change if key in ("delta_heads", "mamba_heads"))
    with pytest.raises(ValueError, match=message):
        TransformerModel.model_validate(BASE.model_dump() | change | {"layer_pattern": pattern})
