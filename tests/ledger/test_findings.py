"""Each finding, on a program that has the fault and on one that has it not."""

import dataclasses
from pathlib import Path

import pytest

from meshwright import weigh
from meshwright.compiler import Argument
from meshwright.hardware import Fleet
from meshwright.ledger import Replication, axes_of_sharding, executions_of, findings_of, traffic_of

FIXTURES = Path(__file__).parent / "fixtures"
HOST = Fleet.parse("8xH100")
MESH = (("fsdp", 4), ("tensor", 2))


@pytest.fixture
def lint(samples):
    """The findings of the sample Transformer's ledger, with another program or other facts."""
    name = "transformer-8xH100"

    def run(program=None, *, fleet=HOST, arguments=None, mesh_axes=MESH, flops=None, memory=None):
        ledger, compiled = samples.ledger(name), samples.compiled(name)
        compiled = dataclasses.replace(
            compiled, mesh_axes=mesh_axes, arguments=compiled.arguments if arguments is None else arguments
        )
        text = samples.program(name) if program is None else program
        return findings_of(
            executions_of(text),
            compiled,
            fleet,
            dataclasses.replace(ledger.memory, **(memory or {})),
            dataclasses.replace(ledger.flops, **(flops or {})),
            traffic_of(executions_of(text), mesh_axes, fleet)[0],
        )

    return run


@pytest.fixture
def weighed(monkeypatch):
    """The ledger of a step in fixtures/activations.py on eight H100."""
    monkeypatch.chdir(FIXTURES)

    def run(name, layout):
        return weigh(f"activations:{name}", on="8xH100", layout=layout).ledger

    return run


def kinds(findings):
    return [finding.kind for finding in findings]


def test_a_well_sharded_program_has_no_findings(lint):
    assert lint() == ()


def test_a_large_argument_that_lies_whole_everywhere_is_found(lint, samples):
    first, *rest = samples.compiled("transformer-8xH100").arguments
    whole = dataclasses.replace(first, replicated=True, device_bytes=2**31, role="parameters")
    (found,) = lint(arguments=(whole, *rest))
    assert found.kind == "replicated argument"
    assert whole.path in found.what
    assert "2.00 GiB each" in found.what
    assert found.fix == "split one of its dimensions over fsdp or tensor"
    small = dataclasses.replace(whole, device_bytes=2**20)
    assert lint(arguments=(small, *rest)) == ()


def test_without_an_axis_that_splits_parameters_replicas_are_meant(lint, samples):
    first, *_ = samples.compiled("transformer-8xH100").arguments
    whole = dataclasses.replace(first, replicated=True, device_bytes=2**31)
    assert "replicated argument" not in kinds(lint(arguments=(whole,), mesh_axes=(("data", 8),)))


def test_a_saved_activation_that_a_constraint_gathers_is_found_with_its_lines(weighed):
    rows, width = 2**20, 1024
    ledger = weighed("gathered", "data=8")
    found = [f for f in ledger.findings if f.kind == "replicated activation"]
    lines = (FIXTURES / "activations.py").read_text().splitlines()
    names = {
        lines[int(f.source_line.partition(":")[2]) - 1].split("=")[0].split("(")[0].strip() for f in found
    }
    assert names == {"hidden"}  # tanh's output; one kernel reads the product for its mean and its gradient
    for finding in found:
        assert finding.what == (
            f"bf16[{rows},{width}], saved for the backward pass, is the same on every device along data, "
            "2.00 GiB each"
        )
        assert finding.fix == "pin its batch dimension to data there, or drop the constraint that gathers it"
    # the mend helps: an eighth of the bytes
    mended = weighed("split", "data=8").memory.by_category["saved_activations"]
    assert 7.9 < ledger.memory.by_category["saved_activations"] / mended < 8.1


def test_an_activation_that_is_split_as_the_batch_is_no_finding(weighed):
    assert "replicated activation" not in kinds(weighed("split", "data=8").findings)


@pytest.mark.parametrize(
    ("name", "layout", "axis"), [("whole", "data=8", "data"), ("split", "data=2,tensor=4", "tensor")]
)
def test_an_axis_along_which_the_whole_forward_pass_is_alike_is_found_once(weighed, name, layout, axis):
    (found,) = [f for f in weighed(name, layout).findings if f.kind == "replicated activation"]
    assert f"is the same on every device along {axis}" in found.what
    assert found.fix == f"split the batch over {axis}, which divides nothing in the forward pass"


def test_work_that_several_devices_do_alike_is_found(lint):
    (found,) = lint(flops={"waste_by_module": {"layers/mlp": 25}, "executed": 100})
    assert found.kind == "work done twice"
    assert found.what == "layers/mlp: 25.0 FLOP beyond the model's, 25.0 % of what is executed"
    (found,) = lint(flops={"waste_by_module": {"layers/delta_block/chunked_scan": 25}, "executed": 100})
    assert "smaller model.scan_chunk" in found.fix


def test_an_argument_that_stayed_on_the_device_is_found(lint, samples):
    arguments = samples.compiled("transformer-8xH100").arguments
    meant = dataclasses.replace(arguments[0], host=True)
    assert kinds(lint(arguments=(meant, *arguments[1:]))) == ["offload that did not happen"]
    assert lint(arguments=(meant, *arguments[1:]), memory={"host_bytes": meant.device_bytes}) == ()


GATHER = "%g = f32[32]{0} all-gather(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}"


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ("%u = f32[8]{0} dynamic-slice(%g, %z), dynamic_slice_sizes={8}", ["gather that is undone"]),
        ("%u = f32[32]{0} negate(%g)", []),
    ],
)
def test_a_gather_whose_result_is_cut_up_again_is_found(lint, module, user, found):
    program = module(
        "%p = f32[8]{0} parameter(0)", "%z = s32[] constant(0)", GATHER, user, "ROOT %r = f32[] constant(0)"
    )
    assert kinds(lint(program)) == found


@pytest.mark.parametrize(("axes", "found"), [("data", 1), ("fsdp", 0)])
def test_gradients_reduced_in_every_microbatch_are_found(lint, module, axes, found):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "%s = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add,"
        ' metadata={op_name="jit(step)/microbatches/while/body/transpose(jvp(layers))/dot_general"}',
        "ROOT %r = f32[] constant(0)",
        before="""%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
""",
    )
    findings = lint(program, mesh_axes=((axes, 8),))
    assert kinds(findings) == ["reduction inside the accumulation loop"] * found
    assert all("an all-reduce over data in every microbatch sends 56.0 B a step" in f.what for f in findings)


@pytest.mark.parametrize(("by_format", "found"), [({"bf16": 8000, "fp32": 2000}, 1), ({"fp32": 10_000}, 0)])
def test_a_float32_matmul_among_narrower_ones_is_found(lint, module, by_format, found):
    program = module(
        "%a = f32[4,8]{1,0} parameter(0)",
        "%b = f32[8,4]{1,0} parameter(1)",
        "%d = f32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0},"
        ' metadata={op_name="jit(step)/jvp(head)/dot_general"}',
        "ROOT %r = f32[] constant(0)",
    )
    findings = lint(program, flops={"by_format": by_format, "executed": 10_000})
    assert kinds(findings) == ["matmul in float32"] * found
    # 2 x 4 x 4 x 8 multiply-adds on each of 8 devices
    assert all(f.what == "head: 2.05 kFLOP run in float32, 20.5 % of the step" for f in findings)


@pytest.mark.parametrize(("loud", "found"), [(800, 1), (8, 0)])
def test_a_loud_axis_that_could_lie_inside_a_host_and_does_not_is_found(lint, module, loud, found):
    pairs = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    program = module(
        "%p = f32[100]{0} parameter(0)",
        f"%q = f32[{loud}]{{0}} parameter(1)",
        f"%t = f32[{2 * loud}]{{0}} all-gather(%q), {pairs}, dimensions={{0}}",
        "%f = f32[400]{0} all-gather(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
        "%u = f32[400]{0} negate(%f)",
        f"%v = f32[{2 * loud}]{{0}} negate(%t)",
        "ROOT %r = f32[] constant(0)",
    )
    findings = lint(program, fleet=Fleet.parse("2x4xH100"), mesh_axes=(("tensor", 2), ("fsdp", 4)))
    assert kinds(findings) == ["axis that leaves the host"] * found
    for finding in findings:
        assert finding.what.startswith("tensor=2 fits in a domain of 4 devices, and sends 3.20 kB a step")
        assert "walks them all" in finding.fix


@pytest.mark.parametrize(
    ("fleet", "mesh", "what", "mend"),
    [
        (
            "2xv5e-4",
            (("fsdp", 8),),
            "each group of fsdp=8 lies in 2 slices, 4 of it in each, and a device sends 400 B a step",
            "an axis over the batch of 2 before fsdp=4, if that fits",
        ),
        (
            "2xv5e-4",
            (("tensor", 2), ("data", 4)),
            "tensor=2 lies in 2 slices, 1 of it in each",
            "an axis over the batch of 2, and tensor inside them",
        ),
        ("2xv5e-4", (("data", 2), ("fsdp", 4)), "", ""),
        ("2xv5e-4", (("stage", 2), ("tensor", 4)), "", ""),
        ("v5e-8", (("fsdp", 8),), "", ""),
    ],
)
def test_a_group_that_straddles_slices_is_named(lint, module, fleet, mesh, what, mend):
    gather = "all-gather(%p), dimensions={0}, replica_groups={}"
    program = module("%p = f32[100]{0} parameter(0)", f"ROOT %g = f32[800]{{0}} {gather}")
    findings = lint(program, fleet=Fleet.parse(fleet), mesh_axes=mesh)
    assert kinds(findings) == ["group that straddles slices"] * bool(what)
    for finding in findings:
        assert what in finding.what
        assert mend in finding.fix


@pytest.mark.parametrize(
    ("fleet", "mesh", "what", "mend"),
    [
        (
            "144xGB200",
            (("data", 9), ("expert", 16)),
            "72 devices of a rack are no whole groups of expert=16: some lie in two racks",
            "48 devices of each rack: 3x48xGB200; or a size of expert",
        ),
        ("3x48xGB200", (("data", 9), ("expert", 16)), "", ""),
        ("256xGB200", (("stage", 4), ("expert", 64)), "", ""),  # 64 of each of four racks
        (
            "3x8xH100",
            (("data", 4), ("tensor", 6)),
            "8 devices of a host are no whole groups of tensor=6",
            "a size of tensor with which groups of devices divide 8",
        ),
    ],
)
def test_a_group_that_straddles_racks_or_hosts_is_named(lint, module, fleet, mesh, what, mend):
    (_, outer), (_, inner) = mesh
    gather = f"all-gather(%p), dimensions={{0}}, replica_groups=[{outer},{inner}]<=[{outer * inner}]"
    program = module("%p = f32[100]{0} parameter(0)", f"ROOT %g = f32[{100 * inner}]{{0}} {gather}")
    findings = lint(program, fleet=Fleet.parse(fleet), mesh_axes=mesh)
    assert [each.kind.split()[2] for each in findings] == ["straddles"] * bool(what)
    for finding in findings:
        assert what in finding.what
        assert mend in finding.fix


BATCH_MESH = (("data", 4), ("tensor", 2))
BATCH = "%x = f32[8]{0} parameter(0), sharding={devices=[4,2]<=[8] last_tile_dim_replicate}"
WHOLE = "%w = f32[8]{0} parameter(1), sharding={replicated}"


@pytest.fixture
def alike(samples, module):
    """Of a program whose argument x is the batch, on the mesh data=4, tensor=2."""

    def build(*lines, before=""):
        argument = Argument(
            path="x", role="batch", shape=(32,), dtype="float32", device_bytes=32, replicated=False
        )
        compiled = dataclasses.replace(
            samples.compiled("cruncher-8xH100"), mesh_axes=BATCH_MESH, num_parameters=1, arguments=(argument,)
        )
        first = BATCH + ', metadata={op_name="x"}'
        return Replication(module(first, WHOLE, *lines, before=before), compiled)

    return build


ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""
OVER_DATA, OVER_TENSOR, PART = "[2,4]<=[4,2]T(1,0)", "[4,2]<=[8]", "{{0,2},{4,6},{1,3},{5,7}}"


@pytest.mark.parametrize(
    ("line", "along"),
    [
        ("f32[8]{0} negate(%x)", ("tensor",)),
        ("f32[8]{0} add(%x, %w)", ("tensor",)),
        ("f32[8]{0} add(%w, %w)", None),  # no part of it comes from the batch
        (f"f32[32]{{0}} all-gather(%x), replica_groups={OVER_DATA}, dimensions={{0}}", ("data", "tensor")),
        (f"f32[8]{{0}} all-reduce(%x), replica_groups={OVER_DATA}, to_apply=%add", ("data", "tensor")),
        (f"f32[16]{{0}} all-gather(%x), replica_groups={PART}, dimensions={{0}}", ("tensor",)),
        (f"f32[16]{{0}} all-gather(%x), replica_groups={OVER_TENSOR}, dimensions={{0}}", ("tensor",)),
        (
            f"f32[4]{{0}} reduce-scatter(%x), replica_groups={OVER_TENSOR}, dimensions={{0}}, to_apply=%add",
            (),
        ),
        ("f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", ()),
        ("f32[8]{0} all-reduce(%x), replica_groups={{0,3},{1,2},{4,7},{5,6}}, to_apply=%add", ()),
    ],
)
def test_an_instruction_is_alike_along_the_axes_that_are_left(alike, line, along):
    assert alike(f"ROOT %r = {line}", before=ADD).along("r", ()) == along


@pytest.mark.parametrize(
    ("axes", "batch_axes", "along"), [(("data",), ("data",), ("tensor",)), (None, ("data", "tensor"), ())]
)
def test_where_no_sharding_is_printed_the_arguments_own_axes_are_taken(
    samples, module, axes, batch_axes, along
):
    """XLA of jaxlib 0.12 prints none; a program compiled before axes were kept may differ everywhere."""
    argument = Argument(
        path="x", role="batch", shape=(32,), dtype="float32", device_bytes=32, replicated=False, axes=axes
    )
    compiled = dataclasses.replace(
        samples.compiled("cruncher-8xH100"), mesh_axes=BATCH_MESH, num_parameters=1, arguments=(argument,)
    )
    program = module('%x = f32[8]{0} parameter(0), metadata={op_name="x"}', "ROOT %r = f32[8]{0} negate(%x)")
    found = Replication(program, compiled)
    assert (found.batch_axes, found.along("r", ())) == (batch_axes, along)


def test_a_started_gather_is_alike_once_it_is_done_and_its_operand_is_not(alike):
    found = alike(
        "%s = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), dimensions={0}, "
        f"replica_groups={OVER_DATA}",
        "ROOT %d = f32[32]{0} all-gather-done(%s)",
    )
    assert found.along("d", ()) == ("data", "tensor")
    assert found.along("s", (0,)) == ("tensor",)


def test_operands_that_come_after_the_start_count_too(alike):
    """A gather on a TPU's SparseCore is started without operands; an update brings them (libtpu 0.0.50)."""
    found = alike(
        "%s = ((), (), s32[1]{0}) async-start(), calls=%apart",
        "%u = ((f32[8]{0}), f32[8]{0}) async-update(%s, %x)",
        "ROOT %d = f32[8]{0} async-done(%u)",
        before="%apart (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %n = f32[8]{0} negate(%p)\n}\n",
    )
    assert found.along("d", ()) == ("tensor",)


def test_a_device_that_asks_for_its_number_differs(alike):
    found = alike("%n = u32[] partition-id()", "%f = f32[] convert(%n)", "ROOT %r = f32[8]{0} add(%x, %f)")
    assert found.along("r", ()) == ()


LOOP = """%test (s: (s32[], f32[8], f32[8])) -> pred[] {
  %s = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %c = pred[] compare(%i, %i), direction=LT
}

%body (t: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %t = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %one = f32[8]{0} get-tuple-element(%t), index=1
  %two = f32[8]{0} get-tuple-element(%t), index=2
  ROOT %u = (s32[], f32[8]{0}, f32[8]{0}) tuple(%j, %one, %one)
}
"""


def test_a_loops_state_differs_from_the_first_round_that_brings_a_difference(alike):
    found = alike(
        "%z = s32[] constant(0)",
        "%b = (s32[], f32[8]{0}, f32[8]{0}) tuple(%z, %x, %w)",
        "%l = (s32[], f32[8]{0}, f32[8]{0}) while(%b), condition=%test, body=%body",
        "ROOT %r = f32[8]{0} get-tuple-element(%l), index=2",
        before=LOOP,
    )
    assert found.along("l", (2,)) == ("tensor",)  # it was the same everywhere before the first round
    assert found.along("l", (0,)) is None


def test_a_branch_chosen_by_what_differs_differs(alike):
    found = alike(
        "%k = pred[8]{0} compare(%x, %x), direction=LT",
        "ROOT %r = f32[8]{0} conditional(%k, %w, %w), true_computation=%same, false_computation=%same",
        before="%same (y: f32[8]) -> f32[8] {\n  ROOT %y = f32[8]{0} parameter(0)\n}\n",
    )
    assert found.along("r", ()) == ("tensor",)


def test_the_axes_of_the_batch_and_of_the_forward_pass_are_read_off(alike):
    found = alike(
        "%n = u32[] partition-id()",
        "%f = f32[] convert(%n)",
        'ROOT %r = f32[8]{0} add(%x, %f), metadata={op_name="jit(step)/jvp(layer)/add"}',
    )
    assert (found.batch_axes, found.forward_axes) == (("data",), ("data", "tensor"))


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{replicated}", ()),
        ("{devices=[8]<=[8]}", ("data", "tensor")),
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", ("data",)),
        ("{devices=[2,4]<=[4,2]T(1,0) last_tile_dim_replicate}", ("tensor",)),
        ("{devices=[2,4]<=[4,2]T(1,0)}", ("data", "tensor")),
        ("{devices=[4,2]<=[8] last_tile_dims={manual}}", None),
        ("{maximal device=0}", None),
        ("", None),
    ],
)
def test_a_sharding_as_xla_prints_it_divides_over_these_axes(text, axes):
    assert axes_of_sharding(text, BATCH_MESH) == axes


def test_a_foreign_steps_batch_is_what_it_does_not_give_back(samples):
    compiled, program = samples.compiled("transformer-8xH100"), samples.program("transformer-8xH100")
    found = Replication(program, compiled)
    assert compiled.num_parameters is None
    assert found.batch_axes == ("fsdp",)  # the tokens' alone; parameters are split over tensor too
    assert found.forward_axes == ("fsdp", "tensor")
