import dataclasses

import pytest

from meshwright.hardware import Fleet
from meshwright.ledger._memory import allowance, memory_of, usable_bytes

GPU = [
    "convolution-8xH100",
    "cruncher-8xH100",
    "transformer-8xH100",
    "transformer-8xH100-jax-0.12",
    "transformer-cudnn-16xH100",
]
MIB = 2**20


def memory(samples, name, **changes):
    compiled = dataclasses.replace(samples.compiled(name), **changes)
    return memory_of(
        samples.program(name),
        samples.text(name, "buffer-assignment.txt"),
        samples.text(name, "live-range.txt"),
        compiled,
        Fleet.parse(compiled.fleet),
    )


@pytest.mark.parametrize("name", GPU)
def test_the_peak_of_our_sweep_is_the_compilers_to_the_byte(samples, name):
    ours, unexplained = memory(samples, name, reported_bytes={})
    assert ours.peak_bytes == samples.compiled(name).reported_bytes["peak_memory"]
    assert memory(samples, name)[0].peak_bytes == ours.peak_bytes
    assert not unexplained


@pytest.mark.parametrize("name", [*GPU, "cruncher-8xCPU", "transformer-8xCPU"])
def test_reserved_is_what_memory_analysis_adds_up_to_with_the_constants(samples, name):
    reported = samples.compiled(name).reported_bytes
    total = reported["argument"] + reported["output"] + reported["temp"] - reported["alias"]
    ledger, _ = memory(samples, name)
    assert ledger.reserved_bytes == total + ledger.by_category.get("constants", 0)


def test_categories_add_up_to_reserved_in_every_sample(samples):
    for name in samples.names:
        ledger, _ = memory(samples, name)
        assert sum(ledger.by_category.values()) == ledger.reserved_bytes


def test_arguments_are_filed_by_their_role(samples):
    for name in ("transformer-8xH100", "transformer-8xH100-jax-0.12", "transformer-8xCPU"):
        ledger, _ = memory(samples, name)
        for role in ("parameters", "optimizer_state", "batch"):
            arguments = [a for a in samples.compiled(name).arguments if a.role == role]
            assert ledger.by_category[role] == sum(a.device_bytes for a in arguments)


def test_parameters_and_two_moments_are_the_hand_sum(samples):
    weights = 2 * 2048 * 512 + 4 * (4 * 512 * 512 + 2 * 512 * 1024)
    ledger, _ = memory(samples, "transformer-8xH100")
    assert ledger.by_category["parameters"] == 4 * weights // 8
    assert ledger.by_category["optimizer_state"] == 2 * 4 * weights // 8 + 4  # and Adam's count


def test_an_argument_that_nobody_named_is_just_an_argument(samples):
    ledger, _ = memory(samples, "cruncher-8xH100", arguments=())
    assert "parameters" not in ledger.by_category
    assert ledger.by_category["arguments"] == samples.compiled("cruncher-8xH100").reported_bytes["argument"]


def test_the_cpus_reported_peak_leaves_temporaries_out_and_ours_does_not(samples):
    ledger, unexplained = memory(samples, "transformer-8xCPU")
    reported = samples.compiled("transformer-8xCPU").reported_bytes["peak_memory"]
    assert reported < ledger.by_category["temporaries"] < ledger.peak_bytes <= ledger.reserved_bytes
    assert not unexplained


def test_a_peak_that_our_sweep_cannot_explain_is_given_and_named(samples):
    ledger, unexplained = memory(samples, "cruncher-8xH100", reported_bytes={"peak_memory": 30_000_000})
    assert ledger.peak_bytes == 30_000_000
    assert unexplained == (
        "peak memory: the compiler reports 30000000 bytes, its live ranges add up to 27277352",
    )


def test_the_largest_buffers_alive_come_first_and_fit_in_the_peak(samples):
    ledger, _ = memory(samples, "transformer-8xH100")
    sizes = [b.num_bytes for b in ledger.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 20
    assert sum(sizes) <= ledger.peak_bytes
    assert {b.category for b in ledger.largest} >= {"temporaries", "parameters"}


def test_all_live_buffers_together_are_the_peak(samples, monkeypatch):
    monkeypatch.setattr("meshwright.ledger._memory.NUM_LARGEST", 10_000)
    for name in ("transformer-8xH100", "transformer-cudnn-16xH100", "cruncher-8xH100"):
        ledger, _ = memory(samples, name)
        assert sum(b.num_bytes for b in ledger.largest) == ledger.peak_bytes


def test_the_stacked_layer_inputs_are_named_by_what_makes_them(samples):
    ledger, _ = memory(samples, "transformer-8xH100")
    stack = next(b for b in ledger.largest if b.shape == "bf16[4,4,256,512]")
    assert stack.num_bytes == 4 * 4 * 256 * 512 * 2
    assert stack.operation.startswith("jit(step)/jvp()/while/body/")
    assert stack.source_line.startswith("programs.py:")


def test_an_argument_among_the_largest_has_its_path(samples):
    ledger, _ = memory(samples, "cruncher-8xH100")
    paths = {b.operation for b in ledger.largest if b.category == "parameters"}
    assert paths == {"params['w1']", "params['w2']", "params['head']"}


def with_host(text, color):
    return text + f"allocation 99: size 512, color {color}, preallocated-temp:\n"


def test_host_memory_is_set_apart(samples):
    name = "cruncher-8xH100"
    compiled = samples.compiled(name)
    text, ranges = samples.text(name, "buffer-assignment.txt"), samples.text(name, "live-range.txt")
    args = samples.program(name), with_host(text, 5), ranges, compiled, Fleet.parse("8xH100")
    ledger, _ = memory_of(*args)
    plain, _ = memory(samples, name)
    assert (ledger.host_bytes, ledger.reserved_bytes) == (512, plain.reserved_bytes)
    collective = (args[0], with_host(text, 1), *args[2:])  # NCCL's own buffers lie on the device
    assert memory_of(*collective)[0].reserved_bytes == plain.reserved_bytes + 512


def test_a_tpus_on_chip_memories_are_not_its_main_memory(samples):
    ledger, _ = memory(samples, "transformer-v5e-8")
    assert ledger.reserved_bytes == 18_632_192
    assert ledger.host_bytes == 4096


def test_a_value_without_a_live_range_raises(samples):
    name = "cruncher-8xH100"
    ranges = "  BufferLiveRange:\n  Live ranges at 0 (peak):\n"
    text = samples.text(name, "buffer-assignment.txt")
    with pytest.raises(ValueError, match=r"value \S+ has no live range"):
        memory_of(samples.program(name), text, ranges, samples.compiled(name), Fleet.parse("8xH100"))


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
