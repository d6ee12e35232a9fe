"""The program of several TPU slices, as libtpu compiled it without one, read as one of all their devices."""

import re
from pathlib import Path

import pytest

from meshwright.compiler import Compiled, read_text
from meshwright.hardware import Fleet
from meshwright.hlo import joined_slices, parse_program
from meshwright.ledger import executions_in, executions_of, ledger_of, traffic_of

FIXTURES = Path(__file__).parent / "fixtures"
FLEET = Fleet.parse("2xv5e-4")
IDS = [slice_ + device for slice_ in (100_000, 200_000) for device in range(4)]
EXCHANGE = """HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[64]) -> {result} {{
  %p = f32[64]{{0}} parameter(0)
  %token = token[] after-all()
  %send = (f32[64]{{0}}, u32[], token[]) send(%p, %token), channel_id=2, is_host_transfer=true, {attributes}
  %recv = ({result}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, {attributes}
  %work = f32[64]{{0}} add(%p, %p)
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = ({result}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %result = {result} get-tuple-element(%recv-done), index=0
}}
"""


def exchange(kind, target, result="f32[64]{0}"):
    """A program of one exchange between slices, as libtpu prints it."""
    attributes = (
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="it_0",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    return parse_program(EXCHANGE.format(attributes=attributes, result=result))


def traffic(program, mesh=(("data", 2), ("fsdp", 4))):
    return traffic_of(executions_of(joined_slices(program, IDS)), mesh, FLEET)


def fixture(name):
    folder = FIXTURES / f"{name}-2xv5e-4"
    return folder, Compiled.load(folder)


def test_gradients_are_summed_inside_slices_then_between_then_gathered():
    folder, compiled = fixture("cruncher")
    ledger = ledger_of(folder, compiled, FLEET)
    found = {(each.kind, each.link): each for each in ledger.traffic if each.payload_bytes > 10_000}
    weights = 4 * 2 * 1024 * 1024
    inside = found["reduce-scatter", "inside"], found["all-gather", "inside"]
    assert [each.wire_bytes for each in inside] == [weights * 3 // 4, weights * 3 // 4]
    between = found["all-reduce", "between"]
    assert between.axes == ("data",)
    assert between.group_size == 2
    assert between.payload_bytes == pytest.approx(weights / 4, rel=0.01)  # of its part, not of the whole
    assert between.crossing_bytes == between.wire_bytes
    assert between.overlapped_count == between.count
    assert between.link_name == "DCN"
    assert not ledger.unpriced


def test_an_axis_may_be_split_between_the_links():
    folder, compiled = fixture("transformer")
    ledger = ledger_of(folder, compiled, FLEET)
    fsdp = [each for each in ledger.traffic if each.axes == ("fsdp",) and each.kind == "all-gather"]
    assert {each.link for each in fsdp} == {"inside", "between"}
    assert {each.group_size for each in fsdp} == {2}
    assert all(each.link == "inside" for each in ledger.traffic if each.axes == ("tensor",))


def test_flops_are_those_of_one_slice_of_as_many_devices():
    one = FIXTURES / "transformer-v5e-8"
    of_one = ledger_of(one, Compiled.load(one), Fleet.parse("v5e-8"))
    folder, two = fixture("transformer")
    assert ledger_of(folder, two, FLEET).flops.executed == of_one.flops.executed


def test_the_ends_of_an_exchange_keep_their_places_in_the_schedule():
    folder, compiled = fixture("cruncher")
    text = read_text(folder, "program.hlo.txt")
    names = re.findall(r"%(send[.\d]*|recv-done[.\d]*) = ", text)
    entry = executions_in(folder, compiled).program.entry
    assert [each.name for each in entry.instructions if each.name in names] == names
    assert all(entry.by_name[name].collective == "all-reduce" for name in names)


@pytest.mark.parametrize(
    ("kind", "target", "result", "expected"),
    [
        ("ALL_REDUCE", '"{1,2}x{0:3}"', "f32[64]{0}", ("all-reduce", ("data",), 2, 256, 256)),
        ("ALL_REDUCE", '"{1:2}x{0,1,2,3}"', "f32[64]{0}", ("all-reduce", ("data",), 2, 256, 256)),
        ("ALL_GATHER", '"{1,2}x{0:3}"', "f32[128]{0}", ("all-gather", ("data",), 2, 256, 256)),
        ("REDUCE_SCATTER", '"{1,2}x{0:3}"', "f32[32]{0}", ("reduce-scatter", ("data",), 2, 128, 128)),
        (
            "ALL_TO_ALL",
            "{{100000,100001,100002,100003,200000,200001,200002,200003}}",
            "f32[64]{0}",
            ("all-to-all", ("data", "fsdp"), 8, 224, 128),
        ),
        (
            "ONE_TO_ONE",
            "{{100003->200000},{200003->100000}}",
            "f32[64]{0}",
            ("collective-permute", ("data", "fsdp"), 8, 256, 256),
        ),
    ],
)
def test_what_the_runtime_of_slices_exchanges_is_a_collective(kind, target, result, expected):
    (only,), unpriced = traffic(exchange(kind, target, result))
    assert not unpriced
    assert (only.kind, only.axes, only.group_size, only.wire_bytes, only.crossing_bytes) == expected
    assert (only.link, only.link_name, only.overlapped_count) == ("between", "DCN", 1)


def test_groups_inside_slices_are_those_of_all_slices():
    text = "%s = f32[64]{0} all-reduce(%p), replica_groups=[2,2]<=[4], to_apply=%add\n  %work = "
    attributes = 'frontend_attributes={_xla_megascale_target="{1,2}x{0:3}"}'
    inside = parse_program(
        EXCHANGE.format(attributes=attributes, result="f32[64]{0}").replace("%work = ", text)
    )
    found, _ = traffic(inside)
    assert [(each.axes, each.link, each.group_size) for each in found] == [(("fsdp",), "inside", 2)]


def test_an_exchange_of_an_unknown_kind_is_listed():
    found, unpriced = traffic(exchange("GATHER_OF_A_LATER_RELEASE", '"{1,2}x{0:3}"'))
    assert not found
    assert any(each.startswith("send of f32[64]") for each in unpriced)


def test_devices_that_the_mesh_lacks_are_an_error():
    with pytest.raises(ValueError, match="names 300000, no device of the mesh"):
        joined_slices(exchange("ALL_REDUCE", '"{1,3}x{0:3}"'), IDS)
    with pytest.raises(ValueError, match="devices of no known form: 'all of them'"):
        joined_slices(exchange("ALL_REDUCE", '"all of them"'), IDS)
