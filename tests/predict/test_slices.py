"""The time of messages between TPU slices: of the network between them, and beside products."""

import pytest

from meshwright.hardware import Fleet
from meshwright.hlo import joined_slices, parse_program
from meshwright.ledger import executions_of
from meshwright.predict import machine_of, walk

SIZE = 8192
MEGA = 2**20
IDS = [slice_ + device for slice_ in (100_000, 200_000) for device in range(4)]
# A sum between slices, begun before a product and awaited after it.
SUM = """HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (p: f32[NUMBERS], x: bf16[SIZE,SIZE]) -> (f32[NUMBERS], bf16[SIZE,SIZE]) {
  %p = f32[NUMBERS]{0} parameter(0)
  %x = bf16[SIZE,SIZE]{1,0} parameter(1)
  %token = token[] after-all()
  %send = (f32[NUMBERS]{0}, u32[], token[]) send(%p, %token), is_host_transfer=true, ATTRIBUTES
  %recv = (f32[NUMBERS]{0}, u32[], token[]) recv(%token), is_host_transfer=true, ATTRIBUTES
  %y = bf16[SIZE,SIZE]{1,0} convolution(%x, %x), dim_labels=bf_io->bf, metadata={op_name="step/dot_general"}
  %send-done = token[] send-done(%send), is_host_transfer=true
  %recv-done = (f32[NUMBERS]{0}, token[]) recv-done(%recv), is_host_transfer=true
  %sum = f32[NUMBERS]{0} get-tuple-element(%recv-done), index=0
  ROOT %both = (f32[NUMBERS]{0}, bf16[SIZE,SIZE]{1,0}) tuple(%sum, %y)
}
"""
ATTRIBUTES = (
    'frontend_attributes={_xla_host_transfer_rendezvous="s",_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}'
)


def walked(num_bytes):
    text = SUM.replace("ATTRIBUTES", ATTRIBUTES).replace("SIZE", str(SIZE))
    program = joined_slices(parse_program(text.replace("NUMBERS", str(num_bytes // 4))), IDS)
    machine = machine_of(Fleet.parse("2xv5e-4"), None)
    return walk(machine, executions_of(program), (("data", 2), ("fsdp", 4))), machine


def test_a_sum_between_slices_takes_the_network_and_hides_beside_a_product():
    small, machine = walked(MEGA)
    rate = 3.125e9 * machine.shared.network_efficiency
    name = "all-reduce[data]"
    assert small.total[name] == pytest.approx(MEGA / rate, rel=0.02)  # once: half there and half back
    assert small.exposed.get(name, 0.0) == 0.0
    large, _ = walked(256 * MEGA)
    product = large.total["matmul"]
    assert large.total[name] == pytest.approx(256 * MEGA / rate, rel=0.02)
    assert large.exposed[name] == pytest.approx(large.total[name] - product, rel=0.02)
    assert large.links == {"between"}


def test_a_whole_sum_over_slices_is_reduced_inside_first(walked_on):
    """A program of another compiler, as --simulate has it: inside and between, one after another."""
    text = """
%step (p: f32[67108864]) -> f32[67108864] {
  %p = f32[67108864]{0} parameter(0)
  ROOT %r = f32[67108864]{0} all-reduce(%p), replica_groups={}, to_apply=%sum
}
"""
    inside = walked_on(text, "v5e-4").seconds
    machine = machine_of(Fleet.parse("2xv5e-4"), None)
    between = 256 * MEGA / 4 / (3.125e9 * machine.shared.network_efficiency)
    assert walked_on(text, "2xv5e-4").seconds == pytest.approx(between + inside, rel=0.25)
    assert walked_on(text, "2xv5e-4").seconds > between
