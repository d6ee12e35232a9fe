"""Small programs by hand, and records around them."""

import dataclasses

import pytest

from meshwright.compiler import Compiled, TracedFlops
from meshwright.hardware import Calibration, Fleet
from meshwright.hlo import parse_program
from meshwright.ledger import FlopLedger, Ledger, MemoryLedger, Timeline, executions_of
from meshwright.predict import machine_of, walk

SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


@pytest.fixture
def program_of():
    """The program of computations, the last of which is entered."""

    def make(text):
        head, entry = text.strip().rsplit("\n%", 1) if "\n%" in text.strip() else ("", text.strip()[1:])
        return parse_program(f"HloModule small, is_scheduled=true\n\n{SUM}\n{head}\n\nENTRY %{entry}\n")

    return make


@pytest.fixture
def walked_on(program_of):
    """What the walk makes of a program on a fleet laid out along one axis."""

    def make(text, fleet="8xH100", calibration=None, machine=None):
        fleet = Fleet.parse(fleet)
        machine = machine or machine_of(fleet, calibration)
        return walk(machine, executions_of(program_of(text)), (("data", fleet.num_devices),))

    return make


@pytest.fixture
def ledger_with():
    def make(model=0, executed=0, unpriced=()):
        memory = MemoryLedger(
            reserved_bytes=0,
            argument_bytes=0,
            peak_bytes=0,
            allowance={},
            usable_bytes=None,
            by_category={},
            optimizer_state_by_moment={},
            buffers=(),
            timeline=Timeline(instants=(), last_instant=0, peak_instant=0, by_category={}),
        )
        flops = FlopLedger(
            model=model,
            executed=executed,
            recomputed=0,
            by_phase={},
            by_format={},
            by_module={},
            model_by_module={},
            waste_by_module={},
            rule_6nd=None,
        )
        return Ledger(memory=memory, flops=flops, traffic=(), unpriced=unpriced)

    return make


@pytest.fixture
def compiled_for():
    def make(fleet, source="target compiler", tokens=None, sequence_length=None):
        num_devices = Fleet.parse(fleet).num_devices
        return Compiled(
            schema=1,
            name="small",
            source=source,
            fleet=fleet,
            platform="cuda",
            num_devices=num_devices,
            mesh_axes=(("data", num_devices),),
            compiler="",
            versions={},
            options={},
            arguments=(),
            traced_flops=TracedFlops(by_phase={}, unpriced=(), attention=0),
            num_parameters=None,
            num_matmul_parameters=None,
            tokens_per_step=tokens,
            sequence_length=sequence_length,
            reported_bytes={},
            compile_seconds=0.0,
            fingerprint="",
        )

    return make


@pytest.fixture
def round_machine():
    """A device of 1e12 FLOP/s, 1e9 bytes/s and a link of 1e8, without launches."""
    host = Calibration(
        matmul_flops_per_second={"fp32": 8e12},
        memory_bytes_per_second=8e9,
        launch_seconds=1e-9,
        date="2026-11-21",
        source="by hand",
    )
    machine = machine_of(Fleet.parse("8xCPU"), host)
    return dataclasses.replace(machine, launch_seconds=0.0, inside_bytes_per_second=1e8)
