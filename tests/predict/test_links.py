"""What leaves a host in a step, what stays inside, and how much of it is hidden."""

import pytest

from meshwright.ledger import Collective
from meshwright.predict import Interval, Prediction, Slice, hidden_share, traffic_by_axes


def sent(kind: str, axes: tuple[str, ...], wire: int, crossing: int) -> Collective:
    return Collective(
        kind=kind, axes=axes, group_size=8, count=1, payload_bytes=wire, wire_bytes=wire, overlapped_count=0,
        in_loop=False, link="between" if crossing else "inside", link_name="", crossing_bytes=crossing,
    )  # fmt: skip


def predicted(*slices: Slice) -> Prediction:
    return Prediction(
        step_seconds=Interval(low=None, expected=1.0, high=None), tokens_per_second_per_device=None, mfu=None,
        hfu=None, peak_flops_per_second=0.0, slices=slices, basis="", unpriced=(),
    )  # fmt: skip


def message(name: str, seconds: float, exposed: float) -> Slice:
    return Slice(kind="communication", name=name, seconds=seconds, exposed_seconds=exposed)


TRAFFIC = (
    sent("all-gather", ("fsdp",), 800, 100),
    sent("reduce-scatter", ("fsdp",), 400, 50),
    sent("all-reduce", ("tensor",), 5000, 0),
)


def test_bytes_and_seconds_are_summed_by_axes_what_crosses_first():
    prediction = predicted(
        message("all-reduce[tensor]", 2.0, 2.0),
        message("all-gather[fsdp]", 3.0, 0.5),
        message("reduce-scatter[fsdp]", 1.0, 0.5),
        Slice(kind="compute", name="matmul", seconds=9.0, exposed_seconds=9.0),
    )
    fsdp, tensor = traffic_by_axes(TRAFFIC, prediction)
    assert (fsdp.axes, fsdp.crossing_bytes, fsdp.inside_bytes) == (("fsdp",), 150, 1050)
    assert (fsdp.seconds, fsdp.exposed_seconds, fsdp.hidden_share) == (4.0, 1.0, 0.75)
    assert (tensor.axes, tensor.crossing_bytes, tensor.inside_bytes) == (("tensor",), 0, 5000)
    assert tensor.hidden_share == 0.0
    assert hidden_share((fsdp, tensor)) == pytest.approx(0.5)


def test_without_a_time_nothing_is_known_to_be_hidden():
    assert {part.hidden_share for part in traffic_by_axes(TRAFFIC, None)} == {None}
    assert hidden_share(traffic_by_axes(TRAFFIC, None)) is None
