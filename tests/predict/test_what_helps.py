import dataclasses

import pytest

from meshwright.hardware import Fleet
from meshwright.ledger import executions_of
from meshwright.predict import machine_of, predict, walk, what_helps

# On `round_machine`: a copy of 4 MB 8 ms, a gather of 8 x 1 MB 70 ms, a product of 512^3 0.27 ms.
COPY, GATHER, PRODUCT = 0.008, 0.070, 2 * 512**3 / 1e12
HEAD = """
%main (x: f32[1000000], s: f32[250000], m: f32[512,512]) -> () {
  %x = f32[1000000] parameter(0)
  %s = f32[250000] parameter(1)
  %m = f32[512,512] parameter(2)
"""
REPEATED = ', metadata={op_name="jit(step)/transpose(jvp())/checkpoint/rematted_computation/mul"}'
FORWARD = ', metadata={op_name="jit(step)/jvp()/mul"}'
GATHERED = "(f32[250000], f32[2000000])"


def entry(*lines):
    return HEAD + "".join(f"  {line}\n" for line in lines) + "  ROOT %root = () tuple()\n}"


def start(name, groups="[1,8]<=[8]"):
    return f"%{name} = {GATHERED} all-gather-start(%s), replica_groups={groups}, dimensions={{0}}"


def done(name):
    return f"%{name}-done = f32[2000000] all-gather-done(%{name})"


def copy(name, metadata=""):
    return f"%{name} = f32[1000000] copy(%x){metadata}"


PRODUCT_LINE = "%p = f32[512,512] dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.fixture
def helps(program_of, compiled_for, ledger_with, round_machine):
    """By what: the helps for a program, on eight devices along `data` unless told."""

    def make(text, machine=round_machine, fleet="8xH100", mesh_axes=(("data", 8),), usable=None):
        program, compiled = program_of(text), compiled_for(fleet)
        compiled = dataclasses.replace(compiled, mesh_axes=mesh_axes)
        memory = dataclasses.replace(ledger_with().memory, reserved_bytes=3 * 2**30, usable_bytes=usable)
        walked = walk(machine, executions_of(program), mesh_axes)
        found = what_helps(machine, executions_of(program), compiled, Fleet.parse(fleet), memory, walked, {})
        bounds = [h for h in found if not h.change]
        assert found == (*(h for h in found if h.change), *bounds)
        assert [h.saving_seconds for h in bounds] == sorted((h.saving_seconds for h in bounds), reverse=True)
        assert all(h.certainty.startswith("walked whole" if h.change else "bound: ") for h in found)
        return {h.change or h.what: h for h in found}

    return make


def test_waiting_for_a_gather_is_saved_where_it_is_exposed(helps):
    found = helps(entry(start("g"), copy("c"), done("g")))
    assert list(found) == ["no waiting for collectives over data"]
    help_ = found["no waiting for collectives over data"]
    assert help_.saving_seconds == pytest.approx(GATHER - COPY)
    assert "hidden behind computation" in help_.certainty


def test_a_gather_that_is_hidden_already_is_not_named(helps):
    assert helps(entry(start("g"), *(copy(f"c{n}") for n in range(10)), done("g"))) == {}


def test_each_axis_is_named_for_itself(helps):
    tensor, fsdp = "[4,2]<=[8]", "[2,4]<=[4,2]T(1,0)"
    found = helps(
        entry(start("g", fsdp), done("g"), start("h", tensor), done("h")),
        mesh_axes=(("fsdp", 4), ("tensor", 2)),
    )
    of_fsdp, of_tensor = (found[f"no waiting for collectives over {axis}"] for axis in ("fsdp", "tensor"))
    # three quarters of the result's 8 MB, and half of it
    assert of_fsdp.saving_seconds == pytest.approx(0.06, rel=1e-3)
    assert of_tensor.saving_seconds == pytest.approx(0.04, rel=1e-3)


ALONG_FIRST, ALONG_LAST = "[4,2]<=[2,4]T(1,0)", "[2,4]<=[8]"  # groups along the axes of a mesh of 2 x 4


def two_hosts(round_machine):
    return dataclasses.replace(round_machine, devices_per_domain=4, between_bytes_per_second=1e7)


def test_another_order_of_the_axes_is_proposed_where_walking_it_whole_takes_less(helps, round_machine):
    found = helps(
        entry(start("g", ALONG_FIRST), done("g")),
        two_hosts(round_machine),
        fleet="2x4xH100",
        mesh_axes=(("data", 2), ("tensor", 4)),
    )
    # half of the result's 8 MB over 1e7 bytes/s at 85 %, instead of over 1e8 bytes/s
    saving = found["--layout tensor=4,data=2"].saving_seconds
    assert saving == pytest.approx(4e6 / 0.85e7 - 4e6 / 1e8, rel=1e-3)


def test_no_order_is_proposed_that_sends_another_axis_between_hosts_for_more(helps, round_machine):
    """The first axis would find room in a host; the last one, which sends more, would leave it."""
    found = helps(
        entry(
            start("g", ALONG_FIRST),
            done("g"),
            *(line for n in range(3) for line in (start(f"h{n}", ALONG_LAST), done(f"h{n}"))),
        ),
        two_hosts(round_machine),
        fleet="2x4xH100",
        mesh_axes=(("data", 2), ("fsdp", 4)),
    )
    assert not [each for each in found if each.startswith("--layout")]


def test_what_an_order_saves_is_what_a_program_numbered_in_that_order_takes_less(
    helps, program_of, round_machine
):
    """The same collectives, once as the first layout numbers the devices and once as the other does."""
    machine = two_hosts(round_machine)
    chatty, quiet = (start("g", ALONG_FIRST), done("g")), (start("h", ALONG_LAST), done("h"))
    found = helps(
        entry(*chatty, *chatty, *quiet), machine, fleet="2x4xH100", mesh_axes=(("fsdp", 2), ("data", 4))
    )
    # Of a mesh of 4 x 2 the groups of two are neighbours, and those of four stride over both hosts.
    chatty, quiet = (start("g", "[4,2]<=[8]"), done("g")), (start("h", "[2,4]<=[4,2]T(1,0)"), done("h"))
    other = walk(
        machine, executions_of(program_of(entry(*chatty, *chatty, *quiet))), (("data", 4), ("fsdp", 2))
    )
    before = walk(
        machine,
        executions_of(
            program_of(entry(*(start("g", ALONG_FIRST), done("g")) * 2, start("h", ALONG_LAST), done("h")))
        ),
        (("fsdp", 2), ("data", 4)),
    )
    saving = found["--layout data=4,fsdp=2"].saving_seconds
    assert saving == pytest.approx(before.seconds - other.seconds)


def test_an_axis_too_large_for_a_domain_cannot_lie_in_one(helps, round_machine):
    found = helps(entry(start("g"), done("g")), two_hosts(round_machine), fleet="2x4xH100")
    assert list(found) == ["no waiting for collectives over data"]


@pytest.mark.parametrize(
    ("usable", "words"), [(None, "not known"), (5 * 2**30, "2.00 GiB are free"), (2**30, "no memory is free")]
)
def test_what_is_computed_again_is_saved_if_it_is_kept(helps, usable, words):
    found = helps(entry(copy("a", FORWARD), copy("b", REPEATED), copy("c", REPEATED)), usable=usable)
    help_ = found["nothing computed again in the backward pass"]
    assert help_.saving_seconds == pytest.approx(2 * COPY)
    assert words in help_.certainty


def test_a_gather_made_again_is_saved_with_what_is_computed_again(helps):
    again = f"%g = f32[2000000] all-gather(%s), replica_groups=[1,8]<=[8], dimensions={{0}}{REPEATED}"
    found = helps(entry(copy("a", FORWARD), again))
    assert found["nothing computed again in the backward pass"].saving_seconds == pytest.approx(GATHER)


def test_float32_products_in_bf16_save_what_the_rates_say(helps, round_machine):
    rates = {"fp32": 1e12, "bf16": 4e12}
    machine = dataclasses.replace(round_machine, peak_flops_per_second=rates, memory_bytes_per_second=1e15)
    found = helps(entry(PRODUCT_LINE), machine)
    assert found["products of float32 in bf16"].saving_seconds == pytest.approx(PRODUCT * 3 / 4)


def test_products_whose_bytes_take_longer_save_half_of_the_bytes(helps, round_machine):
    machine = dataclasses.replace(
        round_machine, peak_flops_per_second={"fp32": 1e15, "bf16": 1e15}, memory_bytes_per_second=1e9
    )
    found = helps(entry(PRODUCT_LINE), machine)
    assert found["products of float32 in bf16"].saving_seconds == pytest.approx(3 * 512 * 512 * 4 / 1e9 / 2)


def test_a_chip_whose_bf16_is_no_faster_is_not_told_to_use_it(helps, round_machine):
    machine = dataclasses.replace(
        round_machine, peak_flops_per_second={"fp32": 1e12, "bf16": 1e11}, memory_bytes_per_second=1e15
    )
    assert helps(entry(PRODUCT_LINE), machine) == {}


def test_gaps_between_kernels_are_saved_where_there_are_many(helps, round_machine):
    machine = dataclasses.replace(round_machine, launch_seconds=COPY / 2)
    found = helps(entry(copy("a"), copy("b")), machine)
    assert found["no gaps between kernels"].saving_seconds == pytest.approx(COPY)


def test_predict_carries_them_and_the_expected_time_is_that_of_the_program_as_it_is(
    program_of, compiled_for, ledger_with
):
    text = entry(start("g"), copy("c"), done("g"))
    fleet = Fleet.parse("8xH100")
    found = predict(executions_of(program_of(text)), ledger_with(), compiled_for("8xH100"), fleet)
    alone = walk(machine_of(fleet, None), executions_of(program_of(text)), (("data", 8),)).seconds
    assert found.step_seconds.expected == alone
    assert "no waiting for collectives over data" in {help_.what for help_ in found.what_helps}
    assert all(0 < help_.saving_seconds < alone for help_ in found.what_helps)
