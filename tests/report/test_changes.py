from dataclasses import dataclass

from meshwright.report import changes_text

GIB = 2**30


@dataclass(kw_only=True)
class Change:
    arguments: str = "--set remat=full"
    reserved_bytes: int | None = 20 * GIB
    saved_bytes: int | None = 4 * GIB
    fits: bool | None = True
    extra_executed_flops: int | None = 5 * 10**15
    step_seconds: float | None = 2.0
    extra_seconds: float | None = 0.5
    failed: str = ""


def test_each_change_stands_with_its_saving_and_its_price(plain):
    text = plain(changes_text([Change(), Change(arguments="--layout fsdp=8", fits=None, extra_seconds=None)]))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == "change reserved memory fits FLOPs step time"
    assert lines[2] == "--set remat=full 20.0 GiB -4.00 GiB yes +5.00 PFLOP 2.00 s +500 ms"
    assert lines[3] == "--layout fsdp=8 20.0 GiB -4.00 GiB ? +5.00 PFLOP 2.00 s"


def test_more_memory_has_a_plus_and_no_difference_a_nought(plain):
    change = Change(saved_bytes=-GIB, extra_executed_flops=0, extra_seconds=-0.5, fits=False)
    line = " ".join(plain(changes_text([change])).splitlines()[2].split())
    assert line == "--set remat=full 20.0 GiB +1.00 GiB no 0 2.00 s -500 ms"


def test_what_could_not_be_compiled_is_told_with_the_reason(plain):
    failed = Change(reserved_bytes=None, saved_bytes=None, extra_executed_flops=None, failed="no such luck")
    text = plain(changes_text([failed]))
    assert "Could not be compiled\n  --set remat=full: no such luck" in text


def test_without_changes_it_says_so(plain):
    assert "nothing that this config can change" in plain(changes_text([]))
