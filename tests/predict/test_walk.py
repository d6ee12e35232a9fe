import dataclasses

import pytest

from meshwright.hardware import Fleet
from meshwright.predict._machine import machine_of

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
