"""Modules that predict further tokens agree with such modules of the layers of transformers, in PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config import load_config, text_reading
from meshwright.contrib.huggingface import FirstWeights, from_huggingface, weights_of
from meshwright.errors import InputError
from meshwright.trainer.models.transformer import Transformer
from meshwright.trainer.step import build_step

torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed for this Python")
transformers = pytest.importorskip(
    "transformers", reason="compared with transformers, which is not installed"
)
safetensors = pytest.importorskip("safetensors.numpy")
qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")

VOCABULARY, WIDTH, WEIGHT = 96, 32, 0.3
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES)).float()
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


class Further(torch.nn.Module):
    """One module, as section 2.2 of the paper describes it."""

    def __init__(self, config):
        super().__init__()
        self.token_norm, self.hidden_norm, self.last_norm = (qwen3.Qwen3RMSNorm(WIDTH) for _ in range(3))
        self.joint = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.block = qwen3.Qwen3DecoderLayer(config, layer_idx=config.num_hidden_layers - 1)

    def forward(self, tokens, hidden, positions, mask):
        x = self.joint(torch.cat([self.token_norm(tokens), self.hidden_norm(hidden)], dim=-1))
        out = self.block(x, attention_mask=mask, position_embeddings=positions)
        return self.last_norm(out[0] if isinstance(out, tuple) else out)


def their_loss(model, modules, tokens):
    """Return the loss with the modules', from the definition: position i predicts token i + k + 1."""
    given = tokens[:, :-1]
    hidden = model.model(given).last_hidden_state
    length = given.shape[1]
    positions = model.model.rotary_emb(hidden, torch.arange(length)[None])
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    entropy = torch.nn.functional.cross_entropy
    loss = entropy(model.lm_head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    further = []
    for k, module in enumerate(modules, 1):
        known = length - k  # positions whose target is in the window
        later = torch.nn.functional.pad(given[:, k:], (0, k))
        hidden = module(model.model.embed_tokens(later), hidden, positions, mask)
        logits = model.lm_head(hidden[:, :known])
        further.append(entropy(logits.flatten(0, 1), tokens[:, k + 1 :].flatten()))
    return loss + WEIGHT * sum(further) / len(further)


def ours_of(module):
    """Return a module's parameters as our tree."""

    def heads(linear, num_heads):
        return linear.weight.T.reshape(WIDTH, num_heads, -1)

    attention, mlp = module.block.self_attn, module.block.mlp
    tree = {
        "attention": {
            **{"query": heads(attention.q_proj, 4), "key": heads(attention.k_proj, 2)},
            **{"value": heads(attention.v_proj, 2)},
            "output": attention.o_proj.weight.T.reshape(4, -1, WIDTH),
            **{"query_norm": attention.q_norm.weight, "key_norm": attention.k_norm.weight},
        },
        "mlp": {
            **{"up": mlp.up_proj.weight.T, "gate": mlp.gate_proj.weight.T, "down": mlp.down_proj.weight.T}
        },
        "attention_norm": {"scale": module.block.input_layernorm.weight},
        "mlp_norm": {"scale": module.block.post_attention_layernorm.weight},
        "joint": {"matrix": module.joint.weight.T},
        **{name: {"scale": getattr(module, name).weight} for name in ("token_norm", "hidden_norm")},
        "last_norm": {"scale": module.last_norm.weight},
    }
    return jax.tree.map(lambda array: jnp.asarray(array.detach().numpy()), tree)


@pytest.mark.parametrize("num_modules", [1, 2])
def test_loss_and_gradients_are_those_of_the_definition(num_modules, folder, context):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    modules = torch.nn.ModuleList(Further(model.config) for _ in range(num_modules))
    run = load_config(str(folder), {"model.mtp_layers": num_modules, "model.mtp_loss": WEIGHT})
    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (2, 33))
    expected = their_loss(model, modules, torch.tensor(tokens))
    expected.backward()

    ours = Transformer(run.model)
    weights = weights_of(run.model, "qwen3")
    declared, _ = jax.tree_util.tree_flatten_with_path(
        ours.parameters(), is_leaf=lambda leaf: hasattr(leaf, "fan_in")
    )
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in declared}
    state = {name: array.numpy() for name, array in model.state_dict().items()}
    tree = {}
    for path, array in from_huggingface(weights, shapes, state.__getitem__):
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = jnp.asarray(array)
    tree |= {f"mtp_{k}": ours_of(module) for k, module in enumerate(modules, 1)}
    batch = {"tokens": jnp.asarray(tokens, jnp.int32)}

    def loss(tree):
        return ours.loss(tree, {}, batch, context())[0]

    with jax.default_matmul_precision("highest"):
        found, gradients = jax.jit(jax.value_and_grad(loss))(tree)
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    total = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradients)))
    named = [*model.parameters(), *modules.parameters()]
    assert total == pytest.approx(np.sqrt(sum(float((p.grad**2).sum()) for p in named)), rel=1e-4)
    for name, theirs in (("embedding", model.model.embed_tokens), ("head", model.lm_head)):
        np.testing.assert_allclose(gradients[name], theirs.weight.grad.numpy(), rtol=1e-3, atol=1e-5)
    joint = modules[0].joint.weight.grad.numpy().T
    np.testing.assert_allclose(gradients["mtp_1"]["joint"]["matrix"], joint, rtol=1e-3, atol=1e-5)
    count = sum(p.numel() for p in named)
    assert run.model.num_parameters == count


DEEPSEEK = {
    **{**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16},
    **{"q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_mtp_layers": 1},
}
del DEEPSEEK["head_dim"]
QWEN3_NEXT = {
    **{**SIZES, "full_attention_interval": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
}


def each_expert(arrays):
    """The arrays of a block with those of experts apart, as files have them."""
    found = {}
    for name, array in arrays.items():
        group = name.rpartition(".")[0]
        for n, one in enumerate(array) if name.endswith("experts.gate_up_proj") else ():
            found |= {f"{group}.{n}.gate_proj.weight": one[:24], f"{group}.{n}.up_proj.weight": one[24:]}
        for n, one in enumerate(array) if name.endswith("experts.down_proj") else ():
            found[f"{group}.{n}.down_proj.weight"] = one
        if "experts." not in name or "shared_expert" in name:
            found[name] = array
    return found


def deepseek(monkeypatch):
    """A model with a module, whose names `transformers` takes for those of a published file."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this release of transformers has no such modules")
    main = transformers.AutoModelForCausalLM.from_config(
        transformers.DeepseekV3Config(**DEEPSEEK), attn_implementation="eager"
    )
    monkeypatch.setattr(type(main), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    module = layers.MtpModel(main, 1).layers[0]
    names = {"mtp_block.": "model.layers.2.", "post_norm.": "model.layers.2.shared_head.norm."}
    names |= {name: f"model.layers.2.{name}" for name in ("enorm.", "hnorm.", "eh_proj.")}
    return main, module, names


def qwen3_next(monkeypatch):
    """A model with a module, by the names of published files, which `transformers` passes over."""
    modelling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    main = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3NextConfig(**QWEN3_NEXT), attn_implementation="eager"
    )
    module = torch.nn.Module()
    module.pre_fc_norm_embedding, module.pre_fc_norm_hidden, module.norm = (
        modelling.Qwen3NextRMSNorm(WIDTH, eps=main.config.rms_norm_eps) for _ in range(3)
    )
    module.fc = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
    module.layer = modelling.Qwen3NextDecoderLayer(main.config, 1)

    def forward(tokens, hidden, positions, mask, *_):
        both = [module.pre_fc_norm_embedding(tokens), module.pre_fc_norm_hidden(hidden)]
        x = module.fc(torch.cat(both, dim=-1))
        return module.norm(module.layer(x, attention_mask=mask, position_embeddings=positions))

    module.forward = forward
    names = {"layer.": "mtp.layers.0."}
    return main, module, names | {name: f"mtp.{name}" for name in ("pre_fc_norm", "norm.", "fc.")}


@pytest.mark.parametrize("family", [deepseek, pytest.param(qwen3_next, marks=pytest.mark.wide)])
def test_modules_of_a_file_are_read_and_trained_as_those_of_transformers(
    family, tmp_path, monkeypatch, mesh, context
):
    torch.manual_seed(0)
    main, module, names = family(monkeypatch)
    with torch.no_grad():
        for parameter in (*main.parameters(), *module.parameters()):
            parameter.copy_(torch.randn_like(parameter) * 0.2 + float(parameter.ndim == 1))
    main = main.float().eval()
    main.save_pretrained(tmp_path)
    arrays = {
        next(theirs + name.removeprefix(ours) for ours, theirs in names.items() if name.startswith(ours)): x
        for name, x in module.state_dict().items()
    }
    arrays = {name: x.contiguous().numpy() for name, x in each_expert(arrays).items()}
    file = tmp_path / "model.safetensors"
    safetensors.save_file({**safetensors.load_file(file), **arrays}, file, {"format": "pt"})
    if family is deepseek:  # the names are those of published files, as transformers knows them
        read = transformers.modeling_layers.MtpModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        )
        assert all(
            torch.equal(x, read.layers[0].state_dict()[name]) for name, x in module.state_dict().items()
        )

    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (2, 33))
    with torch.no_grad():
        wanted = their_loss(main, [lambda *given: module(*given, None, None)], torch.tensor(tokens)).item()
    changes = {"model.mtp_layers": 1, "model.mtp_loss": WEIGHT, "batch.sequences": 4}
    run = load_config(str(tmp_path), changes)
    first = FirstWeights(tmp_path, run)
    assert first.notes == ()
    tree = first.parameters(build_step(run, mesh()).state["parameters"])
    with jax.default_matmul_precision("highest"):
        found = jax.jit(
            lambda tree, tokens: Transformer(run.model).loss(tree, {}, {"tokens": tokens}, context())[0]
        )(tree, jnp.asarray(tokens, jnp.int32))
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    (left_out,) = FirstWeights(tmp_path, load_config(str(tmp_path), {"batch.sequences": 4})).notes
    assert f"{len(arrays)} arrays of modules that predict further tokens are left out" in left_out
    if family is qwen3_next:
        with pytest.raises(InputError, match="the names of those of module 2 are not known"):
            FirstWeights(tmp_path, load_config(str(tmp_path), {"model.mtp_layers": 2}))


def test_a_file_that_has_modules_says_that_they_are_left_out(folder, tmp_path):
    text = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"num_nextn_predict_layers": 1,', 1))
    assert load_config(str(tmp_path)).model.mtp_layers == 0
    assert text_reading(str(tmp_path)).endswith("those that you train: --set model.mtp_layers=1")
    with pytest.raises(InputError, match=r"weights of model\.mtp_layers = 1 are not read"):
        FirstWeights(folder, load_config(str(folder), {"model.mtp_layers": 1}))
