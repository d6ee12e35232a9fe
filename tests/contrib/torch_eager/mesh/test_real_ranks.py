"""What a rank holds and sends on fake tensors is what real processes hold and send, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.contrib.torch_eager.steps import weighed

HERE = Path(__file__).parent
MODELS = ("perceptrons", "decoder", "tied", "patches", "convolutions", "mixed")
PLANS = {
    "fsdp": (2, 4),
    "checkpoint": (2, 4),
    "kept": (2, 4),
    "bf16": (2,),
    "tensor": (2, 4),
    "fsdp_tensor": (4,),
    "data": (2, 4),
    "hybrid": (4,),
}
# In `make test-wide`: every plan and model, in few pairs. The first has uneven shards with gathers; `mixed`
# has functional collectives in a block.
WIDE = {
    ("perceptrons", "fsdp", 2),
    *(("decoder", plan, 4) for plan in ("fsdp_tensor", "hybrid")),
    *(("decoder", plan, 2) for plan in ("kept", "tensor")),
    ("perceptrons", "data", 2),
    *(("tied", plan, 2) for plan in ("data", "tensor")),
    *(("patches", plan, 2) for plan in ("bf16", "checkpoint")),
    *(("convolutions", plan, 2) for plan in ("fsdp", "checkpoint", "tensor")),
    ("perceptrons", "tensor", 2),
    *(("mixed", plan, 2) for plan in ("fsdp", "kept", "tensor")),
}
NOT_RUN = {("convolutions", "bf16")}  # the CPU's batch norm takes no weights and statistics of two formats


def _marks(model: str, plan: str, num_ranks: int) -> list[pytest.MarkDecorator]:
    """What is not in that set runs in `make test-long`."""
    return [pytest.mark.wide if (model, plan, num_ranks) in WIDE else pytest.mark.long]


CASES = [
    pytest.param(model, plan, num_ranks, marks=_marks(model, plan, num_ranks))
    for model in MODELS
    for plan, sizes in PLANS.items()
    for num_ranks in sizes
    if (model, plan) not in NOT_RUN
]


def real_ranks(model, plan, layout, num_ranks, folder):
    """Run the ranks, each in a process, and return what each of them held and sent."""
    command = [sys.executable, str(HERE / "mesh_rank.py"), model, plan, layout]
    running = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * num_ranks, said[0][-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def held_by_gloo(model, plan, messages):
    """Bytes that gloo's threads may hold for longer than the rank does, which NCCL does not.

    They are a copy of DDP's buckets, or both sides of the last gather of activations in each of the two
    threads of a group, where no other message follows soon.
    """
    if plan == "data":
        return max(message.payload_bytes for message in messages)
    if model != "perceptrons" or "tensor" not in plan:
        return 0
    gathers = [m for m in messages if m.kind == "all-gather" and "tensor" in m.axes]
    return 2 * max((m.payload_bytes + m.payload_bytes // m.group_size) // m.count for m in gathers)


@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # of a view that `mixed` returns; real ranks warn too
@pytest.mark.parametrize(("model", "plan", "num_ranks"), CASES)
def test_bytes_and_messages_are_those_of_real_ranks(model, plan, num_ranks, cases, tmp_path):
    import torch

    layout = cases.PLANS[plan][1][num_ranks]
    with torch.device("meta"):
        made = cases.make(model, plan)
    weighing = weighed(made.pop("module"), *made.pop("inputs"), on=f"{num_ranks}xCPU", layout=layout, **made)
    real = real_ranks(model, plan, layout, num_ranks, tmp_path)
    calls, sizes = Counter(), Counter()
    for message in weighing.account.messages:
        calls[message.kind] += message.count
        sizes[message.kind] += message.payload_bytes
    assert calls == real[0]["calls"]
    assert sizes == real[0]["bytes"]
    for ours in weighing.account.ranks:
        for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
            assert getattr(ours, name) == real[ours.rank][name], name
        # What differs is memory that a kernel takes and frees within one operation, and what gloo holds.
        held = held_by_gloo(model, plan, weighing.account.messages)
        peak_bytes = real[ours.rank]["peak_bytes"]
        assert 0.97 * peak_bytes - held <= ours.peak_bytes <= 1.03 * peak_bytes
