"""The changes that were compiled, on a terminal."""

from meshwright.contrib.changes import Changes
from meshwright.results import Change

GIB = 2**30


def change(**fields: object) -> Change:
    known = {
        "arguments": "--set remat=full", "effect": "", "reserved_bytes": 20 * GIB, "saved_bytes": 4 * GIB,
        "fits": True,
        "extra_executed_flops": 5 * 10**15, "step_seconds": 2.0, "extra_seconds": 0.5, "failed": "",
    }  # fmt: skip
    return Change(**{**known, **fields})


def changes_lines(*changes: Change) -> list[str]:
    return [" ".join(line.split()) for line in str(Changes(changes)).splitlines()]


def test_each_change_stands_with_its_saving_and_its_price():
    unknown = change(arguments="--layout fsdp=8", fits=None, extra_seconds=None)
    lines = changes_lines(change(), unknown)
    assert lines[1] == "change reserved memory fits FLOPs step time"
    assert lines[2] == "--set remat=full 20.0 GiB -4.00 GiB yes +5.00 PFLOP 2.00 s +500 ms"
    assert lines[3] == "--layout fsdp=8 20.0 GiB -4.00 GiB ? +5.00 PFLOP 2.00 s"


def test_more_memory_has_a_plus_and_no_difference_a_nought():
    more = change(saved_bytes=-GIB, extra_executed_flops=0, extra_seconds=-0.5, fits=False)
    assert changes_lines(more)[2] == "--set remat=full 20.0 GiB +1.00 GiB no 0 2.00 s -500 ms"


def test_a_change_that_could_not_be_compiled_is_shown_with_the_reason():
    failed = change(reserved_bytes=None, saved_bytes=None, extra_executed_flops=None, failed="no such luck")
    assert "Could not be compiled\n  --set remat=full: no such luck" in str(Changes((failed,)))


def test_without_changes_it_says_so():
    assert "nothing that this config can change" in str(Changes())
