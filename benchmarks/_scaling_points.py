"""Which steps the scaling benchmark weighs, and which published runs are shown beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.config import RunConfig, TransformerModel

NUM_GPUS = tuple(2**power for power in range(3, 13))  # 8 to 4096
MODES = ("strong", "weak")
SEQUENCES_PER_GPU = 2  # of weak scaling; the published bf16 runs of these models had 2, one had 1.5
MOST_TENSOR = 8  # a host's GPUs
HYBRID_FROM = 512  # GPUs; of 8B on 16, 32, 64 and 256 the state over all of them was the faster
# GPUs that hold one copy of the state in the hybrid layout, and what is rematerialised: what fits an H100.
COPY_GPUS = {"llama3-8b": 8, "llama3-70b": 64}
REMAT = {"llama3-8b": "dots-attention", "llama3-70b": "full"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to lay a preset out, and how many sequences a replica handles at a time."""

    layout: str
    microbatch_sequences: int


def global_sequences(mode: str, num_gpus: int, preset_sequences: int) -> int:
    """Sequences of one step: the preset's (strong), or as many for each GPU (weak)."""
    assert mode in MODES, f"a mode {mode!r}"
    return preset_sequences if mode == "strong" else SEQUENCES_PER_GPU * num_gpus


def candidates(preset: str, num_gpus: int, sequences: int) -> list[list[Candidate]]:
    """Layouts to weigh, in groups: the next group is for where nothing of the ones before fits.

    The batch goes over as many GPUs as it divides over; each sequence over `tensor`, only as far as there
    are more GPUs than sequences. The state lies over all of them, or, of large fleets, also over as many as
    hold one copy, with `data` between (hybrid). Two sequences at a time, then one.
    """
    tensor = 1
    while sequences % (num_gpus // tensor):
        tensor *= 2
        if tensor > MOST_TENSOR:
            return []
    ways = num_gpus // tensor
    copy = COPY_GPUS[preset] // tensor
    sizes = [{"fsdp": ways, "tensor": tensor}]
    if num_gpus >= HYBRID_FROM:
        sizes.append({"data": ways // copy, "fsdp": copy, "tensor": tensor})
    layouts = [",".join(f"{axis}={size}" for axis, size in each.items() if size > 1) for each in sizes]
    microbatches = [2, 1] if sequences // ways % 2 == 0 else [1]
    return [
        [Candidate(layout=layout, microbatch_sequences=micro) for layout in layouts] for micro in microbatches
    ]


def overrides(preset: str, sequences: int, candidate: Candidate) -> list[str]:
    """What to set in the preset."""
    return [
        f"batch.sequences={sequences}",
        f"batch.microbatch_sequences={candidate.microbatch_sequences}",
        f"remat={REMAT[preset]}",
    ]


def fastest(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of weighed candidates the one that fits and is predicted to be the fastest."""
    fitting = [row for row in rows if row["fits"]]
    return min(fitting, key=lambda row: row["step_seconds"]) if fitting else None


def is_model(row: Mapping[str, str], config: RunConfig) -> bool:
    """Return whether a published row trained all of a preset's model, at its sequence length.

    By the dimensions it states, not by its name.
    """
    model = config.model
    assert isinstance(model, TransformerModel), "only Transformers are published"
    wanted = {
        "n_layers": model.num_layers,
        "d_model": model.embed_dim,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "d_ff": model.mlp_dim,
        "vocab": model.vocab_size,
        "seq_len": config.batch.sequence_length,
    }
    words = f"{row['model']} {row['notes']}".lower()
    part = any(word in words for word in ("lora", "sft", "finetun", "fine-tun"))
    return not part and all(row[column].strip() == str(value) for column, value in wanted.items())


def published(rows: Iterable[Mapping[str, str]], config: RunConfig) -> list[dict[str, Any]]:
    """A preset's model published on H100: bf16 runs; told apart, those on slower cards, and 8-bit ones.

    Of rows that say the same of the same number of GPUs (a table printed again) the first stays.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        rate, accelerator = row["tokens_per_s_per_device"].strip(), row["accelerator"].upper()
        if not rate or not accelerator.startswith("H100") or not is_model(row, config):
            continue
        eight_bits = "8" in row["precision"].lower().replace("bf16", "")
        limited = "500W" in accelerator.replace(" ", "")
        point = {
            "id": row["id"],
            "source": row["source"],
            "num_gpus": int(row["n_devices"]),
            "tokens_per_second_per_gpu": float(rate),
            "kind": "8-bit" if eight_bits else "bf16, cards of 500 W" if limited else "bf16",
            "accelerator": row["accelerator"],
            "precision": row["precision"],
            "sharding": row["sharding"],
            "tensor": int(row["tp"] or 1),
            "stage": int(row["pp"] or 1),
            "global_sequences": int(row["global_batch_seqs"] or 0),
            "notes": row["notes"],
        }
        found.setdefault((point["num_gpus"], point["tokens_per_second_per_gpu"]), point)
    return sorted(found.values(), key=lambda point: (point["num_gpus"], point["id"]))
