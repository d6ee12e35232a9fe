"""FLOPs, messages and seconds of one program speak of the same run: the same branches, the same trips."""

import pytest

from meshwright.hardware import Fleet
from meshwright.hlo import parse_program
from meshwright.ledger import executions_of
from meshwright.ledger._flops import executed_flops
from meshwright.ledger._traffic import traffic_of
from meshwright.predict._walk import walk

MESH = (("data", 8),)

# A branch that multiplies and sends nothing, beside one that sends much and multiplies nothing.
BRANCHES = """HloModule both, is_scheduled=true

%multiplies (a: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  ROOT %d = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sends (b: f32[64,64]) -> f32[64,64] {
  %b = f32[64,64]{1,0} parameter(0)
  %g = f32[65536,64]{1,0} all-gather(%b), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %s = f32[64,64]{1,0} slice(%g), slice={[0:64], [0:64]}
}

ENTRY %main (x: f32[64,64], i: s32[]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f32[64,64]{1,0} conditional(%i, %x, %x), branch_computations={%multiplies, %sends}
}
"""


def test_a_conditional_has_one_branch_in_flops_messages_and_seconds(round_machine):
    executions = executions_of(parse_program(BRANCHES))
    fleet = Fleet.parse("8xH100")
    flops = executed_flops(executions)
    assert flops.total == 2 * 64**3
    assert list(flops.assumptions) == ["conditional at %c: counted by its most expensive branch, 1 of 2"]
    assert traffic_of(executions, MESH, fleet) == ((), {})
    walked = walk(round_machine, executions, MESH)
    assert not walked.transfers
    assert walked.flops.total() == flops.total


# As XLA's TPU backend writes it: one channel that two fusions carry while they compute.
CARRIED = """HloModule carried, is_scheduled=true

%starts (a: f32[1000000], p: f32[125000]) -> (f32[1000000], f32[1000000]) {
  %a = f32[1000000]{0} parameter(0)
  %p = f32[125000]{0} parameter(1)
  %g1 = f32[1000000]{0} all-gather(%p), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  %n1 = f32[1000000]{0} negate(%a)
  ROOT %t1 = (f32[1000000]{0}, f32[1000000]{0}) tuple(%n1, %g1)
}

%ends (b: f32[1000000], q: f32[125000]) -> (f32[1000000], f32[1000000]) {
  %b = f32[1000000]{0} parameter(0)
  %q = f32[125000]{0} parameter(1)
  %g2 = f32[1000000]{0} all-gather(%q), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  %n2 = f32[1000000]{0} negate(%b)
  ROOT %t2 = (f32[1000000]{0}, f32[1000000]{0}) tuple(%n2, %g2)
}

ENTRY %main (x: f32[1000000], y: f32[125000]) -> f32[1000000] {
  %x = f32[1000000]{0} parameter(0)
  %y = f32[125000]{0} parameter(1)
  %f1 = (f32[1000000]{0}, f32[1000000]{0}) fusion(%x, %y), kind=kOutput, calls=%starts
  %f2 = (f32[1000000]{0}, f32[1000000]{0}) fusion(%x, %y), kind=kOutput, calls=%ends
  ROOT %r = f32[1000000]{0} get-tuple-element(%f2), index=0
}
"""


def test_a_collective_that_fusions_carry_takes_its_link_while_they_compute(round_machine):
    executions = executions_of(parse_program(CARRIED))
    walked = walk(round_machine, executions, MESH)
    (gather,) = walked.transfers
    (message,), _ = traffic_of(executions, MESH, Fleet.parse("8xH100"))
    assert (message.count, message.overlapped_count) == (1, 1)
    link_seconds, computing = walked.total[gather], walked.total["memory-bound"]
    assert link_seconds > 0
    assert computing > 0
    assert walked.seconds == pytest.approx(max(link_seconds, computing), rel=1e-6)
    assert walked.exposed[gather] == pytest.approx(max(0, link_seconds - computing), rel=1e-6)


def test_the_gathers_of_a_tpu_program_are_priced(samples_of_tpu, round_machine):
    executions, mesh_axes, fleet = samples_of_tpu
    collectives, _ = traffic_of(executions, mesh_axes, fleet)
    carried = {(c.kind, c.axes) for c in collectives if c.overlapped_count}
    assert carried, "the saved program has collectives inside fusions"
    walked = walk(round_machine, executions, mesh_axes)
    names = " ".join(walked.transfers)
    assert all(kind in names for kind, _ in carried)


@pytest.fixture
def samples_of_tpu():
    from pathlib import Path

    from meshwright.compiler import Compiled
    from meshwright.ledger import executions_in

    folder = Path(__file__).parents[1] / "ledger/fixtures/transformer-v5e-8"
    compiled = Compiled.load(folder)
    return executions_in(folder), compiled.mesh_axes, Fleet.parse(compiled.fleet)
