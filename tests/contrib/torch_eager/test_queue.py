"""The clock of a step that a host launches: streams, events and links, against sums by hand."""

import pytest

from meshwright.contrib.torch_eager import MAIN, Queue
from meshwright.hardware import Fleet
from meshwright.ledger import Message
from meshwright.predict import machine_of

BESIDE = 1
GAP = 1.5e-6  # between two kernels of a stream


def queue(fleet: str = "8xH100") -> Queue:
    fleet_ = Fleet.parse(fleet)
    return Queue(machine_of(fleet_, None), fleet_.num_devices)


def gather(num_bytes: int = 2**30, num_devices: int = 8) -> Message:
    groups = "{{" + ",".join(map(str, range(num_devices))) + "}}"
    return Message(
        kind="all-gather",
        axes=("fsdp",),
        group_size=num_devices,
        payload_bytes=num_bytes,
        wire_bytes=num_bytes * (num_devices - 1) // num_devices,
        groups=groups,
    )


def seconds_of(message: Message) -> float:
    alone = queue()
    alone.message(MAIN, message)
    return alone.finish().seconds


def test_kernels_of_one_stream_follow_each_other_with_a_gap():
    q = queue()
    q.kernel(MAIN, "matmul", 0.5, {"bf16": 10})
    q.kernel(MAIN, "memory-bound", 0.25)
    walked = q.finish()
    assert walked.seconds == pytest.approx(0.75 + 2 * GAP)
    assert walked.exposed == pytest.approx({"matmul": 0.5, "memory-bound": 0.25, "launch": 2 * GAP})
    assert walked.flops == {"bf16": 10}


def test_a_device_waits_for_a_host_that_launches_slowly():
    q = queue()
    for _ in range(100):
        q.host(5e-6)
        q.kernel(MAIN, "memory-bound", 1e-6)
    walked = q.finish()
    # The last kernel begins when the host has launched all.
    assert walked.seconds == pytest.approx(100 * 5e-6 + 1e-6 + GAP)
    assert walked.exposed["memory-bound"] == pytest.approx(100 * 1e-6)
    assert sum(walked.exposed.values()) == pytest.approx(walked.seconds)


def test_a_message_beside_a_kernel_costs_what_is_longer():
    message = gather()
    alone = seconds_of(message)
    for kernel in (alone / 4, 4 * alone):
        q = queue()
        q.wait(BESIDE, q.mark(MAIN))
        q.message(BESIDE, message)
        q.kernel(MAIN, "matmul", kernel)
        q.wait(MAIN, q.mark(BESIDE))
        walked = q.finish()
        assert walked.seconds == pytest.approx(max(alone, kernel + GAP))
        assert walked.total["all-gather[fsdp]"] == pytest.approx(alone)
        exposed = max(alone - kernel - GAP, 0)
        assert walked.exposed.get("all-gather[fsdp]", 0.0) == pytest.approx(exposed)


def test_messages_of_two_streams_share_a_link_one_after_the_other():
    message = gather()
    q = queue()
    q.message(1, message)
    q.message(2, message)
    assert q.finish().seconds == pytest.approx(2 * seconds_of(message))


def test_a_stream_that_waits_for_a_mark_begins_after_it():
    q = queue()
    q.kernel(MAIN, "matmul", 1.0)
    middle = q.mark(MAIN)
    q.kernel(MAIN, "matmul", 1.0)
    q.wait(BESIDE, middle)
    q.kernel(BESIDE, "memory-bound", 0.5)
    walked = q.finish()
    assert walked.seconds == pytest.approx(2.0 + 2 * GAP)  # it ended at 1.5
    events = {(event.stream, event.name): event for event in walked.events}
    assert events["stream 1", "memory-bound"].begin_seconds == pytest.approx(1.0 + GAP)


def test_what_is_still_under_way_at_the_end_is_waited_for():
    message = gather()
    q = queue()
    q.kernel(MAIN, "matmul", 1e-4)
    q.wait(BESIDE, q.mark(MAIN))
    q.message(BESIDE, message)
    walked = q.finish()
    assert walked.seconds == pytest.approx(1e-4 + GAP + seconds_of(message))
    assert sum(walked.exposed.values()) == pytest.approx(walked.seconds)
