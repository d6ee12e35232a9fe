import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hlo import (
    Array,
    Operand,
    axes_of,
    axes_of_pairs,
    leaves_of,
    leaves_the_domain,
    parse_groups,
    parse_program,
    parse_shape,
)

HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"


def test_every_instruction_of_every_sample_is_read(samples):
    for name in samples.names:
        text = samples.text(name, "program.hlo.txt")
        written = re.findall(r"^  (?:ROOT )?%(\S+) = ", text, re.M)
        assert sorted(i.name for _, i in samples.program(name).instructions()) == sorted(written)


def test_instructions_stay_in_the_order_of_the_text(samples):
    text = samples.text("transformer-8xH100", "program.hlo.txt")
    written = re.findall(r"^  (?:ROOT )?%(\S+) = ", text[text.index("\nENTRY") :], re.M)
    assert [i.name for i in samples.program("transformer-8xH100").entry.instructions] == written


def test_every_operand_has_a_shape_and_every_backend_config_is_json(samples):
    for name in samples.names:
        for computation, instruction in samples.program(name).instructions():
            assert len(computation.operand_arrays(instruction)) >= len(instruction.operands)
            assert isinstance(instruction.backend_config, dict)


def test_a_loop_knows_its_body_condition_and_trip_count(samples):
    program = samples.program("transformer-8xH100")
    loops = [i for _, i in program.instructions() if i.opcode == "while"]
    assert [loop.trip_count for loop in loops] == [4, 4]
    for loop in loops:
        assert set(loop.called) == {"body", "condition"}
        assert program.computations[loop.called["condition"][0]].root.arrays[0].dtype == "pred"


def test_parameters_carry_the_argument_paths(samples):
    program = samples.program("transformer-8xH100")
    paths = {p.op_name for p in program.entry.parameters}
    assert paths == {a.path for a in samples.compiled("transformer-8xH100").arguments}


def test_a_source_line_is_the_innermost_frame(samples):
    program = samples.program("cruncher-8xH100")
    dot = next(i for _, i in program.instructions() if i.opcode == "dot")
    assert program.source_line(dot) == "programs.py:103"


def test_a_source_line_may_stand_in_the_metadata_itself(module):
    program = module(
        'ROOT %p = f32[] parameter(0), metadata={op_name="x" source_file="/a/b.py" source_line=7}'
    )
    assert program.source_line(program.entry.root) == "b.py:7"


def test_an_instruction_without_a_frame_has_no_source_line(module):
    program = module("ROOT %p = f32[] parameter(0)")
    assert program.source_line(program.entry.root) == ""


def test_a_compacted_tuple_element_is_an_operand_with_an_index(module):
    program = module(
        "%t = (f32[2]{0}, (f32[3]{0}, s8[4]{0})) parameter(0)", "ROOT %n = s8[4]{0} negate(%t#1#1)"
    )
    (operand,) = program.entry.root.operands
    assert operand == Operand(name="t", index=(1, 1))
    assert str(program.entry.operand_shape(operand)) == "s8[4]"


def test_indices_in_comments_and_layouts_with_tiles_are_stepped_over(module):
    program = module(
        "%p = f32[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)",
        "ROOT %t = (f32[8,128]{1,0:T(8,128)}, /*index=1*/f32[8,128]{1,0}) tuple(%p, /*index=1*/%p)",
    )
    assert [o.name for o in program.entry.root.operands] == ["p", "p"]
    assert program.entry.by_name["p"].arrays[0].memory_space == 1


def test_groups_of_reordered_devices_are_one_attribute(module):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        "ROOT %a = f32[16]{0} all-gather(%p), replica_groups=mesh['x'=2,'y'=4], "
        "device_ids=([4,2]T(1,0)) {'x'}, dimensions={0}",
    )
    text = "mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}"
    assert program.entry.root.attributes == {"replica_groups": text, "dimensions": "{0}"}


def test_a_quoted_backend_config_is_read(module):
    program = module(
        "%p = f32[8]{0} parameter(0)",
        r'ROOT %c = f32[8]{0} custom-call(%p), custom_call_target="x", backend_config="{\"a\": [1, \"(\"]}"',
    )
    assert program.entry.root.backend_config == {"a": [1, "("]}
    assert program.entry.root.custom_call_target == "x"


def test_a_backend_config_in_another_dialect_raises_when_asked(module):
    program = module("ROOT %p = f32[] parameter(0), backend_config={a = 1 : i32}")
    with pytest.raises(ValueError, match="Expecting property name"):
        _ = program.entry.root.backend_config
    program = module("ROOT %p = f32[] parameter(0), backend_config=[1]")
    with pytest.raises(ValueError, match="%p: backend_config is not a JSON object"):
        _ = program.entry.root.backend_config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a scheduled HLO module: ''"),
        ("HloModule m\n", "not a scheduled HLO module: 'HloModule m'"),
        (HEADER + "what is this\n", "line 3 is not understood: what is this"),
        (
            HEADER + "%c () -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n",
            "the module has no ENTRY computation",
        ),
        (HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] parameter(0)\n", "computation %c does not end"),
        (HEADER + "ENTRY %c () -> f32[] {\n  %p = f32[] parameter(0)\n}\n", "computation %c has 0 roots"),
        (HEADER + "ENTRY %c () -> f32[] {\n  p\n}\n", "line 4 is not understood (no '%name = '): "),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = q9[] parameter(0)\n}\n",
            "line 4 is not understood (shape 'q9[]')",
        ),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] 9(0)\n}\n",
            "line 4 is not understood (no opcode)",
        ),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] add(%a\n}\n",
            "line 4 is not understood (unbalanced parentheses)",
        ),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] add(a)\n}\n",
            "line 4 is not understood (operand 'a')",
        ),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] add(%a)\n}\n",
            "%p names ['a'], which the module does not have",
        ),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] call(), to_apply=%b\n}\n",
            "%p names ['b'], which the module does not have",
        ),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] call(), runs=%b\n}\n",
            "line 4 is not understood (attribute 'runs' names something unknown)",
        ),
        (
            HEADER + "ENTRY %c () -> f32[] {\n  ROOT %p = f32[] call(), odd\n}\n",
            "line 4 is not understood (attribute 'odd' has no value)",
        ),
    ],
)
def test_text_that_is_not_understood_raises_and_names_its_line(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_program(text)


NUMPY = {
    "pred": "bool", "s8": "int8", "u16": "uint16", "s32": "int32", "f16": "float16", "f32": "float32",
    "f64": "float64", "c64": "complex64",
}  # fmt: skip


@given(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 7), max_size=4))
def test_bytes_are_those_of_numpy(dtype, dims):
    shape = parse_shape(f"{dtype}[{','.join(map(str, dims))}]")
    assert isinstance(shape, Array)
    assert shape.num_bytes == np.zeros(dims, NUMPY[dtype]).nbytes


def test_four_bit_numbers_share_bytes():
    assert parse_shape("s4[3]").num_bytes == 2
    assert parse_shape("f4e2m1fn[8,2]").num_bytes == 8


def test_a_token_has_no_bytes():
    assert parse_shape("token[]").num_bytes == 0


def test_layout_tiles_and_memory_space_are_kept():
    shape = parse_shape("bf16[2,<=4]{1,0:T(8,128)(2,1)S(5)}")
    assert (shape.dims, shape.memory_space, str(shape)) == ((2, 4), 5, "bf16[2,4]")


def test_tuples_nest():
    shape = parse_shape("((f32[2]{0}, s8[]), /*index=1*/(), u32[]{:S(2)})")
    assert [str(a) for a in leaves_of(shape)] == ["f32[2]", "s8[]", "u32[]"]
    assert len(shape) == 3


@pytest.mark.parametrize("text", ["x", "f33[2]", "f32", "f32[a]"])
def test_what_is_no_shape_raises(text):
    with pytest.raises(ValueError, match="shape '"):
        parse_shape(text)


def test_commas_in_brackets_and_strings_do_not_split(module):
    line = """ROOT %y = f32[] negate(%x), a={1,2}, b="x, (", c=(3, [4, 5])"""
    program = module("%x = f32[] parameter(0)", line)
    assert program.entry.root.attributes == {"a": "{1,2}", "b": '"x, ("', "c": "(3, [4, 5])"}


MESH = (("data", 2), ("fsdp", 4), ("tensor", 3))


def groups_by_numpy(sizes, kept):
    """Devices that differ only along the axes `kept`, by an array of device numbers."""
    devices = np.arange(int(np.prod(sizes))).reshape(sizes)
    order = [a for a in range(len(sizes)) if a not in kept] + list(kept)
    size = int(np.prod([sizes[a] for a in kept]))
    return sorted(map(tuple, devices.transpose(order).reshape(-1, size).tolist()))


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(meshes, st.data())
def test_every_form_names_the_groups_that_numpy_finds(sizes, data):
    kept = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    total = int(np.prod(sizes))
    expected = groups_by_numpy(sizes, kept)
    size = len(expected[0])
    order = [a for a in range(len(sizes)) if a not in kept] + kept
    mesh = ",".join(f"'axis_{a}'={n}" for a, n in enumerate(sizes))
    for text in (
        "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in expected) + "}",
        f"[{total // size},{size}]<={str(sizes).replace(' ', '')}T({','.join(map(str, order))})",
        f"mesh[{mesh}] {{{','.join(f'{chr(39)}axis_{a}{chr(39)}' for a in kept)}}}",
    ):
        assert sorted(parse_groups(text, total)) == expected, text


@given(meshes, st.data())
def test_the_axes_of_a_group_are_those_it_was_made_over(sizes, data):
    kept = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    mesh = tuple((f"a{n}", size) for n, size in enumerate(sizes))
    spanned = axes_of(tuple(groups_by_numpy(sizes, kept)), mesh)
    assert spanned == tuple(f"a{n}" for n in kept if sizes[n] > 1)


def test_reordered_devices_are_looked_up():
    groups = parse_groups("mesh['x'=2,'y'=1,'z'=4], device_ids=([4,2]T(1,0)) {'z'}", 8)
    assert sorted(groups) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    groups = parse_groups("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}", 4)
    assert sorted(groups) == [(2, 0), (3, 1)]


def test_a_part_of_an_axis_is_cut_out_of_it():
    assert sorted(parse_groups("mesh['x'=8] {'x':(2)2}", 8)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    groups = parse_groups("mesh['x'=8] {'x':(1)4}", 8)
    assert axes_of(groups, (("x", 8),)) == ("x",)


def test_empty_braces_are_everybody():
    assert parse_groups("{}", 3) == ((0, 1, 2),)


def test_a_plain_iota_runs_in_order():
    assert parse_groups("[2,3]<=[6]", 6) == ((0, 1, 2), (3, 4, 5))


def test_a_group_that_is_no_block_of_the_mesh_has_no_axes():
    assert axes_of(((0, 4),), (("a", 2), ("b", 2), ("c", 2))) == ("a",)
    assert axes_of(((0, 3),), (("a", 2), ("b", 2))) is None


def test_pairs_span_the_axes_along_which_they_differ():
    ring = parse_groups("{{0,3},{3,6},{6,9},{9,0}}", 24)
    assert axes_of_pairs(ring, MESH) == ("fsdp",)
    assert axes_of_pairs(((0, 13),), MESH) == ("data", "tensor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("everyone", "replica groups 'everyone' have no known form"),
        ("[2,4]<=8", "replica groups '[2,4]<=8' have no known form"),
        ("{{0,1},{2,9}}", "replica groups '{{0,1},{2,9}}' name a device beyond the program's 4"),
        ("mesh[x=4] {'x'}", "replica groups: 'x=4' is not understood"),
        ("mesh['x'=4] {x}", "replica groups: 'x' is not understood"),
        ("mesh['x'=4], device_ids=([a]) {'x'}", "replica groups: '[a]' is not understood"),
    ],
)
def test_unknown_groups_raise(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_groups(text, 4)


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", False),
        ("{{0,4},{1,5},{2,6},{3,7}}", True),
        ("[2,4]<=[8]", False),
        ("[4,2]<=[2,4]T(1,0)", True),
        ("{}", True),
        ("{{3,4}}", True),  # a pair of a collective-permute
    ],
)
def test_a_group_whose_members_lie_in_two_hosts_of_four_leaves_the_host(text, leaves):
    assert leaves_the_domain(text, 8, 4) is leaves


def test_what_a_pallas_kernel_says_of_itself_may_stand_on_lines_of_its_own():
    said = '{\n"xprof_metadata":"{\\"block_q\\": 512}"\n}'
    text = (
        "HloModule step, is_scheduled=true\n\nENTRY %main (x: f32[2]) -> f32[2] {\n"
        "  %x = f32[2]{0} parameter(0)\n"
        '  ROOT %call = f32[2]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        f'frontend_attributes={{kernel_metadata={said}}}, metadata={{op_name="jit(step)/pallas_call"}}\n}}\n'
    )
    assert parse_program(text).entry.root.op_name == "jit(step)/pallas_call"
