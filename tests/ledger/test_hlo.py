import re

import pytest

from meshwright.hlo import Operand, parse_program

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
            assert len(computation.operand_shapes(instruction)) == len(instruction.operands)
            assert isinstance(instruction.backend_config, dict)


def test_a_loop_knows_its_body_condition_and_trip_count(samples):
    program = samples.program("transformer-8xH100")
    loops = [i for _, i in program.instructions() if i.opcode == "while"]
    assert [loop.trip_count for loop in loops] == [4, 4]
    for loop in loops:
        assert set(loop.called) == {"body", "condition"}
        assert program.computations[loop.called["condition"][0]].root.array.dtype == "pred"


def test_parameters_carry_the_argument_paths(samples):
    program = samples.program("transformer-8xH100")
    paths = {p.op_name for p in program.entry.parameters}
    assert paths == {a.path for a in samples.compiled("transformer-8xH100").arguments}


def test_a_source_line_is_the_innermost_frame(samples):
    program = samples.program("cruncher-8xH100")
    dot = next(i for _, i in program.instructions() if i.opcode == "dot")
    frames = program.stack(dot)
    assert program.source_line(dot) == str(frames[0])
    assert [f.function for f in frames[:2]] == ["cruncher.<locals>.loss", "cruncher.<locals>.step"]
    assert frames[0].file == "tests/ledger/fixtures/programs.py"
    assert frames[-1].function == "<module>"


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
        "%t = (f32[2]{0}, (f32[3]{0}, s8[4]{0})) parameter(0)",
        "ROOT %n = s8[4]{0} negate(%t#1#1)",
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
    assert program.entry.by_name["p"].array.memory_space == 1


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
    with pytest.raises(ValueError, match="%p: backend_config is no JSON object"):
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
