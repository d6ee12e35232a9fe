"""Read a torchtitan job file, and the words that override its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError

from ._recipe import REST, Recipe
from ._tables import flattened, seen_keys, switch, table, whole

MODELS = {
    ("llama2", "7b"): "meta-llama/Llama-2-7b-hf",
    ("llama2", "13b"): "meta-llama/Llama-2-13b-hf",
    ("llama2", "70b"): "meta-llama/Llama-2-70b-hf",
    ("llama3", "8b"): "meta-llama/Llama-3.1-8B",
    ("llama3", "70b"): "meta-llama/Llama-3.1-70B",
    ("llama3", "405b"): "meta-llama/Llama-3.1-405B",
    ("qwen3", "0.6b"): "Qwen/Qwen3-0.6B",
    ("qwen3", "1.7b"): "Qwen/Qwen3-1.7B",
    ("qwen3", "4b"): "Qwen/Qwen3-4B",
    ("qwen3", "8b"): "Qwen/Qwen3-8B",
    ("qwen3", "14b"): "Qwen/Qwen3-14B",
    ("qwen3", "32b"): "Qwen/Qwen3-32B",
    ("qwen3", "30b-a3b"): "Qwen/Qwen3-30B-A3B",
    ("qwen3", "235b-a22b"): "Qwen/Qwen3-235B-A22B",
    ("deepseek_v3", "671b"): "deepseek-ai/DeepSeek-V3",
    ("gpt_oss", "20b"): "openai/gpt-oss-20b",
    ("gpt_oss", "120b"): "openai/gpt-oss-120b",
}
"""The published model of the same sizes, by `model.name` and `model.flavor`."""
_PLACES = ("parallelism", "training", "experimental")  # where a degree has stood, the newest first
_AXES = {
    "data": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "tensor": "tensor_parallel_degree",
    "stage": "pipeline_parallel_degree",
    "context": "context_parallel_degree",
    "expert": "expert_parallel_degree",
}
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe"}


def is_torchtitan(tree: Mapping[str, Any]) -> bool:
    """Return whether the tables of a TOML file are those of a job."""
    model, training = tree.get("model"), tree.get("training")
    return isinstance(model, dict) and isinstance(training, dict) and ("flavor" in model or "name" in model)


def torchtitan(
    file: str,
    tree: Mapping[str, Any],
    words: Sequence[str] = (),
    ignore: Collection[str] = (),
    model: str = "",
) -> Recipe:
    """Return the recipe of a job.

    Args:
        tree: its tables.
        words: of its command after the file, such as `--training.steps 100`.
        ignore: keys that the caller wants ignored.
        model: what the caller says the model is, in place of its name and flavor.

    Raises:
        InputError: a key or a value is not understood.
    """
    values = {**dict(flattened(tree)), **_overrides(file, words)}
    seen = seen_keys(table("torchtitan"), file, values, ignore)
    values = {key: value for key, value in values.items() if key in seen.understood}

    def number(key: str, default: int, least: int = 1) -> int:
        return whole(file, key, values[key], least) if key in values else default

    axes: dict[str, int] = {}
    for axis, name in _AXES.items():
        key = next((f"{place}.{name}" for place in _PLACES if f"{place}.{name}" in values), "")
        size = number(key, REST if axis == "fsdp" else 1, least=REST)
        axes[axis] = size if size == REST else max(1, size)
    total = number("training.global_batch_size", REST, least=REST)
    batch = "training.local_batch_size" if "training.local_batch_size" in values else "training.batch_size"
    per_device, staged = number(batch, 8), axes["stage"] > 1
    settings = {
        "batch.sequence_length": number("training.seq_len", 2048),
        "remat": _remat(file, values),
        "optimizer.kind": _optimizer(file, values),
        "optimizer.learning_rate": 3e-4,
        **_formats(file, values),
        **(_pipeline(file, values) if staged else {}),
    }
    return Recipe(
        kind="torchtitan",
        file=file,
        seen=seen,
        model=model or _model(file, values),
        axes=axes,
        settings=settings,
        per_device=1 if staged else per_device,
        accumulated=per_device if staged else number("training.gradient_accumulation_steps", 1),
        sequences=None if total <= 0 else total,
        steps=number("training.steps", 10_000),
    )


def _overrides(file: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the keys that words of a command set: `--training.steps=100`, `--training.steps 100`."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if "\0" in word:
            what = f"{file}: the command overrides keys by {word.replace(chr(0), '')}, which is not known"
            raise InputError(what, hint="write the words themselves, or add them as --set KEY=VALUE")
        if not word.startswith("--"):
            raise InputError(
                f"{file}: cannot read {word[:60]!r} after it", hint="write overrides as --section.key value"
            )
        name, sign, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not sign:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        if name not in ("job.config_file",):
            found[name] = value
    return found


def _model(file: str, values: Mapping[str, Any]) -> str:
    name, flavor = str(values.get("model.name", "llama3")), str(values.get("model.flavor", "debugmodel"))
    if (own := values.get("hf_transformers.model")) and flavor == "full":
        return str(own)
    if (found := MODELS.get((name.lower(), flavor.lower()))) is None:
        named = f"model.name = {name[:40]!r}, model.flavor = {flavor[:40]!r}"
        what = f"{file} trains {named}, whose sizes are not known"
        raise InputError(
            what, hint="name a model or a folder of the same sizes: --model meta-llama/Llama-3.1-8B"
        )
    return found


def _remat(file: str, values: Mapping[str, Any]) -> str:
    mode = str(values.get("activation_checkpoint.mode", "selective")).lower()
    option = str(values.get("activation_checkpoint.selective_ac_option", "2")).lower()
    if mode in ("none", "full"):
        return mode
    if mode == "selective" and option == "op":
        return "alternate-dots"
    if mode == "selective" and option in ("1", "2", "3", "4"):
        return "full" if option == "1" else f"full-every-{option}"
    named = f"activation_checkpoint.mode = {mode[:40]!r} with selective_ac_option = {option[:40]!r}"
    what = f"{file}: {named} is not understood"
    raise InputError(what, hint="use none, full, or selective with op or every 1 to 4 layers")


def _optimizer(file: str, values: Mapping[str, Any]) -> str:
    name = str(values.get("optimizer.name", "AdamW"))
    known = {"adamw": "adamw", "adam": "adam", "muon": "muon"}
    if name.lower() not in known:
        raise InputError(
            f"{file}: optimizer.name = {name[:40]!r} is not understood", hint=f"use {', '.join(known)}"
        )
    return known[name.lower()]


def _formats(file: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the formats of arithmetic, parameters and sums."""
    listed = values.get("model.converters", [])
    texts = map(str, listed) if isinstance(listed, list) else str(listed).split(",")
    converters = [each.strip() for each in texts if each.strip()]
    if switch(file, "float8.enable_float8_linear", values.get("float8.enable_float8_linear", False)):
        converters.append("float8")
    if unknown := [each for each in converters if each not in ("float8", "quantize.linear.float8")]:
        what = f"{file}: model.converters has {unknown[0][:60]!r}, which is not understood"
        raise InputError(what, hint="weigh without it: --ignore model.converters")
    own = str(values.get("training.dtype", "float32"))
    products = str(values.get("training.mixed_precision_param", "bfloat16"))
    names = {"bfloat16": "bf16", "float32": "fp32"}
    if own not in names or products not in names:
        named = f"training.dtype = {own[:40]!r} with mixed_precision_param = {products[:40]!r}"
        what = f"{file}: {named} is not understood"
        raise InputError(what, hint="use float32 or bfloat16 for each")
    made = {"precision": "fp8" if converters else names[products]}
    if own == "bfloat16":
        made |= {"state.parameters": "bf16", "state.moments": "bf16"}
    reduced = str(values.get("training.mixed_precision_reduce", "float32"))
    if made["precision"] == "fp32":
        return made
    wide = "fp32" if own == "bfloat16" else "all-fp32"  # of parameters in bf16, gradients are in bf16 too
    return made | {"gradient_sum": wide if reduced == "float32" else "bf16"}


def _pipeline(file: str, values: Mapping[str, Any]) -> dict[str, Any]:
    key = "parallelism.pipeline_parallel_schedule"
    name = str(values.get(key, values.get("experimental.pipeline_parallel_schedule", "1F1B")))
    if name.lower() == "interleaved1f1b":
        return {
            "pipeline": "1f1b",
            "pipeline_chunks": 2,
        }  # its stages hold two parts unless a key says otherwise
    if name.lower() not in _SCHEDULES:
        what = f"{file}: {key} = {name[:40]!r} is not understood"
        raise InputError(what, hint="use 1F1B, GPipe or Interleaved1F1B")
    return {"pipeline": _SCHEDULES[name.lower()]}
