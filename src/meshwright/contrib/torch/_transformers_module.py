"""Make the module and the batch of a Hugging Face model, with the classes of `transformers` alone.

The file may be a stranger's: no code of its repository is run, nothing is downloaded, its sizes and the
memory of this process are limited, and keys that choose how `transformers` runs a model have no effect. It is
imported in the process that accounts for the module.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwright.contrib.hub import is_misspelling, listed_keys
from meshwright.errors import InputError

COUNTS = {"layer|depth|block": 1_000, "expert": 10_000}  # published models have up to 160 and 1,000
MOST_ENTRIES = 10_000  # of a list or a pattern, such as the kinds of layers
MOST_SECONDS = 60.0  # of the processor, to make a module; the largest of today take five
MOST_BYTES = 8 * 2**30  # of this process: the module's tensors have shapes alone
RUNNING = re.compile(  # keys of a file that say how it is run, and not what it is
    r"_?(attn|experts)_implementation|use_cache|return_dict|output_(attentions|hidden_states)|torchscript|auto_map|torch_dtype|dtype"
    r"|quantization_config|_?name_or_path|gradient_checkpointing|use_kernels|use_pretrained_backbone"
    r"|num_labels|id2label|label2id"
)
CODE = "its repository brings its own code (auto_map), which is not run here"
OWN_FUNCTION = (
    "let a function of yours make the module: docs/how-to/pytorch.md. There "
    "AutoModelForCausalLM.from_config(config, trust_remote_code=True) runs such code"
)


class TooLong(BaseException):
    """The module took too long; no `except Exception` of a library hides it."""


def causal_model(
    config: str = "{}",
    where: str = "config.json",
    unread: str = "",
    sequence_length: int = 2048,
    microbatch_sequences: int = 1,
    remat: str = "none",
) -> dict[str, Any]:
    """Return the module of a `config.json`, a batch of one device, and AdamW.

    Args:
        config: the text of the file.
        where: the file, for errors.
        unread: keys that our own reader did not understand, separated by commas. `transformers` must have
            them.
        sequence_length, microbatch_sequences: of the batch.
        remat: "none", or "full": blocks keep their inputs alone, and run again in the backward pass.

    Raises:
        InputError: `transformers` does not know the model or cannot make it, a size is beyond the limits, or
            a setting is wrong.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
    _limit_memory()
    tree = json.loads(config)
    _check_sizes(tree, f"{where}: ")
    import torch

    with _in_time(where):
        module = _module_of(tree, where, [key for key in unread.split(",") if key])
    _check_length(module, sequence_length)
    allowed = ("none", "full") if module.supports_gradient_checkpointing else ("none",)
    if remat not in allowed:
        what = f"remat = {remat!r}, and the module of {where} has {' or '.join(allowed)}"
        raise InputError(what, hint=f"--set remat={allowed[-1]}")
    if remat == "full":  # later releases of transformers renamed the method
        newer = getattr(module, "activation_checkpointing_enable", None)
        (newer or module.gradient_checkpointing_enable)({"use_reentrant": False})
    if "labels" not in inspect.signature(module.forward).parameters:
        raise InputError(f"{type(module).__name__} of transformers has no loss", hint=OWN_FUNCTION)
    tokens = torch.zeros(microbatch_sequences, sequence_length, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    return {"module": module, "inputs": inputs, "optimizer": torch.optim.AdamW}


def _module_of(tree: Mapping[str, Any], where: str, unread: Iterable[str]) -> Any:
    """Return the module of a file. `unread`: keys that `transformers` must have."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, weights = _known_type(tree, where), _format_of(tree, where)
    read = transformers.CONFIG_MAPPING[kind]
    if missing := [key for key in unread if key not in _keys_of(read)]:
        listed = listed_keys({key: tree[key] for key in missing})
        release = transformers.__version__
        raise InputError(
            f"{where}: not understood, and transformers {release} has no such keys: {listed}",
            hint="remove from config.json what you know to have no effect, or weigh the module that "
            "transformers makes without them: --as torch",
        )
    try:
        config = read(**{**_described(tree), "model_type": kind})
        config.use_cache = False
        return transformers.AutoModelForCausalLM.from_config(config, dtype=weights, trust_remote_code=False)
    except MemoryError as full:
        what = f"{where}: its module takes more than {MOST_BYTES // 2**30} GiB without its weights"
        raise InputError(what, hint=OWN_FUNCTION) from full
    except Exception as failed:  # whatever transformers raises for values that it does not expect
        words = " ".join(str(failed).splitlines()[:2])[:300]
        raise InputError(
            f"{where}: transformers {transformers.__version__} cannot make a {kind} model of it: "
            f"{type(failed).__name__}: {words}",
            hint="correct the file, or install the release of transformers that it was written for",
        ) from failed


def _known_type(tree: Mapping[str, Any], where: str) -> str:
    """Return the `model_type` by which transformers knows a model: its own, or that of its architecture."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own = tree["model_type"]
    if own in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return own
    release = importlib.metadata.version("transformers")
    if own in CONFIG_MAPPING:
        raise InputError(
            f"{where}: transformers {release} has no {own} model that predicts the next token",
            hint=OWN_FUNCTION,
        )
    for name in _texts(tree.get("architectures")):
        same = [kind for kind, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if each == name]
        stem = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        if same:
            return next((kind for kind in same if CONFIG_MAPPING[kind].__name__ == f"{stem}Config"), same[0])
    code = f"; {CODE}" if tree.get("auto_map") else ""
    near = [repr(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_misspelling(own, kind)]
    meant = f"did you mean {' or '.join(near)}? A" if near else "a"
    raise InputError(
        f"{where}: model_type {own[:100]!r} is known neither here nor to transformers {release}{code}",
        hint=f"{meant} later release of transformers may know it; or {OWN_FUNCTION}",
    )


def _keys_of(read: Any) -> set[str]:
    """Return the keys that a class of transformers' configurations has."""
    names = {*getattr(read, "__dataclass_fields__", ()), *getattr(read, "attribute_map", ())}
    if "rope_parameters" in names:  # which transformers fills from the keys of earlier releases
        names |= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    return names | set(inspect.signature(read.__init__).parameters)


def _described(given: Any) -> Any:
    """Return the keys of a file that say what the model is, at any depth."""
    if isinstance(given, Mapping):
        return {key: _described(value) for key, value in given.items() if not RUNNING.fullmatch(key)}
    return given


def _format_of(tree: Mapping[str, Any], where: str) -> Any:
    """Return the format of a file's weights; bfloat16 where the file does not say it."""
    import torch

    named = str(tree.get("dtype") or tree.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    found = getattr(torch, named, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"{where}: dtype = {named[:40]!r} is no format of weights", hint='write "bfloat16"')
    return torch.bfloat16 if found.itemsize == 1 else found  # weights in 8 bits are stored, not trained


def _check_sizes(tree: Any, path: str) -> None:
    """Raise for a number of layers or experts, or a list, that no model has, at any depth of the file."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            _check_sizes(value, f"{path}{key}.")
        if isinstance(value, str | list) and len(value) > MOST_ENTRIES:
            hint = f"a list of at most {MOST_ENTRIES:,} entries is read"
            raise InputError(f"{path}{key} has {len(value):,} entries", hint=hint)
        if not isinstance(value, int):
            continue
        for words, most in COUNTS.items():
            if re.search(words, key) and not re.search("size|dim|index", key) and value > most:
                hint = f"a module of at most {most:,} is weighed"
                raise InputError(f"{path}{key} = {value}", hint=hint)


def _check_length(module: Any, length: int) -> None:
    """Raise if a sequence is longer than the table of a model's learned positions."""
    import torch

    for name, part in module.named_modules():
        is_table = isinstance(part, torch.nn.Embedding) and re.search(r"wpe|pos", name.rpartition(".")[2])
        if is_table and part.num_embeddings < length:
            raise InputError(
                f"a sequence of {length} tokens, and {name} has {part.num_embeddings} positions",
                hint=f"use batch.sequence_length={part.num_embeddings} at most",
            )


def _texts(given: Any) -> Iterable[str]:
    return [str(each) for each in given] if isinstance(given, list) else [str(given or "")]


@contextlib.contextmanager
def _in_time(where: str) -> Iterator[None]:
    """Raise an `InputError` if the block takes much more of the processor than any module does."""

    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    except TooLong as late:
        what = f"{where}: transformers had not made its module after {MOST_SECONDS:.0f} s of the processor"
        raise InputError(what, hint="look for a size or a list in the file that no model has") from late
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _limit_memory() -> None:
    """Let this process take no more memory than a module of shapes needs by far."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # another system, or a lower limit
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
