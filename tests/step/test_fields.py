"""Every field of a run's configuration does something: change it, and the step's program changes, or what
is listed here as changed instead."""

import functools
from contextlib import closing

import jax
import numpy as np
import pytest

from meshwright.config import Layout, RunConfig, StateKeys, load_config, variants
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.sharding import mesh_of
from meshwright.trainer.data import open_data
from meshwright.trainer.loop import RunFolder, RunRequest, devices_of, run_training
from meshwright.trainer.step import build_step

pytestmark = pytest.mark.quick

NANO = ("bytes-nano", "data.source=synthetic")
EXPERTS = ("bytes-moe", "data.source=synthetic")
GPT = (*NANO, "model.position=learned", "model.rope_theta=none", "model.max_positions=64")
STRETCHED = (*NANO, "model.rope_factor=4.0", "model.rope_original_positions=16")
ONES = [1.0] * 8  # one for each pair of a head's 16 numbers
LONGROPE = (
    *(*NANO, "model.rope_stretching=longrope", "model.rope_original_positions=32"),
    *(f"model.rope_short_factors={ONES}", f"model.rope_long_factors={ONES}"),
)
WINDOWS = (*NANO, "model.window=16", "model.global_every=2")
LATENT = (*NANO, "model.num_kv_heads=4", "model.latent_rank=32", "model.rotary_dim=8")
ROUTED = (*EXPERTS, "model.router=sigmoid")
GROUPS = (*ROUTED, "model.router_groups=2", "model.router_groups_chosen=1")
DENSE = (*EXPERTS, "model.num_dense_layers=1", "model.dense_mlp_dim=64")
LORA = (*NANO, "lora.rank=4", "precision=bf16")
COSINE = (*NANO, "schedule.kind=cosine", "schedule.warmup_steps=5")
SGD = (*NANO, "optimizer.kind=sgd", "optimizer.learning_rate=0.1")
ADAGRAD = (*NANO, "optimizer.kind=adagrad", "optimizer.epsilon=1e-5")
RMSPROP, ADAM, LION, ADAFACTOR, MUON = (
    ("cruncher", f"optimizer.kind={kind}") for kind in ("rmsprop", "adam", "lion", "adafactor", "muon")
)
RESNET = ("resnet18-fashion", "data.source=synthetic", "model.image_size=32", "batch.sequences=8")
BIASED = ("line", "optimizer.weight_decay=0.1")  # a weight and a bias
LINEAR = ("cruncher", "schedule.kind=linear", "schedule.warmup_steps=5")
STABLE = ("cruncher", "schedule.kind=stable-then-decay", "schedule.warmup_steps=5", "schedule.decay_steps=8")
ROOT = ("cruncher", "schedule.kind=inverse-square-root", "schedule.warmup_steps=5")

CRUNCHER_SCALED = ("cruncher", "schedule.scale=linear", "batch.base_sequences=2")

# The field, the run it belongs to, and what it is changed to (with what must change along).
PROGRAM = {
    "model.linear.kind": (("linear",), "model.kind=cruncher", "model.width=16", "model.num_layers=1"),
    "model.linear.input_dim": (("linear",), "model.input_dim=8"),
    "model.linear.bias": (("linear",), "model.bias=true"),
    "model.cruncher.kind": (("cruncher",), "model.kind=linear", "model.input_dim=64"),
    "model.cruncher.width": (("cruncher",), "model.width=32"),
    "model.cruncher.num_layers": (("cruncher",), "model.num_layers=3"),
    "model.lenet.kind": (("lenet",), "model.kind=linear", "model.input_dim=64"),
    "model.resnet18.kind": (RESNET, "model.kind=lenet"),
    "model.resnet18.image_size": (RESNET, "model.image_size=33"),
    "model.transformer.kind": (
        (*NANO, "remat=none", "batch.sequence_length=1"),
        "model.kind=linear",
        "model.input_dim=64",
    ),
    "model.transformer.num_layers": (NANO, "model.num_layers=3"),
    "model.transformer.embed_dim": (NANO, "model.embed_dim=32", "model.head_dim=16"),
    "model.transformer.num_heads": (NANO, "model.num_heads=2", "model.head_dim=16"),
    "model.transformer.num_kv_heads": (NANO, "model.num_kv_heads=4"),
    "model.transformer.head_dim": (NANO, "model.head_dim=8"),
    "model.transformer.mlp_dim": (NANO, "model.mlp_dim=64"),
    "model.transformer.vocab_size": (NANO, "model.vocab_size=128"),
    "model.transformer.norm": (NANO, "model.norm=layer"),
    "model.transformer.norm_epsilon": (NANO, "model.norm_epsilon=1e-6"),
    "model.transformer.position": (NANO, *GPT[2:]),
    "model.transformer.max_positions": (GPT, "model.max_positions=128"),
    "model.transformer.rope_theta": (NANO, "model.rope_theta=500.0"),
    "model.transformer.mlp": (NANO, "model.mlp=plain"),
    "model.transformer.activation": (NANO, "model.activation=gelu"),
    "model.transformer.tied_embeddings": (NANO, "model.tied_embeddings=true"),
    "model.transformer.bias": (NANO, "model.bias=true"),
    "model.transformer.dropout": (NANO, "model.dropout=0.1"),
    "model.transformer.unroll": (NANO, "model.unroll=true"),
    "model.transformer.loss_chunk": (NANO, "model.loss_chunk=16"),
    "model.transformer.num_experts": (EXPERTS, "model.num_experts=8"),
    "model.transformer.experts_per_token": (EXPERTS, "model.experts_per_token=1"),
    "model.transformer.num_shared_experts": (EXPERTS, "model.num_shared_experts=1"),
    "model.transformer.layer_pattern": (NANO, "model.layer_pattern=attention mlp"),
    "model.transformer.attention_gate": (NANO, "model.attention_gate=true"),
    "model.transformer.expert_norms": (EXPERTS, "model.expert_norms=true"),
    "model.transformer.value_norm": (NANO, "model.value_norm=true"),
    "model.transformer.layer_factor": (NANO, "model.layer_factor=true"),
    "model.transformer.global_head_dim": (WINDOWS, "model.global_head_dim=8"),
    "model.transformer.global_kv_heads": (
        (*WINDOWS, "model.global_head_dim=8"),
        "model.global_kv_heads=1",
    ),
    "model.transformer.global_key_is_value": (
        (*WINDOWS, "model.global_head_dim=8"),
        "model.global_key_is_value=true",
    ),
    "model.transformer.capacity_factor": (EXPERTS, "model.capacity_factor=2.0"),
    "model.transformer.balancing_loss": (EXPERTS, "model.balancing_loss=0.1"),
    "model.transformer.rope_factor": (STRETCHED, "model.rope_factor=8.0"),
    "model.transformer.rope_stretching": (STRETCHED, "model.rope_stretching=yarn"),
    "model.transformer.rope_magnitude": (STRETCHED, "model.rope_magnitude=1.0"),
    "model.transformer.rope_low_factor": (STRETCHED, "model.rope_low_factor=2.0"),
    "model.transformer.rope_high_factor": (STRETCHED, "model.rope_high_factor=8.0"),
    "model.transformer.rope_original_positions": (STRETCHED, "model.rope_original_positions=32"),
    "model.transformer.rope_short_factors": (
        (*LONGROPE, "model.rope_original_positions=4096"),
        f"model.rope_short_factors={[2.0, *ONES[1:]]}",
    ),
    "model.transformer.rope_long_factors": (LONGROPE, f"model.rope_long_factors={[2.0, *ONES[1:]]}"),
    "model.transformer.rope_gain": (LONGROPE, "model.rope_gain=1.5"),
    "model.transformer.rope_interleaved": (NANO, "model.rope_interleaved=true"),
    "model.transformer.rotary_share": (NANO, "model.rotary_share=0.5"),
    "model.transformer.rope_local_theta": (WINDOWS, "model.rope_local_theta=500.0"),
    "model.transformer.window": (NANO, "model.window=16"),
    "model.transformer.global_every": (WINDOWS, "model.global_every=none"),
    "model.transformer.qkv_bias": (NANO, "model.qkv_bias=true"),
    "model.transformer.qk_norm": (NANO, "model.qk_norm=head"),
    "model.transformer.norm_place": (NANO, "model.norm_place=after"),
    "model.transformer.parallel": (NANO, "model.parallel=true"),
    "model.transformer.scaled_embedding": (NANO, "model.scaled_embedding=true"),
    "model.transformer.position_growth": (
        (*STRETCHED, "model.rope_original_positions=8"),
        "model.position_growth=0.1",
    ),
    "model.transformer.expert_bias": (EXPERTS, "model.expert_bias=true"),
    "model.transformer.output_bias": (NANO, "model.output_bias=true"),
    "model.transformer.attention_sinks": (NANO, "model.attention_sinks=true"),
    "model.transformer.gate_limit": (NANO, "model.gate_limit=5.0"),
    "model.transformer.rope_rounded": (
        (*STRETCHED, "model.rope_stretching=yarn"),
        "model.rope_rounded=false",
    ),
    "model.transformer.mtp_layers": (NANO, "model.mtp_layers=1"),
    "model.transformer.mtp_loss": ((*NANO, "model.mtp_layers=1"), "model.mtp_loss=0.1"),
    "model.transformer.norm_bias": ((*NANO, "model.norm=layer"), "model.norm_bias=true"),
    "model.transformer.qk_norm_turned": ((*NANO, "model.qk_norm=head"), "model.qk_norm_turned=true"),
    "model.transformer.one_norm": ((*NANO, "model.parallel=true"), "model.one_norm=true"),
    "model.transformer.no_rope_every": (NANO, "model.no_rope_every=2"),
    "model.transformer.embedding_scale": (NANO, "model.embedding_scale=2.0"),
    "model.transformer.residual_scale": (NANO, "model.residual_scale=0.5"),
    "model.transformer.score_scale": (NANO, "model.score_scale=0.5"),
    "model.transformer.logit_scale": (NANO, "model.logit_scale=0.5"),
    "model.transformer.shared_mlp_dim": (EXPERTS, "model.shared_mlp_dim=96"),
    "model.transformer.shared_gate": ((*EXPERTS, "model.num_shared_experts=1"), "model.shared_gate=true"),
    "model.transformer.latent_rank": (LATENT, "model.latent_rank=16"),
    "model.transformer.query_rank": (LATENT, "model.query_rank=16"),
    "model.transformer.rotary_dim": (LATENT, "model.rotary_dim=4"),
    "model.transformer.value_dim": (LATENT, "model.value_dim=8"),
    "model.transformer.score_dim": (NANO, "model.score_dim=4"),
    "model.transformer.score_cap": (NANO, "model.score_cap=50.0"),
    "model.transformer.logit_cap": (NANO, "model.logit_cap=30.0"),
    "model.transformer.num_dense_layers": (EXPERTS, *DENSE[2:]),
    "model.transformer.dense_mlp_dim": (DENSE, "model.dense_mlp_dim=32"),
    "model.transformer.router": (EXPERTS, "model.router=sigmoid"),
    "model.transformer.router_normalised": (ROUTED, "model.router_normalised=false"),
    "model.transformer.router_scale": (ROUTED, "model.router_scale=2.5"),
    "model.transformer.router_bias": (ROUTED, "model.router_bias=true"),
    "model.transformer.router_bias_rate": ((*ROUTED, "model.router_bias=true"), "model.router_bias_rate=0.1"),
    "model.transformer.router_groups": (ROUTED, *GROUPS[3:]),
    "model.transformer.router_groups_chosen": (GROUPS, "model.router_groups_chosen=2"),
    "optimizer.adamw.kind": (NANO, *SGD[2:]),
    "optimizer.adamw.learning_rate": (NANO, "optimizer.learning_rate=1e-4"),
    "optimizer.adamw.beta1": (NANO, "optimizer.beta1=0.8"),
    "optimizer.adamw.beta2": (NANO, "optimizer.beta2=0.99"),
    "optimizer.adamw.epsilon": (NANO, "optimizer.epsilon=1e-6"),
    "optimizer.adamw.weight_decay": (NANO, "optimizer.weight_decay=0.2"),
    "optimizer.adamw.weight_decay_on": (NANO, "optimizer.weight_decay_on=all"),
    "optimizer.adamw.clip_norm": (NANO, "optimizer.clip_norm=none"),
    "optimizer.sgd.kind": (SGD, "optimizer.kind=adamw"),
    "optimizer.sgd.learning_rate": (SGD, "optimizer.learning_rate=0.2"),
    "optimizer.sgd.momentum": (SGD, "optimizer.momentum=0.9"),
    "optimizer.sgd.nesterov": (("linear", "optimizer.momentum=0.9"), "optimizer.nesterov=true"),
    "optimizer.sgd.weight_decay": (SGD, "optimizer.weight_decay=0.1"),
    "optimizer.sgd.weight_decay_on": (BIASED, "optimizer.weight_decay_on=all"),
    "optimizer.sgd.clip_norm": (SGD, "optimizer.clip_norm=0.5"),
    "optimizer.adagrad.kind": (ADAGRAD, "optimizer.kind=sgd"),
    "optimizer.adagrad.learning_rate": (ADAGRAD, "optimizer.learning_rate=0.2"),
    "optimizer.adagrad.epsilon": (ADAGRAD, "optimizer.epsilon=1e-3"),
    "optimizer.adagrad.weight_decay": (ADAGRAD, "optimizer.weight_decay=0.5"),
    "optimizer.adagrad.weight_decay_on": (
        (*BIASED, "optimizer.kind=adagrad"),
        "optimizer.weight_decay_on=all",
    ),
    "optimizer.adagrad.epsilon_under_root": (ADAGRAD, "optimizer.epsilon_under_root=true"),
    "optimizer.adagrad.clip_norm": (ADAGRAD, "optimizer.clip_norm=0.5"),
    "optimizer.rmsprop.kind": (RMSPROP, "optimizer.kind=sgd"),
    "optimizer.rmsprop.learning_rate": (RMSPROP, "optimizer.learning_rate=0.2"),
    "optimizer.rmsprop.decay": (RMSPROP, "optimizer.decay=0.5"),
    "optimizer.rmsprop.epsilon": (RMSPROP, "optimizer.epsilon=1e-3"),
    "optimizer.rmsprop.centered": (RMSPROP, "optimizer.centered=true"),
    "optimizer.rmsprop.momentum": (RMSPROP, "optimizer.momentum=0.9"),
    "optimizer.rmsprop.weight_decay": (RMSPROP, "optimizer.weight_decay=0.5"),
    "optimizer.rmsprop.weight_decay_on": (
        (*BIASED, "optimizer.kind=rmsprop"),
        "optimizer.weight_decay_on=all",
    ),
    "optimizer.rmsprop.clip_norm": (RMSPROP, "optimizer.clip_norm=0.5"),
    "optimizer.rmsprop.nesterov": ((*RMSPROP, "optimizer.momentum=0.9"), "optimizer.nesterov=true"),
    "optimizer.adam.kind": (ADAM, "optimizer.kind=sgd"),
    "optimizer.adam.learning_rate": (ADAM, "optimizer.learning_rate=0.2"),
    "optimizer.adam.beta1": (ADAM, "optimizer.beta1=0.5"),
    "optimizer.adam.beta2": (ADAM, "optimizer.beta2=0.5"),
    "optimizer.adam.epsilon": (ADAM, "optimizer.epsilon=1e-3"),
    "optimizer.adam.weight_decay": (ADAM, "optimizer.weight_decay=0.5"),
    "optimizer.adam.weight_decay_on": ((*BIASED, "optimizer.kind=adam"), "optimizer.weight_decay_on=all"),
    "optimizer.adam.clip_norm": (ADAM, "optimizer.clip_norm=0.5"),
    "optimizer.lion.kind": (LION, "optimizer.kind=sgd"),
    "optimizer.lion.learning_rate": (LION, "optimizer.learning_rate=0.2"),
    "optimizer.lion.beta1": (LION, "optimizer.beta1=0.5"),
    "optimizer.lion.beta2": (LION, "optimizer.beta2=0.5"),
    "optimizer.lion.weight_decay": (LION, "optimizer.weight_decay=0.2"),
    "optimizer.lion.weight_decay_on": ((*BIASED, "optimizer.kind=lion"), "optimizer.weight_decay_on=all"),
    "optimizer.lion.clip_norm": (LION, "optimizer.clip_norm=0.5"),
    "optimizer.adafactor.kind": (ADAFACTOR, "optimizer.kind=sgd"),
    "optimizer.adafactor.learning_rate": (ADAFACTOR, "optimizer.learning_rate=0.2"),
    "optimizer.adafactor.decay_exponent": (ADAFACTOR, "optimizer.decay_exponent=0.5"),
    "optimizer.adafactor.least_factored": (ADAFACTOR, "optimizer.least_factored=8"),
    "optimizer.adafactor.clip_rms": (ADAFACTOR, "optimizer.clip_rms=none"),
    "optimizer.adafactor.scale_by_parameter": (ADAFACTOR, "optimizer.scale_by_parameter=false"),
    "optimizer.adafactor.momentum": (ADAFACTOR, "optimizer.momentum=0.5"),
    "optimizer.adafactor.weight_decay": (ADAFACTOR, "optimizer.weight_decay=0.2"),
    "optimizer.adafactor.clip_norm": (ADAFACTOR, "optimizer.clip_norm=0.5"),
    "optimizer.adafactor.weight_decay_on": (
        (*BIASED, "optimizer.kind=adafactor"),
        "optimizer.weight_decay_on=all",
    ),
    "optimizer.muon.kind": (MUON, "optimizer.kind=sgd"),
    "optimizer.muon.learning_rate": (MUON, "optimizer.learning_rate=0.2"),
    "optimizer.muon.momentum": (MUON, "optimizer.momentum=0.5"),
    "optimizer.muon.nesterov": (MUON, "optimizer.nesterov=false"),
    "optimizer.muon.newton_schulz_steps": (MUON, "optimizer.newton_schulz_steps=4"),
    "optimizer.muon.update_rms": (MUON, "optimizer.update_rms=none"),
    "optimizer.muon.adamw_beta1": (MUON, "optimizer.adamw_beta1=0.5"),
    "optimizer.muon.adamw_beta2": (MUON, "optimizer.adamw_beta2=0.5"),
    "optimizer.muon.adamw_epsilon": (MUON, "optimizer.adamw_epsilon=1e-3"),
    "optimizer.muon.weight_decay": (MUON, "optimizer.weight_decay=0.2"),
    "optimizer.muon.weight_decay_on": ((*BIASED, "optimizer.kind=muon"), "optimizer.weight_decay_on=all"),
    "optimizer.muon.clip_norm": (MUON, "optimizer.clip_norm=0.5"),
    "schedule.constant.kind": (NANO, *COSINE[2:]),
    "schedule.cosine.kind": (COSINE, "schedule.kind=constant"),
    "schedule.cosine.warmup_steps": (COSINE, "schedule.warmup_steps=6"),
    "schedule.cosine.final_fraction": (COSINE, "schedule.final_fraction=0.0"),
    "schedule.constant.warmup_steps": (NANO, "schedule.warmup_steps=5"),
    "schedule.linear.kind": (LINEAR, "schedule.kind=cosine"),
    "schedule.linear.warmup_steps": (LINEAR, "schedule.warmup_steps=6"),
    "schedule.linear.final_fraction": (LINEAR, "schedule.final_fraction=0.5"),
    "schedule.stable-then-decay.kind": (STABLE, "schedule.kind=cosine"),
    "schedule.stable-then-decay.warmup_steps": (STABLE, "schedule.warmup_steps=6"),
    "schedule.stable-then-decay.decay_steps": (STABLE, "schedule.decay_steps=5"),
    "schedule.stable-then-decay.final_fraction": (STABLE, "schedule.final_fraction=0.5"),
    "schedule.inverse-square-root.kind": (ROOT, "schedule.kind=cosine"),
    "schedule.inverse-square-root.warmup_steps": (ROOT, "schedule.warmup_steps=6"),
    "schedule.constant.scale": (CRUNCHER_SCALED, "schedule.scale=sqrt"),
    "schedule.cosine.scale": ((*CRUNCHER_SCALED, *COSINE[2:]), "schedule.scale=sqrt"),
    "schedule.linear.scale": ((*CRUNCHER_SCALED, *LINEAR[1:]), "schedule.scale=sqrt"),
    "schedule.stable-then-decay.scale": ((*CRUNCHER_SCALED, *STABLE[1:]), "schedule.scale=sqrt"),
    "schedule.inverse-square-root.scale": ((*CRUNCHER_SCALED, *ROOT[1:]), "schedule.scale=sqrt"),
    "precision": (NANO, "precision=bf16"),
    "gradient_sum": ((*NANO, "precision=bf16", "batch.microbatch_sequences=4"), "gradient_sum=bf16"),
    "state.parameters": ((*NANO, "precision=bf16"), "state.parameters=bf16"),
    "state.moments": (NANO, "state.moments=bf16"),
    "optimizer.muon.newton_schulz_format": (MUON, "optimizer.newton_schulz_format=bf16"),
    "state.master": ((*NANO, "precision=bf16", "state.parameters=bf16"), "state.master=fp32"),
    "state.rounding": ((*NANO, "precision=bf16", "state.parameters=bf16"), "state.rounding=stochastic"),
    "remat": (NANO, "remat=full"),
    "layer_loop": (NANO, "layer_loop=unroll"),
    "zero1": (NANO, "zero1=true"),
    "offload": ((*NANO, "remat=full"), "offload=activations"),
    "lora.rank": (NANO, "lora.rank=4"),
    "lora.alpha": (LORA, "lora.alpha=16.0"),
    "lora.targets": (LORA, 'lora.targets=["q_proj"]'),
    "lora.base": (LORA, "lora.base=fp32"),
    "batch.sequences": (NANO, "batch.sequences=16"),
    "batch.sequence_length": (NANO, "batch.sequence_length=32"),
    "batch.base_sequences": (CRUNCHER_SCALED, "batch.base_sequences=3"),
    "batch.microbatch_sequences": (NANO, "batch.microbatch_sequences=4"),
    "steps": (COSINE, "steps=30"),  # where the cosine ends; also how long `train` runs, below
}
# What acts elsewhere, and why; each has its own test below.
ELSEWHERE = {
    "name": "names the run in records and reports, and is part of the cache's key",
    "layout": "says which mesh the step is built on",
    "fold_experts": "spreads experts over devices, and here is one: tests/test_layouts_of_options.py",
    "expert_domains": "is of experts over devices, and here is one: tests/contrib/experts/test_dropless.py",
    "batch.sequences_per_replica": "gives batch.sequences: tests/config/test_layout_checks.py",
    "pipeline": "is of the stages, and here is one: tests/contrib/pipelines/test_pipeline.py",
    "pipeline_chunks": "is of the stages, and here is one: tests/contrib/pipelines/test_pipeline.py",
    "deterministic": "chooses the compiler's options: tests/compiler/test_options.py",
    "autotune_results": "chooses the compiler's kernels: tests/compiler/test_options.py",
    "seed": "is an argument of the program that makes the state, and seeds the data",
    "data.synthetic.source": "chooses what the step's batches hold",
    "data.idx.source": "chooses what the step's batches hold; adds weights: tests/step/test_build.py",
    "data.idx.folder": "says whose images they are: tests/data/test_order.py",
    "model.resnet18.batch_norm": "is of replicas, here one: tests/contrib/toy_models/test_normalisation.py",
    "data.line.source": "chooses what the step's batches hold",
    "data.line.slope": "is of the points that a batch holds",
    "data.line.intercept": "is of the points that a batch holds",
    "data.line.noise": "is of the points that a batch holds",
    "data.python-stdlib.source": "chooses what the step's batches hold",
    "data.python-stdlib.held_out_fraction": "says which files training does not see",
    "data.text.source": "chooses what the step's batches hold",
    "data.text.path": "says whose text it is: tests/contrib/texts/test_own.py",
    "data.text.tokenizer": "says how it becomes tokens: tests/contrib/texts/test_own.py",
    "data.text.text_key": "says which text of a line is read: tests/contrib/texts/test_own.py",
    "data.text.order": "chooses what the step's batches hold",
    "data.text.documents": "adds segments to the batch: tests/contrib/texts/test_own.py",
    "data.text.end_of_document": "says where the batch's segments end: tests/contrib/texts/test_own.py",
    "data.text.held_out_fraction": "says how much of the text's tail training does not see",
    "data.tokens.source": "chooses what the step's batches hold",
    "data.tokens.path": "says whose tokens they are",
    "data.tokens.dtype": "says how the file's bytes are read",
    "data.tokens.format": "says how the file's bytes are read: tests/data/test_formats.py",
    "data.mixture.source": "chooses what the step's batches hold",
    "data.mixture.path": "says whose tokens they are: tests/contrib/texts/test_mixture.py",
    "data.mixture.order": "chooses what the step's batches hold",
    "data.mixture.documents": "adds segments to the batch: tests/contrib/texts/test_mixture.py",
    "data.mixture.end_of_document": "says where the batch's segments end",
    "data.mixture.held_out_fraction": "says how much of each source's tail training does not see",
    "data.python-stdlib.order": "chooses what the step's batches hold",
    "data.tokens.order": "chooses what the step's batches hold",
    "data.tokens.documents": "adds segments to the batch: tests/step/test_build.py",
    "data.tokens.end_of_document": "says where the batch's segments end",
    "data.tokens.held_out_fraction": "says how much of the file's tail training does not see",
    "data.instructions.source": "adds segments and answers to the batch: tests/step/test_build.py",
    "data.instructions.path": "says whose conversations they are: tests/contrib/texts/test_instructions.py",
    "data.instructions.tokenizer": "says how they become tokens: tests/contrib/texts/test_instructions.py",
    "data.instructions.loss_on": "says what a batch's answers mark: tests/contrib/texts/test_instructions.py",
    "data.instructions.too_long": "says what long conversations do: tests/contrib/texts/test_instructions.py",
    "data.instructions.held_out_fraction": "says how many lines training does not see",
    "model.transformer.expert_load": "multiplies what is predicted",
    "checkpoint.every_steps": "says when the training loop saves",
    "checkpoint.keep_last": "says which checkpoints stay",
    "checkpoint.keep_every": "says which checkpoints stay",
    "faults.bad_step": "says what the training loop does after a step that was not applied",
    "faults.most_bad_steps": "says when the training loop gives up",
    "faults.spike_sigmas": "says what the training loop flags",
    "faults.startup_deadline_seconds": "says when the training loop is held to hang",
    "faults.step_deadline_seconds": "says when the training loop is held to hang",
    "evaluation.every_steps": "says when the training loop evaluates",
    "evaluation.batches": "says over how many batches",
    **{
        f"model.transformer.{key}": "is of a mixer; tests/contrib/state_mixers/test_state_mixers.py"
        for key in StateKeys.model_fields
    },
}


def every_field():
    """Dotted names of all fields, with the kind of record where a section has several."""
    for section in RunConfig.model_fields:
        _, records = variants(section)
        if not records:
            yield section
        for kind, record in records.items():
            yield from (
                ".".join(part for part in (section, kind, field) if part) for field in record.model_fields
            )


def test_the_tables_hold_every_field_there_is():
    assert set(every_field()) == PROGRAM.keys() | ELSEWHERE.keys()
    assert not PROGRAM.keys() & ELSEWHERE.keys()


@functools.cache
def program_of(preset, *overrides):
    """The step's lowered text, without a layout: one device."""
    built = build_step(load_config(preset, overrides), mesh_of((("data", 1),), jax.devices()[:1]))
    return built.step.lower(built.state, built.batch).as_text()


def test_the_same_configuration_gives_the_same_program():
    assert program_of(*NANO) == program_of.__wrapped__(*NANO)


# `make test` runs every sixth, `make test-wide` the others.
FIELDS = [
    pytest.param(field, marks=[pytest.mark.wide] if number % 6 else [])
    for number, field in enumerate(PROGRAM)
]


@pytest.mark.parametrize("field", FIELDS)
def test_changing_a_field_changes_the_program(field):
    base, *changes = PROGRAM[field]
    assert program_of(*base) != program_of.__wrapped__(*base, *changes)


def batch_of(*overrides, split="train"):
    return open_data(load_config("bytes-nano", overrides)).batch(0, split)["tokens"]


def differ(*batches):
    return not any(np.array_equal(batches[0], other) for other in batches[1:])


def test_a_name_is_part_of_the_cache_key_only(tmp_path):
    configs = []
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text('preset = "bytes-nano"\n')
        configs.append(load_config(str(tmp_path / f"{name}.toml")))
    assert [config.name for config in configs] == ["one", "two"]
    assert configs[0].model_copy(update={"name": "two"}) == configs[1]


def test_a_layout_changes_the_mesh_and_with_it_the_program():
    texts = []
    for layout in ("fsdp=4,tensor=2", "data=-1"):
        config = load_config("bytes-nano", (*NANO[1:], f"layout={layout}"))
        mesh = mesh_of(Layout.parse(config.layout).resolve(8).axes, jax.devices())
        built = build_step(config, mesh)
        texts.append(built.step.lower(built.state, built.batch).as_text())
    assert texts[0] != texts[1]


def test_a_seed_changes_the_state_and_the_batches():
    built = build_step(load_config("linear"), mesh_of((("data", 1),), jax.devices()[:1]))
    starts = [built.init(np.uint32(seed)) for seed in (0, 1)]
    assert not np.array_equal(*(start["parameters"]["weight"] for start in starts))
    assert not np.array_equal(*(start["key"] for start in starts))
    for source in ("synthetic", "python-stdlib"):
        assert differ(batch_of(f"data.source={source}"), batch_of(f"data.source={source}", "seed=1"))


def test_data_changes_the_batches(tmp_path):
    random = np.random.default_rng(0)
    for name in ("one", "two"):
        random.integers(256, size=4000).astype("<u4").tofile(tmp_path / f"{name}.bin")
    tokens = ("data.source=tokens", "data.dtype=uint32", f"data.path={tmp_path / 'one.bin'}")
    assert differ(batch_of("data.source=synthetic"), batch_of("data.source=python-stdlib"), batch_of(*tokens))
    assert differ(batch_of(*tokens), batch_of(*tokens, f"data.path={tmp_path / 'two.bin'}"))
    with pytest.raises(InputError, match="every second id is 0"):
        batch_of(*tokens, "data.dtype=uint16")
    for source in (("data.source=python-stdlib",), tokens):
        fractions = ((), ("data.held_out_fraction=0.2",))
        assert differ(*(batch_of(*source, *more, split="held-out") for more in fractions))


@pytest.mark.parametrize("change", ["slope=3.0", "intercept=0.5", "noise=0.1"])
def test_what_a_line_is_changes_its_points(change):
    targets = [
        open_data(load_config("line", more)).batch(0, "train")["targets"]
        for more in ((), (f"data.{change}",))
    ]
    assert differ(*targets)


def test_evaluation_and_steps_change_what_training_does(tmp_path):
    def run(name, *overrides):
        config = load_config(
            "linear", ("steps=4", "evaluation.every_steps=2", "evaluation.batches=1", *overrides)
        )
        fleet, layout, folder = Fleet.parse("1xCPU"), Layout.parse("data=1"), RunFolder(tmp_path / name)
        devices, steps = devices_of(fleet, layout), config.steps
        known = {"config": config, "fleet": fleet, "layout": layout, "devices": devices, "folder": folder}
        known |= {"dataset": open_data(config)}
        with closing(folder):
            folder.create()
            return run_training(RunRequest(**known, steps=steps))[0]

    base = run("base")
    assert (list(base.losses), list(base.held_out_losses)) == ([1, 2, 3, 4], [0, 2, 4])
    assert list(run("steps", "steps=3").losses) == [1, 2, 3]
    assert list(run("every", "evaluation.every_steps=3").held_out_losses) == [0, 3, 4]
    more = run("batches", "evaluation.batches=2")
    assert more.losses == base.losses
    assert more.held_out_losses[0] != base.held_out_losses[0]
