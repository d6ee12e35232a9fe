"""Who holds the same values, in small modules; whole steps stand in test_lint.py."""

import dataclasses

import pytest

from meshwright.compiler import Argument
from meshwright.ledger._findings import Replication, axes_of_sharding

MESH = (("data", 4), ("tensor", 2))
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
            samples.compiled("cruncher-8xH100"), mesh_axes=MESH, num_parameters=1, arguments=(argument,)
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
        samples.compiled("cruncher-8xH100"), mesh_axes=MESH, num_parameters=1, arguments=(argument,)
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
    assert axes_of_sharding(text, MESH) == axes


def test_a_foreign_steps_batch_is_what_it_does_not_give_back(samples):
    compiled, program = samples.compiled("transformer-8xH100"), samples.program("transformer-8xH100")
    found = Replication(program, compiled)
    assert compiled.num_parameters is None
    assert found.batch_axes == ("fsdp",)  # the tokens' alone; parameters are split over tensor too
    assert found.forward_axes == ("fsdp", "tensor")
