"""Train a few steps on one real rank of a gloo group, and write what one of them held and sent.

`python mesh_rank.py MODEL PLAN LAYOUT RANK FOLDER`. Bytes alive are those of PyTorch's own profiler.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from mesh_cases import make
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast_": "broadcast",
}
NUM_STEPS = 4
# Kernels of the CPU that make copies and free them before they end: of all gradients, of a strided gradient.
COPYING = ("aten::_chunk_cat", "aten::convolution_backward")
SENDING = "c10d::"  # gloo copies what it sends; NCCL does not


class Sent(TorchDispatchMode):
    """Count collectives by kind, and the bytes of their results."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()
        self.waits = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if self.waits:  # gloo's thread holds its tensors a little longer than the caller, which NCCL does not
            time.sleep(0.03)
            self.waits = False
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in KINDS:
            written = args[0] if namespace == "c10d" else result
            leaves = [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor)]
            self.waits = True
            self.calls[KINDS[name]] += 1
            self.bytes[KINDS[name]] += sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return result


def held(tensors):
    """Bytes of the storages of local tensors, each once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def peak_bytes(events):
    """The most that is alive in a step after the first, by the allocator's record, without those copies.

    Gloo's threads may hold arrays a little too long, which adds to a step. So the least of some steps counts.
    """
    spans = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and "name" in e]
    steps = [span[1:] for span in spans if span[0] in {f"step {n}" for n in range(1, NUM_STEPS)}]
    kernels = [span for span in spans if span[0].startswith((*COPYING, SENDING))]
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    changes.sort(key=lambda e: e["ts"])
    open_, arrays = {}, []  # each array as [its bytes, when it was made, when it was freed]
    for change in changes:
        address, size = change["args"]["Addr"], change["args"]["Bytes"]
        if size > 0:
            open_[address] = [size, change["ts"], float("inf")]
            arrays.append(open_[address])
        elif address in open_:
            open_.pop(address)[2] = change["ts"]
    moves = []
    for size, made, freed in arrays:
        inside = [(name, last) for name, first, last in kernels if first <= made <= last]
        if not any(name.startswith(SENDING) or freed <= last for name, last in inside):
            moves += [(made, size), (freed, -size)]
    most, total = [0] * len(steps), 0
    for when, size in sorted(moves):
        total += size
        for number, (first, last) in enumerate(steps):
            if first <= when <= last:
                most[number] = max(most[number], total)
    return min(most)


def main(model, plan, layout, rank, folder):
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    axes = dict(pair.split("=") for pair in layout.split(","))
    sizes = [int(size) for size in axes.values()]
    world = torch.tensor(sizes).prod().item()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        made = make(model, plan)
        module = made["module"]
        module = made["parallelize"](module, mesh) or module
        inputs, loss_of = made.pop("inputs"), made["loss"]
        optimizer = made["optimizer"](list(module.parameters()))
        del made
        gc.collect()  # a plan may leave a whole parameter in a cycle, which Python frees at some later time
        for step in range(NUM_STEPS):
            sent = Sent()
            # Each of gloo's threads holds its last arrays until it has others: give all of them some at once.
            others = [dist.all_reduce(torch.zeros(1), async_op=True) for _ in range(64)]
            for work in others:
                work.wait()
            del others, work
            with torch.profiler.record_function(f"step {step}"), sent:
                output = module(*inputs)
                loss = loss_of(output)
                loss.backward()
                gradients = held([p.grad for p in module.parameters() if p.grad is not None])
                optimizer.step()
            if step < NUM_STEPS - 1:
                optimizer.zero_grad()
                del output, loss
    profile.export_chrome_trace(str(folder / f"trace{rank}.json"))
    events = json.loads((folder / f"trace{rank}.json").read_text())["traceEvents"]
    states = [leaf for leaf in pytree.tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor)]
    found = {
        "parameters_bytes": held(module.parameters()),
        "gradients_bytes": gradients,
        "optimizer_state_bytes": held(states),
        "peak_bytes": peak_bytes(events),
        "calls": sent.calls,
        "bytes": sent.bytes,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    model, plan, layout, rank, folder = sys.argv[1:]
    main(model, plan, layout, int(rank), Path(folder))
