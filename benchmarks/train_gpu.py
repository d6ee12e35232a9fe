"""The train step of `meshwright train` against the same model under torch.compile, on one GPU, as a ratio.

Run: pip install -r requirements/torch-py311.txt (a CUDA build); python benchmarks/train_gpu.py --record
Without an NVIDIA GPU it says so, measures nothing and ends well.

Ours are the programs that `meshwright train` compiles, at the preset's rematerialisation. Theirs is
`_torch_decoder`: parameters and AdamW's moments in fp32, fused AdamW, bf16 autocast, TF32 for what is left in
fp32, flash or cuDNN attention, torch.compile. For fp8 theirs multiplies as ours does where this PyTorch has
such products, else in bf16, and the record says which. Both start from our first parameters, on the same
tokens, at the same constant learning rate; the first losses must be close.

Each case has a process of its own, where both lie in memory. A round is some steps of the one, then as many
of the other, in turns as to who is first, each waited for at its end; the ratio is our tokens/s over theirs,
round by round: above 1 we are faster. MFU: the weighed ledger's model FLOPs over the median step and the
catalog's dense peak for the format in which the blocks multiply. Peaks of memory are each allocator's own:
ours since the process began, theirs of the timed rounds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else jax takes the memory that torch needs

import numpy as np
from _record import write_record

import meshwright as mw
from meshwright.config import AdamWOptimizer, Layout, RunConfig, TransformerModel, load_config
from meshwright.hardware import Fleet
from meshwright.trainer.loop import devices_of, local_fleet

WARM_UP = 2  # rounds
STEPS = 10  # of a round
# Sizes that fit twice into 80 GB.
SHAPES = {
    "gpt2-124m": ["batch.sequences=32", "batch.sequence_length=1024"],
    "llama-1b": ["batch.sequences=4", "batch.sequence_length=2048"],
}
COMMON = ["batch.microbatch_sequences=none", "schedule={kind='constant', warmup_steps=0}", "layout=data=-1"]
PEAK_FORMAT = {"bf16": "bf16", "fp8": "fp8-e4m3"}
FIRST_LOSS_WITHIN = {"bf16": 0.02, "fp8": 0.1}  # nats; a guess, an order above what rounding was seen to do
COMPILE_MODES = ("max-autotune-no-cudagraphs", "default")  # of torch.compile
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", "triton")

Steps = Callable[[int], float]  # runs so many steps, waits for them, returns the last one's loss


class Ours:
    """The programs of `meshwright train`, their state and one batch on the device."""

    def __init__(self, config: RunConfig, fleet: Fleet, tokens: np.ndarray) -> None:
        import jax

        from meshwright.sharding import mesh_of
        from meshwright.trainer.loop import compile_programs

        self.wait = jax.block_until_ready
        layout = Layout.parse(config.layout).resolve(fleet.num_devices)
        self.device = devices_of(fleet, layout)[0]
        self.programs = compile_programs(config, mesh_of(layout.axes, [self.device]), fleet.chip.platform)
        self.state = self.programs.init(np.uint32(config.seed))
        abstract = self.programs.built.batch["tokens"]
        rows = tokens.astype(np.int32).reshape(abstract.shape)
        self.batch = {"tokens": jax.device_put(rows, abstract.sharding)}
        self.parameters = jax.device_get(self.state["parameters"])

    def run(self, num_steps: int) -> float:
        """See `Steps`."""
        metrics: Any = None
        for _ in range(num_steps):
            self.state, metrics = self.programs.step(self.state, self.batch)
        self.wait(self.state)
        return float(metrics["loss"])

    def peak_bytes(self) -> int | None:
        """The most that jax's allocator has held since the process began."""
        return (self.device.memory_stats() or {}).get("peak_bytes_in_use")


def torch_steps(
    config: RunConfig,
    parameters: Any,
    tokens: np.ndarray,
    device: str = "cuda",
    compile_mode: str = COMPILE_MODES[0],
) -> tuple[Steps, str]:
    """The same train step in PyTorch, and how its blocks multiply: "bf16" or "fp8"."""
    import torch
    from _torch_decoder import Decoder, adamw_of, copy_weights, plain_product
    from _torch_fp8 import fp8_product, has_scaled_products
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model_config, chosen = config.model, config.optimizer
    assert isinstance(model_config, TransformerModel)
    assert isinstance(chosen, AdamWOptimizer)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    narrow = config.precision == "fp8" and has_scaled_products()
    product = fp8_product if narrow else plain_product
    model = Decoder(model_config, config.batch.sequence_length, torch.bfloat16, product)
    copy_weights(parameters, model)
    model.to(device)
    compiled = torch.compile(model, mode=compile_mode)
    optimizer = adamw_of(model, chosen, fused=True)
    batch = torch.from_numpy(tokens).to(device)
    flash = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]

    def run(num_steps: int) -> float:
        total = torch.zeros(())
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=device)
            for rows in batch:
                with torch.autocast(device, dtype=torch.bfloat16), sdpa_kernel(flash):
                    loss = compiled(rows) / len(batch)
                loss.backward()
                total += loss.detach()
            if chosen.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_norm)
            optimizer.step()
        return float(total)  # waits for all before it on the device, the update too

    return run, "fp8" if narrow else "bf16"


def interleaved(
    ours: Steps, theirs: Steps, rounds: int, on_warm: Callable[[], None]
) -> list[dict[str, float]]:
    """Seconds of a step of each in each round; who is first changes. `on_warm`: after the warm-up."""
    sides, found = [("ours", ours), ("torch", theirs)], []
    for index in range(WARM_UP + rounds):
        if index == WARM_UP:
            on_warm()
        seconds = {}
        for name, steps in sides if index % 2 == 0 else reversed(sides):
            started = time.perf_counter()
            steps(STEPS)
            seconds[name] = (time.perf_counter() - started) / STEPS
        found.append(seconds)
    return found[WARM_UP:]


def measure(
    model: str, precision: str, rounds: int, overrides: list[str], chip: str, compile_mode: str
) -> dict[str, Any]:
    """One case: a row of the record."""
    import torch

    config = load_config(model, [*SHAPES[model], *COMMON, f"precision={precision}", *overrides])
    assert isinstance(config.model, TransformerModel)
    weighed = mw.weigh(config, on=f"1x{chip}")
    batch = config.batch
    micro = batch.microbatch_sequences or batch.sequences
    shape = (batch.sequences // micro, micro, batch.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    ours = Ours(config, weighed.fleet, tokens)
    theirs, torch_format = torch_steps(config, ours.parameters, tokens, compile_mode=compile_mode)
    first = {"ours": ours.run(1), "torch": theirs(1)}
    if abs(first["ours"] - first["torch"]) > FIRST_LOSS_WITHIN[precision]:
        raise SystemExit(f"{model} in {precision}: the models differ, first losses {first}; nothing measured")
    timed = interleaved(ours.run, theirs, rounds, torch.cuda.reset_peak_memory_stats)
    peaks = weighed.fleet.chip.peak_flops_per_second
    formats = {"ours": PEAK_FORMAT[precision], "torch": PEAK_FORMAT[torch_format]}
    row: dict[str, Any] = {
        "model": model,
        "precision": precision,
        "overrides": overrides,
        "torch_multiplies_in": torch_format,
        "torch_compile_mode": compile_mode,
        "remat": config.remat,
        "tokens_per_step": batch.tokens_per_step,
        "sequence_length": batch.sequence_length,
        "same_program_as_weighed": weighed.compiled.fingerprint == ours.programs.fingerprint,
        "model_flops": weighed.ledger.flops.model,
        "predicted": predicted(weighed),
        "peak_flops_per_second": {name: peaks[each] for name, each in formats.items()},
        "first_loss": first,
        "loss_after": {"ours": ours.run(1), "torch": theirs(1)},
    }
    memory = {"ours": ours.peak_bytes(), "torch": torch.cuda.max_memory_allocated()}
    row["peak_bytes"] = {name: value for name, value in memory.items() if value is not None}
    return row | speeds(timed, batch.tokens_per_step, row["model_flops"], row["peak_flops_per_second"])


def predicted(weighed: mw.Weighing) -> dict[str, float]:
    """Return what was predicted of our step: its seconds with their interval, and the program's bytes."""
    assert weighed.prediction is not None, weighed.no_prediction
    seconds = weighed.prediction.step_seconds
    found = {"step_seconds": seconds.expected, "low_seconds": seconds.low, "high_seconds": seconds.high}
    found["program_bytes"] = weighed.ledger.memory.peak_bytes
    return {name: value for name, value in found.items() if value is not None}


def spread(values: list[float]) -> dict[str, float]:
    """The median, the least and the most."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def speeds(
    timed: list[dict[str, float]], tokens: int, model_flops: int, peaks: dict[str, float]
) -> dict[str, Any]:
    """Tokens per second, their ratio and MFUs, from seconds per step by round."""
    medians = {name: statistics.median(each[name] for each in timed) for name in ("ours", "torch")}
    return {
        "rounds": len(timed),
        "steps_per_round": STEPS,
        "tokens_per_second": {n: spread([tokens / each[n] for each in timed]) for n in medians},
        "ratio": spread([each["torch"] / each["ours"] for each in timed]),
        "mfu": {n: model_flops / (seconds * peaks[n]) for n, seconds in medians.items()},
    }


def gpu_here() -> Fleet | None:
    """The attached NVIDIA GPUs, as jax sees them; None where there are none."""
    fleet = local_fleet()
    return fleet if fleet.chip.platform == "cuda" else None


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precision", nargs="+", choices=PEAK_FORMAT, default=list(PEAK_FORMAT))
    parser.add_argument("--rounds", type=int, default=10, help="timed ones")
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of both")
    parser.add_argument("--compile-mode", choices=COMPILE_MODES, default=COMPILE_MODES[0])
    parser.add_argument("--record", action="store_true", help="write records/DATE_train_gpu.toml")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds}: use at least 1")
    return asked


def main() -> None:
    """Measure every case, print and, if asked, record it."""
    asked, fleet = parse(), gpu_here()
    if fleet is None:
        print("No NVIDIA GPU is here, so nothing was measured.")
        return
    import torch

    if not torch.cuda.is_available():
        build = f"PyTorch {torch.__version__}"
        raise SystemExit(f"jax sees {fleet.chip.name}, but {build} sees no GPU: install a CUDA build")
    rows = []
    for model in asked.model:
        for precision in asked.precision:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # for peaks of its own
                case = (model, precision, asked.rounds, asked.set, fleet.chip.name, asked.compile_mode)
                rows.append(process.submit(measure, *case).result())
            for key, value in rows[-1].items():
                print(key, value)
            print(flush=True)
    if asked.record:
        facts = {"device": torch.cuda.get_device_name(0), "torch_cuda": torch.version.cuda}
        packages = [name for name in PACKAGES if _installed(name)]
        command = f"python benchmarks/train_gpu.py --model {' '.join(asked.model)} --precision "
        command += f"{' '.join(asked.precision)} --rounds {asked.rounds} --compile-mode {asked.compile_mode}"
        command += "".join(f" --set {each}" for each in asked.set) + " --record"
        print("wrote", write_record("train_gpu", command, packages, facts, {"case": rows}))


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
