"""Read Megatron-LM's arguments: its model, batch, axes and formats."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.config import load_config
from meshwright.errors import InputError

from ._recipe import REST, Recipe, model_id
from ._shell import is_known, shown
from ._tables import KeyTable, seen_keys, table, whole

_OF_MODEL = "it describes the model: name one of the same sizes, --model deepseek-ai/DeepSeek-V3"
_FILES = ("vocab-file", "tokenizer-model")  # which need not be known where a size or a type is
_VOCABULARIES = {"gpt2bpetokenizer": 50_257, "llama2tokenizer": 32_000}
_DENSE_FIRST = re.compile(r"\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})", re.ASCII)


def megatron(file: str, words: Sequence[str], ignore: Collection[str] = (), model: str = "") -> Recipe:
    """Return the recipe of a list of arguments.

    Args:
        words: "--num-layers", "32", ...; a value that stands in a variable that is not known has zero bytes.
        ignore: arguments that the caller wants ignored, and names of variables.
        model: what the caller says the model is, in place of its sizes.

    Raises:
        InputError: an argument or a value is not understood.
    """
    known = table("megatron")
    values = _values(known, file, words, ignore)
    own = {key for key, what in known.refused.items() if what == _OF_MODEL} if model else set[str]()
    seen = seen_keys(known, file, values, [*ignore, *own])
    values = {key: value for key, value in values.items() if key in seen.understood}
    for key, value in values.items():
        if not is_known(str(value)) and key not in _FILES:
            what = f"{file}: --{key} is {shown(str(value))}, which only a run of the script would know"
            raise InputError(what, hint=f"write the value, or --ignore {key} and --set what it means here")
    read = _Arguments(file, values)
    axes, settings = _axes(read)
    settings |= _formats(read) | _remat(read)
    settings["batch.sequence_length"] = read.number("seq-length")
    notes: list[str] = []
    if axes["tensor"] > 1 and not read.has("sequence-parallel"):
        notes.append(
            "between blocks activations are split over tensor here; there, without --sequence-parallel, not"
        )
    if read.has("fp16"):
        notes.append(
            "a copy of the parameters in fp16, which Megatron-LM keeps beside those in fp32, is not weighed"
        )
    model_keys: dict[str, Any] = {}
    if not model:
        model_keys, said = _model(read)
        notes += said
        settings["optimizer.learning_rate"] = 1e-4
    micro = read.number("micro-batch-size", 1)
    return Recipe(
        kind="Megatron-LM's arguments",
        file=file,
        seen=seen,
        model=model,
        model_keys=model_keys,
        axes=axes,
        settings=settings,
        per_device=micro,
        sequences=read.number("global-batch-size") if read.has("global-batch-size") else None,
        steps=read.number("train-iters") if read.has("train-iters") else None,
        sequences_in_run=read.number("train-samples") if read.has("train-samples") else None,
        notes=tuple(notes),
    )


class _Arguments:
    """The understood arguments by name."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, values

    def has(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        return str(self.values.get(name, default))

    def number(self, name: str, default: int | None = None) -> int:
        if name not in self.values:
            if default is None:
                what = f"{self.file} has no --{name}"
                raise InputError(what, hint=f"add --{name}, or name the model: --model ID")
            return default
        return whole(self.file, f"--{name}", self.values[name])

    def share(self, name: str, default: float) -> float:
        try:
            return float(self.values.get(name, default))
        except (TypeError, ValueError):
            what = f"{self.file}: --{name} = {self.text(name)[:40]!r} is no number"
            raise InputError(what, hint="write a number") from None

    def refuse(self, name: str, hint: str) -> InputError:
        return InputError(f"{self.file}: --{name} {self.text(name)[:60]} cannot be weighed", hint=hint)


def _values(known: KeyTable, file: str, words: Sequence[str], ignore: Collection[str]) -> dict[str, Any]:
    """Return the value of each argument: True, a text, or several as one text.

    Raises:
        InputError: a variable stands for arguments that are not known.
    """
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            name = name.replace("_", "-")
            found[name] = value if sign else True
        elif not is_known(word) and (not name or found[name] is not True or "[@]}" in word):
            variable, _, added = shown(word).partition(" ")
            options = [each[2:].partition("=")[0] for each in added.split() if each.startswith("--")]
            if options and all(each.replace("_", "-") in known.ignored for each in options):
                continue
            if not {variable, "$" + variable.strip("${}[@]")} & set(ignore):
                what = (
                    f"{file}: the arguments in {shown(word)[:80]} are set in a branch, or not in this script"
                )
                raise InputError(
                    what, hint=f"--ignore '{variable[:80]}', and --set what they mean for a weighing"
                )
        elif name:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return found


def _axes(read: _Arguments) -> tuple[dict[str, int], dict[str, Any]]:
    tensor, stage = (
        read.number("tensor-model-parallel-size", 1),
        read.number("pipeline-model-parallel-size", 1),
    )
    context, experts = read.number("context-parallel-size", 1), read.number("expert-model-parallel-size", 1)
    settings: dict[str, Any] = {}
    rest = "data"
    if read.has("use-megatron-fsdp"):
        strategy = read.text("data-parallel-sharding-strategy", "no_shard")
        rest = "fsdp" if strategy == "optim_grads_params" else "data"
        settings |= {"zero1": True} if strategy in ("optim", "optim_grads") else {}
    if read.has("use-distributed-optimizer") and rest == "data":
        settings["zero1"] = True
    inside = read.number("expert-tensor-parallel-size", tensor)
    if experts > 1 and inside != tensor:
        if inside != 1 or experts % tensor:
            raise read.refuse("expert-tensor-parallel-size", "use 1, or the size of tensor parallelism")
        experts //= tensor
        settings["fold_experts"] = "tensor"
    if stage > 1:
        settings["pipeline"] = "1f1b"
        if read.has("num-layers-per-virtual-pipeline-stage"):
            each = read.number("num-layers-per-virtual-pipeline-stage")
            settings["pipeline_chunks"] = max(1, read.number("num-layers") // (stage * each))
        elif read.has("num-virtual-stages-per-pipeline-rank"):
            settings["pipeline_chunks"] = read.number("num-virtual-stages-per-pipeline-rank")
    axes = {"tensor": tensor, "stage": stage, "context": context, "expert": experts, rest: REST}
    return axes, settings


def _formats(read: _Arguments) -> dict[str, Any]:
    kind = "bf16" if read.has("bf16") else "fp16" if read.has("fp16") else "fp32"
    made: dict[str, Any] = {"precision": "fp8" if read.has("fp8-format") else kind}
    if kind == "bf16":
        made |= {"state.parameters": "bf16", "state.master": "fp32"}
        made |= {"gradient_sum": "bf16"} if read.has("grad-reduce-in-bf16") else {}
    name = read.text("optimizer", "adam")
    if name not in ("adam", "sgd"):
        raise read.refuse("optimizer", "use adam or sgd, or --ignore optimizer")
    weight_decay = name == "adam" and read.share("weight-decay", 0.01) > 0
    return made | {"optimizer.kind": "adamw" if weight_decay else name, "optimizer.learning_rate": 1e-4}


def _remat(read: _Arguments) -> dict[str, Any]:
    if read.has("recompute-activations"):
        return {"remat": "dots"}
    if read.has("checkpoint-activations"):  # as older releases, and Megatron-DeepSpeed, name it
        return {"remat": "full"}
    granularity = read.text("recompute-granularity", "none")
    if granularity == "none":
        return {"remat": "none"}
    if granularity == "selective":
        if read.text("recompute-modules", "core_attn") != "core_attn":
            raise read.refuse("recompute-modules", "--ignore recompute-modules, and --set remat=save:NAMES")
        return {"remat": "dots"}
    method, layers = read.text("recompute-method", "uniform"), read.number("recompute-num-layers", 1)
    if granularity == "full" and method == "uniform" and layers == 1:
        return {"remat": "full"}
    raise read.refuse(
        "recompute-method", "--ignore recompute-method recompute-num-layers, and --set remat=full"
    )


def _model(read: _Arguments) -> tuple[dict[str, Any], list[str]]:
    """Return our model's keys, and what was assumed."""
    embed, heads = read.number("hidden-size"), read.number("num-attention-heads")
    rotary = read.text("position-embedding-type", "learned_absolute") == "rope" or read.has(
        "use-rotary-position-embeddings"
    )
    if not rotary and read.text("position-embedding-type", "learned_absolute") != "learned_absolute":
        raise read.refuse("position-embedding-type", "use rope or learned_absolute, or --model ID")
    if read.share("rotary-percent", 1.0) != 1.0:
        raise read.refuse("rotary-percent", "use 1.0, or --model ID")
    norm = read.text("normalization", "LayerNorm")
    if norm not in ("LayerNorm", "RMSNorm"):
        raise read.refuse("normalization", "use LayerNorm or RMSNorm")
    hidden = read.number("ffn-hidden-size", 4 * embed)
    vocab, notes = _vocabulary(read)
    gated = read.has("swiglu")
    made: dict[str, Any] = {
        "num_layers": read.number("num-layers"),
        "embed_dim": embed,
        "num_heads": heads,
        "num_kv_heads": read.number("num-query-groups", 1) if read.has("group-query-attention") else heads,
        "head_dim": read.number("kv-channels", max(1, embed // heads)),
        "mlp_dim": hidden,
        "vocab_size": vocab,
        "norm": "rms" if norm == "RMSNorm" else "layer",
        "position": "rotary" if rotary else "learned",
        "rope_theta": read.share("rotary-base", 10_000.0) if rotary else None,
        "max_positions": None if rotary else read.number("max-position-embeddings"),
        "mlp": "gated" if gated else "plain",
        "activation": "silu" if gated else "gelu",
        "bias": not read.has("disable-bias-linear"),
        "tied_embeddings": not read.has("untie-embeddings-and-output-weights"),
        "qk_norm": "head" if read.has("qk-layernorm") else "none",
        "dropout": read.share("hidden-dropout", 0.1),
    }
    if read.has("add-qkv-bias") and not made["bias"]:
        made["qkv_bias"] = True
    if read.has("num-experts"):
        made |= _experts(read, hidden)
    return {"data.source": "synthetic", **{f"model.{key}": value for key, value in made.items()}}, notes


def _experts(read: _Arguments, hidden: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "num_experts": read.number("num-experts"),
        "experts_per_token": read.number("moe-router-topk", 2),
        "mlp_dim": read.number("moe-ffn-hidden-size", hidden),
        "router": "sigmoid" if read.text("moe-router-score-function") == "sigmoid" else "softmax",
    }
    if read.has("moe-shared-expert-intermediate-size"):
        made["shared_mlp_dim"] = read.number("moe-shared-expert-intermediate-size")
    order = read.text("moe-layer-freq", "1").replace(" ", "").strip("()'\"")
    if order != "1":
        if (found := _DENSE_FIRST.fullmatch(order)) is None:
            raise read.refuse("moe-layer-freq", "use 1 or ([0]*N+[1]*M), or --model ID")
        made |= {"num_dense_layers": int(found[1]), "dense_mlp_dim": hidden}
    return made


def _vocabulary(read: _Arguments) -> tuple[int, list[str]]:
    """Return the padded size of the vocabulary, and where it is from.

    Raises:
        InputError: no argument says it.
    """
    tokenizer, name = read.text("tokenizer-type").lower(), read.text("tokenizer-model")
    notes: list[str] = []
    if read.has("vocab-size"):
        size = read.number("vocab-size")
    elif tokenizer in _VOCABULARIES or (not tokenizer and read.has("vocab-file")):
        size = _VOCABULARIES[tokenizer or "gpt2bpetokenizer"]
        notes.append(f"the vocabulary is taken as that of {tokenizer or 'GPT-2'}: {size}")
    elif name and is_known(name):
        known, said = model_id(name, read.file)
        size = getattr(load_config(known).model, "vocab_size", 0)
        notes += [*said, f"the vocabulary is taken as that of {name}: {size}"]
    else:
        hint = "add --vocab-size N to its arguments, or name the model: --model ID"
        raise InputError(f"{read.file} does not say how large the vocabulary is", hint=hint)
    step = read.number("make-vocab-size-divisible-by", 128) * read.number("tensor-model-parallel-size", 1)
    return math.ceil(size / step) * step, notes
