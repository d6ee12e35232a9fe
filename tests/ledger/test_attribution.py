"""Whose a value is: by hand on real programs, and rule by rule on small ones."""

import dataclasses

import pytest

from meshwright.compiler import Argument
from meshwright.ledger import LiveRange, LiveValue, Owners

WEIGHTS = 2 * 2048 * 512 + 4 * (4 * 512 * 512 + 2 * 512 * 1024)  # of the sample Transformer


def value(name, shape="f32[4,8]{1,0}", index="{}"):
    return LiveValue(name=name, index=index, num_bytes=128, offset_bytes=0, shape=shape)


def argument(path, role, shape):
    return Argument(path=path, role=role, shape=shape, dtype="float32", device_bytes=0, replicated=True)


def owner(program, name, shape="f32[4,8]{1,0}", *, last=9, ours=True, index="{}"):
    roles = {0: ("parameters", "params['w']"), 1: ("batch", "batch")}
    arguments = (argument("params['w']", "parameters", (4, 8)), argument("batch", "batch", (16, 8)))
    ranges = {
        (i.name, "{}"): LiveRange(first=place, last=place)
        for place, (_, i) in enumerate(program.instructions())
    }
    ranges[name, index] = LiveRange(first=0, last=last)
    owners = Owners(program, roles, arguments, ranges, scopes_are_ours=ours)
    return owners.of(value(name, shape, index))


def step(module, *lines):
    """A program with a parameter `w` [4, 8], a batch [16, 8], the given lines, and something backward."""
    return module(
        "%w = f32[4,8]{1,0} parameter(0), metadata={op_name=\"params[\\'w\\']\"}",
        '%x = f32[16,8]{1,0} parameter(1), metadata={op_name="batch"}',
        *lines,
        '%late = f32[16,4]{1,0} negate(%x), metadata={op_name="jit(step)/transpose(jvp(up))/neg"}',
        "ROOT %out = f32[] constant(0)",
    )


def made(module, path, shape="f32[16,4]{1,0}", opcode="exponential(%x)"):
    return step(module, f'%v = {shape} {opcode}, metadata={{op_name="{path}"}}')


@pytest.mark.parametrize(
    ("path", "shape", "category", "certainty"),
    [
        ("jit(step)/jvp(up)/exp", "f32[16,4]{1,0}", "saved_activations", "named"),
        ("jit(step)/transpose(jvp(up))/exp", "f32[16,4]{1,0}", "activation_gradients", "named"),
        ("jit(step)/transpose(jvp(up))/dot_general", "f32[4,8]{1,0}", "gradients", "shape"),
        ("jit(step)/transpose(jvp(up))/dot_general", "bf16[8,1,4]{2,1,0}", "gradients", "shape"),
        ("jit(step)/transpose(jvp(up))/iota", "s32[4,8]{1,0}", "activation_gradients", "named"),
        ("jit(s)/checkpoint/rematted_computation/exp", "f32[16,4]{1,0}", "recomputed_activations", "named"),
        ("jit(step)/jvp(loss)/sub", "f32[16,100]{1,0}", "logits_and_loss", "named"),
        ("jit(step)/jvp(loss)/transpose(loss)/dot_general", "f32[4,8]{1,0}", "gradients", "shape"),
        ("jit(step)/optimizer/mul", "f32[4,8]{1,0}", "optimizer_temporaries", "named"),
        ("jit(step)/iota", "s32[16]{0}", "other", "fallback"),
    ],
)  # fmt: skip
def test_a_value_is_filed_by_its_path_and_shape(module, path, shape, category, certainty):
    found = owner(made(module, path, shape), "v", shape)
    assert (found.category, found.certainty) == (category, certainty)
    assert found.operation == path


def test_an_argument_is_its_role(module):
    found = owner(step(module), "w")
    assert (found.category, found.rule, found.certainty) == ("parameters", "an argument", "structural")
    assert found.operation == "params['w']"


def test_a_cast_parameter_is_a_gathered_parameter_whatever_its_phase(module):
    program = step(module, '%v = bf16[4,8]{1,0} convert(%w), metadata={op_name="jit(step)/jvp(up)/convert"}')
    found = owner(program, "v", "bf16[4,8]{1,0}")
    assert (found.category, found.certainty) == ("gathered_parameters", "structural")


def test_an_activation_that_dies_before_the_backward_pass_is_not_saved(module):
    program = made(module, "jit(step)/jvp(up)/exp")
    assert owner(program, "v", "f32[16,4]{1,0}", last=2).category == "forward_temporaries"
    assert owner(program, "v", "f32[16,4]{1,0}", last=3).category == "saved_activations"


def test_a_scope_loss_of_somebody_elses_program_says_nothing(module):
    program = made(module, "jit(step)/jvp(loss)/exp")
    assert owner(program, "v", "f32[16,4]{1,0}", ours=False).category == "saved_activations"


def test_bytes_of_a_library_call_are_a_workspace(module):
    program = step(
        module,
        '%v = (f32[16,4]{1,0}, u8[1024]{0}) custom-call(%x), custom_call_target="lib",'
        ' metadata={op_name="jit(step)/jvp(up)/dot_general"}',
    )
    assert owner(program, "v", "u8[1024]{0}", index="{1}").category == "workspaces"


def test_what_only_a_collective_uses_is_staging(module):
    program = step(
        module,
        "%v = f32[64]{0} exponential(%x)",
        '%sum = f32[64]{0} all-reduce(%v), metadata={op_name="jit(step)/transpose(jvp(up))/psum"}',
    )
    found = owner(program, "v", "f32[64]{0}")
    assert (found.category, found.certainty) == ("collective_staging", "structural")


@pytest.mark.parametrize(("last", "category"), [(3, "collective_staging"), (4, "saved_activations")])
def test_what_a_collective_makes_for_the_backward_pass_is_saved(module, last, category):
    named = 'metadata={op_name="jit(step)/jvp(up)/tanh"}'
    program = step(
        module,
        f"%y = f32[8,4]{{1,0}} tanh(%x), {named}",
        f"%v = f32[16,4]{{1,0}} all-gather(%y), replica_groups={{}}, dimensions={{0}}, {named}",
    )
    assert owner(program, "v", "f32[16,4]{1,0}", last=last).category == category


def test_a_nameless_value_inherits_the_phase_of_its_neighbours(module):
    program = step(
        module,
        "%v = f32[16,4]{1,0} exponential(%x)",
        '%y = f32[16,4]{1,0} negate(%v), metadata={op_name="jit(step)/transpose(jvp(up))/neg"}',
    )
    found = owner(program, "v", "f32[16,4]{1,0}")
    assert (found.category, found.certainty) == ("activation_gradients", "inherited")


def test_a_value_that_the_program_does_not_name_is_other(module):
    assert owner(step(module), "unheard-of").category == "other"


def test_gradients_of_the_sample_transformer_are_its_parameters_by_hand(samples):
    """Once accumulated, sharded over 8 devices in float32; before, each layer's own in bfloat16."""
    ledger = samples.ledger("transformer-8xH100").memory
    assert 4 * WEIGHTS // 8 <= ledger.by_category["gradients"] <= 4 * WEIGHTS // 8 + 2 * WEIGHTS


def test_gradients_of_the_sample_cruncher_are_its_parameters_by_hand(samples):
    ledger = samples.ledger("cruncher-8xH100").memory
    assert ledger.by_category["gradients"] == ledger.by_category["parameters"] == 4 * (2 * 1024**2 + 1024)


@pytest.mark.parametrize("name", ["transformer-8xH100", "transformer-8xH100-jax-0.12", "transformer-8xCPU"])
def test_hardly_a_byte_is_without_an_owner(samples, name):
    memory = samples.ledger(name).memory
    assert memory.by_category.get("other", 0) < 0.03 * memory.reserved_bytes
    unsure = sum(memory.by_certainty.get(kind, 0) for kind in ("inherited", "fallback"))
    assert unsure < 0.15 * memory.reserved_bytes


def test_the_stack_of_layer_inputs_is_saved_whatever_names_the_loop(samples):
    ledger = samples.ledger("transformer-8xH100").memory
    stack = next(b for b in ledger.buffers if b.shape == "bf16[4,4,256,512]")
    assert stack.category == "saved_activations"


def test_a_foreign_programs_gradients_have_the_shape_of_any_floating_argument(samples):
    name = "cruncher-8xH100"
    compiled = samples.compiled(name)
    nameless = tuple(dataclasses.replace(a, role="arguments") for a in compiled.arguments)
    program = samples.program(name)
    roles = {int(p.literal): ("arguments", p.op_name) for p in program.entry.parameters}
    owners = Owners(program, roles, nameless, {}, scopes_are_ours=False)
    dot = next(
        i
        for _, i in program.instructions()
        if "transpose(jvp" in i.op_name and i.arrays[0].dims == (1024, 1024)
    )
    assert owners.of(value(dot.name, str(dot.arrays[0]))).category == "gradients"


def test_a_stack_that_the_forward_loop_fills_is_saved_while_it_is_filled(module):
    fill = (
        '%v = f32[9,4]{1,0} dynamic-update-slice(%w, %x, %w, %w), metadata={op_name="jit(step)/jvp(up)/dus"}'
    )
    program = step(module, fill)
    assert owner(program, "v", "f32[9,4]{1,0}", last=2).category == "saved_activations"
