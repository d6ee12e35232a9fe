import pytest

from meshwright.hardware import Fleet
from meshwright.hlo import dimensions_of
from meshwright.ledger import executions_of, is_overlapped, message_of, traffic_of

MESH = (("fsdp", 4), ("tensor", 2))
HOST = Fleet.parse("8xH100")
ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""
# fixtures/programs.py
L, B, S, E, M, V = 4, 16, 256, 512, 1024, 2048


def find(collectives, kind, axes, in_loop):
    return next(c for c in collectives if (c.kind, c.axes, c.in_loop) == (kind, axes, in_loop))


@pytest.mark.parametrize("name", ["transformer-8xH100", "transformer-8xH100-jax-0.12"])
def test_gradients_and_residuals_are_scattered_as_by_hand(samples, name):
    collectives, unpriced = traffic_of(executions_of(samples.program(name)), MESH, HOST)
    assert not unpriced
    weights = (4 * E * E + 2 * E * M) // 2 * 2  # one layer's bf16 on a tensor half
    gradients = find(collectives, "reduce-scatter", ("fsdp",), True)
    assert gradients.payload_bytes == L * weights // 4
    assert gradients.wire_bytes == L * weights * 3 // 4
    assert (gradients.group_size, gradients.count) == (4, L)
    head = find(collectives, "reduce-scatter", ("fsdp",), False)
    assert (head.count, head.payload_bytes) == (1, E * V // 2 * 2 // 4)
    # A layer's two outputs forward; the first again; its three inputs' gradients merged into two.
    residuals = find(collectives, "reduce-scatter", ("tensor",), True)
    one = (B // 4) * (S // 2) * E * 2
    assert (residuals.count, residuals.payload_bytes, residuals.wire_bytes) == (
        5 * L,
        5 * L * one,
        5 * L * one,
    )


def test_crunchers_gradients_are_summed_over_all_devices(samples):
    for name in ("cruncher-8xH100", "cruncher-8xCPU", "cruncher-v5e-8"):
        (only,), unpriced = traffic_of(executions_of(samples.program(name)), (("data", 8),), HOST)
        payload = 4 * (2 * 1024 * 1024 + 1024 + 1)  # and the loss
        assert (only.kind, only.axes, only.count, only.payload_bytes) == ("all-reduce", ("data",), 1, payload)
        assert only.wire_bytes == 2 * payload * 7 // 8
        assert not unpriced


def test_nothing_of_a_cpus_traffic_overlaps(samples):
    collectives, _ = traffic_of(executions_of(samples.program("transformer-8xCPU")), MESH, HOST)
    assert {c.overlapped_count for c in collectives} == {0}


def test_what_the_gpu_scheduler_marks_synchronous_does_not_overlap(samples):
    program = samples.program("transformer-8xH100")
    collectives, _ = traffic_of(executions_of(program), MESH, HOST)
    gathers = find(collectives, "all-gather", ("tensor",), True)
    synchronous = [
        i
        for c, i in program.instructions()
        if i.opcode == "all-gather-start"
        and c is not program.entry
        and i.backend_config["collective_backend_config"]["is_sync"]
    ]
    assert gathers.count - gathers.overlapped_count == L * len(synchronous) > 0


def test_a_tpus_collective_in_several_fusions_counts_once(samples):
    program = samples.program("transformer-v5e-8")
    collectives, _ = traffic_of(executions_of(program), MESH, HOST)
    by_channel = {
        i.attributes["channel_id"]: i.arrays[0].num_bytes
        for c, i in program.instructions()
        if i.opcode == "all-gather" and message_of(c, i, MESH).axes == ("fsdp",)
    }
    total = sum(c.count for c in collectives if c.kind == "all-gather" and c.axes == ("fsdp",))
    assert len(by_channel) < total <= L * len(by_channel)


def one(module, *lines, before=""):
    collectives, unpriced = traffic_of(executions_of(module(*lines, before=before)), MESH, HOST)
    assert not unpriced
    (only,) = collectives
    return only


@pytest.mark.parametrize(
    ("text", "payload", "wire"),
    [
        ("f32[32]{0} all-gather(%p), dimensions={0}", 128, 96),
        ("f32[2]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add", 8, 24),
        ("f32[8]{0} all-reduce(%p), to_apply=%add", 32, 48),
        ("f32[8]{0} all-to-all(%p), dimensions={0}", 32, 24),
    ],
)
def test_wire_bytes_are_what_a_ring_sends(module, text, payload, wire):
    only = one(
        module,
        "%p = f32[8]{0} parameter(0)",
        f"ROOT %r = {text}, replica_groups=[2,4]<=[4,2]T(1,0)",
        before=ADD,
    )
    assert (only.axes, only.group_size, only.payload_bytes, only.wire_bytes) == (("fsdp",), 4, payload, wire)


def test_a_ragged_exchange_sends_equal_parts_of_its_operand(module):
    """Its result is the buffer that others' parts are written into, of any size."""
    sizes = "".join(f", %n{i}" for i in range(4))
    only = one(
        module,
        "%p = f32[8,4]{1,0} parameter(0)",
        "%o = f32[64,4]{1,0} parameter(1)",
        *(f"%n{i} = s32[4]{{0}} parameter({2 + i})" for i in range(4)),
        f"ROOT %r = f32[64,4]{{1,0}} ragged-all-to-all(%p, %o{sizes}), "
        "replica_groups={{0,2,4,6},{1,3,5,7}}",
    )
    assert (only.kind, only.axes, only.group_size) == ("ragged-all-to-all", ("fsdp",), 4)
    assert (only.payload_bytes, only.wire_bytes) == (128, 96)


def test_a_permutation_sends_all_of_it(module):
    only = one(
        module,
        "%p = f32[8]{0} parameter(0)",
        "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,2},{2,4},{4,6}}",
        "ROOT %d = f32[8]{0} collective-permute-done(%s)",
    )
    assert (only.axes, only.payload_bytes, only.wire_bytes, only.overlapped_count) == (("fsdp",), 32, 32, 0)


def test_a_combined_reduction_sums_its_results_and_a_start_leaves_out_its_operands(module):
    only = one(
        module,
        "%p = f32[8]{0} parameter(0)",
        "%q = bf16[4]{0} parameter(1)",
        "%s = ((f32[8]{0}, bf16[4]{0}), (f32[8]{0}, bf16[4]{0})) all-reduce-start(%p, %q), "
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
        "%w = f32[8]{0} negate(%p)",
        "ROOT %d = (f32[8]{0}, bf16[4]{0}) all-reduce-done(%s)",
        before=ADD,
    )
    assert (only.axes, only.payload_bytes, only.wire_bytes, only.overlapped_count) == (("tensor",), 40, 40, 1)


ASYNC = (
    ADD
    + """
%wrapped (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%x), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}
"""
)


@pytest.mark.parametrize(
    ("between", "config", "overlapped"),
    [
        ("%w = f32[8]{0} negate(%p)", "", 1),
        ("%w = f32[8]{0} bitcast(%p)", "", 0),
        ("%w = f32[8]{0} negate(%p)", ', backend_config={"collective_backend_config":{"is_sync":true}}', 0),
    ],
)
def test_a_wrapped_collective_overlaps_what_is_computed_until_it_is_awaited(
    module, between, config, overlapped
):
    only = one(
        module,
        "%p = f32[8]{0} parameter(0)",
        f"%s = ((f32[8]{{0}}), f32[4]{{0}}) async-start(%p), calls=%wrapped{config}",
        between,
        "ROOT %d = f32[4]{0} async-done(%s)",
        before=ASYNC,
    )
    assert (only.count, only.payload_bytes, only.overlapped_count) == (1, 16, overlapped)


def test_a_synchronous_collective_overlaps_nothing(module):
    program = module(
        "%p = f32[8]{0} parameter(0)", "ROOT %g = f32[16]{0} all-gather(%p), replica_groups={{0,1}}"
    )
    assert not is_overlapped(program.entry, program.entry.root)


def test_a_group_of_one_sends_nothing(module):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "ROOT %r = f32[8]{0} all-gather(%p), replica_groups=[8,1]<=[8], dimensions={0}",
    )
    assert traffic_of(executions_of(program), MESH, HOST) == ((), {})


def test_a_permutation_onto_itself_sends_nothing(module):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
    )
    assert traffic_of(executions_of(program), MESH, HOST) == ((), {})


def test_a_permutation_without_pairs_sends_nothing(module):
    program = module(
        "%p = f32[8]{0} parameter(0)", "ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={}"
    )
    assert traffic_of(executions_of(program), MESH, HOST) == ((), {})


def test_groups_that_are_no_block_of_the_mesh_are_unpriced(module):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "ROOT %r = f32[16]{0} all-gather(%p), replica_groups={{0,3},{1,2}}, dimensions={0}",
    )
    assert traffic_of(executions_of(program), MESH, HOST) == (
        (),
        {"all-gather of 64 bytes: {{0,3},{1,2}} is not a block of the mesh": 1},
    )


def test_sends_between_two_devices_are_unpriced(module):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "%t = token[] after-all()",
        "ROOT %r = (f32[8]{0}, u32[], token[]) send(%p, %t)",
    )
    assert traffic_of(executions_of(program), MESH, HOST)[1] == {
        "send of f32[8], u32[], token[], from an unnamed operation": 1
    }


BRANCHES = """%little (x: f32[8]) -> f32[16] {
  %x = f32[8]{0} parameter(0)
  ROOT %g = f32[16]{0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}
}

%much (y: f32[8]) -> f32[16] {
  %y = f32[8]{0} parameter(0)
  %h = f32[64]{0} all-gather(%y), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %z = f32[16]{0} slice(%h), slice={[0:16]}
}
"""


def test_a_conditional_sends_what_its_most_expensive_branch_sends(module):
    only = one(
        module,
        "%i = s32[] parameter(0)",
        "%p = f32[8]{0} parameter(1)",
        "ROOT %c = f32[16]{0} conditional(%i, %p, %p), branch_computations={%little, %much}",
        before=BRANCHES,
    )
    assert (only.axes, only.payload_bytes) == (("fsdp", "tensor"), 256)


def test_a_start_that_nobody_awaits_raises(module):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "ROOT %s = (f32[8]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[4,2]<=[8]",
    )
    with pytest.raises(ValueError, match="%s is started and never awaited in %main"):
        traffic_of(executions_of(program), MESH, HOST)


@pytest.mark.parametrize(
    ("fleet", "links"),
    [
        ("8xH100", {("fsdp",): "inside", ("tensor",): "inside"}),
        ("2x4xH100", {("fsdp",): "between", ("tensor",): "inside"}),
        ("8x1xH100", {("fsdp",): "between", ("tensor",): "between"}),
    ],
)
def test_an_axis_that_leaves_the_host_is_carried_between_hosts(samples, fleet, links):
    collectives, _ = traffic_of(
        executions_of(samples.program("transformer-8xH100")), MESH, Fleet.parse(fleet)
    )
    found = {c.axes: c.link for c in collectives if len(c.axes) == 1}
    assert found == links
    names = {"inside": "NVLink4 18x25", "between": "network"}
    assert all(c.link_name == names[c.link] for c in collectives)


# The 16 devices of a v5p slice of 2 x 2 x 4 as libtpu lists them: hosts of 2 x 2 chips, one above the other.
V5P_32 = tuple((n % 2, n // 2 % 2, n // 4, 0) for n in range(16))
# Of a v5e slice of 4 x 4: four hosts of 2 x 2, side by side and then above.
V5E_16 = tuple((n // 4 % 2 * 2 + n % 2, n // 8 * 2 + n // 2 % 2, 0, 0) for n in range(16))


@pytest.mark.parametrize(
    ("fleet", "coordinates", "groups", "dimensions"),
    [
        ("v5p-32", V5P_32, "[4,4]<=[16]", ("x", "y")),  # the four chips of a host
        ("v5p-32", V5P_32, "[4,4]<=[4,4]T(1,0)", ("z",)),  # the same chip of each host
        ("v5p-32", V5P_32, "{{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}", ("x",)),
        ("v5p-32", V5P_32, "{}", ("x", "y", "z")),
        ("v5e-16", V5E_16, "[4,4]<=[4,4]T(1,0)", ("x", "y")),  # hosts lie in a square
        ("v5e-16", (), "[4,4]<=[16]", ()),  # not known
    ],
)
def test_a_tpus_collective_names_the_dimensions_of_the_torus_along_which_its_groups_lie(
    module, fleet, coordinates, groups, dimensions
):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        f"ROOT %r = f32[8]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add",
        before=ADD,
    )
    mesh = (("fsdp", 4), ("tensor", 2), ("expert", 2))
    (only,), unpriced = traffic_of(executions_of(program), mesh, Fleet.parse(fleet), coordinates)
    assert (only.dimensions, only.link, unpriced) == (dimensions, "inside", {})


def test_between_slices_the_data_centre_network_carries_it_too(module):
    """Two slices of 2 x 2 v5e: the sum over all eight crosses both dimensions of each, and the network."""
    slices = Fleet.parse("2xv5e-4")
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "%q = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add",
        "ROOT %r = f32[8]{0} all-reduce(%q), replica_groups=[4,2]<=[8], to_apply=%add",
        before=ADD,
    )
    coordinates = tuple((n % 2, n // 2 % 2, 0, 0) for n in range(8))
    collectives, _ = traffic_of(executions_of(program), MESH, slices, coordinates)
    found = {c.axes: (c.link_name, c.dimensions) for c in collectives}
    assert found[("fsdp", "tensor")] == ("DCN", ("x", "y"))
    assert found[("tensor",)] == ("ICI 2D torus 4x50", ("x",))


def test_the_two_cores_of_a_chip_are_a_dimension_of_their_own():
    coordinates = ((0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1))
    assert dimensions_of(((0, 1), (2, 3)), coordinates) == ("core",)
    assert dimensions_of(((0, 2), (1, 3)), coordinates) == ("x",)


@pytest.mark.parametrize(
    ("fleet", "text", "crossing"),
    [
        ("8xH100", "f32[64]{0} all-gather(%p), dimensions={0}, replica_groups={}", 0),
        # A ring of eight devices leaves each host of four over one of four links: 224 bytes / 4.
        ("2x4xH100", "f32[64]{0} all-gather(%p), dimensions={0}, replica_groups={}", 56),
        ("8x1xH100", "f32[64]{0} all-gather(%p), dimensions={0}, replica_groups={}", 224),
        # Between two hosts a sum goes through a tree: the array once, over four links.
        ("2x4xH100", "f32[8]{0} all-reduce(%p), to_apply=%add, replica_groups={}", 8),
        ("2x4xH100", "f32[8]{0} all-reduce(%p), to_apply=%add, replica_groups=[4,2]<=[8]", 0),
        ("2x4xH100", "f32[8]{0} all-to-all(%p), dimensions={0}, replica_groups={}", 16),
        # One of the three pairs of a pipeline's stages is on two hosts.
        ("2x4xH100", "f32[8]{0} collective-permute(%p), source_target_pairs={{0,2},{2,4},{4,6}}", 10),
        # Between slices a device exchanges its quarter of the array with one other device, of a sum twice.
        ("2xv5e-4", "f32[64]{0} all-gather(%p), dimensions={0}, replica_groups={}", 32),
        ("2xv5e-4", "f32[8]{0} all-reduce(%p), to_apply=%add, replica_groups={}", 8),
        ("2xv5e-4", "f32[1]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add, replica_groups={}", 4),
        ("8xv5e-1", "f32[64]{0} all-gather(%p), dimensions={0}, replica_groups={}", 224),
        ("2xv5e-4", "f32[8]{0} all-to-all(%p), dimensions={0}, replica_groups={}", 16),
        ("2xv5e-4", "f32[8]{0} all-reduce(%p), to_apply=%add, replica_groups=[2,4]<=[8]", 0),
    ],
)
def test_what_leaves_a_domain_is_counted_apart(module, fleet, text, crossing):
    body = ("%p = f32[8]{0} parameter(0)", f"ROOT %r = {text}")
    (only,), _ = traffic_of(executions_of(module(*body, before=ADD)), MESH, Fleet.parse(fleet))
    assert only.crossing_bytes == crossing
    assert (only.link == "between") == (crossing > 0)
