from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from meshwright.config import (
    SAVE,
    known_keys,
    load_config,
    overridden,
    preset_names,
    trainable,
    variants,
)
from meshwright.contrib.config_words import names_elsewhere
from meshwright.contrib.key_docs import commented_toml, key_docs
from meshwright.errors import InputError
from tests.test_site import loaded

PAGE = Path(__file__).parents[3] / "docs/reference/configuration.md"
DOCS = key_docs()
reference_page = loaded("configuration").reference_page

# Keys with an equivalent here, as each program writes them; what has none (logging, profiling) is left out.
HUGGING_FACE = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    max_position_embeddings rms_norm_eps rope_theta tie_word_embeddings hidden_act attention_bias mlp_bias
    head_dim vocab_size torch_dtype attention_dropout num_local_experts num_experts_per_tok
    router_aux_loss_coef n_embd n_layer n_head n_positions n_inner activation_function layer_norm_epsilon
    resid_pdrop embd_pdrop attn_pdrop n_routed_experts n_shared_experts moe_intermediate_size eos_token_id
    learning_rate per_device_train_batch_size gradient_accumulation_steps max_steps warmup_steps
    lr_scheduler_type weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 fp16
    gradient_checkpointing save_steps eval_steps save_total_limit seed optim num_train_epochs warmup_ratio
    model_type
"""
MEGATRON = """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels seq-length
    max-position-embeddings position-embedding-type rotary-base attention-dropout hidden-dropout swiglu
    untie-embeddings-and-output-weights disable-bias-linear micro-batch-size global-batch-size train-iters
    train-samples lr-decay-iters lr-warmup-iters lr-warmup-fraction lr min-lr lr-decay-style clip-grad
    weight-decay adam-beta1 adam-beta2 adam-eps bf16 fp16 fp8-format tensor-model-parallel-size
    context-parallel-size pipeline-model-parallel-size expert-model-parallel-size
    use-distributed-optimizer eval-iters eval-interval save-interval data-path num-experts moe-router-topk
    moe-aux-loss-coeff moe-expert-capacity-factor normalization norm-epsilon recompute-granularity seed
    vocab-size sequence-parallel optimizer-cpu-offload make-vocab-size-divisible-by moe-ffn-hidden-size
    deterministic-mode reset-attention-mask mock-data
"""
NANOGPT = """
    n_layer n_head n_embd block_size batch_size gradient_accumulation_steps dropout bias vocab_size
    learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr
    eval_interval eval_iters dtype dataset
"""
TORCHTITAN = """
    lr beta1 beta2 eps weight_decay warmup_steps decay_ratio decay_type lr_min dataset dataset_path
    local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload mixed_precision_param
    seed deterministic data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree
    pipeline_parallel_degree context_parallel_degree expert_parallel_degree pipeline_parallel_schedule
    pipeline_parallel_microbatch_size interval keep_latest_k dim n_layers n_heads n_kv_heads vocab_size
    norm_eps rope_theta max_seq_len activation_checkpoint init_timeout_seconds train_timeout_seconds
"""


def test_the_page_is_what_the_keys_say():
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(reference_page())
    assert PAGE.read_text() == reference_page(), "UPDATE_GOLDEN=1 writes it again"


def test_every_key_of_every_kind_is_documented():
    wanted = {("", "", name) for name in known_keys("", "") if name != "preset" and not variants(name)[1]}
    for section in known_keys("", ""):
        for kind, record in variants(section)[1].items() if section != "preset" else ():
            wanted |= {(section, kind, key) for key in record.model_fields}
    assert {(doc.section, doc.kind, doc.key) for doc in DOCS} == wanted
    assert len(wanted) > 100


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: f"{doc.path}-{doc.kind}")
def test_a_key_has_meaning_effect_values_and_a_number_its_unit(doc):
    assert doc.summary
    assert doc.effect
    assert doc.values
    assert bool(doc.unit) == ("number" in doc.values), doc


@pytest.mark.parametrize("name", preset_names())
def test_a_commented_preset_is_the_same_run(tmp_path: Path, name: str):
    text = commented_toml(load_config(name))
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    assert load_config(str(path)) == load_config(name)
    keys = re.findall(r"^\w+ = ", text, re.M)
    assert text.count("# ") == len(keys)


LEAST = """
[model]
kind = "linear"
input_dim = 4
[data]
source = "synthetic"
[optimizer]
kind = "sgd"
learning_rate = 0.1
[batch]
sequences = 2
"""


def test_the_least_file_has_the_defaults_of_the_page_and_needs_no_steps_and_no_schedule(tmp_path: Path):
    path = tmp_path / "least.toml"
    path.write_text(LEAST)
    config = load_config(str(path))
    assert (config.steps, config.schedule.kind) == (None, "constant")
    tree = config.model_dump(mode="json")
    for doc in DOCS:
        values = tree[doc.section] if doc.section else tree
        is_set = doc.kind in ("", values.get("kind"), values.get("source"))
        if is_set and doc.default and "`" not in doc.default:
            read = tomllib.loads(f"value = {doc.default}")["value"]
            assert read == ("none" if values[doc.key] is None else values[doc.key]), doc.path


def test_training_without_steps_says_what_is_missing():
    config = load_config("bytes-nano", ["steps=none"])
    with pytest.raises(InputError, match="bytes-nano: steps is missing") as caught:
        trainable(config)
    assert "--steps 1000" in caught.value.hint
    assert trainable(config, 7).steps == 7
    assert trainable(load_config("bytes-nano"), 7).steps == 20
    cosine = overridden(config, ["schedule.kind=cosine", "schedule.warmup_steps=9"])
    with pytest.raises(InputError, match=r"warmup_steps = 9 is not below steps = 7"):
        trainable(cosine, 7)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (["schedule.kind=constant"], 1),
        (["schedule.kind=cosine", "schedule.warmup_steps=9"], 10),
        (["schedule.kind=stable-then-decay", "schedule.warmup_steps=9", "schedule.decay_steps=5"], 14),
    ],
)
def test_a_schedule_without_steps_has_the_fewest_that_it_fits_into(schedule: list[str], steps: int):
    config = load_config("bytes-nano", ["steps=none", *schedule])
    assert config.horizon_steps == steps
    assert trainable(config, steps).horizon_steps == steps


def test_every_synonym_leads_to_a_key_or_value_that_there_is():
    paths, (keys, values_elsewhere) = {doc.path for doc in DOCS}, names_elsewhere()
    assert set(keys) <= paths
    for path, values in values_elsewhere.items():
        if path == "preset":
            assert set(values.values()) <= set(preset_names())
            continue
        known = {json.loads(v) for doc in DOCS if doc.path == path for v in re.findall("`(.*?)`", doc.values)}
        assert known, path
        lists = {value for value in values.values() if path == "remat" and value.startswith(SAVE)}
        assert all(load_config("llama3-8b", [f"remat={value}"]).remat == value for value in lists)
        assert set(values.values()) - lists <= known
        assert not set(values) & known, "a value of ours is no synonym"


@pytest.mark.parametrize(
    "name", sorted({*HUGGING_FACE.split(), *MEGATRON.split(), *NANOGPT.split(), *TORCHTITAN.split()})
)
def test_a_name_of_another_program_is_answered_with_a_key_that_can_be_set(name: str):
    key = name.replace("-", "_")
    if key in {doc.path for doc in DOCS}:
        return  # it is the same here
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [f"{key}=1"])
    offered = re.findall(r"'([\w.]+)'", caught.value.hint)
    assert offered, caught.value.hint
    assert caught.value.hint.startswith("did you mean ")
    assert set(offered) <= {doc.path for doc in DOCS}


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model.hidden_size=64", "did you mean 'model.embed_dim'?"),
        ("model.num_layer=2", "did you mean 'num_layers'?"),
        ("num_layers=2", "did you mean 'model.num_layers'?"),
        ("lr=0.1", "did you mean 'optimizer.learning_rate'?"),
        ("optimizer.lr=0.1", "did you mean 'optimizer.learning_rate'?"),
        ("batch_size=2", "did you mean 'batch.sequences'?"),
        ("training.seq_len=64", "training.seq_len is batch.sequence_length here"),
        ("model.learning_rate=1.0", "did you mean 'optimizer.learning_rate'?"),
        ("optimizer.eps=1.0", "did you mean 'optimizer.epsilon'?"),
        ("optimizer.momentum=0.9", "it is a key of optimizer.kind = 'sgd' or 'rmsprop'"),
        ("precision=bfloat16", "did you mean 'bf16'?"),
        ("schedule.kind=wsd", "did you mean 'stable-then-decay'?"),
        ("model.position=rope", "did you mean 'rotary'?"),
    ],
)
def test_a_name_from_elsewhere_is_answered_by_its_meaning(override: str, hint: str):
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [override])
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "offered", "not_offered"),
    [
        ("mistral-7b", "'mistral-7b-v0.1' or 'mistral-7b-v0.3'?", "mixtral"),
        ("someone/Llama-3.1-8B-Base", "llama-3.1-8b", "70b"),
        ("llama2-13b", "did you mean 'llama2-7b'?", "llama-1b"),
        ("llama3", "'llama3-405b' or 'llama3-70b' or 'llama3-8b'", "llama2"),
        ("gpt2-small", "did you mean 'gpt2-124m'?", "1.5b"),
        ("falcon-72b", "the nearest in size are qwen2.5-72b and ", "8b"),
    ],
)
def test_an_unknown_preset_is_answered_by_letters_and_by_size(name: str, offered: str, not_offered: str):
    with pytest.raises(InputError) as caught:
        load_config(name)
    assert offered in caught.value.hint
    assert not_offered not in caught.value.hint
