"""Recipes: what a file of each trainer means here, and which of its keys are refused."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from meshwright.config import RunConfig
from meshwright.contrib.gate._tables import table
from meshwright.errors import InputError

TITAN = """
[job]
dump_folder = "out"
[metrics]
log_freq = 10
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 4096
steps = 500
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[checkpoint]
enable = false
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: some/data
    type: alpaca
sequence_len: 2048
sample_packing: true
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, down_proj]
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
special_tokens:
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds.json
dataset: mine
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
num_train_epochs: 3.0
bf16: true
"""
ZERO3 = json.dumps(
    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"}}
)
ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 100,
    "bf16": True,
    "gradient_checkpointing": False,
    "optim": "adamw_torch_fused",
    "fsdp": "full_shard auto_wrap",
    "max_length": 512,
}
MEGATRON = """
--num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12
--group-query-attention --num-query-groups 4 --seq-length 1024 --max-position-embeddings 1024
--position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0 --vocab-size 50257
--micro-batch-size 1 --global-batch-size 64 --train-samples 6400 --bf16 --lr 1e-4
--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --recompute-activations
"""


def test_a_job_of_torchtitan_is_a_run_of_ours(gated):
    made, asked = gated({"job.toml": TITAN}, on="16xH100")
    config = asked.config
    assert (asked.layout, config.batch.sequences, config.batch.microbatch_sequences) == (
        "fsdp=4,tensor=4",
        8,
        2,
    )
    assert (config.batch.sequence_length, config.steps, config.remat) == (4096, 500, "alternate-dots")
    assert (config.precision, config.gradient_sum, config.state.parameters) == ("bf16", "all-fp32", "fp32")
    assert config.model.num_parameters == 8_030_261_248
    assert made.to_dict()["program"]["understood"]["training.seq_len"] == "batch.sequence_length"
    assert made.to_dict()["program"]["ignored"]["job.dump_folder"] == "files, logs and their places"


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ('mode = "selective"', 'mode = "full"', "remat", "full"),
        ('selective_ac_option = "op"', 'selective_ac_option = "2"', "remat", "full-every-2"),
        ('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]', "precision", "fp8"),
        ("steps = 500", 'steps = 500\ndtype = "bfloat16"', "state.moments", "bf16"),
        ("steps = 500", "steps = 500\nglobal_batch_size = 64", "batch.sequences", 64),
        ("tensor_parallel_degree = 4", "pipeline_parallel_degree = 4", "layout", "stage=4,fsdp=4"),
        ("tensor_parallel_degree = 4", "context_parallel_degree = 4", "zero1", True),
    ],
)
def test_a_key_of_torchtitan_changes_ours(gated, old, new, key, value):
    _, asked = gated({"job.toml": TITAN.replace(old, new)}, on="16xH100")
    got = asked.config
    for part in key.split("."):
        got = getattr(got, part)
    assert got == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("enable_cpu_offload = true", "weigh it as --set offload=state"),
        ("wibble = 3", "training.wibble = 3: it is not known here"),
        ("seq_length = 3", "did you mean training.seq_len?"),
    ],
)
def test_a_key_that_is_not_understood_is_refused_by_name_and_can_be_left_out(gated, line, words):
    text = TITAN.replace("[training]", f"[training]\n{line}")
    with pytest.raises(InputError, match=r"keys that may change what is weighed") as refused:
        gated({"job.toml": text}, on="16xH100")
    assert words in str(refused.value)
    made, _ = gated({"job.toml": text}, on="16xH100", ignore=(f"training.{line.split()[0]}",))
    assert made.may_go


def test_a_refused_key_that_is_switched_off_is_no_use_of_it(gated):
    gated({"job.toml": TITAN.replace("[training]", "[training]\nenable_cpu_offload = false")}, on="16xH100")


def test_qlora_of_axolotl_is_adapters_beside_four_bits(gated):
    made, asked = gated({"lora.yaml": AXOLOTL}, on="4xH100")
    config = asked.config
    assert (config.lora.rank, config.lora.base, config.lora.targets) == (32, "nf4", ("q_proj", "down_proj"))
    assert (asked.layout, config.batch.sequences, config.batch.microbatch_sequences) == ("data=4", 32, 2)
    assert (config.state.moments, config.remat, config.precision) == ("8bit", "full", "bf16")
    assert "the model NousResearch/Llama-3.2-1B is taken to have the sizes of Llama-3.2-1B" in made.notes


def test_parameters_stay_in_bf16_without_fsdp_and_are_fp32_with_it(gated):
    full = AXOLOTL.replace("adapter: qlora", "adapter:").replace("load_in_4bit: true", "load_in_4bit: false")
    _, asked = gated({"full.yaml": full}, on="4xH100")
    assert (asked.config.state.parameters, asked.config.gradient_sum) == ("bf16", "bf16")
    _, asked = gated(
        {"full.yaml": f"{full}\nfsdp_version: 2\nfsdp_config:\n  offload_params: true\n"}, on="4xH100"
    )
    assert (asked.config.state.parameters, asked.layout, asked.config.offload) == ("fp32", "fsdp=4", "state")


def test_llama_factory_with_zero3_keeps_a_copy_in_fp32(gated):
    made, asked = gated({"sft.yaml": FACTORY, "ds.json": ZERO3}, on="8xH100")
    config = asked.config
    assert (asked.layout, config.state.master, config.offload) == ("fsdp=8", "fp32", "optimizer")
    assert (config.batch.sequences, config.remat) == (16, "full")
    assert any("full length of cutoff_len" in note for note in made.notes)


def test_a_deepspeed_file_that_is_not_there_is_an_error(gated):
    with pytest.raises(InputError, match=r"ds\.json.*which is no file here"):
        gated({"sft.yaml": FACTORY}, on="8xH100")


def test_training_arguments_need_a_model_and_take_the_callers(gated):
    text = json.dumps(ARGUMENTS)
    with pytest.raises(InputError, match="names no model"):
        gated({"args.json": text}, on="8xH100")
    made, asked = gated({"args.json": text}, on="8xH100", model="Qwen/Qwen3-0.6B")
    config = asked.config
    assert (asked.layout, config.batch.sequences, config.steps, config.remat) == ("fsdp=8", 64, 100, "none")
    assert any("loaded in fp32" in note for note in made.notes)


def test_arguments_of_megatron_describe_a_model(gated):
    made, asked = gated({"args.txt": MEGATRON}, on="8xH100")
    config, model = asked.config, asked.config.model
    assert (asked.layout, config.zero1, config.remat) == ("data=4,tensor=2", True, "dots")
    assert (config.state.parameters, config.state.master) == ("bf16", "fp32")
    assert (config.batch.sequences, config.batch.microbatch_sequences, config.steps) == (64, 1, 100)
    assert (model.num_kv_heads, model.mlp, model.vocab_size, model.rope_theta) == (
        4,
        "gated",
        50432,
        500_000.0,
    )
    assert made.job.program.kind == "Megatron-LM's arguments"


def test_experts_of_megatron_take_their_devices_from_data(gated):
    text = f"{MEGATRON} --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4"
    _, asked = gated({"args.txt": text}, on="16xH100")
    assert (asked.layout, asked.config.model.num_experts) == ("data=2,expert=4,tensor=2", 8)
    with pytest.raises(InputError, match="spreads experts over 4 devices, and its data axis has 2"):
        gated({"args.txt": text}, on="4xH100")


def test_megatron_without_a_vocabulary_is_refused(gated):
    with pytest.raises(InputError, match="does not say how large the vocabulary is"):
        gated({"args.txt": MEGATRON.replace("--vocab-size 50257", "")}, on="8xH100")


def test_arguments_that_describe_a_model_otherwise_need_its_name(gated):
    text = f"{MEGATRON} --multi-latent-attention"
    with pytest.raises(InputError, match="name one of the same sizes"):
        gated({"args.txt": text}, on="8xH100")
    _, asked = gated({"args.txt": text}, on="8xH100", model="meta-llama/Llama-3.2-1B")
    assert asked.config.model.num_layers == 16


def test_devices_that_its_axes_do_not_share_out_are_an_error(gated):
    with pytest.raises(InputError, match="which do not divide 6 devices"):
        gated({"job.toml": TITAN}, on="6xH100")
    text = TITAN.replace("data_parallel_shard_degree = -1", "data_parallel_shard_degree = 2")
    with pytest.raises(InputError, match="uses 8 of 16 devices"):
        gated({"job.toml": text}, on="16xH100")


def test_your_own_settings_count_more_than_the_recipes(gated):
    _, asked = gated({"job.toml": TITAN}, on="16xH100", overrides=["remat=full", "steps=7"])
    assert (asked.config.remat, asked.config.steps) == ("full", 7)


KINDS = sorted(
    each.name.removesuffix(".toml") for each in (files("meshwright.contrib.gate") / "tables").iterdir()
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_puts_each_key_in_one_place_and_names_keys_of_ours(kind):
    known = table(kind)
    places = [set(known.understood), set(known.ignored), set(known.refused)]
    assert len(set.union(*places)) == sum(map(len, places))
    elsewhere = {"fleet", "time limit", "program"}
    for words in known.understood.values():
        for name in words.split(", "):
            assert name in elsewhere or name.partition(".")[0] in RunConfig.model_fields, name
