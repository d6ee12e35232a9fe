import collections
import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.compiler import Argument
from meshwright.hardware import Fleet
from meshwright.ledger import allowance
from meshwright.ledger._memory_ledger import (
    Allocation,
    LiveRange,
    LiveValue,
    _live_bytes,
    host_needs,
    memory_of,
    parse_assignment,
    parse_live_ranges,
    usable_bytes,
)

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
    ours = memory(samples, name)
    assert ours.peak_bytes == samples.compiled(name).reported_bytes["peak_memory"]
    assert not ours.notes


@pytest.mark.parametrize("name", [*GPU, "cruncher-8xCPU", "transformer-8xCPU"])
def test_reserved_is_what_memory_analysis_adds_up_to_with_the_constants(samples, name):
    reported = samples.compiled(name).reported_bytes
    total = reported["argument"] + reported["output"] + reported["temp"] - reported["alias"]
    ledger = memory(samples, name)
    assert ledger.reserved_bytes == total + ledger.by_category.get("constants", 0)


@pytest.mark.parametrize("name", [*GPU, "cruncher-8xCPU", "transformer-8xCPU"])
def test_argument_bytes_are_the_compilers(samples, name):
    ledger = memory(samples, name)
    assert ledger.argument_bytes == samples.compiled(name).reported_bytes["argument"]


def test_categories_add_up_to_reserved_in_every_sample(samples):
    for name in samples.names:
        ledger = memory(samples, name)
        assert sum(ledger.by_category.values()) == ledger.reserved_bytes


def test_number_formats_add_up_to_every_category_and_to_reserved_in_every_sample(samples):
    for name in samples.names:
        ledger = memory(samples, name)
        whole = {category: sum(found.values()) for category, found in ledger.by_category_and_format.items()}
        assert whole == ledger.by_category
        assert sum(ledger.by_format.values()) == ledger.reserved_bytes


def test_number_formats_are_those_of_the_arguments(samples):
    """Parameters and moments are fp32 and tokens int32, as JAX says of the arguments."""
    found = memory(samples, "transformer-8xH100").by_category_and_format
    names = {"float32": "fp32", "int32": "int32"}
    for role in ("parameters", "optimizer_state", "batch"):
        given = collections.Counter()
        for argument in samples.compiled("transformer-8xH100").arguments:
            if argument.role == role:
                given[names[argument.dtype]] += argument.device_bytes
        assert found[role] == given


def test_fragmentation_holds_no_number(samples):
    ledger = memory(samples, "transformer-8xH100")
    assert ledger.by_category_and_format["fragmentation"] == {"unused": ledger.by_category["fragmentation"]}


def test_arguments_are_filed_by_their_role(samples):
    for name in ("transformer-8xH100", "transformer-8xH100-jax-0.12", "transformer-8xCPU"):
        ledger = memory(samples, name)
        for role in ("parameters", "optimizer_state", "batch"):
            arguments = [a for a in samples.compiled(name).arguments if a.role == role]
            given = sum(a.device_bytes for a in arguments)
            # At the peak the CPU's program holds something else where Adam's count was.
            assert given - 4 <= ledger.by_category[role] <= given


def test_parameters_and_two_moments_are_the_hand_sum(samples):
    weights = 2 * 2048 * 512 + 4 * (4 * 512 * 512 + 2 * 512 * 1024)
    ledger = memory(samples, "transformer-8xH100")
    assert ledger.by_category["parameters"] == 4 * weights // 8
    assert ledger.by_category["optimizer_state"] == 2 * 4 * weights // 8 + 4  # and Adam's count


def test_an_argument_that_nobody_named_is_just_an_argument(samples):
    ledger = memory(samples, "cruncher-8xH100", arguments=())
    assert "parameters" not in ledger.by_category
    assert ledger.by_category["arguments"] == samples.compiled("cruncher-8xH100").reported_bytes["argument"]


def test_the_cpus_reported_peak_leaves_temporaries_out_and_ours_does_not(samples):
    ledger = memory(samples, "transformer-8xCPU")
    reported = samples.compiled("transformer-8xCPU").reported_bytes["peak_memory"]
    arguments = samples.compiled("transformer-8xCPU").reported_bytes["argument"]
    assert reported < ledger.peak_bytes - arguments < ledger.peak_bytes <= ledger.reserved_bytes
    assert not ledger.notes


def test_the_buffers_alive_come_largest_first_and_together_are_the_peak(samples):
    for name in ("transformer-8xH100", "transformer-cudnn-16xH100", "cruncher-8xH100"):
        ledger = memory(samples, name)
        sizes = [b.num_bytes for b in ledger.buffers]
        assert sizes == sorted(sizes, reverse=True)
        # Constants and outputs are in the peak whole, though not all of each may be in use.
        whole = sum(ledger.by_category.get(kind, 0) for kind in ("constants", "outputs"))
        listed = sum(b.num_bytes for b in ledger.buffers if b.category in ("constants", "outputs"))
        assert sum(sizes) + whole - listed == ledger.peak_bytes


def test_what_is_reserved_beyond_the_peak_is_fragmentation(samples):
    for name in GPU:
        ledger = memory(samples, name)
        idle = ledger.by_category.get("idle_in_donated_arguments", 0)
        fragmentation = ledger.by_category.get("fragmentation", 0)
        assert ledger.reserved_bytes - ledger.peak_bytes == fragmentation
        assert idle == 0


def test_every_buffer_lives_at_the_peak_and_says_by_which_rule_it_is_filed(samples):
    for name in samples.names:
        ledger = memory(samples, name)
        peak = ledger.timeline.peak_instant
        for buffer in ledger.buffers:
            assert buffer.first_instant <= peak <= buffer.last_instant
            assert buffer.certainty in ("structural", "named", "shape", "inherited", "fallback")
            assert buffer.rule


def test_the_timeline_passes_through_the_peak_and_is_never_above_it(samples):
    for name in GPU:
        ledger = memory(samples, name)
        line = ledger.timeline
        totals = [sum(column) for column in zip(*line.by_category.values(), strict=True)]
        assert totals[line.instants.index(line.peak_instant)] == max(totals)
        assert max(totals) <= ledger.peak_bytes
        assert list(line.instants) == sorted(set(line.instants))
        assert line.instants[-1] <= line.last_instant


def test_saved_activations_rise_through_the_forward_pass_and_fall_through_the_backward(samples):
    line = memory(samples, "transformer-8xH100").timeline
    saved = line.by_category["saved_activations"]
    top = saved.index(max(saved))
    assert 0 < top < len(saved) - 1
    assert saved[-1] == 0


def test_moments_are_told_apart_where_their_paths_say(samples):
    name = "transformer-8xH100"
    compiled = samples.compiled(name)
    arguments = tuple(
        dataclasses.replace(a, moment="mu" if ".mu" in a.path else "nu") if a.role == "optimizer_state" else a
        for a in compiled.arguments
    )
    ledger = memory(samples, name, arguments=arguments)
    weights = 2 * 2048 * 512 + 4 * (4 * 512 * 512 + 2 * 512 * 1024)
    assert ledger.optimizer_state_by_moment["mu"] == 4 * weights // 8


def test_the_stacked_layer_inputs_are_named_by_what_makes_them(samples):
    ledger = memory(samples, "transformer-8xH100")
    stack = next(b for b in ledger.buffers if b.shape == "bf16[4,4,256,512]")
    assert stack.num_bytes == 4 * 4 * 256 * 512 * 2
    assert stack.operation.startswith("jit(step)/jvp()/while/body/")
    assert stack.source_line.startswith("programs.py:")


def test_an_argument_among_the_largest_has_its_path(samples):
    ledger = memory(samples, "cruncher-8xH100")
    paths = {b.operation for b in ledger.buffers if b.category == "parameters"}
    assert paths == {"params['w1']", "params['w2']", "params['head']"}


def with_host(text, color):
    return text + f"allocation 99: size 512, color {color}, preallocated-temp:\n"


def test_host_memory_is_set_apart(samples):
    name = "cruncher-8xH100"
    compiled = samples.compiled(name)
    text, ranges = samples.text(name, "buffer-assignment.txt"), samples.text(name, "live-range.txt")
    args = samples.program(name), with_host(text, 5), ranges, compiled, Fleet.parse("8xH100")
    ledger = memory_of(*args)
    plain = memory(samples, name)
    assert (ledger.host_bytes, ledger.reserved_bytes) == (512, plain.reserved_bytes)
    collective = (args[0], with_host(text, 1), *args[2:])  # NCCL's own buffers lie on the device
    assert memory_of(*collective).reserved_bytes == plain.reserved_bytes + 512


def test_a_tpus_on_chip_memories_are_not_its_main_memory(samples):
    ledger = memory(samples, "transformer-v5e-8")
    assert ledger.reserved_bytes == 18_632_192
    assert ledger.host_bytes == 4096
    assert ledger.on_chip_bytes == 29_934_080


def test_a_tpus_peak_by_its_compiler_is_explained_by_what_lives_on_the_chip(samples):
    """Of cruncher-v5e-8 10.3 MiB are reserved and the compiler reports 34.0 MiB; VMEM has 26.0 MiB."""
    ledger = memory(samples, "cruncher-v5e-8")
    reported = samples.compiled("cruncher-v5e-8").reported_bytes["peak_memory"]
    assert ledger.reserved_bytes < 0.4 * reported
    assert ledger.peak_bytes <= reported <= ledger.reserved_bytes + ledger.on_chip_bytes
    (note,) = ledger.notes
    assert "34.0 MiB" in note
    assert "add up to" not in note  # our own sweep over both memories gives the same, to the byte
    assert "add up to 42.6 MiB in both" in memory(samples, "transformer-v5e-8").notes[0]
    assert memory(samples, "transformer-8xH100").on_chip_bytes == 0


def test_a_value_without_a_live_range_raises(samples):
    name = "cruncher-8xH100"
    ranges = "  BufferLiveRange:\n  Live ranges at 0 (peak):\n"
    text = samples.text(name, "buffer-assignment.txt")
    with pytest.raises(ValueError, match=r"value \S+ has no live range"):
        memory_of(samples.program(name), text, ranges, samples.compiled(name), Fleet.parse("8xH100"))


@st.composite
def placed(draw):
    """An allocation of 64 bytes with values that may share bytes and times, and their live ranges."""
    values, ranges = [], {}
    for number in range(draw(st.integers(1, 12))):
        offset, first = draw(st.integers(0, 60)), draw(st.integers(0, 20))
        size, length = draw(st.integers(1, 64 - offset)), draw(st.integers(0, 10))
        table = draw(st.booleans()) and number % 3 == 0
        shape = "(f32[], f32[])" if table else "u8[1]{0}"
        values.append(
            LiveValue(name=f"v{number}", index="{}", num_bytes=size, offset_bytes=offset, shape=shape)
        )
        ranges[f"v{number}", "{}"] = LiveRange(first=first, last=first + length)
    allocation = Allocation(num_bytes=64, kind="temporary", parameter=None, color=0, values=tuple(values))
    return allocation, ranges


@given(placed())
def test_live_bytes_are_those_of_a_grid_of_bytes_and_instants(made):
    allocation, ranges = made
    grid = np.zeros((64, 32), bool)
    for value in allocation.values:
        if not value.is_tuple_table:
            when = ranges[value.name, "{}"]
            grid[value.offset_bytes : value.offset_bytes + value.num_bytes, when.first : when.last + 1] = True
    by_hand = grid.sum(axis=0)
    found = _live_bytes([allocation], ranges)
    assert all(found[instant] == by_hand[instant] for instant in found)
    # Bytes only rise where a value is made, so no instant between has more.
    assert max(found.values()) == by_hand.max()


def test_a_constant_without_a_live_range_stays(samples):
    """As XLA leaves one in the computation of a sort: a place of its own, and no range."""
    name = "cruncher-8xH100"
    compiled, plain = samples.compiled(name), memory(samples, name)
    text = samples.text(name, "buffer-assignment.txt")
    text += "allocation 99: size 4, constant:\n value: <999 constant_4_0 @0> (size=4,offset=0): f32[]\n"
    ranges = samples.text(name, "live-range.txt")
    ledger = memory_of(samples.program(name), text, ranges, compiled, Fleet.parse("8xH100"))
    assert ledger.reserved_bytes == plain.reserved_bytes + 4
    assert ledger.by_category["constants"] == plain.by_category.get("constants", 0) + 4


def test_every_allocation_and_value_of_every_sample_is_read(samples):
    for name in samples.names:
        text = samples.text(name, "buffer-assignment.txt")
        allocations = parse_assignment(text)
        assert sum(a.num_bytes for a in allocations) == sum(
            int(size) for size in re.findall(r"^allocation \d+: size (\d+)", text, re.M)
        )
        assert sum(len(a.values) for a in allocations) == text.count(" value: <")
        assert all(v.offset_bytes + v.num_bytes <= a.num_bytes for a in allocations for v in a.values)


def test_every_value_outside_thread_local_scratch_has_a_live_range(samples):
    for name in samples.names:
        ranges = parse_live_ranges(samples.text(name, "live-range.txt"))
        allocations = parse_assignment(samples.text(name, "buffer-assignment.txt"))
        held = [a for a in allocations if a.kind != "thread-local"]
        assert {(v.name, v.index) for a in held for v in a.values} <= set(ranges)


TEXT = """BufferAssignment:
allocation 0: size 64, parameter 3, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 p @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 16, output shape is |(f32[16], f32[])|, maybe-live-out:
 value: <2 t{} @0> (size=16,offset=0): (f32[16]{0}, f32[])
allocation 2: size 4, thread-local:
allocation 3: size 8, constant:
allocation 4: size 96, page 0, color 5, preallocated-temp:
 value: <3 w{1,2} (phi) @5> (size=32,offset=64): f32[8]{0}
"""


def test_kinds_colors_places_and_indices_are_read():
    allocations = parse_assignment(TEXT)
    assert [a.kind for a in allocations] == ["parameter", "output", "thread-local", "constant", "temporary"]
    assert [a.color for a in allocations] == [0, 0, 0, 0, 5]
    assert allocations[0].parameter == 3
    (value,) = allocations[4].values
    assert (value.name, value.index, value.num_bytes, value.offset_bytes) == ("w", "{1,2}", 32, 64)
    assert [v.is_tuple_table for a in allocations for v in a.values] == [False, True, False]


def test_an_unknown_line_of_the_assignment_raises():
    with pytest.raises(ValueError, match="buffer assignment, line 2 is not understood: allocation x"):
        parse_assignment("BufferAssignment:\nallocation x\n")


RANGES = """HloLiveRange (max 2):
  BufferLiveRange:
    a{{}}:0-2
    b{{0,1}}:1-1
{}  Live ranges at 1 (peak):
"""


def test_live_ranges_are_read_by_instruction_and_index():
    ranges = parse_live_ranges(RANGES.format(""))
    assert {key: (r.first, r.last) for key, r in ranges.items()} == {
        ("a", "{}"): (0, 2),
        ("b", "{0,1}"): (1, 1),
    }


def test_an_unknown_live_range_raises():
    with pytest.raises(ValueError, match="live range is not understood:     c: always"):
        parse_live_ranges(RANGES.format("    c: always\n"))


def test_missing_live_ranges_raise():
    with pytest.raises(ValueError, match="live ranges have no section of that name: 'HloLiveRange'"):
        parse_live_ranges("HloLiveRange")


def test_a_gpu_pays_for_context_libraries_and_a_communicator_per_axis():
    inside = allowance(Fleet.parse("8xH100"), (("fsdp", 4), ("tensor", 2)))
    assert inside == {
        "CUDA context and kernels": 858_993_459,
        "cuBLAS workspace": 32 * MIB,
        "NCCL communicator of fsdp": 392_000_000,
        "NCCL communicator of tensor": 392_000_000,
    }
    assert allowance(Fleet.parse("8xA100-80GB"), (("data", 1),)) == {
        "CUDA context and kernels": 858_993_459,
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


@pytest.mark.parametrize("chips", ["8xH100", "v5p-16"])
def test_a_reserve_is_an_item_of_the_allowance(chips):
    axes, reserved = (("data", 8),), Fleet.parse(f"{chips} reserve 20GiB")
    items = allowance(reserved, axes)
    assert items.pop("reserved for another process") == 20 * 1024 * MIB
    assert items == allowance(Fleet.parse(chips), axes)
    assert usable_bytes(reserved) == usable_bytes(Fleet.parse(chips))


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
