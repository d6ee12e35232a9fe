import pytest

from meshwright.hlo import PHASES, ProgramPhases


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("jit(step)/jvp()/while/body/dot_general", "forward"),
        ("jit(step)/transpose(jvp())/dot_general", "backward"),
        ("jit(step)/transpose(jvp(mlp))/checkpoint/rematted_computation/dot_general", "recompute"),
        ("jit(step)/transpose(jvp())/rematted_computation/dot_general", "recompute"),
        ("jit(step)/optimizer/mul", "optimizer"),
        ("jit(step)/optimizer", "optimizer"),
        ("jit(step)/my_optimizer/mul", "other"),
        ("jit(step)/metrics/add", "other"),
    ],
)
def test_a_path_tells_the_phase(module, name, phase):
    program = module(
        '%x = f32[] parameter(0), metadata={op_name="x"}',
        '%d = f32[] negate(%x), metadata={op_name="jit(step)/jvp()/neg"}',
        f'ROOT %r = f32[] negate(%d), metadata={{op_name="{name}"}}',
    )
    assert ProgramPhases(program).of(program.entry, program.entry.root) == phase
    assert phase in PHASES


def test_a_program_that_takes_no_gradient_is_all_forward(module):
    program = module('ROOT %x = f32[] constant(0), metadata={op_name="jit(f)/dot_general"}')
    assert ProgramPhases(program).of(program.entry, program.entry.root) == "forward"


def chain(module, first, last):
    return module(
        f'%a = f32[] constant(0), metadata={{op_name="{first}"}}',
        "%b = f32[] copy(%a)",
        '%c = f32[] negate(%b), metadata={op_name="neg.1"}',
        "%d = f32[] copy(%c)",
        f'ROOT %e = f32[] negate(%d), metadata={{op_name="{last}"}}',
    )


@pytest.mark.parametrize(
    ("first", "last", "phase"),
    [
        ("jit(f)/jvp()/a", "jit(f)/jvp()/b", "forward"),
        ("jit(f)/jvp()/a", "jit(f)/transpose(jvp())/b", "backward"),
        ("jit(f)/transpose(jvp())/a", "jit(f)/optimizer/b", "backward"),
        ("jit(f)/jvp()/a", "jit(f)/x/rematted_computation/b", "recompute"),
        ("jit(f)/optimizer/a", "jit(f)/optimizer/b", "optimizer"),
        ("jit(f)/jvp(", "jit(f)/metrics/b", "forward"),
        ("jit(f)/optimizer/a", "jvp(", "other"),
    ],
)
def test_a_nameless_instruction_takes_its_neighbours_phase(module, first, last, phase):
    program = chain(module, first, last)
    assert ProgramPhases(program).of(program.entry, program.entry.by_name["c"]) == phase


def test_a_nameless_instruction_has_a_named_user_or_else_a_named_maker(module):
    program = chain(module, "jit(f)/jvp(mlp)/a", "jit(f)/transpose(jvp(mlp))/b")
    phases, entry = ProgramPhases(program), program.entry
    for name in ("b", "c", "d"):
        assert phases.named_near(entry, entry.by_name[name]) is entry.by_name["e"]
    assert phases.named_near(entry, entry.root) is entry.by_name["a"]


def test_a_value_that_xla_computes_again_is_recomputation(module):
    name = 'metadata={op_name="jit(f)/transpose(jvp())/dot_general"}'
    program = module(
        f"%x = f32[] constant(0), {name}",
        f"%gemm.1.remat = f32[] negate(%x), {name}",  # the only one left of gemm.1: moved, not repeated
        f"%gemm.2 = f32[] negate(%x), {name}",
        f"%gemm.2.remat = f32[] negate(%x), {name}",
        f"%gemm.2.remat2 = f32[] negate(%x), {name}",
        f"%gemm.2.remat.1.remat4 = f32[] negate(%x), {name}",
        f"%gemm.2.clone = f32[] negate(%x), {name}",
        f"ROOT %rematch = f32[] negate(%x), {name}",
    )
    phases = ProgramPhases(program)
    found = [phases.of(program.entry, i) for i in program.entry.instructions]
    assert found == ["backward"] * 3 + ["recompute"] * 3 + ["backward"] * 2


def test_an_argument_and_a_name_of_xlas_own_are_no_path(module):
    program = chain(module, "state['w']", "jit(f)/b")
    assert [i.has_path for i in program.entry.instructions] == [False, False, False, False, True]


def test_a_nameless_inside_of_a_fusion_is_part_of_the_fusion(samples):
    program = samples.program("cruncher-8xCPU")
    phases = ProgramPhases(program)
    heads = [i for i in program.entry.instructions if i.opcode == "dot" and not i.op_name]
    assert [phases.of(program.entry, i) for i in heads] == ["forward", "backward"]
