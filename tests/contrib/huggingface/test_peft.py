"""Adapters of a run load in PEFT, and the merged model in `transformers`; both give our logits."""

import json
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import Session, train
from meshwright.cli import main
from meshwright.config import load_config
from meshwright.contrib.huggingface import export_huggingface, export_peft
from meshwright.contrib.lora import dequantised_array, to_codes
from meshwright.errors import InputError
from meshwright.sharding import mesh_of
from meshwright.trainer.checkpoint import checkpoint_of, restore
from meshwright.trainer.models import Context, model_of
from meshwright.trainer.step import build_step, whole_parameters

torch = pytest.importorskip("torch", reason="compared with PyTorch, which is not installed for this Python")
transformers = pytest.importorskip(
    "transformers", reason="compared with transformers, which is not installed"
)
safetensors = pytest.importorskip("safetensors.numpy")
peft = pytest.importorskip("peft", reason="compared with PEFT, which is not installed")
# PEFT asks transformers for a property by its former name.
pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
    "linear_value_head_dim": 6,
}
EVERY = 'lora.targets=["all-linear"]'
CASES = {  # family, sizes, overrides
    "llama, every product": ("LlamaConfig", {**SIZES, "num_key_value_heads": 2}, (EVERY,)),
    "qwen2, queries and values": ("Qwen2Config", {**SIZES, "num_key_value_heads": 2}, ("model.unroll=true",)),
    "phi3, fused products": (
        "Phi3Config",
        {**SIZES, **IDS},
        ('lora.targets=["q_proj", "v_proj", "up_proj"]',),
    ),
    "glm4, fused gate and up": (
        "Glm4Config",
        {**SIZES, **IDS, "num_key_value_heads": 2, "head_dim": 16},
        (EVERY,),
    ),
    "starcoder2, without a gate": ("Starcoder2Config", {**SIZES, **IDS, "num_key_value_heads": 2}, (EVERY,)),
    "gpt-neox, fused by head": ("GPTNeoXConfig", SIZES, (EVERY,)),
    "gemma4, attention": (
        "Gemma4TextConfig",
        {
            **{**SIZES, **IDS, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16},
            **{"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7},
            "hidden_size_per_layer_input": 0,
        },
        (EVERY,),
    ),
    "gpt-oss, attention": (
        "GptOssConfig",
        {**SIZES, **IDS, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4},
        ('lora.targets=["q_proj", "k_proj", "v_proj", "o_proj"]',),
    ),
    "qwen3-next, mixers beside experts": (
        "Qwen3NextConfig",
        {
            **{**SIZES, **IDS, **LINEAR, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4},
            **{"full_attention_interval": 2, "moe_intermediate_size": 20, "num_experts_per_tok": 2},
            "shared_expert_intermediate_size": 12,
        },
        ('lora.targets=["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"]',),
    ),
    "qwen3.5, delta nets": (
        "Qwen3_5TextConfig",
        {
            **{**SIZES, **IDS, **LINEAR, "num_key_value_heads": 2, "head_dim": 16},
            "layer_types": ["linear_attention", "full_attention"],
        },
        (EVERY,),
    ),
    "granite 4, hybrid": (
        "GraniteMoeHybridConfig",
        {
            **{**SIZES, **IDS, "num_key_value_heads": 2, "num_local_experts": 0, "mamba_n_groups": 2},
            **{"shared_intermediate_size": 40, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8},
            **{"mamba_d_head": 8, "mamba_d_state": 6, "rope_parameters": None},
        },
        (EVERY,),
    ),
    "nemotron-h, parts of layers": (
        "NemotronHConfig",
        {
            **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
            **{**IDS, "num_key_value_heads": 2, "head_dim": 16, "hybrid_override_pattern": "M-M*-"},
            **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2},
        },
        ('lora.targets=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj"]',),
    ),
    "gpt2, inputs first": ("GPT2Config", GPT2, (EVERY,)),
}


WIDE = (
    "gpt-oss, attention",
    "gemma4, attention",
    "gpt-neox, fused by head",
    "glm4, fused gate and up",
    "gpt2, inputs first",
    "qwen3-next, mixers beside experts",
    "qwen3.5, delta nets",
    "granite 4, hybrid",
    "nemotron-h, parts of layers",
)
LONG = ("qwen2, queries and values", "starcoder2, without a gate", "phi3, fused products")
MARKS = {name: mark for mark, names in ((pytest.mark.wide, WIDE), (pytest.mark.long, LONG)) for name in names}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MARKS.get(name, ())) for name in CASES],
)
def trained(request, tmp_path_factory):
    """The folder of a small random base, and that of a run with adapters that began from it."""
    kind, sizes, overrides = CASES[request.param]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).float()
    base = tmp_path_factory.mktemp("base")
    model.save_pretrained(base)
    sizes_of_run = (
        "batch.sequences=4",
        "batch.sequence_length=16",
        "precision=fp32",
        "schedule.kind=constant",
    )
    settings = ("lora.rank=4", "optimizer.learning_rate=0.02", "data.source=synthetic")
    folder = tmp_path_factory.mktemp("run") / "run"
    overrides = (*sizes_of_run, *settings, *overrides)
    train(
        str(base),
        on="1xCPU",
        steps=3,
        folder=folder,
        overrides=overrides,
        session=Session(begin_from=base),
    )
    return base, folder


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(3, 96, (2, 24))


@pytest.fixture(scope="module")
def logits(trained, tokens):
    return logits_of(trained[1], tokens)


def logits_of(folder, tokens):
    """Our logits, with the adapters beside the products."""
    config = load_config(str(folder))
    mesh = mesh_of((("data", 1),), jax.devices()[:1])
    abstract = build_step(config, mesh).state
    wanted = {name: abstract[name] for name in ("parameters", "frozen")}
    tree = whole_parameters(restore(checkpoint_of(folder), wanted, only=list(wanted)))
    model = model_of(config.model)
    scale = config.lora.scale
    context = Context(mesh=mesh, dtype=jnp.float32, platform="cpu", remat="none", adapter_scale=scale)

    @jax.jit  # one program: operation by operation, each is compiled alone
    def found(tree, tokens):
        hidden, _ = model.hidden(tree, tokens, context)
        return hidden @ model.head(tree, context).T

    with jax.default_matmul_precision("highest"):
        return np.asarray(found(tree, jnp.asarray(tokens)))


def theirs(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


def exported(run, folder, monkeypatch):
    """Write a run's adapters into a folder, by the command line."""
    monkeypatch.setattr(
        "sys.argv", ["meshwright", "export", str(run), "--to", str(folder), "--format", "peft"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def test_peft_gives_the_logits_of_the_run(trained, tokens, logits, tmp_path, monkeypatch):
    base, folder = trained
    exported(folder, tmp_path, monkeypatch)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = theirs(model, tokens)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path)
    assert np.abs(theirs(adapted, tokens) - logits).max() < 1e-4
    assert np.abs(before - logits).max() > 1e-2, "the adapters have learned something"
    held = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    of_run = load_config(str(folder)).num_trained_parameters
    fused = any(json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"])
    assert held >= of_run if fused else held == of_run


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # gpt2's Conv1D
def test_all_linear_means_the_products_that_peft_finds(trained, tmp_path, monkeypatch):
    base, folder = trained
    if load_config(str(folder)).lora.targets != ("all-linear",):
        pytest.skip("the run has adapters of some products alone")
    exported(folder, tmp_path, monkeypatch)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    wanted = {name.replace(".default", "") for name, _ in found.named_parameters() if "lora_" in name}
    assert set(safetensors.load_file(tmp_path / "adapter_model.safetensors")) == wanted


def test_the_merged_model_gives_the_logits_of_the_run(trained, tokens, logits, tmp_path):
    _, folder = trained
    export_huggingface(checkpoint_of(folder), load_config(str(folder)), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert np.abs(theirs(model, tokens) - logits).max() < 1e-4


@pytest.mark.parametrize(
    ("unroll", "layout"),
    [
        pytest.param("false", "fsdp=2,tensor=2", marks=pytest.mark.wide),
        pytest.param("false", "data=1", marks=pytest.mark.long),
        pytest.param("true", "data=1", marks=pytest.mark.wide),
    ],
)
def test_a_base_in_four_bits_is_read_trained_and_merged(unroll, layout, tokens, tmp_path):
    """From weights in safetensors, in parts of each device, to what `transformers` loads."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).float()
    base, folder, merged = (tmp_path / name for name in ("base", "run", "merged"))
    model.save_pretrained(base)
    settings = ("lora.rank=4", "lora.base=nf4", EVERY, "data.source=synthetic", "precision=fp32")
    sizes_of_run = ("batch.sequences=4", "batch.sequence_length=16", f"model.unroll={unroll}")
    overrides = (*settings, *sizes_of_run, "optimizer.learning_rate=0.02", "schedule.kind=constant")
    devices = {"data=1": "1xCPU"}.get(layout, "4xCPU")
    train(
        str(base),
        on=devices,
        overrides=[*overrides, f"layout={layout}"],
        steps=3,
        folder=folder,
        session=Session(begin_from=base),
    )
    ours = logits_of(folder, tokens)
    export_huggingface(checkpoint_of(folder), load_config(str(folder)), merged)
    read = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert np.abs(theirs(read, tokens) - ours).max() < 1e-4
    # What was added to the base's four bits has the adapters' rank.
    after, before = (each.model.layers[1].self_attn.q_proj.weight.detach().numpy() for each in (read, model))
    blocks = before.T.reshape(128, 4, 32)  # [inputs, heads, head_dim]: a scale for each 32 numbers of a head
    codes, scales = to_codes(blocks)
    rest = dequantised_array(codes, scales).reshape(128, 128).T
    assert np.linalg.matrix_rank(after - rest, tol=1e-4) == 4


def test_a_run_without_adapters_has_none_to_export(tmp_path):
    folder = tmp_path / "run"
    small = ("data.source=synthetic", "model.num_layers=1", "batch.sequence_length=16", "batch.sequences=2")
    train("bytes-nano", on="1xCPU", steps=1, folder=folder, overrides=small)
    with pytest.raises(InputError, match="bytes-nano was trained without adapters") as refused:
        export_peft(checkpoint_of(folder), load_config(str(folder)), tmp_path / "out")
    assert refused.value.hint == "use --format huggingface for its parameters"


WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|stop|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def asked(word):
    return f"What comes after {word}?"


@pytest.fixture(scope="module")
def instructed(tmp_path_factory):
    """A small random Llama with a tokenizer, and the folder of a run that taught its adapters to count."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    base = tmp_path_factory.mktemp("base")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|start|>", "<|stop|>"],
        show_progress=False,
    )
    made.train_from_iterator([" ".join(map(asked, WORDS)), "user assistant"] * 4, trainer)
    made.save(str(base / "tokenizer.json"))
    settings = {
        "eos_token": "<|stop|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    sizes = {
        **SIZES,
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(16)  # a head of small random weights could not be sure of any token
    model.save_pretrained(base)
    lines = tmp_path_factory.mktemp("data") / "talks.jsonl"
    pairs = list(pairwise(WORDS)) * 4
    records = [
        {"messages": [{"role": "user", "content": asked(a)}, {"role": "assistant", "content": b}]}
        for a, b in pairs
    ]
    lines.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    folder = tmp_path_factory.mktemp("run") / "run"
    overrides = (
        *("batch.sequences=8", "batch.sequence_length=64", "precision=fp32", "lora.rank=8", EVERY),
        *("data.source=instructions", f"data.path={lines}", f"data.tokenizer={base}"),
        *("optimizer.learning_rate=0.01", "data.held_out_fraction=0.25", "model.unroll=true", "remat=none"),
    )
    run = train(
        str(base),
        on="1xCPU",
        steps=60,
        folder=folder,
        overrides=overrides,
        session=Session(begin_from=base),
    )
    return base, folder, run


def test_a_run_with_adapters_learns_a_small_instruction_set(instructed, tmp_path, monkeypatch):
    """Answers are those of PEFT with the exported adapters, token by token from the chat's beginning."""
    base, folder, run = instructed
    exported(folder, tmp_path, monkeypatch)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path)
    for word, answer in pairwise(WORDS):
        chat = [{"role": "user", "content": asked(word)}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompt = len(ids)
        while len(ids) < prompt + 12 and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, int(theirs(model, [ids])[0, -1].argmax())]
        assert tokenizer.decode(ids[prompt:]) == f"{answer}<|stop|>"
    losses = run.measurement.losses
    assert losses[60] < 0.02 * losses[1]
