"""Programs compiled for absent fleets by the worker, once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.compiler import Argument, Compiled, Request, TracedFlops, compile_program, requested_options
from meshwright.config import Layout, load_config
from meshwright.hardware import Fleet, topology_arguments
from meshwright.ledger import Ledger, ledger_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    compiled: Compiled
    folder: Path
    cached: bool
    ledger: Ledger


def make_request(
    what: str, fleet: str, layout: str, overrides: tuple[str, ...] = (), search_path: tuple[str, ...] = ()
) -> Request:
    """The request that `what` (a preset, or module:function) makes for a fleet laid out so."""
    on = Fleet.parse(fleet)
    foreign = ":" in what
    axes = Layout.parse(layout, free_names=foreign).resolve(on.num_devices).axes
    return Request(
        name=what,
        fleet=fleet,
        platform=on.chip.platform,
        source="target compiler",
        topology={} if on.chip.platform == "cpu" else topology_arguments(on),
        num_devices=on.num_devices,
        mesh_axes=axes,
        options=requested_options(on.chip.platform, axes),
        config=None if foreign else load_config(what, overrides).model_dump(mode="json"),
        function=what if foreign else None,
        search_path=search_path or (str(EXAMPLES),) if foreign else (),
    )


@pytest.fixture(scope="session")
def request_for() -> Callable[..., Request]:
    return make_request


@pytest.fixture(scope="session")
def weighed() -> Callable[..., Weighed]:
    """The compiled program of `make_request`'s arguments, and its ledger."""

    @functools.cache
    def weigh(what: str, fleet: str, layout: str, *overrides: str) -> Weighed:
        compiled, folder, cached = compile_program(make_request(what, fleet, layout, overrides))
        ledger = ledger_of(folder, compiled, Fleet.parse(fleet))
        return Weighed(compiled=compiled, folder=folder, cached=cached, ledger=ledger)

    return weigh


@pytest.fixture
def compiled() -> Compiled:
    """A record with something in every field."""
    return Compiled(
        schema=1,
        name="small",
        source="target compiler",
        fleet="8xH100",
        platform="cuda",
        num_devices=8,
        mesh_axes=(("fsdp", 4), ("tensor", 2)),
        compiler="XLA",
        versions={"jax": "0.10.2"},
        options={"xla_gpu_enable_latency_hiding_scheduler": True},
        arguments=(
            Argument(
                path="state['optimizer'].mu",
                role="optimizer_state",
                shape=(4, 2),
                dtype="float32",
                device_bytes=8,
                replicated=False,
                host=True,
                moment="mu",
            ),
        ),
        traced_flops=TracedFlops(by_phase={"forward": 3}, unpriced=("sort x1",), attention=1),
        num_parameters=8,
        num_matmul_parameters=None,
        tokens_per_step=16,
        sequence_length=4,
        reported_bytes={"argument": 8},
        compile_seconds=1.5,
        fingerprint="abc",
    )
