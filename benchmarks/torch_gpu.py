"""Eager steps of Hugging Face models on one GPU, beside what `mw.weigh` says of the same modules without it.

Run: python benchmarks/torch_gpu.py [--chip NAME] [--case NAME ...] [--record]. Without a GPU only the
predictions are printed. A step is a function: forward, backward, AdamW and `zero_grad`. It holds the model's
output until it returns. Weights and data are random. Peaks are those of PyTorch's caching allocator after two
steps; a time is the median of three runs of five steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _record import write_record

import meshwright as mw

WARM_UP, RUNS, STEPS = 2, 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module, the shapes of its inputs with the number of their ids (0: floats), and autocast's format."""

    module: Callable[[], Any]
    inputs: Mapping[str, tuple[tuple[int, ...], int]]
    autocast: torch.dtype | None = None


def gpt2() -> Any:
    """GPT-2 124M without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def llama(*, repeats: bool) -> Any:
    """Four layers of Llama 3.2 1B with its head, in bfloat16; checkpointed if `repeats`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, **heads, vocab_size=128_256, use_cache=False, tie_word_embeddings=True)
    module = LlamaForCausalLM(config).to(torch.bfloat16)
    if repeats:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module.train()


def bert() -> Any:
    """BERT base with dropout."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig()).train()


def vit() -> Any:
    """ViT B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000)).train()


def resnet() -> Any:
    """ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)).train()


def text(rows: int, length: int, vocab: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """The shapes of ids and labels."""
    return {name: ((rows, length), vocab) for name in ("input_ids", "labels")}


IMAGES = {"pixel_values": ((64, 3, 224, 224), 0), "labels": ((64,), 1000)}
CASES = {
    "gpt2-124m": Case(module=gpt2, inputs=text(8, 1024, 50_257), autocast=torch.bfloat16),
    "llama": Case(module=partial(llama, repeats=False), inputs=text(2, 4096, 128_256)),
    "llama-checkpointed": Case(module=partial(llama, repeats=True), inputs=text(2, 4096, 128_256)),
    "bert-base": Case(module=bert, inputs=text(32, 512, 30_522), autocast=torch.bfloat16),
    "vit-b16": Case(module=vit, inputs=IMAGES, autocast=torch.bfloat16),
    "resnet-50": Case(module=resnet, inputs=IMAGES),
}


def inputs_of(case: Case, device: str) -> dict[str, torch.Tensor]:
    """The case's inputs on a device."""
    return {
        name: torch.randint(0, ids, shape, device=device) if ids else torch.randn(shape, device=device)
        for name, (shape, ids) in case.inputs.items()
    }


def predicted(case: Case, chip: str) -> dict[str, Any]:
    """What is predicted of a step: the peaks of the allocator, and the seconds with their interval."""
    with torch.device("meta"):
        module = case.module()
    step = mw.torch_step(
        module, **inputs_of(case, "meta"), optimizer=torch.optim.AdamW, autocast=case.autocast
    )
    weighed = mw.weigh(step, on=f"1x{chip}")
    rank, prediction = weighed.account.ranks[0], weighed.account.prediction
    found: dict[str, Any] = {"allocated_bytes": rank.peak_bytes, "reserved_bytes": rank.reserved_bytes}
    if prediction is not None:
        ends = ("low", "expected", "high")
        found["seconds"] = {end: getattr(prediction.step_seconds, end) for end in ends}
        found["seconds"] = {end: value for end, value in found["seconds"].items() if value is not None}
    return found


def measured(case: Case) -> dict[str, Any]:
    """The same of steps on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = case.module()
    inputs = inputs_of(case, "cuda")
    optimizer = torch.optim.AdamW(module.parameters())
    loss = torch.zeros(())

    def step() -> torch.Tensor:
        with torch.autocast("cuda", dtype=case.autocast, enabled=case.autocast is not None):
            output = module(**inputs)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output.loss.detach()

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / STEPS)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "seconds": statistics.median(seconds),
        "loss": float(loss),
    }


def main() -> None:
    """Predict and measure each case, print them, and write the record if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", default="H200", help="for which to predict, by its name in the catalog")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--record", action="store_true", help="write records/DATE_torch_gpu.toml")
    asked = parser.parse_args()
    rows = []
    for name in asked.case:
        row: dict[str, Any] = {"case": name, "predicted": predicted(CASES[name], asked.chip)}
        if torch.cuda.is_available():
            row["measured"] = measured(CASES[name])
            torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)
        rows.append(row)
    if asked.record:
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
        command = f"python benchmarks/torch_gpu.py --chip {asked.chip} --case {' '.join(asked.case)} --record"
        packages = ("torch", "transformers")
        print("wrote", write_record("torch_gpu", command, packages, {"device": device}, {"case": rows}))


if __name__ == "__main__":
    main()
