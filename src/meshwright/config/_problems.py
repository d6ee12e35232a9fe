"""Turn pydantic's errors into one `InputError` in words, with dotted paths and near names.

A hint also names the key or value that another program's name stands for. Those names are from Hugging Face
transformers (`config.json` of Llama, Mixtral, GPT-2, DeepSeek and Qwen; `TrainingArguments`), Megatron-LM's
command line, nanoGPT, torchtitan, PyTorch and Orbax, and from common use. They are suggested, never accepted:
a name may mean something slightly different there (a batch for each device, a share instead of a number of
steps).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import InputError, near_names, nearest_name

from ._base import PROBLEMS, Problem, Section, is_table
from ._run import RunConfig

KEYS_ELSEWHERE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        key: tuple(names.split())
        for key, names in {
            "steps": "max_steps max_iters train_iters num_train_steps num_steps total_steps iterations "
            "train_steps training_steps num_train_epochs num_epochs epochs max_epochs train_samples",
            "seed": "random_seed data_seed manual_seed rng_seed",
            "deterministic": "deterministic_mode full_determinism use_deterministic_algorithms",
            "precision": "dtype torch_dtype compute_dtype param_dtype params_dtype mixed_precision "
            "mixed_precision_param bf16 fp16 fp8 tf32 amp autocast fp8_format enable_float8 half",
            "layout": "mesh mesh_shape parallelism tensor_parallel_degree tensor_model_parallel_size "
            "pipeline_parallel_degree pipeline_model_parallel_size context_parallel_degree "
            "context_parallel_size expert_parallel_degree expert_model_parallel_size "
            "data_parallel_replicate_degree data_parallel_shard_degree data_parallel_size fsdp "
            "tp_size pp_size cp_size ep_size dp_size tp pp cp ep dp sequence_parallel device_mesh",
            "remat": "gradient_checkpointing activation_checkpoint activation_checkpointing "
            "recompute_granularity recompute_method recompute_activations selective_ac_option checkpointing",
            "zero1": "use_distributed_optimizer zero_stage zero distributed_optimizer zero_optimization",
            "offload": "enable_cpu_offload cpu_offload optimizer_cpu_offload offload_optimizer "
            "cpu_offloading offload_params activation_offload",
            "pipeline": "pipeline_parallel_schedule pipeline_schedule pp_schedule",
            "model.kind": "model_type architecture architectures arch flavor",
            "model.num_layers": "num_hidden_layers n_layer n_layers num_blocks depth layers "
            "num_decoder_layers decoder_layers",
            "model.embed_dim": "hidden_size n_embd d_model dim hidden_dim model_dim emb_dim embedding_dim "
            "embed_size embedding_size encoder_hidden_size emb_size",
            "model.num_heads": "num_attention_heads n_head n_heads heads attention_heads num_query_heads",
            "model.num_kv_heads": "num_key_value_heads n_kv_heads n_kv_head num_query_groups kv_heads "
            "multi_query_group_num",
            "model.head_dim": "kv_channels d_head head_size attention_head_dim d_kv",
            "model.mlp_dim": "intermediate_size ffn_hidden_size n_inner d_ff ffn_dim ff_dim mlp_ratio "
            "mlp_hidden_dim moe_intermediate_size moe_ffn_hidden_size ffn_dim_multiplier moe_inter_dim "
            "inter_dim",
            "model.vocab_size": "padded_vocab_size vocabulary_size n_vocab num_tokens vocab "
            "make_vocab_size_divisible_by",
            "model.norm": "normalization norm_type norm_layer use_rmsnorm layernorm rmsnorm",
            "model.norm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon "
            "layernorm_epsilon eps",
            "model.position": "position_embedding_type pos_emb position_embeddings pos_embedding "
            "positional_encoding use_rotary_position_embeddings",
            "model.max_positions": "max_position_embeddings n_positions n_ctx max_seq_len max_seq_length",
            "model.rope_theta": "rotary_base rope_base rotary_emb_base rope_scaling rope_parameters",
            "model.mlp": "swiglu gated_linear_unit glu mlp_type geglu use_gated_mlp",
            "model.activation": "hidden_act activation_function act_fn hidden_activation squared_relu",
            "model.tied_embeddings": "tie_word_embeddings untie_embeddings_and_output_weights weight_tying "
            "enable_weight_tying share_embeddings_and_output_weights tie_embeddings",
            "model.bias": "attention_bias mlp_bias add_bias_linear add_qkv_bias disable_bias_linear use_bias "
            "qkv_bias",
            "model.dropout": "resid_pdrop attn_pdrop embd_pdrop hidden_dropout attention_dropout "
            "hidden_dropout_prob residual_dropout dropout_rate",
            "model.unroll": "scan_layers unroll_layers scan_unroll",
            "model.loss_chunk": "num_output_chunks cross_entropy_chunk_size",
            "model.num_experts": "num_local_experts n_routed_experts num_moe_experts moe_num_experts "
            "n_experts",
            "model.experts_per_token": "num_experts_per_tok moe_router_topk moe_top_k top_k topk "
            "num_selected_experts n_activated_experts num_experts_per_token",
            "model.num_shared_experts": "n_shared_experts moe_num_shared_experts "
            "moe_shared_expert_intermediate_size shared_experts",
            "model.capacity_factor": "moe_expert_capacity_factor expert_capacity_factor expert_capacity",
            "model.balancing_loss": "router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef aux_loss_alpha "
            "load_balance_coeff moe_aux_loss_coef",
            "model.image_size": "img_size resolution input_size",
            "model.input_dim": "in_features input_size n_features num_features",
            "data.source": "dataset dataset_name dataset_type mock_data",
            "data.path": "data_path dataset_path train_data_path train_file data_dir train_data data_file "
            "token_file dataset_prefix",
            "data.folder": "data_dir image_folder root",
            "data.dtype": "token_dtype data_dtype",
            "data.held_out_fraction": "val_fraction val_split valid_fraction split validation_fraction "
            "test_size",
            "data.order": "shuffle sampler data_order",
            "data.documents": "packing packed reset_attention_mask reset_position_ids sequence_packing "
            "document_masking",
            "data.end_of_document": "eos_token_id eod_token eos_id eot_token",
            "optimizer.kind": "optim optimizer_type optimizer_name",
            "optimizer.learning_rate": "lr max_lr peak_lr base_lr init_lr peak_learning_rate",
            "optimizer.beta1": "adam_beta1 b1 betas beta_1",
            "optimizer.beta2": "adam_beta2 b2 betas beta_2",
            "optimizer.adamw_beta1": "adam_beta1",
            "optimizer.adamw_beta2": "adam_beta2",
            "optimizer.epsilon": "adam_epsilon adam_eps eps",
            "optimizer.adamw_epsilon": "adam_epsilon adam_eps",
            "optimizer.decay": "alpha rho",
            "optimizer.momentum": "sgd_momentum muon_momentum mu",
            "optimizer.nesterov": "muon_use_nesterov use_nesterov",
            "optimizer.newton_schulz_steps": "ns_steps muon_num_ns_steps num_ns_steps",
            "optimizer.weight_decay": "wd decay_rate l2 start_weight_decay",
            "optimizer.clip_norm": "grad_clip clip_grad max_grad_norm max_norm gradient_clipping "
            "gradient_clip_val clip_grad_norm grad_clip_norm",
            "schedule.kind": "lr_scheduler_type lr_decay_style decay_type lr_scheduler scheduler decay_lr "
            "lr_schedule scheduler_type",
            "schedule.warmup_steps": "warmup_iters lr_warmup_iters num_warmup_steps warmup lr_warmup_steps "
            "warmup_ratio lr_warmup_fraction lr_warmup_samples warmup_step",
            "schedule.decay_steps": "lr_decay_iters lr_wsd_decay_iters decay_ratio lr_decay_steps "
            "cooldown_steps lr_wsd_decay_samples lr_decay_samples",
            "schedule.final_fraction": "min_lr lr_min min_lr_ratio min_lr_factor final_lr_fraction "
            "min_lr_rate end_lr",
            "batch.sequences": "global_batch_size batch_size train_batch_size total_batch_size num_sequences "
            "bs rampup_batch_size",
            "batch.sequence_length": "seq_len seq_length block_size context_length sequence_len max_length "
            "ctx_len context_size max_seq_length max_seq_len train_seq_len cutoff_len seqlen",
            "batch.microbatch_sequences": "micro_batch_size microbatch_size train_micro_batch_size_per_gpu "
            "gradient_accumulation_steps grad_accum grad_accum_steps num_microbatches device_batch_size "
            "pipeline_parallel_microbatch_size",
            "batch.sequences_per_replica": "per_device_train_batch_size local_batch_size "
            "per_device_batch_size "
            "batch_size_per_device",
            "batch.base_sequences": "base_batch_size",
            "evaluation.every_steps": "eval_interval eval_steps val_interval eval_every eval_freq "
            "validation_freq",
            "evaluation.batches": "eval_iters val_steps eval_batches eval_max_steps",
            "checkpoint.every_steps": "save_interval save_steps checkpoint_interval save_every ckpt_interval "
            "interval enable_checkpoint",
            "checkpoint.keep_last": "save_total_limit keep_latest_k max_to_keep keep_last_n",
            "checkpoint.keep_every": "keep_period",
            "faults.bad_step": "check_for_nan_in_loss_and_grad skip_nan nan_policy",
            "faults.most_bad_steps": "max_skipped_steps",
            "faults.spike_sigmas": "check_for_spiky_loss",
            "faults.startup_deadline_seconds": "init_timeout_seconds distributed_timeout_minutes "
            "distributed_timeout_seconds",
            "faults.step_deadline_seconds": "train_timeout_seconds watchdog_timeout ddp_timeout nccl_timeout",
        }.items()
    }
)
"""Keys of a run, as `section.key`, each with its names elsewhere."""

VALUES_ELSEWHERE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "preset": {"gpt2-xl": "gpt2-1.5b", "gpt2-small": "gpt2-124m", "mnist": "lenet-fashion"},
        "precision": {
            "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
            "tf32": "fp32", "float8": "fp8", "e4m3": "fp8", "hybrid": "fp8", "mixed": "bf16",
        },
        "remat": {
            "selective": "dots-attention", "true": "full", "block": "full", "everything": "full",
            "uniform": "full", "false": "none", "off": "none",
        },
        "pipeline": {"1f1b-interleaved": "1f1b", "interleaved1f1b": "1f1b", "fill-drain": "gpipe"},
        "model.kind": {
            "llama": "transformer", "gpt": "transformer", "gpt2": "transformer", "mixtral": "transformer",
            "mistral": "transformer", "qwen2": "transformer", "decoder": "transformer", "moe": "transformer",
            "llm": "transformer", "mlp": "cruncher", "resnet": "resnet18", "regression": "linear",
        },
        "model.norm": {"rmsnorm": "rms", "layernorm": "layer", "rms-norm": "rms", "layer-norm": "layer"},
        "model.position": {"rope": "rotary", "absolute": "learned", "learned-absolute": "learned"},
        "model.mlp": {"swiglu": "gated", "geglu": "gated", "glu": "gated", "gelu": "plain", "relu": "plain"},
        "model.activation": {
            "swish": "silu", "swiglu": "silu", "geglu": "gelu", "gelu-new": "gelu", "gelu-tanh": "gelu",
            "gelu-pytorch-tanh": "gelu", "quick-gelu": "gelu",
        },
        "model.batch_norm": {"sync": "global", "local": "replica"},
        "optimizer.kind": {
            "adamw-torch": "adamw", "adamw-torch-fused": "adamw", "fused-adam": "adam", "momentum": "sgd",
            "nesterov": "sgd",
        },
        "schedule.kind": {
            "wsd": "stable-then-decay", "warmup-stable-decay": "stable-then-decay",
            "trapezoidal": "stable-then-decay", "constant-with-warmup": "constant",
            "cosine-with-min-lr": "cosine", "cosine-decay": "cosine", "inverse-sqrt": "inverse-square-root",
            "rsqrt": "inverse-square-root", "noam": "inverse-square-root", "none": "constant",
            "linear-decay": "linear",
        },
        "schedule.scale": {"square-root": "sqrt", "proportional": "linear"},
        "data.source": {
            "mnist": "idx", "fashion-mnist": "idx", "random": "synthetic", "mock": "synthetic",
            "dummy": "synthetic", "bin": "tokens", "memmap": "tokens", "file": "tokens",
            "stdlib": "python-stdlib",
        },
        "data.dtype": {"u16": "uint16", "np.uint16": "uint16", "i32": "int32"},
        "data.documents": {"packing": "packed", "concat": "joined", "concatenated": "joined"},
        "data.order": {"shuffle": "epochs", "epoch": "epochs", "uniform": "random"},
        "faults.bad_step": {"raise": "stop", "abort": "stop", "ignore": "skip", "restore": "rollback"},
    }
)  # fmt: skip
"""Values by key, each name elsewhere with the value that is meant; `preset` is a run's beginning."""

_BY_NAME: dict[str, list[str]] = {}
for _key, _names in KEYS_ELSEWHERE.items():
    for _name in _names:
        _BY_NAME.setdefault(_name, []).append(_key)


def keys_meant(name: str) -> list[str]:
    """Return the dotted keys that another program's `name` stands for, in the order of the table."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip("-")).lower().replace("-", "_")
    return list(_BY_NAME.get(plain, ()))


def value_meant(key: str, value: str) -> str | None:
    """Return the value of `key` that another program's `value` stands for, or None."""
    plain = value.lower().replace("_", "-").removeprefix("torch.").removeprefix("jnp.")
    return VALUES_ELSEWHERE.get(key, {}).get(plain)


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "finite_number": "a finite number",
    "model_type": "a section of keys",
    "dict_type": "a section of keys",
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def variants(section: str) -> tuple[str, dict[str, type[Section]]]:
    """Return the key that chooses between the records of a section, and the records by its values.

    A section with one record has the key "" and that record under "". A key that is no section has no
    records.
    """
    field = RunConfig.model_fields[section]
    if isinstance(field.discriminator, str):
        key = field.discriminator
        records = get_args(field.annotation)
        return key, {get_args(r.model_fields[key].annotation)[0]: r for r in records}
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
        return "", {"": field.annotation}
    return "", {}


def known_keys(section: str, tag: str) -> list[str]:
    """Return the keys of one record of a section, or of the run itself if `section` is ""."""
    if not section:
        return ["preset", *(name for name in RunConfig.model_fields if name != "name")]
    return list(variants(section)[1][tag].model_fields)


def input_error(where: str, problems: Sequence[Problem]) -> InputError:
    """Return one error for all `problems` of `where`, the name of a preset or a file."""
    lines = [f"{path} {what}".strip() for path, what, _ in problems]
    if len(problems) == 1:
        return InputError(f"{where}: {lines[0]}", hint=problems[0][2])
    message = f"{where}: {len(problems)} things are wrong" + "".join(f"\n  {line}" for line in lines)
    return InputError(
        message, hint="; ".join(f"{path}: {hint}" if path else hint for path, _, hint in problems)
    )


def problems_of(error: ValidationError) -> list[Problem]:
    """Return pydantic's errors in words, in the order of the sections."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        problems += _problems_of_detail(detail)
    return problems


def _problems_of_detail(detail: ErrorDetails) -> list[Problem]:
    section, tag, key = _place(detail["loc"])
    path = ".".join(part for part in (section, key) if part)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == PROBLEMS:
        found: list[Problem] = context["problems"]
        return [(".".join(p for p in (path, below) if p), what, hint) for below, what, hint in found]
    if kind == "default_factory_not_called":
        return []  # a default that depends on a field with a problem of its own
    if kind == "missing":
        return [(path, "is missing", f"set {path}")]
    if kind == "extra_forbidden":
        owner = f"{section} ({tag})" if tag else section
        what = f"is not a key of {owner}" if key else "is not a section or a key of a run"
        return [(path, what, _key_hint(section, tag, key) if key else _section_hint(section, value))]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return [_tag_problem(section, value)]
    return [_value_problem(path, kind, value, context, detail["msg"])]


def _key_hint(section: str, tag: str, key: str) -> str:
    """Return a hint for an unknown key: its name here, the kinds of section that have it, or the nearest."""
    here = known_keys(section, tag)
    meant = [path for path in keys_meant(key) if _is_key_for(path, section, tag)]
    if meant:
        return _did_you_mean([path for path in meant if path.startswith(f"{section}.")] or meant)
    kinds = [kind for kind, record in variants(section)[1].items() if key in record.model_fields]
    if kinds:
        choice = f"{section}.{variants(section)[0]}"
        return f"it is a key of {choice} = {' or '.join(map(repr, kinds))}; choose that, or leave it out"
    near = near_names(key, here)
    elsewhere = [path for path in _paths() if path.rpartition(".")[2] == key]
    return nearest_name(key, near or here) if near or not elsewhere else _did_you_mean(elsewhere)


def _section_hint(name: str, value: Any) -> str:
    """Return a hint for an unknown section or key of a run, or for the keys of a foreign section."""
    known = known_keys("", "")
    if is_table(value):
        hints = [f"{name}.{key} is {' or '.join(meant)} here" for key in value if (meant := keys_meant(key))]
        return "; ".join(hints) if hints and not near_names(name, known) else nearest_name(name, known)
    meant = keys_meant(name) or [path for path in _paths() if path.rpartition(".")[2] == name]
    return _did_you_mean(meant) if meant else nearest_name(name, known)


def _did_you_mean(paths: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, paths))}?"


def _paths() -> list[str]:
    """Return every key of a run as `section.key`, for all kinds of each section."""
    sections = {name: variants(name)[1] for name in known_keys("", "") if name in RunConfig.model_fields}
    plain = [name for name, records in sections.items() if not records]
    below = {
        f"{name}.{key}": 0 for name, rs in sections.items() for r in rs.values() for key in r.model_fields
    }
    return [*plain, *below]


def _is_key_for(path: str, section: str, tag: str) -> bool:
    """Return whether `path` can be set while `section` is of the kind `tag`."""
    owner, _, key = path.rpartition(".")
    return owner != section or key in known_keys(section, tag)


def _place(loc: tuple[int | str, ...]) -> tuple[str, str, str]:
    """Return the section, the value of its choosing key, and the key of a pydantic location.

    pydantic puts that value into the location.
    """
    parts = [str(part) for part in loc]
    if not parts:
        return "", "", ""
    section, below = parts[0], parts[1:]
    if section in RunConfig.model_fields and variants(section)[0] and below:
        return section, below[0], ".".join(below[1:])
    return section, "", ".".join(below)


def _tag_problem(section: str, value: Any) -> Problem:
    key, records = variants(section)
    path, known = f"{section}.{key}", ", ".join(sorted(records))
    assert is_table(value), f"pydantic looks for {path} only in a table, not in {value!r}"
    tag = value.get(key)
    if tag is None:
        return path, "is missing", f"set it to one of {known}"
    return path, f"= {_show(tag)}: expected one of {known}", _value_hint(path, str(tag), list(records))


def _value_problem(path: str, kind: str, value: Any, context: dict[str, Any], message: str) -> Problem:
    shown = f"= {_show(value)}"
    if kind == "literal_error":
        expected = str(context["expected"]).replace(" or ", ", ").replace("'", "")
        return (
            path,
            f"{shown}: expected one of {expected}",
            _value_hint(path, str(value), expected.split(", ")),
        )
    if kind in _LIMITS:
        words, limit = _LIMITS[kind]
        return path, f"{shown}: expected {words} {context[limit]}", f"set it to {words} {context[limit]}"
    expected = _TYPES.get(kind, message)
    unquoted = str(value).replace("_", "")
    is_quoted_number = isinstance(value, str) and unquoted.replace(".", "", 1).isdecimal()
    hint = f"write {path} = {value} without quotes" if is_quoted_number else f"set it to {expected}"
    return path, f"{shown}: expected {expected}", hint


def _value_hint(path: str, value: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown value of a key: its meaning in another program, or the nearest value."""
    meant = value_meant(path, value)
    return nearest_name(value, known) if meant is None else f"did you mean {meant!r}?"


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
