import pytest

from meshwright.compiler import Argument
from meshwright.hardware import Fleet
from meshwright.ledger import allowance
from meshwright.ledger._memory import host_needs, usable_bytes

MIB = 2**20


def test_a_gpu_pays_for_context_libraries_and_a_communicator_per_axis():
    inside = allowance(Fleet.parse("8xH100"), (("fsdp", 4), ("tensor", 2)))
    assert inside == {
        "CUDA context and kernels": 590_558_003,
        "cuBLAS workspace": 32 * MIB,
        "NCCL communicator of fsdp": 392_000_000,
        "NCCL communicator of tensor": 392_000_000,
    }
    assert allowance(Fleet.parse("8xA100-80GB"), (("data", 1),)) == {
        "CUDA context and kernels": 590_558_003,
        "cuBLAS workspace": 8 * MIB + MIB // 8,
    }


@pytest.mark.parametrize(
    ("fleet", "axes", "crosses"),
    [
        ("8xH100", (("fsdp", 8),), False),
        ("16xH100", (("fsdp", 2), ("tensor", 8)), True),
        ("16xH100", (("fsdp", 16),), True),
        ("64xH100", (("data", 1), ("fsdp", 8), ("tensor", 8)), True),
    ],
)
def test_an_axis_that_leaves_the_fast_domain_pays_for_the_network(fleet, axes, crosses):
    items = allowance(Fleet.parse(fleet), axes)
    assert items.get("NCCL network buffer") == (512 * MIB if crosses else None)


def test_a_cpu_and_a_tpu_have_no_allowance():
    assert allowance(Fleet.parse("8xCPU"), (("data", 8),)) == {}
    assert allowance(Fleet.parse("v5e-8"), (("data", 8),)) == {}


def test_a_simulated_cpu_has_no_usable_memory_and_a_gpu_what_its_runtime_reports():
    assert usable_bytes(Fleet.parse("8xCPU")) is None
    fleet = Fleet.parse("8xH100")
    assert usable_bytes(fleet) == fleet.chip.memory_bytes


def argument(role: str, num_bytes: int) -> Argument:
    return Argument(path=role, role=role, shape=(), dtype="float32", device_bytes=num_bytes, replicated=False)


def test_a_host_needs_a_copy_of_its_devices_state_and_two_batches():
    known = (argument("parameters", 100), argument("optimizer_state", 200), argument("batch", 7))
    needs = host_needs(Fleet.parse("16xH100"), known)
    assert needs == {"a checkpoint's copy of the state": 8 * 300, "batches": 2 * 8 * 7}
    assert host_needs(Fleet.parse("2xH100"), known)["batches"] == 2 * 2 * 7


def test_of_a_foreign_program_nothing_is_known():
    assert host_needs(Fleet.parse("8xH100"), (argument("state", 100),)) == {}
