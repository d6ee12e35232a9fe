"""Memory of public single-file speed runs under `torch.compile`, beside what `mw.weigh` finds for them.

Run: python benchmarks/torch_compiled.py --records FOLDER [--ids ID ...] [--record]. FOLDER is the `records`
folder of a checkout of github.com/KellerJordan/modded-nanogpt. Each log there begins with the script that ran
and ends with the peak of PyTorch's allocator, in MiB: `torch.cuda.max_memory_allocated`. The scripts are run
up to their own "int main", so they define the model and its optimizers. Changed in them: the device, which is
none here. What they do after that is stated here: formats, optimizers, and DDP where they wrap the model.

A peak is that of training where validation takes as many tokens at a time, or sums its loss over parts. Runs
whose peak may be that of validation are not listed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import types
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _record import write_record

MIB = 2**20
FAR = 0.10
MARK = "# int main"
MEASURED = re.compile(r"^peak memory (?:consumption|allocated): (\d+) MiB(?: reserved: (\d+) MiB)?", re.M)
RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedrun:
    """One log, and what its script does after its definitions.

    `built`: the arguments of its `GPT`. `halved`: all of the model is in bf16 but the products' weights; else
    its embeddings alone are. `has_ddp`: the model is wrapped in DDP, whose buckets hold the gradients.
    `seen`: the model of Inductor was written in sight of this row.
    """

    log: str
    built: dict[str, int]
    halved: bool = False
    has_ddp: bool = False
    seen: bool = False


SMALL = {"vocab_size": 50_304, "num_layers": 12, "num_heads": 6, "model_dim": 768}
MEDIUM = {"vocab_size": 50_257, "num_layers": 16, "num_heads": 8, "model_dim": 1024}
RUNS = {
    "2024-12-10": Speedrun(
        log="track_1_short/2024-12-10_MFUTweaks/04df8c70-2462-4b6c-9e49-c7589b321a81.txt",
        built=SMALL, halved=True, has_ddp=True, seen=True,
    ),
    "2024-12-17": Speedrun(
        log="track_1_short/2024-12-17_SparsifyEmbeds/165384d5-5a41-4fba-9b79-8ecc372616ea.txt",
        built=SMALL, halved=True, has_ddp=True,
    ),
    "medium 2025-01-18": Speedrun(
        log="track_2_medium/2025-01-18/241dd7a7-3d76-4dce-85a4-7df60387f32a.txt", built=MEDIUM, seen=True
    ),
    "medium 2025-04-22": Speedrun(
        log="track_2_medium/2025-04-22_Record8/075_640429f2-e726-4e83-aa27-684626239ffc.txt",
        built={**MEDIUM, "max_seq_len": 4 * 65_536},
    ),
    "medium 2025-08-28": Speedrun(
        log="track_2_medium/2025-08-28_Medium_NewValemb/036_61ef4351-7b68-4897-b440-a99221a1a629.txt",
        built={**MEDIUM, "max_seq_len": 4 * 65_536},
    ),
}  # fmt: skip
TOKENS = 65_536  # of one rank


def script_of(text: str) -> str:
    """Return the definitions of a log's script, without what asks for a device."""
    script = text[: text.index(MARK)]
    script = re.sub(r"device ?= ?[\"']cuda[\"']", 'device="cpu"', script)
    script = re.sub(r"^torch\.empty\(1.*$|^with open\(sys\.argv\[0\]\) as f:\n.*$", "", script, flags=re.M)
    return script.replace(".cuda()", "")


def measured_in(text: str) -> dict[str, int]:
    """Return the MiB that a log prints: the last `allocated`, and `reserved` where it has one."""
    found = MEASURED.findall(text)
    assert found, "a log prints its peak"
    allocated, reserved = found[-1]
    return {"measured_mib": int(allocated)} | ({"measured_reserved_mib": int(reserved)} if reserved else {})


def optimizers_of(script: Any, named: dict[str, Any], run: Speedrun) -> list[Any]:
    """Return the optimizers that a script makes: Muon for matrices of blocks, Adam for the rest."""
    import torch

    matrices = [p for name, p in named.items() if name.startswith("blocks") and p.ndim >= 2]
    others = [p for name, p in named.items() if not name.startswith("blocks") or p.ndim < 2]
    ranks = {} if run.has_ddp else {"rank": 0, "world_size": RANKS}
    return [torch.optim.Adam(others, foreach=False), script.Muon(matrices, **ranks)]


def weigh_run(run: Speedrun, text: str) -> dict[str, Any]:
    """Return what is found for the training step of a log's script, in MiB."""
    os.environ.update(RANK="0", WORLD_SIZE=str(RANKS), LOCAL_RANK="0")
    import torch
    from torch import nn

    import meshwright as mw

    script: Any = types.ModuleType("speedrun")
    sys.modules["speedrun"] = script
    script.world_size, script.rank = RANKS, 0
    exec(compile(script_of(text), "speedrun", "exec"), vars(script))
    with torch.device("meta"):
        if hasattr(script, "GPTConfig"):
            model = script.GPT(script.GPTConfig(**run.built))
        else:
            model = script.GPT(**run.built)
        model = model.bfloat16() if run.halved else model
        for part in model.modules():
            if run.halved and isinstance(part, script.CastedLinear):
                part.float()
            if isinstance(part, nn.Embedding):
                part.bfloat16()
        tokens = torch.zeros(TOKENS, dtype=torch.int32)
        inputs = (tokens, tokens.long(), torch.zeros((), dtype=torch.int32))
    names = [name for name, _ in model.named_parameters()]

    class Together(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})
            self.parts = optimizers_of(script, dict(zip(names, parameters, strict=True)), run)

        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for part in self.parts:
                part.step()
                self.state.update(part.state)

    compiled: Any = torch.compile(model)
    spreads = None if run.has_ddp else lambda module, _: module
    step = mw.torch_step(compiled, *inputs, optimizer=Together, parallelize=spreads)
    weighing = mw.weigh(step, on=f"{RANKS}xH100", layout=f"data={RANKS}")
    rank = weighing.account.ranks[0]
    return {
        "basis": weighing.ledger.memory.basis,
        "fits": weighing.fits,
        "found_mib": round(rank.peak_bytes / MIB),
        "found_reserved_mib": round(rank.reserved_bytes / MIB),
        "processor_seconds": round(weighing.account.seconds, 1),
    }


def compared(folder: Path, names: list[str], jobs: int) -> list[dict[str, Any]]:
    """Return the rows of the runs, with their errors."""
    texts = [(folder / RUNS[name].log).read_text(errors="replace") for name in names]

    def alone(name: str, text: str) -> dict[str, Any]:  # a script sets what stays set in its process
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(weigh_run, RUNS[name], text).result()

    with ThreadPoolExecutor(jobs) as threads:
        found = list(threads.map(alone, names, texts))
    rows: list[dict[str, Any]] = []
    for name, text, row in zip(names, texts, found, strict=True):
        measured = measured_in(text)
        error = row["found_mib"] / measured["measured_mib"] - 1
        rows.append({"run": name, "seen": RUNS[name].seen, **measured, **row, "error": round(error, 4)})
    return rows


def main() -> None:
    """Compare the runs, print the table, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=Path, required=True, help="the folder `records` of modded-nanogpt")
    parser.add_argument("--ids", nargs="+", default=list(RUNS), help="these runs alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--record", action="store_true", help="write records/DATE_torch_compiled.toml")
    given = parser.parse_args()
    rows = compared(given.records, given.ids, given.jobs)
    for row in rows:
        kind = "seen" if row["seen"] else "not seen"
        print(
            f"{row['run']:20}{row['measured_mib']:>8} MiB measured{row['found_mib']:>8} found"
            f"{row['error']:+8.1%}  {kind:10}{row['basis']}"
        )
    near = sum(abs(row["error"]) <= FAR for row in rows)
    print(f"{near} of {len(rows)} within {FAR:.0%}")
    if given.record:
        command = "python benchmarks/torch_compiled.py --records records --record"
        facts = {"within": FAR, "near": near, "rows": len(rows)}
        print(write_record("torch_compiled", command, ["meshwright", "torch"], facts, {"row": rows}))


if __name__ == "__main__":
    main()
