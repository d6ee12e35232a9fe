"""The memory of a published row: our program's, with what its framework keeps otherwise, beside what it took.

A framework that places the same state may still keep other things while a step computes. What follows from
its source's code is added or taken away by reason, as `_published_stacks` does with seconds; nothing is
fitted. What stays uncounted: the first stage's logits, which are in the last; work space.
"""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

from _published_rows import Expressed

from meshwright.config import Layout, Ticks, TransformerModel, ticks_of
from meshwright.contrib.pipelines import Schedule
from meshwright.ledger import MemoryLedger

GIB = 2**30
WEIGHT_BYTES, STATE_BYTES = 2, 12  # of a parameter in use; of its master weight and two moments, in float32
NEAREST_TO_NONE = "dots-attention"  # of our policies, to keeping everything
INPUTS = "inputs of products that our policy computes again"
EXCHANGED = "attention's output before its heads are exchanged"
SLOTS = "microbatches that wait in the pipeline"
TABLES = "tables of the first stage"


def memory_of(row: Expressed, ledger: MemoryLedger) -> dict[str, Any]:
    """Return a row's memory in GiB beside its figure; {} where the row, or the ledger, has none.

    `memory_error`: what lives at our program's peak, with what the row's stack keeps otherwise, over the
    figure - 1.
    """
    if row.measured_peak_bytes is None or ledger.peak_bytes is None:
        return {}
    otherwise = otherwise_kept(row, ledger)
    found = ledger.peak_bytes + math.fsum(otherwise.values())
    return {
        "measured_peak_gib": _short(row.measured_peak_bytes),
        "peak_gib": _short(ledger.peak_bytes),
        "otherwise_gib": {reason: _short(each) for reason, each in otherwise.items()},
        "memory_error": round(found / row.measured_peak_bytes - 1, 5),
    }


def otherwise_kept(row: Expressed, ledger: MemoryLedger) -> dict[str, float]:
    """Return the bytes that a stack's first stage keeps beyond ours, by reason; less is negative."""
    layout, stack = Layout.parse(row.config.layout), row.stack
    kept: dict[str, float] = {}
    if stack.repeats_nothing and row.config.remat == NEAREST_TO_NONE:
        kept |= _saved_by_megatron(row, layout)
    if stack.head_in_last_stage and layout.size("stage") > 1:
        slots = _num_slots(row)
        waiting = bytes_of_slots(ledger, slots) / slots
        kept |= {SLOTS: (_kept_by_megatron(row) - slots) * waiting, TABLES: _tables(row, layout)}
    return kept


def _saved_by_megatron(row: Expressed, layout: Layout) -> dict[str, float]:
    """Return the bytes of what Megatron saves without recomputation, and our policy computes again.

    The inputs of products: both norms' outputs, split by position over `tensor`, and gate times up of the
    MLP. Source: NVIDIA/TransformerEngine, pytorch/module/layernorm_linear.py and linear.py, which save
    `ln_out` and the input. Where heads are exchanged over `context` attention's output is saved before the
    exchange too (pytorch/attention/dot_product_attention/context_parallel.py since release 2.8).
    """
    model, batch, config = row.config.model, row.config.batch, row.config
    assert isinstance(model, TransformerModel), "a published row is a transformer"
    tokens = (batch.microbatch_sequences or 1) * batch.sequence_length / layout.size("context")
    stages = layout.size("stage")
    at_once = _kept_by_megatron(row) / config.pipeline_chunks if stages > 1 else 1
    layers = model.num_layers / stages * at_once * tokens / layout.size("tensor")
    found = {INPUTS: layers * WEIGHT_BYTES * (2 * model.embed_dim + model.mlp_dim)}
    if row.exchanges_heads and layout.size("context") > 1:
        found[EXCHANGED] = layers * WEIGHT_BYTES * model.num_heads * model.head_dim
    return found


def _ticks(row: Expressed) -> Ticks:
    ticks = ticks_of(row.config, Layout.parse(row.config.layout))
    assert ticks is not None, f"{row.id} has one stage"
    return ticks


def _num_slots(row: Expressed) -> int:
    """Return the slots of our pipeline, as the step makes them."""
    ticks, model = _ticks(row), row.config.model
    assert isinstance(model, TransformerModel), "only transformers have stages"
    held = ticks.num_padded_layers // ticks.num_stages // ticks.num_chunks
    return Schedule(ticks, reads_first=held == model.group_size(row.config.remat)).num_slots


def bytes_of_slots(ledger: MemoryLedger, slots: int) -> int:
    """Return the bytes of the arrays [slots, groups of layers, ...] in which our forward passes save."""
    shape = re.compile(rf"\w+\[{slots},\d+,\d+,\d+,\d+[\d,]*\]")  # a microbatch's rows, positions, width
    waits = ("saved_activations", "other")  # "other": the inputs, that are no layer's own result
    return sum(b.num_bytes for b in ledger.buffers if b.category in waits and shape.fullmatch(b.shape))


def _kept_by_megatron(row: Expressed) -> int:
    """Return the chunks of layers whose forward passes wait on Megatron's first stage.

    Source: NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/schedules.py: warmup passes, and the one
    before the first backward pass. With one chunk S - 1 + 1; with V chunks 2 (S - 1) + (V - 1) S + 1.
    """
    ticks = _ticks(row)
    stages, chunks = ticks.num_stages, ticks.num_chunks
    return min(stages if chunks == 1 else (chunks + 1) * stages - 1, ticks.num_needed)


def _tables(row: Expressed, layout: Layout) -> float:
    """Return the bytes of tables beyond ours on Megatron's first stage, which holds the embedding alone.

    In a step our stages hold a part of the embedding and the whole head, with their gradients; between steps
    they share both. A tied table is whole on both ends of Megatron's pipeline.
    """
    model, stages = row.config.model, layout.size("stage")
    assert isinstance(model, TransformerModel), "only transformers have stages"
    table = model.vocab_size * model.embed_dim / layout.size("tensor")
    sums = WEIGHT_BYTES + (2 if row.config.gradient_sum == "bf16" else 4)
    sharing = layout.size("fsdp") * (layout.size("data") * layout.size("context") if row.config.zero1 else 1)
    tied = model.tied_embeddings
    in_step, between = (0.0, 1 - 1 / stages) if tied else (-1 / stages, 1 - 2 / stages)
    return table * (in_step * sums + between * STATE_BYTES / sharing)


def print_memory(scored: list[dict[str, Any]]) -> None:
    """Print the memory of all rows whose source states one, and how far off they are; nothing without any."""
    rows = sorted((row for row in scored if "memory_error" in row), key=lambda row: row["memory_error"])
    if not rows:
        return
    print("\nMemory in GiB: alive at our program's peak, otherwise in the row's stack, stated by its source")
    for row in rows:
        otherwise = math.fsum(row["otherwise_gib"].values())
        figures = f"{row['peak_gib']:7.1f} {otherwise:+7.1f} {row['measured_peak_gib']:7.1f}"
        print(f"{row['id']:20} {row['layout']:28} {figures} {100 * row['memory_error']:+6.1f} %")
    errors = [abs(row["memory_error"]) for row in rows]
    within = sum(error <= 0.05 for error in errors)
    print(f"{len(rows)} rows: median {100 * statistics.median(errors):.1f} %, {within} within 5 %")


def _short(num_bytes: float) -> float:
    return float(f"{num_bytes / GIB:.5g}")
