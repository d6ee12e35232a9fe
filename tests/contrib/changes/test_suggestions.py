from __future__ import annotations

import dataclasses
import re

import pytest

from meshwright.config import Layout, check_layout, load_config
from meshwright.contrib.changes import suggestions
from meshwright.hardware import Fleet
from meshwright.ledger import MemoryLedger, Timeline

GIB = 2**30


def memory(*, state: int, temporaries: int, usable: int = 80 * GIB) -> MemoryLedger:
    return MemoryLedger(
        reserved_bytes=state + temporaries,
        argument_bytes=state,
        peak_bytes=None,
        allowance={"context": GIB},
        usable_bytes=usable,
        by_category={"parameters": state, "saved_activations": temporaries},
        optimizer_state_by_moment={},
        buffers=(),
        timeline=Timeline(instants=(), last_instant=0, peak_instant=0, by_category={}),
    )


@pytest.mark.parametrize(
    "preset", ["linear", "cruncher", "bytes-10m", "gpt2-124m", "gpt3-175b", "llama3-70b"]
)
@pytest.mark.parametrize("layout", ["data=8", "fsdp=8", "tensor=1,data=8", "data=2,fsdp=4", "data=8,fsdp=1"])
@pytest.mark.parametrize("state", [GIB, 90 * GIB])
def test_every_suggestion_is_accepted_by_what_reads_it(preset: str, layout: str, state: int):
    fleet, config = Fleet.parse("8xH100"), load_config(preset)
    for each in suggestions(config, Layout.parse(layout), fleet, memory(state=state, temporaries=90 * GIB)):
        words = dict(re.findall(r"--(\w+) (\S+)", each.arguments))
        assert " ".join(f"--{option} {value}" for option, value in words.items()) == each.arguments
        changed = load_config(preset, [words["set"]] if "set" in words else [])
        devices = Fleet.parse(words.get("on", fleet.name)).num_devices
        # Not the layout it was weighed with: that one was checked before, and these here need not be.
        if "layout" in words:
            check_layout(changed, Layout.parse(words["layout"]).resolve(devices))


KEEPS_PRODUCTS = ("remat=dots-attention", "batch.microbatch_sequences=1")


def arguments(preset: str, layout: str, fleet: str, sizes: MemoryLedger, *overrides: str) -> list[str]:
    config = load_config(preset, overrides)
    return [s.arguments for s in suggestions(config, Layout.parse(layout), Fleet.parse(fleet), sizes)]


def test_replicated_state_is_split_first():
    found = arguments("llama3-8b", "data=8", "8xH100", memory(state=90 * GIB, temporaries=20 * GIB))
    assert found[0] == "--layout fsdp=8"


def test_a_state_that_is_too_much_alone_comes_before_larger_activations():
    sizes = memory(state=98 * GIB, temporaries=206 * GIB)
    found = arguments("llama3-70b", "fsdp=8", "8xH100", sizes, *KEEPS_PRODUCTS)
    assert found == [
        "--on 32xH100 --layout fsdp=32",
        "--set lora.rank=16",
        "--set remat=full",
        "--layout tensor=8",
    ]


def test_adapters_are_suggested_where_they_can_be_and_the_state_alone_does_not_fit():
    large = memory(state=90 * GIB, temporaries=GIB)
    run, fleet, layout = load_config("llama3-8b"), Fleet.parse("1xH100"), Layout.parse("data=1")
    (effect,) = [s.effect for s in suggestions(run, layout, fleet, large) if "lora" in s.arguments]
    # By hand: rank 16 x (input + output) of query (4096, 4096) and value (4096, 1024), in 32 layers.
    assert 16 * (4096 + 4096 + 4096 + 1024) * 32 == 6_815_744
    assert "trains adapters of 6.82M parameters" in effect
    assert not any(
        "lora" in each for each in arguments("llama3-8b", "data=1", "1xH100", large, "lora.rank=8")
    )
    assert not any("lora" in each for each in arguments("gpt3-175b", "data=1", "1xH100", large, "zero1=true"))
    assert not any("lora" in each for each in arguments("cruncher", "data=1", "1xH100", large))
    small = memory(state=GIB, temporaries=148 * GIB)
    assert not any("lora" in each for each in arguments("llama3-8b", "data=1", "1xH100", small))


def test_activations_come_first_where_they_are_the_larger_part():
    sizes = memory(state=24 * GIB, temporaries=148 * GIB)
    found = arguments("llama3-70b", "fsdp=32", "32xH100", sizes, *KEEPS_PRODUCTS)
    assert found == ["--set remat=full", "--layout fsdp=4,tensor=8", "--on 64xH100 --layout fsdp=64"]


def test_a_microbatch_is_halved_to_a_divisor():
    sizes = memory(state=GIB, temporaries=148 * GIB)
    found = arguments("gpt2-124m", "data=8", "8xH100", sizes, "batch.microbatch_sequences=16", "remat=full")
    assert found[0] == "--set batch.microbatch_sequences=8"


def test_what_is_already_done_is_not_suggested():
    sizes = memory(state=GIB, temporaries=148 * GIB)
    found = arguments("llama3-8b", "tensor=8", "8xH100", sizes, "remat=full")
    assert found == ["--on 16xH100 --layout fsdp=2,tensor=8"]


def test_tensor_does_not_leave_the_host():
    sizes = memory(state=GIB, temporaries=148 * GIB)
    found = arguments("llama3-70b", "fsdp=16", "4x4xA100-80GB", sizes, "remat=full")
    assert "--layout fsdp=4,tensor=4" in found


def test_a_tpu_slice_grows_to_the_next_that_google_has():
    sizes = memory(state=60 * GIB, temporaries=GIB, usable=95 * GIB)
    found = arguments("llama3-70b", "fsdp=16", "v5p-32", sizes)
    assert found[0] == "--on v5p-64 --layout fsdp=32"


def test_beyond_the_largest_slice_are_several():
    sizes = memory(state=GIB, temporaries=148 * GIB)
    assert arguments("llama3-8b", "fsdp=256", "v6e-256", sizes)[-1] == "--on 2xv6e-256 --layout fsdp=512"
    found = arguments("llama3-8b", "fsdp=512", "2xv6e-256", sizes, "batch.sequences=2048")
    assert found[-1] == "--on 4xv6e-256 --layout fsdp=1024"


def test_the_largest_slice_that_nothing_joins_to_another_has_no_larger_one():
    found = arguments("llama3-8b", "fsdp=2048", "v3-2048", memory(state=GIB, temporaries=148 * GIB))
    assert not any("--on" in each for each in found)


def with_moments(moments: int, *, rest: int, usable: int = 24 * GIB) -> MemoryLedger:
    sizes = memory(state=moments, temporaries=rest, usable=usable)
    return dataclasses.replace(sizes, by_category={"optimizer_state": moments, "gradients": rest})


def test_moments_that_are_all_that_is_too_much_wait_in_the_hosts_memory():
    run, layout = load_config("llama-1b"), Layout.parse("data=1")
    fleet, sizes = Fleet.parse("1xRTX-4090"), with_moments(9 * GIB, rest=22 * GIB)
    first = suggestions(run, layout, fleet, sizes)[0]
    assert (first.arguments, first.is_enough) == ("--set offload=optimizer", True)
    assert first.effect == "moments, 9.00 GiB here, wait in the hosts' memory between steps; the rest fits"
    # A GiB of what is beside the program has no room then.
    more = suggestions(run, layout, fleet, with_moments(9 * GIB, rest=23 * GIB + 1))
    assert not any(each.is_enough for each in more)
    assert "--set offload=optimizer" in [each.arguments for each in more]


def test_moments_that_wait_already_or_are_in_the_hosts_memory_anyway_are_not_named():
    sizes = with_moments(9 * GIB, rest=22 * GIB)
    assert not any("offload" in each for each in arguments("llama-1b", "data=1", "1xCPU", sizes))
    waiting = arguments("llama-1b", "data=1", "1xH100", sizes, "offload=optimizer")
    assert not any("offload" in each for each in waiting)
    without = memory(state=9 * GIB, temporaries=22 * GIB)
    assert not any("offload" in each for each in arguments("llama-1b", "data=1", "1xH100", without))
    both = arguments("llama-1b", "data=1", "1xH100", sizes, "remat=full", "offload=activations")
    assert "--set offload=both" in both


def test_a_foreign_program_has_no_knobs_of_ours():
    sizes = memory(state=98 * GIB, temporaries=206 * GIB)
    assert suggestions(None, Layout.parse("data=8"), Fleet.parse("8xH100"), sizes) == ()
