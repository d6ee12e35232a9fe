"""A weighing and a run made by hand, small enough to check by eye."""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.compiler import Argument, Compiled, TracedFlops
from meshwright.config import Layout, load_config
from meshwright.hardware import Fleet
from meshwright.ledger import Buffer, Collective, FlopLedger, Ledger, MemoryLedger, Timeline
from meshwright.measure import Measurement, Percentiles
from meshwright.planned import Plan, Planned
from meshwright.planning import settings_words
from meshwright.predict import Interval, Prediction, Slice, Speedup
from meshwright.report import renderable
from meshwright.results import Compilation, Weighing

GIB = 2**30
NO_CHANGES: dict[str, Any] = {}
LEDGER = ("traffic", "unpriced", "findings", "assumptions")


def made_memory(**changes: Any) -> MemoryLedger:
    fields: dict[str, Any] = {
        "reserved_bytes": 48 * GIB,
        "argument_bytes": 12 * GIB,
        "peak_bytes": 47 * GIB,
        "allowance": {"CUDA context and kernels": GIB // 2, "NCCL communicator of fsdp": GIB // 4},
        "usable_bytes": 80 * GIB,
        "by_category": {"saved_activations": 36 * GIB, "optimizer_state": 8 * GIB, "parameters": 4 * GIB},
        "optimizer_state_by_moment": {"mu": 4 * GIB, "nu": 4 * GIB},
        "timeline": Timeline(
            instants=(0, 5, 9),
            last_instant=12,
            peak_instant=5,
            by_category={"saved_activations": (0, 36 * GIB, 2 * GIB), "parameters": (4 * GIB,) * 3},
        ),
        "buffers": (
            Buffer(
                name="fusion.1",
                num_bytes=2 * GIB,
                shape="bf16[32,1,8192,4096]",
                format="bf16",
                category="saved_activations",
                moment="",
                rule="made in the forward pass",
                certainty="named",
                phase="forward",
                module="layers",
                first_instant=3,
                last_instant=9,
                operation="jit(step)/transpose(jvp())/while/body/dot_general",
                source_line="transformer.py:25",
            ),
            Buffer(
                name="param.3",
                num_bytes=GIB,
                shape="f32[128256,512]",
                format="f32",
                category="parameters",
                moment="",
                rule="an argument",
                certainty="structural",
                phase="",
                module="",
                first_instant=0,
                last_instant=12,
                operation="state['parameters']['embedding']",
                source_line="",
            ),
        ),
    }
    return MemoryLedger(**{**fields, **changes})


def made_argument(role: str, moment: str) -> Argument:
    """8 G numbers in fp32, split over eight devices."""
    return Argument(
        path="",
        role=role,
        shape=(8, GIB),
        dtype="float32",
        device_bytes=4 * GIB,
        replicated=False,
        moment=moment,
    )


def made_compiled(**changes: Any) -> Compiled:
    fields: dict[str, Any] = {
        "schema": 1,
        "name": "llama3-8b",
        "source": "target compiler",
        "fleet": "8xH100",
        "platform": "cuda",
        "num_devices": 8,
        "mesh_axes": (("fsdp", 8),),
        "compiler": "XLA of jaxlib 0.10.2, jax-cuda13-pjrt 0.10.2",
        "versions": {"jax": "0.10.2"},
        "options": {},
        "arguments": tuple(
            made_argument(role, moment)
            for role, moment in (("parameters", ""), ("optimizer_state", "mu"), ("optimizer_state", "nu"))
        ),
        "traced_flops": TracedFlops(by_phase={}, unpriced=(), attention=30 * 10**15),
        "num_parameters": 8 * 10**9,
        "num_matmul_parameters": 75 * 10**8,
        "tokens_per_step": 4 * 10**6,
        "sequence_length": 8192,
        "reported_bytes": {},
        "compile_seconds": 10.3,
        "fingerprint": "0123abcd",
    }
    return Compiled(**{**fields, **changes})


def made_collective(**changes: Any) -> Collective:
    fields: dict[str, Any] = {"kind": "all-gather", "axes": ("fsdp",), "group_size": 8}
    return Collective(
        **{
            **fields,
            "crossing_bytes": 0,
            "overlapped_count": 0,
            "in_loop": True,
            "link": "inside",
            "link_name": "NVLink 4",
            **changes,
        }
    )


def made_ledger(**changes: Any) -> Ledger:
    flops = FlopLedger(
        model=210 * 10**15,
        executed=220 * 10**15,
        recomputed=10 * 10**15,
        by_phase={"forward": 70 * 10**15, "backward": 140 * 10**15, "recompute": 10 * 10**15},
        by_format={"bf16": 220 * 10**15},
        by_module={},
        model_by_module={},
        waste_by_module={},
        rule_6nd=192 * 10**15,
    )
    traffic = (
        made_collective(count=64, payload_bytes=8 * 10**9, wire_bytes=7 * 10**9, overlapped_count=60),
        made_collective(count=2, payload_bytes=16 * 10**8, wire_bytes=14 * 10**8, in_loop=False),
        made_collective(
            kind="all-reduce", axes=("data", "fsdp"), group_size=16, count=1, payload_bytes=4, wire_bytes=6
        ),
    )
    fields: dict[str, Any] = {"memory": made_memory(), "flops": flops, "traffic": traffic, "unpriced": ()}
    return Ledger(**{**fields, **changes})


def made_prediction(**changes: Any) -> Prediction:
    fields: dict[str, Any] = {
        "step_seconds": Interval(low=44.0, expected=55.0, high=66.0),
        "tokens_per_second_per_device": 9090.0,
        "mfu": 0.483,
        "hfu": 0.506,
        "peak_flops_per_second": 989e12,
        "slices": (
            Slice(kind="compute", name="matmul", seconds=44.0, exposed_seconds=44.0),
            Slice(kind="communication", name="all-gather[fsdp]", seconds=12.0, exposed_seconds=11.0),
            Slice(kind="communication", name="all-reduce[data+fsdp]", seconds=0.001, exposed_seconds=0.0),
        ),
        "basis": "Estimate. Rates made by hand. Interval +-20 %.",
        "unpriced": (),
        "what_helps": (
            Speedup(
                what="no waiting for collectives over fsdp",
                saving_seconds=11.0,
                certainty="bound: all of them hidden behind computation, or gone",
            ),
        ),
    }
    return Prediction(**{**fields, **changes})


@pytest.fixture(scope="session")
def weighing() -> Callable[..., Weighing]:
    """A weighing whose parts may be changed: `weighing(figures=...)`, `weighing(flops={...})`."""

    def make(
        *,
        memory: dict[str, Any] | None = None,
        flops: dict[str, Any] | None = None,
        prediction: dict[str, Any] | None = NO_CHANGES,
        compiled: dict[str, Any] | None = None,
        price: float | None = None,
        **changes: Any,
    ) -> Weighing:
        more = {name: changes.pop(name) for name in LEDGER if name in changes}
        ledger = made_ledger(memory=made_memory(**(memory or {})), **more)
        fleet = changes.pop("fleet", Fleet.parse("8xH100"))
        record = made_compiled(**(compiled or {}))
        fields: dict[str, Any] = {
            "name": "llama3-8b",
            "config": load_config("llama3-8b"),
            "fleet": dataclasses.replace(fleet, price_per_device_hour=price),
            "layout": Layout.parse("fsdp=8"),
            "made_by": Compilation(
                compiled=record,
                folder=changes.pop("folder", Path("compiled")),
                cached=changes.pop("cached", False),
            ),
            "tokens_per_step": record.tokens_per_step,
            "figures": dataclasses.replace(ledger, flops=dataclasses.replace(ledger.flops, **(flops or {}))),
            "prediction": None if prediction is None else made_prediction(**prediction),
            "no_prediction": "",
        }
        return Weighing(**{**fields, **changes})

    return make


# A product beside which weights are gathered, twenty layers that wait for theirs, and a sum over all devices.
PROGRAM = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
%body (t: (s32[], bf16[8192,8192], bf16[1024,8192])) -> (s32[], bf16[8192,8192], bf16[1024,8192]) {
  %t = (s32[], bf16[8192,8192], bf16[1024,8192]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[8192,8192] get-tuple-element(%t), index=1
  %s = bf16[1024,8192] get-tuple-element(%t), index=2
  %g = (bf16[1024,8192], bf16[8192,8192]) all-gather-start(%s), replica_groups={}, dimensions={0}
  %g-done = bf16[8192,8192] all-gather-done(%g)
  %y = bf16[8192,8192] dot(%x, %g-done), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], bf16[8192,8192], bf16[1024,8192]) tuple(%i, %y, %s)
}
%condition (t: (s32[], bf16[8192,8192], bf16[1024,8192])) -> pred[] {
  %t = (s32[], bf16[8192,8192], bf16[1024,8192]) parameter(0)
  ROOT %go = pred[] constant(true)
}
ENTRY %main (x: bf16[8192,8192], s: bf16[1024,8192], p: f32[400000000]) -> f32[400000000] {
  %x = bf16[8192,8192] parameter(0)
  %s = bf16[1024,8192] parameter(1)
  %p = f32[400000000] parameter(2)
  %zero = s32[] constant(0)
  %g = (bf16[1024,8192], bf16[8192,8192]) all-gather-start(%s), replica_groups={}, dimensions={0}
  %y = bf16[8192,8192] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g-done = bf16[8192,8192] all-gather-done(%g)
  %init = (s32[], bf16[8192,8192], bf16[1024,8192]) tuple(%zero, %y, %s)
  %w = (s32[], bf16[8192,8192], bf16[1024,8192]) while(%init), condition=%condition, body=%body, KNOWN
  %r = f32[400000000] all-reduce(%p), replica_groups={}, to_apply=%sum
  ROOT %q = f32[400000000] subtract(%p, %r)
}
""".replace("KNOWN", 'backend_config={"known_trip_count":{"n":"20"}}')


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the cache with a program of 22 products, written by hand."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "program.hlo.txt.gz").write_bytes(gzip.compress(PROGRAM.encode()))
    return folder


@pytest.fixture(scope="session")
def plan(weighing: Callable[..., Weighing], program_folder: Path) -> Plan:
    """A plan of eleven candidates: nine are compiled and fit, one does not fit, one failed."""
    best = weighing(folder=program_folder, num_steps=3750, price=1.8)

    def candidate(place: int, gib: float, **changes: Any) -> Planned:
        seconds = 55.0 * 1.03**place
        prediction = made_prediction(
            step_seconds=Interval(low=0.8 * seconds, expected=seconds, high=1.2 * seconds), mfu=26.6 / seconds
        )
        overrides = {
            "layout": f"data={2 ** (place % 4)},fsdp={8 // 2 ** (place % 4)}",
            "batch.microbatch_sequences": 1 + place % 3,
            "remat": ("full", "dots-attention", "none")[place % 3],
            "zero1": place % 2 == 1,
            "offload": "optimizer" if place == 4 else "none",
            "pipeline": "1f1b",
            "precision": "bf16",
        }
        fields: dict[str, Any] = {
            "layout": overrides["layout"],
            "settings": settings_words(overrides),
            "overrides": overrides,
            "model_flops": 10**18,
            "estimated_seconds": 60.0 - place,
            "estimated_bytes": gib * GIB,
            "reserved_bytes": round(gib * GIB),
            "allowance_bytes": 2 * GIB,
            "usable_bytes": 80 * GIB,
            "prediction": prediction,
            "cached": False,
            "failed": "",
        }
        return Planned(**{**fields, **changes})

    sizes = (48, 52, 40, 61.5, 33, 70, 36, 20, 44, 97)
    failed = candidate(10, 0, reserved_bytes=None, prediction=None, failed="the worker died")
    assert best.config is not None
    return Plan(
        config=best.config,
        fleet=best.fleet,
        num_layouts=30,
        num_considered=2000,
        removed={"tensor does not divide the model's sizes": 3},
        num_open=1989,
        candidates=(failed, *(candidate(place, gib) for place, gib in enumerate(sizes))),
        best=best,
        ended="the budget of 60 s is spent",
        seconds=60.0,
        price="$1.80 per H100 and hour, the list price of a provider (https://example.com)",
    )


@pytest.fixture(scope="session")
def measurement() -> Callable[..., Measurement]:
    made = Measurement(
        steps=4,
        signal="",
        resumed_from=None,
        held_out_metrics={},
        num_bad_steps=0,
        seconds_by_phase={"compile": 1.0, "step": 3.0},
        tokens_per_step=512,
        step_seconds=Percentiles(median=0.016, low=0.015, high=0.02, num_steps=2),
        compile_seconds=3.5,
        losses={1: 5.75, 2: 5.0, 3: 4.5, 4: 4.25},
        held_out_losses={0: 5.8, 4: 4.375},
        unigram_entropy_nats=3.3125,
        argument_bytes_per_device=2**20,
        peak_bytes=None,
        process_rss_growth_bytes=8 * 2**20,
        xla_flops=None,
        not_measured={"xla_flops": "the program has loops", "peak_bytes": "a cpu device reports none"},
        fingerprint="0123abcd",
        platform="cpu",
        device_kind="cpu",
        num_devices=1,
        host="two cores",
        versions={"jax": "0.10.2", "python": "3.11.7"},
        date="2026-11-21T03:27:00+00:00",
        sample_prompt="def ",
        sample="f(x):\n    return x < 1 & y\n",
    )
    return lambda **changes: dataclasses.replace(made, **changes)


@pytest.fixture
def golden() -> Callable[..., None]:
    """Compare what is printed of a result with a file, which UPDATE_GOLDEN=1 rewrites."""

    def compare(name: str, result: object, **options: bool) -> None:
        path = Path(__file__).parent / "golden" / name
        text = printed(result, **options)
        if os.environ.get("UPDATE_GOLDEN"):  # the diff is then read like any other change
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8")

    return compare


def printed(result: object, *, width: int = 100, **options: bool) -> str:
    """What is printed of a result into a pipe, trailing blanks left out."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=False, color_system=None, highlight=False
    )
    console.print(renderable(result, **options))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@pytest.fixture(scope="session")
def text() -> Callable[..., str]:
    """What is printed of a result: `text(weighing(), verbose=True)`."""
    return printed


@pytest.fixture(scope="session")
def words() -> Callable[..., str]:
    """The same with single blanks, on one line."""
    return lambda result, **options: " ".join(printed(result, **options).split())
