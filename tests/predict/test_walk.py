"""FLOPs, messages and seconds of one program speak of the same run: the same branches, the same trips."""

import dataclasses
import json

import pytest

from meshwright.hardware import Fleet
from meshwright.hlo import parse_program
from meshwright.ledger import executed_flops, executions_of, traffic_of
from meshwright.predict import Event, machine_of, trace_of, walk

# On `round_machine` a copy of 4 MB takes 8 ms, a gather of 8 x 1 MB to 8 MB over 1e8 bytes/s 70 ms.
COPY, GATHER = 0.008, 0.070
X = "  %x = f32[1000000] parameter(0)\n"
S = "  %s = f32[250000] parameter(1)\n"
SYNC = ', backend_config={"collective_backend_config":{"is_sync":true}}'


def entry(*lines, root="tuple()"):
    body = "".join(f"  {line}\n" for line in lines)
    return f"\n%main (x: f32[1000000], s: f32[250000]) -> () {{\n{X}{S}{body}  ROOT %root = () {root}\n}}"


def copy(name):
    return f"%{name} = f32[1000000] copy(%x)"


def start(name, attributes="", groups="{}"):
    shape = "(f32[250000], f32[2000000])"
    return f"%{name} = {shape} all-gather-start(%s), replica_groups={groups}, dimensions={{0}}{attributes}"


def done(name):
    return f"%{name}-done = f32[2000000] all-gather-done(%{name})"


def exposed(walked, name="all-gather[data]"):
    return walked.exposed.get(name, 0.0)


@pytest.fixture
def walked(walked_on, round_machine):
    def make(text):
        found = walked_on(text, machine=round_machine)
        assert sum(found.exposed.values()) == pytest.approx(found.seconds)
        assert all(found.exposed.get(name, 0.0) <= found.total[name] * (1 + 1e-9) for name in found.total)
        return found

    return make


def test_what_is_computed_beside_an_asynchronous_gather_hides_it(walked):
    copies = [copy(f"c{n}") for n in range(10)]
    found = walked(entry(start("g"), *copies, done("g")))
    assert found.seconds == pytest.approx(10 * COPY)
    assert exposed(found) == 0
    assert found.total["all-gather[data]"] == pytest.approx(GATHER)


def test_what_is_not_hidden_is_exposed(walked):
    found = walked(entry(start("g"), copy("c"), done("g"), copy("d")))
    assert found.seconds == pytest.approx(GATHER + COPY)
    assert exposed(found) == pytest.approx(GATHER - COPY)


@pytest.mark.parametrize("attributes", [SYNC])
def test_a_synchronous_start_holds_the_compute_stream(walked, attributes):
    found = walked(entry(start("g", attributes), copy("c"), done("g")))
    assert found.seconds == pytest.approx(GATHER + COPY)
    assert exposed(found) == pytest.approx(GATHER)


def test_a_collective_without_a_start_holds_the_compute_stream(walked):
    gather = "%g = f32[2000000] all-gather(%s), replica_groups={}, dimensions={0}"
    assert walked(entry(gather, copy("c"))).seconds == pytest.approx(GATHER + COPY)


def test_two_gathers_share_their_link(walked):
    found = walked(entry(start("g"), start("h"), done("g"), done("h")))
    assert found.seconds == exposed(found) == pytest.approx(2 * GATHER)


def test_awaiting_the_second_first_exposes_both_once(walked):
    found = walked(entry(start("g"), start("h"), done("h"), done("g")))
    assert found.seconds == exposed(found) == pytest.approx(2 * GATHER)


def test_a_group_of_one_sends_nothing(walked):
    assert walked(entry(start("g", groups="{{0},{1}}"), copy("c"), done("g"))).seconds == pytest.approx(COPY)


def test_links_inside_and_between_domains_do_not_wait_for_each_other(walked_on, round_machine):
    machine = dataclasses.replace(round_machine, devices_per_domain=4, between_bytes_per_second=1e8)
    inside, between = start("g", groups="[2,4]<=[8]"), start("h", groups="[4,2]<=[2,4]T(1,0)")
    both = walked_on(entry(inside, between, done("g"), done("h")), machine=machine)
    alone = [walked_on(entry(one, done(one[1])), machine=machine).seconds for one in (inside, between)]
    assert both.seconds == pytest.approx(max(alone))


LOOP = """
%body (t: (s32[], f32[1000000])) -> (s32[], f32[1000000]) {
  %t = (s32[], f32[1000000]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[1000000] get-tuple-element(%t), index=1
  %c = f32[1000000] copy(%x)
  ROOT %next = (s32[], f32[1000000]) tuple(%i, %c)
}
%condition (t: (s32[], f32[1000000])) -> pred[] {
  %t = (s32[], f32[1000000]) parameter(0)
  ROOT %go = pred[] constant(true)
}
"""


def loop(trips):
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return LOOP + entry(
        "%zero = s32[] constant(0)",
        "%init = (s32[], f32[1000000]) tuple(%zero, %x)",
        f"%w = (s32[], f32[1000000]) while(%init), condition=%condition, body=%body{known}",
    )


@pytest.mark.parametrize("trips", [1, 7, 126])
def test_a_scan_of_n_costs_n_bodies(walked, trips):
    assert walked(loop(trips)).seconds == pytest.approx(trips * COPY)


def test_a_loop_of_unknown_length_costs_one_body(walked):
    assert walked(loop(None)).seconds == pytest.approx(COPY)


def test_a_loop_that_counts_to_seven_costs_seven_bodies_though_the_compiler_does_not_say(walked):
    counting = LOOP.replace("tuple(%i, %c)", "tuple(%j, %c)").replace(
        "  ROOT %next", "  %one = s32[] constant(1)\n  %j = s32[] add(%i, %one)\n  ROOT %next"
    )
    counting = counting.replace(
        "  ROOT %go = pred[] constant(true)",
        "  %i = s32[] get-tuple-element(%t), index=0\n  %seven = s32[] constant(7)\n"
        "  ROOT %go = pred[] compare(%i, %seven), direction=LT",
    )
    assert walked(loop(None).replace(LOOP, counting)).seconds == pytest.approx(7 * COPY, rel=1e-5)


def test_a_link_that_a_loop_uses_is_free_when_the_loop_ends(walked):
    gather = LOOP.replace(
        "%c = f32[1000000] copy(%x)",
        "%y = f32[125000] slice(%x), slice={[0:125000]}\n"
        "  %c = f32[1000000] all-gather(%y), replica_groups={}, dimensions={0}",
    )
    text = loop(3).replace(LOOP, gather)
    after = text.replace("  ROOT %root", f"  {start('g')}\n  {done('g')}\n  ROOT %root")
    assert walked(after).seconds == pytest.approx(walked(text).seconds + GATHER)


def test_a_conditional_costs_its_most_expensive_branch(walked):
    branches = """
%cheap (a: f32[1000000]) -> f32[1000000] {
  ROOT %a = f32[1000000] parameter(0)
}
%dear (b: f32[1000000]) -> f32[1000000] {
  %b = f32[1000000] parameter(0)
  %c = f32[1000000] copy(%b)
  ROOT %d = f32[1000000] copy(%c)
}
"""
    pick = "%y = f32[1000000] conditional(%i, %x, %x), branch_computations={%cheap, %dear}"
    assert walked(branches + entry("%i = s32[] constant(0)", pick)).seconds == pytest.approx(2 * COPY)


def test_a_call_costs_what_it_calls(walked):
    called = """
%f (b: f32[1000000]) -> f32[1000000] {
  %b = f32[1000000] parameter(0)
  ROOT %c = f32[1000000] copy(%b)
}
"""
    assert walked(called + entry("%y = f32[1000000] call(%x), to_apply=%f")).seconds == pytest.approx(COPY)


def test_an_asynchronous_copy_is_priced_where_it_starts(walked):
    begin = "%a = (f32[1000000], f32[1000000], u32[]) copy-start(%x)"
    found = walked(entry(begin, "%b = f32[1000000] copy-done(%a)"))
    assert found.seconds == pytest.approx((4 * 4e6 + 4 - 4e6) / 1e9, rel=0.4)


ASYNC = """
%inner (b: f32[2000000]) -> f32[250000] {
  %b = f32[2000000] parameter(0)
  ROOT %r = f32[250000] reduce-scatter(%b), replica_groups={}, dimensions={0}, to_apply=%sum
}
"""


def test_a_reduce_scatter_in_an_asynchronous_computation_overlaps(walked):
    begin = "%a = ((f32[2000000]), f32[250000]) async-start(%big), calls=%inner"
    big = "%big = f32[2000000] broadcast(%zero), dimensions={}"
    lines = ["%zero = f32[] constant(0)", big, begin, copy("c"), "%d = f32[250000] async-done(%a)"]
    found = walked(ASYNC + entry(*lines))
    assert found.seconds == pytest.approx(0.008 + GATHER)  # the broadcast writes 8 MB first
    assert exposed(found, "reduce-scatter[data]") == pytest.approx(GATHER - COPY)


def test_what_nobody_awaits_ends_with_its_computation(walked):
    lines = ["%zero = f32[] constant(0)", "%big = f32[2000000] broadcast(%zero), dimensions={}"]
    lines += ["%a = ((f32[2000000]), f32[250000]) async-start(%big), calls=%inner"]
    assert walked(ASYNC + entry(*lines)).seconds == pytest.approx(0.008 + GATHER)


def test_an_update_hands_the_wait_on(walked):
    lines = [
        "%zero = f32[] constant(0)",
        "%big = f32[2000000] broadcast(%zero), dimensions={}",
        "%a = ((f32[2000000]), f32[250000]) async-start(%big), calls=%inner",
        "%u = ((f32[2000000]), f32[250000]) async-update(%a)",
        copy("c"),
        "%d = f32[250000] async-done(%u)",
    ]
    assert walked(ASYNC + entry(*lines)).seconds == pytest.approx(0.008 + GATHER)


def test_each_kernel_pays_a_launch_and_views_do_not(walked_on):
    machine = machine_of(Fleet.parse("8xH100"), None)
    found = walked_on(entry(copy("c"), copy("d"), "%v = f32[1000,1000] bitcast(%x)"))
    assert found.total["launch"] == pytest.approx(2 * machine.launch_seconds)


def test_flops_are_counted_by_the_format_they_run_in(walked_on):
    lines = [
        "%c = f32[1000000] copy(%x)",
        "%a = f32[64,64] iota(), iota_dimension=0",
        "%m = f32[64,64] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    ]
    found = walked_on(loop(5).replace(LOOP, LOOP.replace(lines[0], "\n  ".join(lines))))
    assert found.flops == {"tf32": 5 * 2 * 64**3}


def test_what_happens_is_noted_by_stream_and_clock(walked):
    found = walked(entry(start("g"), copy("c"), done("g"))).events
    gather, first = (next(e for e in found if e.stream == stream) for stream in ("inside", "compute"))
    assert (gather.name, gather.begin_seconds) == ("all-gather[data]", 0.0)
    assert gather.seconds == pytest.approx(GATHER)
    assert (first.name, first.operation) == ("memory-bound", "c")
    assert first.seconds == pytest.approx(COPY)


def test_of_a_loop_the_first_round_is_noted_and_the_further_ones_as_one(walked):
    found = walked(loop(7)).events
    rounds = [e for e in found if "further rounds" in e.name]
    assert [e.name for e in rounds] == ["6 further rounds like this one"]
    assert rounds[0].begin_seconds == pytest.approx(COPY)
    assert rounds[0].seconds == pytest.approx(6 * COPY)
    assert [e.operation for e in found if e.name == "memory-bound"] == ["c"]


def event(**changes):
    fields = dict(
        name="matmul",
        stream="compute",
        begin_seconds=0.5,
        seconds=0.25,
        module="layers/up",
        operation="dot.3",
    )
    return Event(**{**fields, **changes})


def test_a_kernel_is_a_slice_of_its_stream_in_microseconds():
    trace = trace_of([event()], "llama on 8xH100")
    (found,) = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (found["name"], found["cat"], found["ts"], found["dur"]) == (
        "layers/up: matmul",
        "matmul",
        5e5,
        2.5e5,
    )
    assert found["args"] == {"operation": "dot.3", "module": "layers/up"}


def test_each_stream_is_a_named_track():
    trace = trace_of([event(stream="between", name="all-gather[fsdp]", module="")], "x")
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {1: "computing", 2: "links inside the fast domain", 3: "links between domains"}
    (found,) = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (found["tid"], found["name"]) == (3, "all-gather[fsdp]")


def test_what_takes_no_time_is_not_drawn():
    assert [e for e in trace_of([event(seconds=0)], "x")["traceEvents"] if e["ph"] == "X"] == []


def test_it_is_json():
    assert json.loads(json.dumps(trace_of([event()], "x")))["displayTimeUnit"] == "ms"


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


# As XLA's TPU backend writes it: the same, and a loop between the two whose body carries it too.
THROUGH_A_LOOP = CARRIED.replace(
    "ENTRY %main",
    """%goes_on (c: f32[1000], u: f32[125000], o: f32[1000000]) -> (f32[1000], f32[125000], f32[1000000]) {
  %c = f32[1000]{0} parameter(0)
  %u = f32[125000]{0} parameter(1)
  %o = f32[1000000]{0} parameter(2)
  %g3 = f32[1000000]{0} all-gather(%u), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  %n3 = f32[1000]{0} negate(%c)
  ROOT %t3 = (f32[1000]{0}, f32[125000]{0}, f32[1000000]{0}) tuple(%n3, %u, %g3)
}

%body (w: (s32[], f32[1000], f32[125000], f32[1000000])) -> (s32[], f32[1000], f32[125000], f32[1000000]) {
  %w = (s32[], f32[1000]{0}, f32[125000]{0}, f32[1000000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%w), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %w1 = f32[1000]{0} get-tuple-element(%w), index=1
  %w2 = f32[125000]{0} get-tuple-element(%w), index=2
  %w3 = f32[1000000]{0} get-tuple-element(%w), index=3
  %f3 = (f32[1000]{0}, f32[125000]{0}, f32[1000000]{0}) fusion(%w1, %w2, %w3), kind=kOutput, calls=%goes_on
  %v1 = f32[1000]{0} get-tuple-element(%f3), index=0
  %v2 = f32[125000]{0} get-tuple-element(%f3), index=1
  %v3 = f32[1000000]{0} get-tuple-element(%f3), index=2
  ROOT %w4 = (s32[], f32[1000]{0}, f32[125000]{0}, f32[1000000]{0}) tuple(%next, %v1, %v2, %v3)
}

%condition (z: (s32[], f32[1000], f32[125000], f32[1000000])) -> pred[] {
  %z = (s32[], f32[1000]{0}, f32[125000]{0}, f32[1000000]{0}) parameter(0)
  %j = s32[] get-tuple-element(%z), index=0
  %n = s32[] constant(100)
  ROOT %lt = pred[] compare(%j, %n), direction=LT
}

ENTRY %main""",
).replace(
    "  %f2 =",
    """  %zero = s32[] constant(0)
  %small = f32[1000]{0} slice(%x), slice={[0:1000]}
  %whole = f32[1000000]{0} get-tuple-element(%f1), index=1
  %begin = (s32[], f32[1000]{0}, f32[125000]{0}, f32[1000000]{0}) tuple(%zero, %small, %y, %whole)
  %loop = (s32[], f32[1000]{0}, f32[125000]{0}, f32[1000000]{0}) while(%begin), condition=%condition,
    body=%body, backend_config={"known_trip_count":{"n":"100"}}
  %f2 =""".replace(",\n    body", ", body"),
)


def test_a_loop_between_the_fusions_of_a_collective_neither_sends_nor_moves_it_again(round_machine):
    mesh, fleet = MESH, Fleet.parse("8xH100")
    alone, looped = (executions_of(parse_program(text)) for text in (CARRIED, THROUGH_A_LOOP))
    assert traffic_of(looped, mesh, fleet) == traffic_of(alone, mesh, fleet)
    before, after = walk(round_machine, alone, mesh), walk(round_machine, looped, mesh)
    (gather,) = after.transfers
    assert after.total[gather] == before.total[gather]
    # 100 rounds of 8 kB, where each carrier at the ends moves 12.5 MB.
    assert after.total["memory-bound"] == pytest.approx(before.total["memory-bound"], rel=0.1)


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
    return executions_in(folder, compiled), compiled.mesh_axes, Fleet.parse(compiled.fleet)
